// SPDX-License-Identifier: Apache-2.0
// dW[m][e] = sum over pixels of dY[pixel][m] * X[pixel's element e], a matrix product over the pixels.
//
// cuDNN pads images to eight channels and spreads the sum over few blocks. Here each warp multiplies 16 pixels at a time: dY's rows
// come through a ring in shared memory of the warp's own, X's elements from the L1 straight into fragments. A block's sum is one
// part; a second kernel adds the parts, in order.

#include <algorithm>

#include "kernels/mma/multiply_slice.cuh"
#include "kernels/passes.h"
#include "kernels/ptx/memory.cuh"
#include "kernels/ptx/numbers.cuh"

namespace convpool::weight_gradient {

constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int kPixels = 16;  // of a step
constexpr int kStages = 3;
constexpr int kRowBytes = 2 * kChannels, kStageBytes = kPixels * kRowBytes, kWarpBytes = kStages * kStageBytes;
constexpr int kSumThreads = 1024;

// Four transposed 8 x 8 matrices of 16-byte rows: r[i] of lane 4g + t is rows 2t and 2t + 1 of column g of matrix i.
CONVPOOL_DEVICE void load_transposed(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

// An element of a filter: where it lies from the corner of the filter's window. The one behind the last is the bias: of ones.
struct Tap {
    int32_t y, x, channel;
    bool exists;
    uint32_t ones;  // two, or zeros
};

template <Precision kPrecision> CONVPOOL_DEVICE Tap tap_of(const Params &p, int element) {
    Tap tap;
    const int place = element / p.c;
    tap.exists = element < p.elements;
    tap.y = place / p.kw * p.dilation_h;
    tap.x = place % p.kw * p.dilation_w;
    tap.channel = element % p.c;
    tap.ones = element == p.elements ? (kPrecision == Precision::kF16 ? 0x3c003c00u : 0x3f803f80u) : 0;
    return tap;
}

// A lane's elements of X in a step: of each of its taps, those of pixels 2t, 2t + 1, 2t + 8 and 2t + 9.
template <int kTiles> struct Elements {
    uint32_t bits[4][2 * kTiles];
};

CONVPOOL_DEVICE bool is_below(int v, int size) { return static_cast<uint32_t>(v) < static_cast<uint32_t>(size); }

// kRows: the pixels of a step are neighbours in a row.
template <int kTiles, bool kRows>
CONVPOOL_DEVICE void gather(Elements<kTiles> &e, const Params &p, const Tap (&taps)[2 * kTiles], uint32_t first, int t) {
    uint32_t sample, place, row, column;
    auto at = [&](uint32_t pixel) {
        p.div_out_pixels.divmod(pixel, sample, place);
        p.div_out_w.divmod(place, row, column);
    };
    auto element = [&](uint32_t y, uint32_t x, int channel) {  // wraps around where X is padded
        return static_cast<const char *>(p.x) + 2 * uint64_t{((sample * p.h + y) * p.w + x) * p.c + channel};
    };
    if constexpr (kRows) {
        at(first);
        const int y = static_cast<int>(row) * p.stride_h - p.pad_h;
        const int x = static_cast<int>(column + 2 * t) * p.stride_w - p.pad_w;
        UNROLLED_FOR (int k = 0; k < 2 * kTiles; ++k) {
            const bool inside = taps[k].exists && is_below(y + taps[k].y, p.h);
            // Signed: left of the first column of the first row it lies in front of X.
            const int64_t start = (int64_t{static_cast<int>(sample) * p.h + y + taps[k].y} * p.w + x + taps[k].x) * p.c;
            const char *const from = static_cast<const char *>(p.x) + 2 * (start + taps[k].channel);
            UNROLLED_FOR (int i = 0; i < 4; ++i) {
                const int ahead = ((i & 1) + (i >> 1) * 8) * p.stride_w;
                e.bits[i][k] = load_bits_if(inside && is_below(x + taps[k].x + ahead, p.w), from + 2 * int64_t{ahead * p.c});
            }
        }
    } else {
        UNROLLED_FOR (int i = 0; i < 4; ++i) {
            const uint32_t pixel = first + 2 * t + (i & 1) + (i >> 1) * 8;
            at(pixel);
            const int y = static_cast<int>(row) * p.stride_h - p.pad_h, x = static_cast<int>(column) * p.stride_w - p.pad_w;
            UNROLLED_FOR (int k = 0; k < 2 * kTiles; ++k) {
                const bool inside = is_below(y + taps[k].y, p.h) && is_below(x + taps[k].x, p.w);
                const bool wanted = taps[k].exists && inside && pixel < p.pixels;
                e.bits[i][k] = load_bits_if(wanted, element(y + taps[k].y, x + taps[k].x, taps[k].channel));
            }
        }
    }
}

// This lane's chunks of a step's rows of dY: of rows lane / 8, 4 further on, and so forth.
struct Rows {
    const char *from;
    uint32_t to;
    uint32_t row;
    bool exists;
    int64_t apart;  // bytes from a row to the fourth after it

    CONVPOOL_DEVICE Rows(const Params &p, uint32_t first, int channel, int lane) {
        const int chunk = lane % 8;
        row = lane / 8;
        exists = channel + chunk * 8 < p.m;
        from = static_cast<const char *>(p.dy) + 2 * (int64_t{first + row} * p.m + channel + chunk * 8);
        to = row * kRowBytes + ((chunk ^ row) * 16);  // chunk c of row r is at c ^ (r % 8)
        apart = int64_t{8} * p.m;
    }
    // The rows from pixel `first` on to the stage, and zeros past the last pixel and channel; then on to the warp's next step.
    CONVPOOL_DEVICE void copy(const Params &p, uint32_t stage, uint32_t first) {
        UNROLLED_FOR (int i = 0; i < 4; ++i) {
            const bool valid = exists && first + row + 4 * i < p.pixels;
            copy_chunk(stage + ((to + i * 4 * kRowBytes) ^ (i % 2 * 64)), valid ? from + i * apart : p.dy, valid);
        }
        from += kWarps * 4 * apart;
    }
};

// The fragments of a step's elements: words of two pixels.
template <int kTiles>
CONVPOOL_DEVICE void pack(uint32_t (&a)[kTiles][4], const Elements<kTiles> &e, const Tap (&taps)[2 * kTiles]) {
    UNROLLED_FOR (int k = 0; k < kTiles; ++k)
        UNROLLED_FOR (int i = 0; i < 4; ++i) {  // rows g and g + 8, then the same of the later pixels
            const int tap = 2 * k + i % 2, pixel = i / 2 * 2;
            a[k][i] = e.bits[pixel][tap] | e.bits[pixel + 1][tap] << 16 | taps[tap].ones;
        }
}

// sums += elements x the rows of a stage.
template <Precision kPrecision, int kTiles>
CONVPOOL_DEVICE void multiply(float (&sums)[kTiles][kChannels / 8][4], const uint32_t (&a)[kTiles][4], uint32_t stage, int lane) {
    // This lane's row of ldmatrix: matrix i is pixels 8 (i % 2) on, chunk i / 2 of two.
    const uint32_t matrix_row = lane % 8 + (lane / 8 % 2) * 8, matrix_chunk = lane / 16;
    const uint32_t row = stage + matrix_row * kRowBytes;
    UNROLLED_FOR (int q = 0; q < kChannels / 16; ++q) {
        uint32_t b[4];
        load_transposed(b, row + (((2 * q + matrix_chunk) ^ (matrix_row % 8)) * 16));
        UNROLLED_FOR (int k = 0; k < kTiles; ++k) {
            mma<kPrecision>(sums[k][2 * q], a[k], b[0], b[1]);
            mma<kPrecision>(sums[k][2 * q + 1], a[k], b[2], b[3]);
        }
    }
}

// Half of the warps give their sums to the others until warp 0 has all. A warp's take kTiles * 4 KB of shared memory.
template <int kTiles> CONVPOOL_DEVICE void add_warps(float (&sums)[kTiles][kChannels / 8][4], float *shared, int warp, int lane) {
    constexpr int kSums = kTiles * (kChannels / 8) * 4;
    for (int half = kWarps / 2; half > 0; half /= 2) {
        __syncthreads();
        if (warp >= half && warp < 2 * half) {
            UNROLLED_FOR (int i = 0; i < kSums; ++i)
                shared[((warp - half) * kSums + i) * 32 + lane] = sums[i / (kSums / kTiles)][i / 4 % (kChannels / 8)][i % 4];
        }
        __syncthreads();
        if (warp < half) {
            UNROLLED_FOR (int i = 0; i < kSums; ++i)
                sums[i / (kSums / kTiles)][i / 4 % (kChannels / 8)][i % 4] += shared[(warp * kSums + i) * 32 + lane];
        }
    }
}

// A block's sums, as add_kernel takes them.
template <int kTiles> CONVPOOL_DEVICE void store_part(const Params &p, const float (&sums)[kTiles][kChannels / 8][4], int lane) {
    const int g = lane / 4, t = lane % 4;
    float *const out = p.sums + (int64_t{blockIdx.y} * p.parts + blockIdx.x) * kMaxElements * kChannels;
    UNROLLED_FOR (int k = 0; k < kTiles; ++k)
        UNROLLED_FOR (int f = 0; f < kChannels / 8; ++f)
            UNROLLED_FOR (int i = 0; i < 2; ++i) {
                float *const place = out + (16 * k + 8 * i + g) * kChannels + 8 * f + 2 * t;
                *reinterpret_cast<float2 *>(place) = make_float2(sums[k][f][2 * i], sums[k][f][2 * i + 1]);
            }
}

// kTiles: of 16 elements of a filter. Block x is the part, y the channel tile.
template <Precision kPrecision, int kTiles, bool kRows>
__global__ void __launch_bounds__(kThreads, 2) sum_kernel(const Params p) {
    __shared__ alignas(128) unsigned char memory[kWarps * kWarpBytes];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int channel = blockIdx.y * kChannels;
    const uint32_t ring = shared_address(memory) + warp * kWarpBytes;

    const uint64_t steps = (uint64_t{p.pixels} + kPixels - 1) / kPixels;
    const uint32_t begin = static_cast<uint32_t>(steps * blockIdx.x / p.parts) + warp;
    const uint32_t end = static_cast<uint32_t>(steps * (blockIdx.x + 1) / p.parts);
    Tap taps[2 * kTiles];
    UNROLLED_FOR (int k = 0; k < 2 * kTiles; ++k) taps[k] = tap_of<kPrecision>(p, k * 8 + g);
    float sums[kTiles][kChannels / 8][4] = {};
    Rows rows(p, begin * kPixels, channel, lane);

    UNROLLED_FOR (int s = 0; s < kStages - 1; ++s) {
        const uint32_t step = begin + s * kWarps;
        if (step < end) rows.copy(p, ring + s * kStageBytes, step * kPixels);
        copy_commit();
    }
    Elements<kTiles> next;
    if (begin < end) gather<kTiles, kRows>(next, p, taps, begin * kPixels, t);
    int stage = 0;
    for (uint32_t step = begin; step < end; step += kWarps) {
        uint32_t a[kTiles][4];
        pack<kTiles>(a, next, taps);
        const uint32_t ahead = step + (kStages - 1) * kWarps;
        int free = stage + kStages - 1;
        if (free >= kStages) free -= kStages;
        __syncwarp();  // all lanes have read the stage that is filled again
        if (ahead < end) rows.copy(p, ring + free * kStageBytes, ahead * kPixels);
        copy_commit();
        if (step + kWarps < end) gather<kTiles, kRows>(next, p, taps, (step + kWarps) * kPixels, t);
        copy_wait<kStages - 1>();
        __syncwarp();
        multiply<kPrecision, kTiles>(sums, a, ring + stage * kStageBytes, lane);
        if (++stage == kStages) stage = 0;
    }
    copy_wait<0>();

    add_warps<kTiles>(sums, reinterpret_cast<float *>(memory), warp, lane);
    if (warp == 0) store_part<kTiles>(p, sums, lane);
    let_next_kernel_start();
}

// Adds the parts. Block x is the element of the filter, the last one the bias if there is one; y is the channel tile.
template <class Element> __global__ void __launch_bounds__(kSumThreads) add_kernel(const Params p) {
    constexpr int kGroups = kSumThreads / kChannels;
    __shared__ float shared[kGroups][kChannels];
    const int channel = threadIdx.x % kChannels, group = threadIdx.x / kChannels;
    const float *const in = p.sums + int64_t{blockIdx.y} * p.parts * kMaxElements * kChannels + blockIdx.x * kChannels + channel;
    wait_for_previous_kernel();
    float sum = 0.f;
#pragma unroll 4
    for (int part = group; part < p.parts; part += kGroups) sum += in[int64_t{part} * kMaxElements * kChannels];
    shared[group][channel] = sum;
    __syncthreads();
    const int m = blockIdx.y * kChannels + channel;
    if (group != 0 || m >= p.m) return;
    UNROLLED_FOR (int i = 1; i < kGroups; ++i) sum += shared[i][channel];
    const bool is_bias = blockIdx.x == static_cast<uint32_t>(p.elements);
    Element *const out = static_cast<Element *>(is_bias ? p.db : p.dw);
    out[is_bias ? m : int64_t{m} * p.elements + blockIdx.x] = from_float<Element>(sum);
}

// out[c][taps - 1 - k][m] = factor * w[m][k][c]: a block turns a square of channels of one tap through shared memory.
template <class Element>
__global__ void __launch_bounds__(kThreads) turn_kernel(const Element *w, Element *out, int m, int c, float factor) {
    constexpr int kSide = 64, kRows = kThreads / kSide;
    __shared__ Element square[kSide][kSide + 4 / sizeof(Element)];  // a column's words are in banks of their own
    const int lane = threadIdx.x % kSide, row = threadIdx.x / kSide, taps = gridDim.z, tap = blockIdx.z;
    const int m0 = blockIdx.y * kSide, c0 = blockIdx.x * kSide;
    Element loaded[kSide / kRows];  // all loads before the first is used
    UNROLLED_FOR (int j = 0, i = row; j < kSide / kRows; ++j, i += kRows)
        if (m0 + i < m && c0 + lane < c) loaded[j] = w[(int64_t{m0 + i} * taps + tap) * c + c0 + lane];
    UNROLLED_FOR (int j = 0; j < kSide / kRows; ++j) square[row + j * kRows][lane] = loaded[j];
    __syncthreads();
    UNROLLED_FOR (int j = 0, i = row; j < kSide / kRows; ++j, i += kRows)
        if (c0 + i < c && m0 + lane < m)
            out[(int64_t{c0 + i} * taps + taps - 1 - tap) * m + m0 + lane] =
                from_float<Element>(factor * to_float(square[lane][i]));
}

namespace {

constexpr int64_t kMostParts = 256;   // two blocks on nearly all of an H200's multiprocessors
constexpr int64_t kPartPixels = 512;  // of a part at least: four steps of each warp

template <Precision kPrecision, class Element> cudaError_t launch_of(const Params &p, bool overlap, cudaStream_t stream) {
    const unsigned tiles = static_cast<unsigned>((p.m + kChannels - 1) / kChannels);
    const int elements = p.elements + (p.db != nullptr);
    const bool rows = p.out_w % kPixels == 0;
    auto kernel = rows ? sum_kernel<kPrecision, 2, true> : sum_kernel<kPrecision, 2, false>;
    if (elements <= 16) kernel = rows ? sum_kernel<kPrecision, 1, true> : sum_kernel<kPrecision, 1, false>;
    const cudaError_t error = queue({dim3(static_cast<unsigned>(p.parts), tiles), kThreads, stream}, kernel, p);
    if (error != cudaSuccess) return error;
    return queue({dim3(static_cast<unsigned>(elements), tiles), kSumThreads, stream, overlap}, add_kernel<Element>, p);
}

}  // namespace

int32_t parts_of(int64_t pixels) { return static_cast<int32_t>(std::min(kMostParts, (pixels + kPartPixels - 1) / kPartPixels)); }

cudaError_t launch(Params p, Precision precision, bool overlap, cudaStream_t stream) {
    p.div_out_w = FastDiv(p.out_w);
    p.div_out_pixels = FastDiv(p.out_pixels);
    return precision == Precision::kF16 ? launch_of<Precision::kF16, __half>(p, overlap, stream)
                                        : launch_of<Precision::kBF16, __nv_bfloat16>(p, overlap, stream);
}

cudaError_t turn(const void *w, void *out, int64_t m, int64_t c, int64_t taps, convpool_dtype dtype, float factor,
                 cudaStream_t stream) {
    const dim3 grid(static_cast<unsigned>((c + 63) / 64), static_cast<unsigned>((m + 63) / 64), static_cast<unsigned>(taps));
    return with_element(dtype, [&](auto element) {
        using Element = decltype(element);
        return queue({grid, kThreads, stream}, turn_kernel<Element>, static_cast<const Element *>(w), static_cast<Element *>(out),
                     m, c, factor);
    });
}

}  // namespace convpool::weight_gradient

// SPDX-License-Identifier: Apache-2.0
// The passes before an implicit GEMM; first what they share: blocks, and stores of box means in the GEMM's number format.

#include <algorithm>
#include <type_traits>

#include "kernels/passes.h"
#include "kernels/prologue/prologue.cuh"
#include "kernels/tile/chunk.cuh"

namespace convpool {
namespace prepasses {

// The precision whose chunks hold an element type as it is: floats are not rounded.
template <class Element>
constexpr Precision kChunked = std::is_same_v<Element, __half>  ? Precision::kF16
                               : std::is_same_v<Element, float> ? Precision::kTF32x3
                                                                : Precision::kBF16;

constexpr int kThreads = 256;

// Stores a chunk, of those of all pixels the one at `position`, in the format asked for; other types than fp32 have one.
template <class Element> CONVPOOL_DEVICE void store_chunk(void *out, int64_t position, NumberFormat format, const uint4 &v) {
    uint4 *const to = static_cast<uint4 *>(out) + position;
    if (sizeof(Element) == 2 || format == NumberFormat::kAsIs) {
        *to = v;
    } else if (format == NumberFormat::kTF32) {
        *to = {round_to_tf32(v.x), round_to_tf32(v.y), round_to_tf32(v.z), round_to_tf32(v.w)};
    } else {
        constexpr int kBig = kSplitChannels / 4;  // chunks of a pixel are a multiple of it
        uint4 *const place = to + (position - position % kBig);
        uint4 big, small;
        split_tf32(v.x, big.x, small.x);
        split_tf32(v.y, big.y, small.y);
        split_tf32(v.z, big.z, small.z);
        split_tf32(v.w, big.w, small.w);
        place[0] = big;
        place[kBig] = small;
    }
}

constexpr int kStrip = 4;   // rows of means that a thread makes of a column
constexpr int kAtOnce = 4;  // places of windows whose loads are under way together: a window of 2x2, four rows of a copy

// Weights of filter_fused's larger kernel, or copies of weights in the implicit GEMM's format.
// A block makes a row of one output channel at a time. Fused tap (i, j) is the sum over the taps (a, b) and window places
// (u, v) with a * tap_step + u * box dilation = i * fused_dilation, summed in fp32 and rounded once.
template <class Element> __global__ void __launch_bounds__(kThreads) fuse_weights_kernel(const __grid_constant__ WeightParams p) {
    constexpr int kPerChunk = 16 / sizeof(Element);
    const Element *w = static_cast<const Element *>(p.w);
    Element *out = static_cast<Element *>(p.out);
    const int channels = p.chunks * kPerChunk, row = p.fused_h * p.fused_w * channels;
    const int m = blockIdx.y;
    for (int item = blockIdx.x * kThreads + threadIdx.x; item < row; item += gridDim.x * kThreads) {
        const int tap = item / channels, c = item - tap * channels;
        const int y = tap / p.fused_w * p.fused_dilation_h, x = tap % p.fused_w * p.fused_dilation_w;
        float sum = 0.f;
        // Taps and window places that fall on this fused tap; past W's channels the sum stays zero.
        if (c < p.c && p.phases) {
            const TapRange rows = p.rows.summed(tap / p.fused_w), columns = p.columns.summed(tap % p.fused_w);
            for (int a = rows.begin; a < rows.end; ++a)
                for (int b = columns.begin; b < columns.end; ++b)
                    sum += to_float(w[((static_cast<int64_t>(m) * p.kh + a) * p.kw + b) * p.c + c]);
            sum *= p.columns.factor(tap % p.fused_w);
        } else if (c < p.c) {
            for (int a = 0; a < p.kh; ++a) {
                const int u = y - a * p.tap_step_h;
                if (u < 0 || u % p.box.dilation_h != 0 || u / p.box.dilation_h >= p.box.ph) continue;
                for (int b = 0; b < p.kw; ++b) {
                    const int v = x - b * p.tap_step_w;
                    if (v < 0 || v % p.box.dilation_w != 0 || v / p.box.dilation_w >= p.box.pw) continue;
                    sum += to_float(w[((static_cast<int64_t>(m) * p.kh + a) * p.kw + b) * p.c + c]);
                }
            }
            if (p.box.count != 1.f) sum = mean_of(sum, p.box);
        }
        if constexpr (sizeof(Element) == 4) {
            if (p.format != NumberFormat::kAsIs) {
                uint32_t big, small;
                split_tf32(__float_as_uint(sum), big, small);
                if (p.format == NumberFormat::kTF32) {
                    out[static_cast<int64_t>(m) * row + item] = __uint_as_float(big);
                } else {
                    // The big numbers of kSplitChannels channels, then their small ones.
                    const int group = c / kSplitChannels * kSplitChannels;
                    float *const place = out + (static_cast<int64_t>(m) * row + tap * channels + group) * 2 + (c - group);
                    place[0] = __uint_as_float(big);
                    place[kSplitChannels] = __uint_as_float(small);
                }
                continue;
            }
        }
        out[static_cast<int64_t>(m) * row + item] = from_float<Element>(sum);
    }
}

// The same for phases, of weights in whole chunks: a thread makes a chunk of a row of taps.
template <class Element>
__global__ void __launch_bounds__(kThreads) merge_phases_kernel(const __grid_constant__ WeightParams p, uint32_t items) {
    constexpr Precision kPrecision = kChunked<Element>;
    constexpr int kPerChunk = Traits<kPrecision>::kPerChunk;
    const uint32_t item = blockIdx.x * kThreads + threadIdx.x;
    if (item >= items) return;
    const uint32_t chunk = item % p.chunks, place = item / p.chunks, row = place % p.fused_h, m = place / p.fused_h;
    const TapRange rows = p.rows.summed(row);
    const uint4 *const w = static_cast<const uint4 *>(p.w) + static_cast<int64_t>(m) * p.kh * p.kw * p.chunks + chunk;
    for (int column = 0; column < p.fused_w; ++column) {
        const TapRange columns = p.columns.summed(column);
        float sum[kPerChunk] = {}, value[kPerChunk];
        for (int a = rows.begin; a < rows.end; ++a)
            for (int b = columns.begin; b < columns.end; ++b) {
                unpack_chunk<kPrecision>(w[(a * p.kw + b) * p.chunks], value);
                UNROLLED_FOR (int i = 0; i < kPerChunk; ++i) sum[i] += value[i];
            }
        UNROLLED_FOR (int i = 0; i < kPerChunk; ++i) sum[i] *= p.columns.factor(column);
        const int64_t at = (static_cast<int64_t>(place) * p.fused_w + column) * p.chunks + chunk;
        store_chunk<Element>(p.out, at, p.format, pack_chunk<kPrecision>(sum));
    }
}

// 2x2 windows one apart over chunked channels last: a thread makes one chunk of a strip. A row's pair sum serves two windows,
// and all loads are under way before the first is used.
template <class Element, PrologueForm kForm>
__global__ void __launch_bounds__(kThreads) box_pairs_kernel(const __grid_constant__ BoxMeanParams p, uint32_t items) {
    constexpr Precision kPrecision = kChunked<Element>;
    constexpr int kPerChunk = Traits<kPrecision>::kPerChunk;
    wait_for_previous_kernel();
    let_next_kernel_start();
    const uint32_t item = blockIdx.x * kThreads + threadIdx.x;
    if (item >= items) return;
    uint32_t rest, chunk, column, strip, n;
    p.div_chunks.divmod(item, rest, chunk);
    p.div_out_w.divmod(rest, rest, column);
    p.div_strips.divmod(rest, n, strip);
    // The strip's first window begins here; it may lie outside X.
    const int y0 = strip * kStrip - p.box.pad_h, x0 = static_cast<int>(column) - p.box.pad_w;
    const bool left = static_cast<uint32_t>(x0) < static_cast<uint32_t>(p.w);
    const bool right = static_cast<uint32_t>(x0 + 1) < static_cast<uint32_t>(p.w);
    const uint4 *x = static_cast<const uint4 *>(p.x);
    uint4 loaded[kStrip + 1][2];  // (row of the strip and one below, left and right pixel)
    UNROLLED_FOR (int i = 0; i <= kStrip; ++i) {
        const bool inside = static_cast<uint32_t>(y0 + i) < static_cast<uint32_t>(p.h);
        const int64_t at = ((static_cast<int64_t>(n) * p.h + y0 + i) * p.w + x0) * p.chunks + chunk;
        loaded[i][0] = inside && left ? x[at] : uint4{0, 0, 0, 0};
        loaded[i][1] = inside && right ? x[at + p.chunks] : uint4{0, 0, 0, 0};
    }
    ChunkPrologue<kPrecision, kForm> f;
    if constexpr (kForm != PrologueForm::kNone) f.load(p.prologue, chunk * kPerChunk, p.c, n);
    // v = f of a pixel of row i; zeros outside X stay.
    auto unpack = [&](int i, int side, float (&v)[kPerChunk]) {
        unpack_chunk<kPrecision>(loaded[i][side], v);
        if constexpr (kForm != PrologueForm::kNone)
            if (static_cast<uint32_t>(y0 + i) < static_cast<uint32_t>(p.h) && (side == 0 ? left : right)) f.apply(p.prologue, v);
    };
    // Walk down: above is the pair sum of the row before, below that of this row.
    float above[kPerChunk], below[kPerChunk], other[kPerChunk];
    unpack(0, 0, above);
    unpack(0, 1, other);
    UNROLLED_FOR (int j = 0; j < kPerChunk; ++j) above[j] += other[j];
    UNROLLED_FOR (int i = 0; i < kStrip; ++i) {
        unpack(i + 1, 0, below);
        unpack(i + 1, 1, other);
        UNROLLED_FOR (int j = 0; j < kPerChunk; ++j) {
            below[j] += other[j];
            other[j] = (above[j] + below[j]) * 0.25f;
            above[j] = below[j];
        }
        const int y = strip * kStrip + i;
        if (y < p.out_h)
            store_chunk<Element>(p.out, ((static_cast<int64_t>(n) * p.out_h + y) * p.out_w + column) * p.chunks + chunk, p.format,
                                 pack_chunk<kPrecision>(other));
    }
}

// Any windows: a thread makes one chunk of one pixel, kAtOnce places of the window at a time.
template <class Element, PrologueForm kForm>
__global__ void __launch_bounds__(kThreads) box_mean_kernel(const __grid_constant__ BoxMeanParams p, int64_t items) {
    constexpr Precision kPrecision = kChunked<Element>;
    constexpr int kPerChunk = Traits<kPrecision>::kPerChunk;
    wait_for_previous_kernel();
    let_next_kernel_start();
    const Element *x = static_cast<const Element *>(p.x);
    const int64_t plane = static_cast<int64_t>(p.h) * p.w;
    for (int64_t item = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; item < items;
         item += static_cast<int64_t>(gridDim.x) * kThreads) {
        uint32_t chunk, n, oy, ox, rest;
        p.div_chunks.divmod(static_cast<uint32_t>(item), rest, chunk);
        p.div_out_w.divmod(rest, rest, ox);
        p.div_out_h.divmod(rest, n, oy);
        const int c = chunk * kPerChunk;
        ChunkPrologue<kPrecision, kForm> f;
        if constexpr (kForm != PrologueForm::kNone) f.load(p.prologue, c, p.c, n);
        float sum[kPerChunk] = {};
        const int y0 = static_cast<int>(oy) * p.box.stride_h - p.box.pad_h;
        const int x0 = static_cast<int>(ox) * p.box.stride_w - p.box.pad_w, window = p.box.ph * p.box.pw;
        int u = 0, v = 0;  // the place in the window to load next
        for (int t = 0; t < window; t += kAtOnce) {
            bool inside[kAtOnce];
            const Element *at[kAtOnce];
            uint4 loaded[kAtOnce];
            // Start loads of kAtOnce places, then add them up: one wait for memory instead of four.
            UNROLLED_FOR (int j = 0; j < kAtOnce; ++j) {
                const int y = y0 + u * p.box.dilation_h, column = x0 + v * p.box.dilation_w;
                inside[j] = t + j < window && static_cast<uint32_t>(y) < static_cast<uint32_t>(p.h) &&
                            static_cast<uint32_t>(column) < static_cast<uint32_t>(p.w);
                at[j] = x + (n * plane + static_cast<int64_t>(y) * p.w + column) * p.c + c;
                if (p.x_chunked && inside[j]) loaded[j] = *reinterpret_cast<const uint4 *>(at[j]);
                if (++v == p.box.pw) {
                    v = 0;
                    ++u;
                }
            }
            UNROLLED_FOR (int j = 0; j < kAtOnce; ++j) {
                if (!inside[j]) continue;
                float value[kPerChunk];
                if (p.x_chunked) {
                    unpack_chunk<kPrecision>(loaded[j], value);
                } else {
                    UNROLLED_FOR (int i = 0; i < kPerChunk; ++i) value[i] = c + i < p.c ? to_float(at[j][i]) : 0.f;
                }
                if constexpr (kForm != PrologueForm::kNone) f.apply(p.prologue, value);
                UNROLLED_FOR (int i = 0; i < kPerChunk; ++i) sum[i] += value[i];
            }
        }
        if (p.box.count != 1.f) {
            UNROLLED_FOR (int i = 0; i < kPerChunk; ++i) sum[i] = mean_of(sum[i], p.box);
        }
        store_chunk<Element>(p.out, item, p.format, pack_chunk<kPrecision>(sum));
    }
}

// Box means of a channels-first X are made by quads, four channels of a pixel: a chunk of floats, half of one of 16-bit types.
CONVPOOL_DEVICE void store_quad(void *out, int64_t position, NumberFormat format, const uint4 &v) {
    store_chunk<float>(out, position, format, v);
}
CONVPOOL_DEVICE void store_quad(void *out, int64_t position, NumberFormat, const uint2 &v) {
    static_cast<uint2 *>(out)[position] = v;
}

// kStrip rows of means of one quad and column, from the row of X at y0 and the column at x0 on.
template <class Element, PrologueForm kForm> struct QuadStrip {
    using Loaded = Element[4];
    using Sum = float[4];

    const BoxMeanParams &p;
    const int channels, y0, x0;
    const Element *planes[4];  // for a channel that X lacks the last it has; its means become zero
    float scale[4], shift[4];

    CONVPOOL_DEVICE QuadStrip(const BoxMeanParams &params, int n, int c, int strip, int column)
        : p(params), channels(p.c - c), y0(strip * kStrip * p.box.stride_h - p.box.pad_h),
          x0(column * p.box.stride_w - p.box.pad_w) {
        const Element *const image = static_cast<const Element *>(p.x) + static_cast<int64_t>(n) * p.c * (p.h * p.w);
        UNROLLED_FOR (int i = 0; i < 4; ++i) {
            const int channel = min(c + i, p.c - 1);
            planes[i] = image + channel * (p.h * p.w);
            asm("" : "+l"(planes[i]));  // or each load's address would be summed up from p.x
            __builtin_assume(__isGlobal(planes[i]));
            if constexpr (kForm != PrologueForm::kNone) {
                const int64_t at =
                    kForm == PrologueForm::kGeneral ? static_cast<int64_t>(n) * p.prologue.image_step + channel : channel;
                scale[i] = channel_value<Element>(p.prologue.scale, at, 1.f);
                shift[i] = channel_value<Element>(p.prologue.shift, at, 0.f);
            }
        }
    }
    CONVPOOL_DEVICE bool row_inside(int y) const { return static_cast<uint32_t>(y) < static_cast<uint32_t>(p.h); }
    CONVPOOL_DEVICE bool column_inside(int at) const { return static_cast<uint32_t>(at) < static_cast<uint32_t>(p.w); }

    // Four channels of a pixel of X's plane, or zeros.
    CONVPOOL_DEVICE void load(Loaded &out, int pixel, bool inside) const {
        UNROLLED_FOR (int i = 0; i < 4; ++i) out[i] = inside ? planes[i][pixel] : from_float<Element>(0.f);
    }
    // sum += f of a pixel; of one outside X, zero.
    CONVPOOL_DEVICE void add(Sum &sum, const Loaded &loaded, bool inside) const {
        const uint32_t mask = inside ? ~0u : 0;  // no branch, which loads could not pass
        UNROLLED_FOR (int i = 0; i < 4; ++i) {
            float value = to_float(loaded[i]);
            if constexpr (kForm != PrologueForm::kNone)
                value = __uint_as_float(__float_as_uint(activate<kForm, Element>(fmaf(value, scale[i], shift[i]), p.prologue)) &
                                        mask);
            sum[i] += value;
        }
    }
    CONVPOOL_DEVICE Quad<Element> pack(Sum &mean) const {
        UNROLLED_FOR (int i = 0; i < 4; ++i) mean[i] = i < channels ? mean[i] : 0.f;
        return pack_quad(mean, Element{});
    }

    // 2x2 windows one apart: store(row, quad) of all rows. A row's pair sum serves two windows, and all loads are under way
    // before the first is used.
    template <class Store> CONVPOOL_DEVICE void pairs(Store store) const {
        const bool left = column_inside(x0), right = column_inside(x0 + 1);
        Loaded loaded[kStrip + 1][2];
        UNROLLED_FOR (int i = 0; i <= kStrip; ++i) {
            const int at = (y0 + i) * p.w + x0;
            load(loaded[i][0], at, row_inside(y0 + i) && left);
            load(loaded[i][1], at + 1, row_inside(y0 + i) && right);
        }
        Sum above = {};
        UNROLLED_FOR (int i = 0; i <= kStrip; ++i) {
            Sum below = {}, mean;
            add(below, loaded[i][0], row_inside(y0 + i) && left);
            add(below, loaded[i][1], row_inside(y0 + i) && right);
            UNROLLED_FOR (int j = 0; j < 4; ++j) {
                mean[j] = (above[j] + below[j]) * 0.25f;
                above[j] = below[j];
            }
            if (i > 0) store(i - 1, pack(mean));
        }
    }

    // Any windows: store(row, quad) of as many rows as an image has, up to kStrip.
    template <class Store> CONVPOOL_DEVICE void windows(Store store) const {
        static_assert(kStrip % kAtOnce == 0, "the last round has no row past the strip's");
        const int window = p.box.ph * p.box.pw;
        const int64_t places = static_cast<int64_t>(window) * min(kStrip, p.out_h);
        Sum sum = {};
        int u = 0, v = 0, y = y0, added = 0, row = 0;
#pragma unroll 1
        for (int64_t t = 0; t < places; t += kAtOnce) {
            bool inside[kAtOnce];
            Loaded loaded[kAtOnce];
            UNROLLED_FOR (int j = 0; j < kAtOnce; ++j) {
                const int at_y = y + u * p.box.dilation_h, at_x = x0 + v * p.box.dilation_w;
                inside[j] = t + j < places && row_inside(at_y) && column_inside(at_x);
                load(loaded[j], at_y * p.w + at_x, inside[j]);
                if (++v < p.box.pw) continue;
                v = 0;
                if (++u < p.box.ph) continue;
                u = 0;
                y += p.box.stride_h;
            }
            UNROLLED_FOR (int j = 0; j < kAtOnce; ++j) {
                add(sum, loaded[j], inside[j]);
                if (++added < window) continue;
                UNROLLED_FOR (int i = 0; i < 4; ++i)
                    if (p.box.count != 1.f) sum[i] = mean_of(sum[i], p.box);
                store(row++, pack(sum));
                added = 0;
                UNROLLED_FOR (int i = 0; i < 4; ++i) sum[i] = 0.f;
            }
        }
    }
};

// A block makes `across` neighbouring quads (a power of two up to 8) of kThreads / across walks, a walk being one column of a
// strip. A thread forms the means of one walk and quad, its neighbours those of the next walks, as X lies in memory; then it
// gets others through shared memory to store, its neighbours the next quads of the same pixels.
template <class Element, PrologueForm kForm, bool kPairs>
__global__ void __launch_bounds__(kThreads, 3) channels_first_kernel(const __grid_constant__ BoxMeanParams p, uint32_t walks,
                                                                     uint32_t quads, uint32_t groups, int across_log2) {
    constexpr uint32_t kLine = 128 / sizeof(Quad<Element>);  // quads that fill all banks
    __shared__ Quad<Element> means[kStrip][kThreads];
    wait_for_previous_kernel();
    let_next_kernel_start();
    const uint32_t across = 1u << across_log2, block_walks = kThreads >> across_log2;
    // Begins with the last image: its X, which was written last, is still in the L2, as the means of the first image will be when
    // the GEMM begins with them.
    const uint32_t block = gridDim.x - 1 - blockIdx.x;
    const uint32_t first_walk = block / groups * block_walks, first_quad = block % groups * across;
    // kLine walks of one quad, written at once, and kLine places in a row, read at once, meet in no bank.
    auto place = [&](uint32_t walk, uint32_t quad) {
        const uint32_t i = walk * across + quad;
        return i ^ (i / kLine & (across - 1));
    };
    auto exists = [&](uint32_t walk, uint32_t quad) { return first_walk + walk < walks && first_quad + quad < quads; };
    auto split = [&](uint32_t walk, uint32_t &n, uint32_t &strip, uint32_t &column) {
        p.div_out_w.divmod(first_walk + walk, walk, column);
        p.div_strips.divmod(walk, n, strip);
    };
    // Form: lanes run along walks, as X lies in memory.
    uint32_t n, strip, column;
    const uint32_t formed_walk = threadIdx.x % block_walks, formed_quad = threadIdx.x / block_walks;
    if (exists(formed_walk, formed_quad)) {
        split(formed_walk, n, strip, column);
        const uint32_t at = place(formed_walk, formed_quad);
        auto store = [&](int row, const Quad<Element> &quad) { means[row][at] = quad; };
        const QuadStrip<Element, kForm> of(p, n, (first_quad + formed_quad) * 4, strip, column);
        if constexpr (kPairs) of.pairs(store);
        else of.windows(store);
    }
    __syncthreads();
    // Store: lanes run along quads, as the means lie in memory.
    const uint32_t walk = threadIdx.x / across, quad = threadIdx.x % across, at = place(walk, quad);
    if (!exists(walk, quad)) return;
    split(walk, n, strip, column);
    const int64_t row = static_cast<int64_t>(p.out_w) * quads;
    int64_t position = (static_cast<int64_t>(n) * p.out_h + strip * kStrip) * row + column * quads + first_quad + quad;
    UNROLLED_FOR (int i = 0; i < kStrip; ++i, position += row)
        if (strip * kStrip + i < static_cast<uint32_t>(p.out_h)) store_quad(p.out, position, p.format, means[i][at]);
}

}  // namespace prepasses

using namespace prepasses;

namespace {

// body(a prologue's form as a type).
template <class Body> cudaError_t with_form(PrologueForm form, Body body) {
    switch (form) {
    case PrologueForm::kNone: return body(std::integral_constant<PrologueForm, PrologueForm::kNone>{});
    case PrologueForm::kRectifying: return body(std::integral_constant<PrologueForm, PrologueForm::kRectifying>{});
    default: return body(std::integral_constant<PrologueForm, PrologueForm::kGeneral>{});
    }
}

// Loads every kernel of an element type, which the first launch of each would do otherwise.
template <class Element, PrologueForm kForm> cudaError_t load() {
    cudaFuncAttributes attributes;
    cudaError_t error = cudaSuccess;
    for (auto kernel : {reinterpret_cast<const void *>(box_pairs_kernel<Element, kForm>),
                        reinterpret_cast<const void *>(box_mean_kernel<Element, kForm>),
                        reinterpret_cast<const void *>(channels_first_kernel<Element, kForm, true>),
                        reinterpret_cast<const void *>(channels_first_kernel<Element, kForm, false>),
                        reinterpret_cast<const void *>(fuse_weights_kernel<Element>),
                        reinterpret_cast<const void *>(merge_phases_kernel<Element>)})
        if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, kernel);
    return error;
}

}  // namespace

cudaError_t launch_box_mean(const BoxMeanParams &params, Precision precision, bool overlap, cudaStream_t stream) {
    const BoxMean &box = params.box;
    const bool pairs = box.ph == 2 && box.pw == 2 && box.stride_h == 1 && box.stride_w == 1 && box.dilation_h == 1 &&
                       box.dilation_w == 1 && (params.x_chunked || !params.x_channels_last);
    BoxMeanParams p = params;
    const int strips = (p.out_h + kStrip - 1) / kStrip;
    p.div_strips = FastDiv(strips);
    const int64_t walks = static_cast<int64_t>(p.n) * strips * p.out_w;
    const int64_t items = (pairs ? walks : static_cast<int64_t>(p.n) * p.out_h * p.out_w) * p.chunks;
    const bool quads_are_chunks = precision == Precision::kTF32 || precision == Precision::kTF32x3;
    const uint32_t quads = static_cast<uint32_t>(p.chunks) * (quads_are_chunks ? 1 : 2);
    // Neighbouring quads that a block makes: a power of two up to 8, no more than it takes for all.
    int across_log2 = 0;
    while (across_log2 < 3 && (1u << across_log2) < quads) ++across_log2;
    const uint32_t groups = (quads + (1u << across_log2) - 1) >> across_log2;
    int64_t blocks = (items + kThreads - 1) / kThreads;
    if (!p.x_channels_last) blocks = ((walks << across_log2) + kThreads - 1) / kThreads * groups;
    else if (!pairs) blocks = std::min<int64_t>(blocks, 1 << 20);
    const Launch launch{dim3(static_cast<unsigned>(blocks)), kThreads, stream, overlap};
    auto launch_with = [&](auto element, auto form) {
        using Element = decltype(element);
        constexpr PrologueForm kForm = decltype(form)::value;
        if (!p.x_channels_last) {
            const auto kernel =
                pairs ? channels_first_kernel<Element, kForm, true> : channels_first_kernel<Element, kForm, false>;
            return queue(launch, kernel, p, walks, quads, groups, across_log2);
        }
        if (pairs) return queue(launch, box_pairs_kernel<Element, kForm>, p, items);
        return queue(launch, box_mean_kernel<Element, kForm>, p, items);
    };
    return with_element(precision, [&](auto element) {
        return with_form(form_of(p.prologue), [&](auto form) { return launch_with(element, form); });
    });
}

cudaError_t load_passes(Precision precision, PrologueForm form) {
    return with_element(precision, [&](auto element) {
        return with_form(form, [&](auto known) { return load<decltype(element), decltype(known)::value>(); });
    });
}

cudaError_t launch_fuse_weights(const WeightParams &params, Precision precision, cudaStream_t stream) {
    const int per_chunk = precision == Precision::kF16 || precision == Precision::kBF16 ? 8 : 4;
    const int row = params.fused_h * params.fused_w * params.chunks * per_chunk;
    const int64_t items = int64_t{params.m} * params.fused_h * params.chunks;
    const bool chunked = params.phases && params.chunks * per_chunk == params.c && items <= UINT32_MAX - kThreads &&
                         reinterpret_cast<uintptr_t>(params.w) % 16 == 0;
    const dim3 grid = chunked ? dim3(static_cast<unsigned>((items + kThreads - 1) / kThreads))
                              : dim3((row + kThreads - 1) / kThreads, params.m);
    const Launch launch{grid, kThreads, stream};
    return with_element(precision, [&](auto element) {
        using Element = decltype(element);
        return chunked ? queue(launch, merge_phases_kernel<Element>, params, items)
                       : queue(launch, fuse_weights_kernel<Element>, params);
    });
}

}  // namespace convpool

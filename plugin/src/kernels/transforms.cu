// The small kernels around the implicit GEMM: box means (or a copy) to channels last, and weights of the fused kernel.
#include <type_traits>

#include "../launch.h"
#include "prologue.cuh"

namespace convpool {
namespace {

template <class Element> struct Chunked;
template <> struct Chunked<__half> { static constexpr Precision kPrecision = Precision::kF16; };
template <> struct Chunked<__nv_bfloat16> { static constexpr Precision kPrecision = Precision::kBF16; };
template <> struct Chunked<float> { static constexpr Precision kPrecision = Precision::kTF32x3; };  // no rounding

constexpr int kThreads = 256;

// Stores a chunk of a pixel in the format asked for; other types than fp32 have one.
template <class Element>
CONVPOOL_DEVICE void store_chunk(void *out, int64_t pixel, int chunks, int chunk, NumberFormat format,
                                 const float (&v)[16 / sizeof(Element)]) {
    uint4 *const to = static_cast<uint4 *>(out);
    const uint4 packed = pack_chunk<Chunked<Element>::kPrecision>(v);
    if constexpr (sizeof(Element) == 4) {
        if (format != NumberFormat::kAsIs) {
            uint4 big, small;
            split_tf32(packed.x, big.x, small.x);
            split_tf32(packed.y, big.y, small.y);
            split_tf32(packed.z, big.z, small.z);
            split_tf32(packed.w, big.w, small.w);
            if (format == NumberFormat::kTF32) {
                to[pixel * chunks + chunk] = big;
            } else {
                constexpr int kHalf = kHalfChannels / 4;
                uint4 *const place = to + (pixel * chunks + chunk / kHalf * kHalf) * 2 + chunk % kHalf;
                place[0] = big;
                place[kHalf] = small;
            }
            return;
        }
    }
    to[pixel * chunks + chunk] = packed;
}

template <class Element> CONVPOOL_DEVICE void load_elements(float (&out)[16 / sizeof(Element)], const Element *src,
                                                            int64_t step, int count) {
#pragma unroll
    for (int i = 0; i < 16 / static_cast<int>(sizeof(Element)); ++i)
        out[i] = i < count ? to_float(src[i * step]) : 0.f;
}

// 2x2 windows one apart over chunked channels last: a thread makes one chunk of kStrip rows of a column. A row's pair sum
// serves two windows, and all loads are under way before the first is used.
constexpr int kStrip = 4;

template <class Element, bool kPrologue> __global__ void __launch_bounds__(kThreads)
    box_pairs_kernel(const __grid_constant__ BoxMeanParams p, uint32_t items) {
    constexpr Precision kPrecision = Chunked<Element>::kPrecision;
    constexpr int kPerChunk = Traits<kPrecision>::kPerChunk;
    wait_for_previous_kernel();
    let_next_kernel_start();
    const uint32_t item = blockIdx.x * kThreads + threadIdx.x;
    if (item >= items) return;
    uint32_t rest, chunk, column, strip, n;
    p.div_chunks.divmod(item, rest, chunk);
    p.div_out_w.divmod(rest, rest, column);
    p.div_strips.divmod(rest, n, strip);
    const int y0 = strip * kStrip - p.box.pad_h, x0 = static_cast<int>(column) - p.box.pad_w;
    const bool left = static_cast<uint32_t>(x0) < static_cast<uint32_t>(p.w);
    const bool right = static_cast<uint32_t>(x0 + 1) < static_cast<uint32_t>(p.w);
    const uint4 *x = static_cast<const uint4 *>(p.x);
    uint4 loaded[kStrip + 1][2];
#pragma unroll
    for (int i = 0; i <= kStrip; ++i) {
        const bool inside = static_cast<uint32_t>(y0 + i) < static_cast<uint32_t>(p.h);
        const int64_t at = ((static_cast<int64_t>(n) * p.h + y0 + i) * p.w + x0) * p.chunks + chunk;
        loaded[i][0] = inside && left ? x[at] : uint4{0, 0, 0, 0};
        loaded[i][1] = inside && right ? x[at + p.chunks] : uint4{0, 0, 0, 0};
    }
    ChunkPrologue<kPrecision> f;
    if constexpr (kPrologue) f.load(p.prologue, chunk * kPerChunk, p.c);
    auto unpack = [&](int i, int side, float(&v)[kPerChunk]) {
        unpack_chunk<kPrecision>(loaded[i][side], v);
        if constexpr (kPrologue)
            if (static_cast<uint32_t>(y0 + i) < static_cast<uint32_t>(p.h) && (side == 0 ? left : right))
                f.apply(p.prologue, v);
    };
    float above[kPerChunk], below[kPerChunk], other[kPerChunk];
    unpack(0, 0, above);
    unpack(0, 1, other);
#pragma unroll
    for (int j = 0; j < kPerChunk; ++j) above[j] += other[j];
#pragma unroll
    for (int i = 0; i < kStrip; ++i) {
        unpack(i + 1, 0, below);
        unpack(i + 1, 1, other);
#pragma unroll
        for (int j = 0; j < kPerChunk; ++j) {
            below[j] += other[j];
            other[j] = (above[j] + below[j]) * 0.25f;
            above[j] = below[j];
        }
        const int y = strip * kStrip + i;
        if (y < p.out_h)
            store_chunk<Element>(p.out, (static_cast<int64_t>(n) * p.out_h + y) * p.out_w + column, p.chunks, chunk, p.format,
                                 other);
    }
}

// A thread makes one chunk of one pixel. For channels first, neighbouring threads take neighbouring pixels.
template <class Element, bool kPrologue> __global__ void __launch_bounds__(kThreads)
    box_mean_kernel(const __grid_constant__ BoxMeanParams p, int64_t items) {
    constexpr Precision kPrecision = Chunked<Element>::kPrecision;
    constexpr int kPerChunk = Traits<kPrecision>::kPerChunk;
    wait_for_previous_kernel();
    let_next_kernel_start();
    const Element *x = static_cast<const Element *>(p.x);
    const int64_t plane = static_cast<int64_t>(p.h) * p.w;
    for (int64_t item = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; item < items;
         item += static_cast<int64_t>(gridDim.x) * kThreads) {
        int chunk, n;
        uint32_t oy, ox, rest = static_cast<uint32_t>(item);
        if (p.x_channels_last) {
            uint32_t q, r;
            p.div_chunks.divmod(rest, q, r);
            chunk = r;
            p.div_out_w.divmod(q, rest, ox);
            p.div_out_h.divmod(rest, q, oy);
            n = q;
        } else {
            uint32_t q, r;
            p.div_out_w.divmod(rest, q, ox);
            p.div_out_h.divmod(q, rest, oy);
            p.div_chunks.divmod(rest, q, r);
            chunk = r;
            n = q;
        }
        const int c = chunk * kPerChunk;
        ChunkPrologue<kPrecision> f;
        if constexpr (kPrologue) f.load(p.prologue, c, p.c);
        float sum[kPerChunk] = {};
        auto add = [&](float(&value)[kPerChunk]) {
            if constexpr (kPrologue) f.apply(p.prologue, value);
#pragma unroll
            for (int i = 0; i < kPerChunk; ++i) sum[i] += value[i];
        };
        const int y0 = static_cast<int>(oy) * p.box.stride_h - p.box.pad_h;
        const int x0 = static_cast<int>(ox) * p.box.stride_w - p.box.pad_w;
        const int window = p.box.ph * p.box.pw;
        constexpr int kAtOnce = 4;  // loads of chunks under way together: a window of 2x2
        int u = 0, v = 0;
        for (int t = 0; t < window; t += kAtOnce) {
            bool inside[kAtOnce];
            int64_t pixel[kAtOnce];
            uint4 loaded[kAtOnce];
#pragma unroll
            for (int j = 0; j < kAtOnce; ++j) {
                const int y = y0 + u * p.box.dilation_h, column = x0 + v * p.box.dilation_w;
                inside[j] = t + j < window && static_cast<uint32_t>(y) < static_cast<uint32_t>(p.h) &&
                            static_cast<uint32_t>(column) < static_cast<uint32_t>(p.w);
                pixel[j] = static_cast<int64_t>(y) * p.w + column;
                if (p.x_chunked && inside[j]) loaded[j] = *reinterpret_cast<const uint4 *>(x + (n * plane + pixel[j]) * p.c + c);
                if (++v == p.box.pw) {
                    v = 0;
                    ++u;
                }
            }
#pragma unroll
            for (int j = 0; j < kAtOnce; ++j) {
                if (!inside[j]) continue;
                float value[kPerChunk];
                if (p.x_chunked)
                    unpack_chunk<kPrecision>(loaded[j], value);
                else if (p.x_channels_last)
                    load_elements<Element>(value, x + (n * plane + pixel[j]) * p.c + c, 1, p.c - c);
                else
                    load_elements<Element>(value, x + (static_cast<int64_t>(n) * p.c + c) * plane + pixel[j], plane, p.c - c);
                add(value);
            }
        }
        if (p.box.count != 1.f) {
#pragma unroll
            for (int i = 0; i < kPerChunk; ++i) sum[i] = mean_of(sum[i], p.box);
        }
        const int64_t pixel = (static_cast<int64_t>(n) * p.out_h + oy) * p.out_w + ox;
        store_chunk<Element>(p.out, pixel, p.chunks, chunk, p.format, sum);
    }
}

// A block makes a row of one output channel at a time. Fused tap (i, j) is the sum over the taps (a, b) and window places
// (u, v) with a * tap_step + u * box dilation = i * fused_dilation, summed in fp32 and rounded once.
template <class Element>
__global__ void __launch_bounds__(kThreads) fuse_weights_kernel(const __grid_constant__ WeightParams p) {
    constexpr int kPerChunk = 16 / sizeof(Element);
    const Element *w = static_cast<const Element *>(p.w);
    Element *out = static_cast<Element *>(p.out);
    const int channels = p.chunks * kPerChunk, row = p.fused_h * p.fused_w * channels;
    const int m = blockIdx.y;
    for (int item = blockIdx.x * kThreads + threadIdx.x; item < row; item += gridDim.x * kThreads) {
        const int tap = item / channels, c = item - tap * channels;
        const int y = tap / p.fused_w * p.fused_dilation_h, x = tap % p.fused_w * p.fused_dilation_w;
        float sum = 0.f;
        if (c < p.c) {
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
                    const int group = c / kHalfChannels * kHalfChannels;
                    float *const place = out + (static_cast<int64_t>(m) * row + tap * channels + group) * 2 + (c - group);
                    place[0] = __uint_as_float(big);
                    place[kHalfChannels] = __uint_as_float(small);
                }
                continue;
            }
        }
        out[static_cast<int64_t>(m) * row + item] = from_float<Element>(sum);
    }
}

template <class Element, bool kPrologue> cudaError_t load() {
    cudaFuncAttributes attributes;
    cudaError_t error = cudaFuncGetAttributes(&attributes, box_pairs_kernel<Element, kPrologue>);
    if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, box_mean_kernel<Element, kPrologue>);
    return error == cudaSuccess ? cudaFuncGetAttributes(&attributes, fuse_weights_kernel<Element>) : error;
}

}  // namespace

cudaError_t launch_box_mean(const BoxMeanParams &params, Precision precision, bool overlap, cudaStream_t stream) {
    const BoxMean &box = params.box;
    const bool pairs = params.x_chunked && box.ph == 2 && box.pw == 2 && box.stride_h == 1 && box.stride_w == 1 &&
                       box.dilation_h == 1 && box.dilation_w == 1;
    BoxMeanParams p = params;
    const int strips = (params.out_h + kStrip - 1) / kStrip;
    p.div_strips = FastDiv(strips);
    int64_t items = static_cast<int64_t>(params.n) * (pairs ? strips : params.out_h) * params.out_w * params.chunks;
    const int64_t blocks = (items + kThreads - 1) / kThreads;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(pairs || blocks < (1 << 20) ? blocks : (1 << 20)));
    config.blockDim = dim3(kThreads);
    config.stream = stream;
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    config.attrs = &attribute;
    config.numAttrs = overlap ? 1 : 0;
    auto launch_with = [&](auto element, auto prologue) {
        using Element = decltype(element);
        constexpr bool kPrologue = decltype(prologue)::value;
        if (pairs)
            return cudaLaunchKernelEx(&config, box_pairs_kernel<Element, kPrologue>, p, static_cast<uint32_t>(items));
        return cudaLaunchKernelEx(&config, box_mean_kernel<Element, kPrologue>, p, items);
    };
    auto launch = [&](auto element) {
        return is_present(p.prologue) ? launch_with(element, std::true_type{}) : launch_with(element, std::false_type{});
    };
    if (precision == Precision::kF16) return launch(__half{});
    if (precision == Precision::kBF16) return launch(__nv_bfloat16{});
    return launch(float{});
}

cudaError_t load_passes(Precision precision, bool prologue) {
    if (precision == Precision::kF16) return prologue ? load<__half, true>() : load<__half, false>();
    if (precision == Precision::kBF16) return prologue ? load<__nv_bfloat16, true>() : load<__nv_bfloat16, false>();
    return prologue ? load<float, true>() : load<float, false>();
}

cudaError_t launch_fuse_weights(const WeightParams &params, Precision precision, cudaStream_t stream) {
    const int per_chunk = precision == Precision::kF16 || precision == Precision::kBF16 ? 8 : 4;
    const int row = params.fused_h * params.fused_w * params.chunks * per_chunk;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3((row + kThreads - 1) / kThreads, params.m);
    config.blockDim = dim3(kThreads);
    config.stream = stream;
    if (precision == Precision::kF16) return cudaLaunchKernelEx(&config, fuse_weights_kernel<__half>, params);
    if (precision == Precision::kBF16) return cudaLaunchKernelEx(&config, fuse_weights_kernel<__nv_bfloat16>, params);
    return cudaLaunchKernelEx(&config, fuse_weights_kernel<float>, params);
}

}  // namespace convpool

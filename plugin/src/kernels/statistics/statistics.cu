// SPDX-License-Identifier: Apache-2.0
// Scale and shift by image of a prologue that normalizes X in groups of channels.
//
// Blocks take mean and squares of the groups in their pixels, and a warp for each group joins them. Numbers are summed less the
// block's first one, so that nothing cancels where they are alike and far from 0. The order of sums depends on the problem alone.

#include <algorithm>

#include "kernels/passes.h"
#include "kernels/tile/chunk.cuh"

namespace convpool::statistics {
namespace {

constexpr int kThreads = 256, kWarps = 4;
constexpr int kBlocks = 528;         // that share an image, or a batch: four for each multiprocessor of an H100
constexpr int kLeastPixels = 32;     // of a block
constexpr int kMostChannels = 4096;  // of the kernel for chunks: in shared memory

struct Moments {
    float mean, squares;  // sum of the squared differences from the mean
};

struct Params {
    const void *x, *scale, *shift;  // [c] each of W's type
    void *out_scale, *out_shift;    // [n, c]
    Moments *moments;               // [n, parts, groups]
    int64_t n, pixels, each;        // each: pixels of a part
    int32_t c, groups, parts;
    bool channels_last;
    float epsilon;

    CONVPOOL_DEVICE int64_t pixels_of(int part) const { return min(each, pixels - part * each); }
};

// A sum of squared differences, which rounding may have left below 0; NaN stays.
CONVPOOL_DEVICE float squares_of(float sum, float squared, float count) {
    const float squares = squared - sum * sum / count;
    return squares < 0.f ? 0.f : squares;
}

// X has the channels last in whole chunks: a block reads all channels of its pixels, a thread one chunk of every so many.
template <Precision P> __global__ void __launch_bounds__(kThreads) chunks_kernel(const __grid_constant__ Params p) {
    constexpr int kPerChunk = Traits<P>::kPerChunk;
    __shared__ float sums[2][kThreads][kPerChunk];
    extern __shared__ float channels[];  // means of all channels, then their squares
    const int part = blockIdx.x % p.parts, chunks = p.c / kPerChunk, tile = min(chunks, kThreads), rows = kThreads / tile;
    const int64_t image = blockIdx.x / p.parts, pixels = p.pixels_of(part);
    const uint4 *const x = static_cast<const uint4 *>(p.x) + (image * p.pixels + part * p.each) * chunks;
    const float count = static_cast<float>(pixels);
    for (int first = 0; first < chunks; first += tile) {
        const int row = threadIdx.x / tile, chunk = first + threadIdx.x % tile;
        const bool works = row < rows && chunk < chunks;
        float origin[kPerChunk], sum[kPerChunk] = {}, squared[kPerChunk] = {};
        if (works) {
            unpack_chunk<P>(x[chunk], origin);
#pragma unroll 4
            for (int64_t pixel = row; pixel < pixels; pixel += rows) {
                float v[kPerChunk];
                unpack_chunk<P>(x[pixel * chunks + chunk], v);
                UNROLLED_FOR (int i = 0; i < kPerChunk; ++i) {
                    const float d = v[i] - origin[i];
                    sum[i] += d;
                    squared[i] = fmaf(d, d, squared[i]);
                }
            }
        }
        __syncthreads();  // the sums before have been read
        UNROLLED_FOR (int i = 0; i < kPerChunk; ++i) sums[0][threadIdx.x][i] = sum[i], sums[1][threadIdx.x][i] = squared[i];
        __syncthreads();
        if (!works || row != 0) continue;
        for (int other = 1; other < rows; ++other)
            UNROLLED_FOR (int i = 0; i < kPerChunk; ++i) {
                sum[i] += sums[0][other * tile + threadIdx.x][i];
                squared[i] += sums[1][other * tile + threadIdx.x][i];
            }
        UNROLLED_FOR (int i = 0; i < kPerChunk; ++i) {
            channels[chunk * kPerChunk + i] = origin[i] + sum[i] / count;
            channels[p.c + chunk * kPerChunk + i] = squares_of(sum[i], squared[i], count);
        }
    }
    __syncthreads();
    const int of_group = p.c / p.groups;
    for (int group = threadIdx.x; group < p.groups; group += kThreads) {
        const float *const means = channels + group * of_group;
        float mean = 0.f, squares = 0.f;
        for (int c = 0; c < of_group; ++c) mean += (means[c] - means[0]) / of_group;
        mean += means[0];
        for (int c = 0; c < of_group; ++c) squares += means[p.c + c] + count * (means[c] - mean) * (means[c] - mean);
        p.moments[(image * p.parts + part) * p.groups + group] = {mean, squares};
    }
}

// X lies in any way: a block reads a group of its pixels.
template <Precision P> __global__ void __launch_bounds__(kThreads) elements_kernel(const __grid_constant__ Params p) {
    __shared__ float sums[2][kThreads / 32];
    const int group = blockIdx.x % p.groups, block = blockIdx.x / p.groups, part = block % p.parts, of_group = p.c / p.groups;
    const int64_t image = block / p.parts, pixels = p.pixels_of(part), begin = part * p.each;
    const auto *const x = static_cast<const typename Traits<P>::Element *>(p.x) + image * p.pixels * p.c;
    const int64_t channel_step = p.channels_last ? 1 : p.pixels, pixel_step = p.channels_last ? p.c : 1;
    const auto *const corner = x + group * of_group * channel_step + begin * pixel_step;
    const float origin = to_float(corner[0]);
    float sum = 0.f, squared = 0.f;
    for (int c = 0; c < of_group; ++c)
        for (int64_t pixel = threadIdx.x; pixel < pixels; pixel += kThreads) {
            const float d = to_float(corner[c * channel_step + pixel * pixel_step]) - origin;
            sum += d;
            squared = fmaf(d, d, squared);
        }
    sum = warp_sum(sum), squared = warp_sum(squared);
    if (threadIdx.x % 32 == 0) sums[0][threadIdx.x / 32] = sum, sums[1][threadIdx.x / 32] = squared;
    __syncthreads();
    if (threadIdx.x != 0) return;
    for (int warp = 1; warp < kThreads / 32; ++warp) sum += sums[0][warp], squared += sums[1][warp];
    const float count = static_cast<float>(pixels) * of_group;
    p.moments[block * int64_t{p.groups} + group] = {origin + sum / count, squares_of(sum, squared, count)};
}

// A warp joins a group's moments. The shift is of the rounded scale: what is rounded off does not meet the mean.
template <class Element> __global__ void __launch_bounds__(32 * kWarps) join_kernel(const __grid_constant__ Params p) {
    const int lane = threadIdx.x % 32, of_group = p.c / p.groups;
    const int64_t index = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32, image = index / p.groups, group = index % p.groups;
    if (image >= p.n) return;
    const Moments *const parts = p.moments + image * p.parts * p.groups + group;
    const float origin = parts[0].mean;
    float mean = 0.f, squares = 0.f;
    for (int part = lane; part < p.parts; part += 32)
        mean += (parts[int64_t{part} * p.groups].mean - origin) * (static_cast<float>(p.pixels_of(part)) / p.pixels);
    mean = origin + warp_sum(mean);
    for (int part = lane; part < p.parts; part += 32) {
        const Moments found = parts[int64_t{part} * p.groups];
        const float d = found.mean - mean;
        squares += found.squares + static_cast<float>(p.pixels_of(part)) * of_group * d * d;
    }
    const float variance = warp_sum(squares) / (static_cast<float>(p.pixels) * of_group);
    const float factor = 1.f / sqrtf(variance + p.epsilon);
    for (int64_t c = group * of_group + lane; c < (group + 1) * of_group; c += 32) {
        const Element scale = from_float<Element>(to_float(static_cast<const Element *>(p.scale)[c]) * factor);
        const float shift = fmaf(-mean, to_float(scale), to_float(static_cast<const Element *>(p.shift)[c]));
        static_cast<Element *>(p.out_scale)[image * p.c + c] = scale;
        static_cast<Element *>(p.out_shift)[image * p.c + c] = from_float<Element>(shift);
    }
}

// Calls `body` with a precision whose chunks hold the type as it is.
template <class Body> cudaError_t with_precision(int32_t dtype, Body body) {
    if (dtype == CONVPOOL_F16) return body(std::integral_constant<Precision, Precision::kF16>());
    if (dtype == CONVPOOL_BF16) return body(std::integral_constant<Precision, Precision::kBF16>());
    return body(std::integral_constant<Precision, Precision::kTF32x3>());
}

size_t array_bytes(const Problem &p) { return round_up_256(size_t(p.n) * p.c * p.element_bytes()); }

int64_t pixels_of_part(const Problem &p) {
    const int64_t parts = std::max<int64_t>(std::min(kBlocks / p.n, INT32_MAX / (p.n * p.prologue_groups)), 1);  // a grid's most
    return std::max<int64_t>((p.in_pixels() + parts - 1) / parts, kLeastPixels);
}
int64_t parts_of(const Problem &p) { return (p.in_pixels() + pixels_of_part(p) - 1) / pixels_of_part(p); }

}  // namespace

size_t bytes(const Problem &p) {
    if (p.prologue_groups == 0) return 0;
    // No less for a larger problem: no smaller one has more parts.
    const int64_t most = std::min(p.n * ((p.in_pixels() + kLeastPixels - 1) / kLeastPixels), std::max<int64_t>(kBlocks, p.n));
    return 2 * array_bytes(p) + round_up_256(sizeof(Moments) * most * p.prologue_groups);
}

cudaError_t load(const Problem &p) {
    cudaFuncAttributes attributes;
    return with_precision(p.x_dtype, [&](auto x) {
        cudaError_t error = cudaFuncGetAttributes(&attributes, chunks_kernel<decltype(x)::value>);
        if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, elements_kernel<decltype(x)::value>);
        return error != cudaSuccess ? error : with_element(p.w_dtype, [&](auto element) {
            return cudaFuncGetAttributes(&attributes, join_kernel<decltype(element)>);
        });
    });
}

cudaError_t launch(const Problem &p, convpool_tensors &tensors, void *memory, cudaStream_t stream) {
    char *const at = static_cast<char *>(memory);
    Params params{};
    params.x = tensors.x, params.scale = tensors.scale, params.shift = tensors.shift;
    params.out_scale = at, params.out_shift = at + array_bytes(p);
    params.moments = reinterpret_cast<Moments *>(at + 2 * array_bytes(p));
    params.n = p.n, params.pixels = p.in_pixels(), params.each = pixels_of_part(p);
    params.c = static_cast<int32_t>(p.c), params.groups = p.prologue_groups, params.parts = static_cast<int32_t>(parts_of(p));
    params.channels_last = p.x_channels_last, params.epsilon = p.prologue_epsilon;
    const bool chunked = p.x_channels_last && p.c % (16 / p.x_element_bytes()) == 0 && p.c <= kMostChannels &&
                         reinterpret_cast<uintptr_t>(tensors.x) % 16 == 0;
    const auto blocks = static_cast<unsigned>(p.n * params.parts), warps = static_cast<unsigned>(p.n * params.groups);
    const cudaError_t error = with_precision(p.x_dtype, [&](auto x) {
        if (!chunked) return queue({dim3(blocks * params.groups), kThreads, stream}, elements_kernel<decltype(x)::value>, params);
        return queue({dim3(blocks), kThreads, stream, false, 2 * sizeof(float) * p.c}, chunks_kernel<decltype(x)::value>, params);
    });
    if (error != cudaSuccess) return error;
    tensors.scale = params.out_scale, tensors.shift = params.out_shift;
    return with_element(p.w_dtype, [&](auto element) {
        return queue({dim3((warps + kWarps - 1) / kWarps), 32 * kWarps, stream}, join_kernel<decltype(element)>, params);
    });
}

}  // namespace convpool::statistics

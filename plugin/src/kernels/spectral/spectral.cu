// SPDX-License-Identifier: Apache-2.0
// Spectral normalization of several weights at once: W / sigma after a step of the power iteration, and its derivative.
//
// Networks normalize twenty weights and more in each step, each by a dozen small kernels. Here all weights share each launch; a block
// finds its weight by counting blocks. Sums are in fp32, in an order that the weights' sizes alone decide.

#include <algorithm>

#include "kernels/passes.h"
#include "kernels/tile/chunk.cuh"

namespace convpool::spectral {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32, kColumnThreads = 512, kColumns = 128,
              kMost = 56;  // weights of a launch: their sizes are in its parameters

struct Weight : convpool_spectral_weight {
    float *sums;

    CONVPOOL_ANYWHERE int columns() const { return c * taps; }
    CONVPOOL_ANYWHERE int shares() const { return static_cast<int>((elements_of(*this) + kShare - 1) / kShare); }
    CONVPOOL_ANYWHERE int row_blocks() const { return (m + kWarps - 1) / kWarps; }
    CONVPOOL_ANYWHERE int column_blocks() const { return (columns() + kColumns - 1) / kColumns; }
    // In fp32; v in the order of W's rows.
    CONVPOOL_DEVICE float *u() const { return static_cast<float *>(kept); }
    CONVPOOL_DEVICE float *v() const { return u() + m; }
    CONVPOOL_DEVICE float &sigma() const { return v()[columns()]; }
    // The place in PyTorch's vector, channel by channel, of a column of W, tap by tap.
    CONVPOOL_DEVICE int place_of(int column) const { return taps == 1 ? column : column % c * taps + column / c; }
};

struct Params {
    Weight weights[kMost];
    float epsilon;
    bool u_first;
};

// The weight that a block works for; `block` counts the weight's own then.
template <class Blocks> CONVPOOL_DEVICE const Weight &weight_of(const Params &p, int &block, Blocks blocks_of) {
    const Weight *weight = p.weights;
    for (block = blockIdx.x; block >= blocks_of(*weight); ++weight) block -= blocks_of(*weight);
    return *weight;
}

// In all threads of a block of kThreads.
CONVPOOL_DEVICE float block_sum(float v) {
    __shared__ float sums[kWarps];
    v = warp_sum(v);
    __syncthreads();  // the sums before have been read
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = v;
    __syncthreads();
    float sum = 0.f;
    UNROLLED_FOR (int i = 0; i < kWarps; ++i) sum += sums[i];
    return sum;
}

// body(index of four elements in a row) for a thread's part of a share of W.
template <class Body> CONVPOOL_DEVICE void for_quads(const Weight &weight, int share, Body body) {
    const int64_t end = min(elements_of(weight), (share + 1) * kShare) / 4;
#pragma unroll 4
    for (int64_t i = share * kShare / 4 + threadIdx.x; i < end; i += kThreads) body(i);
}

// Four elements of a row of W from a column on, which is a multiple of 4; zeros behind the row.
template <class Element> CONVPOOL_DEVICE void load_four(const Element *row, int column, int columns, float (&out)[4]) {
    if (columns % 4 == 0) return unpack_quad(reinterpret_cast<const Quad<Element> *>(row)[column / 4], out, Element{});
    UNROLLED_FOR (int i = 0; i < 4; ++i) out[i] = column + i < columns ? to_float(row[column + i]) : 0.f;
}

// u = W v, a row to a warp; first: by the vector of the step before.
template <class Element, bool kFirst> __global__ void __launch_bounds__(kThreads) rows_kernel(const __grid_constant__ Params p) {
    int block;
    const Weight &weight = weight_of(p, block, [](const Weight &w) { return w.row_blocks(); });
    const int row = block * kWarps + threadIdx.x / 32, lane = threadIdx.x % 32, columns = weight.columns();
    if (row >= weight.m) return;
    const Element *const w = static_cast<const Element *>(weight.w) + int64_t{row} * columns;
    const Element *const last_v = static_cast<const Element *>(weight.last_v);
    float sum = 0.f;
#pragma unroll 4
    for (int column = 4 * lane; column < columns; column += 4 * 32) {
        float v[4];
        load_four(w, column, columns, v);
        int tap = kFirst ? column / weight.c : 0, channel = column - tap * weight.c;  // one division for four
        UNROLLED_FOR (int i = 0; i < 4; ++i) {
            if (column + i < columns) {
                const float other = kFirst ? to_float(last_v[channel * weight.taps + tap]) : weight.v()[column + i];
                sum = fmaf(v[i], other, sum);
            }
            if (++channel == weight.c) channel = 0, ++tap;
        }
    }
    sum = warp_sum(sum);
    if (lane == 0) weight.u()[row] = sum;
}

// v = W^T u, of kColumns columns; where W has fewer, more threads share a column's rows.
template <class Element, bool kFirst>
__global__ void __launch_bounds__(kColumnThreads) columns_kernel(const __grid_constant__ Params p) {
    __shared__ float sums[kColumnThreads][4];
    int block;
    const Weight &weight = weight_of(p, block, [](const Weight &w) { return w.column_blocks(); });
    const int columns = weight.columns();
    int lanes = kColumns / 4;
    while (2 * lanes >= columns && lanes > 1) lanes /= 2;
    const int lane = threadIdx.x % lanes, rows = kColumnThreads / lanes, column = block * kColumns + 4 * lane;
    const Element *const w = static_cast<const Element *>(weight.w), *const u = static_cast<const Element *>(weight.last_u);
    float sum[4] = {};
    if (column < columns)
#pragma unroll 8
        for (int row = threadIdx.x / lanes; row < weight.m; row += rows) {
            float v[4];
            load_four(w + int64_t{row} * columns, column, columns, v);
            const float factor = kFirst ? to_float(u[row]) : weight.u()[row];
            UNROLLED_FOR (int i = 0; i < 4; ++i) sum[i] = fmaf(v[i], factor, sum[i]);
        }
    UNROLLED_FOR (int i = 0; i < 4; ++i) sums[threadIdx.x][i] = sum[i];
    __syncthreads();
    const int mine = block * kColumns + threadIdx.x;
    if (threadIdx.x >= 4 * lanes || mine >= columns) return;
    float total = 0.f;
#pragma unroll 8
    for (int i = 0; i < rows; ++i) total += sums[i * lanes + threadIdx.x / 4][threadIdx.x % 4];
    weight.v()[mine] = total;
}

CONVPOOL_DEVICE float square(float v) { return v * v; }

// Both vectors of a weight to a length of 1, and sigma = u^T W v. NaN stays.
template <class Element> __global__ void __launch_bounds__(kThreads) norm_kernel(const __grid_constant__ Params p) {
    const Weight &weight = p.weights[blockIdx.x];
    const int columns = weight.columns(), n = p.u_first ? weight.m : columns, next_n = p.u_first ? columns : weight.m;
    float *const vector = p.u_first ? weight.u() : weight.v(), *const next = p.u_first ? weight.v() : weight.u();
    float squares = 0.f, next_squares = 0.f;
    for (int i = threadIdx.x; i < n; i += kThreads) squares += square(vector[i]);
    for (int i = threadIdx.x; i < next_n; i += kThreads) next_squares += square(next[i]);
    const float norm = sqrtf(block_sum(squares)), length = norm < p.epsilon ? p.epsilon : norm;
    const float next_norm = sqrtf(block_sum(next_squares)) / length, next_length = next_norm < p.epsilon ? p.epsilon : next_norm;
    for (int i = threadIdx.x; i < n; i += kThreads) vector[i] /= length;
    for (int i = threadIdx.x; i < next_n; i += kThreads) next[i] = next[i] / length / next_length;
    __syncthreads();
    Element *const u = static_cast<Element *>(weight.last_u), *const v = static_cast<Element *>(weight.last_v);
    for (int i = threadIdx.x; i < weight.m; i += kThreads) u[i] = from_float<Element>(weight.u()[i]);
    for (int i = threadIdx.x; i < columns; i += kThreads) v[weight.place_of(i)] = from_float<Element>(weight.v()[i]);
    if (threadIdx.x == 0) weight.sigma() = next_norm / next_length * next_norm;
}

// out = W / sigma.
template <class Element> __global__ void __launch_bounds__(kThreads) divide_kernel(const __grid_constant__ Params p) {
    int share;
    const Weight &weight = weight_of(p, share, [](const Weight &w) { return w.shares(); });
    const float sigma = weight.sigma();
    for_quads(weight, share, [&](int64_t i) {
        float w[4];
        unpack_quad(static_cast<const Quad<Element> *>(weight.w)[i], w, Element{});
        UNROLLED_FOR (float &v : w) v /= sigma;
        static_cast<Quad<Element> *>(weight.out)[i] = pack_quad(w, Element{});
    });
}

// The sum of dY W, by shares.
template <class Element> __global__ void __launch_bounds__(kThreads) dots_kernel(const __grid_constant__ Params p) {
    int share;
    const Weight &weight = weight_of(p, share, [](const Weight &w) { return w.shares(); });
    float sum = 0.f;
    for_quads(weight, share, [&](int64_t i) {
        float w[4], dy[4];
        unpack_quad(static_cast<const Quad<Element> *>(weight.w)[i], w, Element{});
        unpack_quad(static_cast<const Quad<Element> *>(weight.dy)[i], dy, Element{});
        UNROLLED_FOR (int j = 0; j < 4; ++j) sum = fmaf(w[j], dy[j], sum);
    });
    sum = block_sum(sum);
    if (threadIdx.x == 0) weight.sums[share] = sum;
}

// out = dW = (dY - sum(dY W) / sigma u v^T) / sigma.
template <class Element> __global__ void __launch_bounds__(kThreads) adjoint_kernel(const __grid_constant__ Params p) {
    int share;
    const Weight &weight = weight_of(p, share, [](const Weight &w) { return w.shares(); });
    float sum = 0.f;
    for (int i = threadIdx.x; i < weight.shares(); i += kThreads) sum += weight.sums[i];
    const float sigma = weight.sigma(), factor = block_sum(sum) / sigma;
    const auto columns = static_cast<uint32_t>(weight.columns());
    for_quads(weight, share, [&](int64_t i) {
        float v[4];
        unpack_quad(static_cast<const Quad<Element> *>(weight.dy)[i], v, Element{});
        uint32_t row = static_cast<uint32_t>(4 * i) / columns, column = static_cast<uint32_t>(4 * i) - row * columns;
        UNROLLED_FOR (int j = 0; j < 4; ++j) {
            v[j] = (v[j] - factor * weight.u()[row] * weight.v()[column]) / sigma;
            if (++column == columns) column = 0, ++row;
        }
        static_cast<Quad<Element> *>(weight.out)[i] = pack_quad(v, Element{});
    });
}

// body(parameters, how many weights) for so many at a time as a launch takes.
template <class Body> cudaError_t in_parts(const convpool_spectral_weight *weights, int count, float *sums, Body body) {
    for (int begin = 0; begin < count; begin += kMost) {
        Params p{};
        const int part = std::min(kMost, count - begin);
        for (int i = 0; i < part; ++i) {
            static_cast<convpool_spectral_weight &>(p.weights[i]) = weights[begin + i];
            Weight &w = p.weights[i];
            w.sums = sums;
            if (sums != nullptr) sums += w.shares();
        }
        if (const cudaError_t error = body(p, part); error != cudaSuccess) return error;
    }
    return cudaSuccess;
}

// One block for each of what `of` counts in the weights.
template <class Of> dim3 grid_of(const Params &p, int count, Of of) {
    unsigned blocks = 0;
    for (int i = 0; i < count; ++i) blocks += static_cast<unsigned>(of(p.weights[i]));
    return dim3(blocks);
}

}  // namespace

cudaError_t launch(const convpool_spectral_weight *weights, int count, convpool_dtype dtype, bool u_first, float epsilon,
                   cudaStream_t stream) {
    return in_parts(weights, count, nullptr, [&](Params &p, int part) {
        p.u_first = u_first, p.epsilon = epsilon;
        return with_element(dtype, [&](auto element) {
            using E = decltype(element);
            const auto rows = [&](auto kernel) {
                return queue({grid_of(p, part, [](const Weight &w) { return w.row_blocks(); }), kThreads, stream}, kernel, p);
            };
            const auto columns = [&](auto kernel) {
                const dim3 grid = grid_of(p, part, [](const Weight &w) { return w.column_blocks(); });
                return queue({grid, kColumnThreads, stream}, kernel, p);
            };
            cudaError_t error = u_first ? rows(rows_kernel<E, true>) : columns(columns_kernel<E, true>);
            if (error == cudaSuccess) error = u_first ? columns(columns_kernel<E, false>) : rows(rows_kernel<E, false>);
            if (error == cudaSuccess) error = queue({dim3(static_cast<unsigned>(part)), kThreads, stream}, norm_kernel<E>, p);
            if (error != cudaSuccess) return error;
            return queue({grid_of(p, part, [](const Weight &w) { return w.shares(); }), kThreads, stream}, divide_kernel<E>, p);
        });
    });
}

cudaError_t launch_adjoint(const convpool_spectral_weight *weights, int count, convpool_dtype dtype, float *sums,
                           cudaStream_t stream) {
    return in_parts(weights, count, sums, [&](Params &p, int part) {
        return with_element(dtype, [&](auto element) {
            using E = decltype(element);
            const dim3 grid = grid_of(p, part, [](const Weight &w) { return w.shares(); });
            const cudaError_t error = queue({grid, kThreads, stream}, dots_kernel<E>, p);
            return error != cudaSuccess ? error : queue({grid, kThreads, stream}, adjoint_kernel<E>, p);
        });
    });
}

}  // namespace convpool::spectral

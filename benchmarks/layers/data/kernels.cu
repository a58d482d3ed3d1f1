// SPDX-License-Identifier: Apache-2.0
// Kernels of the methods that convpool is compared with. Compiled for one ELEMENT: __half, __nv_bfloat16 or float.
//
// One kernel serves pooling, box means and unrolling (im2col), since all three gather means of small windows:
//
//     Y[n][p][q][a][b][c] = mean over u, v < pool of X[n][p*stride - pad + a + u*dilation][q*stride - pad + b + v*dilation][c]
//
// with a, b < kernel and zeros outside X. kernel 1: pooling or box means; pool 1: plain unrolling.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#ifndef ELEMENT
#define ELEMENT __half
#endif
using T = ELEMENT;

__device__ inline float load(__half v) { return __half2float(v); }
__device__ inline float load(__nv_bfloat16 v) { return __bfloat162float(v); }
__device__ inline float load(float v) { return v; }
__device__ inline void store(__half &to, float v) { to = __float2half_rn(v); }
__device__ inline void store(__nv_bfloat16 &to, float v) { to = __float2bfloat16_rn(v); }
__device__ inline void store(float &to, float v) { to = v; }

// i / d for 0 <= i < 2^20 without an integer division: the half keeps the product, which is off by less than 2^-21 of
// itself, clear of the next whole number.
__device__ inline int quotient(int i, int d) { return (int)(((float)i + 0.5f) * __fdividef(1.f, (float)d)); }

struct Window {
    int n, h, w, c, p, q, kernel, stride, pad, pool, dilation;
};

template <int kV> struct alignas(kV * sizeof(T)) Chunk {
    T v[kV];
};

// Channels last. A thread makes kV channels (16 bytes, or one element where C is no multiple). Grid: items of (q, b, c),
// then (p, a), then n. kPool 0: the size of the pooling window is not known here.
template <int kV, int kPool> __device__ inline void gather_last(const T *x, T *y, const Window &g) {
    const int chunks = g.c / kV, item = blockIdx.x * blockDim.x + threadIdx.x;
    if (item >= g.q * g.kernel * chunks) return;
    const int column = quotient(item, chunks), chunk = item - column * chunks;
    const int q = quotient(column, g.kernel), b = column - q * g.kernel;
    const int p = quotient(blockIdx.y, g.kernel), a = blockIdx.y - p * g.kernel;
    const int top = p * g.stride - g.pad + a, left = q * g.stride - g.pad + b;
    const int pool = kPool ? kPool : g.pool;
    const Chunk<kV> *image = (const Chunk<kV> *)x + (long long)blockIdx.z * g.h * g.w * chunks + chunk;
    auto part = [&](int u, int v) {
        const int row = top + u * g.dilation, col = left + v * g.dilation;
        Chunk<kV> zeros = {};
        const bool inside = row >= 0 && row < g.h && col >= 0 && col < g.w;
        return inside ? image[(long long)(row * g.w + col) * chunks] : zeros;
    };
    float sum[kV] = {};
    if constexpr (kPool != 0) {  // all loads before the first sum
        Chunk<kV> parts[kPool * kPool];
#pragma unroll
        for (int k = 0; k < kPool * kPool; ++k) parts[k] = part(k / kPool, k % kPool);
#pragma unroll
        for (int k = 0; k < kPool * kPool; ++k)
            for (int i = 0; i < kV; ++i) sum[i] += load(parts[k].v[i]);
    } else {
        for (int k = 0; k < pool * pool; ++k) {
            const Chunk<kV> one = part(k / pool, k % pool);
            for (int i = 0; i < kV; ++i) sum[i] += load(one.v[i]);
        }
    }
    const float scale = 1.f / (pool * pool);
    Chunk<kV> out;
    for (int i = 0; i < kV; ++i) store(out.v[i], sum[i] * scale);
    const long long pixel = ((long long)blockIdx.z * g.p + p) * g.q + q;
    ((Chunk<kV> *)y)[((pixel * g.kernel + a) * g.kernel + b) * chunks + chunk] = out;
}

// Channels first: Y[n][c][a][b][p][q]. A thread makes one element. Grid: pixels of (p, q), then (c, a, b), then n.
template <int kPool> __device__ inline void gather_first(const T *x, T *y, const Window &g) {
    const int item = blockIdx.x * blockDim.x + threadIdx.x, taps = g.kernel * g.kernel;
    if (item >= g.p * g.q) return;
    const int p = quotient(item, g.q), q = item - p * g.q;
    const int c = blockIdx.y / taps, tap = blockIdx.y - c * taps, a = quotient(tap, g.kernel), b = tap - a * g.kernel;
    const int top = p * g.stride - g.pad + a, left = q * g.stride - g.pad + b;
    const int pool = kPool ? kPool : g.pool;
    const T *image = x + ((long long)blockIdx.z * g.c + c) * g.h * g.w;
    float sum = 0.f;
#pragma unroll
    for (int u = 0; u < pool; ++u) {
#pragma unroll
        for (int v = 0; v < pool; ++v) {
            const int row = top + u * g.dilation, col = left + v * g.dilation;
            if (row >= 0 && row < g.h && col >= 0 && col < g.w) sum += load(image[row * g.w + col]);
        }
    }
    store(y[((long long)blockIdx.z * g.c * taps + blockIdx.y) * g.p * g.q + item], sum / (pool * pool));
}

#define WINDOW int n, int h, int w, int c, int p, int q, int kernel, int stride, int pad, int pool, int dilation
#define PACK \
    Window { n, h, w, c, p, q, kernel, stride, pad, pool, dilation }
#define GATHER(name, body) \
    extern "C" __global__ void __launch_bounds__(256) name(const T *x, T *y, WINDOW) { body(x, y, PACK); }
GATHER(gather_last_1, (gather_last<16 / sizeof(T), 1>))
GATHER(gather_last_2, (gather_last<16 / sizeof(T), 2>))
GATHER(gather_last_any, (gather_last<16 / sizeof(T), 0>))
GATHER(gather_last_scalar, (gather_last<1, 0>))
GATHER(gather_first_1, (gather_first<1>))
GATHER(gather_first_2, (gather_first<2>))
GATHER(gather_first_any, (gather_first<0>))

// Summed-area table in fp32, channels last: S[n][i][j][c] = sum of X[n][<=i][<=j][c] (Kasagi et al., MLSP 2017). First
// sums along rows, then along columns in place. A thread follows one line of one channel, eight loads ahead of the sums.
template <class From> __device__ inline void running_sums(const From *from, float *to, int count, long long pitch) {
    float sum = 0.f;
    for (int start = 0; start < count; start += 8) {
        float v[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) v[i] = start + i < count ? load(from[(start + i) * pitch]) : 0.f;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            sum += v[i];
            if (start + i < count) to[(start + i) * pitch] = sum;
        }
    }
}

extern "C" __global__ void __launch_bounds__(256) sat_rows(const T *x, float *s, int h, int w, int c) {
    const int channel = blockIdx.x * blockDim.x + threadIdx.x;
    const long long start = ((long long)blockIdx.z * h + blockIdx.y) * w * c + channel;
    if (channel < c) running_sums(x + start, s + start, w, c);
}

extern "C" __global__ void __launch_bounds__(256) sat_columns(float *s, int h, int w, int c) {
    const int channel = blockIdx.x * blockDim.x + threadIdx.x;
    const long long start = ((long long)blockIdx.z * h * w + blockIdx.y) * c + channel;
    if (channel < c) running_sums(s + start, s + start, h, (long long)w * c);
}

// Box means Z[n][i][j][c] of windows that start at (i - pad, j - pad), from four entries of the table.
extern "C" __global__ void __launch_bounds__(256)
    sat_means(const float *s, T *z, int h, int w, int c, int box_h, int box_w, int pad, int pool) {
    const int item = blockIdx.x * blockDim.x + threadIdx.x;
    if (item >= box_w * c) return;
    const int j = quotient(item, c), channel = item - j * c, i = blockIdx.y;
    const float *table = s + (long long)blockIdx.z * h * w * c + channel;
    const int top = max(i - pad, 0) - 1, bottom = min(i - pad + pool, h) - 1;
    const int left = max(j - pad, 0) - 1, right = min(j - pad + pool, w) - 1;
    auto at = [&](int row, int column) { return row < 0 || column < 0 ? 0.f : table[(long long)(row * w + column) * c]; };
    const float sum = at(bottom, right) - at(top, right) - at(bottom, left) + at(top, left);
    store(z[(((long long)blockIdx.z * box_h + i) * box_w + j) * c + channel], sum / (pool * pool));
}

// The convolutions of the textbooks, channels first: X [N,C,H,W], W [M,C,k,k], Y [N,M,P,Q]. Grid: pixels, then m, then n.
extern "C" __global__ void __launch_bounds__(256) textbook_direct(const T *x, const T *weight, T *y, int h, int w, int c, int m,
                                                                  int p, int q, int kernel, int stride, int pad) {
    const int item = blockIdx.x * blockDim.x + threadIdx.x, map = blockIdx.y;
    if (item >= p * q) return;
    const int row = item / q, column = item % q;
    float sum = 0.f;
    for (int channel = 0; channel < c; ++channel)
        for (int a = 0; a < kernel; ++a)
            for (int b = 0; b < kernel; ++b) {
                const int i = row * stride - pad + a, j = column * stride - pad + b;
                if (i >= 0 && i < h && j >= 0 && j < w)
                    sum += load(x[((blockIdx.z * (long long)c + channel) * h + i) * w + j]) *
                           load(weight[((map * c + channel) * kernel + a) * kernel + b]);
            }
    store(y[(blockIdx.z * (long long)m + map) * p * q + item], sum);
}

// A block makes 16x16 outputs of one map; the input tile of one channel and its weights go through shared memory.
constexpr int kTile = 16, kReach = 40, kSide = 7;  // kReach >= 15 * stride + kernel, kSide >= kernel
extern "C" __global__ void __launch_bounds__(kTile *kTile)
    textbook_tiled(const T *x, const T *weight, T *y, int h, int w, int c, int m, int p, int q, int kernel, int stride, int pad) {
    __shared__ float tile[kReach][kReach + 1], taps[kSide * kSide];
    const int tiles = (q + kTile - 1) / kTile, map = blockIdx.y;
    const int first_row = blockIdx.x / tiles * kTile, first_column = blockIdx.x % tiles * kTile;
    const int row = first_row + threadIdx.x / kTile, column = first_column + threadIdx.x % kTile;
    const int side = (kTile - 1) * stride + kernel;
    float sum = 0.f;
    for (int channel = 0; channel < c; ++channel) {
        for (int k = threadIdx.x; k < side * side; k += kTile * kTile) {
            const int i = first_row * stride - pad + k / side, j = first_column * stride - pad + k % side;
            const bool inside = i >= 0 && i < h && j >= 0 && j < w;
            tile[k / side][k % side] = inside ? load(x[((blockIdx.z * (long long)c + channel) * h + i) * w + j]) : 0.f;
        }
        if (threadIdx.x < kernel * kernel) taps[threadIdx.x] = load(weight[(map * c + channel) * kernel * kernel + threadIdx.x]);
        __syncthreads();
        for (int a = 0; a < kernel; ++a)
            for (int b = 0; b < kernel; ++b)
                sum += tile[threadIdx.x / kTile * stride + a][threadIdx.x % kTile * stride + b] * taps[a * kernel + b];
        __syncthreads();
    }
    if (row < p && column < q) store(y[((blockIdx.z * (long long)m + map) * p + row) * q + column], sum);
}

// D[n][m][j] = sum over k of A[m][k] B[n][k][j]: one output a thread, 16x16 tiles through shared memory.
extern "C" __global__ void __launch_bounds__(kTile *kTile)
    textbook_gemm(const T *a, const T *b, T *d, int m, int k, int columns) {
    __shared__ float left[kTile][kTile], right[kTile][kTile + 1];
    const int ty = threadIdx.x / kTile, tx = threadIdx.x % kTile;
    const int row = blockIdx.y * kTile + ty, column = blockIdx.x * kTile + tx;
    const T *matrix = b + (long long)blockIdx.z * k * columns;
    float sum = 0.f;
    for (int start = 0; start < k; start += kTile) {
        left[ty][tx] = row < m && start + tx < k ? load(a[(long long)row * k + start + tx]) : 0.f;
        right[ty][tx] = start + ty < k && column < columns ? load(matrix[(long long)(start + ty) * columns + column]) : 0.f;
        __syncthreads();
        for (int i = 0; i < kTile; ++i) sum += left[ty][i] * right[i][tx];
        __syncthreads();
    }
    if (row < m && column < columns) store(d[((long long)blockIdx.z * m + row) * columns + column], sum);
}

// cuConv's two stages (Jorda, Valero-Lara, Pena, IEEE Access 2021), channels first. First the scalar products over the depth of
// one tap of the filters with the pixels below it: S[tap][n][m][p][q]. A thread follows one pixel, neighbours in a row side by
// side, and multiplies it with kFilters filters, whose depth goes through shared memory. Then the sums over the taps; a 1x1
// convolution has one tap, whose products are Y. Grid: pixels of (p, q), then (filters, tap), then n.
constexpr int kFilters = 8, kDepth = 32;
template <class To>
__device__ inline void scalar_products(const T *x, const T *weight, To *s, int h, int w, int c, int m, int p, int q, int kernel,
                                       int stride, int pad) {
    __shared__ float filters[kFilters][kDepth];
    const int taps = kernel * kernel, first = blockIdx.y / taps * kFilters, tap = blockIdx.y % taps;
    const int item = blockIdx.x * blockDim.x + threadIdx.x;
    const int i = item / q * stride - pad + tap / kernel, j = item % q * stride - pad + tap % kernel;
    const bool inside = item < p * q && i >= 0 && i < h && j >= 0 && j < w;
    const T *pixel = x + ((long long)blockIdx.z * c * h + i) * w + j;
    float sums[kFilters] = {};
    for (int start = 0; start < c; start += kDepth) {
        const int filter = threadIdx.x / kDepth, depth = threadIdx.x % kDepth;
        const bool known = first + filter < m && start + depth < c;
        filters[filter][depth] = known ? load(weight[((long long)(first + filter) * c + start + depth) * taps + tap]) : 0.f;
        __syncthreads();
#pragma unroll 8
        for (int d = 0; d < kDepth; ++d) {
            const float v = inside && start + d < c ? load(pixel[(long long)(start + d) * h * w]) : 0.f;
#pragma unroll
            for (int f = 0; f < kFilters; ++f) sums[f] += v * filters[f][d];
        }
        __syncthreads();
    }
    if (item >= p * q) return;
    for (int f = 0; f < kFilters && first + f < m; ++f)
        store(s[(((long long)tap * gridDim.z + blockIdx.z) * m + first + f) * p * q + item], sums[f]);
}

#define CUCONV_ARGUMENTS int h, int w, int c, int m, int p, int q, int kernel, int stride, int pad
extern "C" __global__ void __launch_bounds__(kFilters *kDepth)
    cuconv_products(const T *x, const T *weight, float *s, CUCONV_ARGUMENTS) {
    scalar_products(x, weight, s, h, w, c, m, p, q, kernel, stride, pad);
}
extern "C" __global__ void __launch_bounds__(kFilters *kDepth)
    cuconv_pointwise(const T *x, const T *weight, T *y, CUCONV_ARGUMENTS) {
    scalar_products(x, weight, y, h, w, c, m, p, q, kernel, stride, pad);
}
extern "C" __global__ void __launch_bounds__(256) cuconv_sums(const float *s, T *y, int taps, int count) {
    const int item = blockIdx.x * blockDim.x + threadIdx.x;
    if (item >= count) return;
    float sum = 0.f;
    for (int tap = 0; tap < taps; ++tap) sum += s[(long long)tap * count + item];
    store(y[item], sum);
}

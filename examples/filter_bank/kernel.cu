// SPDX-License-Identifier: Apache-2.0
// The bank on a GPU: a thread makes the nine bytes of one place.  x [n][h][w], y [n][9][p][q].
#include <cstdint>

__constant__ int filters[9][3][3];
__constant__ int divisors[9];

__device__ inline uint8_t byte_of(int sum, int divisor) {
    const int value = (sum + divisor / 2) / divisor;
    return sum + divisor / 2 < 0 ? 0 : value > 255 ? 255 : value;
}

// The sums of the windows at the nine taps, from the (kWindow + 2)^2 pixels below them, then nine products a filter.
template <int kWindow> __device__ inline void filter_sums(const uint8_t *x, int w, uint8_t *y, long long map, int parts) {
    int boxes[3][3] = {};
#pragma unroll
    for (int i = 0; i < kWindow + 2; ++i)
#pragma unroll
        for (int j = 0; j < kWindow + 2; ++j) {
            const int pixel = x[(long long)i * w + j];
#pragma unroll
            for (int a = 0; a < 3; ++a)
#pragma unroll
                for (int b = 0; b < 3; ++b)
                    if (i >= a && i < a + kWindow && j >= b && j < b + kWindow) boxes[a][b] += pixel;
        }
#pragma unroll
    for (int f = 0; f < 9; ++f) {
        int sum = 0;
#pragma unroll
        for (int a = 0; a < 3; ++a)
#pragma unroll
            for (int b = 0; b < 3; ++b) sum += filters[f][a][b] * boxes[a][b];
        y[f * map] = byte_of(sum, divisors[f] * parts);
    }
}

#define PLACE                                                                    \
    const int j = blockIdx.x * blockDim.x + threadIdx.x, i = blockIdx.y * blockDim.y + threadIdx.y; \
    if (i >= p || j >= q) return;                                                \
    const long long map = (long long)p * q;                                      \
    y += blockIdx.z * 9 * map + (long long)i * q + j

// Filters and windows at once; window 1: filters alone, for max.
extern "C" __global__ void bank(const uint8_t *x, uint8_t *y, int h, int w, int p, int q, int window, int stride) {
    PLACE;
    x += ((long long)blockIdx.z * h + i * stride) * w + j * stride;
    if (window == 1) filter_sums<1>(x, w, y, map, 1);
    else if (window == 2) filter_sums<2>(x, w, y, map, 4);
    else filter_sums<3>(x, w, y, map, 9);
}

// The largest of each window of filtered bytes [n][9][rows][columns].
extern "C" __global__ void largest(const uint8_t *filtered, uint8_t *y, int rows, int columns, int p, int q, int window) {
    PLACE;
    for (int f = 0; f < 9; ++f) {
        const uint8_t *from = filtered + (((long long)blockIdx.z * 9 + f) * rows + i * window) * columns + j * window;
        int value = 0;
        for (int u = 0; u < window; ++u)
            for (int v = 0; v < window; ++v) value = max(value, int(from[u * columns + v]));
        y[f * map] = value;
    }
}

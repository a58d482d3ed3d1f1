// SPDX-License-Identifier: Apache-2.0
// What generic's kernels share: one thread per output of any rank, stride, dilation and group, and the order of its sum.
#pragma once

#include <cstdint>

#include "families/generic/params.h"
#include "kernels/ptx/device.cuh"

namespace convpool {

constexpr int kGenericThreads = 128;

inline unsigned generic_blocks(int64_t outputs) {
    const int64_t blocks = (outputs + kGenericThreads - 1) / kGenericThreads;
    return static_cast<unsigned>(blocks < (1 << 20) ? blocks : (1 << 20));
}

// Calls, for each output of this thread: sum.start(); for each tap inside the pooled tensor and each channel of the group
// start_channel(channel), add_pixel(its place in X) for the pixels of the window that X has, end_channel(channel in the group,
// place in W), and after its channels end_tap(); at last store(m, place in Y).
template <class Sum> CONVPOOL_DEVICE void sum_outputs(const GenericParams &p, Sum sum) {
    const int64_t in_pixels = static_cast<int64_t>(p.in[0]) * p.in[1] * p.in[2];
    const int64_t out_pixels = static_cast<int64_t>(p.out[0]) * p.out[1] * p.out[2];
    const int taps = p.kernel[0] * p.kernel[1] * p.kernel[2];
    for (int64_t item = static_cast<int64_t>(blockIdx.x) * kGenericThreads + threadIdx.x; item < p.outputs;
         item += static_cast<int64_t>(gridDim.x) * kGenericThreads) {
        // Threads run along Y's memory.
        int64_t n, pixel;
        int m;
        if (p.y_channels_last) {
            m = static_cast<int>(item % p.m);
            pixel = item / p.m % out_pixels;
            n = item / p.m / out_pixels;
        } else {
            pixel = item % out_pixels;
            m = static_cast<int>(item / out_pixels % p.m);
            n = item / out_pixels / p.m;
        }
        const int o[3] = {static_cast<int>(pixel / p.out[2] / p.out[1]), static_cast<int>(pixel / p.out[2] % p.out[1]),
                          static_cast<int>(pixel % p.out[2])};
        const int group = m / p.m_per_group;
        const int64_t x_step = p.x_channels_last ? 1 : in_pixels, pixel_step = p.x_channels_last ? p.c : 1;
        const int64_t image = n * in_pixels * p.c + group * p.c_per_group * x_step;
        sum.start();
        for (int tap = 0; tap < taps; ++tap) {
            const int t[3] = {tap / p.kernel[2] / p.kernel[1], tap / p.kernel[2] % p.kernel[1], tap % p.kernel[2]};
            int origin[3];
            bool inside = true;
            for (int d = 0; d < 3; ++d) {
                origin[d] = o[d] * p.strides[d] - p.pads[d] + t[d] * p.dilations[d];
                inside = inside && origin[d] >= 0 && origin[d] < p.pooled[d];
            }
            if (!inside) continue;
            for (int d = 0; d < 3; ++d) origin[d] = origin[d] * p.pool_strides[d] - p.pool_pads[d];
            const int64_t weights = (static_cast<int64_t>(m) * taps + tap) * p.c_per_group;
            for (int c = 0; c < p.c_per_group; ++c) {
                sum.start_channel(group * p.c_per_group + c);
                for (int i = 0; i < p.pool_kernel[0]; ++i) {
                    const int z = origin[0] + i * p.pool_dilations[0];
                    if (z < 0 || z >= p.in[0]) continue;
                    for (int j = 0; j < p.pool_kernel[1]; ++j) {
                        const int y = origin[1] + j * p.pool_dilations[1];
                        if (y < 0 || y >= p.in[1]) continue;
                        for (int k = 0; k < p.pool_kernel[2]; ++k) {
                            const int column = origin[2] + k * p.pool_dilations[2];
                            if (column < 0 || column >= p.in[2]) continue;
                            const int64_t at = (static_cast<int64_t>(z) * p.in[1] + y) * p.in[2] + column;
                            sum.add_pixel(image + at * pixel_step + c * x_step);
                        }
                    }
                }
                sum.end_channel(c, weights + c);
            }
            sum.end_tap();
        }
        sum.store(m, item);
    }
}

}  // namespace convpool

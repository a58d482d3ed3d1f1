// SPDX-License-Identifier: Apache-2.0
// Weights of filter_fused's larger kernel, or copies of weights in the implicit GEMM's format.
#pragma once

#include "kernels/prepasses/prepasses.h"
#include "kernels/prepasses/store.cuh"
#include "kernels/tile/box_mean.cuh"

namespace convpool::prepasses {

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

}  // namespace convpool::prepasses

// SPDX-License-Identifier: Apache-2.0
// The gradients at the weights and the bias of a convolution whose filters have few elements.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "core/params.h"

namespace convpool::weight_gradient {

constexpr int kMaxElements = 32;  // of a filter, the bias included
constexpr int kChannels = 64;     // output channels that a block sums for

struct Params {
    const void *dy, *x;  // [pixels, m] and [n, h, w, c]
    void *dw, *db;       // [m, kh, kw, c]; null, or [m]
    float *sums;         // [channel tiles][parts][kMaxElements][kChannels]
    int32_t m, c, h, w, kw, stride_h, stride_w, dilation_h, dilation_w, pad_h, pad_w;
    int32_t elements;  // of a filter: kh * kw * c
    int32_t parts;     // blocks that share the pixels
    uint32_t pixels;   // of all samples' outputs
    uint32_t out_w, out_pixels;
    FastDiv div_out_w, div_out_pixels;  // of launch()
};

// How many blocks share so many pixels: the same on all devices, and so the sums.
int32_t parts_of(int64_t pixels);

cudaError_t launch(Params params, Precision precision, bool overlap, cudaStream_t stream);

}  // namespace convpool::weight_gradient

// SPDX-License-Identifier: Apache-2.0
// The passes before an implicit GEMM. Every launch returns the runtime's error.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/params.h"

namespace convpool {

// How the passes before an implicit GEMM write fp32: as it is, rounded to TF32, or as the two TF32 numbers whose sum it is to
// 21 bits, kSplitChannels big ones and then their small ones.
enum class NumberFormat : int32_t { kAsIs, kTF32, kTF32Split };
constexpr int kSplitChannels = 16;

// Box means of f(X), or a copy where ph = pw = 1, to channels last, channels padded to whole chunks with zeros.
struct BoxMeanParams {
    const void *x;
    void *out;
    Prologue prologue;
    BoxMean box;
    NumberFormat format;
    int32_t n, c, h, w, out_h, out_w, chunks, x_channels_last, x_chunked;  // chunks: of X, padded; a split pair counts once
    FastDiv div_chunks, div_out_w, div_out_h, div_strips;
};

// Weights [m,kh,kw,c] to [m,fused_h,fused_w,chunks]: summed over the pooling window and divided by its size, or, with a
// window of 1, only padded.
struct WeightParams {
    const void *w;
    void *out;
    BoxMean box;
    int32_t m, c, kh, kw, tap_step_h, tap_step_w;  // taps of the conv, in steps of the fused kernel
    int32_t fused_h, fused_w, fused_dilation_h, fused_dilation_w;
    int32_t chunks;
    NumberFormat format;
};

// overlap: may start while the kernel before it ends (compute capability 9.0 and later).
cudaError_t launch_box_mean(const BoxMeanParams &params, Precision precision, bool overlap, cudaStream_t stream);
cudaError_t launch_fuse_weights(const WeightParams &params, Precision precision, cudaStream_t stream);
// Loads the kernels that these two launch, on the current device.
cudaError_t load_passes(Precision precision, bool prologue);

}  // namespace convpool

// SPDX-License-Identifier: Apache-2.0
// Kernels beside the families: the passes before an implicit GEMM, box means as an operator, statistics, and those of training:
// spectral normalization, weights turned round, the weights' gradient. Every launch returns the runtime's error.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "convpool.h"
#include "core/params.h"
#include "core/problem.h"
#include "gemm/phases.h"

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
// window of 1, only padded. With phases, to the taps of all phases of an upsampled convolution.
struct WeightParams {
    const void *w;
    void *out;
    BoxMean box;
    int32_t m, c, kh, kw, tap_step_h, tap_step_w;  // taps of the conv, in steps of the fused kernel
    int32_t fused_h, fused_w, fused_dilation_h, fused_dilation_w;
    int32_t chunks;
    NumberFormat format;
    PhaseAxis rows, columns;  // of phases
    bool phases;
};

// overlap: may start while the kernel before it ends (compute capability 9.0 and later).
cudaError_t launch_box_mean(const BoxMeanParams &params, Precision precision, bool overlap, cudaStream_t stream);
cudaError_t launch_fuse_weights(const WeightParams &params, Precision precision, cudaStream_t stream);
// Loads the kernels that these two launch, on the current device.
cudaError_t load_passes(Precision precision, PrologueForm form);

// Box means as an operator of their own, and their adjoint.
namespace box {

// Both tensors are [outer, size 0, size 1, size 2, inner], with vectors as elements.
//   gather: out[i] = mean over j of in[i * stride + j * dilation - begin]
//   spread: out[t] = sum of in[i] / count over the windows i that hold t
struct Params {
    const void *in;
    void *out;
    int32_t in_size[3], out_size[3];
    int32_t kernel[3], stride[3], dilation[3], begin[3];  // begin may be negative: it crops then
    int32_t inner;
    BoxMean mean;                                   // its counts only
    FastDiv div_inner, div_size[3], div_stride[3];  // of the kernel's items
    uint32_t items;
};

// Runs over `outer` slices. `params` without divisors and items; vectors: all addresses and rows are of 16 bytes.
cudaError_t launch(Params params, int64_t outer, convpool_dtype dtype, bool spread, bool vectors, cudaStream_t stream);

}  // namespace box

// Scale and shift by image of a prologue that normalizes X.
namespace statistics {

// Device memory for them, a multiple of 256; 0 where nothing is normalized.
size_t bytes(const Problem &problem);
// Loads the kernels, on the current device.
cudaError_t load(const Problem &problem);
// Writes them into `memory`, of so many bytes, and puts them in the place of the tensors' scale and shift by channel.
cudaError_t launch(const Problem &problem, convpool_tensors &tensors, void *memory, cudaStream_t stream);

}  // namespace statistics

// The gradients at the weights and the bias of a convolution whose filters have few elements.
namespace weight_gradient {

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

// convpool_turn_weights.
cudaError_t turn(const void *w, void *out, int64_t m, int64_t c, int64_t taps, convpool_dtype dtype, float factor,
                 cudaStream_t stream);

}  // namespace weight_gradient

// Spectral normalization of several weights, and its derivative.
namespace spectral {

constexpr int64_t kShare = 8192;  // elements of a weight that a block reads
CONVPOOL_ANYWHERE int64_t elements_of(const convpool_spectral_weight &w) { return int64_t{w.m} * w.c * w.taps; }

// convpool_spectral_norm and its adjoint.
cudaError_t launch(const convpool_spectral_weight *weights, int count, convpool_dtype dtype, bool u_first, float epsilon,
                   cudaStream_t stream);
cudaError_t launch_adjoint(const convpool_spectral_weight *weights, int count, convpool_dtype dtype, float *sums,
                           cudaStream_t stream);

}  // namespace spectral
}  // namespace convpool

// SPDX-License-Identifier: Apache-2.0
// Parameters of generic.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/params.h"

namespace convpool {

// generic, normalised to rank 3 with leading ones.
struct GenericParams {
    const void *x, *w;
    void *y;
    Prologue prologue;
    Epilogue epilogue;
    int64_t outputs;
    int32_t c_per_group, m_per_group, m, c;
    int32_t in[3], pooled[3], out[3];
    int32_t pool_kernel[3], pool_strides[3], pool_pads[3], pool_dilations[3];
    int32_t kernel[3], strides[3], pads[3], dilations[3];
    FastDiv div_upsample[3];  // from the tensor that is convolved to X
    int32_t x_channels_last, y_channels_last, x_float;
    float count;
};

// The same for 8-bit types of X and W.
struct ExactParams {
    GenericParams problem;  // prologue, x_float and count unused
    const float *w_scale;   // by output channel, or null
    int32_t y_dtype;        // convpool_dtype, of the bias and the residual too
};

// Launches the kernel of float types. As the others it returns the runtime's error.
cudaError_t launch_generic(const GenericParams &params, Precision precision, cudaStream_t stream);
// Loads the kernel on the current device.
cudaError_t load_generic(Precision precision);

// Launches the kernel of 8-bit types, whose sums are exact. dtype: an 8-bit one, of X and W.
cudaError_t launch_generic_exact(const ExactParams &params, int32_t dtype, cudaStream_t stream);
cudaError_t load_generic_exact(int32_t dtype);

}  // namespace convpool

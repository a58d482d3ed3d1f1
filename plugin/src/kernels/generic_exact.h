// generic for 8-bit X and W, whose sums are exact.
#pragma once

#include <cuda_runtime_api.h>

#include "params.h"

namespace convpool {

struct ExactParams {
    GenericParams problem;  // prologue, x_float and count unused
    const float *w_scale;   // by output channel, or null
    int32_t y_dtype;        // convpool_dtype, of the bias and the residual too
};

// dtype: CONVPOOL_I8 or CONVPOOL_F8E4M3, of X and W.
cudaError_t launch_generic_exact(const ExactParams &params, int32_t dtype, cudaStream_t stream);
cudaError_t load_generic_exact(int32_t dtype);

}  // namespace convpool

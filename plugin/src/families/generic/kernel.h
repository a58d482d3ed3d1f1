// SPDX-License-Identifier: Apache-2.0
// Launches of generic's kernels. All return the runtime's error.
#pragma once

#include <cuda_runtime_api.h>

#include "families/generic/params.h"

namespace convpool {

// Of float types.
cudaError_t launch_generic(const GenericParams &params, Precision precision, cudaStream_t stream);
// Loads the kernel on the current device.
cudaError_t load_generic(Precision precision);

// Of 8-bit types, whose sums are exact. dtype: an 8-bit one, of X and W.
cudaError_t launch_generic_exact(const ExactParams &params, int32_t dtype, cudaStream_t stream);
cudaError_t load_generic_exact(int32_t dtype);

}  // namespace convpool

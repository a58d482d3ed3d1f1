// SPDX-License-Identifier: Apache-2.0
// Functions of the CUDA driver, found through the runtime, so that the library needs no libcuda to load.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/params.h"

namespace convpool {

// Where in an image windows start, along rows and along columns: from `lower` on in steps of `strides`, before the image's
// size + `upper`. TMA's im2col mode walks over them, and on to the next image.
struct Im2colBox {
    int32_t lower[2], upper[2];
    uint32_t strides[2];
};

// A tensor of `rank` dimensions, the innermost first; strides[i] is that of dimension i + 1. Strides and `swizzle` (0, 64 or
// 128) are in bytes.
// `operand`: what is copied goes to the tensor cores as it is, and so is rounded to TF32 if that is the precision.
// The driver's cuTensorMapEncodeTiled does it; cudaErrorNotSupported if it has none.
cudaError_t encode_tensor_map(CUtensorMap *map, Precision precision, int rank, const void *address, const uint64_t *sizes,
                              const uint64_t *strides, const uint32_t *box, int swizzle, bool operand);

// A tensor [n,h,w,c] whose columns of `pixels` windows are copied, `channels` of one tap of each: operands in the 128-byte
// swizzle. Sizes and strides as above.
cudaError_t encode_im2col_map(CUtensorMap *map, Precision precision, const void *address, const uint64_t *sizes,
                              const uint64_t *strides, const Im2colBox &box, uint32_t channels, uint32_t pixels);

// The current context's number, unique in the process; 0 if there is none, or the driver does not say.
uint64_t current_context();

}  // namespace convpool

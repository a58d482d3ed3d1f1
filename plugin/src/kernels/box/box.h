// SPDX-License-Identifier: Apache-2.0
// Box means as an operator of their own, and their adjoint.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "convpool.h"
#include "core/params.h"

namespace convpool::box {

// Which of the tensors the gate lies beside. kSelf: the input is its own gate.
enum class Gate : int32_t { kNone, kSelf, kInput, kOutput };

// Both tensors are [outer, size 0, size 1, size 2, inner], with vectors as elements.
//   gather: out[i] = m(gate) * mean over j of in[i * stride + j * dilation - begin]
//   spread: out[t] = m(gate) * sum of in[i] / count over the windows i that hold t
struct Params {
    const void *in, *gate;
    void *out;
    int32_t in_size[3], out_size[3];
    int32_t kernel[3], stride[3], dilation[3], begin[3];  // begin may be negative: it crops then
    int32_t inner;
    float slope;
    BoxMean mean;                                   // its counts only
    FastDiv div_inner, div_size[3], div_stride[3];  // of the kernel's items
    uint32_t items;
};

// Runs over `outer` slices. `params` without divisors and items; vectors: all addresses and rows are of 16 bytes.
cudaError_t launch(Params params, int64_t outer, convpool_dtype dtype, Gate gate, bool spread, bool vectors, cudaStream_t stream);

}  // namespace convpool::box

// SPDX-License-Identifier: Apache-2.0
// From rows of implicit_gemm to kernels.
#pragma once

#include "core/instances.h"
#include "families/implicit_gemm/kernel.cuh"
#include "families/implicit_gemm/rows.h"

namespace convpool::implicit_gemm {

struct Instances : RowsOf<kRows> {
    template <size_t kRow> static const void *kernel(bool) {
        return reinterpret_cast<const void *>(&implicit_gemm_kernel<TileConfigOf<kRows, kRow>>);
    }
};

}  // namespace convpool::implicit_gemm

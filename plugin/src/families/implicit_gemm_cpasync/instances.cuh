// SPDX-License-Identifier: Apache-2.0
// From rows of implicit_gemm_cpasync to kernels.
#pragma once

#include "core/instances.h"
#include "families/implicit_gemm_cpasync/kernel.cuh"
#include "families/implicit_gemm_cpasync/rows.h"

namespace convpool::implicit_gemm_cpasync {

struct Instances : RowsOf<kRows> {
    template <size_t kRow> static const void *kernel(bool) {
        return reinterpret_cast<const void *>(&implicit_gemm_cpasync_kernel<TileConfigOf<kRows, kRow>>);
    }
};

}  // namespace convpool::implicit_gemm_cpasync

// SPDX-License-Identifier: Apache-2.0
// From rows of direct_fused to kernels.
#pragma once

#include "core/instances.h"
#include "families/direct_fused/kernel.cuh"
#include "families/direct_fused/rows.h"

namespace convpool::direct_fused {

struct Instances : RowsOf<kRows> {
    template <size_t kRow> static const void *kernel(bool) {
        return reinterpret_cast<const void *>(&direct_fused_kernel<TileConfigOf<kRows, kRow>>);
    }
};

}  // namespace convpool::direct_fused

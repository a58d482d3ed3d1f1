// SPDX-License-Identifier: Apache-2.0
// From rows of implicit_gemm_tma to kernels.
#pragma once

#include "core/instances.h"
#include "families/implicit_gemm_tma/kernel.cuh"
#include "families/implicit_gemm_tma/rows.h"

namespace convpool::implicit_gemm_tma {

struct Instances : RowsOf<kRows> {
    template <size_t kRow> static const void *kernel(bool activates) {
        constexpr Tile t = kRows[kRow].tile;
        constexpr Precision kPrecision = kRows[kRow].precision;
        using Config = TileConfigOf<kRows, kRow>;
        if constexpr (can_activate(kPrecision, t.block_m, t.block_n, t.min_blocks))
            if (activates) return reinterpret_cast<const void *>(&implicit_gemm_tma_kernel<Config, true>);
        return reinterpret_cast<const void *>(&implicit_gemm_tma_kernel<Config, false>);
    }
};

}  // namespace convpool::implicit_gemm_tma

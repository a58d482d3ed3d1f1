// SPDX-License-Identifier: Apache-2.0
// From rows of direct_tma to kernels.
#pragma once

#include "core/instances.h"
#include "families/direct_tma/kernel.cuh"
#include "families/direct_tma/rows.h"

namespace convpool::direct_tma {

struct Instances : RowsOf<kRows> {
    template <size_t kRow> static const void *kernel(bool prologue) {
        constexpr Tile t = kRows[kRow].tile;
        using Config = DirectTmaConfig<kRows[kRow].precision, t.subtiles, t.block_n, t.kernel, t.stage_taps, t.stages,
                                       t.raw_stages, t.mean_stages, t.mean_warps, t.mean_groups>;
        return prologue ? reinterpret_cast<const void *>(&direct_tma_kernel<Config, true>)
                        : reinterpret_cast<const void *>(&direct_tma_kernel<Config, false>);
    }
};

}  // namespace convpool::direct_tma

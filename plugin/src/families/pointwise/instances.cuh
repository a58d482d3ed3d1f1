// SPDX-License-Identifier: Apache-2.0
// From rows of pointwise to kernels.
#pragma once

#include "core/instances.h"
#include "families/pointwise/kernel.cuh"
#include "families/pointwise/rows.h"

namespace convpool::pointwise {

struct Instances : RowsOf<kRows> {
    template <size_t kRow> static const void *kernel(bool prologue) {
        constexpr Tile t = kRows[kRow].tile;
        using Config = TileConfig<kRows[kRow].precision, t.block_m, t.block_n, t.warps_m, t.warps_n, t.stages, 1>;
        return prologue ? reinterpret_cast<const void *>(&pointwise_kernel<Config, true>)
                        : reinterpret_cast<const void *>(&pointwise_kernel<Config, false>);
    }
};

}  // namespace convpool::pointwise

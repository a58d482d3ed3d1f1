// SPDX-License-Identifier: Apache-2.0
// From rows of few_channels to kernels.
#pragma once

#include "core/instances.h"
#include "families/few_channels/kernel.cuh"
#include "families/few_channels/rows.h"

namespace convpool::few_channels {

struct Instances : RowsOf<kRows> {
    template <size_t kRow> static const void *kernel(bool) {
        constexpr Tile t = kRows[kRow].tile;
        using Config = FewChannelsConfig<kRows[kRow].precision, t.block_m, t.block_n, t.warps, 1, t.steps, t.min_blocks>;
        return reinterpret_cast<const void *>(&few_channels_kernel<Config>);
    }
};

}  // namespace convpool::few_channels

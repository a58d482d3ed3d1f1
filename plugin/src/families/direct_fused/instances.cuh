// From rows of direct_fused to kernels.
#pragma once

#include <iterator>

#include "families/direct_fused/kernel.cuh"
#include "families/direct_fused/rows.h"

namespace convpool::direct_fused {

struct Instances {
    static constexpr size_t kCount = std::size(kRows);
    template <size_t kRow> static constexpr Precision precision() { return kRows[kRow].precision; }
    template <size_t kRow> static const void *kernel(bool) {
        constexpr Tile t = kRows[kRow].tile;
        using Config = TileConfig<kRows[kRow].precision, t.block_m, t.block_n, t.warps_m, t.warps_n, t.stages, t.min_blocks>;
        return reinterpret_cast<const void *>(&direct_fused_kernel<Config>);
    }
};

}  // namespace convpool::direct_fused

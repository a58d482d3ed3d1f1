// From rows of implicit_gemm to kernels.
#pragma once

#include <iterator>

#include "families/implicit_gemm/kernel.cuh"
#include "families/implicit_gemm/rows.h"

namespace convpool::implicit_gemm {

struct Instances {
    static constexpr size_t kCount = std::size(kRows);
    template <size_t kRow> static constexpr Precision precision() { return kRows[kRow].precision; }
    template <size_t kRow> static const void *kernel(bool) {
        constexpr Tile t = kRows[kRow].tile;
        using Config = TileConfig<kRows[kRow].precision, t.block_m, t.block_n, t.warps_m, t.warps_n, t.stages, t.min_blocks>;
        return reinterpret_cast<const void *>(&implicit_gemm_kernel<Config>);
    }
};

}  // namespace convpool::implicit_gemm

// SPDX-License-Identifier: Apache-2.0
// From rows of direct_rs to kernels.
#pragma once

#include "core/instances.h"
#include "families/direct_rs/kernel.cuh"
#include "families/direct_rs/rows.h"

namespace convpool::direct_rs {

// An instance for each prologue of each row, null where a row does not take it.
struct Instances {
    static constexpr size_t kCount = std::size(kRows) * kRsPrologues;
    template <size_t kInstance> static constexpr Precision precision() { return kRows[kInstance / kRsPrologues].precision; }
    template <size_t kInstance> static const void *kernel(bool) {
        constexpr Row row = kRows[kInstance / kRsPrologues];
        constexpr Tile t = row.tile;
        constexpr RsPrologue prologue = static_cast<RsPrologue>(kInstance % kRsPrologues);
        if constexpr (!row.takes(prologue)) return nullptr;
        else
            return reinterpret_cast<const void *>(
                &direct_rs_kernel<DirectRsConfig<row.precision, row.packed, t.kernel, t.pool, t.side, t.groups, t.k_parts,
                                                 t.block_n, t.stage_taps, t.stages, t.raw_stages, t.order, t.splits, prologue>>);
    }
};

}  // namespace convpool::direct_rs

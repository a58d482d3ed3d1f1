// SPDX-License-Identifier: Apache-2.0
// From rows of direct_rs to kernels.
#pragma once

#include "core/instances.h"
#include "families/direct_rs/kernel.cuh"
#include "families/direct_rs/rows.h"

namespace convpool::direct_rs {

struct Instances : RowsOf<kRows> {
    template <size_t kRow> static const void *kernel(bool) {
        constexpr Row row = kRows[kRow];
        constexpr Tile t = row.tile;
        return reinterpret_cast<const void *>(
            &direct_rs_kernel<DirectRsConfig<row.precision, row.packed, t.kernel, t.pool, t.side, t.groups, t.k_parts, t.block_n,
                                             t.stage_taps, t.stages, t.raw_stages, t.order, t.splits>>);
    }
};

}  // namespace convpool::direct_rs

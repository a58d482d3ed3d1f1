// SPDX-License-Identifier: Apache-2.0
// From rows of direct_rs_nchw to kernels.
#pragma once

#include "core/instances.h"
#include "families/direct_rs_nchw/kernel.cuh"
#include "families/direct_rs_nchw/rows.h"

namespace convpool::direct_rs_nchw {

struct Instances : RowsOf<kRows> {
    template <size_t kRow> static const void *kernel(bool padded_by_one) {
        return padded_by_one ? function<kRow, true>() : function<kRow, false>();
    }
    template <size_t kRow, bool kPaddedByOne> static const void *function() {
        constexpr Row row = kRows[kRow];
        constexpr Tile t = row.tile;
        return reinterpret_cast<const void *>(
            &direct_rs_nchw_kernel<DirectRsNchwConfig<row.precision, row.packed, kPaddedByOne, t.columns, t.depth, t.k_parts,
                                                      t.block_n, t.stage_taps, t.stages, t.raw_stages, t.order>>);
    }
};

}  // namespace convpool::direct_rs_nchw

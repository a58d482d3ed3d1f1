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
        constexpr Row r = kRows[kRow];
        return reinterpret_cast<const void *>(
            &direct_rs_nchw_kernel<DirectRsNchwConfig<kPaddedByOne, r.columns, r.depth, r.k_parts, r.block_n, r.stage_taps,
                                                      r.stages, r.raw_stages, r.order>>);
    }
};

}  // namespace convpool::direct_rs_nchw

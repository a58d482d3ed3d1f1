// SPDX-License-Identifier: Apache-2.0
// The box of output pixels that a direct_fused tile covers, and the layout of its shared memory.
#pragma once

#include <cstdint>
#include <string>

#include "core/tactic.h"
#include "families/direct_fused/params.h"
#include "families/direct_fused/rows.h"

namespace convpool::direct_fused {

// All but the pointers of a launch.
struct Layout {
    DirectFusedParams params;
    int64_t grid, shared_bytes;
    int blocks_per_multiprocessor;
};

// Empty, or the reason why no tile of the row takes the problem on such a device.
std::string lay_out(const Problem &problem, const Tactic &tactic, const Row &row, const Device &device, Layout &layout);

}  // namespace convpool::direct_fused

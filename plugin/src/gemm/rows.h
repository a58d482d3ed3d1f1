// SPDX-License-Identifier: Apache-2.0
// The rows of the families of implicit GEMM.
#pragma once

#include <cstdint>

#include "core/rows.h"

namespace convpool::gemm {

// What of AveragePool is done before the GEMM.
enum class Operand {
    kPooledX,  // direct_gemm: X is pooled, and convolved with W
    kFusedW    // filter_fused: W is summed over pooling windows, and X convolved with it
};

struct Tile {
    int32_t block_m, block_n, warps_m, warps_n;
    int32_t stages;      // buffers of pixels and weights in flight
    int32_t min_blocks;  // of a multiprocessor
    Step step;
};

struct Row {
    int32_t id;  // never reused
    Precision precision;
    Operand operand;
    Tile tile;
    int32_t split = 1;  // thread blocks of a cluster that share the sum
};

constexpr bool is_fitted(const Row &row) { return row.tile.step.issue_us > 0; }

}  // namespace convpool::gemm

// SPDX-License-Identifier: Apache-2.0
// Parameters of implicit_gemm_tma.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "gemm/phases.h"
#include "gemm/rows.h"

namespace convpool {

struct ImplicitGemmTmaParams {
    CUtensorMap x_map;        // X [n,h,w,c] by im2col: columns of a tile's output pixels
    CUtensorMap w_map;        // W [taps,m,c], a view
    ImplicitGemmParams gemm;  // x, w, slices, chunks, div_tap_chunks and round_pixels unused
    Prologue prologue;        // of a kernel that activates: only an activation
    int32_t steps;            // of 128 bytes of channels
    FastDiv div_tap_steps;    // those of a tap
    // Parameters of a kernel for phases. The channel tiles of gemm are those of all phases, `steps` unused.
    PhaseTiles phases;
    int32_t blocks;  // of all tiles; those that run take them one after the other
    // Y [n * places' rows, row's phase, column, column's phase, m], to which sums are copied, 16 places in 1, 2 or 4 parts. 0: they
    // are stored.
    CUtensorMap y_map;
    int32_t y_parts;
};

// True for the precisions whose sums can be copied to Y. (Full fp32 has no registers left.)
constexpr bool copies_boxes(Precision precision) { return precision != Precision::kTF32x3; }

// Threads of a block that do not multiply: a warp, or a warpgroup that hands its registers to those that hold three sums.
constexpr int im2col_copy_threads(Precision precision, int block_m, int block_n) {
    return precision == Precision::kTF32x3 && block_m * block_n > 64 * 128 ? 128 : 32;
}

// True where a kernel can apply an activation in front: for 16-bit types, where accumulators leave a thread the registers for a
// step's pixels. With more of them ptxas waits for every product.
constexpr bool can_activate(Precision precision, int block_m, int block_n, int min_blocks) {
    return (precision == Precision::kF16 || precision == Precision::kBF16) && block_m <= 128 &&
           (block_n <= 64 || (block_n <= 128 && min_blocks == 1));
}

}  // namespace convpool

// SPDX-License-Identifier: Apache-2.0
// The tactics of implicit_gemm_tma, and what the host tells its kernels.
#pragma once

#include <cuda.h>

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
    int32_t w_rows;           // channels of Y in a box of W, a part of a tile's
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

namespace convpool::implicit_gemm_tma {

using gemm::Line;
using gemm::Row;
using gemm::Tile;

// Steps are of 128 bytes of channels of one tap.
// clang-format off
// block_m, block_n, warps_m, warps_n, stages, min_blocks, step, staged_channels, phase_step_us, phase_ends_us, differences
constexpr Tile k128x256s4{128, 256,  8, 1, 4, 1, {0.574}};
constexpr Tile k128x128s6{128, 128,  8, 1, 6, 1, {0.314}, 32, 0.328, 6.17};
constexpr Tile k128x128s3{128, 128,  8, 1, 3, 2, {0.332, 0.331}};
constexpr Tile k256x128s4{256, 128, 16, 1, 4, 1, {0.587}, 0, 0.654, 5.65};
constexpr Tile k128x64s8{ 128,  64,  8, 1, 8, 1, {0.227}, 32, 0.288, 2.48};
constexpr Tile k128x64s4{ 128,  64,  8, 1, 4, 2, {0.194, 0.228}};
constexpr Tile k64x64s8{   64,  64,  4, 1, 8, 1, {0.206}, 32, 0.247, 1.58};
constexpr Tile k64x64s4{   64,  64,  4, 1, 4, 3, {0.094, 0.233}, 32, 0.243, 0.52};
constexpr Tile k64x128s8{  64, 128,  4, 1, 8, 1, {0.238}};
constexpr Tile k64x32s8{   64,  32,  4, 1, 8, 2, {0.206}};
// Of phases alone.
constexpr Tile k128x256s3{128, 256,  8, 1, 3, 1, {0.574}, 128, 0.686, 2.6};
constexpr Tile k128x192s4{128, 192,  8, 1, 4, 1, {0.45}, 96, 0.565, 1.5};
constexpr Tile k128x128s5{128, 128,  8, 1, 5, 1, {0.314}, 64, 0.441, 1.3};
constexpr Tile k128x64s3{ 128,  64,  8, 1, 3, 2, {0.194, 0.228}, 64, 0.322, 1.02};
constexpr Tile k128x128d{ 128, 128,  8, 1, 4, 1, {0.314}, 64, 0.37, 2.3, true};

inline constexpr Line kLines[] = {
    // tile, split, {X pooled: F16, BF16, TF32, TF32x3;  W fused: the same;  phases of W: the same}
    {k128x256s4, 1, {1541, 1641, 1741,    0, 3541,    0, 3741, 0}},
    {k128x128s6, 1, {1542, 1642, 1742, 1842, 3542, 3642, 3742, 0,    0,    0,    0, 5302}},
    {k128x128s3, 1, {1543,    0,    0,    0,    0,    0,    0, 0}},
    {k256x128s4, 1, {1544,    0, 1744,    0, 3544,    0,    0, 0, 5004, 5104, 5204,    0}},
    {k128x64s8,  1, {1545, 1645, 1745, 1845, 3545, 3645, 3745, 0,    0,    0,    0, 5305}},
    {k128x64s4,  1, {1546,    0,    0,    0,    0,    0,    0, 0}},
    {k64x64s8,   1, {1547, 1647,    0, 1847,    0, 3647, 3747, 0,    0,    0,    0, 5307}},
    {k64x64s4,   1, {1548,    0,    0,    0, 3548,    0,    0, 0, 5008, 5108, 5208,    0}},
    {k64x128s8,  1, {1549,    0, 1749, 1849, 3549,    0,    0, 0}},
    {k128x128s6, 2, {1561,    0, 1761, 1861, 3561,    0,    0, 0}},
    {k128x128s6, 4, {1562,    0,    0,    0,    0,    0,    0, 0}},
    {k128x64s8,  2, {1563,    0, 1763, 1863, 3563,    0, 3763, 0}},
    {k128x64s8,  4, {1564,    0, 1764, 1864, 3564,    0, 3764, 0}},
    {k64x128s8,  2, {1568,    0, 1768, 1868,    0,    0,    0, 0}},
    {k64x128s8,  4, {1569,    0, 1769, 1869, 3569,    0,    0, 0}},
    {k64x64s4,   6, {1571,    0, 1771,    0, 3570, 3670, 3770, 0}},
    {k128x128s6, 3, {1573, 1673,    0,    0,    0,    0,    0, 0}},
    {k64x64s8,   2, {   0,    0, 1765, 1865,    0, 3665,    0, 0}},
    {k64x64s4,   8, {   0,    0, 1772,    0,    0,    0,    0, 0}},
    {k64x64s8,   4, {   0,    0,    0, 1866,    0,    0, 3766, 0}},
    {k64x64s8,   8, {   0,    0,    0,    0, 3567,    0, 3767, 0}},
    {k64x32s8,   2, {   0,    0,    0,    0,    0,    0, 3771, 0}},
    {k64x32s8,   4, {   0,    0,    0,    0,    0,    0, 3772, 0}},
    {k64x32s8,   6, {   0,    0,    0,    0,    0,    0, 3773, 0}},
    {k64x32s8,   8, {   0,    0,    0,    0,    0,    0, 3774, 0}},
    {k64x64s4,   4, {   0,    0,    0,    0,    0,    0, 3775, 0, 5028, 5128, 5228,    0}},
    {k128x256s3, 1, {   0,    0,    0,    0,    0,    0,    0, 0, 5032, 5132, 5232,    0}},
    {k128x192s4, 1, {   0,    0,    0,    0,    0,    0,    0, 0, 5031, 5131, 5231,    0}},
    {k128x128s5, 1, {   0,    0,    0,    0,    0,    0,    0, 0, 5033, 5133, 5233,    0}},
    {k128x64s3,  1, {   0,    0,    0,    0,    0,    0,    0, 0, 5034, 5134, 5234,    0}},
    {k128x128d,  1, {   0,    0,    0,    0,    0,    0,    0, 0, 5035, 5135, 5235,    0}},
};
// clang-format on
inline constexpr auto kRows = rows_of<kLines>();
static_assert(
    [] {
        for (const Row &row : kRows)
            if (row.operand == gemm::Operand::kPhasesOfW && row.split > 1 &&
                !pushes_sums(row.precision, row.tile.block_m, row.tile.block_n))
                return false;
        return true;
    }(),
    "phases of a split tile are pushed");

}  // namespace convpool::implicit_gemm_tma

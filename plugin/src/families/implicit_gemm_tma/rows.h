// SPDX-License-Identifier: Apache-2.0
// The tactics of implicit_gemm_tma.
#pragma once

#include <cstddef>

#include "gemm/rows.h"

namespace convpool::implicit_gemm_tma {

using gemm::Operand;
using gemm::Row;
using gemm::Tile;

// Steps are of 128 bytes of channels of one tap.
constexpr Tile k128x256s4{
    .block_m = 128, .block_n = 256, .warps_m = 8, .warps_n = 1, .stages = 4, .min_blocks = 1, .step = {0.574}};
constexpr Tile k128x128s6{
    .block_m = 128, .block_n = 128, .warps_m = 8, .warps_n = 1, .stages = 6, .min_blocks = 1, .step = {0.314}};
constexpr Tile k128x128s3{
    .block_m = 128, .block_n = 128, .warps_m = 8, .warps_n = 1, .stages = 3, .min_blocks = 2, .step = {0.332, 0.331}};
constexpr Tile k256x128s4{
    .block_m = 256, .block_n = 128, .warps_m = 16, .warps_n = 1, .stages = 4, .min_blocks = 1, .step = {0.587}};
constexpr Tile k128x64s8{
    .block_m = 128, .block_n = 64, .warps_m = 8, .warps_n = 1, .stages = 8, .min_blocks = 1, .step = {0.227}};
constexpr Tile k128x64s4{
    .block_m = 128, .block_n = 64, .warps_m = 8, .warps_n = 1, .stages = 4, .min_blocks = 2, .step = {0.194, 0.228}};
constexpr Tile k64x64s8{.block_m = 64, .block_n = 64, .warps_m = 4, .warps_n = 1, .stages = 8, .min_blocks = 1, .step = {0.206}};
constexpr Tile k64x64s4{
    .block_m = 64, .block_n = 64, .warps_m = 4, .warps_n = 1, .stages = 4, .min_blocks = 3, .step = {0.094, 0.233}};
constexpr Tile k64x128s8{
    .block_m = 64, .block_n = 128, .warps_m = 4, .warps_n = 1, .stages = 8, .min_blocks = 1, .step = {0.238}};
constexpr Tile k64x32s8{.block_m = 64, .block_n = 32, .warps_m = 4, .warps_n = 1, .stages = 8, .min_blocks = 2, .step = {0.206}};

inline constexpr Row kRows[] = {
    {.id = 1541, .precision = Precision::kF16, .operand = Operand::kPooledX, .tile = k128x256s4},
    {.id = 1542, .precision = Precision::kF16, .operand = Operand::kPooledX, .tile = k128x128s6},
    {.id = 1543, .precision = Precision::kF16, .operand = Operand::kPooledX, .tile = k128x128s3},
    {.id = 1544, .precision = Precision::kF16, .operand = Operand::kPooledX, .tile = k256x128s4},
    {.id = 1545, .precision = Precision::kF16, .operand = Operand::kPooledX, .tile = k128x64s8},
    {.id = 1546, .precision = Precision::kF16, .operand = Operand::kPooledX, .tile = k128x64s4},
    {.id = 1547, .precision = Precision::kF16, .operand = Operand::kPooledX, .tile = k64x64s8},
    {.id = 1548, .precision = Precision::kF16, .operand = Operand::kPooledX, .tile = k64x64s4},
    {.id = 1549, .precision = Precision::kF16, .operand = Operand::kPooledX, .tile = k64x128s8},
    {.id = 1561, .precision = Precision::kF16, .operand = Operand::kPooledX, .tile = k128x128s6, .split = 2},
    {.id = 1562, .precision = Precision::kF16, .operand = Operand::kPooledX, .tile = k128x128s6, .split = 4},
    {.id = 1563, .precision = Precision::kF16, .operand = Operand::kPooledX, .tile = k128x64s8, .split = 2},
    {.id = 1564, .precision = Precision::kF16, .operand = Operand::kPooledX, .tile = k128x64s8, .split = 4},
    {.id = 1565, .precision = Precision::kF16, .operand = Operand::kPooledX, .tile = k64x64s8, .split = 2},
    {.id = 1566, .precision = Precision::kF16, .operand = Operand::kPooledX, .tile = k64x64s8, .split = 4},
    {.id = 1567, .precision = Precision::kF16, .operand = Operand::kPooledX, .tile = k64x64s8, .split = 8},
    {.id = 1568, .precision = Precision::kF16, .operand = Operand::kPooledX, .tile = k64x128s8, .split = 2},
    {.id = 1569, .precision = Precision::kF16, .operand = Operand::kPooledX, .tile = k64x128s8, .split = 4},
    {.id = 1571, .precision = Precision::kF16, .operand = Operand::kPooledX, .tile = k64x64s4, .split = 6},
    {.id = 1573, .precision = Precision::kF16, .operand = Operand::kPooledX, .tile = k128x128s6, .split = 3},
    {.id = 1641, .precision = Precision::kBF16, .operand = Operand::kPooledX, .tile = k128x256s4},
    {.id = 1642, .precision = Precision::kBF16, .operand = Operand::kPooledX, .tile = k128x128s6},
    {.id = 1645, .precision = Precision::kBF16, .operand = Operand::kPooledX, .tile = k128x64s8},
    {.id = 1647, .precision = Precision::kBF16, .operand = Operand::kPooledX, .tile = k64x64s8},
    {.id = 1649, .precision = Precision::kBF16, .operand = Operand::kPooledX, .tile = k64x128s8},
    {.id = 1665, .precision = Precision::kBF16, .operand = Operand::kPooledX, .tile = k64x64s8, .split = 2},
    {.id = 1666, .precision = Precision::kBF16, .operand = Operand::kPooledX, .tile = k64x64s8, .split = 4},
    {.id = 1673, .precision = Precision::kBF16, .operand = Operand::kPooledX, .tile = k128x128s6, .split = 3},
    {.id = 1741, .precision = Precision::kTF32, .operand = Operand::kPooledX, .tile = k128x256s4},
    {.id = 1742, .precision = Precision::kTF32, .operand = Operand::kPooledX, .tile = k128x128s6},
    {.id = 1744, .precision = Precision::kTF32, .operand = Operand::kPooledX, .tile = k256x128s4},
    {.id = 1745, .precision = Precision::kTF32, .operand = Operand::kPooledX, .tile = k128x64s8},
    {.id = 1747, .precision = Precision::kTF32, .operand = Operand::kPooledX, .tile = k64x64s8},
    {.id = 1749, .precision = Precision::kTF32, .operand = Operand::kPooledX, .tile = k64x128s8},
    {.id = 1761, .precision = Precision::kTF32, .operand = Operand::kPooledX, .tile = k128x128s6, .split = 2},
    {.id = 1763, .precision = Precision::kTF32, .operand = Operand::kPooledX, .tile = k128x64s8, .split = 2},
    {.id = 1764, .precision = Precision::kTF32, .operand = Operand::kPooledX, .tile = k128x64s8, .split = 4},
    {.id = 1765, .precision = Precision::kTF32, .operand = Operand::kPooledX, .tile = k64x64s8, .split = 2},
    {.id = 1766, .precision = Precision::kTF32, .operand = Operand::kPooledX, .tile = k64x64s8, .split = 4},
    {.id = 1767, .precision = Precision::kTF32, .operand = Operand::kPooledX, .tile = k64x64s8, .split = 8},
    {.id = 1768, .precision = Precision::kTF32, .operand = Operand::kPooledX, .tile = k64x128s8, .split = 2},
    {.id = 1769, .precision = Precision::kTF32, .operand = Operand::kPooledX, .tile = k64x128s8, .split = 4},
    {.id = 1771, .precision = Precision::kTF32, .operand = Operand::kPooledX, .tile = k64x64s4, .split = 6},
    {.id = 1772, .precision = Precision::kTF32, .operand = Operand::kPooledX, .tile = k64x64s4, .split = 8},
    {.id = 1842, .precision = Precision::kTF32x3, .operand = Operand::kPooledX, .tile = k128x128s6},
    {.id = 1845, .precision = Precision::kTF32x3, .operand = Operand::kPooledX, .tile = k128x64s8},
    {.id = 1847, .precision = Precision::kTF32x3, .operand = Operand::kPooledX, .tile = k64x64s8},
    {.id = 1849, .precision = Precision::kTF32x3, .operand = Operand::kPooledX, .tile = k64x128s8},
    {.id = 1861, .precision = Precision::kTF32x3, .operand = Operand::kPooledX, .tile = k128x128s6, .split = 2},
    {.id = 1863, .precision = Precision::kTF32x3, .operand = Operand::kPooledX, .tile = k128x64s8, .split = 2},
    {.id = 1864, .precision = Precision::kTF32x3, .operand = Operand::kPooledX, .tile = k128x64s8, .split = 4},
    {.id = 1865, .precision = Precision::kTF32x3, .operand = Operand::kPooledX, .tile = k64x64s8, .split = 2},
    {.id = 1866, .precision = Precision::kTF32x3, .operand = Operand::kPooledX, .tile = k64x64s8, .split = 4},
    {.id = 1868, .precision = Precision::kTF32x3, .operand = Operand::kPooledX, .tile = k64x128s8, .split = 2},
    {.id = 1869, .precision = Precision::kTF32x3, .operand = Operand::kPooledX, .tile = k64x128s8, .split = 4},
    {.id = 3541, .precision = Precision::kF16, .operand = Operand::kFusedW, .tile = k128x256s4},
    {.id = 3542, .precision = Precision::kF16, .operand = Operand::kFusedW, .tile = k128x128s6},
    {.id = 3544, .precision = Precision::kF16, .operand = Operand::kFusedW, .tile = k256x128s4},
    {.id = 3545, .precision = Precision::kF16, .operand = Operand::kFusedW, .tile = k128x64s8},
    {.id = 3547, .precision = Precision::kF16, .operand = Operand::kFusedW, .tile = k64x64s8},
    {.id = 3548, .precision = Precision::kF16, .operand = Operand::kFusedW, .tile = k64x64s4},
    {.id = 3549, .precision = Precision::kF16, .operand = Operand::kFusedW, .tile = k64x128s8},
    {.id = 3561, .precision = Precision::kF16, .operand = Operand::kFusedW, .tile = k128x128s6, .split = 2},
    {.id = 3563, .precision = Precision::kF16, .operand = Operand::kFusedW, .tile = k128x64s8, .split = 2},
    {.id = 3564, .precision = Precision::kF16, .operand = Operand::kFusedW, .tile = k128x64s8, .split = 4},
    {.id = 3565, .precision = Precision::kF16, .operand = Operand::kFusedW, .tile = k64x64s8, .split = 2},
    {.id = 3566, .precision = Precision::kF16, .operand = Operand::kFusedW, .tile = k64x64s8, .split = 4},
    {.id = 3567, .precision = Precision::kF16, .operand = Operand::kFusedW, .tile = k64x64s8, .split = 8},
    {.id = 3568, .precision = Precision::kF16, .operand = Operand::kFusedW, .tile = k64x128s8, .split = 2},
    {.id = 3569, .precision = Precision::kF16, .operand = Operand::kFusedW, .tile = k64x128s8, .split = 4},
    {.id = 3570, .precision = Precision::kF16, .operand = Operand::kFusedW, .tile = k64x64s4, .split = 6},
    {.id = 3642, .precision = Precision::kBF16, .operand = Operand::kFusedW, .tile = k128x128s6},
    {.id = 3645, .precision = Precision::kBF16, .operand = Operand::kFusedW, .tile = k128x64s8},
    {.id = 3647, .precision = Precision::kBF16, .operand = Operand::kFusedW, .tile = k64x64s8},
    {.id = 3665, .precision = Precision::kBF16, .operand = Operand::kFusedW, .tile = k64x64s8, .split = 2},
    {.id = 3666, .precision = Precision::kBF16, .operand = Operand::kFusedW, .tile = k64x64s8, .split = 4},
    {.id = 3670, .precision = Precision::kBF16, .operand = Operand::kFusedW, .tile = k64x64s4, .split = 6},
    {.id = 3741, .precision = Precision::kTF32, .operand = Operand::kFusedW, .tile = k128x256s4},
    {.id = 3742, .precision = Precision::kTF32, .operand = Operand::kFusedW, .tile = k128x128s6},
    {.id = 3745, .precision = Precision::kTF32, .operand = Operand::kFusedW, .tile = k128x64s8},
    {.id = 3747, .precision = Precision::kTF32, .operand = Operand::kFusedW, .tile = k64x64s8},
    {.id = 3749, .precision = Precision::kTF32, .operand = Operand::kFusedW, .tile = k64x128s8},
    {.id = 3763, .precision = Precision::kTF32, .operand = Operand::kFusedW, .tile = k128x64s8, .split = 2},
    {.id = 3764, .precision = Precision::kTF32, .operand = Operand::kFusedW, .tile = k128x64s8, .split = 4},
    {.id = 3765, .precision = Precision::kTF32, .operand = Operand::kFusedW, .tile = k64x64s8, .split = 2},
    {.id = 3766, .precision = Precision::kTF32, .operand = Operand::kFusedW, .tile = k64x64s8, .split = 4},
    {.id = 3767, .precision = Precision::kTF32, .operand = Operand::kFusedW, .tile = k64x64s8, .split = 8},
    {.id = 3768, .precision = Precision::kTF32, .operand = Operand::kFusedW, .tile = k64x128s8, .split = 2},
    {.id = 3769, .precision = Precision::kTF32, .operand = Operand::kFusedW, .tile = k64x128s8, .split = 4},
    {.id = 3770, .precision = Precision::kTF32, .operand = Operand::kFusedW, .tile = k64x64s4, .split = 6},
    {.id = 3771, .precision = Precision::kTF32, .operand = Operand::kFusedW, .tile = k64x32s8, .split = 2},
    {.id = 3772, .precision = Precision::kTF32, .operand = Operand::kFusedW, .tile = k64x32s8, .split = 4},
    {.id = 3773, .precision = Precision::kTF32, .operand = Operand::kFusedW, .tile = k64x32s8, .split = 6},
    {.id = 3774, .precision = Precision::kTF32, .operand = Operand::kFusedW, .tile = k64x32s8, .split = 8},
    {.id = 3775, .precision = Precision::kTF32, .operand = Operand::kFusedW, .tile = k64x64s4, .split = 4},
};
static_assert(ids_rise(kRows));
static_assert(all_rows(kRows, gemm::is_fitted), "a row's tile has a fitted cost");

// The kernel of a row of this precision.
template <Precision kPrecision> const void *kernel(size_t row, bool prologue);

}  // namespace convpool::implicit_gemm_tma

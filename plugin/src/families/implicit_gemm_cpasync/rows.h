// SPDX-License-Identifier: Apache-2.0
// The tactics of implicit_gemm_cpasync.
#pragma once

#include <cstddef>

#include "gemm/rows.h"

namespace convpool::implicit_gemm_cpasync {

using gemm::Operand;
using gemm::Row;
using gemm::Tile;

// Steps are of 128 bytes of K of every pixel and channel of a tile. Latencies are fitted where blocks share a
// multiprocessor; elsewhere they are not told from the issue.
constexpr Tile k128x256s4{
    .block_m = 128, .block_n = 256, .warps_m = 8, .warps_n = 1, .stages = 4, .min_blocks = 1, .step = {0.768}};
constexpr Tile k128x128s3{
    .block_m = 128, .block_n = 128, .warps_m = 8, .warps_n = 1, .stages = 3, .min_blocks = 2, .step = {0.516}};
constexpr Tile k128x64s4{
    .block_m = 128, .block_n = 64, .warps_m = 8, .warps_n = 1, .stages = 4, .min_blocks = 2, .step = {0.304, 0.310}};
constexpr Tile k64x64s4{
    .block_m = 64, .block_n = 64, .warps_m = 4, .warps_n = 1, .stages = 4, .min_blocks = 3, .step = {0.172, 0.227}};
constexpr Tile k128x128s6{
    .block_m = 128, .block_n = 128, .warps_m = 8, .warps_n = 1, .stages = 6, .min_blocks = 1, .step = {0.475}};
constexpr Tile k256x128s4{
    .block_m = 256, .block_n = 128, .warps_m = 16, .warps_n = 1, .stages = 4, .min_blocks = 1, .step = {0.838}};
constexpr Tile k256x64s5{
    .block_m = 256, .block_n = 64, .warps_m = 16, .warps_n = 1, .stages = 5, .min_blocks = 1, .step = {0.574}};
constexpr Tile k128x64s8{
    .block_m = 128, .block_n = 64, .warps_m = 8, .warps_n = 1, .stages = 8, .min_blocks = 1, .step = {0.307}};
constexpr Tile k64x64s8{.block_m = 64, .block_n = 64, .warps_m = 4, .warps_n = 1, .stages = 8, .min_blocks = 1, .step = {0.200}};
constexpr Tile k64x64s6{.block_m = 64, .block_n = 64, .warps_m = 4, .warps_n = 1, .stages = 6, .min_blocks = 2, .step = {0.200}};
constexpr Tile k64x32s8{.block_m = 64, .block_n = 32, .warps_m = 4, .warps_n = 1, .stages = 8, .min_blocks = 2, .step = {0.200}};

inline constexpr Row kRows[] = {
    {.id = 1501, .precision = Precision::kF16, .operand = Operand::kPooledX, .tile = k128x256s4},
    {.id = 1502, .precision = Precision::kF16, .operand = Operand::kPooledX, .tile = k128x128s3},
    {.id = 1503, .precision = Precision::kF16, .operand = Operand::kPooledX, .tile = k128x64s4},
    {.id = 1504, .precision = Precision::kF16, .operand = Operand::kPooledX, .tile = k64x64s4},
    {.id = 1505, .precision = Precision::kF16, .operand = Operand::kPooledX, .tile = k128x128s6},
    {.id = 1506, .precision = Precision::kF16, .operand = Operand::kPooledX, .tile = k256x128s4},
    {.id = 1507, .precision = Precision::kF16, .operand = Operand::kPooledX, .tile = k256x64s5},
    {.id = 1508, .precision = Precision::kF16, .operand = Operand::kPooledX, .tile = k128x64s8},
    {.id = 1509, .precision = Precision::kF16, .operand = Operand::kPooledX, .tile = k64x64s8},
    {.id = 1521, .precision = Precision::kF16, .operand = Operand::kPooledX, .tile = k128x256s4, .split = 2},
    {.id = 1522, .precision = Precision::kF16, .operand = Operand::kPooledX, .tile = k128x128s6, .split = 2},
    {.id = 1523, .precision = Precision::kF16, .operand = Operand::kPooledX, .tile = k128x128s6, .split = 4},
    {.id = 1524, .precision = Precision::kF16, .operand = Operand::kPooledX, .tile = k128x64s8, .split = 2},
    {.id = 1525, .precision = Precision::kF16, .operand = Operand::kPooledX, .tile = k128x64s8, .split = 4},
    {.id = 1526, .precision = Precision::kF16, .operand = Operand::kPooledX, .tile = k64x64s8, .split = 2},
    {.id = 1527, .precision = Precision::kF16, .operand = Operand::kPooledX, .tile = k64x64s8, .split = 4},
    {.id = 1528, .precision = Precision::kF16, .operand = Operand::kPooledX, .tile = k64x64s8, .split = 8},
    {.id = 1529, .precision = Precision::kF16, .operand = Operand::kPooledX, .tile = k64x64s4, .split = 2},
    {.id = 1530, .precision = Precision::kF16, .operand = Operand::kPooledX, .tile = k64x64s4, .split = 4},
    {.id = 1601, .precision = Precision::kBF16, .operand = Operand::kPooledX, .tile = k128x256s4},
    {.id = 1602, .precision = Precision::kBF16, .operand = Operand::kPooledX, .tile = k128x128s6},
    {.id = 1604, .precision = Precision::kBF16, .operand = Operand::kPooledX, .tile = k64x64s4},
    {.id = 1621, .precision = Precision::kBF16, .operand = Operand::kPooledX, .tile = k64x64s8, .split = 4},
    {.id = 1626, .precision = Precision::kBF16, .operand = Operand::kPooledX, .tile = k64x64s8, .split = 2},
    {.id = 1701, .precision = Precision::kTF32, .operand = Operand::kPooledX, .tile = k128x256s4},
    {.id = 1702, .precision = Precision::kTF32, .operand = Operand::kPooledX, .tile = k128x128s6},
    {.id = 1703, .precision = Precision::kTF32, .operand = Operand::kPooledX, .tile = k256x128s4},
    {.id = 1704, .precision = Precision::kTF32, .operand = Operand::kPooledX, .tile = k128x64s8},
    {.id = 1705, .precision = Precision::kTF32, .operand = Operand::kPooledX, .tile = k64x64s8},
    {.id = 1706, .precision = Precision::kTF32, .operand = Operand::kPooledX, .tile = k64x64s4},
    {.id = 1721, .precision = Precision::kTF32, .operand = Operand::kPooledX, .tile = k128x128s6, .split = 2},
    {.id = 1722, .precision = Precision::kTF32, .operand = Operand::kPooledX, .tile = k128x128s6, .split = 4},
    {.id = 1723, .precision = Precision::kTF32, .operand = Operand::kPooledX, .tile = k128x64s8, .split = 2},
    {.id = 1724, .precision = Precision::kTF32, .operand = Operand::kPooledX, .tile = k128x64s8, .split = 4},
    {.id = 1725, .precision = Precision::kTF32, .operand = Operand::kPooledX, .tile = k64x64s8, .split = 2},
    {.id = 1726, .precision = Precision::kTF32, .operand = Operand::kPooledX, .tile = k64x64s8, .split = 4},
    {.id = 1727, .precision = Precision::kTF32, .operand = Operand::kPooledX, .tile = k64x64s8, .split = 8},
    {.id = 1728, .precision = Precision::kTF32, .operand = Operand::kPooledX, .tile = k64x64s8, .split = 6},
    {.id = 1801, .precision = Precision::kTF32x3, .operand = Operand::kPooledX, .tile = k128x128s6},
    {.id = 1802, .precision = Precision::kTF32x3, .operand = Operand::kPooledX, .tile = k128x64s8},
    {.id = 1803, .precision = Precision::kTF32x3, .operand = Operand::kPooledX, .tile = k64x64s8},
    {.id = 1804, .precision = Precision::kTF32x3, .operand = Operand::kPooledX, .tile = k64x64s4},
    {.id = 1821, .precision = Precision::kTF32x3, .operand = Operand::kPooledX, .tile = k128x128s6, .split = 2},
    {.id = 1822, .precision = Precision::kTF32x3, .operand = Operand::kPooledX, .tile = k128x128s6, .split = 4},
    {.id = 1823, .precision = Precision::kTF32x3, .operand = Operand::kPooledX, .tile = k128x64s8, .split = 2},
    {.id = 1824, .precision = Precision::kTF32x3, .operand = Operand::kPooledX, .tile = k128x64s8, .split = 4},
    {.id = 1825, .precision = Precision::kTF32x3, .operand = Operand::kPooledX, .tile = k64x64s8, .split = 2},
    {.id = 1826, .precision = Precision::kTF32x3, .operand = Operand::kPooledX, .tile = k64x64s8, .split = 4},
    {.id = 1827, .precision = Precision::kTF32x3, .operand = Operand::kPooledX, .tile = k64x64s8, .split = 8},
    {.id = 3501, .precision = Precision::kF16, .operand = Operand::kFusedW, .tile = k128x256s4},
    {.id = 3502, .precision = Precision::kF16, .operand = Operand::kFusedW, .tile = k128x128s3},
    {.id = 3503, .precision = Precision::kF16, .operand = Operand::kFusedW, .tile = k128x64s4},
    {.id = 3504, .precision = Precision::kF16, .operand = Operand::kFusedW, .tile = k64x64s4},
    {.id = 3505, .precision = Precision::kF16, .operand = Operand::kFusedW, .tile = k128x128s6},
    {.id = 3506, .precision = Precision::kF16, .operand = Operand::kFusedW, .tile = k256x128s4},
    {.id = 3507, .precision = Precision::kF16, .operand = Operand::kFusedW, .tile = k256x64s5},
    {.id = 3508, .precision = Precision::kF16, .operand = Operand::kFusedW, .tile = k128x64s8},
    {.id = 3509, .precision = Precision::kF16, .operand = Operand::kFusedW, .tile = k64x64s8},
    {.id = 3510, .precision = Precision::kF16, .operand = Operand::kFusedW, .tile = k64x32s8},
    {.id = 3521, .precision = Precision::kF16, .operand = Operand::kFusedW, .tile = k128x256s4, .split = 2},
    {.id = 3522, .precision = Precision::kF16, .operand = Operand::kFusedW, .tile = k128x128s6, .split = 2},
    {.id = 3523, .precision = Precision::kF16, .operand = Operand::kFusedW, .tile = k128x128s6, .split = 4},
    {.id = 3524, .precision = Precision::kF16, .operand = Operand::kFusedW, .tile = k128x64s8, .split = 2},
    {.id = 3525, .precision = Precision::kF16, .operand = Operand::kFusedW, .tile = k128x64s8, .split = 4},
    {.id = 3526, .precision = Precision::kF16, .operand = Operand::kFusedW, .tile = k64x64s8, .split = 2},
    {.id = 3527, .precision = Precision::kF16, .operand = Operand::kFusedW, .tile = k64x64s8, .split = 4},
    {.id = 3528, .precision = Precision::kF16, .operand = Operand::kFusedW, .tile = k64x64s8, .split = 8},
    {.id = 3529, .precision = Precision::kF16, .operand = Operand::kFusedW, .tile = k64x64s4, .split = 2},
    {.id = 3530, .precision = Precision::kF16, .operand = Operand::kFusedW, .tile = k64x64s4, .split = 4},
    {.id = 3531, .precision = Precision::kF16, .operand = Operand::kFusedW, .tile = k64x32s8, .split = 2},
    {.id = 3532, .precision = Precision::kF16, .operand = Operand::kFusedW, .tile = k64x32s8, .split = 4},
    {.id = 3533, .precision = Precision::kF16, .operand = Operand::kFusedW, .tile = k64x32s8, .split = 6},
    {.id = 3534, .precision = Precision::kF16, .operand = Operand::kFusedW, .tile = k64x32s8, .split = 8},
    {.id = 3535, .precision = Precision::kF16, .operand = Operand::kFusedW, .tile = k64x64s6, .split = 4},
    {.id = 3536, .precision = Precision::kF16, .operand = Operand::kFusedW, .tile = k64x64s6, .split = 8},
    {.id = 3601, .precision = Precision::kBF16, .operand = Operand::kFusedW, .tile = k128x256s4},
    {.id = 3602, .precision = Precision::kBF16, .operand = Operand::kFusedW, .tile = k128x128s6},
    {.id = 3604, .precision = Precision::kBF16, .operand = Operand::kFusedW, .tile = k64x64s4},
    {.id = 3621, .precision = Precision::kBF16, .operand = Operand::kFusedW, .tile = k64x64s8, .split = 4},
    {.id = 3632, .precision = Precision::kBF16, .operand = Operand::kFusedW, .tile = k64x32s8, .split = 4},
    {.id = 3633, .precision = Precision::kBF16, .operand = Operand::kFusedW, .tile = k64x32s8, .split = 6},
    {.id = 3634, .precision = Precision::kBF16, .operand = Operand::kFusedW, .tile = k64x32s8, .split = 8},
    {.id = 3635, .precision = Precision::kBF16, .operand = Operand::kFusedW, .tile = k64x64s6, .split = 4},
    {.id = 3636, .precision = Precision::kBF16, .operand = Operand::kFusedW, .tile = k64x64s6, .split = 8},
    {.id = 3724, .precision = Precision::kTF32, .operand = Operand::kFusedW, .tile = k128x64s8, .split = 4},
    {.id = 3725, .precision = Precision::kTF32, .operand = Operand::kFusedW, .tile = k64x64s8, .split = 2},
    {.id = 3726, .precision = Precision::kTF32, .operand = Operand::kFusedW, .tile = k64x64s8, .split = 4},
    {.id = 3727, .precision = Precision::kTF32, .operand = Operand::kFusedW, .tile = k64x64s8, .split = 8},
};
// Ids 3701 to 3706 and 3721 to 3723 belonged to rows that are gone.
static_assert(ids_rise(kRows));
static_assert(all_rows(kRows, gemm::is_fitted), "a row's tile has a fitted cost");

// The kernel of a row of this precision.
template <Precision kPrecision> const void *kernel(size_t row, bool prologue);

}  // namespace convpool::implicit_gemm_cpasync

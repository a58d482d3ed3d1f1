// SPDX-License-Identifier: Apache-2.0
// The tactics of implicit_gemm_cpasync.
#pragma once

#include "gemm/rows.h"

namespace convpool::implicit_gemm_cpasync {

using gemm::Line;
using gemm::Row;
using gemm::Tile;

// Steps are of 128 bytes of K of every pixel and channel of a tile. Latencies are fitted where blocks share a
// multiprocessor; elsewhere they are not told from the issue.
// clang-format off
// block_m, block_n, warps_m, warps_n, stages, min_blocks, step
constexpr Tile k128x256s4{128, 256,  8, 1, 4, 1, {0.768}};
constexpr Tile k128x128s3{128, 128,  8, 1, 3, 2, {0.516}};
constexpr Tile k128x64s4{ 128,  64,  8, 1, 4, 2, {0.304, 0.310}};
constexpr Tile k64x64s4{   64,  64,  4, 1, 4, 3, {0.172, 0.227}};
constexpr Tile k128x128s6{128, 128,  8, 1, 6, 1, {0.475}};
constexpr Tile k256x128s4{256, 128, 16, 1, 4, 1, {0.838}};
constexpr Tile k256x64s5{ 256,  64, 16, 1, 5, 1, {0.574}};
constexpr Tile k128x64s8{ 128,  64,  8, 1, 8, 1, {0.307}};
constexpr Tile k64x64s8{   64,  64,  4, 1, 8, 1, {0.200}};
constexpr Tile k64x64s6{   64,  64,  4, 1, 6, 2, {0.200}};
constexpr Tile k64x32s8{   64,  32,  4, 1, 8, 2, {0.200}};

inline constexpr Line kLines[] = {
    // tile, split, {X pooled: F16, BF16, TF32, TF32x3;  W fused: the same}
    {k128x256s4, 1, {1501, 1601, 1701,    0, 3501, 3601,    0, 0}},
    {k128x128s3, 1, {1502,    0,    0,    0, 3502,    0,    0, 0}},
    {k128x64s4,  1, {1503,    0,    0,    0, 3503,    0,    0, 0}},
    {k64x64s4,   1, {1504, 1604, 1706, 1804, 3504, 3604,    0, 0}},
    {k128x128s6, 1, {1505, 1602, 1702,    0, 3505, 3602,    0, 0}},
    {k256x128s4, 1, {1506,    0, 1703,    0, 3506,    0,    0, 0}},
    {k256x64s5,  1, {1507,    0,    0,    0, 3507,    0,    0, 0}},
    {k128x64s8,  1, {1508,    0, 1704,    0, 3508,    0,    0, 0}},
    {k64x64s8,   1, {1509,    0, 1705,    0, 3509,    0,    0, 0}},
    {k64x64s8,   2, {1526, 1626, 1725, 1825, 3526,    0, 3725, 0}},
    {k64x64s8,   4, {1527, 1621, 1726, 1826, 3527, 3621, 3726, 0}},
    {k64x64s8,   8, {1528,    0, 1727, 1827, 3528,    0, 3727, 0}},
    {k64x64s4,   4, {1530,    0,    0,    0, 3530,    0,    0, 0}},
    {k128x128s6, 4, {   0,    0, 1722,    0, 3523,    0,    0, 0}},
    {k128x64s8,  4, {   0,    0, 1724,    0, 3525,    0, 3724, 0}},
    {k64x64s8,   6, {   0,    0, 1728,    0,    0,    0,    0, 0}},
    {k64x32s8,   1, {   0,    0,    0,    0, 3510,    0,    0, 0}},
    {k128x64s8,  2, {   0,    0,    0,    0, 3524,    0,    0, 0}},
    {k64x32s8,   2, {   0,    0,    0,    0, 3531,    0,    0, 0}},
    {k64x32s8,   4, {   0,    0,    0,    0, 3532, 3632,    0, 0}},
    {k64x32s8,   6, {   0,    0,    0,    0, 3533, 3633,    0, 0}},
    {k64x32s8,   8, {   0,    0,    0,    0, 3534, 3634,    0, 0}},
    {k64x64s6,   4, {   0,    0,    0,    0, 3535, 3635,    0, 0}},
    {k64x64s6,   8, {   0,    0,    0,    0, 3536, 3636,    0, 0}},
};
// clang-format on
inline constexpr auto kRows = rows_of<kLines>();

}  // namespace convpool::implicit_gemm_cpasync

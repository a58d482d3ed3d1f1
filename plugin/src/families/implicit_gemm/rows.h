// SPDX-License-Identifier: Apache-2.0
// The tactics of implicit_gemm.
#pragma once

#include "gemm/phases.h"
#include "gemm/rows.h"

namespace convpool {

// Parameters of implicit_gemm.
struct PhasedGemmParams {
    ImplicitGemmParams gemm;
    PhaseTiles phases;  // of a kernel for phases, whose channel tiles gemm counts
};

}  // namespace convpool

namespace convpool::implicit_gemm {

using gemm::Line;
using gemm::Row;
using gemm::Tile;

// Steps are of 64 bytes of channels. One block lacks the warps to fill the tensor cores.
// clang-format off
// block_m, block_n, warps_m, warps_n, stages, min_blocks, step
constexpr Tile k128x128{    128, 128, 2, 2, 4, 2, {0.42, 0.7}};
constexpr Tile k64x64{       64,  64, 2, 2, 4, 3, {0.14625, 0.25}};
constexpr Tile k128x128Tf32{128, 128, 2, 2, 4, 2, {0.504, 0.84}};
constexpr Tile k64x64Tf32{   64,  64, 2, 2, 4, 3, {0.1755, 0.3}};
constexpr Tile k64x64Tf32x3{ 64,  64, 2, 2, 4, 2, {0.385, 0.525}};

inline constexpr Line kLines[] = {
    // tile, split, {X pooled: F16, BF16, TF32, TF32x3;  W fused: the same;  phases of W: the same}
    {k128x128,     1, {1001, 1101,    0,    0, 3001, 3101,    0,    0, 5401, 5501,    0,    0}},
    {k64x64,       1, {1002, 1102,    0,    0, 3002, 3102,    0,    0, 5402, 5502,    0,    0}},
    {k128x128Tf32, 1, {   0,    0, 1201,    0,    0,    0, 3201,    0,    0,    0, 5601,    0}},
    {k64x64Tf32,   1, {   0,    0, 1202,    0,    0,    0, 3202,    0,    0,    0, 5602,    0}},
    {k64x64Tf32x3, 1, {   0,    0,    0, 1301,    0,    0,    0, 3301,    0,    0,    0, 5702}},
};
// clang-format on
inline constexpr auto kRows = rows_of<kLines>();

}  // namespace convpool::implicit_gemm

// SPDX-License-Identifier: Apache-2.0
// The tactics of implicit_gemm.
#pragma once

#include <cstddef>

#include "gemm/rows.h"

namespace convpool::implicit_gemm {

using gemm::Operand;
using gemm::Row;
using gemm::Tile;

// Steps are of 64 bytes of channels. One block lacks the warps to fill the tensor cores.
constexpr Tile k128x128{
    .block_m = 128, .block_n = 128, .warps_m = 2, .warps_n = 2, .stages = 4, .min_blocks = 2, .step = {0.42, 0.7}};
constexpr Tile k64x64{
    .block_m = 64, .block_n = 64, .warps_m = 2, .warps_n = 2, .stages = 4, .min_blocks = 3, .step = {0.14625, 0.25}};
constexpr Tile k128x128Tf32{
    .block_m = 128, .block_n = 128, .warps_m = 2, .warps_n = 2, .stages = 4, .min_blocks = 2, .step = {0.504, 0.84}};
constexpr Tile k64x64Tf32{
    .block_m = 64, .block_n = 64, .warps_m = 2, .warps_n = 2, .stages = 4, .min_blocks = 3, .step = {0.1755, 0.3}};
constexpr Tile k64x64Tf32x3{
    .block_m = 64, .block_n = 64, .warps_m = 2, .warps_n = 2, .stages = 4, .min_blocks = 2, .step = {0.385, 0.525}};

inline constexpr Row kRows[] = {
    {.id = 1001, .precision = Precision::kF16, .operand = Operand::kPooledX, .tile = k128x128},
    {.id = 1002, .precision = Precision::kF16, .operand = Operand::kPooledX, .tile = k64x64},
    {.id = 1101, .precision = Precision::kBF16, .operand = Operand::kPooledX, .tile = k128x128},
    {.id = 1102, .precision = Precision::kBF16, .operand = Operand::kPooledX, .tile = k64x64},
    {.id = 1201, .precision = Precision::kTF32, .operand = Operand::kPooledX, .tile = k128x128Tf32},
    {.id = 1202, .precision = Precision::kTF32, .operand = Operand::kPooledX, .tile = k64x64Tf32},
    {.id = 1301, .precision = Precision::kTF32x3, .operand = Operand::kPooledX, .tile = k64x64Tf32x3},
    {.id = 3001, .precision = Precision::kF16, .operand = Operand::kFusedW, .tile = k128x128},
    {.id = 3002, .precision = Precision::kF16, .operand = Operand::kFusedW, .tile = k64x64},
    {.id = 3101, .precision = Precision::kBF16, .operand = Operand::kFusedW, .tile = k128x128},
    {.id = 3102, .precision = Precision::kBF16, .operand = Operand::kFusedW, .tile = k64x64},
    {.id = 3201, .precision = Precision::kTF32, .operand = Operand::kFusedW, .tile = k128x128Tf32},
    {.id = 3202, .precision = Precision::kTF32, .operand = Operand::kFusedW, .tile = k64x64Tf32},
    {.id = 3301, .precision = Precision::kTF32x3, .operand = Operand::kFusedW, .tile = k64x64Tf32x3},
};
static_assert(ids_rise(kRows));
static_assert(all_rows(kRows, gemm::is_fitted), "a row's tile has a fitted cost");

// The kernel of a row of this precision.
template <Precision kPrecision> const void *kernel(size_t row, bool prologue);

}  // namespace convpool::implicit_gemm

// SPDX-License-Identifier: Apache-2.0
// The tactics of pointwise.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/rows.h"

namespace convpool::pointwise {

struct Tile {
    int32_t block_m, block_n, warps_m, warps_n;
    int32_t stages;
    Step step;           // of 128 bytes of channels
    double ends_us = 0;  // of a tile's start and end
};

constexpr Tile kN64{.block_m = 64, .block_n = 64, .warps_m = 4, .warps_n = 2, .stages = 5, .step = {0.65}, .ends_us = 1.67};
constexpr Tile kN128{.block_m = 64, .block_n = 128, .warps_m = 4, .warps_n = 2, .stages = 4, .step = {0.78}, .ends_us = 1.86};
constexpr Tile kN256{.block_m = 64, .block_n = 256, .warps_m = 4, .warps_n = 2, .stages = 3, .step = {1.14}, .ends_us = 3.29};

struct Row {
    int32_t id;  // never reused
    Precision precision;
    Tile tile;
    int32_t split = 1;  // thread blocks of a cluster that share the channels
};

// One block a multiprocessor.
inline constexpr Row kRows[] = {
    {.id = 2751, .precision = Precision::kF16, .tile = kN64},
    {.id = 2752, .precision = Precision::kF16, .tile = kN128},
    {.id = 2753, .precision = Precision::kF16, .tile = kN256},
    {.id = 2771, .precision = Precision::kF16, .tile = kN64, .split = 2},
    {.id = 2772, .precision = Precision::kF16, .tile = kN64, .split = 4},
    {.id = 2773, .precision = Precision::kF16, .tile = kN64, .split = 8},
    {.id = 2775, .precision = Precision::kF16, .tile = kN128, .split = 4},
    {.id = 2851, .precision = Precision::kBF16, .tile = kN64},
    {.id = 2852, .precision = Precision::kBF16, .tile = kN128},
    {.id = 2853, .precision = Precision::kBF16, .tile = kN256},
    {.id = 2871, .precision = Precision::kBF16, .tile = kN64, .split = 2},
    {.id = 2872, .precision = Precision::kBF16, .tile = kN64, .split = 4},
    {.id = 2873, .precision = Precision::kBF16, .tile = kN64, .split = 8},
    {.id = 2875, .precision = Precision::kBF16, .tile = kN128, .split = 4},
};
// Ids 2754, 2774, 2776, 2777, and those 100 and 200 later, belonged to rows that are gone.
static_assert(ids_rise(kRows));
static_assert(all_rows(
                  kRows, +[](const Row &row) { return row.tile.step.issue_us > 0 && row.tile.ends_us > 0; }),
              "a row's tile has a fitted cost");

// The kernel of a row of this precision.
template <Precision kPrecision> const void *kernel(size_t row, bool prologue);

}  // namespace convpool::pointwise

// SPDX-License-Identifier: Apache-2.0
// The tactics of few_channels.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/rows.h"

namespace convpool::few_channels {

// Fitted to six layers of 3 channels (in TF32 entry 65 of benchmarks/log.md), in microseconds of a warp's 32 pixels.
struct Cost {
    double plain_gather_us = 0;  // of operands that are pixels of X
    double gather_us = 0;        // of others, but for the loads of their windows
    double part_us = 0;          // of the products and stores of 64 channels
};

struct Tile {
    int32_t block_m, block_n, warps;
    int32_t steps;       // of 16 taps and channels, in TF32 of 8
    int32_t min_blocks;  // of a multiprocessor
    Cost cost;
};

constexpr Tile k16{.block_m = 256, .block_n = 64, .warps = 8, .steps = 1, .min_blocks = 2, .cost = {0.0492, 0.1224, 0.1104}};
constexpr Tile k32{.block_m = 256, .block_n = 64, .warps = 8, .steps = 2, .min_blocks = 2, .cost = {0.0684, 0.1448, 0.1408}};
constexpr Tile k64{.block_m = 256, .block_n = 64, .warps = 8, .steps = 4, .min_blocks = 2, .cost = {0.1068, 0.1896, 0.2016}};

constexpr Tile kFloat16{.block_m = 256, .block_n = 64, .warps = 8, .steps = 2, .min_blocks = 2, .cost = {0.07, 0.15, 0.2}};
constexpr Tile kFloat32{.block_m = 256, .block_n = 64, .warps = 8, .steps = 4, .min_blocks = 2, .cost = {0.11, 0.19, 0.22}};
constexpr Tile kFloat64{.block_m = 256, .block_n = 64, .warps = 8, .steps = 8, .min_blocks = 1, .cost = {0.29, 0.53, 0.3}};

struct Row {
    int32_t id;  // never reused
    Precision precision;
    Tile tile;
};

inline constexpr Row kRows[] = {
    {.id = 2781, .precision = Precision::kF16, .tile = k16},       {.id = 2782, .precision = Precision::kF16, .tile = k32},
    {.id = 2784, .precision = Precision::kF16, .tile = k64},       {.id = 2881, .precision = Precision::kBF16, .tile = k16},
    {.id = 2882, .precision = Precision::kBF16, .tile = k32},      {.id = 2884, .precision = Precision::kBF16, .tile = k64},
    {.id = 2981, .precision = Precision::kTF32, .tile = kFloat16}, {.id = 2982, .precision = Precision::kTF32, .tile = kFloat32},
    {.id = 2984, .precision = Precision::kTF32, .tile = kFloat64},
};
static_assert(ids_rise(kRows));
static_assert(all_rows(
                  kRows, +[](const Row &row) { return row.tile.cost.plain_gather_us > 0 && row.tile.cost.part_us > 0; }),
              "a row's tile has a fitted cost");

// The kernel of a row of this precision.
template <Precision kPrecision> const void *kernel(size_t row, bool prologue);

}  // namespace convpool::few_channels

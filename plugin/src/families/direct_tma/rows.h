// SPDX-License-Identifier: Apache-2.0
// The tactics of direct_tma.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/rows.h"

namespace convpool::direct_tma {

// Fitted, in microseconds.
struct Cost {
    double slice_us = 0;     // of 64 bytes of channels
    double prologue_us = 0;  // of the same with scale and shift in front (1x1 kernels: any prologue)
    double end_us = 0;       // of a tile
};

struct Tile {
    int32_t kernel;    // rows and columns of it
    int32_t subtiles;  // of 8x8 pixels
    int32_t block_n;
    int32_t stage_taps;  // whose weights make a stage
    int32_t stages, raw_stages, mean_stages;
    int32_t mean_warps;
    int32_t mean_groups = 1;  // of warps, which form the box means of a slice each, in turn
    Cost cost;

    constexpr int block_m() const { return 64 * subtiles; }
};

constexpr Tile k3x3m128n256{.kernel = 3,
                            .subtiles = 2,
                            .block_n = 256,
                            .stage_taps = 1,
                            .stages = 4,
                            .raw_stages = 2,
                            .mean_stages = 2,
                            .mean_warps = 3,
                            .cost = {3.47, 6.24, 4.8}};
constexpr Tile k3x3m128n128{.kernel = 3,
                            .subtiles = 2,
                            .block_n = 128,
                            .stage_taps = 3,
                            .stages = 3,
                            .raw_stages = 2,
                            .mean_stages = 2,
                            .mean_warps = 7,
                            .cost = {2.25, 3.71, 1.33}};
constexpr Tile k3x3m128n64{.kernel = 3,
                           .subtiles = 2,
                           .block_n = 64,
                           .stage_taps = 3,
                           .stages = 5,
                           .raw_stages = 2,
                           .mean_stages = 2,
                           .mean_warps = 7,
                           .cost = {2.06, 3.82, 0.42}};
constexpr Tile k3x3m128n32{.kernel = 3,
                           .subtiles = 2,
                           .block_n = 32,
                           .stage_taps = 3,
                           .stages = 5,
                           .raw_stages = 3,
                           .mean_stages = 2,
                           .mean_warps = 7,
                           .cost = {1.97, 3.71, 0.31}};
constexpr Tile k3x3m64n256{.kernel = 3,
                           .subtiles = 1,
                           .block_n = 256,
                           .stage_taps = 1,
                           .stages = 8,
                           .raw_stages = 3,
                           .mean_stages = 2,
                           .mean_warps = 7,
                           .cost = {2.05, 3.13, 1.11}};
constexpr Tile k3x3m64n128{.kernel = 3,
                           .subtiles = 1,
                           .block_n = 128,
                           .stage_taps = 3,
                           .stages = 4,
                           .raw_stages = 4,
                           .mean_stages = 2,
                           .mean_warps = 7,
                           .cost = {1.52, 2.90, 0.77}};
constexpr Tile k3x3m64n64{.kernel = 3,
                          .subtiles = 1,
                          .block_n = 64,
                          .stage_taps = 3,
                          .stages = 6,
                          .raw_stages = 5,
                          .mean_stages = 2,
                          .mean_warps = 7,
                          .cost = {1.52, 3.08, 0.23}};
constexpr Tile k1x1n128{.kernel = 1,
                        .subtiles = 1,
                        .block_n = 128,
                        .stage_taps = 1,
                        .stages = 8,
                        .raw_stages = 8,
                        .mean_stages = 4,
                        .mean_warps = 7,
                        .mean_groups = 3,
                        .cost = {0.35, 0.79, 0.51}};
constexpr Tile k1x1n256{.kernel = 1,
                        .subtiles = 1,
                        .block_n = 256,
                        .stage_taps = 1,
                        .stages = 4,
                        .raw_stages = 8,
                        .mean_stages = 4,
                        .mean_warps = 7,
                        .mean_groups = 3,
                        .cost = {0.50, 0.84, 0.81}};

struct Row {
    int32_t id;  // never reused
    Precision precision;
    Tile tile;
};

inline constexpr Row kRows[] = {
    {.id = 2701, .precision = Precision::kF16, .tile = k3x3m128n256},
    {.id = 2702, .precision = Precision::kF16, .tile = k3x3m128n128},
    {.id = 2703, .precision = Precision::kF16, .tile = k3x3m128n64},
    {.id = 2704, .precision = Precision::kF16, .tile = k3x3m128n32},
    {.id = 2705, .precision = Precision::kF16, .tile = k3x3m64n256},
    {.id = 2706, .precision = Precision::kF16, .tile = k3x3m64n128},
    {.id = 2707, .precision = Precision::kF16, .tile = k3x3m64n64},
    {.id = 2724, .precision = Precision::kF16, .tile = k1x1n128},
    {.id = 2725, .precision = Precision::kF16, .tile = k1x1n256},
    {.id = 2801, .precision = Precision::kBF16, .tile = k3x3m128n256},
    {.id = 2802, .precision = Precision::kBF16, .tile = k3x3m128n128},
    {.id = 2803, .precision = Precision::kBF16, .tile = k3x3m128n64},
    {.id = 2804, .precision = Precision::kBF16, .tile = k3x3m128n32},
    {.id = 2805, .precision = Precision::kBF16, .tile = k3x3m64n256},
    {.id = 2806, .precision = Precision::kBF16, .tile = k3x3m64n128},
    {.id = 2807, .precision = Precision::kBF16, .tile = k3x3m64n64},
    {.id = 2824, .precision = Precision::kBF16, .tile = k1x1n128},
    {.id = 2825, .precision = Precision::kBF16, .tile = k1x1n256},
    {.id = 2901, .precision = Precision::kTF32, .tile = k3x3m128n256},
    {.id = 2902, .precision = Precision::kTF32, .tile = k3x3m128n128},
    {.id = 2903, .precision = Precision::kTF32, .tile = k3x3m128n64},
    {.id = 2904, .precision = Precision::kTF32, .tile = k3x3m128n32},
    {.id = 2905, .precision = Precision::kTF32, .tile = k3x3m64n256},
    {.id = 2906, .precision = Precision::kTF32, .tile = k3x3m64n128},
    {.id = 2907, .precision = Precision::kTF32, .tile = k3x3m64n64},
    {.id = 2924, .precision = Precision::kTF32, .tile = k1x1n128},
    {.id = 2925, .precision = Precision::kTF32, .tile = k1x1n256},
};
// Ids 2501 to 2621, 2721 to 2723, and those 100 and 200 later, belonged to rows that are gone.
static_assert(ids_rise(kRows));
static_assert(all_rows(
                  kRows, +[](const Row &row) { return row.tile.cost.slice_us > 0 && row.tile.cost.prologue_us > 0; }),
              "a row's tile has a fitted cost");

// The kernel of a row of this precision.
template <Precision kPrecision> const void *kernel(size_t row, bool prologue);

}  // namespace convpool::direct_tma

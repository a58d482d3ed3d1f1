// SPDX-License-Identifier: Apache-2.0
// The tactics of direct_rs.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/rows.h"
#include "families/direct_rs/params.h"

namespace convpool::direct_rs {

// Fitted, in microseconds.
struct Cost {
    double exact_us = 0, packed_us = 0, tf32_us = 0;  // of a slice: 64 bytes of channels
    double end_us = 0;                                // of a tile
};

// Which prologues a tile takes; with packed sums and in TF32 a ReLU's only.
enum class RsPrologues { kNone, kRelu, kAll };

struct Tile {
    int32_t kernel;       // rows and columns of it
    int32_t pool = 2;     // of the window
    int32_t side = 8;     // of an image's pixels in a subtile: 8, or 4 of each of four images
    int32_t groups;       // warpgroups that multiply
    int32_t k_parts = 1;  // of a slice: each by another warpgroup, which share a subtile's sum
    int32_t block_n;
    int32_t stage_taps;  // whose weights make a stage
    int32_t stages, raw_stages;
    RsOrder order;
    bool splits = false;  // blocks of a cluster may share a tile's slices
    RsPrologues prologues = RsPrologues::kNone;
    Cost cost;

    constexpr int subtiles() const { return groups / k_parts; }  // of 64 pixels
    constexpr int block_m() const { return 64 * subtiles(); }
};

constexpr Tile k3x3m128n256{.kernel = 3,
                            .groups = 2,
                            .block_n = 256,
                            .stage_taps = 1,
                            .stages = 8,
                            .raw_stages = 2,
                            .order = RsOrder::kRows,
                            .prologues = RsPrologues::kRelu,
                            .cost = {3.36, 3.12, 3.17, 2.95}};
constexpr Tile k3x3m128n128{.kernel = 3,
                            .groups = 2,
                            .block_n = 128,
                            .stage_taps = 3,
                            .stages = 5,
                            .raw_stages = 2,
                            .order = RsOrder::kTurns,
                            .prologues = RsPrologues::kAll,
                            .cost = {2.18, 1.96, 1.86, 1.55}};
constexpr Tile k3x3m128n64{.kernel = 3,
                           .groups = 2,
                           .block_n = 64,
                           .stage_taps = 3,
                           .stages = 8,
                           .raw_stages = 3,
                           .order = RsOrder::kTurns,
                           .prologues = RsPrologues::kAll,
                           .cost = {1.70, 1.32, 1.33, 0.55}};
constexpr Tile k3x3m128n32{.kernel = 3,
                           .groups = 2,
                           .block_n = 32,
                           .stage_taps = 3,
                           .stages = 6,
                           .raw_stages = 4,
                           .order = RsOrder::kTurns,
                           .prologues = RsPrologues::kRelu,
                           .cost = {1.54, 1.22, 1.21, 0.25}};
constexpr Tile k3x3m256n32{.kernel = 3,
                           .groups = 4,
                           .block_n = 32,
                           .stage_taps = 3,
                           .stages = 6,
                           .raw_stages = 2,
                           .order = RsOrder::kSteps,
                           .cost = {2.94, 2.16, 0, 0.45}};
constexpr Tile k3x3m64n128{.kernel = 3,
                           .groups = 2,
                           .k_parts = 2,
                           .block_n = 128,
                           .stage_taps = 3,
                           .stages = 5,
                           .raw_stages = 3,
                           .order = RsOrder::kRows,
                           .prologues = RsPrologues::kAll,
                           .cost = {1.30, 1.11, 1.10, 0.80}};
constexpr Tile k3x3m64n64{.kernel = 3,
                          .groups = 2,
                          .k_parts = 2,
                          .block_n = 64,
                          .stage_taps = 3,
                          .stages = 8,
                          .raw_stages = 5,
                          .order = RsOrder::kRows,
                          .prologues = RsPrologues::kAll,
                          .cost = {1.00, 0.86, 0.85, 0.50}};
constexpr Tile k3x3m64n32{.kernel = 3,
                          .groups = 2,
                          .k_parts = 2,
                          .block_n = 32,
                          .stage_taps = 3,
                          .stages = 9,
                          .raw_stages = 6,
                          .order = RsOrder::kRows,
                          .prologues = RsPrologues::kRelu,
                          .cost = {0.94, 0.80, 0.78, 0.25}};

// For small images.
constexpr Tile k3x3m64n128of4{.kernel = 3,
                              .side = 4,
                              .groups = 2,
                              .k_parts = 2,
                              .block_n = 128,
                              .stage_taps = 3,
                              .stages = 4,
                              .raw_stages = 2,
                              .order = RsOrder::kRows,
                              .splits = true,
                              .prologues = RsPrologues::kRelu,
                              .cost = {1.30, 1.15, 1.25, 1.10}};
constexpr Tile k3x3m64n64of4{.kernel = 3,
                             .side = 4,
                             .groups = 2,
                             .k_parts = 2,
                             .block_n = 64,
                             .stage_taps = 3,
                             .stages = 7,
                             .raw_stages = 3,
                             .order = RsOrder::kRows,
                             .splits = true,
                             .prologues = RsPrologues::kRelu,
                             .cost = {1.05, 0.88, 0.93, 0.35}};
constexpr Tile k5x5m128n128{.kernel = 5,
                            .groups = 2,
                            .block_n = 128,
                            .stage_taps = 1,
                            .stages = 15,
                            .raw_stages = 2,
                            .order = RsOrder::kRows,
                            .cost = {5.14, 4.38, 4.58, 2.45}};
constexpr Tile k5x5m128n64{.kernel = 5,
                           .groups = 2,
                           .block_n = 64,
                           .stage_taps = 5,
                           .stages = 6,
                           .raw_stages = 2,
                           .order = RsOrder::kRows,
                           .cost = {3.64, 2.92, 3.12, 1.35}};
constexpr Tile k5x5m64n64{.kernel = 5,
                          .groups = 2,
                          .k_parts = 2,
                          .block_n = 64,
                          .stage_taps = 5,
                          .stages = 5,
                          .raw_stages = 4,
                          .order = RsOrder::kRows,
                          .cost = {1.98, 1.60, 1.66, 1.05}};
constexpr Tile k5x5m64n32{.kernel = 5,
                          .groups = 2,
                          .k_parts = 2,
                          .block_n = 32,
                          .stage_taps = 5,
                          .stages = 9,
                          .raw_stages = 5,
                          .order = RsOrder::kRows,
                          .cost = {1.88, 1.50, 1.50, 0.40}};
constexpr Tile k3x3pool3m64n128{.kernel = 3,
                                .pool = 3,
                                .groups = 2,
                                .k_parts = 2,
                                .block_n = 128,
                                .stage_taps = 3,
                                .stages = 4,
                                .raw_stages = 2,
                                .order = RsOrder::kRows,
                                .cost = {1.60, 0, 1.52, 1.70}};
constexpr Tile k3x3pool3m64n64{.kernel = 3,
                               .pool = 3,
                               .groups = 2,
                               .k_parts = 2,
                               .block_n = 64,
                               .stage_taps = 3,
                               .stages = 6,
                               .raw_stages = 3,
                               .order = RsOrder::kRows,
                               .cost = {1.34, 0, 1.08, 1.05}};
constexpr Tile k3x3pool3m64n32{.kernel = 3,
                               .pool = 3,
                               .groups = 2,
                               .k_parts = 2,
                               .block_n = 32,
                               .stage_taps = 3,
                               .stages = 7,
                               .raw_stages = 4,
                               .order = RsOrder::kRows,
                               .cost = {1.20, 0, 0.92, 0.85}};
constexpr Tile k5x5pool3m64n64{.kernel = 5,
                               .pool = 3,
                               .groups = 2,
                               .k_parts = 2,
                               .block_n = 64,
                               .stage_taps = 5,
                               .stages = 5,
                               .raw_stages = 2,
                               .order = RsOrder::kRows,
                               .cost = {2.82, 0, 2.02, 1.75}};
constexpr Tile k5x5pool3m64n32{.kernel = 5,
                               .pool = 3,
                               .groups = 2,
                               .k_parts = 2,
                               .block_n = 32,
                               .stage_taps = 5,
                               .stages = 6,
                               .raw_stages = 3,
                               .order = RsOrder::kRows,
                               .cost = {2.78, 0, 1.86, 0.75}};

struct Row {
    int32_t id;  // never reused
    Precision precision;
    bool packed;  // how box means are summed: in X's type, or in fp32
    Tile tile;
    int32_t split = 1;

    constexpr bool takes(RsPrologue prologue) const {
        if (prologue == RsPrologue::kNone) return true;
        if (prologue == RsPrologue::kRelu) return tile.prologues != RsPrologues::kNone;
        return tile.prologues == RsPrologues::kAll && !packed && precision != Precision::kTF32;
    }
    constexpr double slice_us() const {
        return precision == Precision::kTF32 ? tile.cost.tf32_us : packed ? tile.cost.packed_us : tile.cost.exact_us;
    }
};

inline constexpr Row kRows[] = {
    {.id = 4101, .precision = Precision::kF16, .packed = false, .tile = k3x3m128n256},
    {.id = 4102, .precision = Precision::kF16, .packed = false, .tile = k3x3m128n128},
    {.id = 4103, .precision = Precision::kF16, .packed = false, .tile = k3x3m128n64},
    {.id = 4104, .precision = Precision::kF16, .packed = false, .tile = k3x3m128n32},
    {.id = 4105, .precision = Precision::kF16, .packed = false, .tile = k3x3m256n32},
    {.id = 4106, .precision = Precision::kF16, .packed = false, .tile = k3x3m64n64},
    {.id = 4107, .precision = Precision::kF16, .packed = false, .tile = k3x3m64n32},
    {.id = 4108, .precision = Precision::kF16, .packed = false, .tile = k3x3m64n128},
    {.id = 4110, .precision = Precision::kF16, .packed = false, .tile = k3x3m64n128of4, .split = 2},
    {.id = 4111, .precision = Precision::kF16, .packed = false, .tile = k3x3m64n128of4, .split = 4},
    {.id = 4112, .precision = Precision::kF16, .packed = false, .tile = k3x3m64n64of4},
    {.id = 4113, .precision = Precision::kF16, .packed = false, .tile = k3x3m64n64of4, .split = 2},
    {.id = 4114, .precision = Precision::kF16, .packed = false, .tile = k3x3m64n64of4, .split = 4},
    {.id = 4151, .precision = Precision::kF16, .packed = true, .tile = k3x3m128n256},
    {.id = 4152, .precision = Precision::kF16, .packed = true, .tile = k3x3m128n128},
    {.id = 4153, .precision = Precision::kF16, .packed = true, .tile = k3x3m128n64},
    {.id = 4154, .precision = Precision::kF16, .packed = true, .tile = k3x3m128n32},
    {.id = 4155, .precision = Precision::kF16, .packed = true, .tile = k3x3m256n32},
    {.id = 4156, .precision = Precision::kF16, .packed = true, .tile = k3x3m64n64},
    {.id = 4157, .precision = Precision::kF16, .packed = true, .tile = k3x3m64n32},
    {.id = 4158, .precision = Precision::kF16, .packed = true, .tile = k3x3m64n128},
    {.id = 4160, .precision = Precision::kF16, .packed = true, .tile = k3x3m64n128of4, .split = 2},
    {.id = 4161, .precision = Precision::kF16, .packed = true, .tile = k3x3m64n128of4, .split = 4},
    {.id = 4162, .precision = Precision::kF16, .packed = true, .tile = k3x3m64n64of4},
    {.id = 4163, .precision = Precision::kF16, .packed = true, .tile = k3x3m64n64of4, .split = 2},
    {.id = 4164, .precision = Precision::kF16, .packed = true, .tile = k3x3m64n64of4, .split = 4},
    {.id = 4201, .precision = Precision::kBF16, .packed = false, .tile = k3x3m128n256},
    {.id = 4202, .precision = Precision::kBF16, .packed = false, .tile = k3x3m128n128},
    {.id = 4203, .precision = Precision::kBF16, .packed = false, .tile = k3x3m128n64},
    {.id = 4204, .precision = Precision::kBF16, .packed = false, .tile = k3x3m128n32},
    {.id = 4205, .precision = Precision::kBF16, .packed = false, .tile = k3x3m256n32},
    {.id = 4206, .precision = Precision::kBF16, .packed = false, .tile = k3x3m64n64},
    {.id = 4207, .precision = Precision::kBF16, .packed = false, .tile = k3x3m64n32},
    {.id = 4208, .precision = Precision::kBF16, .packed = false, .tile = k3x3m64n128},
    {.id = 4210, .precision = Precision::kBF16, .packed = false, .tile = k3x3m64n128of4, .split = 2},
    {.id = 4211, .precision = Precision::kBF16, .packed = false, .tile = k3x3m64n128of4, .split = 4},
    {.id = 4212, .precision = Precision::kBF16, .packed = false, .tile = k3x3m64n64of4},
    {.id = 4213, .precision = Precision::kBF16, .packed = false, .tile = k3x3m64n64of4, .split = 2},
    {.id = 4214, .precision = Precision::kBF16, .packed = false, .tile = k3x3m64n64of4, .split = 4},
    {.id = 4251, .precision = Precision::kBF16, .packed = true, .tile = k3x3m128n256},
    {.id = 4252, .precision = Precision::kBF16, .packed = true, .tile = k3x3m128n128},
    {.id = 4253, .precision = Precision::kBF16, .packed = true, .tile = k3x3m128n64},
    {.id = 4254, .precision = Precision::kBF16, .packed = true, .tile = k3x3m128n32},
    {.id = 4255, .precision = Precision::kBF16, .packed = true, .tile = k3x3m256n32},
    {.id = 4256, .precision = Precision::kBF16, .packed = true, .tile = k3x3m64n64},
    {.id = 4257, .precision = Precision::kBF16, .packed = true, .tile = k3x3m64n32},
    {.id = 4258, .precision = Precision::kBF16, .packed = true, .tile = k3x3m64n128},
    {.id = 4260, .precision = Precision::kBF16, .packed = true, .tile = k3x3m64n128of4, .split = 2},
    {.id = 4261, .precision = Precision::kBF16, .packed = true, .tile = k3x3m64n128of4, .split = 4},
    {.id = 4262, .precision = Precision::kBF16, .packed = true, .tile = k3x3m64n64of4},
    {.id = 4263, .precision = Precision::kBF16, .packed = true, .tile = k3x3m64n64of4, .split = 2},
    {.id = 4264, .precision = Precision::kBF16, .packed = true, .tile = k3x3m64n64of4, .split = 4},
    {.id = 4301, .precision = Precision::kTF32, .packed = false, .tile = k3x3m128n256},
    {.id = 4302, .precision = Precision::kTF32, .packed = false, .tile = k3x3m128n128},
    {.id = 4303, .precision = Precision::kTF32, .packed = false, .tile = k3x3m128n64},
    {.id = 4304, .precision = Precision::kTF32, .packed = false, .tile = k3x3m128n32},
    {.id = 4305, .precision = Precision::kTF32, .packed = false, .tile = k3x3m64n128},
    {.id = 4306, .precision = Precision::kTF32, .packed = false, .tile = k3x3m64n64},
    {.id = 4307, .precision = Precision::kTF32, .packed = false, .tile = k3x3m64n32},
    {.id = 4309, .precision = Precision::kTF32, .packed = false, .tile = k3x3m64n128of4, .split = 2},
    {.id = 4310, .precision = Precision::kTF32, .packed = false, .tile = k3x3m64n128of4, .split = 4},
    {.id = 4311, .precision = Precision::kTF32, .packed = false, .tile = k3x3m64n64of4},
    {.id = 4312, .precision = Precision::kTF32, .packed = false, .tile = k3x3m64n64of4, .split = 2},
    {.id = 4313, .precision = Precision::kTF32, .packed = false, .tile = k3x3m64n64of4, .split = 4},
    {.id = 4401, .precision = Precision::kF16, .packed = false, .tile = k5x5m128n128},
    {.id = 4402, .precision = Precision::kF16, .packed = false, .tile = k5x5m128n64},
    {.id = 4403, .precision = Precision::kF16, .packed = false, .tile = k5x5m64n64},
    {.id = 4404, .precision = Precision::kF16, .packed = false, .tile = k5x5m64n32},
    {.id = 4405, .precision = Precision::kF16, .packed = false, .tile = k3x3pool3m64n128},
    {.id = 4406, .precision = Precision::kF16, .packed = false, .tile = k3x3pool3m64n64},
    {.id = 4407, .precision = Precision::kF16, .packed = false, .tile = k3x3pool3m64n32},
    {.id = 4408, .precision = Precision::kF16, .packed = false, .tile = k5x5pool3m64n32},
    {.id = 4451, .precision = Precision::kF16, .packed = true, .tile = k5x5m128n128},
    {.id = 4452, .precision = Precision::kF16, .packed = true, .tile = k5x5m128n64},
    {.id = 4453, .precision = Precision::kF16, .packed = true, .tile = k5x5m64n64},
    {.id = 4454, .precision = Precision::kF16, .packed = true, .tile = k5x5m64n32},
    {.id = 4501, .precision = Precision::kBF16, .packed = false, .tile = k5x5m128n128},
    {.id = 4502, .precision = Precision::kBF16, .packed = false, .tile = k5x5m128n64},
    {.id = 4503, .precision = Precision::kBF16, .packed = false, .tile = k5x5m64n64},
    {.id = 4504, .precision = Precision::kBF16, .packed = false, .tile = k5x5m64n32},
    {.id = 4505, .precision = Precision::kBF16, .packed = false, .tile = k3x3pool3m64n128},
    {.id = 4506, .precision = Precision::kBF16, .packed = false, .tile = k3x3pool3m64n64},
    {.id = 4507, .precision = Precision::kBF16, .packed = false, .tile = k3x3pool3m64n32},
    {.id = 4508, .precision = Precision::kBF16, .packed = false, .tile = k5x5pool3m64n32},
    {.id = 4551, .precision = Precision::kBF16, .packed = true, .tile = k5x5m128n128},
    {.id = 4552, .precision = Precision::kBF16, .packed = true, .tile = k5x5m128n64},
    {.id = 4553, .precision = Precision::kBF16, .packed = true, .tile = k5x5m64n64},
    {.id = 4554, .precision = Precision::kBF16, .packed = true, .tile = k5x5m64n32},
    {.id = 4601, .precision = Precision::kTF32, .packed = false, .tile = k5x5m128n128},
    {.id = 4602, .precision = Precision::kTF32, .packed = false, .tile = k5x5m128n64},
    {.id = 4603, .precision = Precision::kTF32, .packed = false, .tile = k5x5m64n64},
    {.id = 4604, .precision = Precision::kTF32, .packed = false, .tile = k5x5m64n32},
    {.id = 4605, .precision = Precision::kTF32, .packed = false, .tile = k3x3pool3m64n128},
    {.id = 4606, .precision = Precision::kTF32, .packed = false, .tile = k3x3pool3m64n64},
    {.id = 4607, .precision = Precision::kTF32, .packed = false, .tile = k3x3pool3m64n32},
    {.id = 4608, .precision = Precision::kTF32, .packed = false, .tile = k5x5pool3m64n32},
    {.id = 4609, .precision = Precision::kTF32, .packed = false, .tile = k5x5pool3m64n64},
};
static_assert(ids_rise(kRows));
static_assert(all_rows(kRows, +[](const Row &row) { return row.slice_us() > 0; }), "a row's tile has a fitted cost");

// The kernel of a row of this precision with a prologue: instance row * kRsPrologues + prologue.
template <Precision kPrecision> const void *kernel(size_t instance, bool);

}  // namespace convpool::direct_rs

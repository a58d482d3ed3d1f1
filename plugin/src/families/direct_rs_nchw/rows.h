// SPDX-License-Identifier: Apache-2.0
// The tactics of direct_rs_nchw.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/rows.h"
#include "families/direct_rs/params.h"

namespace convpool::direct_rs_nchw {

// Fitted, in microseconds.
struct Cost {
    double slice_us = 0, end_us = 0;  // of a slice of 16 channels, of a tile
};

struct Row {
    int32_t id;  // never reused
    Precision precision = Precision::kTF32;
    int32_t k_parts = 1;  // of a slice: each by another warpgroup, which share sums
    int32_t columns;      // of a tile's outputs; 128 of them, or 64
    int32_t depth = 1;    // such tiles, one after the other, that share weights
    int32_t block_n;
    int32_t stage_taps = 3;  // whose weights make a stage
    int32_t stages, raw_stages;
    RsOrder order;
    Cost cost;

    constexpr int block_m() const { return 128 / k_parts * depth; }
};

inline constexpr Row kRows[] = {
    {.id = 4351,
     .columns = 16,
     .block_n = 256,
     .stage_taps = 1,
     .stages = 7,
     .raw_stages = 2,
     .order = RsOrder::kRows,
     .cost = {4.00, 2.20}},
    {.id = 4352,
     .columns = 32,
     .block_n = 256,
     .stage_taps = 1,
     .stages = 8,
     .raw_stages = 2,
     .order = RsOrder::kRows,
     .cost = {3.88, 2.90}},
    {.id = 4353, .columns = 16, .block_n = 128, .stages = 5, .raw_stages = 2, .order = RsOrder::kRows, .cost = {2.08, 1.80}},
    {.id = 4354, .columns = 32, .block_n = 128, .stages = 5, .raw_stages = 2, .order = RsOrder::kRows, .cost = {1.94, 2.30}},
    {.id = 4355, .columns = 16, .block_n = 64, .stages = 6, .raw_stages = 3, .order = RsOrder::kTurns, .cost = {1.78, 0.40}},
    {.id = 4358,
     .columns = 32,
     .depth = 2,
     .block_n = 64,
     .stages = 7,
     .raw_stages = 3,
     .order = RsOrder::kTurns,
     .cost = {2.62, 1.20}},
    {.id = 4359, .columns = 16, .block_n = 32, .stages = 12, .raw_stages = 3, .order = RsOrder::kTurns, .cost = {1.52, 0.70}},
    {.id = 4361,
     .k_parts = 2,
     .columns = 16,
     .block_n = 128,
     .stages = 4,
     .raw_stages = 3,
     .order = RsOrder::kRows,
     .cost = {1.40, 2.40}},
    {.id = 4362,
     .k_parts = 2,
     .columns = 16,
     .block_n = 64,
     .stages = 8,
     .raw_stages = 4,
     .order = RsOrder::kRows,
     .cost = {1.20, 0.60}},
    {.id = 4363,
     .k_parts = 2,
     .columns = 16,
     .block_n = 32,
     .stages = 9,
     .raw_stages = 5,
     .order = RsOrder::kRows,
     .cost = {0.98, 0.60}},
};
static_assert(ids_rise(kRows));
static_assert(all_rows(kRows, +[](const Row &row) { return row.cost.slice_us > 0; }), "a row's tile has a fitted cost");

// The kernel of a row of this precision. padded_by_one: X's columns, modulo 4.
template <Precision kPrecision> const void *kernel(size_t row, bool padded_by_one);

}  // namespace convpool::direct_rs_nchw

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
    double exact_us = 0, packed_us = 0, end_us = 0;  // of a slice, 64 bytes of channels; of a tile
};

struct Tile {
    int32_t k_parts = 1;  // of a slice: each by another warpgroup, which share sums
    int32_t columns;      // of a tile's outputs; 128 of them, or 64
    int32_t depth = 1;    // such tiles, one after the other, that share weights
    int32_t block_n;
    int32_t stage_taps = 3;  // whose weights make a stage
    int32_t stages, raw_stages;
    RsOrder order;
    Cost cost;

    constexpr int rows() const { return 128 / k_parts / columns; }
    constexpr int block_m() const { return 128 / k_parts * depth; }
};

// TF32. w: outputs in a row of a tile.
constexpr Tile km128n256w16tf32{.columns = 16,
                                .block_n = 256,
                                .stage_taps = 1,
                                .stages = 7,
                                .raw_stages = 2,
                                .order = RsOrder::kRows,
                                .cost = {4.00, 0.00, 2.20}};
constexpr Tile km128n256w32tf32{.columns = 32,
                                .block_n = 256,
                                .stage_taps = 1,
                                .stages = 8,
                                .raw_stages = 2,
                                .order = RsOrder::kRows,
                                .cost = {3.88, 0.00, 2.90}};
constexpr Tile km128n128w16tf32{
    .columns = 16, .block_n = 128, .stages = 5, .raw_stages = 2, .order = RsOrder::kRows, .cost = {2.08, 0.00, 1.80}};
constexpr Tile km128n128w32tf32{
    .columns = 32, .block_n = 128, .stages = 5, .raw_stages = 2, .order = RsOrder::kRows, .cost = {1.94, 0.00, 2.30}};
constexpr Tile km128n64w16tf32{
    .columns = 16, .block_n = 64, .stages = 6, .raw_stages = 3, .order = RsOrder::kTurns, .cost = {1.78, 0.00, 0.40}};
constexpr Tile km256n64w32tf32{
    .columns = 32, .depth = 2, .block_n = 64, .stages = 7, .raw_stages = 3, .order = RsOrder::kTurns, .cost = {2.62, 0.00, 1.20}};
constexpr Tile km128n32w16tf32{
    .columns = 16, .block_n = 32, .stages = 12, .raw_stages = 3, .order = RsOrder::kTurns, .cost = {1.52, 0.00, 0.70}};
constexpr Tile km64n128w16tf32{.k_parts = 2,
                               .columns = 16,
                               .block_n = 128,
                               .stages = 4,
                               .raw_stages = 3,
                               .order = RsOrder::kRows,
                               .cost = {1.40, 0.00, 2.40}};
constexpr Tile km64n64w16tf32{.k_parts = 2,
                              .columns = 16,
                              .block_n = 64,
                              .stages = 8,
                              .raw_stages = 4,
                              .order = RsOrder::kRows,
                              .cost = {1.20, 0.00, 0.60}};
constexpr Tile km64n32w16tf32{.k_parts = 2,
                              .columns = 16,
                              .block_n = 32,
                              .stages = 9,
                              .raw_stages = 5,
                              .order = RsOrder::kRows,
                              .cost = {0.98, 0.00, 0.60}};

// 16 bits.
constexpr Tile km128n256w16{.columns = 16,
                            .block_n = 256,
                            .stage_taps = 1,
                            .stages = 7,
                            .raw_stages = 2,
                            .order = RsOrder::kRows,
                            .cost = {4.40, 4.30, 2.10}};
constexpr Tile km128n256w32{.columns = 32,
                            .block_n = 256,
                            .stage_taps = 1,
                            .stages = 7,
                            .raw_stages = 2,
                            .order = RsOrder::kRows,
                            .cost = {3.98, 3.93, 2.90}};
constexpr Tile km128n128w16{
    .columns = 16, .block_n = 128, .stages = 4, .raw_stages = 2, .order = RsOrder::kRows, .cost = {2.62, 2.52, 0.90}};
constexpr Tile km128n128w32{
    .columns = 32, .block_n = 128, .stages = 4, .raw_stages = 2, .order = RsOrder::kRows, .cost = {2.45, 2.36, 1.00}};
constexpr Tile km128n64w16{
    .columns = 16, .block_n = 64, .stages = 9, .raw_stages = 2, .order = RsOrder::kTurns, .cost = {2.48, 2.25, 0.45}};
constexpr Tile km128n64w32{
    .columns = 32, .block_n = 64, .stages = 9, .raw_stages = 2, .order = RsOrder::kTurns, .cost = {2.17, 1.95, 0.60}};
constexpr Tile km128n32w16{
    .columns = 16, .block_n = 32, .stages = 9, .raw_stages = 3, .order = RsOrder::kTurns, .cost = {2.30, 2.00, 0.30}};
constexpr Tile km128n32w32{
    .columns = 32, .block_n = 32, .stages = 10, .raw_stages = 3, .order = RsOrder::kTurns, .cost = {2.05, 1.80, 0.40}};
constexpr Tile km64n64w16{.k_parts = 2,
                          .columns = 16,
                          .block_n = 64,
                          .stages = 6,
                          .raw_stages = 4,
                          .order = RsOrder::kRows,
                          .cost = {1.58, 1.50, 0.32}};
constexpr Tile km64n32w16{.k_parts = 2,
                          .columns = 16,
                          .block_n = 32,
                          .stages = 8,
                          .raw_stages = 5,
                          .order = RsOrder::kRows,
                          .cost = {1.62, 1.45, 0.10}};

constexpr Tile km64n128w8{.k_parts = 2,
                          .columns = 8,
                          .block_n = 128,
                          .stages = 4,
                          .raw_stages = 2,
                          .order = RsOrder::kRows,
                          .cost = {2.33, 2.26, 0.10}};
constexpr Tile km64n64w8{
    .k_parts = 2, .columns = 8, .block_n = 64, .stages = 6, .raw_stages = 3, .order = RsOrder::kRows, .cost = {1.96, 1.83, 0.10}};

struct Row {
    int32_t id;  // never reused
    Precision precision;
    bool packed;  // how box means are summed: in X's type, or in fp32
    Tile tile;

    constexpr double slice_us() const { return packed ? tile.cost.packed_us : tile.cost.exact_us; }
};

inline constexpr Row kRows[] = {
    {.id = 4351, .precision = Precision::kTF32, .packed = false, .tile = km128n256w16tf32},
    {.id = 4352, .precision = Precision::kTF32, .packed = false, .tile = km128n256w32tf32},
    {.id = 4353, .precision = Precision::kTF32, .packed = false, .tile = km128n128w16tf32},
    {.id = 4354, .precision = Precision::kTF32, .packed = false, .tile = km128n128w32tf32},
    {.id = 4355, .precision = Precision::kTF32, .packed = false, .tile = km128n64w16tf32},
    {.id = 4358, .precision = Precision::kTF32, .packed = false, .tile = km256n64w32tf32},
    {.id = 4359, .precision = Precision::kTF32, .packed = false, .tile = km128n32w16tf32},
    {.id = 4361, .precision = Precision::kTF32, .packed = false, .tile = km64n128w16tf32},
    {.id = 4362, .precision = Precision::kTF32, .packed = false, .tile = km64n64w16tf32},
    {.id = 4363, .precision = Precision::kTF32, .packed = false, .tile = km64n32w16tf32},
    {.id = 4651, .precision = Precision::kF16, .packed = false, .tile = km128n256w16},
    {.id = 4652, .precision = Precision::kF16, .packed = false, .tile = km128n256w32},
    {.id = 4653, .precision = Precision::kF16, .packed = false, .tile = km128n128w16},
    {.id = 4654, .precision = Precision::kF16, .packed = false, .tile = km128n128w32},
    {.id = 4656, .precision = Precision::kF16, .packed = false, .tile = km128n64w16},
    {.id = 4657, .precision = Precision::kF16, .packed = false, .tile = km128n64w32},
    {.id = 4659, .precision = Precision::kF16, .packed = false, .tile = km128n32w16},
    {.id = 4660, .precision = Precision::kF16, .packed = false, .tile = km128n32w32},
    {.id = 4662, .precision = Precision::kF16, .packed = false, .tile = km64n64w16},
    {.id = 4663, .precision = Precision::kF16, .packed = false, .tile = km64n32w16},
    {.id = 4664, .precision = Precision::kF16, .packed = false, .tile = km64n128w8},
    {.id = 4665, .precision = Precision::kF16, .packed = false, .tile = km64n64w8},
    {.id = 4701, .precision = Precision::kF16, .packed = true, .tile = km128n256w16},
    {.id = 4702, .precision = Precision::kF16, .packed = true, .tile = km128n256w32},
    {.id = 4703, .precision = Precision::kF16, .packed = true, .tile = km128n128w16},
    {.id = 4704, .precision = Precision::kF16, .packed = true, .tile = km128n128w32},
    {.id = 4706, .precision = Precision::kF16, .packed = true, .tile = km128n64w16},
    {.id = 4707, .precision = Precision::kF16, .packed = true, .tile = km128n64w32},
    {.id = 4709, .precision = Precision::kF16, .packed = true, .tile = km128n32w16},
    {.id = 4710, .precision = Precision::kF16, .packed = true, .tile = km128n32w32},
    {.id = 4712, .precision = Precision::kF16, .packed = true, .tile = km64n64w16},
    {.id = 4713, .precision = Precision::kF16, .packed = true, .tile = km64n32w16},
    {.id = 4714, .precision = Precision::kF16, .packed = true, .tile = km64n128w8},
    {.id = 4715, .precision = Precision::kF16, .packed = true, .tile = km64n64w8},
    {.id = 4751, .precision = Precision::kBF16, .packed = false, .tile = km128n256w16},
    {.id = 4752, .precision = Precision::kBF16, .packed = false, .tile = km128n256w32},
    {.id = 4753, .precision = Precision::kBF16, .packed = false, .tile = km128n128w16},
    {.id = 4754, .precision = Precision::kBF16, .packed = false, .tile = km128n128w32},
    {.id = 4756, .precision = Precision::kBF16, .packed = false, .tile = km128n64w16},
    {.id = 4757, .precision = Precision::kBF16, .packed = false, .tile = km128n64w32},
    {.id = 4759, .precision = Precision::kBF16, .packed = false, .tile = km128n32w16},
    {.id = 4760, .precision = Precision::kBF16, .packed = false, .tile = km128n32w32},
    {.id = 4762, .precision = Precision::kBF16, .packed = false, .tile = km64n64w16},
    {.id = 4763, .precision = Precision::kBF16, .packed = false, .tile = km64n32w16},
    {.id = 4764, .precision = Precision::kBF16, .packed = false, .tile = km64n128w8},
    {.id = 4765, .precision = Precision::kBF16, .packed = false, .tile = km64n64w8},
    {.id = 4801, .precision = Precision::kBF16, .packed = true, .tile = km128n256w16},
    {.id = 4802, .precision = Precision::kBF16, .packed = true, .tile = km128n256w32},
    {.id = 4803, .precision = Precision::kBF16, .packed = true, .tile = km128n128w16},
    {.id = 4804, .precision = Precision::kBF16, .packed = true, .tile = km128n128w32},
    {.id = 4806, .precision = Precision::kBF16, .packed = true, .tile = km128n64w16},
    {.id = 4807, .precision = Precision::kBF16, .packed = true, .tile = km128n64w32},
    {.id = 4809, .precision = Precision::kBF16, .packed = true, .tile = km128n32w16},
    {.id = 4810, .precision = Precision::kBF16, .packed = true, .tile = km128n32w32},
    {.id = 4812, .precision = Precision::kBF16, .packed = true, .tile = km64n64w16},
    {.id = 4813, .precision = Precision::kBF16, .packed = true, .tile = km64n32w16},
    {.id = 4814, .precision = Precision::kBF16, .packed = true, .tile = km64n128w8},
    {.id = 4815, .precision = Precision::kBF16, .packed = true, .tile = km64n64w8},
};
static_assert(ids_rise(kRows));
static_assert(all_rows(kRows, +[](const Row &row) { return row.slice_us() > 0; }), "a row's tile has a fitted cost");

// The kernel of a row of this precision. padded_by_one: X's columns, modulo 4.
template <Precision kPrecision> const void *kernel(size_t row, bool padded_by_one);

}  // namespace convpool::direct_rs_nchw

// SPDX-License-Identifier: Apache-2.0
// The tactics of direct_tma, and how their shared memory is laid out.
#pragma once

#include <cstdint>

#include "core/rows.h"

namespace convpool {

// Shared memory of a direct_tma block, in bytes; `plane` in box means of 16 bytes, raw_* in pixels of one column parity.
struct DirectTmaShared {
    int weight_stage, raw_columns, raw_rows, raw_offset, plane, mean_offset, barrier_offset, bytes;
};
constexpr DirectTmaShared direct_tma_shared(int subtiles, int block_n, int kernel, int stage_taps, int stages, int raw_stages,
                                            int mean_stages) {
    DirectTmaShared s{};
    s.weight_stage = stage_taps * block_n * 64;
    s.raw_offset = stages * s.weight_stage;
    s.raw_columns = 8 + kernel / 2;
    s.raw_rows = 2 * s.raw_columns;
    // Two columns of neighbours, stored at once by eight lanes with four chunks, meet in no bank: 2 modulo 8.
    s.plane = kernel == 1 ? 66 : 290;
    const int means = mean_stages * subtiles * 4 * s.plane * 16;
    const int raw_stage = subtiles * 2 * s.raw_columns * s.raw_rows * 64;
    s.mean_offset = s.raw_offset + raw_stages * raw_stage;
    s.barrier_offset = s.mean_offset + means;
    s.bytes = s.barrier_offset + 2 * (stages + raw_stages + mean_stages) * 8;
    return s;
}

namespace direct_tma {

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
    constexpr bool is_fitted() const { return cost.slice_us > 0 && cost.prologue_us > 0; }
};

// clang-format off
inline constexpr TileLine<Tile> kLines[] = {
    // {kernel, subtiles, block_n, stage_taps, stages, raw_stages, mean_stages, mean_warps, mean_groups, cost}, split,
    // {F16, BF16, TF32, TF32x3}
    {{3, 2, 256, 1, 4, 2, 2, 3, 1, {3.47, 6.24, 4.8}},  1, {2701, 2801, 2901, 0}},
    {{1, 1, 128, 1, 8, 8, 4, 7, 3, {0.35, 0.79, 0.51}}, 1, {2724, 2824, 2924, 0}},
    {{1, 1, 256, 1, 4, 8, 4, 7, 3, {0.50, 0.84, 0.81}}, 1, {2725, 2825, 2925, 0}},
};
// clang-format on
inline constexpr auto kRows = rows_of<kLines>();
using Row = TileRow<Tile>;

}  // namespace direct_tma
}  // namespace convpool

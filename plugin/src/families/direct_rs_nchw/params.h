// SPDX-License-Identifier: Apache-2.0
// How direct_rs_nchw's shared memory is laid out.
#pragma once

namespace convpool {

// A box of pixels begins at a column that is a multiple of this, 32 bytes, up to seven before the window that it holds.
constexpr int kNchwAlignment = 8;

// Shared memory of a block, in bytes; raw_columns and raw_rows in pixels. Windows of an output row see two columns more than two for
// each; with seven in front, and three that nobody reads, four channels meet in no bank.
struct DirectRsNchwShared {
    int weight_stage, raw_columns, raw_rows, raw_stage, raw_offset, sum_offset, barrier_offset, bytes;
};
// columns, rows: outputs of a tile.
constexpr DirectRsNchwShared direct_rs_nchw_shared(int columns, int rows, int k_parts, int block_n, int stage_taps, int stages,
                                                   int raw_stages) {
    DirectRsNchwShared s{};
    s.weight_stage = stage_taps * block_n * 64;
    s.raw_columns = 2 * columns + 12;
    s.raw_rows = 2 * rows + 2;
    s.raw_stage = s.raw_columns * s.raw_rows * 64;
    s.raw_offset = stages * s.weight_stage;
    s.sum_offset = s.raw_offset + raw_stages * s.raw_stage;
    s.barrier_offset = s.sum_offset + (k_parts - 1) * columns * rows * block_n * 4;
    s.bytes = s.barrier_offset + 2 * (stages + raw_stages) * 8;
    return s;
}

}  // namespace convpool

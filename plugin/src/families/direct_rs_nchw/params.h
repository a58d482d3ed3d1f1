// SPDX-License-Identifier: Apache-2.0
// How direct_rs_nchw's shared memory is laid out.
#pragma once

namespace convpool {

// A box of pixels begins at a column that is a multiple of this, 16 or 32 bytes, up to seven before the window that it holds.
constexpr int kNchwAlignment = 8;

// Shared memory of a block, in bytes; raw_columns and raw_rows in pixels. Windows of an output row see two columns more than two for
// each, with seven in front. So that channels meet in no bank, 32 bytes apart modulo 64, there are three columns more that nobody
// reads; in 16 bits a row more, or eight columns, besides those up to a whole chunk.
struct DirectRsNchwShared {
    int weight_stage, raw_columns, raw_rows, raw_stage, raw_offset, sum_offset, barrier_offset, bytes;
};
// columns, rows: outputs of a tile.
constexpr DirectRsNchwShared direct_rs_nchw_shared(bool is_16_bit, int columns, int rows, int k_parts, int block_n,
                                                   int stage_taps, int stages, int raw_stages) {
    DirectRsNchwShared s{};
    s.weight_stage = stage_taps * block_n * 64;
    s.raw_columns = 2 * columns + (!is_16_bit ? 12 : columns == 8 ? 24 : 16);
    s.raw_rows = 2 * rows + (!is_16_bit || columns == 8 ? 2 : 3);
    s.raw_stage = s.raw_columns * s.raw_rows * 64;
    s.raw_offset = stages * s.weight_stage;
    s.sum_offset = s.raw_offset + raw_stages * s.raw_stage;
    s.barrier_offset = s.sum_offset + (k_parts - 1) * columns * rows * block_n * 4;
    s.bytes = s.barrier_offset + 2 * (stages + raw_stages) * 8;
    return s;
}

}  // namespace convpool

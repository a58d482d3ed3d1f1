// SPDX-License-Identifier: Apache-2.0
// How direct_tma's shared memory is laid out.
#pragma once

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

}  // namespace convpool

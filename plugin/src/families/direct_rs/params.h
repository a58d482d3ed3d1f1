// SPDX-License-Identifier: Apache-2.0
// How direct_rs's shared memory is laid out.
#pragma once

namespace convpool {

// How a warpgroup goes through a slice: all box means, then all products, in turns with the other warpgroup; row of taps after
// row of taps, with the means of one beside the products of the one before; or half of the channels after the other.
enum class RsOrder { kTurns, kRows, kSteps };

// What happens to pixels before they are added up: nothing; a ReLU, of X as it is or scaled and shifted; a LeakyReLU of X as it is; any
// activation of X scaled and shifted.
enum class RsPrologue { kNone, kRelu, kLeaky, kAffine };
constexpr int kRsPrologues = 4;

// Shared memory of a direct_rs block, in bytes; raw_* in pixels of one plane of an image, `plane` in bytes of those of a subtile's
// images, a multiple of the 128 that TMA starts at. A plane has every pool-th column. Blocks of a cluster push sums to push_offset;
// `bytes` ends there.
struct DirectRsShared {
    int weight_stage, raw_columns, raw_rows, plane, raw_offset, sum_offset, barrier_offset, push_offset, bytes;
};
constexpr DirectRsShared direct_rs_shared(int side, int subtiles, int k_parts, int block_n, int kernel, int pool, int stage_taps,
                                          int stages, int raw_stages) {
    DirectRsShared s{};
    s.weight_stage = stage_taps * block_n * 64;
    s.raw_offset = stages * s.weight_stage;
    s.raw_columns = side + (kernel + pool - 2) / pool;
    s.raw_rows = pool * side + kernel - 1;
    // An image's pixels are a multiple of four and none of eight, so that ldmatrix meets four neighbours of each of two in no bank.
    if (side == 4) s.raw_columns += s.raw_columns * s.raw_rows % 8 != 4;
    s.plane = s.raw_columns * s.raw_rows * 64 / (side * side) * 64;
    s.sum_offset = s.raw_offset + raw_stages * subtiles * pool * s.plane;
    s.barrier_offset = s.sum_offset + (k_parts - 1) * 64 * block_n * 4;
    s.bytes = s.barrier_offset + 2 * (stages + raw_stages * subtiles) * 8;
    s.push_offset = (s.bytes + 127) / 128 * 128;
    return s;
}

}  // namespace convpool

// SPDX-License-Identifier: Apache-2.0
// The tactics of direct_rs, and how their shared memory is laid out.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/rows.h"

namespace convpool {

// How a warpgroup goes through a slice: all box means, then all products, in turns with the other warpgroup; row of taps after
// row of taps, with the means of one beside the products of the one before; or half of the channels after the other.
enum class RsOrder { kTurns, kRows, kSteps };

// The step before pixels are added up: none; a ReLU, of X as it is or scaled and shifted; a LeakyReLU of X as it is; any
// activation of X scaled and shifted.
enum class RsPrologue { kNone, kRelu, kLeaky, kAffine };

// Channels first, a box of pixels begins at a column that is a multiple of this, 16 or 32 bytes, up to seven before the window that
// it holds.
constexpr int kNchwAlignment = 8;

// Shared memory of a block, in bytes; raw_* in pixels. Channels last, a plane has every pool-th column of the pixels under a subtile,
// a multiple of the 128 bytes that TMA starts at; channels first it has all of a tile's. Blocks of a cluster push sums to
// push_offset; `bytes` ends there.
struct DirectRsShared {
    int weight_stage, raw_columns, raw_rows, plane, raw_offset, sum_offset, barrier_offset, push_offset, bytes;

    constexpr void place(int k_parts, int block_n, int stage_taps, int stages, int raw_stages, int subtiles, int planes) {
        weight_stage = stage_taps * block_n * 64;
        raw_offset = stages * weight_stage;
        sum_offset = raw_offset + raw_stages * subtiles * planes * plane;
        barrier_offset = sum_offset + (k_parts - 1) * 64 * block_n * 4;
        bytes = barrier_offset + 2 * (stages + raw_stages * subtiles) * 8;
        push_offset = (bytes + 127) / 128 * 128;
    }
};
constexpr DirectRsShared direct_rs_shared(int side, int subtiles, int k_parts, int block_n, int kernel, int pool, int stage_taps,
                                          int stages, int raw_stages) {
    DirectRsShared s{};
    s.raw_columns = side + (kernel + pool - 2) / pool;
    s.raw_rows = pool * side + kernel - 1;
    // An image's pixels are a multiple of four and none of eight, so that ldmatrix meets four neighbours of each of two in no bank.
    if (side == 4) s.raw_columns += s.raw_columns * s.raw_rows % 8 != 4;
    s.plane = s.raw_columns * s.raw_rows * 64 / (side * side) * 64;
    s.place(k_parts, block_n, stage_taps, stages, raw_stages, subtiles, pool);
    return s;
}
// Channels first. columns, rows: outputs of a tile. Windows of an output row see two columns more than two for each, with seven in
// front. So that channels meet in no bank, 32 bytes apart modulo 64, there are three columns more that nobody reads; in 16 bits a row
// more, or eight columns, besides those up to a whole chunk.
constexpr DirectRsShared direct_rs_nchw_shared(bool is_16_bit, int columns, int rows, int k_parts, int block_n, int stage_taps,
                                               int stages, int raw_stages) {
    DirectRsShared s{};
    s.raw_columns = 2 * columns + (!is_16_bit ? 12 : columns == 8 ? 24 : 16);
    s.raw_rows = 2 * rows + (!is_16_bit || columns == 8 ? 2 : 3);
    s.plane = s.raw_columns * s.raw_rows * 64;
    s.place(k_parts, block_n, stage_taps, stages, raw_stages, 1, 1);
    return s;
}

namespace direct_rs {

// Fitted, in microseconds.
struct Cost {
    double exact_us = 0, packed_us = 0, tf32_us = 0;  // of a slice: 64 bytes of channels
    double end_us = 0;                                // of a tile
};

// Which prologues a tile takes; with packed sums and in TF32 a ReLU's only.
enum class RsPrologueSet { kNone, kRelu, kAll };

struct Tile {
    bool channels_first;   // the layout of X and Y
    int32_t kernel, pool;  // rows and columns of them
    int32_t side;          // channels last: of an image's pixels in a subtile: 8, or 4 of each of four images
                           // channels first: columns of a tile's outputs; 128 of them, or 64
    int32_t groups;        // warpgroups that multiply
    int32_t depth;         // channels first: such tiles, one after the other, that share weights
    int32_t k_parts;       // of a slice: each by another warpgroup, which share sums
    int32_t block_n;
    int32_t stage_taps;  // whose weights make a stage
    int32_t stages, raw_stages;
    RsOrder order;
    bool splits;  // blocks of a cluster may share a tile's slices
    RsPrologueSet prologues;
    Cost cost;

    constexpr int rows() const { return channels_first ? 128 / k_parts / side : side; }
    constexpr int images() const { return channels_first ? 1 : 64 / (side * side); }
    constexpr int subtiles() const { return channels_first ? depth : groups / k_parts; }
    constexpr int block_m() const { return rows() * side * images() * subtiles(); }
};

// Tiles channels last and channels first; the latter of 3x3 kernels and windows of 2x2.
constexpr Tile nhwc(int32_t kernel, int32_t pool, int32_t side, int32_t groups, int32_t k_parts, int32_t block_n,
                    int32_t stage_taps, int32_t stages, int32_t raw_stages, RsOrder order, bool splits, RsPrologueSet prologues,
                    Cost cost) {
    return {false,      kernel, pool,       side,  groups, 1,         k_parts, block_n,
            stage_taps, stages, raw_stages, order, splits, prologues, cost};
}
constexpr Tile nchw(int32_t columns, int32_t depth, int32_t k_parts, int32_t block_n, int32_t stage_taps, int32_t stages,
                    int32_t raw_stages, RsOrder order, Cost cost) {
    return {true, 3, 2, columns, 2, depth, k_parts, block_n, stage_taps, stages, raw_stages, order, false, RsPrologueSet::kNone,
            cost};
}

// clang-format off
using O = RsOrder;
using P = RsPrologueSet;
// kernel, pool, side, groups, k_parts, block_n, stage_taps, stages, raw_stages, order, splits, prologues, cost
constexpr Tile k3x3m128n256 =     nhwc(3, 2, 8, 2, 1, 256, 1,  8, 2,  O::kRows, false, P::kRelu, {3.36, 3.12, 3.17, 2.95});
constexpr Tile k3x3m128n128 =     nhwc(3, 2, 8, 2, 1, 128, 3,  5, 2, O::kTurns, false,  P::kAll, {2.18, 1.96, 1.86, 1.55});
constexpr Tile k3x3m128n64 =      nhwc(3, 2, 8, 2, 1,  64, 3,  8, 3, O::kTurns, false,  P::kAll, {1.70, 1.32, 1.33, 0.55});
constexpr Tile k3x3m128n32 =      nhwc(3, 2, 8, 2, 1,  32, 3,  6, 4, O::kTurns, false, P::kRelu, {1.54, 1.22, 1.21, 0.25});
constexpr Tile k3x3m256n32 =      nhwc(3, 2, 8, 4, 1,  32, 3,  6, 2, O::kSteps, false, P::kNone, {2.94, 2.16, 0, 0.45});
constexpr Tile k3x3m64n128 =      nhwc(3, 2, 8, 2, 2, 128, 3,  5, 3,  O::kRows, false,  P::kAll, {1.30, 1.11, 1.10, 0.80});
constexpr Tile k3x3m64n64 =       nhwc(3, 2, 8, 2, 2,  64, 3,  8, 5,  O::kRows, false,  P::kAll, {1.00, 0.86, 0.85, 0.50});
constexpr Tile k3x3m64n32 =       nhwc(3, 2, 8, 2, 2,  32, 3,  9, 6,  O::kRows, false, P::kRelu, {0.94, 0.80, 0.78, 0.25});
constexpr Tile k3x3m64n128of4 =   nhwc(3, 2, 4, 2, 2, 128, 3,  4, 2,  O::kRows,  true, P::kRelu, {1.30, 1.15, 1.25, 1.10});
constexpr Tile k3x3m64n64of4 =    nhwc(3, 2, 4, 2, 2,  64, 3,  7, 3,  O::kRows,  true, P::kRelu, {1.05, 0.88, 0.93, 0.35});
constexpr Tile k5x5m128n128 =     nhwc(5, 2, 8, 2, 1, 128, 1, 15, 2,  O::kRows, false, P::kNone, {5.14, 4.38, 4.58, 2.45});
constexpr Tile k5x5m128n64 =      nhwc(5, 2, 8, 2, 1,  64, 5,  6, 2,  O::kRows, false, P::kNone, {3.64, 2.92, 3.12, 1.35});
constexpr Tile k5x5m64n64 =       nhwc(5, 2, 8, 2, 2,  64, 5,  5, 4,  O::kRows, false, P::kNone, {1.98, 1.60, 1.66, 1.05});
constexpr Tile k5x5m64n32 =       nhwc(5, 2, 8, 2, 2,  32, 5,  9, 5,  O::kRows, false, P::kNone, {1.88, 1.50, 1.50, 0.40});
constexpr Tile k3x3pool3m64n128 = nhwc(3, 3, 8, 2, 2, 128, 3,  4, 2,  O::kRows, false, P::kNone, {1.60, 0, 1.52, 1.70});
constexpr Tile k3x3pool3m64n64 =  nhwc(3, 3, 8, 2, 2,  64, 3,  6, 3,  O::kRows, false, P::kNone, {1.34, 0, 1.08, 1.05});
constexpr Tile k3x3pool3m64n32 =  nhwc(3, 3, 8, 2, 2,  32, 3,  7, 4,  O::kRows, false, P::kNone, {1.20, 0, 0.92, 0.85});
constexpr Tile k5x5pool3m64n64 =  nhwc(5, 3, 8, 2, 2,  64, 5,  5, 2,  O::kRows, false, P::kNone, {2.82, 0, 2.02, 1.75});
constexpr Tile k5x5pool3m64n32 =  nhwc(5, 3, 8, 2, 2,  32, 5,  6, 3,  O::kRows, false, P::kNone, {2.78, 0, 1.86, 0.75});

struct Row {
    int32_t id;  // never reused
    Precision precision;
    bool packed;  // how box means are summed: in X's type, or in fp32
    Tile tile;
    int32_t split;

    constexpr bool takes(RsPrologue prologue) const {
        if (prologue == RsPrologue::kNone) return true;
        if (prologue == RsPrologue::kRelu) return tile.prologues != RsPrologueSet::kNone;
        return tile.prologues == RsPrologueSet::kAll && !packed && precision != Precision::kTF32;
    }
    constexpr double slice_us() const {
        return precision == Precision::kTF32 ? tile.cost.tf32_us : packed ? tile.cost.packed_us : tile.cost.exact_us;
    }
    constexpr bool is_fitted() const { return slice_us() > 0; }
};

struct Line {
    Tile tile;
    int32_t split;
    int32_t ids[5];  // F16, F16 packed, BF16, BF16 packed, TF32

    constexpr Row row(size_t kind) const {
        return {ids[kind], static_cast<Precision>(kind / 2), kind % 2 == 1, tile, split};
    }
};

inline constexpr Line kLines[] = {
    // tile, split, {F16, packed, BF16, packed, TF32}
    {k3x3m128n256,     1, {4101, 4151, 4201, 4251, 4301}},
    {k3x3m128n128,     1, {4102, 4152, 4202, 4252, 4302}},
    {k3x3m128n64,      1, {4103, 4153, 4203, 4253, 4303}},
    {k3x3m128n32,      1, {4104, 4154, 4204, 4254, 4304}},
    {k3x3m256n32,      1, {4105, 4155, 4205, 4255,    0}},
    {k3x3m64n64,       1, {4106, 4156, 4206, 4256, 4306}},
    {k3x3m64n32,       1, {4107, 4157, 4207, 4257, 4307}},
    {k3x3m64n128,      1, {4108, 4158, 4208, 4258, 4305}},
    {k3x3m64n128of4,   2, {4110, 4160, 4210, 4260, 4309}},
    {k3x3m64n128of4,   4, {4111, 4161, 4211, 4261, 4310}},
    {k3x3m64n64of4,    1, {4112, 4162, 4212, 4262, 4311}},
    {k3x3m64n64of4,    2, {4113, 4163, 4213, 4263, 4312}},
    {k3x3m64n64of4,    4, {4114, 4164, 4214, 4264, 4313}},
    {k5x5m128n128,     1, {4401, 4451,    0,    0, 4601}},
    {k5x5m64n64,       1, {4403, 4453, 4503, 4553, 4603}},
    {k5x5m64n32,       1, {4404, 4454, 4504, 4554, 4604}},
    {k3x3pool3m64n128, 1, {4405,    0, 4505,    0,    0}},
    {k3x3pool3m64n32,  1, {4407,    0, 4507,    0, 4607}},
    {k5x5pool3m64n32,  1, {4408,    0, 4508,    0, 4608}},
    {k5x5m128n64,      1, {   0,    0, 4502, 4552,    0}},
    {k3x3pool3m64n64,  1, {   0,    0, 4506,    0, 4606}},
    {k5x5pool3m64n64,  1, {   0,    0,    0,    0, 4609}},
    // nchw(columns, depth, k_parts, block_n, stage_taps, stages, raw_stages, order, cost)
    {nchw(16, 1, 1, 256, 1,  7, 2,  O::kRows, {0, 0, 4.00, 2.20}), 1, {      0,    0,    0,    0, 4351}},
    {nchw(32, 1, 1, 256, 1,  8, 2,  O::kRows, {0, 0, 3.88, 2.90}), 1, {      0,    0,    0,    0, 4352}},
    {nchw(16, 1, 1, 128, 3,  5, 2,  O::kRows, {0, 0, 2.08, 1.80}), 1, {      0,    0,    0,    0, 4353}},
    {nchw(32, 1, 1, 128, 3,  5, 2,  O::kRows, {0, 0, 1.94, 2.30}), 1, {      0,    0,    0,    0, 4354}},
    {nchw(16, 1, 1,  64, 3,  6, 3, O::kTurns, {0, 0, 1.78, 0.40}), 1, {      0,    0,    0,    0, 4355}},
    {nchw(32, 2, 1,  64, 3,  7, 3, O::kTurns, {0, 0, 2.62, 1.20}), 1, {      0,    0,    0,    0, 4358}},
    {nchw(16, 1, 1,  32, 3, 12, 3, O::kTurns, {0, 0, 1.52, 0.70}), 1, {      0,    0,    0,    0, 4359}},
    {nchw(16, 1, 2, 128, 3,  4, 3,  O::kRows, {0, 0, 1.40, 2.40}), 1, {      0,    0,    0,    0, 4361}},
    {nchw(16, 1, 2,  64, 3,  8, 4,  O::kRows, {0, 0, 1.20, 0.60}), 1, {      0,    0,    0,    0, 4362}},
    {nchw(16, 1, 2,  32, 3,  9, 5,  O::kRows, {0, 0, 0.98, 0.60}), 1, {      0,    0,    0,    0, 4363}},
    {nchw(16, 1, 1, 256, 1,  7, 2,  O::kRows, {4.40, 4.30, 0, 2.10}), 1, {4651, 4701, 4751, 4801,    0}},
    {nchw(32, 1, 1, 256, 1,  7, 2,  O::kRows, {3.98, 3.93, 0, 2.90}), 1, {4652, 4702, 4752, 4802,    0}},
    {nchw(16, 1, 1, 128, 3,  4, 2,  O::kRows, {2.62, 2.52, 0, 0.90}), 1, {4653, 4703, 4753, 4803,    0}},
    {nchw(32, 1, 1, 128, 3,  4, 2,  O::kRows, {2.45, 2.36, 0, 1.00}), 1, {4654, 4704, 4754, 4804,    0}},
    {nchw(16, 1, 1,  64, 3,  9, 2, O::kTurns, {2.48, 2.25, 0, 0.45}), 1, {4656, 4706, 4756, 4806,    0}},
    {nchw(32, 1, 1,  64, 3,  9, 2, O::kTurns, {2.17, 1.95, 0, 0.60}), 1, {4657, 4707, 4757, 4807,    0}},
    {nchw(16, 1, 1,  32, 3,  9, 3, O::kTurns, {2.30, 2.00, 0, 0.30}), 1, {4659, 4709, 4759, 4809,    0}},
    {nchw(32, 1, 1,  32, 3, 10, 3, O::kTurns, {2.05, 1.80, 0, 0.40}), 1, {4660, 4710, 4760, 4810,    0}},
    {nchw(16, 1, 2,  64, 3,  6, 4,  O::kRows, {1.58, 1.50, 0, 0.32}), 1, {4662, 4712, 4762, 4812,    0}},
    {nchw(16, 1, 2,  32, 3,  8, 5,  O::kRows, {1.62, 1.45, 0, 0.10}), 1, {4663, 4713, 4763, 4813,    0}},
    {nchw( 8, 1, 2, 128, 3,  4, 2,  O::kRows, {2.33, 2.26, 0, 0.10}), 1, {4664, 4714, 4764, 4814,    0}},
    {nchw( 8, 1, 2,  64, 3,  6, 3,  O::kRows, {1.96, 1.83, 0, 0.10}), 1, {4665, 4715, 4765, 4815,    0}},
};
// clang-format on
inline constexpr auto kRows = rows_of<kLines>();

}  // namespace direct_rs
}  // namespace convpool

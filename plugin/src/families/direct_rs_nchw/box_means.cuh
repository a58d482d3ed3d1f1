// SPDX-License-Identifier: Apache-2.0
// direct_rs_nchw: box means of 2x2 pixels in registers, as wgmma takes its first operand.
//
// A box of pixels lies in shared memory as [channel][row][column] of floats. A warp has 16 outputs of a row, a lane two neighbours:
// lane 4g + t has outputs 2g and 2g + 1, rows g and g + 8 of the product, and of each chunk of four channels channel t. They see six
// columns of four rows of pixels. TMA starts at multiples of 16 bytes, so with a padding of 1 the lane's columns lie like this:
//
//     columns of the box   .. 7 | 8  9 10 11 | 12 ..
//     lane g = 0               0  1  2  3  4    5
//     lane g = 1                             0    1 ..
//
// It loads its four whole columns at once; the others are its neighbours' fourth and first, and of the warp's first and last lanes
// they are loaded. Any other padding: two loads of four, and the six of eight are picked.
#pragma once

#include "families/direct_rs/box_means.cuh"
#include "families/direct_rs_nchw/block.cuh"

namespace convpool {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

template <class Config> struct DirectRsNchwMeans {
    using Block = DirectRsNchwBlock<Config>;
    static constexpr int kKernel = Config::kKernel, kSteps = Config::kSteps;
    static constexpr int kRow = Config::kShared.raw_columns * 4,
                         kChannel = Config::kShared.raw_rows * kRow;  // bytes from one to the next
    static constexpr bool kPaddedByOne = Config::kPaddedByOne;
    static constexpr int kSums = kKernel + 2, kPixels = kSums + 1;

    const int lane, shift;
    const uint32_t place, edge;     // of this lane's four columns, and of the one at the warp's end, in bytes from the pixels
    uint32_t at, edge_at;           // their addresses
    float above[kSteps][2][kSums];  // sums of the pixel row before: (step, chunk, column)
    uint32_t a[kKernel][kKernel][kSteps][4];  // operands: (row and column of taps, step, two outputs of two chunks)

    CONVPOOL_DEVICE explicit DirectRsNchwMeans(const Block &block)
        : lane(block.lane), shift(block.shift() & 3),
          place(place_of(block, (block.shift() + kPaddedByOne & ~3) + (block.lane & ~3))),
          edge(place_of(block, block.shift() + (block.lane < 16 ? 0 : 33))) {}
    CONVPOOL_DEVICE static uint32_t place_of(const Block &block, int column) {
        return (block.lane & 3) * kChannel + 2 * block.row() * kRow + (2 * block.column() + column) * 4;
    }
    // part: the first step's, of a slice's two.
    CONVPOOL_DEVICE void start(uint32_t pixels, int part) {
        at = pixels + place + part * 8 * kChannel;
        edge_at = pixels + edge + part * 8 * kChannel;
    }
    CONVPOOL_DEVICE static void load_quad(uint32_t *v, uint32_t address) {
        const uint4 quad = load_shared(address);
        v[0] = quad.x;
        v[1] = quad.y;
        v[2] = quad.z;
        v[3] = quad.w;
    }
    CONVPOOL_DEVICE void load(uint32_t (&v)[kPixels], int distance) const {
        if constexpr (kPaddedByOne) {
            load_quad(v + 1, at + distance);
            const uint32_t end = __float_as_uint(load_shared_float(edge_at + distance));
            v[0] = __shfl_up_sync(0xffffffffu, v[4], 4);
            v[5] = __shfl_down_sync(0xffffffffu, v[1], 4);
            if (lane < 4) v[0] = end;
            if (lane >= 28) v[5] = end;
        } else {
            uint32_t all[8];
            load_quad(all, at + distance);
            load_quad(all + 4, at + distance + 16);
#pragma unroll
            for (int i = 0; i < kPixels; ++i) v[i] = shift == 0 ? all[i] : shift == 1 ? all[i + 1] : all[i + 2];
        }
    }
    // Adds up one row of pixels and completes the means of the row before. Sums of odd rows are kept as quarters.
    CONVPOOL_DEVICE void add_row(int row) {
#pragma unroll
        for (int k = 0; k < kSteps; ++k)
#pragma unroll
            for (int chunk = 0; chunk < 2; ++chunk) {
                uint32_t v[kPixels];
                load(v, (2 * k + chunk) * 4 * kChannel + row * kRow);
#pragma unroll
                for (int b = 0; b < kSums; ++b) {
                    float sum = __uint_as_float(v[b]) + __uint_as_float(v[b + 1]);
                    if (row % 2) sum *= 0.25f;
                    float &upper = above[k][chunk][b];
                    if (row > 0) {
                        const uint32_t mean = round_tf32_operand(row % 2 ? fmaf(upper, 0.25f, sum) : fmaf(sum, 0.25f, upper));
                        if (b < kKernel) a[row - 1][b][k][2 * chunk] = mean;
                        if (b >= 2) a[row - 1][b - 2][k][2 * chunk + 1] = mean;
                    }
                    upper = sum;
                }
            }
    }
    // Forms the operands of a row of taps; rows come in order.
    CONVPOOL_DEVICE void form(int row) {
        if (row == 0) add_row(0);
        add_row(row + 1);
    }
};

#endif

}  // namespace convpool

// SPDX-License-Identifier: Apache-2.0
// direct_rs_nchw: box means of 2x2 pixels in registers, as wgmma takes its first operand.
//
// A box of pixels lies in shared memory as [channel][row][column]. A warp has 16 outputs of a row, or eight of each of two, a lane two
// neighbours: lane 4g + t has outputs 2g and 2g + 1, rows g and g + 8 of the product, and of each chunk of channels a word: channel t,
// a float, or channels 2t and 2t + 1 in 16 bits. They see six columns of four rows of pixels. TMA starts at multiples of 16 bytes, so
// with a padding of 1 the lane's columns lie like this:
//
//     columns of the box   .. 7 | 8  9 10 11 | 12 ..
//     lane g = 0               0  1  2  3  4    5
//     lane g = 1                             0    1 ..
//
// It loads its four whole columns at once; the others are its neighbours' fourth and first, and of a row's first and last lanes
// they are loaded. Any other padding: two loads of four, and the six of eight are picked.
//
// In 16 bits a lane loads both of its channels and puts a pixel's two together, a word as direct_rs has it. Channels are 32 bytes
// apart, modulo 64, so t = 0 and 2 would meet in a bank; lanes of t = 2 and 3 load their second channel first:
//
//     t             0  1  2  3
//     first load    0  2  5  7    times 32 bytes, modulo 128: 0 64 32 96
//     second load   1  3  4  6                               32 96  0 64
#pragma once

#include "families/direct_rs/box_means.cuh"
#include "families/direct_rs_nchw/block.cuh"

namespace convpool {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

CONVPOOL_DEVICE uint2 load_shared_words(uint32_t address) {
    uint2 v;
    asm volatile("ld.shared.v2.b32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address) : "memory");
    return v;
}
CONVPOOL_DEVICE uint32_t load_shared_half(uint32_t address) {  // 16 bits, zeros above
    uint32_t v;
    asm volatile("ld.shared.u16 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
    return v;
}

template <class Config> struct DirectRsNchwMeans {
    using Block = DirectRsNchwBlock<Config>;
    using Sums = BoxSums<Config::kPrecision, Config::kPacked, 2>;
    static constexpr int kKernel = Config::kKernel, kSteps = Config::kSteps, kPerChunk = Config::kPerChunk;
    static constexpr int kRow = Config::kShared.raw_columns * Config::kElement,
                         kChannel = Config::kShared.raw_rows * kRow;  // bytes from one to the next
    static constexpr int kLoads = kPerChunk / 4;                      // channels of a lane in a chunk
    static constexpr int kLast = Config::kLaneColumns;                // of the last lane in a row
    static constexpr bool kPaddedByOne = Config::kPaddedByOne;
    static constexpr int kSums = kKernel + 2, kPixels = kSums + 1;

    const int lane, shift;
    const uint32_t place, edge;  // of this lane's four columns, and of the one at the warp's end, in bytes from the pixels
    const uint32_t even, odd;    // how two columns of both loads become words: selectors of bytes
    uint32_t at[kLoads], edge_at[kLoads];           // addresses of both
    typename Sums::Sum above[kSteps][2][kSums][1];  // sums of the pixel row before: (step, chunk, column)
    uint32_t a[kKernel][kKernel][kSteps][4];        // operands: (row and column of taps, step, two outputs of two chunks)

    CONVPOOL_DEVICE explicit DirectRsNchwMeans(const Block &block)
        : lane(block.lane), shift(block.shift() & 3),
          place(place_of(block, (block.shift() + kPaddedByOne & ~3) + block.lane_column())),
          edge(place_of(block, block.shift() + (block.lane_column() <= kLast / 2 ? 0 : kLast + 5))),
          even(block.lane & 2 ? 0x1054 : 0x5410), odd(even ^ 0x2222) {}
    CONVPOOL_DEVICE static uint32_t place_of(const Block &block, int column) {
        const int t = block.lane & 3, channel = kLoads == 1 ? t : 2 * t + (t >> 1);
        return channel * kChannel + 2 * block.row() * kRow + (2 * block.column() + column) * Config::kElement;
    }
    // part: the first step's, of a slice's two.
    CONVPOOL_DEVICE void start(uint32_t pixels, int part) {
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
            const uint32_t base = pixels + part * 2 * kPerChunk * kChannel + (i == 0 ? 0 : lane & 2 ? -kChannel : kChannel);
            at[i] = base + place;
            edge_at[i] = base + edge;
        }
    }
    // Words of four columns.
    CONVPOOL_DEVICE void load_quad(uint32_t *v, int distance) const {
        if constexpr (kLoads == 1) {
            const uint4 quad = load_shared(at[0] + distance);
            v[0] = quad.x;
            v[1] = quad.y;
            v[2] = quad.z;
            v[3] = quad.w;
        } else {
            const uint2 first = load_shared_words(at[0] + distance), second = load_shared_words(at[1] + distance);
            v[0] = __byte_perm(first.x, second.x, even);
            v[1] = __byte_perm(first.x, second.x, odd);
            v[2] = __byte_perm(first.y, second.y, even);
            v[3] = __byte_perm(first.y, second.y, odd);
        }
    }
    CONVPOOL_DEVICE uint32_t load_edge(int distance) const {
        if constexpr (kLoads == 1) return __float_as_uint(load_shared_float(edge_at[0] + distance));
        else return __byte_perm(load_shared_half(edge_at[0] + distance), load_shared_half(edge_at[1] + distance), even);
    }
    CONVPOOL_DEVICE void load(uint32_t (&v)[kPixels], int distance) const {
        if constexpr (kPaddedByOne) {
            load_quad(v + 1, distance);
            const uint32_t end = load_edge(distance);
            v[0] = __shfl_up_sync(0xffffffffu, v[4], 4);
            v[5] = __shfl_down_sync(0xffffffffu, v[1], 4);
            if ((lane & kLast) == 0) v[0] = end;
            if ((lane & kLast) == kLast) v[5] = end;
        } else {
            uint32_t all[8];
            load_quad(all, distance);
            load_quad(all + 4, distance + 4 * Config::kElement);
#pragma unroll
            for (int i = 0; i < kPixels; ++i) v[i] = shift == 0 ? all[i] : shift == 1 ? all[i + 1] : all[i + 2];
        }
    }
    // Adds up one row of pixels and completes the means of the row before.
    CONVPOOL_DEVICE void add_row(int row) {
#pragma unroll
        for (int k = 0; k < kSteps; ++k)
#pragma unroll
            for (int chunk = 0; chunk < 2; ++chunk) {
                uint32_t v[kPixels];
                load(v, (2 * k + chunk) * kPerChunk * kChannel + row * kRow);
                typename Sums::Sum sums[kSums];
                Sums::template add_row<kSums>(sums, v, row);
#pragma unroll
                for (int b = 0; b < kSums; ++b) {
                    typename Sums::Sum(&upper)[1] = above[k][chunk][b];
                    if (row > 0) {
                        const uint32_t mean = Sums::mean(upper, sums[b], row - 1);
                        if (b < kKernel) a[row - 1][b][k][2 * chunk] = mean;
                        if (b >= 2) a[row - 1][b - 2][k][2 * chunk + 1] = mean;
                    }
                    upper[0] = sums[b];
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

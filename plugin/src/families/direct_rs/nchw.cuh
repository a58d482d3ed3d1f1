// SPDX-License-Identifier: Apache-2.0
// direct_rs for X and Y with their channels first: the block, copies of pixels, box means, and Y. A subtile is a tile's pixels here.
#pragma once

#include "families/direct_rs/box_means.cuh"
#include "kernels/epilogue/finish.cuh"
#include "subtiles/subtiles.cuh"

namespace convpool {

// kPaddedByOne: the padding of columns is 1 modulo 4; where a lane's columns lie then is drawn below.
template <Precision kPrecision_, bool kPacked_, bool kPaddedByOne_, int kColumns_, int kDepth_, int kParts_, int kBlockN_,
          int kStageTaps_, int kStages_, int kRawStages_, RsOrder kOrder_>
struct DirectRsNchwConfig {
    static constexpr Precision kPrecision = kPrecision_;
    static constexpr bool kPacked = kPacked_, kChannelsFirst = true, kSplits = false, kPaddedByOne = kPaddedByOne_;
    static constexpr RsOrder kOrder = kOrder_;
    static constexpr bool kTurns = kOrder == RsOrder::kTurns;
    static constexpr int kKernel = 3, kGroups = 2, kParts = kParts_, kColumns = kColumns_, kRows = 128 / kParts / kColumns,
                         kDepth = kDepth_, kBlockN = kBlockN_, kStageTaps = kStageTaps_, kStages = kStages_,
                         kRawStages = kRawStages_;
    static constexpr int kTaps = 9, kPerChunk = Traits<kPrecision>::kPerChunk, kChunks = 4, kElement = 16 / kPerChunk;  // bytes
    static constexpr int kThreads = 128 * (kGroups + 1);
    // Parts of a slice, two chunks each, whose box means a warpgroup holds at once.
    static constexpr int kSteps = kParts == 2 ? 1 : 2;
    // Registers of a thread that multiplies, and of one that copies.
    static constexpr int kRegisters = kDepth == 1 ? 240 : 232, kCopyRegisters = kDepth == 1 ? 24 : 40;
    static constexpr int kFragments = kBlockN / 8;  // channels of a warpgroup
    // A warp's 16 outputs are of a row, or eight of each of two; lanes of a row are apart in these bits of their number.
    static constexpr int kWarpRows = kColumns == 8 ? 2 : 1, kLaneColumns = 32 / kWarpRows - 4;
    static constexpr DirectRsShared kShared =
        direct_rs_nchw_shared(kPerChunk == 8, kColumns, kRows, kParts, kBlockN, kStageTaps, kStages, kRawStages);

    static_assert((kColumns == 8 || kColumns % 16 == 0) && kShared.raw_columns * kShared.raw_rows * kElement % 64 == 32,
                  "no bank conflicts");
    static_assert(kShared.raw_columns * kElement % 16 == 0 && kShared.plane % 128 == 0, "what TMA copies, and where it starts");
    static_assert(!kTurns || kParts == 1, "two take turns");
    static_assert(kDepth == 1 || (kTurns && kStages * kStageTaps > kTaps), "weights stay for all tiles");
    static_assert(kKernel % kStageTaps == 0, "whole stages of weights in a row of taps");
    static_assert(kStages * kStageTaps >= (kTurns ? kTaps : 2 * kKernel) && kRawStages >= 2,
                  "what is multiplied before the first weights are handed back");
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

template <class Config_>
struct DirectRsNchwBlock : DirectRsRings<Config_, SubtileGrid<Config_::kDepth, Config_::kBlockN>, 1, 1, 1> {
    using Config = Config_;

    CONVPOOL_DEVICE uint32_t raw_at(int i, int) const { return this->shared + this->kShared.raw_offset + i * this->kPlaneBytes; }

    struct Corner {
        int image, y, x;  // first output row and column
    };
    CONVPOOL_DEVICE Corner corner_of(int subtile) const {
        uint32_t rest, column, row, image;
        this->p.div_tiles_w.divmod(subtile, rest, column);
        this->p.div_tiles_h.divmod(rest, image, row);
        return {static_cast<int>(image), static_cast<int>(row) * Config::kRows, static_cast<int>(column) * Config::kColumns};
    }
    // This lane's row of outputs in a tile, and the first column of its warp's.
    CONVPOOL_DEVICE int row() const {
        const int number = this->warp % (8 / Config::kParts);
        if constexpr (Config::kWarpRows == 2) return 2 * number + (this->lane >> 4);
        else return number / (Config::kColumns / 16);
    }
    CONVPOOL_DEVICE int column() const {
        if constexpr (Config::kWarpRows == 2) return 0;
        else return this->warp % (Config::kColumns / 16) * 16;
    }
    // Columns of X from what the row's first lane sees to what this one does: four for each, for two outputs.
    CONVPOOL_DEVICE int lane_column() const { return this->lane & Config::kLaneColumns; }
    // Columns from a box's first one to that which the first output sees first.
    CONVPOOL_DEVICE int shift() const { return -this->p.pad_w & (kNchwAlignment - 1); }
};

// Copies the pixels under all tiles of the block, slice after slice. Zeros outside X.
template <class Config> CONVPOOL_DEVICE void copy_pixels(const DirectRsNchwBlock<Config> &block, int) {
    const SubtileParams &p = block.p;
    Ring<Config::kRawStages> ring;
    for (int index = block.first_tile(); index < p.tiles; index += block.tile_step()) {
        const int subtile = block.tile_at(index).subtile;
#pragma unroll 1
        for (int slice = 0; slice < p.slices; ++slice)
            UNROLLED_FOR (int d = 0; d < Config::kDepth; ++d) {
                const typename DirectRsNchwBlock<Config>::Corner corner = block.corner_of(subtile + d);
                const uint32_t full = block.raw_full(ring.buffer, 0);
                barrier_wait(block.raw_empty(ring.buffer, 0), ring.parity ^ 1);
                barrier_expect(full, Config::kShared.plane);
                // Hazard: a column that is no multiple of 16 bytes ends the kernel ("illegal instruction").
                copy_box(block.raw_at(ring.buffer, 0), &p.x_map[0], full, (corner.x * 2 - p.pad_w) & -kNchwAlignment,
                         corner.y * 2 - p.pad_h, slice * Config::kChunks * Config::kPerChunk, corner.image);
                ring.next();
            }
    }
}

// direct_rs, channels first: box means of 2x2 pixels in registers, as wgmma takes its first operand.
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
        UNROLLED_FOR (int i = 0; i < kLoads; ++i) {
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
            UNROLLED_FOR (int i = 0; i < kPixels; ++i) v[i] = shift == 0 ? all[i] : shift == 1 ? all[i + 1] : all[i + 2];
        }
    }
    // Adds up one row of pixels and completes the means of the row before.
    CONVPOOL_DEVICE void add_row(int row) {
        UNROLLED_FOR (int k = 0; k < kSteps; ++k)
            UNROLLED_FOR (int chunk = 0; chunk < 2; ++chunk) {
                uint32_t v[kPixels];
                load(v, (2 * k + chunk) * kPerChunk * kChannel + row * kRow);
                typename Sums::Sum sums[kSums];
                Sums::template add_row<kSums>(sums, v, row);
                UNROLLED_FOR (int b = 0; b < kSums; ++b) {
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

// direct_rs, channels first: from a warpgroup's sums to Y: bias, residual, activation, store.
//
// Lane 4g + t has of fragment f the sums of outputs 2g and 2g + 1 of a warp's 16, channels 8f + 2t and 8f + 2t + 1:
//
//     acc[f][4]        channel 8f + 2t      8f + 2t + 1
//     output 2g            acc[f][0]          acc[f][1]
//     output 2g + 1        acc[f][2]          acc[f][3]

template <class Block, int kFragments>
CONVPOOL_DEVICE void finish_channels_first(const Block &block, float (&acc)[kFragments][4], int subtile, int first_channel) {
    using Element = typename Traits<Block::Config::kPrecision>::Element;
    const SubtileParams &p = block.p;
    const Epilogue &e = p.epilogue;
    const typename Block::Corner corner = block.corner_of(subtile);
    const int channel = first_channel + 2 * (block.lane & 3), y = corner.y + block.row(),
              x = corner.x + block.column() + block.lane_column() / 2;
    const int outputs = corner.image < p.images && y < p.out_h ? p.out_w - x : 0;  // of the row, from this lane's first on
    const int64_t plane = static_cast<int64_t>(p.out_h) * p.out_w;
    const int64_t first = (static_cast<int64_t>(corner.image) * p.m + channel) * plane + static_cast<int64_t>(y) * p.out_w + x;
    Element *const out = static_cast<Element *>(p.y) + first;
    if (e.bias != nullptr) {
        const Element *const bias = static_cast<const Element *>(e.bias) + channel;
        UNROLLED_FOR (int f = 0; f < kFragments; ++f)
            UNROLLED_FOR (int i = 0; i < 2; ++i) {
                const float b = channel + 8 * f + i < p.m ? to_float(bias[8 * f + i]) : 0.f;
                acc[f][i] += b;
                acc[f][2 + i] += b;
            }
    }
    if (e.residual != nullptr) {
        const Element *const residual = static_cast<const Element *>(e.residual) + first;
        UNROLLED_FOR (int f = 0; f < kFragments; ++f)
            UNROLLED_FOR (int i = 0; i < 4; ++i)
                if (channel + 8 * f + i % 2 < p.m && i / 2 < outputs)
                    acc[f][i] += to_float(residual[(8 * f + i % 2) * plane + i / 2]);
    }
    if (e.activation != Activation::kNone) clip_or_rectify(reinterpret_cast<float (&)[kFragments * 4]>(acc), e);
    const bool pairs = p.out_w % 2 == 0 && reinterpret_cast<uintptr_t>(p.y) % (2 * sizeof(Element)) == 0;
    UNROLLED_FOR (int f = 0; f < kFragments; ++f)
        UNROLLED_FOR (int i = 0; i < 2; ++i) {
            Element *const place = out + (8 * f + i) * plane;
            if (channel + 8 * f + i >= p.m || outputs <= 0) continue;
            if (pairs) {
                if constexpr (sizeof(Element) == 4) *reinterpret_cast<float2 *>(place) = make_float2(acc[f][i], acc[f][2 + i]);
                else *reinterpret_cast<uint32_t *>(place) = pack2(acc[f][i], acc[f][2 + i], Element{});
            } else {
                place[0] = from_float<Element>(acc[f][i]);
                if (outputs > 1) place[1] = from_float<Element>(acc[f][2 + i]);
            }
        }
}

#endif

}  // namespace convpool

// SPDX-License-Identifier: Apache-2.0
// Tiles of subtiles of 64 output pixels: where they are in Y. A subtile is 8 x 8 pixels of an image, or 4 x 4 of each of four.
#pragma once

#include <type_traits>

#include "kernels/epilogue/finish.cuh"
#include "kernels/ptx/device.cuh"
#include "kernels/ptx/memory.cuh"
#include "kernels/ptx/tma.cuh"
#include "kernels/tile/chunk.cuh"
#include "kernels/tile/tile.cuh"
#include "subtiles/params.h"

namespace convpool {

// A tile: kSubtiles subtiles by kBlockN channels. kSide: of an image's pixels in a subtile.
template <int kSubtiles, int kBlockN, int kSide = 8> struct SubtileGrid {
    static constexpr int kImages = 64 / (kSide * kSide);
    static_assert(kSide == 8 || kSide == 4, "an image's rows are a row of the subtile, or a half");

    const SubtileParams &p;

    // This block's first tile and the way to its next one; its slices of each.
    CONVPOOL_DEVICE int first_tile() const { return blockIdx.x; }
    CONVPOOL_DEVICE int tile_step() const { return gridDim.x; }
    CONVPOOL_DEVICE int first_slice() const { return 0; }
    CONVPOOL_DEVICE int end_slice() const { return p.slices; }

    struct Tile {
        int channel, subtile;  // the first of each
    };
    // Goes from the last tile to the first: the L2 holds what the layer before has written last.
    CONVPOOL_DEVICE Tile tile_at(int index) const {
        uint32_t m_tile, group;
        p.div_m_tiles.divmod(p.tiles - 1 - index, group, m_tile);  // by channels, then pixels: neighbours share pixels
        return {static_cast<int>(m_tile) * kBlockN, static_cast<int>(group) * kSubtiles};
    }
    struct Corner {
        int image, y, x;  // the first image, output row and column
    };
    CONVPOOL_DEVICE Corner corner_of(int subtile) const {
        uint32_t rest, column, row, image;
        p.div_tiles_w.divmod(subtile, rest, column);
        p.div_tiles_h.divmod(rest, image, row);
        return {static_cast<int>(image) * kImages, static_cast<int>(row) * kSide, static_cast<int>(column) * kSide};
    }
    // Where in Y the channels of an output pixel of a subtile are.
    CONVPOOL_DEVICE OutputPixel pixel_of(int subtile, int pixel) const {
        const Corner corner = corner_of(subtile);
        const int row = pixel / 8, column = pixel % 8;
        const int image = corner.image + row / kSide * (8 / kSide) + column / kSide;
        const int y = corner.y + row % kSide, x = corner.x + column % kSide;
        return {((static_cast<int64_t>(image) * p.out_h + y) * p.out_w + x) * p.m,
                image < p.images && y < p.out_h && x < p.out_w};
    }
};

// Copies of weights and of pixels of X under subtiles to shared memory, by TMA. One thread issues each. A Block says where the
// buffers of the rings and their barriers are.

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// Copies the weights of all tiles of the block, kStageTaps taps of a slice at a time; once only where they stay (resident).
template <class Block> CONVPOOL_DEVICE void copy_weights(const Block &block) {
    using Config = typename Block::Config;
    const SubtileParams &p = block.p;
    Ring<Config::kStages> ring;
    const int end = p.resident ? min(p.tiles, block.first_tile() + 1) : p.tiles;
    for (int index = block.first_tile(); index < end; index += block.tile_step()) {
        const int channel = block.tile_at(index).channel;
#pragma unroll 1
        for (int slice = block.first_slice(); slice < block.end_slice(); ++slice)
            UNROLLED_FOR (int tap = 0; tap < Config::kTaps; tap += Config::kStageTaps) {
                barrier_wait(block.weights_empty(ring.buffer), ring.parity ^ 1);
                barrier_expect(block.weights_full(ring.buffer), Config::kShared.weight_stage);
                copy_box(block.weights_at(ring.buffer), &p.w_map, block.weights_full(ring.buffer),
                         slice * Config::kChunks * Config::kPerChunk, channel, tap);
                ring.next();
            }
    }
}

// Copies pixels of X, a slice of some of a tile's subtiles at a time: next() waits for a free buffer and goes on, tile after tile.
// Several threads may copy, each for kCopySubtiles subtiles, with barriers of its own.
template <class Block> struct RawCopies {
    using Config = typename Block::Config;
    static constexpr int kSubtiles = Block::kCopySubtiles;

    const Block &block;
    const int copier;
    int index, slice;
    Ring<Config::kRawStages> ring;
    int image[kSubtiles], y[kSubtiles], x[kSubtiles];  // of each subtile: first row of X, first column of Y

    CONVPOOL_DEVICE explicit RawCopies(const Block &b, int number = 0)
        : block(b), copier(number), index(b.first_tile()), slice(b.first_slice()) {
        if (index < block.p.tiles) locate();
    }
    // Finds the subtiles of the present tile. Their windows may begin outside X: TMA writes zeros there.
    CONVPOOL_DEVICE void locate() {
        const typename Block::Tile tile = block.tile_at(index);
        UNROLLED_FOR (int s = 0; s < kSubtiles; ++s) {
            const typename Block::Corner corner = block.corner_of(tile.subtile + copier * kSubtiles + s);
            image[s] = corner.image;
            y[s] = corner.y * Block::kPool - block.p.pad_h;
            x[s] = corner.x;
        }
    }
    CONVPOOL_DEVICE void next() {
        if (index >= block.p.tiles) return;
        barrier_wait(block.raw_empty(ring.buffer, copier), ring.parity ^ 1);
        const uint32_t full = block.raw_full(ring.buffer, copier);
        barrier_expect(full, kSubtiles * Block::kRawBytes);
        const int channel = slice * Config::kChunks * Config::kPerChunk;
        UNROLLED_FOR (int s = 0; s < kSubtiles; ++s) {
            const uint32_t dst = block.raw_at(ring.buffer, copier * kSubtiles + s);
            UNROLLED_FOR (int plane = 0; plane < Block::kPool; ++plane)
                copy_box(dst + plane * Block::kPlaneBytes, &block.p.x_map[plane], full, channel,
                         x[s] + block.p.first_column[plane], y[s], image[s]);
        }
        ring.next();
        if (++slice == block.end_slice()) {
            slice = block.first_slice();
            index += block.tile_step();
            if (index < block.p.tiles) locate();
        }
    }
};

// Takes a warpgroup's accumulators of a subtile to Y, in registers: bias, residual, activation, store.
//
// A warpgroup's product is 64 pixels (a subtile) x 8 kFragments channels; a warp has 16 of its pixels. Lane 4g+t holds of
// fragment f pixels g and g+8 (half 0 and 1), channels 2t and 2t+1:
//
//     acc[f][4]        channel 8f + 2t      8f + 2t + 1
//     pixel g              acc[f][0]          acc[f][1]      half 0
//     pixel g + 8          acc[f][2]          acc[f][3]      half 1
//
// In 16 bits a pair of channels is a word, and the four lanes of a pixel have a chunk of fragment f between them. So four
// fragments are turned about (transpose_quad): lane t gives its word of each and gets all words of fragment f + t, a chunk
// of 16 bytes to load or store at once:
//
//     before           lane 0   lane 1   lane 2   lane 3          after
//     fragment f       8f+0,1   8f+2,3   8f+4,5   8f+6,7          lane 0 has the row of fragment f,
//     fragment f + 1   ..                                         lane 1 that of f + 1, ..
//
// Floats are stored as pairs, 8 bytes a lane.

// Lane t of four gives row t of a 4 x 4 matrix and receives its column t.
CONVPOOL_DEVICE uint4 transpose_quad(const uint32_t (&v)[4], int t) {
    uint32_t a[4], b[4];
    const bool odd = t & 1, high = t & 2;
    // Blocks of 1: (t, i) and (t ^ 1, i ^ 1) change places.
    UNROLLED_FOR (int i = 0; i < 4; i += 2) {
        const uint32_t other = __shfl_xor_sync(0xffffffffu, odd ? v[i] : v[i + 1], 1);
        a[i] = odd ? other : v[i];
        a[i + 1] = odd ? v[i + 1] : other;
    }
    // Blocks of 2: (t, i) and (t ^ 2, i ^ 2) change places.
    UNROLLED_FOR (int i = 0; i < 2; ++i) {
        const uint32_t other = __shfl_xor_sync(0xffffffffu, high ? a[i] : a[i + 2], 2);
        b[i] = high ? other : a[i];
        b[i + 2] = high ? a[i + 2] : other;
    }
    return {b[0], b[1], b[2], b[3]};
}

// Config: of a kernel's Block.
template <class Config> struct Finish {
    using Element = typename Traits<Config::kPrecision>::Element;
    static constexpr int kPerChunk = Config::kPerChunk, kFragments = Config::kFragments;
    // Fragments of one step: a pixel's kAcross pairs fill 16 bytes a lane; in 16 bits four fragments hold 32 channels.
    static constexpr int kAcross = kPerChunk == 4 ? 2 : 4;
    using Pair = std::conditional_t<kPerChunk == 4, float2, uint32_t>;  // two channels as they lie in memory
    using PixelPairs = Pair[2][kAcross];                                // (half, fragment)
    using Sums = float[kFragments][4];                                  // (fragment, half and channel)
    static_assert(kFragments % kAcross == 0, "whole groups of fragments");

    const SubtileParams &p;
    const OutputPixel (&pixel)[2];  // this lane's, by half
    const int t, first_channel;
    const int columns;  // valid channels from the first on; a whole number of chunks
    const Epilogue &e = p.epilogue;
    const Element *const bias = static_cast<const Element *>(e.bias), *const residual = static_cast<const Element *>(e.residual);
    Element *const out = static_cast<Element *>(p.y) + first_channel;

    CONVPOOL_DEVICE static void set_words(uint32_t (&words)[4], const uint4 &chunk) {
        words[0] = chunk.x;
        words[1] = chunk.y;
        words[2] = chunk.z;
        words[3] = chunk.w;
    }
    CONVPOOL_DEVICE static void add(float (&sums)[4], int half, const Pair &pair) {
        float v[2];
        if constexpr (kPerChunk == 4) {
            v[0] = pair.x;
            v[1] = pair.y;
        } else {
            unpack_word(pair, v, Element{});
        }
        sums[2 * half] += v[0];
        sums[2 * half + 1] += v[1];
    }

    CONVPOOL_DEVICE void add_bias(Sums &acc, int f) const {
        const int column = f * 8 + 2 * t;
        if (column < columns) {
            const Pair pair = *reinterpret_cast<const Pair *>(bias + first_channel + column);
            add(acc[f], 0, pair);
            add(acc[f], 1, pair);
        }
    }
    // Loads the residual of kAcross fragments from f on, not yet transposed back.
    CONVPOOL_DEVICE void load(PixelPairs &pairs, int f) const {
        UNROLLED_FOR (int half = 0; half < 2; ++half)
            if constexpr (kPerChunk == 4) {
                UNROLLED_FOR (int i = 0; i < kAcross; ++i) {
                    const int column = (f + i) * 8 + 2 * t;
                    if (column < columns && pixel[half].valid)
                        pairs[half][i] = *reinterpret_cast<const Pair *>(residual + pixel[half].base + first_channel + column);
                }
            } else if ((f + t) * 8 < columns && pixel[half].valid) {  // lane t has fragment t
                const Element *from = residual + pixel[half].base + first_channel + (f + t) * 8;
                set_words(pairs[half], *reinterpret_cast<const uint4 *>(from));
            }
    }
    // Stores kAcross fragments from f on.
    CONVPOOL_DEVICE void store(const Sums &acc, int f) const {
        UNROLLED_FOR (int half = 0; half < 2; ++half)
            if constexpr (kPerChunk == 4) {
                UNROLLED_FOR (int i = 0; i < kAcross; ++i)
                    if ((f + i) * 8 + 2 * t < columns && pixel[half].valid)
                        *reinterpret_cast<float2 *>(out + pixel[half].base + (f + i) * 8 + 2 * t) =
                            make_float2(acc[f + i][2 * half], acc[f + i][2 * half + 1]);
            } else {
                uint32_t v[4];
                UNROLLED_FOR (int i = 0; i < 4; ++i) v[i] = pack2(acc[f + i][2 * half], acc[f + i][2 * half + 1], Element{});
                const uint4 chunk = transpose_quad(v, t);  // lane t has fragment t
                if ((f + t) * 8 < columns && pixel[half].valid)
                    *reinterpret_cast<uint4 *>(out + pixel[half].base + (f + t) * 8) = chunk;
            }
    }

    // One step for all fragments after the other: code that is skipped costs time too, as it is not in the instruction cache.
    CONVPOOL_DEVICE void finish_plain(Sums &acc) const {
        if (bias != nullptr) {
            UNROLLED_FOR (int f = 0; f < kFragments; ++f) add_bias(acc, f);
        }
        if (e.activation != Activation::kNone) clip_or_rectify(reinterpret_cast<float (&)[kFragments * 4]>(acc), e);
        UNROLLED_FOR (int f = 0; f < kFragments; f += kAcross) store(acc, f);
    }
    // Some fragments at a time, while the residual of the next ones is on its way. wait() is for the accumulators.
    template <class Wait> CONVPOOL_DEVICE void finish_with_residual(Sums &acc, Wait wait) const {
        PixelPairs addends = {}, next = {};
        load(addends, 0);
        wait();
        UNROLLED_FOR (int f = 0; f < kFragments; f += kAcross) {
            if (f + kAcross < kFragments) load(next, f + kAcross);
            if (bias != nullptr) {
                UNROLLED_FOR (int i = 0; i < kAcross; ++i) add_bias(acc, f + i);
            }
            UNROLLED_FOR (int half = 0; half < 2; ++half) {
                if constexpr (kPerChunk == 8) set_words(addends[half], transpose_quad(addends[half], t));
                UNROLLED_FOR (int i = 0; i < kAcross; ++i) {
                    add(acc[f + i], half, addends[half][i]);
                    addends[half][i] = next[half][i];
                }
            }
            if (e.activation != Activation::kNone) clip_or_rectify(reinterpret_cast<float (&)[kAcross * 4]>(acc[f]), e);
            store(acc, f);
        }
    }
    template <class Wait> CONVPOOL_DEVICE void operator()(Sums &acc, Wait wait) const {
        if (residual == nullptr) {
            wait();
            finish_plain(acc);
        } else {
            finish_with_residual(acc, wait);
        }
    }
};

// Finishes a warpgroup's sums of a subtile and of channels from first_channel on. wait() is for the accumulators.
template <class Block, class Wait>
CONVPOOL_DEVICE void finish(const Block &block, typename Finish<typename Block::Config>::Sums &acc, int subtile,
                            int first_channel, Wait wait) {
    const int first_row = block.warp % 4 * 16 + (block.lane >> 2);
    const OutputPixel pixel[2] = {block.pixel_of(subtile, first_row), block.pixel_of(subtile, first_row + 8)};
    Finish<typename Block::Config>{block.p, pixel, block.lane & 3, first_channel, block.p.m - first_channel}(acc, wait);
}

// A warp's lines of the residual on their way to the L2, while it multiplies.
template <class Block> CONVPOOL_DEVICE void prefetch_residual(const Block &block, int subtile, int first_channel) {
    using Config = typename Block::Config;
    using Element = typename Traits<Config::kPrecision>::Element;
    const Element *residual = static_cast<const Element *>(block.p.epilogue.residual) + first_channel;
    constexpr int kLine = 128 / sizeof(Element);
    const int columns = min(block.p.m - first_channel, Config::kConsumerN);
    UNROLLED_FOR (int half = 0; half < 2; ++half) {
        const OutputPixel pixel = block.pixel_of(subtile, block.warp % 4 * 16 + half * 8 + (block.lane >> 2));
        for (int column = (block.lane & 3) * kLine; column < columns && pixel.valid; column += 4 * kLine)
            prefetch_line(residual + pixel.base + column);
    }
}

#endif

}  // namespace convpool

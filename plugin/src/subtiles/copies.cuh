// SPDX-License-Identifier: Apache-2.0
// Copies of weights and of pixels of X under subtiles to shared memory, by TMA. One thread issues each. A Block says where the
// buffers of the rings and their barriers are.
#pragma once

#include "kernels/ptx/mbarrier.cuh"
#include "kernels/ptx/tma.cuh"
#include "kernels/tile/ring.cuh"
#include "subtiles/grid.cuh"

namespace convpool {

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
#pragma unroll
            for (int tap = 0; tap < Config::kTaps; tap += Config::kStageTaps) {
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
#pragma unroll
        for (int s = 0; s < kSubtiles; ++s) {
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
#pragma unroll
        for (int s = 0; s < kSubtiles; ++s) {
            const uint32_t dst = block.raw_at(ring.buffer, copier * kSubtiles + s);
#pragma unroll
            for (int plane = 0; plane < Block::kPool; ++plane)
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

#endif

}  // namespace convpool

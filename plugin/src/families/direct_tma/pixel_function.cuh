// SPDX-License-Identifier: Apache-2.0
// direct_tma: what box means do to a pixel of X before they add it up: the prologue f, or nothing.
#pragma once

#include "families/direct_tma/block.cuh"
#include "kernels/prologue/packed_prologue.cuh"

namespace convpool {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// f of a lane's pixels at any place. Pixels outside X are zero as copied; where a shift may have made f(0) another number they
// become zero again.
template <class Config> struct DirectTmaPrologue {
    using Block = DirectTmaBlock<Config>;
    static constexpr int kSubtiles = Config::kSubtiles;
    static constexpr int kPixels = Config::kKernel == 3 ? 18 : 16;  // rows and columns of X under a subtile

    const SubtileParams &p;
    PackedPrologue<Config::kPrecision> chunk;
    int y[kSubtiles], x[kSubtiles];  // of each subtile's first pixel
    int first_y = 0, first_x = 0;    // of the present subtile
    bool border = false;             // the present subtile has pixels outside X that count

    CONVPOOL_DEVICE explicit DirectTmaPrologue(const SubtileParams &params) : p(params), chunk(params.prologue) {}
    CONVPOOL_DEVICE void start_tile(const Block &block, int index) {
        if (p.prologue.scale == nullptr) return;
        const typename Block::Tile tile = block.tile_at(index);
#pragma unroll
        for (int s = 0; s < kSubtiles; ++s) {
            const typename Block::Corner corner = block.corner_of(tile.subtile + s);
            y[s] = corner.y * 2 - p.pad_h;
            x[s] = corner.x * 2 - p.pad_w;
        }
    }
    CONVPOOL_DEVICE void start_slice(int slice, int lane) {
        chunk.load(p.prologue, (slice * Config::kChunks + (lane & 3)) * Config::kPerChunk, p.c);
    }
    CONVPOOL_DEVICE void start_subtile(int s) {
        if (p.prologue.scale == nullptr) return;
        first_y = s == 0 ? y[0] : y[kSubtiles - 1];
        first_x = s == 0 ? x[0] : x[kSubtiles - 1];
        border = first_y < 0 || first_x < 0 || first_y + kPixels > p.h || first_x + kPixels > p.w;
    }
    // f of a pixel of a subtile at X's border, at this row and column of the subtile's pixels.
    CONVPOOL_DEVICE uint4 operator()(const uint4 &pixel, int row, int column) const {
        const uint4 v = chunk(pixel);
        const bool outside = static_cast<uint32_t>(first_y + row) >= static_cast<uint32_t>(p.h) ||
                             static_cast<uint32_t>(first_x + column) >= static_cast<uint32_t>(p.w);
        return outside ? uint4{0, 0, 0, 0} : v;
    }
};

// f of pixels none of which lies outside X, or an f that keeps zeros as they are.
template <class ChunkFunction> struct Everywhere {
    ChunkFunction chunk;
    CONVPOOL_DEVICE explicit Everywhere(const ChunkFunction &function) : chunk(function) {}
    CONVPOOL_DEVICE uint4 operator()(const uint4 &pixel, int, int) const { return chunk(pixel); }
};

struct NoPrologue {
    CONVPOOL_DEVICE explicit NoPrologue(const SubtileParams &) {}
    CONVPOOL_DEVICE uint4 operator()(const uint4 &pixel, int, int) const { return pixel; }
};

#endif

}  // namespace convpool

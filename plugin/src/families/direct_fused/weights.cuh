// SPDX-License-Identifier: Apache-2.0
// direct_fused: copies of weights to the ring, one tap and slice at a time, ahead of the products.
#pragma once

#include "families/direct_fused/params.h"
#include "kernels/ptx/cp_async.cuh"
#include "kernels/tile/chunk.cuh"
#include "kernels/tile/slice.cuh"

namespace convpool {

template <class Config> struct DirectFusedWeights {
    using Element = typename Traits<Config::kPrecision>::Element;
    static constexpr int kChunks = Config::kChunks, kPerChunk = Config::kPerChunk;
    static constexpr int kRowsAtOnce = Config::kThreads / kChunks;
    static_assert(kRowsAtOnce % 8 == 0, "rows that one thread copies have one swizzle");

    // What to fetch next: tile, slice and tap run ahead of the products.
    struct Cursor {
        int index, slice, tap, buffer;
        int first_m;         // first output channel of the tile
        const Element *row;  // this thread's first row, its chunk of slice 0
    };

    const DirectFusedParams &p;
    const uint32_t shared;
    const int thread;

    // The first channel of the cursor's tile and this thread's first row of it.
    CONVPOOL_DEVICE void point_to_tile(Cursor &at) const {
        uint32_t rest, m_tile;
        p.div_m_tiles.divmod(at.index, rest, m_tile);
        at.first_m = m_tile * Config::kBlockN;
        at.row = static_cast<const Element *>(p.w) + static_cast<int64_t>(at.first_m + thread / kChunks) * (p.taps * p.shape.c) +
                 thread % kChunks * kPerChunk;
    }

    // A cursor at the first tap of a block's first tile and slice.
    CONVPOOL_DEVICE Cursor first(int index, int first_slice) const {
        Cursor at{index, first_slice, 0, 0, 0, nullptr};
        point_to_tile(at);
        return at;
    }

    // Copies what the cursor is at and moves it on: by a tap, a slice of this block's, a tile.
    CONVPOOL_DEVICE void fetch(Cursor &at, int first_slice, int end_slice, int step) const {
        if (at.index < p.tiles) {
            const Shape2d &s = p.shape;
            const int row0 = thread / kChunks, slice_c = at.slice * Config::kSliceChannels;
            const int channels = s.c - slice_c - thread % kChunks * kPerChunk;  // left from this thread's chunk on
            const int rows = channels > 0 ? s.m - at.first_m - row0 : 0;        // valid rows from this thread's on
            const int64_t rows_step = static_cast<int64_t>(kRowsAtOnce) * (p.taps * s.c);
            const Element *src = at.row + (at.tap * s.c + slice_c);
            // kRowsAtOnce is a multiple of 8, so every row of this thread has its chunk at the same place.
            const uint32_t dst =
                shared + p.weight_offset + at.buffer * Config::kWeightStageBytes + chunk_in_row(row0, thread % kChunks);
            if (p.w_chunked) {
#pragma unroll
                for (int row = 0; row < Config::kBlockN; row += kRowsAtOnce) {
                    if (Config::kBlockN % kRowsAtOnce != 0 && row + row0 >= Config::kBlockN) break;
                    copy_chunk(dst + row * Config::kRowBytes, row < rows ? src : static_cast<const Element *>(p.w), row < rows);
                    src += rows_step;
                }
            } else {
#pragma unroll 1
                for (int row = 0; row + row0 < Config::kBlockN; row += kRowsAtOnce) {
                    copy_elements<Config::kPrecision>(dst + row * Config::kRowBytes, src, 1, row < rows ? channels : 0);
                    src += rows_step;
                }
            }
            if (++at.tap == p.taps) {
                at.tap = 0;
                if (++at.slice == end_slice) {
                    at.slice = first_slice;
                    at.index += step;
                    if (at.index < p.tiles) point_to_tile(at);
                }
            }
        }
        at.buffer = at.buffer + 1 == p.weight_stages ? 0 : at.buffer + 1;
    }

    // The first `count` of them, each in a group of its own.
    CONVPOOL_DEVICE void fetch_ahead(int count, Cursor &at, int first_slice, int end_slice, int step) const {
#pragma unroll 1
        for (int i = 0; i < count; ++i) {
            fetch(at, first_slice, end_slice, step);
            copy_commit();
        }
    }
};

}  // namespace convpool

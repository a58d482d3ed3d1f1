// SPDX-License-Identifier: Apache-2.0
// direct_fused: box means formed in shared memory and multiplied there, nothing written between.
//
// A block computes kBlockM output pixels (a box of tile_images x 2^tile_h_log2 x 2^tile_w_log2) by kBlockN channels. For
// each slice of channels it
//   1. copies the pixels of X that the tile needs (raw) to shared memory, asynchronously, a slice ahead;
//   2. forms every box mean of the tile once (P), after it has applied a prologue to raw, in place;
//   3. multiplies, for each tap (a, b) of the kernel, the tile's pixels of P, shifted by the tap, by the tap's weights,
//      which a ring of kStages buffers brings in. If all weights of a block fit, they are copied once and stay.
// Blocks are persistent: copies for the next tile are under way while one is finished.
//
// P is kept as [chunk][image][row][column % stride_w][column / stride_w], 16 bytes each. Neighbouring output pixels read
// columns stride_w apart, which so are neighbours: eight of them are eight consecutive 16-byte rows, one ldmatrix without
// bank conflicts, whatever the tap. The row pitch of a phase is odd, so that two column phases that are stored together,
// and, at stride 2, two output rows of four pixels that are read together, meet in no bank either.
//
// GEMM row r of a tile is image r >> (h+w), row (r >> w) mod 2^h, column r mod 2^w, with h, w the log2 of the box.
#pragma once

#include "families/direct_fused/rows.h"
#include "kernels/epilogue/pushed_sums.cuh"
#include "kernels/epilogue/store_rows.cuh"
#include "kernels/mma/multiply_slice.cuh"
#include "kernels/prologue/prologue.cuh"
#include "kernels/ptx/memory.cuh"
#include "kernels/tile/chunk.cuh"
#include "kernels/tile/tile.cuh"

namespace convpool {

// Copies of weights to the ring, one tap and slice at a time, ahead of the products.
template <class Config> struct DirectFusedWeights {
    using Element = typename Traits<Config::kPrecision>::Element;
    static constexpr int kChunks = Config::kChunks, kPerChunk = Config::kPerChunk;
    static constexpr int kRowsAtOnce = Config::kThreads / kChunks;
    static_assert(kRowsAtOnce % 8 == 0, "rows that one thread copies have one swizzle");

    // The next part to fetch: tile, slice and tap run ahead of the products.
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
                UNROLLED_FOR (int row = 0; row < Config::kBlockN; row += kRowsAtOnce) {
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

template <class Config> struct DirectFused {
    using Element = typename Traits<Config::kPrecision>::Element;
    static constexpr int kChunks = Config::kChunks, kPerChunk = Config::kPerChunk;

    const DirectFusedParams &p;
    const uint32_t shared;  // address of shared memory
    const int thread, warp, lane;

    CONVPOOL_DEVICE DirectFused(const DirectFusedParams &params, uint32_t shared_base)
        : p(params), shared(shared_base), thread(threadIdx.x), warp(threadIdx.x >> 5), lane(threadIdx.x & 31) {}

    struct Place {
        int m_tile, image, out_y, out_x;  // first image, first output row and column
    };

    CONVPOOL_DEVICE Place tile_at(int index) const {
        uint32_t m_tile, rest, column, row, images;
        p.div_m_tiles.divmod(index, rest, m_tile);  // channels first: neighbours share pixels
        p.div_tiles_w.divmod(rest, rest, column);
        p.div_tiles_h.divmod(rest, images, row);
        return {static_cast<int>(m_tile), static_cast<int>(images) * p.tile_images, static_cast<int>(row) << p.tile_h_log2,
                static_cast<int>(column) << p.tile_w_log2};
    }

    // The first row and column of X that a tile covers.
    CONVPOOL_DEVICE int first_row(const Place &tile) const {
        return (tile.out_y * p.shape.stride_h - p.shape.pad_h) * p.box.stride_h - p.box.pad_h;
    }
    CONVPOOL_DEVICE int first_column(const Place &tile) const {
        return (tile.out_x * p.shape.stride_w - p.shape.pad_w) * p.box.stride_w - p.box.pad_w;
    }

    // ---- 1: pixels of X, a warp per row ----
    CONVPOOL_DEVICE void load_raw(const Place &tile, int slice) const {
        const Shape2d &s = p.shape;
        const int y0 = first_row(tile), x0 = first_column(tile);
        const int c0 = slice * Config::kSliceChannels;
        const Element *x = static_cast<const Element *>(p.x);
        for (int row = warp; row < p.tile_images * p.raw_h; row += Config::kWarps) {
            uint32_t image, dy;
            p.div_raw_h.divmod(row, image, dy);
            const int n = tile.image + image, y = y0 + static_cast<int>(dy);
            const bool inside = n < s.n && static_cast<uint32_t>(y) < static_cast<uint32_t>(s.h);
            const uint32_t dst = shared + p.raw_offset + row * p.raw_w * kChunks * 16;
            if (p.x_chunked) {  // whole chunks, by cp.async
                const Element *line = x + ((static_cast<int64_t>(n) * s.h + y) * s.w) * s.c;
                const int c = c0 + (lane % kChunks) * kPerChunk;
                for (int i = lane; i < p.raw_w * kChunks; i += 32) {
                    const int column = x0 + i / kChunks;
                    const bool valid = inside && static_cast<uint32_t>(column) < static_cast<uint32_t>(s.w) && c < s.c;
                    copy_chunk(dst + i * 16, valid ? line + column * s.c + c : x, valid);
                }
            } else {  // either layout, element by element
#pragma unroll 1
                for (int chunk = 0; chunk < kChunks; ++chunk) {
                    const int c = c0 + chunk * kPerChunk;
#pragma unroll 1
                    for (int dx = lane; dx < p.raw_w; dx += 32) {
                        const int column = x0 + dx;
                        const bool valid = inside && static_cast<uint32_t>(column) < static_cast<uint32_t>(s.w) && c < s.c;
                        const int64_t plane = static_cast<int64_t>(s.h) * s.w;
                        const int64_t pixel = static_cast<int64_t>(y) * s.w + column;
                        const Element *src = s.x_channels_last ? x + (n * plane + pixel) * s.c + c
                                                               : x + (static_cast<int64_t>(n) * s.c + c) * plane + pixel;
                        copy_elements<Config::kPrecision>(dst + (dx * kChunks + chunk) * 16, src, s.x_channels_last ? 1 : plane,
                                                          valid ? s.c - c : 0);
                    }
                }
            }
        }
    }

    // Applies the prologue to raw, in place and rounded to X's type; the zeros outside X stay.
    CONVPOOL_DEVICE void apply_prologue(const Place &tile, int slice) const {
        const Shape2d &s = p.shape;
        const int y0 = first_row(tile), x0 = first_column(tile);
        const int c = slice * Config::kSliceChannels + lane % kChunks * kPerChunk;
        if (c >= s.c) return;
        ChunkPrologue<kStored<Config::kPrecision>> f;
        f.load(p.prologue, c, s.c);
#pragma unroll 1
        for (int row = warp; row < p.tile_images * p.raw_h; row += Config::kWarps) {
            uint32_t image, dy;
            p.div_raw_h.divmod(row, image, dy);
            if (static_cast<uint32_t>(y0 + static_cast<int>(dy)) >= static_cast<uint32_t>(s.h)) continue;
            const uint32_t line = shared + p.raw_offset + row * p.raw_w * kChunks * 16;
#pragma unroll 1
            for (int i = lane; i < p.raw_w * kChunks; i += 32) {
                if (static_cast<uint32_t>(x0 + i / kChunks) >= static_cast<uint32_t>(s.w)) continue;
                float v[kPerChunk];
                unpack_chunk<kStored<Config::kPrecision>>(load_shared(line + i * 16), v);
                f.apply(p.prologue, v);
                store_shared(line + i * 16, pack_chunk<kStored<Config::kPrecision>>(v));
            }
        }
    }

    // ---- 2: box means, a thread per chunk, column and segment of rows, which it walks down ----
    struct Walk {
        uint32_t src, dst;  // bytes from the start of raw, of P
        int row, count;     // first row of the segment, 0 rows: nothing to do
        int column;
    };

    // Work item: [image][segment][column][chunk], chunks first, so that neighbouring threads read neighbouring bytes.
    CONVPOOL_DEVICE Walk walk_of(int item) const {
        uint32_t rest, column, segment, image, across, phase;
        const int chunk = item % kChunks;
        p.div_halo_w.divmod(item / kChunks, rest, column);
        p.div_segments.divmod(rest, image, segment);
        p.div_stride_w.divmod(column, across, phase);
        const int row = segment * p.segment_h;
        return {((image * p.raw_h + row * p.box.stride_h) * p.raw_w + column * p.box.stride_w) * (kChunks * 16) + chunk * 16,
                (chunk * p.plane + (image * p.halo_h + row) * p.shape.stride_w * p.phase_pitch + phase * p.phase_pitch + across) *
                    16,
                row, min(p.segment_h, p.halo_h - row), static_cast<int>(column)};
    }

    CONVPOOL_DEVICE void walk_rows(const Walk &walk, const Place &tile) const {
        const Shape2d &s = p.shape;
        if (walk.count <= 0) return;
        const uint32_t raw_pitch = p.raw_w * kChunks * 16, row_step = s.stride_w * p.phase_pitch * 16;
        const uint32_t src = shared + p.raw_offset + walk.src, dst = shared + walk.dst;
        const int row = tile.out_y * s.stride_h - s.pad_h + walk.row;
        const bool column_inside =
            static_cast<uint32_t>(tile.out_x * s.stride_w - s.pad_w + walk.column) < static_cast<uint32_t>(s.pooled_w);
        // Beyond the pooled tensor stands the convolution's zero padding, not a mean of what raw holds there.
        const uint32_t rows_inside = column_inside ? s.pooled_h : 0;
        if (p.box_pairs) walk_pairs(src, raw_pitch, dst, row_step, row, walk.count, rows_inside);
        else walk_boxes(src, raw_pitch, dst, row_step, row, walk.count, rows_inside);
    }

    CONVPOOL_DEVICE void form_means(const Place &tile) const {
#pragma unroll 1
        for (int item = thread; item < p.walks; item += Config::kThreads) walk_rows(walk_of(item), tile);
    }

    // P of a slice, from raw that all threads' copies have filled.
    CONVPOOL_DEVICE void form_slice(const Place &tile, int slice) const {
        if (is_present(p.prologue)) {
            apply_prologue(tile, slice);
            __syncthreads();
        }
        form_means(tile);
    }

    // sum = the pixel at src + its right neighbour.
    CONVPOOL_DEVICE void row_pair(uint32_t src, float (&sum)[kPerChunk]) const {
        float right[kPerChunk];
        unpack_chunk<Config::kPrecision>(load_shared(src), sum);
        unpack_chunk<Config::kPrecision>(load_shared(src + kChunks * 16), right);
        UNROLLED_FOR (int i = 0; i < kPerChunk; ++i) sum[i] += right[i];
    }

    // 2x2 windows one apart: the sum of a row's pair serves the row above and the row below.
    CONVPOOL_DEVICE void walk_pairs(uint32_t src, uint32_t raw_pitch, uint32_t dst, uint32_t row_step, uint32_t row, int count,
                                    uint32_t rows_inside) const {
        float above[kPerChunk];
        row_pair(src, above);
#pragma unroll 2
        for (int i = 0; i < count; ++i) {
            float below[kPerChunk], sum[kPerChunk];
            src += raw_pitch;
            row_pair(src, below);
            UNROLLED_FOR (int j = 0; j < kPerChunk; ++j) {
                sum[j] = (above[j] + below[j]) * 0.25f;
                above[j] = below[j];
            }
            const uint4 chunk = pack_chunk<Config::kPrecision>(sum);
            store_shared(dst, row + i < rows_inside ? chunk : uint4{0, 0, 0, 0});
            dst += row_step;
        }
    }

    // Any windows, one place at a time.
    CONVPOOL_DEVICE void walk_boxes(uint32_t src, uint32_t raw_pitch, uint32_t dst, uint32_t row_step, uint32_t row, int count,
                                    uint32_t rows_inside) const {
#pragma unroll 1
        for (int i = 0; i < count; ++i) {
            float sum[kPerChunk] = {};
#pragma unroll 1
            for (int u = 0; u < p.box.ph; ++u)
#pragma unroll 1
                for (int v = 0; v < p.box.pw; ++v) {
                    float value[kPerChunk];
                    unpack_chunk<Config::kPrecision>(
                        load_shared(src + u * p.box.dilation_h * raw_pitch + v * p.box.dilation_w * (kChunks * 16)), value);
                    UNROLLED_FOR (int j = 0; j < kPerChunk; ++j) sum[j] += value[j];
                }
            UNROLLED_FOR (int j = 0; j < kPerChunk; ++j) sum[j] = mean_of(sum[j], p.box);
            const uint4 chunk = pack_chunk<Config::kPrecision>(sum);
            store_shared(dst, row + i < rows_inside ? chunk : uint4{0, 0, 0, 0});
            src += p.box.stride_h * raw_pitch;
            dst += row_step;
        }
    }

    // ---- 3: products with the weights of one tap and slice ----
    CONVPOOL_DEVICE uint32_t tap_offset(int tap) const { return p.tap_offsets[tap]; }

    // Where in P the first pixel that output row r of the tile sees through tap (0, 0) is.
    CONVPOOL_DEVICE uint32_t pixel_row(int r) const {
        const int tx = r & ((1 << p.tile_w_log2) - 1), ty = (r >> p.tile_w_log2) & ((1 << p.tile_h_log2) - 1);
        const int image = r >> (p.tile_w_log2 + p.tile_h_log2);
        return shared + ((image * p.halo_h + ty * p.shape.stride_h) * p.shape.stride_w * p.phase_pitch + tx) * 16;
    }

    // This lane's ldmatrix rows in P of tap (0, 0): lanes 0-15 their pixel of chunk 0, 16-31 of chunk 1.
    CONVPOOL_DEVICE void find_pixel_rows(uint32_t (&rows)[Config::kFragmentsM], int warp_m) const {
        UNROLLED_FOR (int mi = 0; mi < Config::kFragmentsM; ++mi)
            rows[mi] = pixel_row(warp_m * Config::kWarpM + mi * 16 + (lane & 15)) + (lane >> 4) * p.plane * 16;
    }

    // Where in Y the channels of output row r of the tile are.
    CONVPOOL_DEVICE OutputPixel output_pixel(const Place &tile, int r) const {
        const Shape2d &s = p.shape;
        const int ox = tile.out_x + (r & ((1 << p.tile_w_log2) - 1));
        const int oy = tile.out_y + ((r >> p.tile_w_log2) & ((1 << p.tile_h_log2) - 1));
        const int n = tile.image + (r >> (p.tile_w_log2 + p.tile_h_log2));
        const int64_t pixels = static_cast<int64_t>(s.out_h) * s.out_w, pixel = static_cast<int64_t>(oy) * s.out_w + ox;
        return {s.y_channels_last ? (n * pixels + pixel) * s.m : n * s.m * pixels + pixel,
                n < s.n && oy < s.out_h && ox < s.out_w};
    }

    CONVPOOL_DEVICE OutputView output_view() const {
        const Shape2d &s = p.shape;
        return {p.y, s.y_channels_last ? 1 : static_cast<int64_t>(s.out_h) * s.out_w, s.m, p.y_vectors != 0, p.y_runs != 0};
    }

    // Bias, residual, activation, Y; with a split, after the blocks of the cluster have added up their slices.
    CONVPOOL_DEVICE void store(const Accumulators<Config> &acc, const Place &tile, int rank, int warp_m, int warp_n) const {
        auto pixel_of = [&](int row) { return output_pixel(tile, row); };
        if (p.split > 1)
            store_split<Config>(acc, shared, p.split, rank, p.epilogue, output_view(), warp_m * Config::kWarpM,
                                tile.m_tile * Config::kBlockN + warp_n * Config::kWarpN, lane, pixel_of);
        else
            store_tile<Config>(acc, shared, p.epilogue, output_view(), warp_m * Config::kWarpM,
                               tile.m_tile * Config::kBlockN + warp_n * Config::kWarpN, lane, pixel_of);
    }

    CONVPOOL_DEVICE void run() const {
        const int warp_m = warp / Config::kWarpsN, warp_n = warp % Config::kWarpsN;
        const int rank = blockIdx.x % p.split, step = gridDim.x / p.split;
        const int first_slice = p.slices * rank / p.split, end_slice = p.slices * (rank + 1) / p.split;
        const int taps = p.taps;
        const uint32_t two_planes = 2 * p.plane * 16;
        const uint32_t weight_lane = shared + p.weight_offset + weight_lane_offset<Config>(warp_n, lane);
        uint32_t pixel_rows[Config::kFragmentsM];
        find_pixel_rows(pixel_rows, warp_m);

        int index = blockIdx.x / p.split;
        if (index >= p.tiles) return;
        Place tile = tile_at(index);
        const DirectFusedWeights<Config> weights{p, shared, thread};
        typename DirectFusedWeights<Config>::Cursor cursor = weights.first(index, first_slice);

        // Start the copies: the first slice's pixels, and weights of as many taps as the ring holds but one.
        load_raw(tile, first_slice);
        const int ahead = p.resident ? (end_slice - first_slice) * taps : Config::kStages - 1;
        weights.fetch_ahead(ahead, cursor, first_slice, end_slice, step);

        // Hazard: raw pixels are copied in the group of a slice's first tap. kStages taps later the wait for weights has
        // covered them; with fewer taps, or no such waits, wait for everything.
        bool wait_all = true;
        int buffer = 0;
        for (; index < p.tiles; index += step) {
            Accumulators<Config> acc;  // (kFragmentsM x 16 pixels, kFragmentsN x 8 channels)
            clear<Config>(acc);
            Place next_tile = tile;
            if (p.resident) buffer = 0;
            for (int slice = first_slice; slice < end_slice; ++slice) {
                if (wait_all) copy_wait<0>();
                wait_all = p.resident || taps < Config::kStages;
                __syncthreads();  // raw is complete, and P no longer read
                form_slice(tile, slice);
#pragma unroll 1
                for (int tap = 0; tap < taps; ++tap) {
                    if (!p.resident) copy_wait<Config::kStages - 2>();
                    if (!p.resident || tap == 0) __syncthreads();  // weights and P are complete, the oldest buffer free
                    if (tap == 0) {
                        // raw is free for the next slice, of this tile or the next.
                        const bool last = slice + 1 == end_slice;
                        if (last && index + step < p.tiles) next_tile = tile_at(index + step);
                        if (!last || index + step < p.tiles) load_raw(next_tile, last ? first_slice : slice + 1);
                    }
                    if (!p.resident) weights.fetch(cursor, first_slice, end_slice, step);
                    copy_commit();
                    multiply<Config, Pixels::kMeans>(acc, pixel_rows, tap_offset(tap), two_planes,
                                                     weight_lane + buffer * Config::kWeightStageBytes);
                    buffer = buffer + 1 == p.weight_stages ? 0 : buffer + 1;
                }
            }
            __syncthreads();  // P is no longer read, and its place free for the accumulators
            store(acc, tile, rank, warp_m, warp_n);
            tile = next_tile;
        }
        copy_wait<0>();
    }
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kMinBlocks)
    direct_fused_kernel(const __grid_constant__ DirectFusedParams params) {
    if constexpr (kCompiledForThisArch<Config::kPrecision>) {
        extern __shared__ __align__(1024) unsigned char memory[];
        wait_for_previous_kernel();
        DirectFused<Config>(params, shared_address(memory)).run();
    }
}

namespace direct_fused {

struct Instances {
    template <size_t kRow> static const void *kernel(int) {
        return reinterpret_cast<const void *>(&direct_fused_kernel<TileConfigOf<kRows, kRow>>);
    }
};

}  // namespace direct_fused
}  // namespace convpool

// direct_fused: box means formed in shared memory and multiplied there, nothing written between.
//
// A block computes kBlockM output pixels (a box of tile_images x 2^tile_h_log2 x 2^tile_w_log2) by kBlockN channels. For
// each slice of channels it
//   1. copies the pixels of X that the tile needs (raw) to shared memory, asynchronously, a slice ahead;
//   2. forms every box mean of the tile once (P);
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

#include "tensor_tile.cuh"

namespace convpool {

template <class Config> struct DirectFused {
    using Element = typename Traits<Config::kPrecision>::Element;
    static constexpr int kChunks = Config::kChunks, kPerChunk = Config::kPerChunk;

    const DirectFusedParams &p;
    const uint32_t shared;  // address of shared memory
    const int thread, warp, lane;

    CONVPOOL_DEVICE DirectFused(const DirectFusedParams &params, uint32_t shared_base)
        : p(params), shared(shared_base), thread(threadIdx.x), warp(threadIdx.x >> 5), lane(threadIdx.x & 31) {}

    struct Tile {
        int m_tile, image, out_y, out_x;  // first image, first output row and column
    };

    CONVPOOL_DEVICE Tile tile_at(int index) const {
        uint32_t m_tile, rest, column, row, images;
        p.div_m_tiles.divmod(index, rest, m_tile);  // channels first: neighbours share pixels
        p.div_tiles_w.divmod(rest, rest, column);
        p.div_tiles_h.divmod(rest, images, row);
        return {static_cast<int>(m_tile), static_cast<int>(images) * p.tile_images,
                static_cast<int>(row) << p.tile_h_log2, static_cast<int>(column) << p.tile_w_log2};
    }

    // ---- 1: pixels of X, a warp per row ----
    CONVPOOL_DEVICE void load_raw(const Tile &tile, int slice) const {
        const Shape2d &s = p.shape;
        const int y0 = (tile.out_y * s.stride_h - s.pad_h) * p.box.stride_h - p.box.pad_h;
        const int x0 = (tile.out_x * s.stride_w - s.pad_w) * p.box.stride_w - p.box.pad_w;
        const int c0 = slice * Config::kSliceChannels;
        const Element *x = static_cast<const Element *>(p.x);
        for (int row = warp; row < p.tile_images * p.raw_h; row += Config::kWarps) {
            uint32_t image, dy;
            p.div_raw_h.divmod(row, image, dy);
            const int n = tile.image + image, y = y0 + static_cast<int>(dy);
            const bool inside = n < s.n && static_cast<uint32_t>(y) < static_cast<uint32_t>(s.h);
            const uint32_t dst = shared + p.raw_offset + row * p.raw_w * kChunks * 16;
            if (p.x_chunked) {
                const Element *line = x + ((static_cast<int64_t>(n) * s.h + y) * s.w) * s.c;
                const int c = c0 + (lane % kChunks) * kPerChunk;
                for (int i = lane; i < p.raw_w * kChunks; i += 32) {
                    const int column = x0 + i / kChunks;
                    const bool valid =
                        inside && static_cast<uint32_t>(column) < static_cast<uint32_t>(s.w) && c < s.c;
                    copy_chunk(dst + i * 16, valid ? line + column * s.c + c : x, valid);
                }
            } else {
                for (int chunk = 0; chunk < kChunks; ++chunk) {
                    const int c = c0 + chunk * kPerChunk;
                    for (int dx = lane; dx < p.raw_w; dx += 32) {
                        const int column = x0 + dx;
                        const bool valid =
                            inside && static_cast<uint32_t>(column) < static_cast<uint32_t>(s.w) && c < s.c;
                        const int64_t plane = static_cast<int64_t>(s.h) * s.w;
                        const int64_t pixel = static_cast<int64_t>(y) * s.w + column;
                        const Element *src = s.x_channels_last ? x + (n * plane + pixel) * s.c + c
                                                               : x + (static_cast<int64_t>(n) * s.c + c) * plane + pixel;
                        copy_elements<Config::kPrecision>(dst + (dx * kChunks + chunk) * 16, src,
                                                          s.x_channels_last ? 1 : plane, valid ? s.c - c : 0);
                    }
                }
            }
        }
    }

    // ---- 2: box means, a thread per chunk and column, down the rows of a segment ----
    CONVPOOL_DEVICE void form_means(const Tile &tile) const {
        const Shape2d &s = p.shape;
        const int row0 = tile.out_y * s.stride_h - s.pad_h, column0 = tile.out_x * s.stride_w - s.pad_w;
        const bool pair = p.box.ph == 2 && p.box.pw == 2 && p.box.stride_h == 1 && p.box.stride_w == 1 &&
                          p.box.dilation_h == 1 && p.box.dilation_w == 1;
        const int items = p.tile_images * p.segments * p.halo_w * kChunks;
        for (int item = thread; item < items; item += Config::kThreads) {
            uint32_t rest, column, segment, image, across, phase;
            const int chunk = item % kChunks;
            p.div_halo_w.divmod(item / kChunks, rest, column);
            p.div_segments.divmod(rest, image, segment);
            p.div_stride_w.divmod(column, across, phase);
            const int first = segment * p.segment_h, last = min(first + p.segment_h, p.halo_h);
            const uint32_t row_step = s.stride_w * p.phase_pitch * 16;
            uint32_t dst = shared + (chunk * p.plane + phase * p.phase_pitch + across) * 16 +
                           (image * p.halo_h + first) * row_step;
            const bool column_inside =
                static_cast<uint32_t>(column0 + static_cast<int>(column)) < static_cast<uint32_t>(s.pooled_w);
            const uint32_t raw_pitch = p.raw_w * kChunks * 16;
            const uint32_t src = shared + p.raw_offset +
                                 ((image * p.raw_h + first * p.box.stride_h) * p.raw_w + column * p.box.stride_w) *
                                     (kChunks * 16) + chunk * 16;
            if (pair)
                walk_pairs(src, raw_pitch, dst, row_step, row0 + first, last - first, column_inside);
            else
                walk_boxes(src, raw_pitch, dst, row_step, row0 + first, last - first, column_inside);
        }
    }

    CONVPOOL_DEVICE void store_mean(uint32_t dst, const float (&sum)[kPerChunk], bool inside) const {
        float mean[kPerChunk];
#pragma unroll
        for (int i = 0; i < kPerChunk; ++i) mean[i] = mean_of(sum[i], p.box);
        const uint4 chunk = pack_chunk<Config::kPrecision>(mean);
        // Beyond the pooled tensor stands the convolution's zero padding, not a mean of what raw holds there.
        store_shared(dst, inside ? chunk : uint4{0, 0, 0, 0});
    }

    CONVPOOL_DEVICE void row_pair(uint32_t src, float (&sum)[kPerChunk]) const {
        float right[kPerChunk];
        unpack_chunk<Config::kPrecision>(load_shared(src), sum);
        unpack_chunk<Config::kPrecision>(load_shared(src + kChunks * 16), right);
#pragma unroll
        for (int i = 0; i < kPerChunk; ++i) sum[i] += right[i];
    }

    // 2x2 windows one apart: the sum of a row's pair serves the row above and the row below.
    CONVPOOL_DEVICE void walk_pairs(uint32_t src, uint32_t raw_pitch, uint32_t dst, uint32_t row_step, int row,
                                    int count, bool column_inside) const {
        float above[kPerChunk];
        row_pair(src, above);
        for (int i = 0; i < count; ++i) {
            float below[kPerChunk], sum[kPerChunk];
            src += raw_pitch;
            row_pair(src, below);
#pragma unroll
            for (int j = 0; j < kPerChunk; ++j) {
                sum[j] = (above[j] + below[j]) * 0.25f;
                above[j] = below[j];
            }
            const bool inside =
                column_inside && static_cast<uint32_t>(row + i) < static_cast<uint32_t>(p.shape.pooled_h);
            const uint4 chunk = pack_chunk<Config::kPrecision>(sum);
            store_shared(dst, inside ? chunk : uint4{0, 0, 0, 0});
            dst += row_step;
        }
    }

    CONVPOOL_DEVICE void walk_boxes(uint32_t src, uint32_t raw_pitch, uint32_t dst, uint32_t row_step, int row,
                                    int count, bool column_inside) const {
        for (int i = 0; i < count; ++i) {
            float sum[kPerChunk] = {};
            for (int u = 0; u < p.box.ph; ++u)
                for (int v = 0; v < p.box.pw; ++v) {
                    float value[kPerChunk];
                    unpack_chunk<Config::kPrecision>(
                        load_shared(src + u * p.box.dilation_h * raw_pitch + v * p.box.dilation_w * (kChunks * 16)),
                        value);
#pragma unroll
                    for (int j = 0; j < kPerChunk; ++j) sum[j] += value[j];
                }
            store_mean(dst, sum,
                       column_inside && static_cast<uint32_t>(row + i) < static_cast<uint32_t>(p.shape.pooled_h));
            src += p.box.stride_h * raw_pitch;
            dst += row_step;
        }
    }

    // ---- 3: weights of one tap and slice ----
    CONVPOOL_DEVICE void load_weights(int buffer, int m_tile, int slice, int tap) const {
        constexpr int kRowsAtOnce = Config::kThreads / kChunks;
        const Shape2d &s = p.shape;
        const int chunk = thread % kChunks, c = slice * Config::kSliceChannels + chunk * kPerChunk;
        const int64_t row_length = static_cast<int64_t>(s.kh) * s.kw * s.c;
        int m = m_tile * Config::kBlockN + thread / kChunks;
        uint32_t dst = shared + p.weight_offset + buffer * Config::kWeightStageBytes +
                       (chunk * Config::kWeightPlane + thread / kChunks) * 16;
        const Element *w = static_cast<const Element *>(p.w);
        const Element *src = w + m * row_length + tap * s.c + c;
#pragma unroll
        for (int row = 0; row < Config::kBlockN; row += kRowsAtOnce) {
            if (Config::kBlockN % kRowsAtOnce != 0 && row + thread / kChunks >= Config::kBlockN) break;
            const bool valid = m + row < s.m && c < s.c;
            if (p.w_chunked)
                copy_chunk(dst, valid ? src : w, valid);
            else
                copy_elements<Config::kPrecision>(dst, src, 1, valid ? s.c - c : 0);
            src += kRowsAtOnce * row_length;
            dst += kRowsAtOnce * 16;
        }
    }

    CONVPOOL_DEVICE uint32_t tap_offset(int tap) const {
        uint32_t a, b, across, phase;
        p.div_kw.divmod(tap, a, b);
        p.div_stride_w.divmod(b * p.shape.dilation_w, across, phase);
        return ((a * p.shape.dilation_h * p.shape.stride_w + phase) * p.phase_pitch + across) * 16;
    }

    CONVPOOL_DEVICE uint32_t pixel_row(int r) const {
        const int tx = r & ((1 << p.tile_w_log2) - 1), ty = (r >> p.tile_w_log2) & ((1 << p.tile_h_log2) - 1);
        const int image = r >> (p.tile_w_log2 + p.tile_h_log2);
        return shared +
               ((image * p.halo_h + ty * p.shape.stride_h) * p.shape.stride_w * p.phase_pitch + tx) * 16;
    }

    CONVPOOL_DEVICE OutputPixel output_pixel(const Tile &tile, int r) const {
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
        return {p.y, s.y_channels_last ? 1 : static_cast<int64_t>(s.out_h) * s.out_w, s.m, p.y_vectors != 0};
    }

    // ---- a cluster's blocks each hold a part of the sum over channels ----
    // Each writes its accumulators to its shared memory; block r then adds, in the order of the blocks, every split-th
    // fragment from r on, so the result does not depend on timing.
    CONVPOOL_DEVICE void store_split(const Accumulators<Config> &acc, const Tile &tile, int rank, int warp_m,
                                     int warp_n) const {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
        constexpr int kFragmentBytes = Config::kThreads * 16;
        __syncthreads();
        const uint32_t mine = shared + thread * 16;
#pragma unroll
        for (int mi = 0; mi < Config::kFragmentsM; ++mi)
#pragma unroll
            for (int ni = 0; ni < Config::kFragmentsN; ++ni)
                store_shared(mine + (mi * Config::kFragmentsN + ni) * kFragmentBytes,
                             {__float_as_uint(acc[mi][ni][0]), __float_as_uint(acc[mi][ni][1]),
                              __float_as_uint(acc[mi][ni][2]), __float_as_uint(acc[mi][ni][3])});
        asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
        const OutputView view = output_view();
        for (int f = rank; f < Config::kFragmentsM * Config::kFragmentsN; f += p.split) {
            float4 sum{0.f, 0.f, 0.f, 0.f};
            for (int q = 0; q < p.split; ++q) {
                uint32_t remote;
                float4 part;
                asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
                             : "=r"(remote) : "r"(mine + f * kFragmentBytes), "r"(q));
                asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];"
                             : "=f"(part.x), "=f"(part.y), "=f"(part.z), "=f"(part.w) : "r"(remote) : "memory");
                sum.x += part.x;
                sum.y += part.y;
                sum.z += part.z;
                sum.w += part.w;
            }
            const int row = warp_m * Config::kWarpM + f / Config::kFragmentsN * 16 + (lane >> 2);
            const int channel = tile.m_tile * Config::kBlockN + warp_n * Config::kWarpN + f % Config::kFragmentsN * 8 +
                                2 * (lane & 3);
            store_fragment<Element>({sum.x, sum.y}, output_pixel(tile, row), p.epilogue, view, channel);
            store_fragment<Element>({sum.z, sum.w}, output_pixel(tile, row + 8), p.epilogue, view, channel);
        }
        asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
    }

    CONVPOOL_DEVICE void run() const {
        const int warp_m = warp / Config::kWarpsN, warp_n = warp % Config::kWarpsN;
        const int rank = blockIdx.x % p.split, step = gridDim.x / p.split;
        const int first_slice = p.slices * rank / p.split, end_slice = p.slices * (rank + 1) / p.split;
        const int taps = p.shape.kh * p.shape.kw;
        const uint32_t two_planes = 2 * p.plane * 16;
        const uint32_t weight_lane = shared + p.weight_offset + weight_lane_offset<Config>(warp_n, lane);
        uint32_t pixel_rows[Config::kFragmentsM];
#pragma unroll
        for (int mi = 0; mi < Config::kFragmentsM; ++mi)
            pixel_rows[mi] = pixel_row(warp_m * Config::kWarpM + mi * 16 + (lane & 15)) + (lane >> 4) * p.plane * 16;

        int index = blockIdx.x / p.split;
        if (index >= p.tiles) return;
        Tile tile = tile_at(index);
        // The weights to fetch next: tap, slice and tile run ahead of the products.
        int fetch_index = index, fetch_slice = first_slice, fetch_tap = 0, fetch_buffer = 0, fetch_m_tile = tile.m_tile;
        auto fetch = [&] {
            if (fetch_index < p.tiles) {
                load_weights(fetch_buffer, fetch_m_tile, fetch_slice, fetch_tap);
                if (++fetch_tap == taps) {
                    fetch_tap = 0;
                    if (++fetch_slice == end_slice) {
                        fetch_slice = first_slice;
                        fetch_index += step;
                        if (fetch_index < p.tiles) fetch_m_tile = tile_at(fetch_index).m_tile;
                    }
                }
            }
            fetch_buffer = fetch_buffer + 1 == p.weight_stages ? 0 : fetch_buffer + 1;
        };

        load_raw(tile, first_slice);
        if (p.resident) {
            for (int i = 0; i < (end_slice - first_slice) * taps; ++i) fetch();
            copy_commit();
        } else {
            for (int i = 0; i < Config::kStages - 1; ++i) {
                fetch();
                copy_commit();
            }
        }
        // Raw pixels are copied in the group of a slice's first tap; kStages taps later the wait for weights has covered
        // them. Else wait for everything.
        bool wait_all = true;
        int buffer = 0;
        for (; index < p.tiles; index += step) {
            Accumulators<Config> acc;
            clear<Config>(acc);
            Tile next_tile = tile;
            if (p.resident) buffer = 0;
            for (int slice = first_slice; slice < end_slice; ++slice) {
                if (wait_all) copy_wait<0>();
                wait_all = p.resident || taps < Config::kStages;
                __syncthreads();  // raw is complete, and P no longer read
                form_means(tile);
                for (int tap = 0; tap < taps; ++tap) {
                    if (!p.resident) copy_wait<Config::kStages - 2>();
                    if (!p.resident || tap == 0) __syncthreads();  // weights and P are complete, the oldest buffer free
                    if (tap == 0) {
                        if (slice + 1 < end_slice) {
                            load_raw(tile, slice + 1);
                        } else if (index + step < p.tiles) {
                            next_tile = tile_at(index + step);
                            load_raw(next_tile, first_slice);
                        }
                    }
                    if (!p.resident) fetch();
                    copy_commit();
                    multiply<Config, false>(acc, pixel_rows, tap_offset(tap), two_planes,
                                            weight_lane + buffer * Config::kWeightStageBytes);
                    buffer = buffer + 1 == p.weight_stages ? 0 : buffer + 1;
                }
            }
            if (p.split > 1)
                store_split(acc, tile, rank, warp_m, warp_n);
            else
                store_tile<Config>(acc, p.epilogue, output_view(), warp_m * Config::kWarpM,
                                   tile.m_tile * Config::kBlockN + warp_n * Config::kWarpN, lane,
                                   [&](int row) { return output_pixel(tile, row); });
            tile = next_tile;
        }
        copy_wait<0>();
    }
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kMinBlocks)
    direct_fused_kernel(const __grid_constant__ DirectFusedParams params) {
    if constexpr (kCompiledForThisArch<Config::kPrecision>) {
        extern __shared__ __align__(128) unsigned char memory[];
        DirectFused<Config>(params, shared_address(memory)).run();
    }
}

}  // namespace convpool

// direct_fused on Hopper, 2x2 pooling of stride 2: TMA copies, box means and products each by warps of their own.
//
// For 3x3 kernels (of stride 2 over box means of stride 1) and 1x1 kernels. The output is cut into subtiles of 8 x 8
// pixels; a block computes kSubtiles of them by kBlockN channels, slice after slice of 64 bytes of channels, tile after
// tile. Its warps hand data on through rings in shared memory:
//
//     warp 0           weights of one tap and slice      -> ring of kStages       (TMA, 64-byte swizzle)
//     kMeanWarps       pixels of X under the subtiles    -> ring of kRawStages    (TMA by the first, zeros outside)
//                      prologue, box means of those      -> ring of kMeanStages   (fp32 sums, rounded once)
//                      of a slice by all of them, or, in kMeanGroups but the first, of slices in turn
//     2 warpgroups     products of means and weights, accumulators in registers; then bias, residual, activation, Y
//
// X is read as two tensors, its even and its odd columns, so that columns two apart are neighbours in shared memory. Box
// means lie in planes of one parity of row and column, [chunk][position] of 16 bytes each: eight neighbouring outputs see
// through a tap (a, b) eight consecutive positions of plane (a % 2, b % 2), which is a core matrix of wgmma, so a tap is a
// shifted start in its plane.
//
// Tried and slower: clusters that fetch weights for each other, or share the channels of a tile; a ring of raw pixels by
// subtile instead of by slice; a kernel for 4 x 4 output pixels of four images (benchmarks/log.md).
#pragma once

#include <type_traits>

#include "kernels/epilogue/activation.cuh"
#include "kernels/prologue/packed_prologue.cuh"
#include "kernels/ptx/cp_async.cuh"
#include "kernels/ptx/mbarrier.cuh"
#include "kernels/ptx/tma.cuh"
#include "kernels/ptx/wgmma.cuh"
#include "kernels/tile/chunk.cuh"
#include "kernels/tile/output.cuh"
#include "kernels/tile/ring.cuh"

namespace convpool {

template <Precision kPrecision_, int kSubtiles_, int kBlockN_, int kKernel_, int kStageTaps_, int kStages_, int kRawStages_,
          int kMeanStages_, int kMeanWarps_, int kMeanGroups_>
struct DirectTmaConfig {
    static constexpr Precision kPrecision = kPrecision_;
    static constexpr int kSubtiles = kSubtiles_, kBlockN = kBlockN_, kKernel = kKernel_, kStageTaps = kStageTaps_,
                         kStages = kStages_, kRawStages = kRawStages_, kMeanStages = kMeanStages_, kMeanWarps = kMeanWarps_,
                         kMeanGroups = kMeanGroups_;
    static constexpr int kSliceWarps = kMeanGroups == 1 ? kMeanWarps : (kMeanWarps - 1) / kMeanGroups;
    static constexpr int kTaps = kKernel * kKernel, kPerChunk = Traits<kPrecision>::kPerChunk, kChunks = 4;
    static constexpr int kThreads = 32 + kMeanWarps * 32 + 256;
    static constexpr int kConsumerN = kSubtiles == 1 ? kBlockN / 2 : kBlockN;  // of a warpgroup
    static constexpr int kFragments = kConsumerN / 8;
    static constexpr DirectTmaShared kShared =
        direct_tma_shared(kSubtiles, kBlockN, kKernel, kStageTaps, kStages, kRawStages, kMeanStages);

    static_assert(kKernel == 1 || kKernel == 3, "the planes of box means are laid out for these");
    static_assert(kMeanWarps % 4 == 3, "whole warpgroups, with the warp that copies");
    static_assert(kMeanGroups == 1 || kMeanGroups * kSliceWarps + 1 == kMeanWarps, "equal groups, and the warp that copies");
    static_assert(kMeanGroups <= kMeanStages, "a group that skips slices sees every phase of a buffer it waits for");
    static_assert(kMeanGroups == 1 || kMeanStages <= kRawStages, "and of raw pixels, as it waits for a buffer of means");
    static_assert(kSubtiles <= 2 && kRawStages >= 2, "a subtile or its channels' halves a warpgroup; copies run ahead");
    static_assert(kTaps % kStageTaps == 0, "whole stages of weights in a slice");
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

template <class Config, bool kPrologue> struct DirectTma {
    static constexpr Precision kPrecision = Config::kPrecision;
    using Element = typename Traits<kPrecision>::Element;
    static constexpr int kSubtiles = Config::kSubtiles, kKernel = Config::kKernel, kTaps = Config::kTaps,
                         kStageTaps = Config::kStageTaps, kStages = Config::kStages, kChunks = Config::kChunks,
                         kPerChunk = Config::kPerChunk;
    static constexpr DirectTmaShared kShared = Config::kShared;
    static constexpr int kRawStages = Config::kRawStages, kMeanStages = Config::kMeanStages;
    static constexpr int kPlane = kShared.plane * 16;                               // bytes from chunk to chunk
    static constexpr int kColumns = kShared.raw_columns, kRows = kShared.raw_rows;  // of pixels of X, of one parity
    static constexpr int kHalfBytes = kColumns * kRows * 64;

    const DirectTmaParams &p;
    const uint32_t shared;
    const int warp, lane;

    CONVPOOL_DEVICE uint32_t barrier(int index) const { return shared + kShared.barrier_offset + index * 8; }
    CONVPOOL_DEVICE uint32_t weights_full(int i) const { return barrier(i); }
    CONVPOOL_DEVICE uint32_t weights_empty(int i) const { return barrier(kStages + i); }
    CONVPOOL_DEVICE uint32_t raw_full(int i) const { return barrier(2 * kStages + i); }
    CONVPOOL_DEVICE uint32_t raw_empty(int i) const { return barrier(2 * kStages + kRawStages + i); }
    CONVPOOL_DEVICE uint32_t means_full(int i) const { return barrier(2 * (kStages + kRawStages) + i); }
    CONVPOOL_DEVICE uint32_t means_empty(int i) const { return barrier(2 * (kStages + kRawStages) + kMeanStages + i); }
    CONVPOOL_DEVICE uint32_t weights_at(int i) const { return shared + i * kShared.weight_stage; }
    CONVPOOL_DEVICE uint32_t raw_at(int i, int subtile) const {
        return shared + kShared.raw_offset + (i * kSubtiles + subtile) * 2 * kHalfBytes;
    }
    CONVPOOL_DEVICE uint32_t means_at(int i, int subtile) const {
        return shared + kShared.mean_offset + (i * kSubtiles + subtile) * kChunks * kPlane;
    }

    struct Tile {
        int channel, subtile;  // the first of each
    };
    // From the last tile to the first: the L2 holds what the layer before has written last.
    CONVPOOL_DEVICE Tile tile_at(int index) const {
        uint32_t m_tile, group;
        p.div_m_tiles.divmod(p.tiles - 1 - index, group, m_tile);  // channels first: neighbours share pixels
        return {static_cast<int>(m_tile) * Config::kBlockN, static_cast<int>(group) * kSubtiles};
    }
    struct Corner {
        int image, y, x;  // first output row and column
    };
    CONVPOOL_DEVICE Corner corner_of(int subtile) const {
        uint32_t rest, column, row, image;
        p.div_tiles_w.divmod(subtile, rest, column);
        p.div_tiles_h.divmod(rest, image, row);
        return {static_cast<int>(image), static_cast<int>(row) * 8, static_cast<int>(column) * 8};
    }

    CONVPOOL_DEVICE void copy_weights() const {
        Ring<kStages> ring;
        const int end = p.resident ? min(p.tiles, static_cast<int>(blockIdx.x) + 1) : p.tiles;
        for (int index = blockIdx.x; index < end; index += gridDim.x) {
            const int channel = tile_at(index).channel;
#pragma unroll 1
            for (int slice = 0; slice < p.slices; ++slice)
#pragma unroll
                for (int tap = 0; tap < kTaps; tap += kStageTaps) {
                    barrier_wait(weights_empty(ring.buffer), ring.parity ^ 1);
                    barrier_expect(weights_full(ring.buffer), kShared.weight_stage);
                    copy_box(weights_at(ring.buffer), &p.w_map, weights_full(ring.buffer), slice * kChunks * kPerChunk, channel,
                             tap);
                    ring.next();
                }
        }
    }

    // Copies raw pixels, slice after slice; one thread.
    struct RawCopies {
        const DirectTma &kernel;
        int index = blockIdx.x, slice = 0;
        Ring<kRawStages> ring;
        int image[kSubtiles], y[kSubtiles], x[kSubtiles];

        CONVPOOL_DEVICE explicit RawCopies(const DirectTma &k) : kernel(k) {
            if (index < kernel.p.tiles) locate();
        }
        CONVPOOL_DEVICE void locate() {
            const Tile tile = kernel.tile_at(index);
#pragma unroll
            for (int s = 0; s < kSubtiles; ++s) {
                const Corner corner = kernel.corner_of(tile.subtile + s);
                image[s] = corner.image;
                y[s] = corner.y * 2 - kernel.p.pad_h;
                x[s] = corner.x * 2 - kernel.p.pad_w;
            }
        }
        CONVPOOL_DEVICE void next() {
            if (index >= kernel.p.tiles) return;
            barrier_wait(kernel.raw_empty(ring.buffer), ring.parity ^ 1);
            const uint32_t full = kernel.raw_full(ring.buffer);
            barrier_expect(full, kSubtiles * 2 * kHalfBytes);
            const int channel = slice * kChunks * kPerChunk;
#pragma unroll
            for (int s = 0; s < kSubtiles; ++s) {
                const uint32_t dst = kernel.raw_at(ring.buffer, s);
                const int odd = x[s] & 1;
                copy_box(dst, &kernel.p.x_map[odd], full, channel, (x[s] - odd) >> 1, y[s], image[s]);
                copy_box(dst + kHalfBytes, &kernel.p.x_map[odd ^ 1], full, channel, (x[s] + odd) >> 1, y[s], image[s]);
            }
            ring.next();
            if (++slice == kernel.p.slices) {
                slice = 0;
                index += gridDim.x;
                if (index < kernel.p.tiles) locate();
            }
        }
    };

    // ---- prologue ----

    // f of a lane's pixels. Outside X they are zero as copied; where a shift may have made f(0) another number they become
    // zero again.
    struct PixelPrologue {
        static constexpr int kPixels = kKernel == 3 ? 18 : 16;  // rows and columns of X under a subtile
        const DirectTmaParams &p;
        PackedPrologue<kPrecision> chunk;
        int y[kSubtiles], x[kSubtiles];  // of each subtile's first pixel
        int first_y = 0, first_x = 0;    // of the present subtile
        bool border = false;             // it has pixels outside X that count

        CONVPOOL_DEVICE explicit PixelPrologue(const DirectTmaParams &params) : p(params), chunk(params.prologue) {}
        CONVPOOL_DEVICE void start_tile(const DirectTma &kernel, int index) {
            if (p.prologue.scale == nullptr) return;
            const Tile tile = kernel.tile_at(index);
#pragma unroll
            for (int s = 0; s < kSubtiles; ++s) {
                const Corner corner = kernel.corner_of(tile.subtile + s);
                y[s] = corner.y * 2 - p.pad_h;
                x[s] = corner.x * 2 - p.pad_w;
            }
        }
        CONVPOOL_DEVICE void start_slice(int slice, int lane) {
            chunk.load(p.prologue, (slice * kChunks + (lane & 3)) * kPerChunk, p.c);
        }
        CONVPOOL_DEVICE void start_subtile(int s) {
            if (p.prologue.scale == nullptr) return;
            first_y = s == 0 ? y[0] : y[kSubtiles - 1];
            first_x = s == 0 ? x[0] : x[kSubtiles - 1];
            border = first_y < 0 || first_x < 0 || first_y + kPixels > p.h || first_x + kPixels > p.w;
        }
        // Of a subtile at the border.
        CONVPOOL_DEVICE uint4 operator()(const uint4 &pixel, int row, int column) const {
            const uint4 v = chunk(pixel);
            const bool outside = static_cast<uint32_t>(first_y + row) >= static_cast<uint32_t>(p.h) ||
                                 static_cast<uint32_t>(first_x + column) >= static_cast<uint32_t>(p.w);
            return outside ? uint4{0, 0, 0, 0} : v;
        }
    };
    struct NoPrologue {
        CONVPOOL_DEVICE explicit NoPrologue(const DirectTmaParams &) {}
        CONVPOOL_DEVICE uint4 operator()(const uint4 &pixel, int, int) const { return pixel; }
    };
    using PixelFunction = std::conditional_t<kPrologue, PixelPrologue, NoPrologue>;

    // f where it keeps what lies outside X at zero, or everything is inside.
    template <class ChunkFunction> struct Everywhere {
        ChunkFunction chunk;
        CONVPOOL_DEVICE explicit Everywhere(const ChunkFunction &function) : chunk(function) {}
        CONVPOOL_DEVICE uint4 operator()(const uint4 &pixel, int, int) const { return chunk(pixel); }
    };

    // ---- box means ----

    CONVPOOL_DEVICE static void store_mean(uint32_t dst, const float (&a)[kPerChunk], const float (&b)[kPerChunk]) {
        float v[kPerChunk];
#pragma unroll
        for (int i = 0; i < kPerChunk; ++i) v[i] = (a[i] + b[i]) * 0.25f;
        store_shared(dst, pack_chunk<kPrecision>(v));
    }
    // Of two neighbouring pixels.
    CONVPOOL_DEVICE static void sum_pair(float (&h)[kPerChunk], const uint4 &left, const uint4 &right) {
        float a[kPerChunk], b[kPerChunk];
        unpack_chunk<kPrecision>(left, a);
        unpack_chunk<kPrecision>(right, b);
#pragma unroll
        for (int i = 0; i < kPerChunk; ++i) h[i] = a[i] + b[i];
    }

    // Position, in bytes, of box mean (row, 2 * pair + odd) among the planes of 9 x 9, 9 x 8, 8 x 9 and 8 x 8.
    CONVPOOL_DEVICE static uint32_t mean_position(int row, int pair, int odd) {
        const int plane = row & 1 ? (odd ? 225 : 153) : (odd ? 81 : 0);
        return (plane + (row >> 1) * (odd ? 8 : 9) + pair) * 16;
    }

    // Pixels of one row that two box means in a row see.
    struct RawRow {
        uint4 even, odd, next;
    };
    CONVPOOL_DEVICE static RawRow load_row(uint32_t src) {
        return {load_shared(src), load_shared(src + kHalfBytes), load_shared(src + 64)};
    }
    template <class Function> CONVPOOL_DEVICE static RawRow apply(const Function &f, const RawRow &raw, int row, int pair) {
        return {f(raw.even, row, 2 * pair), f(raw.odd, row, 2 * pair + 1), f(raw.next, row, 2 * pair + 2)};
    }
    // Two by two pixels.
    template <class Function>
    CONVPOOL_DEVICE static void form_mean(const Function &f, uint32_t src, uint32_t dst, int row, int column) {
        const uint4 a = load_shared(src), b = load_shared(src + kHalfBytes);
        const uint4 c = load_shared(src + kColumns * 64), d = load_shared(src + kColumns * 64 + kHalfBytes);
        float upper[kPerChunk], lower[kPerChunk];
        sum_pair(upper, f(a, row, column), f(b, row, column + 1));
        sum_pair(lower, f(c, row + 1, column), f(d, row + 1, column + 1));
        store_mean(dst, upper, lower);
    }

    // Of one row of pixels, the pairs under two box means in a row.
    struct PairSums {
        float even[kPerChunk], odd[kPerChunk];
    };
    CONVPOOL_DEVICE static PairSums sum_pairs(const RawRow &row) {
        PairSums sums;
        sum_pair(sums.even, row.even, row.odd);
        sum_pair(sums.odd, row.odd, row.next);
        return sums;
    }
    // a / 4 + quarter, rounded once.
    CONVPOOL_DEVICE static void store_mean_with(uint32_t dst, const float (&a)[kPerChunk], const float (&quarter)[kPerChunk]) {
        float v[kPerChunk];
#pragma unroll
        for (int i = 0; i < kPerChunk; ++i) v[i] = fmaf(a[i], 0.25f, quarter[i]);
        store_shared(dst, pack_chunk<kPrecision>(v));
    }

    // Rows `first` to `end` of a subtile's 17 x 17 box means: a lane walks down two columns of one chunk, with the pixels of
    // the next row on their way, two rows at a time, which share the pixels between them; the last column is left over, and a
    // lane forms a box mean of it.
    template <class Function>
    CONVPOOL_DEVICE void form_means_3x3(const Function &f, uint32_t raw, uint32_t means, int first, int end) const {
        const int chunk = lane & 3, pair = lane >> 2;
        const uint32_t dst = means + chunk * kPlane;
        uint32_t src = raw + (first * kColumns + pair) * 64 + chunk * 16;
        RawRow ahead = load_row(src);
        auto next_sums = [&](int y, bool more) {
            const RawRow row = apply(f, ahead, y, pair);
            src += kColumns * 64;
            if (more) ahead = load_row(src);
            return sum_pairs(row);
        };
        PairSums above = next_sums(first, true);
        int y = first;
#pragma unroll 2
        for (; y + 1 < end; y += 2) {
            PairSums between = next_sums(y + 1, true);
            const PairSums below = next_sums(y + 2, y + 2 < end);
#pragma unroll
            for (int i = 0; i < kPerChunk; ++i) {
                between.even[i] *= 0.25f;
                between.odd[i] *= 0.25f;
            }
            store_mean_with(dst + mean_position(y, pair, 0), above.even, between.even);
            store_mean_with(dst + mean_position(y, pair, 1), above.odd, between.odd);
            store_mean_with(dst + mean_position(y + 1, pair, 0), below.even, between.even);
            store_mean_with(dst + mean_position(y + 1, pair, 1), below.odd, between.odd);
            above = below;
        }
        if (y < end) {
            const PairSums below = next_sums(y + 1, false);
            store_mean(dst + mean_position(y, pair, 0), above.even, below.even);
            store_mean(dst + mean_position(y, pair, 1), above.odd, below.odd);
        }
        for (int i = lane; i < (end - first) * kChunks; i += 32) {
            const int y = first + (i >> 2);
            form_mean(f, raw + (y * kColumns + 8) * 64 + chunk * 16, dst + mean_position(y, 8, 0), y, 16);
        }
    }

    // Rows `first` to `end` of 8 x 8 box means.
    template <class Function>
    CONVPOOL_DEVICE void form_means_1x1(const Function &f, uint32_t raw, uint32_t means, int first, int end) const {
        const int chunk = lane & 3, column = lane >> 2;
#pragma unroll 2
        for (int y = first; y < end; ++y) {
            form_mean(f, raw + (2 * y * kColumns + column) * 64 + chunk * 16, means + chunk * kPlane + (y * 8 + column) * 16,
                      2 * y, 2 * column);
        }
    }

    // The loops are bound by instructions, so each kind of prologue has its own.
    CONVPOOL_DEVICE void form_subtile(const PixelFunction &f, uint32_t raw, uint32_t means, int first, int end) const {
        auto form = [&](const auto &function) {
            if constexpr (kKernel == 3) form_means_3x3(function, raw, means, first, end);
            else form_means_1x1(function, raw, means, first, end);
        };
        if constexpr (kPrologue) {
            const Prologue &e = p.prologue;
            constexpr float kLeast = 0x1p-24f;  // less is zero in fp16, and NaN times infinity
            if (e.scale == nullptr && e.activation == Activation::kRelu) form(Everywhere{PackedActivation<kPrecision, false>(e)});
            else if (e.scale == nullptr && e.activation == Activation::kLeakyRelu && e.alpha <= 1.f && fabsf(e.alpha) >= kLeast)
                form(Everywhere{PackedActivation<kPrecision, true>(e)});
            else if (!f.border) form(Everywhere{f.chunk});
            else form(f);
        } else {
            form(f);
        }
    }

    CONVPOOL_DEVICE void form_means(int mean_warp) const {
        // The subtiles' rows, one after the other, in equal parts.
        constexpr int kMeanRows = kKernel == 3 ? 17 : 8, kGroups = Config::kMeanGroups, kSliceWarps = Config::kSliceWarps;
        const int member = kGroups == 1 ? mean_warp : (mean_warp - 1) % kSliceWarps;
        const int begin = kSubtiles * kMeanRows * member / kSliceWarps, end = kSubtiles * kMeanRows * (member + 1) / kSliceWarps;
        Ring<kRawStages> raw;
        Ring<kMeanStages> means;
        const bool copies = mean_warp == 0 && lane == 0;
        RawCopies ahead(*this);
        if (kGroups > 1 && mean_warp == 0) {
            while (copies && ahead.index < p.tiles) ahead.next();
            return;
        }
        int others = kGroups == 1 ? 0 : (mean_warp - 1) / kSliceWarps;  // slices left until this group's next
        PixelFunction f(p);
        if (copies)
            for (int i = 0; i + 1 < kRawStages; ++i) ahead.next();
        for (int index = blockIdx.x; index < p.tiles; index += gridDim.x) {
            if constexpr (kPrologue) f.start_tile(*this, index);
#pragma unroll 1
            for (int slice = 0; slice < p.slices; ++slice) {
                if (kGroups > 1 && others > 0) {
                    --others;
                    raw.next();
                    means.next();
                    continue;
                }
                others = kGroups - 1;
                // Before the waits below, which cover its latency.
                if constexpr (kPrologue) f.start_slice(slice, lane);
                if (copies) ahead.next();
                __syncwarp();
                barrier_wait(means_empty(means.buffer), means.parity ^ 1);
                barrier_wait(raw_full(raw.buffer), raw.parity);
#pragma unroll 1
                for (int s = 0; s < kSubtiles; ++s) {
                    const int from = max(begin - s * kMeanRows, 0), to = min(end - s * kMeanRows, kMeanRows);
                    if (from >= to) continue;
                    if constexpr (kPrologue) f.start_subtile(s);
                    form_subtile(f, raw_at(raw.buffer, s), means_at(means.buffer, s), from, to);
                }
                publish_shared();
                __syncwarp();
                if (lane == 0) {
                    barrier_arrive(means_full(means.buffer));
                    barrier_arrive(raw_empty(raw.buffer));
                }
                raw.next();
                means.next();
            }
        }
    }

    // ---- products ----

    CONVPOOL_DEVICE void multiply(int group) const {
        const int subtile = kSubtiles == 1 ? 0 : group;
        const int first_column = kSubtiles == 1 ? group * Config::kConsumerN : 0;
        const bool elected = (threadIdx.x & 127) == 32;
        Ring<kStages> weights;
        Ring<kMeanStages> means;
        for (int index = blockIdx.x; index < p.tiles; index += gridDim.x) {
            float acc[Config::kFragments][4];
#pragma unroll
            for (int f = 0; f < Config::kFragments; ++f)
#pragma unroll
                for (int i = 0; i < 4; ++i) acc[f][i] = 0.f;
            const Tile tile = tile_at(index);
            if (p.epilogue.residual != nullptr) prefetch_residual(tile.subtile + subtile, tile.channel + first_column);
            if (p.resident) weights = {};
            int held_weights = -1, held_means = -1;  // buffers that products still under way read
#pragma unroll 1
            for (int slice = 0; slice < p.slices; ++slice) {
                barrier_wait(means_full(means.buffer), means.parity);
                // Planes of 9 and of 8 columns.
                const uint32_t a0 = means_at(means.buffer, subtile);
                const uint64_t a9 = at_address(matrix_descriptor(kPlane, 9 * 16, kNoSwizzle), a0);
                const uint64_t a8 = at_address(matrix_descriptor(kPlane, 8 * 16, kNoSwizzle), a0);
#pragma unroll
                for (int first_tap = 0; first_tap < kTaps; first_tap += kStageTaps) {
                    barrier_wait(weights_full(weights.buffer), weights.parity);
                    const uint64_t b0 =
                        at_address(matrix_descriptor(16, 8 * 64, kSwizzle64), weights_at(weights.buffer) + first_column * 64);
                    wgmma_begin();
#pragma unroll
                    for (int tap = first_tap; tap < first_tap + kStageTaps; ++tap) {
                        const int row = tap / kKernel, column = tap % kKernel;
                        const int pitch = kKernel == 1 || column % 2 ? 8 : 9;
                        const int plane = kKernel == 1 ? 0 : row % 2 ? (column % 2 ? 225 : 153) : (column % 2 ? 81 : 0);
                        const int position = (plane + row / 2 * pitch + column / 2) * 16;
#pragma unroll
                        for (int k = 0; k < kChunks / 2; ++k)
                            wgmma<kPrecision>(acc, moved(pitch == 9 ? a9 : a8, position + k * 2 * kPlane),
                                              moved(b0, (tap - first_tap) * Config::kBlockN * 64 + k * 32));
                    }
                    wgmma_commit();
                    wgmma_wait<1>();
                    if (held_weights >= 0 && elected) barrier_arrive(weights_empty(held_weights));
                    if (first_tap == 0 && held_means >= 0 && elected) barrier_arrive(means_empty(held_means));
                    held_weights = weights.buffer;
                    weights.next();
                }
                held_means = means.buffer;
                means.next();
            }
            finish(acc, tile.subtile + subtile, tile.channel + first_column, [&] {
                wgmma_wait<0>();
                if (elected) {
                    barrier_arrive(weights_empty(held_weights));
                    barrier_arrive(means_empty(held_means));
                }
            });
        }
    }

    // An output pixel of a subtile: where its channels are in Y.
    CONVPOOL_DEVICE OutputPixel pixel_of(int subtile, int pixel) const {
        const Corner corner = corner_of(subtile);
        const int y = corner.y + pixel / 8, x = corner.x + pixel % 8;
        return {((static_cast<int64_t>(corner.image) * p.out_h + y) * p.out_w + x) * p.m,
                corner.image < p.images && y < p.out_h && x < p.out_w};
    }

    // ---- bias, residual, activation, Y, from registers ----

    // A lane's values of some fragments, as they lie in memory; in 16 bits four fragments hold 32 channels of a pixel.
    static constexpr int kAcross = kPerChunk == 4 ? 2 : 4;
    using Pair = std::conditional_t<kPerChunk == 4, float2, uint32_t>;
    using PixelPairs = Pair[2][kAcross];
    static_assert(Config::kFragments % kAcross == 0, "whole groups of fragments");

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

    CONVPOOL_DEVICE void prefetch_residual(int subtile, int first_channel) const {
        const Element *residual = static_cast<const Element *>(p.epilogue.residual) + first_channel;
        constexpr int kLine = 128 / sizeof(Element);
        const int columns = min(p.m - first_channel, Config::kConsumerN);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const OutputPixel pixel = pixel_of(subtile, warp % 4 * 16 + half * 8 + (lane >> 2));
            for (int column = (lane & 3) * kLine; column < columns && pixel.valid; column += 4 * kLine)
                prefetch_line(residual + pixel.base + column);
        }
    }

    // wait() is for the accumulators. With a residual, some fragments at a time while the next ones' is on its way; without,
    // one step for all fragments after the other: code that is skipped costs time too, as it is not in the instruction cache.
    template <class Wait>
    CONVPOOL_DEVICE void finish(float (&acc)[Config::kFragments][4], int subtile, int first_channel, Wait wait) const {
        const int t = lane & 3, first_row = warp % 4 * 16 + (lane >> 2);
        const OutputPixel pixel[2] = {pixel_of(subtile, first_row), pixel_of(subtile, first_row + 8)};
        const int columns = p.m - first_channel;  // valid ones; a whole number of chunks
        const Epilogue &e = p.epilogue;
        const Element *bias = static_cast<const Element *>(e.bias), *residual = static_cast<const Element *>(e.residual);
        Element *out = static_cast<Element *>(p.y) + first_channel;
        auto add_bias = [&](int f) {
            const int column = f * 8 + 2 * t;
            if (column < columns) {
                const Pair pair = *reinterpret_cast<const Pair *>(bias + first_channel + column);
                add(acc[f], 0, pair);
                add(acc[f], 1, pair);
            }
        };
        auto store = [&](int f) {
#pragma unroll
            for (int half = 0; half < 2; ++half)
                if constexpr (kPerChunk == 4) {
#pragma unroll
                    for (int i = 0; i < kAcross; ++i)
                        if ((f + i) * 8 + 2 * t < columns && pixel[half].valid)
                            *reinterpret_cast<float2 *>(out + pixel[half].base + (f + i) * 8 + 2 * t) =
                                make_float2(acc[f + i][2 * half], acc[f + i][2 * half + 1]);
                } else {
                    uint32_t v[4];
#pragma unroll
                    for (int i = 0; i < 4; ++i) v[i] = pack2(acc[f + i][2 * half], acc[f + i][2 * half + 1], Element{});
                    const uint4 chunk = transpose_quad(v, t);  // lane t has fragment t
                    if ((f + t) * 8 < columns && pixel[half].valid)
                        *reinterpret_cast<uint4 *>(out + pixel[half].base + (f + t) * 8) = chunk;
                }
        };
        if (residual == nullptr) {
            wait();
            if (bias != nullptr) {
#pragma unroll
                for (int f = 0; f < Config::kFragments; ++f) add_bias(f);
            }
            if (e.activation != Activation::kNone) clip_or_rectify(reinterpret_cast<float (&)[Config::kFragments * 4]>(acc), e);
#pragma unroll
            for (int f = 0; f < Config::kFragments; f += kAcross) store(f);
            return;
        }
        auto load = [&](PixelPairs &pairs, int f) {
#pragma unroll
            for (int half = 0; half < 2; ++half)
                if constexpr (kPerChunk == 4) {
#pragma unroll
                    for (int i = 0; i < kAcross; ++i) {
                        const int column = (f + i) * 8 + 2 * t;
                        if (column < columns && pixel[half].valid)
                            pairs[half][i] =
                                *reinterpret_cast<const Pair *>(residual + pixel[half].base + first_channel + column);
                    }
                } else if ((f + t) * 8 < columns && pixel[half].valid) {  // lane t has fragment t
                    const Element *from = residual + pixel[half].base + first_channel + (f + t) * 8;
                    set_words(pairs[half], *reinterpret_cast<const uint4 *>(from));
                }
        };
        PixelPairs addends = {}, next = {};
        load(addends, 0);
        wait();
#pragma unroll
        for (int f = 0; f < Config::kFragments; f += kAcross) {
            if (f + kAcross < Config::kFragments) load(next, f + kAcross);
            if (bias != nullptr) {
#pragma unroll
                for (int i = 0; i < kAcross; ++i) add_bias(f + i);
            }
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                if constexpr (kPerChunk == 8) set_words(addends[half], transpose_quad(addends[half], t));
#pragma unroll
                for (int i = 0; i < kAcross; ++i) {
                    add(acc[f + i], half, addends[half][i]);
                    addends[half][i] = next[half][i];
                }
            }
            if (e.activation != Activation::kNone) clip_or_rectify(reinterpret_cast<float (&)[kAcross * 4]>(acc[f]), e);
            store(f);
        }
    }

    // Lane t of four gives row t of a 4 x 4 matrix and receives its column t.
    CONVPOOL_DEVICE static uint4 transpose_quad(const uint32_t (&v)[4], int t) {
        uint32_t a[4], b[4];
        const bool odd = t & 1, high = t & 2;
        // Blocks of 1: (t, i) and (t ^ 1, i ^ 1) change places.
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
            const uint32_t other = __shfl_xor_sync(0xffffffffu, odd ? v[i] : v[i + 1], 1);
            a[i] = odd ? other : v[i];
            a[i + 1] = odd ? v[i + 1] : other;
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const uint32_t other = __shfl_xor_sync(0xffffffffu, high ? a[i] : a[i + 2], 2);
            b[i] = high ? other : a[i];
            b[i + 2] = high ? a[i + 2] : other;
        }
        return {b[0], b[1], b[2], b[3]};
    }

    CONVPOOL_DEVICE void run() const {
        if (threadIdx.x == 0) {
            for (int i = 0; i < kStages; ++i) {
                barrier_init(weights_full(i), 1);
                barrier_init(weights_empty(i), 2);
            }
            for (int i = 0; i < kRawStages; ++i) {
                barrier_init(raw_full(i), 1);
                barrier_init(raw_empty(i), Config::kSliceWarps);
            }
            for (int i = 0; i < kMeanStages; ++i) {
                barrier_init(means_full(i), Config::kSliceWarps);
                barrier_init(means_empty(i), 2);
            }
            publish_barriers();
            prefetch_map(&p.w_map);
            prefetch_map(&p.x_map[0]);
            prefetch_map(&p.x_map[1]);
        }
        __syncthreads();
        wait_for_previous_kernel();
        let_next_kernel_start();
        if (warp == 0) {
            if (lane == 0) copy_weights();
        } else if (warp <= Config::kMeanWarps) {
            form_means(warp - 1);
        } else {
            multiply((warp - 1 - Config::kMeanWarps) / 4);
        }
    }
};

#endif

template <class Config, bool kPrologue>
__global__ void __launch_bounds__(Config::kThreads, 1) direct_tma_kernel(const __grid_constant__ DirectTmaParams params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) unsigned char memory[];
    DirectTma<Config, kPrologue>{params, shared_address(memory), static_cast<int>(threadIdx.x >> 5),
                                 static_cast<int>(threadIdx.x & 31)}
        .run();
#endif
}

template <class Config> const void *direct_tma_kernel_of(bool prologue) {
    return prologue ? reinterpret_cast<const void *>(&direct_tma_kernel<Config, true>)
                    : reinterpret_cast<const void *>(&direct_tma_kernel<Config, false>);
}

}  // namespace convpool

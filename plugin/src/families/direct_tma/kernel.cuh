// SPDX-License-Identifier: Apache-2.0
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
// subtiles/subtiles.cuh has the way to Y.
#pragma once

#include <type_traits>

#include "families/direct_tma/rows.h"
#include "kernels/prologue/prologue.cuh"
#include "kernels/ptx/device.cuh"
#include "kernels/ptx/tma.cuh"
#include "kernels/ptx/wgmma.cuh"
#include "kernels/tile/chunk.cuh"
#include "subtiles/subtiles.cuh"

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
    static constexpr int kConsumerN = kSubtiles == 1 ? kBlockN / 2 : kBlockN;  // channels of a warpgroup
    static constexpr int kFragments = kConsumerN / 8;
    static constexpr DirectTmaShared kShared =
        direct_tma_shared(kSubtiles, kBlockN, kKernel, kStageTaps, kStages, kRawStages, kMeanStages);

    static_assert(kKernel == 1 || kKernel == 3, "the planes of box means are laid out for these");
    static_assert(kMeanWarps % 4 == 3, "whole warpgroups, with the warp that copies");
    static_assert(kMeanGroups == 1 || kMeanGroups * kSliceWarps + 1 == kMeanWarps, "equal groups, and the warp that copies");
    static_assert(kMeanGroups <= kMeanStages, "a group that skips slices sees every phase of a buffer it waits for");
    static_assert(kMeanGroups == 1 || kMeanStages <= kRawStages, "and of raw pixels, as it waits for a buffer of means");
    static_assert(kSubtiles <= 2 && kRawStages >= 2, "a warpgroup has a subtile, or half of its channels; copies run ahead");
    static_assert(kTaps % kStageTaps == 0, "whole stages of weights in a slice");
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// Shared memory: kStages of weights, kRawStages of pixels of X, kMeanStages of box means, then a full and an empty barrier for
// each of these buffers (DirectTmaShared has the offsets).
template <class Config_> struct DirectTmaBlock : SubtileGrid<Config_::kSubtiles, Config_::kBlockN> {
    using Config = Config_;
    static constexpr int kSubtiles = Config::kSubtiles, kStages = Config::kStages, kRawStages = Config::kRawStages,
                         kMeanStages = Config::kMeanStages, kChunks = Config::kChunks, kPerChunk = Config::kPerChunk;
    static constexpr DirectTmaShared kShared = Config::kShared;
    static constexpr int kPlane = kShared.plane * 16;                               // bytes from chunk to chunk
    static constexpr int kColumns = kShared.raw_columns, kRows = kShared.raw_rows;  // of pixels of X, of one parity
    static constexpr int kPool = 2, kPlaneBytes = kColumns * kRows * 64;            // pixels of one parity of a subtile
    static constexpr int kRawBytes = kPool * kPlaneBytes;
    static constexpr int kCopySubtiles = kSubtiles;  // whose pixels a thread copies

    const uint32_t shared;
    const int warp, lane;

    CONVPOOL_DEVICE uint32_t barrier(int index) const { return shared + kShared.barrier_offset + index * 8; }
    CONVPOOL_DEVICE uint32_t weights_full(int i) const { return barrier(i); }
    CONVPOOL_DEVICE uint32_t weights_empty(int i) const { return barrier(kStages + i); }
    CONVPOOL_DEVICE uint32_t raw_full(int i, int = 0) const { return barrier(2 * kStages + i); }
    CONVPOOL_DEVICE uint32_t raw_empty(int i, int = 0) const { return barrier(2 * kStages + kRawStages + i); }
    CONVPOOL_DEVICE uint32_t means_full(int i) const { return barrier(2 * (kStages + kRawStages) + i); }
    CONVPOOL_DEVICE uint32_t means_empty(int i) const { return barrier(2 * (kStages + kRawStages) + kMeanStages + i); }
    CONVPOOL_DEVICE uint32_t weights_at(int i) const { return shared + i * kShared.weight_stage; }
    CONVPOOL_DEVICE uint32_t raw_at(int i, int subtile) const {
        return shared + kShared.raw_offset + (i * kSubtiles + subtile) * kRawBytes;
    }
    CONVPOOL_DEVICE uint32_t means_at(int i, int subtile) const {
        return shared + kShared.mean_offset + (i * kSubtiles + subtile) * kChunks * kPlane;
    }
};

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
        UNROLLED_FOR (int s = 0; s < kSubtiles; ++s) {
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

// direct_tma: the warps that form box means of 2x2 pixels, from rings of raw pixels to rings of means.
//
// Raw pixels of a subtile lie as two parts, columns 0, 2, .. and columns 1, 3, .. of its window of X; each part is [row][column]
// of 64 bytes, four chunks. Box mean (y, x) is the mean of pixels (y, x), (y, x + 1), (y + 1, x), (y + 1, x + 1).

template <class Config, bool kPrologue> struct DirectTmaMeans {
    using Block = DirectTmaBlock<Config>;
    using PixelFunction = std::conditional_t<kPrologue, DirectTmaPrologue<Config>, NoPrologue>;
    static constexpr Precision kPrecision = Config::kPrecision;
    static constexpr int kSubtiles = Config::kSubtiles, kChunks = Config::kChunks, kPerChunk = Config::kPerChunk;
    static constexpr int kColumns = Block::kColumns, kHalfBytes = Block::kPlaneBytes, kPlane = Block::kPlane;

    const Block &block;

    // ---- sums of pixels, in fp32 ----

    // h = left + right: two neighbouring pixels of a row.
    CONVPOOL_DEVICE static void sum_pair(float (&h)[kPerChunk], const uint4 &left, const uint4 &right) {
        float a[kPerChunk], b[kPerChunk];
        unpack_chunk<kPrecision>(left, a);
        unpack_chunk<kPrecision>(right, b);
        UNROLLED_FOR (int i = 0; i < kPerChunk; ++i) h[i] = a[i] + b[i];
    }
    // (a + b) / 4, rounded once.
    CONVPOOL_DEVICE static void store_mean(uint32_t dst, const float (&a)[kPerChunk], const float (&b)[kPerChunk]) {
        float v[kPerChunk];
        UNROLLED_FOR (int i = 0; i < kPerChunk; ++i) v[i] = (a[i] + b[i]) * 0.25f;
        store_shared(dst, pack_chunk<kPrecision>(v));
    }
    // a / 4 + quarter, rounded once.
    CONVPOOL_DEVICE static void store_mean_with(uint32_t dst, const float (&a)[kPerChunk], const float (&quarter)[kPerChunk]) {
        float v[kPerChunk];
        UNROLLED_FOR (int i = 0; i < kPerChunk; ++i) v[i] = fmaf(a[i], 0.25f, quarter[i]);
        store_shared(dst, pack_chunk<kPrecision>(v));
    }

    // Position, in bytes, of box mean (row, 2 * pair + odd) among the planes of 9 x 9, 9 x 8, 8 x 9 and 8 x 8.
    CONVPOOL_DEVICE static uint32_t mean_position(int row, int pair, int odd) {
        const int plane = row & 1 ? (odd ? 225 : 153) : (odd ? 81 : 0);
        return (plane + (row >> 1) * (odd ? 8 : 9) + pair) * 16;
    }

    // Pixels of one row that two neighbouring box means see.
    struct RawRow {
        uint4 even, odd, next;
    };
    CONVPOOL_DEVICE static RawRow load_row(uint32_t src) {
        return {load_shared(src), load_shared(src + kHalfBytes), load_shared(src + 64)};
    }
    template <class Function> CONVPOOL_DEVICE static RawRow apply(const Function &f, const RawRow &raw, int row, int pair) {
        return {f(raw.even, row, 2 * pair), f(raw.odd, row, 2 * pair + 1), f(raw.next, row, 2 * pair + 2)};
    }

    // One row's share of two neighbouring box means.
    struct PairSums {
        float even[kPerChunk], odd[kPerChunk];
    };
    CONVPOOL_DEVICE static PairSums sum_pairs(const RawRow &row) {
        PairSums sums;
        sum_pair(sums.even, row.even, row.odd);
        sum_pair(sums.odd, row.odd, row.next);
        return sums;
    }

    // One box mean, of two by two pixels at (row, column).
    template <class Function>
    CONVPOOL_DEVICE static void form_mean(const Function &f, uint32_t src, uint32_t dst, int row, int column) {
        const uint4 a = load_shared(src), b = load_shared(src + kHalfBytes);
        const uint4 c = load_shared(src + kColumns * 64), d = load_shared(src + kColumns * 64 + kHalfBytes);
        float upper[kPerChunk], lower[kPerChunk];
        sum_pair(upper, f(a, row, column), f(b, row, column + 1));
        sum_pair(lower, f(c, row + 1, column), f(d, row + 1, column + 1));
        store_mean(dst, upper, lower);
    }

    // ---- a subtile's means ----

    // Rows `first` to `end` of a subtile's 17 x 17 box means: a lane walks down two columns of one chunk, with the pixels of
    // the next row on their way, two rows at a time, which share the pixels between them; the last column is left over, and a
    // lane forms a box mean of it.
    template <class Function>
    CONVPOOL_DEVICE void form_means_3x3(const Function &f, uint32_t raw, uint32_t means, int first, int end) const {
        const int chunk = block.lane & 3, pair = block.lane >> 2;
        const uint32_t dst = means + chunk * kPlane;
        uint32_t src = raw + (first * kColumns + pair) * 64 + chunk * 16;
        RawRow ahead = load_row(src);  // the row to add up next
        auto next_sums = [&](int y, bool more) {
            const RawRow row = apply(f, ahead, y, pair);
            src += kColumns * 64;
            if (more) ahead = load_row(src);
            return sum_pairs(row);
        };
        // Means y and y + 1 from pixel rows y (above), y + 1 (between, a quarter of which serves both) and y + 2 (below).
        PairSums above = next_sums(first, true);
        int y = first;
#pragma unroll 2
        for (; y + 1 < end; y += 2) {
            PairSums between = next_sums(y + 1, true);
            const PairSums below = next_sums(y + 2, y + 2 < end);
            UNROLLED_FOR (int i = 0; i < kPerChunk; ++i) {
                between.even[i] *= 0.25f;
                between.odd[i] *= 0.25f;
            }
            store_mean_with(dst + mean_position(y, pair, 0), above.even, between.even);
            store_mean_with(dst + mean_position(y, pair, 1), above.odd, between.odd);
            store_mean_with(dst + mean_position(y + 1, pair, 0), below.even, between.even);
            store_mean_with(dst + mean_position(y + 1, pair, 1), below.odd, between.odd);
            above = below;
        }
        if (y < end) {  // an odd number of rows: the last one by itself
            const PairSums below = next_sums(y + 1, false);
            store_mean(dst + mean_position(y, pair, 0), above.even, below.even);
            store_mean(dst + mean_position(y, pair, 1), above.odd, below.odd);
        }
        // Column 16, the last: a lane forms one mean of it, lanes of a chunk down the rows.
        for (int i = block.lane; i < (end - first) * kChunks; i += 32) {
            const int y = first + (i >> 2);
            form_mean(f, raw + (y * kColumns + 8) * 64 + chunk * 16, dst + mean_position(y, 8, 0), y, 16);
        }
    }

    // Rows `first` to `end` of a subtile's 8 x 8 box means, which lie two pixels apart.
    template <class Function>
    CONVPOOL_DEVICE void form_means_1x1(const Function &f, uint32_t raw, uint32_t means, int first, int end) const {
        const int chunk = block.lane & 3, column = block.lane >> 2;
#pragma unroll 2
        for (int y = first; y < end; ++y) {
            form_mean(f, raw + (2 * y * kColumns + column) * 64 + chunk * 16, means + chunk * kPlane + (y * 8 + column) * 16,
                      2 * y, 2 * column);
        }
    }

    // The loops are bound by instructions, so each kind of prologue has its own.
    CONVPOOL_DEVICE void form_subtile(const PixelFunction &f, uint32_t raw, uint32_t means, int first, int end) const {
        auto form = [&](const auto &function) {
            if constexpr (Config::kKernel == 3) form_means_3x3(function, raw, means, first, end);
            else form_means_1x1(function, raw, means, first, end);
        };
        if constexpr (kPrologue) {
            const Prologue &e = block.p.prologue;
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

    // ---- all slices of all tiles ----

    // The subtiles' rows, one after the other, are cut into equal parts, one for each warp that shares a slice. With one group
    // all warps share every slice; with several, each group takes slices in turn, and warp 0 does nothing but copy.
    CONVPOOL_DEVICE void run(int mean_warp) const {
        const SubtileParams &p = block.p;
        constexpr int kMeanRows = Config::kKernel == 3 ? 17 : 8, kGroups = Config::kMeanGroups, kSliceWarps = Config::kSliceWarps;
        const int member = kGroups == 1 ? mean_warp : (mean_warp - 1) % kSliceWarps;
        const int begin = kSubtiles * kMeanRows * member / kSliceWarps, end = kSubtiles * kMeanRows * (member + 1) / kSliceWarps;
        Ring<Config::kRawStages> raw;
        Ring<Config::kMeanStages> means;
        const bool copies = mean_warp == 0 && block.lane == 0;
        RawCopies<Block> ahead(block);
        if (kGroups > 1 && mean_warp == 0) {
            while (copies && ahead.index < p.tiles) ahead.next();
            return;
        }
        int others = kGroups == 1 ? 0 : (mean_warp - 1) / kSliceWarps;  // slices left until this group's next
        PixelFunction f(p);
        // Fill the ring of raw pixels but for one buffer, which next() below fills before the first wait.
        if (copies)
            for (int i = 0; i + 1 < Config::kRawStages; ++i) ahead.next();
        for (int index = blockIdx.x; index < p.tiles; index += gridDim.x) {
            if constexpr (kPrologue) f.start_tile(block, index);
#pragma unroll 1
            for (int slice = 0; slice < p.slices; ++slice) {
                // A slice of another group: its buffers pass by.
                if (kGroups > 1 && others > 0) {
                    --others;
                    raw.next();
                    means.next();
                    continue;
                }
                others = kGroups - 1;
                // Before the waits below, which cover its latency.
                if constexpr (kPrologue) f.start_slice(slice, block.lane);
                if (copies) ahead.next();
                __syncwarp();
                barrier_wait(block.means_empty(means.buffer), means.parity ^ 1);
                barrier_wait(block.raw_full(raw.buffer), raw.parity);
#pragma unroll 1
                for (int s = 0; s < kSubtiles; ++s) {
                    const int from = max(begin - s * kMeanRows, 0), to = min(end - s * kMeanRows, kMeanRows);
                    if (from >= to) continue;
                    if constexpr (kPrologue) f.start_subtile(s);
                    form_subtile(f, block.raw_at(raw.buffer, s), block.means_at(means.buffer, s), from, to);
                }
                // Hazard: the tensor cores read the means by the asynchronous proxy, so the fence comes before the arrival.
                publish_shared();
                __syncwarp();
                if (block.lane == 0) {
                    barrier_arrive(block.means_full(means.buffer));
                    barrier_arrive(block.raw_empty(raw.buffer));
                }
                raw.next();
                means.next();
            }
        }
    }
};

// The warpgroups that multiply box means by weights, from their rings to Y.
template <class Config> struct DirectTmaProducts {
    using Block = DirectTmaBlock<Config>;
    static constexpr int kKernel = Config::kKernel, kTaps = Config::kTaps, kStageTaps = Config::kStageTaps,
                         kChunks = Config::kChunks, kPlane = Block::kPlane;

    const Block &block;

    // A tap (a, b) reads box means (2 y + a, 2 x + b) of the subtile, which are plane (a % 2, b % 2) shifted by (a / 2, b / 2).

    // acc[64 pixels][channels] += means[64][slice] weights[channels][slice]^T for kStageTaps taps from first_tap on. a9, a8:
    // descriptors of the slice's means in planes of 9 and of 8 columns; b0: of the stage's weights.
    CONVPOOL_DEVICE static void multiply_taps(float (&acc)[Config::kFragments][4], int first_tap, uint64_t a9, uint64_t a8,
                                              uint64_t b0) {
        UNROLLED_FOR (int tap = first_tap; tap < first_tap + kStageTaps; ++tap) {
            const int row = tap / kKernel, column = tap % kKernel;
            const int pitch = kKernel == 1 || column % 2 ? 8 : 9;
            const int plane = kKernel == 1 ? 0 : row % 2 ? (column % 2 ? 225 : 153) : (column % 2 ? 81 : 0);
            const int position = (plane + row / 2 * pitch + column / 2) * 16;
            UNROLLED_FOR (int k = 0; k < kChunks / 2; ++k)
                wgmma<Config::kPrecision>(acc, moved(pitch == 9 ? a9 : a8, position + k * 2 * kPlane),
                                          moved(b0, (tap - first_tap) * Config::kBlockN * 64 + k * 32));
        }
    }

    // group: which of the two warpgroups. Each has a subtile, or, where a block has one subtile, half of its channels.
    CONVPOOL_DEVICE void run(int group) const {
        const SubtileParams &p = block.p;
        const int subtile = Config::kSubtiles == 1 ? 0 : group;
        const int first_column = Config::kSubtiles == 1 ? group * Config::kConsumerN : 0;
        const bool elected = (threadIdx.x & 127) == 32;
        Ring<Config::kStages> weights;
        Ring<Config::kMeanStages> means;
        for (int index = blockIdx.x; index < p.tiles; index += gridDim.x) {
            float acc[Config::kFragments]
                     [4];  // (8 channels a fragment, 4 of 64 pixels x 8 channels): `Finish` in subtiles.cuh has the map
            UNROLLED_FOR (int f = 0; f < Config::kFragments; ++f)
                UNROLLED_FOR (int i = 0; i < 4; ++i) acc[f][i] = 0.f;
            const typename Block::Tile tile = block.tile_at(index);
            if (p.epilogue.residual != nullptr) prefetch_residual(block, tile.subtile + subtile, tile.channel + first_column);
            if (p.resident) weights = {};
            // Multiply, slice after slice, kStageTaps taps a group of products.
            // Hazard: a buffer is handed back only when the products that read it are done, one stage later.
            int held_weights = -1, held_means = -1;  // buffers that products still under way read
#pragma unroll 1
            for (int slice = 0; slice < p.slices; ++slice) {
                barrier_wait(block.means_full(means.buffer), means.parity);
                const uint32_t a0 = block.means_at(means.buffer, subtile);
                const uint64_t a9 = at_address(matrix_descriptor(kPlane, 9 * 16, kNoSwizzle), a0);
                const uint64_t a8 = at_address(matrix_descriptor(kPlane, 8 * 16, kNoSwizzle), a0);
                UNROLLED_FOR (int first_tap = 0; first_tap < kTaps; first_tap += kStageTaps) {
                    barrier_wait(block.weights_full(weights.buffer), weights.parity);
                    const uint64_t b0 = at_address(matrix_descriptor(16, 8 * 64, kSwizzle64),
                                                   block.weights_at(weights.buffer) + first_column * 64);
                    wgmma_begin();
                    multiply_taps(acc, first_tap, a9, a8, b0);
                    wgmma_commit();
                    wgmma_wait<1>();  // the stage before is done
                    if (held_weights >= 0 && elected) barrier_arrive(block.weights_empty(held_weights));
                    if (first_tap == 0 && held_means >= 0 && elected) barrier_arrive(block.means_empty(held_means));
                    held_weights = weights.buffer;
                    weights.next();
                }
                held_means = means.buffer;
                means.next();
            }
            // Y. The last buffers are handed back as soon as their products are done.
            finish(block, acc, tile.subtile + subtile, tile.channel + first_column, [&] {
                wgmma_wait<0>();
                if (elected) {
                    barrier_arrive(block.weights_empty(held_weights));
                    barrier_arrive(block.means_empty(held_means));
                }
            });
        }
    }
};

// One thread: barriers with the number of their arrivals, and the maps on their way to the cache.
template <class Config> CONVPOOL_DEVICE void prepare(const DirectTmaBlock<Config> &block) {
    constexpr int kWarpgroups = 2;
    for (int i = 0; i < Config::kStages; ++i) {
        barrier_init(block.weights_full(i), 1);
        barrier_init(block.weights_empty(i), kWarpgroups);
    }
    for (int i = 0; i < Config::kRawStages; ++i) {
        barrier_init(block.raw_full(i), 1);
        barrier_init(block.raw_empty(i), Config::kSliceWarps);
    }
    for (int i = 0; i < Config::kMeanStages; ++i) {
        barrier_init(block.means_full(i), Config::kSliceWarps);
        barrier_init(block.means_empty(i), kWarpgroups);
    }
    publish_barriers();
    prefetch_map(&block.p.w_map);
    prefetch_map(&block.p.x_map[0]);
    prefetch_map(&block.p.x_map[1]);
}

template <class Config, bool kPrologue> CONVPOOL_DEVICE void run(const DirectTmaBlock<Config> &block) {
    if (threadIdx.x == 0) prepare(block);
    __syncthreads();
    if (block.warp != 0 || !block.p.early_weights) wait_for_previous_kernel();
    let_next_kernel_start();
    if (block.warp == 0) {
        if (block.lane == 0) copy_weights(block);
    } else if (block.warp <= Config::kMeanWarps) {
        DirectTmaMeans<Config, kPrologue>{block}.run(block.warp - 1);
    } else {
        DirectTmaProducts<Config>{block}.run((block.warp - 1 - Config::kMeanWarps) / 4);
    }
}

#endif

template <class Config, bool kPrologue>
__global__ void __launch_bounds__(Config::kThreads, 1) direct_tma_kernel(const __grid_constant__ SubtileParams params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) unsigned char memory[];
    run<Config, kPrologue>(DirectTmaBlock<Config>{
        {params}, shared_address(memory), static_cast<int>(threadIdx.x >> 5), static_cast<int>(threadIdx.x & 31)});
#endif
}

namespace direct_tma {

struct Instances {
    template <size_t kRow> static const void *kernel(int prologue) {
        constexpr Tile t = kRows[kRow].tile;
        using Config = DirectTmaConfig<kRows[kRow].precision, t.subtiles, t.block_n, t.kernel, t.stage_taps, t.stages,
                                       t.raw_stages, t.mean_stages, t.mean_warps, t.mean_groups>;
        return prologue ? reinterpret_cast<const void *>(&direct_tma_kernel<Config, true>)
                        : reinterpret_cast<const void *>(&direct_tma_kernel<Config, false>);
    }
};

}  // namespace direct_tma
}  // namespace convpool

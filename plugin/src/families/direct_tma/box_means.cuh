// SPDX-License-Identifier: Apache-2.0
// direct_tma: the warps that form box means of 2x2 pixels, from rings of raw pixels to rings of means.
//
// Raw pixels of a subtile lie as two parts, columns 0, 2, .. and columns 1, 3, .. of its window of X; each part is [row][column]
// of 64 bytes, four chunks. Box mean (y, x) is the mean of pixels (y, x), (y, x + 1), (y + 1, x), (y + 1, x + 1).
#pragma once

#include <type_traits>

#include "families/direct_tma/block.cuh"
#include "families/direct_tma/pixel_function.cuh"
#include "kernels/ptx/wgmma.cuh"
#include "subtiles/copies.cuh"

namespace convpool {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

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
#pragma unroll
        for (int i = 0; i < kPerChunk; ++i) h[i] = a[i] + b[i];
    }
    // (a + b) / 4, rounded once.
    CONVPOOL_DEVICE static void store_mean(uint32_t dst, const float (&a)[kPerChunk], const float (&b)[kPerChunk]) {
        float v[kPerChunk];
#pragma unroll
        for (int i = 0; i < kPerChunk; ++i) v[i] = (a[i] + b[i]) * 0.25f;
        store_shared(dst, pack_chunk<kPrecision>(v));
    }
    // a / 4 + quarter, rounded once.
    CONVPOOL_DEVICE static void store_mean_with(uint32_t dst, const float (&a)[kPerChunk], const float (&quarter)[kPerChunk]) {
        float v[kPerChunk];
#pragma unroll
        for (int i = 0; i < kPerChunk; ++i) v[i] = fmaf(a[i], 0.25f, quarter[i]);
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

#endif

}  // namespace convpool

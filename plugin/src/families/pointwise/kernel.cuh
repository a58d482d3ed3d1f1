// SPDX-License-Identifier: Apache-2.0
// direct_fused on Hopper for 1x1 kernels and 2x2 pooling: a GEMM whose pixels are box means formed on the way in.
//
// A step is 128 bytes of channels. Every thread copies one chunk of the four pixels under a few output pixels into places of
// its own, kAhead steps before it needs them and on into the next tile, so that memory never waits. It applies the prologue
// and stores their mean where wgmma reads it, in the 128-byte swizzle. X is read once for every kBlockN output channels.
//
// Loops that could be unrolled are not: a small layer spends more time on fetching instructions than on running them.
#pragma once

#include "families/pointwise/rows.h"
#include "kernels/epilogue/pushed_sums.cuh"
#include "kernels/epilogue/store_rows.cuh"
#include "kernels/ptx/memory.cuh"
#include "kernels/ptx/wgmma.cuh"
#include "kernels/tile/chunk.cuh"

namespace convpool {

template <class Config, bool kPrologue> struct Pointwise {
    static constexpr Precision kPrecision = Config::kPrecision;
    using Element = typename Traits<kPrecision>::Element;
    static constexpr int kChunks = 8, kPerChunk = Config::kPerChunk, kPerWord = kPerChunk / 4;
    static constexpr PointwiseShared kShared =
        pointwise_shared(Config::kBlockM, Config::kBlockN, Config::kWarps, Config::kWarpN, Config::kStages);
    static constexpr int kStages = Config::kStages, kAhead = kStages - 2, kPixelStages = kStages - 1, kMeanStages = 3;
    static constexpr int kRowsAtOnce = Config::kThreads / kChunks;
    static constexpr int kRows = Config::kBlockM / kRowsAtOnce, kWeightRows = Config::kBlockN / kRowsAtOnce;
    static_assert(Config::kWarpM == 16 && Config::kWarpsM % 4 == 0, "a warp holds 16 rows of a warpgroup's product");
    static_assert(kRowsAtOnce % 8 == 0, "rows that one thread copies have one swizzle");
    static_assert(Config::kBlockM % kRowsAtOnce == 0 && Config::kBlockN % kRowsAtOnce == 0, "whole copies");
    static_assert(kAhead >= 1, "one stage under way, two being multiplied");
    static_assert(Staging<Config>::kBytes <= kShared.pixel_offset - kShared.mean_offset, "accumulators pass through the means");

    // The four pixels under an output pixel: where the first is, and a bit for each that lies in X.
    struct Window {
        const uint4 *first;
        uint32_t inside;
    };

    const PointwiseParams &p;
    const uint32_t shared;
    const int thread = threadIdx.x, chunk = thread % kChunks, thread_row = thread / kChunks, rank = blockIdx.x % p.split;
    const uint32_t place = thread_row * 128 + ((chunk ^ (thread_row & 7)) << 4);
    const int all_steps = (p.chunks + kChunks - 1) / kChunks;
    const int first_step = all_steps * rank / p.split, steps = all_steps * (rank + 1) / p.split - first_step;

    struct Tile {
        int channel, pixel;  // the first of each
    };
    // Goes from the last tile to the first: the L2 holds what the layer before has written last.
    CONVPOOL_DEVICE Tile tile_at(int index) const {
        uint32_t m_tile, pixel_tile;
        p.div_m_tiles.divmod(p.tiles - 1 - index, pixel_tile, m_tile);  // channels first: neighbours share pixels
        return {static_cast<int>(m_tile) * Config::kBlockN, static_cast<int>(pixel_tile) * Config::kBlockM};
    }
    // The window of output pixel `pixel`, counted over all images; past the last nothing is inside.
    CONVPOOL_DEVICE Window window_of(int pixel) const {
        uint32_t n, rest, oy, ox;
        p.div_out_hw.divmod(pixel, n, rest);
        p.div_out_w.divmod(rest, oy, ox);
        const int y = static_cast<int>(oy) * p.stride_h - p.pad_h, x = static_cast<int>(ox) * p.stride_w - p.pad_w;
        uint32_t inside = 0;
        UNROLLED_FOR (int j = 0; j < 4; ++j)
            if (static_cast<uint32_t>(y + (j >> 1) * p.dilation_h) < static_cast<uint32_t>(p.h) &&
                static_cast<uint32_t>(x + (j & 1) * p.dilation_w) < static_cast<uint32_t>(p.w_pixels))
                inside |= 1u << j;
        return {static_cast<const uint4 *>(p.x) + ((static_cast<int64_t>(n) * p.h + y) * p.w_pixels + x) * p.chunks,
                pixel < p.pixels ? inside : 0};
    }

    // Copies of pixels and weights, step after step, tile after tile.
    struct Copies {
        const Pointwise &k;
        int tile, step = 0, pixel_stage = 0, weight_stage = 0, weight_rows;  // weight_rows: valid ones from this thread's on
        Window windows[kRows];
        const uint4 *weights;

        CONVPOOL_DEVICE Copies(const Pointwise &kernel, int first_tile) : k(kernel), tile(first_tile) { locate(); }
        CONVPOOL_DEVICE void locate() {
            if (tile >= k.p.tiles) return;
            const Tile t = k.tile_at(tile);
            UNROLLED_FOR (int i = 0; i < kRows; ++i) windows[i] = k.window_of(t.pixel + k.thread_row + i * kRowsAtOnce);
            weight_rows = k.p.m - t.channel - k.thread_row;
            weights = static_cast<const uint4 *>(k.p.w) + static_cast<int64_t>(t.channel + k.thread_row) * k.p.chunks;
        }
        // Starts the copies of one step and ends their group. Past the last step the group is empty: copy_wait counts groups.
        CONVPOOL_DEVICE void next(int tile_stride) {
            if (tile < k.p.tiles && k.steps > 0) {
                const int c = (k.first_step + step) * kChunks + k.chunk;
                const bool valid = c < k.p.chunks;
                uint32_t dst = k.pixels_at(pixel_stage);
                UNROLLED_FOR (int i = 0; i < kRows; ++i)
                    UNROLLED_FOR (int j = 0; j < 4; ++j) {
                        copy_chunk(dst, windows[i].first + c + (j & 1) * k.p.column + (j >> 1) * k.p.row,
                                   valid && (windows[i].inside >> j & 1));
                        dst += Config::kThreads * 16;
                    }
                dst = k.shared + weight_stage * kShared.weight_stage + k.place;
                const uint4 *src = weights + c;
                UNROLLED_FOR (int i = 0; i < kWeightRows; ++i) {
                    copy_chunk(dst + i * kRowsAtOnce * 128, src, valid && i * kRowsAtOnce < weight_rows);
                    src += static_cast<int64_t>(kRowsAtOnce) * k.p.chunks;
                }
                pixel_stage = pixel_stage + 1 == kPixelStages ? 0 : pixel_stage + 1;
                weight_stage = weight_stage + 1 == kStages ? 0 : weight_stage + 1;
                if (++step == k.steps) {
                    step = 0;
                    tile += tile_stride;
                    locate();
                }
            }
            copy_commit();
        }
    };

    CONVPOOL_DEVICE uint32_t pixels_at(int stage) const {  // this thread's
        return shared + kShared.pixel_offset + stage * kShared.pixel_stage + thread * 16;
    }
    CONVPOOL_DEVICE uint32_t means_at(int stage) const { return shared + kShared.mean_offset + stage * Config::kBlockM * 128; }

    // Word i of a chunk; i is a constant wherever loops are unrolled.
    static CONVPOOL_DEVICE uint32_t word(const uint4 &v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

    // The mean of f of four pixels, a chunk, rounded once. A pixel outside X is zero whatever the prologue would make of it.
    CONVPOOL_DEVICE uint4 mean(const uint4 (&pixels)[4], uint32_t inside, const uint4 &scale, const uint4 &shift) const {
        float sum[kPerChunk];
        const Prologue &f = p.prologue;
        const float below = f.activation == Activation::kLeakyRelu ? f.alpha : f.activation == Activation::kRelu ? 0.f : 1.f;
        UNROLLED_FOR (int w = 0; w < 4; ++w) {
            float v[4][kPerWord];
            UNROLLED_FOR (int j = 0; j < 4; ++j) unpack_word(word(pixels[j], w), v[j], Element{});
            if constexpr (kPrologue) {
                float s[kPerWord], t[kPerWord];
                unpack_word(word(scale, w), s, Element{});
                unpack_word(word(shift, w), t, Element{});
                UNROLLED_FOR (int j = 0; j < 4; ++j)
                    UNROLLED_FOR (int i = 0; i < kPerWord; ++i) {
                        const float affine = f.scale == nullptr ? v[j][i] : fmaf(s[i], v[j][i], t[i]);
                        const float negative = below == 0.f ? 0.f : affine * below;  // -inf too
                        v[j][i] = inside >> j & 1 ? (affine < 0.f ? negative : affine) : 0.f;
                    }
            }
            UNROLLED_FOR (int i = 0; i < kPerWord; ++i)
                sum[w * kPerWord + i] = ((v[0][i] + v[1][i]) + (v[2][i] + v[3][i])) * 0.25f;
        }
        return pack_chunk<kPrecision>(sum);
    }

    // Four bits for each of this thread's output pixels: which of the four pixels under it lie in X.
    CONVPOOL_DEVICE uint32_t inside_of(const Tile &tile) const {
        uint32_t inside = 0;
        UNROLLED_FOR (int i = 0; i < kRows; ++i) inside |= window_of(tile.pixel + thread_row + i * kRowsAtOnce).inside << 4 * i;
        return inside;
    }
    // Means of what this thread copied, from `src` to its places of a stage of means.
    CONVPOOL_DEVICE void form_means(uint32_t src, uint32_t dst, uint32_t inside, const uint4 &scale, const uint4 &shift) const {
#pragma unroll 1
        for (int i = 0; i < kRows; ++i) {
            uint4 pixels[4];
            UNROLLED_FOR (int j = 0; j < 4; ++j) pixels[j] = load_shared(src + j * Config::kThreads * 16);
            store_shared(dst, mean(pixels, inside, scale, shift));
            src += 4 * Config::kThreads * 16;
            dst += kRowsAtOnce * 128;
            inside >>= 4;
        }
    }
    // acc[16 of 64 pixels][kWarpN] += means[64][128 bytes] weights[kWarpN][128 bytes]^T. The step before is done on return.
    CONVPOOL_DEVICE static void multiply(Accumulators<Config> &acc, uint64_t descriptor, uint32_t means, uint32_t weights) {
        wgmma_begin();
        UNROLLED_FOR (int k = 0; k < kChunks / 2; ++k)
            wgmma<kPrecision>(acc[0], at_address(descriptor, means + k * 32), at_address(descriptor, weights + k * 32));
        wgmma_commit();
        wgmma_wait<1>();
    }
    // Bias, residual, activation, Y.
    CONVPOOL_DEVICE void store(const Accumulators<Config> &acc, const Tile &tile, const OutputView &view, int64_t out_pixels,
                               int first_row, int channel0, int lane) const {
        auto pixel_of = [&](int row) {
            const int pixel = tile.pixel + row;
            // Y in chunks is channels last. Said here, it spares that path the question.
            if (view.vectors || p.y_channels_last) return OutputPixel{static_cast<int64_t>(pixel) * p.m, pixel < p.pixels};
            uint32_t n, rest;
            p.div_out_hw.divmod(pixel, n, rest);
            return OutputPixel{static_cast<int64_t>(n) * p.m * out_pixels + rest, pixel < p.pixels};
        };
        if (p.split > 1)  // the only tile of this block: no copies are under way
            store_split<Config>(acc, shared, p.split, rank, p.epilogue, view, first_row, channel0, lane, pixel_of);
        else store_tile<Config>(acc, shared + kShared.mean_offset, p.epilogue, view, first_row, channel0, lane, pixel_of);
    }

    // scale and shift of this thread's channels: of the present step, and of the next one, on their way.
    struct Affine {
        uint4 scale{}, shift{}, next_scale{}, next_shift{};

        CONVPOOL_DEVICE void load(const Pointwise &k, int step) {
            const int c = (k.first_step + step) * kChunks + k.chunk;
            const bool valid = k.p.prologue.scale != nullptr && c < k.p.chunks;
            next_scale = valid ? static_cast<const uint4 *>(k.p.prologue.scale)[c] : uint4{};
            next_shift = valid ? static_cast<const uint4 *>(k.p.prologue.shift)[c] : uint4{};
        }
        CONVPOOL_DEVICE void advance() {
            scale = next_scale;
            shift = next_shift;
        }
    };

    CONVPOOL_DEVICE void run() const {
        const int warp = thread >> 5, lane = thread & 31, tile_stride = gridDim.x / p.split;
        const int warp_m = warp % Config::kWarpsM, warp_n = warp / Config::kWarpsM;
        const uint64_t descriptor = matrix_descriptor(16, 8 * 128, kSwizzle128);
        const uint32_t b0 = shared + warp_n * Config::kWarpN * 128;
        const int64_t out_pixels = static_cast<int64_t>(p.out_h) * p.out_w;
        const OutputView view{p.y, p.y_channels_last ? 1 : out_pixels, p.m, p.y_vectors != 0};

        // Start kAhead steps of copies.
        Copies copies(*this, blockIdx.x / p.split);
        Affine affine;
        wait_for_previous_kernel();
        let_next_kernel_start();
        if constexpr (kPrologue) affine.load(*this, 0);
#pragma unroll 1
        for (int i = 0; i < kAhead; ++i) copies.next(tile_stride);

        int stage = 0, pixel_stage = 0, mean_stage = 0;
#pragma unroll 1
        for (int index = blockIdx.x / p.split; index < p.tiles; index += tile_stride) {
            const Tile tile = tile_at(index);
            uint32_t inside = 0;
            if constexpr (kPrologue) inside = inside_of(tile);
            Accumulators<Config> acc;  // (16 pixels, kFragmentsN x 8 channels)
            clear<Config>(acc);
#pragma unroll 1
            for (int step = 0; step < steps; ++step) {
                copy_wait<kAhead - 1>();  // no barrier: a thread reads only pixels that it copied itself
                if constexpr (kPrologue) {
                    affine.advance();
                    affine.load(*this, step + 1 == steps ? 0 : step + 1);
                }
                form_means(pixels_at(pixel_stage), means_at(mean_stage) + place, inside, affine.scale, affine.shift);
                publish_shared();
                // Hazard: copies.next() fills the weights' stage of two steps ago. Every warp has waited for those products.
                __syncthreads();
                copies.next(tile_stride);
                multiply(acc, descriptor, means_at(mean_stage) + warp_m / 4 * 64 * 128, b0 + stage * kShared.weight_stage);
                stage = stage + 1 == kStages ? 0 : stage + 1;
                pixel_stage = pixel_stage + 1 == kPixelStages ? 0 : pixel_stage + 1;
                mean_stage = mean_stage + 1 == kMeanStages ? 0 : mean_stage + 1;
            }
            wgmma_wait<0>();
            __syncthreads();  // nobody reads means any more: their place is free for the accumulators
            store(acc, tile, view, out_pixels, warp_m * 16, tile.channel + warp_n * Config::kWarpN, lane);
            __syncthreads();
        }
    }
};

template <class Config, bool kPrologue>
__global__ void __launch_bounds__(Config::kThreads, Config::kMinBlocks)
    pointwise_kernel(const __grid_constant__ PointwiseParams params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) unsigned char memory[];
    Pointwise<Config, kPrologue>{params, shared_address(memory)}.run();
#endif
}

namespace pointwise {

struct Instances {
    template <size_t kRow> static const void *kernel(int prologue) {
        constexpr Tile t = kRows[kRow].tile;
        using Config = TileConfig<kRows[kRow].precision, t.block_m, t.block_n, t.warps_m, t.warps_n, t.stages, 1>;
        return prologue ? reinterpret_cast<const void *>(&pointwise_kernel<Config, true>)
                        : reinterpret_cast<const void *>(&pointwise_kernel<Config, false>);
    }
};

}  // namespace pointwise
}  // namespace convpool

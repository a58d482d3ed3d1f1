// SPDX-License-Identifier: Apache-2.0
// A tile of an implicit GEMM by wgmma: a stage of its ring, a warp's sums, and their way to Y.
#pragma once

#include "gemm/rows.h"
#include "kernels/epilogue/pushed_sums.cuh"
#include "kernels/epilogue/store_rows.cuh"
#include "kernels/ptx/wgmma.cuh"
#include "kernels/tile/tile.cuh"

namespace convpool {

// A stage of the ring in shared memory: rows of pixels, then of weights.
template <class Config> struct GemmStage {
    static constexpr int kChunks = 8, kRowBytes = kChunks * 16;  // 128 bytes, the width of wgmma's swizzle
    static constexpr int kPixelBytes = Config::kBlockM * kRowBytes;
    static constexpr int kBytes = kPixelBytes + Config::kBlockN * kRowBytes;
    static_assert(Config::kWarpM == 16 && Config::kWarpsN == 1, "a warp holds 16 rows of a warpgroup's product");
    static_assert(Config::kWarpsM % 4 == 0, "whole warpgroups");
    static_assert(Staging<Config>::kBytes <= Config::kStages * kBytes, "accumulators pass through the ring's place");
};

// The part of Y that a block computes, and its place among the blocks that share the sum.
template <class Config> struct GemmTile {
    int rank, pixel_tile, first_pixel, first_channel;

    CONVPOOL_DEVICE explicit GemmTile(const ImplicitGemmParams &p) : GemmTile(p, blockIdx.x) {}
    // The tile of a block, or of one that takes this block's place.
    CONVPOOL_DEVICE GemmTile(const ImplicitGemmParams &p, uint32_t block) {
        uint32_t tile, part, pixels, channels;
        p.div_split.divmod(block, tile, part);
        p.div_m_tiles.divmod(tile, pixels, channels);
        rank = part;
        pixel_tile = pixels;
        first_pixel = pixels * Config::kBlockM;
        first_channel = channels * Config::kBlockN;
    }
    // The first of its own steps, and how many they are.
    CONVPOOL_DEVICE int2 steps_of(int all, const ImplicitGemmParams &p) const {
        const int first = p.div_split.div(all * rank);
        return {first, static_cast<int>(p.div_split.div(all * (rank + 1))) - first};
    }
};

// A warp's sums over stages.
//
// Full fp32 is 3xTF32: pixels and weights come as two TF32 numbers each, the big ones of 16 channels and then their small ones,
// which fill a stage. big*big, small*big and big*small are three products of the same bytes. The tensor cores truncate as they
// accumulate, each step an error of one sign: the last two, 2^-11 of the whole, have a sum of their own, and the first starts from
// zero every other stage and is added by a rounded addition. Emulated on random numbers, 256 to a sum, the error is 1.6e-7; with
// all in one sum, added every four stages, 5.8e-7; a chain of float32 additions has 2.8e-7, and pooling its results divides it by 2.
template <class Config> struct GemmSums {
    static constexpr bool kSplit = Config::kPrecision == Precision::kTF32x3;
    static constexpr int kSumStages = 2;  // of split TF32: stages between rounded additions
    // acc is the sum. Of split TF32 it is what has been added up; part is big * big since then, small the small products.
    Accumulators<Config> acc, part, small;  // (1, kFragmentsN, 4): a warp's 16 pixels x 8 kFragmentsN channels
    const uint64_t descriptor = matrix_descriptor(16, 8 * GemmStage<Config>::kRowBytes, kSwizzle128);

    CONVPOOL_DEVICE GemmSums() {
        clear<Config>(acc);
        if constexpr (kSplit) {
            clear<Config>(part);
            clear<Config>(small);
        }
    }
    // Products of the step's rows of pixels and of weights at these addresses. Those of the step before are done on return.
    CONVPOOL_DEVICE void multiply(int step, uint32_t pixels, uint32_t weights) {
        const uint64_t a = at_address(descriptor, pixels), b = at_address(descriptor, weights);
        wgmma_begin();
        if constexpr (kSplit) {
            UNROLLED_FOR (int k = 0; k < 2; ++k) {  // parts 0 and 1 are the big numbers, 2 and 3 their small ones
                multiply(small, a, k + 2, b, k);
                multiply(small, a, k, b, k + 2);
                multiply(part, a, k, b, k);
            }
        } else {
            UNROLLED_FOR (int k = 0; k < GemmStage<Config>::kChunks / 2; ++k) multiply(acc, a, k, b, k);
        }
        wgmma_commit();
        wgmma_wait<1>();
        if constexpr (kSplit) {
            if (step % kSumStages == kSumStages - 1) {
                wgmma_wait<0>();
                add(part);
                clear<Config>(part);
            }
        }
    }
    // Products of the warp's rows of pixels in registers, [part of two chunks][fragment], and of weights at this address. Hazard:
    // the registers must stay as they are until wgmma_wait<0>().
    CONVPOOL_DEVICE void multiply(const uint32_t (&pixels)[GemmStage<Config>::kChunks / 2][4], uint32_t weights) {
        const uint64_t b = at_address(descriptor, weights);
        wgmma_begin();
        UNROLLED_FOR (int k = 0; k < GemmStage<Config>::kChunks / 2; ++k)
            wgmma<Config::kPrecision>(acc[0], pixels[k], moved(b, k * 32));
        wgmma_commit();
    }
    // Waits for all products and completes acc.
    CONVPOOL_DEVICE void finish() {
        wgmma_wait<0>();
        if constexpr (kSplit) {
            add(part);
            add(small);
        }
    }

private:
    // sum += part of_a of the pixels x part of_b of the weights, a part being two chunks: 32 bytes further on.
    CONVPOOL_DEVICE static void multiply(Accumulators<Config> &sum, uint64_t a, int of_a, uint64_t b, int of_b) {
        wgmma<Config::kPrecision>(sum[0], moved(a, of_a * 32), moved(b, of_b * 32));
    }
    CONVPOOL_DEVICE void add(const Accumulators<Config> &sum) {
        UNROLLED_FOR (int f = 0; f < Config::kFragmentsN; ++f)
            UNROLLED_FOR (int i = 0; i < 4; ++i) acc[0][f][i] += sum[0][f][i];
    }
};

template <class Config> constexpr bool pushes = pushes_sums(Config::kPrecision, Config::kBlockM, Config::kBlockN);

template <class Config> constexpr int kPushedOffset = exchange_offset(Config::kStages, Config::kBlockM, Config::kBlockN);

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
template <class Config>
CONVPOOL_DEVICE PushedSums<Config::kPrecision, Config::kWarps, Config::kFragmentsN> pushed_sums(const ImplicitGemmParams &p,
                                                                                                uint32_t shared, int rank) {
    static_assert(Config::kFragmentsM == 1 && Config::kWarpsN == 1, "a warp's fragments are 16 pixels of the tile");
    return {shared + kPushedOffset<Config>, p.split, rank, p.div_split};
}
#endif

// A tile's sums to Y, through shared memory that nothing is in any more.
template <class Config>
CONVPOOL_DEVICE void store_gemm_tile(const Accumulators<Config> &acc, uint32_t shared, const ImplicitGemmParams &p,
                                     const GemmTile<Config> &tile) {
    const Shape2d &s = p.shape;
    const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
    const int64_t out_pixels = static_cast<int64_t>(s.out_h) * s.out_w;
    const OutputView view{p.y, s.y_channels_last ? 1 : out_pixels, s.m, p.y_vectors != 0, p.y_runs != 0};
    auto pixel_of = [&](int row) {
        const int pixel = tile.first_pixel + row;
        // Y in chunks is channels last. Said here, it spares that path the question.
        if (view.vectors || s.y_channels_last) return OutputPixel{static_cast<int64_t>(pixel) * s.m, pixel < p.pixels};
        uint32_t n, rest;
        p.div_out_hw.divmod(pixel, n, rest);
        return OutputPixel{static_cast<int64_t>(n) * s.m * out_pixels + rest, pixel < p.pixels};
    };
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    if constexpr (pushes<Config>)
        if (p.split > 1)
            return pushed_sums<Config>(p, shared, tile.rank).store(acc[0], warp, p.epilogue, view, tile.first_channel, pixel_of);
#endif
    if (p.split > 1)
        store_split<Config>(acc, shared, p.split, tile.rank, p.epilogue, view, warp * 16, tile.first_channel, lane, pixel_of);
    else store_tile<Config>(acc, shared, p.epilogue, view, warp * 16, tile.first_channel, lane, pixel_of);
}

}  // namespace convpool

// SPDX-License-Identifier: Apache-2.0
// Stores the sums of an implicit GEMM's tile to Y.
#pragma once

#include "gemm/params.h"
#include "kernels/epilogue/pushed_sums.cuh"
#include "kernels/epilogue/split_reduction.cuh"
#include "kernels/epilogue/store_tile.cuh"
#include "kernels/tile/gemm_tile.cuh"

namespace convpool {

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

// SPDX-License-Identifier: Apache-2.0
// direct_fused on Hopper, pooling 2x2 or 3x3 whose windows lie side by side: raw pixels by TMA, box means in registers, wgmma with
// box means from there.
//
// The output is cut into subtiles of 8 x 8 pixels, or of 4 x 4 of four images; a block computes kSubtiles of them by kBlockN
// channels, slice after slice of 64 bytes of channels, tile after tile. Blocks of a cluster may share a tile's slices; then each has
// one tile, and they push their sums to each other. A warpgroup has a subtile, or a half of each of its slices. Its warps hand data
// on through rings in shared memory:
//
//     a warp               weights of one or more taps and slice     -> ring of kStages      (TMA, 64-byte swizzle)
//     a warp, or two       pixels of X under the subtiles            -> ring of kRawStages   (TMA, zeros outside)
//     kGroups warpgroups   ldmatrix, prologue, box means, products, accumulators: all in registers; bias, residual, activation, Y
//
// Box means pass through no shared memory, and no barrier stands between them and their products. In turns, one of two warpgroups
// forms the means of a whole slice while the other multiplies; else each forms the means of a row of taps while its own products
// of the row before run.
#pragma once

#include "families/direct_rs/block.cuh"
#include "families/direct_rs/products.cuh"
#include "subtiles/copies.cuh"

namespace convpool {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// One thread: barriers with the number of their arrivals, and the maps on their way to the cache.
template <class Config> CONVPOOL_DEVICE void prepare(const DirectRsBlock<Config> &block) {
    for (int i = 0; i < Config::kStages; ++i) {
        barrier_init(block.weights_full(i), 1);
        barrier_init(block.weights_empty(i), Config::kGroups);
    }
    for (int i = 0; i < Config::kRawStages; ++i)
        for (int copier = 0; copier < block.kCopiers; ++copier) {
            barrier_init(block.raw_full(i, copier), 1);
            barrier_init(block.raw_empty(i, copier), 4 * Config::kGroups / block.kCopiers);
        }
    publish_barriers();
    if (Config::kSplits && block.p.split > 1) block.pushed_sums().init();
    prefetch_map(&block.p.w_map);
    for (int plane = 0; plane < Config::kPool; ++plane) prefetch_map(&block.p.x_map[plane]);
}

template <class Config> CONVPOOL_DEVICE void run(const DirectRsBlock<Config> &block) {
    if (threadIdx.x == 0) prepare(block);
    __syncthreads();
    if (Config::kSplits && block.p.split > 1) block.pushed_sums().arrive();
    const int group = static_cast<int>(threadIdx.x >> 7), copier = block.warp % 4 - 1;
    const bool copies_weights = group == Config::kGroups && copier == -1;
    if (!copies_weights || !block.p.early_weights) wait_for_previous_kernel();
    let_next_kernel_start();
    if (group == Config::kGroups) {
        give_registers<Config::kCopyRegisters>();
        if (copies_weights && block.lane == 0) copy_weights(block);
        if (0 <= copier && copier < block.kCopiers && block.lane == 0) {
            RawCopies<DirectRsBlock<Config>> copies(block, block.kCopiers == 1 ? 0 : copier);
            while (copies.index < block.p.tiles) copies.next();
        }
    } else {
        take_registers<Config::kRegisters>();
        DirectRsProducts<DirectRsBlock<Config>, DirectRsMeans<Config>>{block, group}.run();
    }
}

#endif

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1) direct_rs_kernel(const __grid_constant__ SubtileParams params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) unsigned char memory[];
    run<Config>(DirectRsBlock<Config>{
        {params}, shared_address(memory), static_cast<int>(threadIdx.x >> 5), static_cast<int>(threadIdx.x & 31)});
#endif
}

}  // namespace convpool

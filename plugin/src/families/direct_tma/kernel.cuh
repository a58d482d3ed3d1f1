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
// One file for each kind of warp: subtiles/copies.cuh, box_means.cuh (with pixel_function.cuh, the prologue), products.cuh (with
// subtiles/finish.cuh, the way to Y); block.cuh has what they share.
//
// Tried and slower: clusters that fetch weights for each other, or share the channels of a tile; a ring of raw pixels by
// subtile instead of by slice; a kernel for 4 x 4 output pixels of four images (benchmarks/log.md).
#pragma once

#include "families/direct_tma/block.cuh"
#include "families/direct_tma/box_means.cuh"
#include "families/direct_tma/products.cuh"
#include "subtiles/copies.cuh"

namespace convpool {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

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

template <class Config> const void *direct_tma_kernel_of(bool prologue) {
    return prologue ? reinterpret_cast<const void *>(&direct_tma_kernel<Config, true>)
                    : reinterpret_cast<const void *>(&direct_tma_kernel<Config, false>);
}

}  // namespace convpool

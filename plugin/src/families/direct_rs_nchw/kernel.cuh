// SPDX-License-Identifier: Apache-2.0
// direct_rs for X and Y with their channels first, 3x3 kernels: what differs is how pixels lie in shared memory, how box means are
// formed of them, and how Y is written.
#pragma once

#include "families/direct_rs/products.cuh"
#include "families/direct_rs_nchw/block.cuh"
#include "families/direct_rs_nchw/box_means.cuh"
#include "families/direct_rs_nchw/finish.cuh"
#include "subtiles/copies.cuh"

namespace convpool {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// One thread: barriers with the number of their arrivals, and the maps on their way to the cache.
template <class Config> CONVPOOL_DEVICE void prepare(const DirectRsNchwBlock<Config> &block) {
    for (int i = 0; i < Config::kStages; ++i) {
        barrier_init(block.weights_full(i), 1);
        barrier_init(block.weights_empty(i), Config::kGroups);
    }
    for (int i = 0; i < Config::kRawStages; ++i) {
        barrier_init(block.raw_full(i), 1);
        barrier_init(block.raw_empty(i), 4 * Config::kGroups);
    }
    publish_barriers();
    prefetch_map(&block.p.w_map);
    prefetch_map(&block.p.x_map[0]);
}

// Copies the pixels under all tiles of the block, slice after slice. Zeros outside X.
template <class Config> CONVPOOL_DEVICE void copy_pixels(const DirectRsNchwBlock<Config> &block) {
    const SubtileParams &p = block.p;
    Ring<Config::kRawStages> ring;
    for (int index = block.first_tile(); index < p.tiles; index += block.tile_step()) {
        const int subtile = block.tile_at(index).subtile;
#pragma unroll 1
        for (int slice = 0; slice < p.slices; ++slice)
#pragma unroll
            for (int d = 0; d < Config::kDepth; ++d) {
                const typename DirectRsNchwBlock<Config>::Corner corner = block.corner_of(subtile + d);
                const uint32_t full = block.raw_full(ring.buffer);
                barrier_wait(block.raw_empty(ring.buffer), ring.parity ^ 1);
                barrier_expect(full, Config::kShared.raw_stage);
                // Hazard: a column that is no multiple of 16 bytes ends the kernel ("illegal instruction").
                copy_box(block.raw_at(ring.buffer), &p.x_map[0], full, (corner.x * 2 - p.pad_w) & -kNchwAlignment,
                         corner.y * 2 - p.pad_h, slice * Config::kChunks * Config::kPerChunk, corner.image);
                ring.next();
            }
    }
}

template <class Config> CONVPOOL_DEVICE void run(const DirectRsNchwBlock<Config> &block) {
    if (threadIdx.x == 0) prepare(block);
    __syncthreads();
    const int group = static_cast<int>(threadIdx.x >> 7);
    const bool copies_weights = group == Config::kGroups && block.warp % 4 == 0;
    if (!copies_weights || !block.p.early_weights) wait_for_previous_kernel();
    let_next_kernel_start();
    if (group == Config::kGroups) {
        give_registers<Config::kCopyRegisters>();
        if (copies_weights && block.lane == 0) copy_weights(block);
        if (block.warp % 4 == 1 && block.lane == 0) copy_pixels(block);
    } else {
        take_registers<Config::kRegisters>();
        DirectRsProducts<DirectRsNchwBlock<Config>, DirectRsNchwMeans<Config>>{block, group}.run();
    }
}

#endif

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1) direct_rs_nchw_kernel(const __grid_constant__ SubtileParams params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) unsigned char memory[];
    run<Config>(DirectRsNchwBlock<Config>{
        {params}, shared_address(memory), static_cast<int>(threadIdx.x >> 5), static_cast<int>(threadIdx.x & 31)});
#endif
}

}  // namespace convpool

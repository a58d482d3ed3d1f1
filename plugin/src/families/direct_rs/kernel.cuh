// SPDX-License-Identifier: Apache-2.0
// direct_rs: direct_fused on Hopper, pooling 2x2 or 3x3 whose windows lie side by side: raw pixels by TMA, box means in registers, wgmma with
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
//
// Channels first, for 3x3 kernels, differ how pixels lie in shared memory, how box means are formed of them, and how Y is written
// (nchw.cuh).
#pragma once

#include <type_traits>

#include "families/direct_rs/box_means.cuh"
#include "families/direct_rs/nchw.cuh"
#include "families/direct_rs/rows.h"
#include "kernels/mma/multiply_slice.cuh"
#include "kernels/ptx/numbers.cuh"
#include "kernels/ptx/tma.cuh"
#include "kernels/ptx/wgmma.cuh"
#include "subtiles/subtiles.cuh"

namespace convpool {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// The warpgroups that form box means and multiply them by weights, from raw pixels to Y.
template <class Block, class Means> struct DirectRsProducts {
    using Config = typename Block::Config;
    using Sums = float[Config::kFragments][4];
    static constexpr int kKernel = Config::kKernel, kStageTaps = Config::kStageTaps, kRowStages = kKernel / kStageTaps,
                         kSteps = Config::kSteps, kDepth = Config::kDepth;
    static constexpr int kFirstTurn = 1, kExchange = 1;  // names of barriers; a block has one or the other

    const Block &block;
    const int group;
    const int subtile = group / Config::kParts, part = group % Config::kParts;
    const int copier = Block::kCopiers == 1 ? 0 : subtile;  // of the pixels
    const bool elected = (threadIdx.x & 127) == 32;
    Ring<Config::kStages> weights{}, used{};  // the next stage to multiply, the next to hand back
    Ring<Config::kRawStages> raw{};

    // Products of a row of taps, a group of its own. first_step: of a slice's two.
    CONVPOOL_DEVICE void multiply(Sums &acc, const Means &means, int row, int first_step) {
        UNROLLED_FOR (int column = 0; column < kKernel; ++column) {
            if (column % kStageTaps == 0) {
                barrier_wait(block.weights_full(weights.buffer), weights.parity);
                wgmma_begin();
            }
            const uint64_t b = at_address(matrix_descriptor(16, 8 * 64, kSwizzle64),
                                          block.weights_at(weights.buffer) + column % kStageTaps * Config::kBlockN * 64);
            UNROLLED_FOR (int k = 0; k < kSteps; ++k)
                wgmma<Config::kPrecision>(acc, means.a[row][column][k], moved(b, (first_step + k) * 32));
            if (column % kStageTaps == kStageTaps - 1) weights.next();
        }
        wgmma_commit();
    }
    // Hands back the weights of a row of taps, whose products are done. Resident ones stay.
    CONVPOOL_DEVICE void release_weights() {
        if (block.p.resident) return;
        UNROLLED_FOR (int i = 0; i < kRowStages; ++i) {
            if (elected) barrier_arrive(block.weights_empty(used.buffer));
            used.next();
        }
    }
    // Hazard: ldmatrix only starts to read. Pixels are handed back after the last product of their means was issued, which waits
    // for the registers; an arrival right behind the last ldmatrix would let TMA overwrite pixels not yet read.
    CONVPOOL_DEVICE void release_raw() {
        __syncwarp();
        if (block.lane == 0) barrier_arrive(block.raw_empty(raw.buffer, copier));
        raw.next();
    }

    // A slice in turns: this warpgroup forms all means while the other multiplies. Its products are done on return, and its
    // weights handed back, if nothing multiplies by them again: the other's next turn needs the stages that follow.
    CONVPOOL_DEVICE void slice_in_turns(Sums &acc, Means &means, bool release, bool last, int next_slice) {
        UNROLLED_FOR (int row = 0; row < kKernel; ++row) means.form(row);
        barrier_sync(kFirstTurn + group, 256);
        UNROLLED_FOR (int row = 0; row < kKernel; ++row) multiply(acc, means, row, 0);
        release_raw();
        load_prologue(means, next_slice);
        if (group == 0 || !last) barrier_join(kFirstTurn + 1 - group, 256);
        if constexpr (kKernel > 1) {
            wgmma_wait<2>();
            if (release) release_weights();
            wgmma_wait<1>();
            if (release) release_weights();
        }
        wgmma_wait<0>();
        if (release) release_weights();
    }
    // A slice by rows of taps: the means of a row are formed while the products of the row before run. Hazard: no product is under way
    // behind a slice. The compiler forgets from one turn of the loop to the next which registers products still read, and it copies
    // accumulators behind the loop ahead of a wait there.
    CONVPOOL_DEVICE void slice_by_rows(Sums &acc, Means &means, int next_slice) {
        UNROLLED_FOR (int row = 0; row < kKernel; ++row) {
            means.form(row);
            multiply(acc, means, row, part);
            if (row == 0) continue;
            wgmma_wait<1>();
            release_weights();
        }
        release_raw();
        load_prologue(means, next_slice);
        wgmma_wait<0>();
        release_weights();
    }
    // A slice in two steps, which leaves registers to more warpgroups; they cover for each other.
    CONVPOOL_DEVICE void slice_by_steps(Sums &acc, Means &means, uint32_t pixels) {
        const Ring<Config::kStages> first = weights;
        UNROLLED_FOR (int step = 0; step < 2; ++step) {
            means.start(pixels, step);
            weights = first;
            UNROLLED_FOR (int row = 0; row < kKernel; ++row) means.form(row);
            UNROLLED_FOR (int row = 0; row < kKernel; ++row) multiply(acc, means, row, step);
            if (step == 1) release_raw();
            wgmma_wait<0>();
        }
        UNROLLED_FOR (int row = 0; row < kKernel; ++row) release_weights();
    }

    // Scales and shifts of a slice's channels, on their way before products are waited for.
    CONVPOOL_DEVICE void load_prologue(Means &means, int slice) const {
        if constexpr (!Config::kChannelsFirst) means.prologue.load(block, slice, part);
    }

    // Sums of the second part are added to those of the first.
    CONVPOOL_DEVICE void exchange(Sums &acc) const {
        const uint32_t place = block.sums() + (threadIdx.x & 127) * 16;
        if (part == 1) {
            UNROLLED_FOR (int f = 0; f < Config::kFragments; ++f)
                store_shared(place + f * 128 * 16, {__float_as_uint(acc[f][0]), __float_as_uint(acc[f][1]),
                                                    __float_as_uint(acc[f][2]), __float_as_uint(acc[f][3])});
        }
        barrier_sync(kExchange, 256);
        if (part == 0) {
            UNROLLED_FOR (int f = 0; f < Config::kFragments; ++f) {
                const uint4 v = load_shared(place + f * 128 * 16);
                acc[f][0] += __uint_as_float(v.x);
                acc[f][1] += __uint_as_float(v.y);
                acc[f][2] += __uint_as_float(v.z);
                acc[f][3] += __uint_as_float(v.w);
            }
        }
        barrier_sync(kExchange, 256);
    }

    // Sums of this block's slices to those that finish them; false where it has all slices.
    CONVPOOL_DEVICE bool push(const Sums &acc, const typename Block::Tile &tile) const {
        if constexpr (Config::kSplits) {
            if (block.p.split > 1) {
                const OutputView view{block.p.y, 1, block.p.m, true};
                auto pixel_of = [&](int row) { return block.pixel_of(tile.subtile + row / 64, row % 64); };
                block.pushed_sums().store(acc, subtile * 4 + block.warp % 4, block.p.epilogue, view, tile.channel, pixel_of);
                return true;
            }
        }
        return false;
    }

    CONVPOOL_DEVICE void run() {
        const SubtileParams &p = block.p;
        Means means(block);
        const int end_slice = block.end_slice();
        load_prologue(means, block.first_slice());
        if (Config::kTurns && group == 1 && block.first_tile() < p.tiles) barrier_join(kFirstTurn, 256);
        for (int index = block.first_tile(); index < p.tiles; index += block.tile_step()) {
            Sums acc[kDepth] = {};
            const typename Block::Tile tile = block.tile_at(index);
            if constexpr (!Config::kChannelsFirst)
                if (p.epilogue.residual != nullptr && part == 0) prefetch_residual(block, tile.subtile + subtile, tile.channel);
            if constexpr (!Config::kChannelsFirst) means.prologue.start_tile(block, tile.subtile + subtile);
            if (p.resident) weights = {};
            const bool last_tile = index + block.tile_step() >= p.tiles;
            // Hazard: a loop that might not run at all would make the compiler copy accumulators behind it, ahead of the wait.
            int slice = block.first_slice();
#pragma unroll 1
            do {
                const Ring<Config::kStages> first = weights;
                const int next_slice = slice + 1 < end_slice ? slice + 1 : block.first_slice();
                UNROLLED_FOR (int d = 0; d < kDepth; ++d) {
                    const bool release = d + 1 == kDepth;
                    weights = first;
                    barrier_wait(block.raw_full(raw.buffer, copier), raw.parity);
                    const uint32_t pixels = block.raw_at(raw.buffer, subtile);
                    if constexpr (Config::kOrder == RsOrder::kSteps) {
                        slice_by_steps(acc[d], means, pixels);
                    } else {
                        means.start(pixels, part);
                        if constexpr (Config::kTurns)
                            slice_in_turns(acc[d], means, release, release && last_tile && slice + 1 == end_slice, next_slice);
                        else slice_by_rows(acc[d], means, next_slice);
                    }
                }
            } while (++slice < end_slice);
            if constexpr (Config::kParts == 2) exchange(acc[0]);
            if (part != 0) continue;
            if constexpr (Config::kChannelsFirst) {
                UNROLLED_FOR (int d = 0; d < kDepth; ++d) finish_channels_first(block, acc[d], tile.subtile + d, tile.channel);
            } else if (!push(acc[0], tile)) {
                finish(block, acc[0], tile.subtile + subtile, tile.channel, [] {});
            }
        }
    }
};

// One thread: barriers with the number of their arrivals, and the maps on their way to the cache.
template <class Block> CONVPOOL_DEVICE void prepare(const Block &block) {
    using Config = typename Block::Config;
    for (int i = 0; i < Config::kStages; ++i) {
        barrier_init(block.weights_full(i), 1);
        barrier_init(block.weights_empty(i), Config::kGroups);
    }
    for (int i = 0; i < Config::kRawStages; ++i)
        for (int copier = 0; copier < Block::kCopiers; ++copier) {
            barrier_init(block.raw_full(i, copier), 1);
            barrier_init(block.raw_empty(i, copier), 4 * Config::kGroups / Block::kCopiers);
        }
    publish_barriers();
    if constexpr (Config::kSplits)
        if (block.p.split > 1) block.pushed_sums().init();
    prefetch_map(&block.p.w_map);
    for (int plane = 0; plane < Block::kPlanes; ++plane) prefetch_map(&block.p.x_map[plane]);
}

template <class Config> CONVPOOL_DEVICE void copy_pixels(const DirectRsBlock<Config> &block, int copier) {
    RawCopies<DirectRsBlock<Config>> copies(block, block.kCopiers == 1 ? 0 : copier);
    while (copies.index < block.p.tiles) copies.next();
}

template <class Means, class Block> CONVPOOL_DEVICE void run(const Block &block) {
    using Config = typename Block::Config;
    if (threadIdx.x == 0) prepare(block);
    __syncthreads();
    if constexpr (Config::kSplits)
        if (block.p.split > 1) block.pushed_sums().arrive();
    const int group = static_cast<int>(threadIdx.x >> 7), copier = block.warp % 4 - 1;
    const bool copies_weights = group == Config::kGroups && (Config::kChannelsFirst ? block.warp % 4 == 0 : copier == -1);
    if (!copies_weights || !block.p.early_weights) wait_for_previous_kernel();
    let_next_kernel_start();
    if (group == Config::kGroups) {
        give_registers<Config::kCopyRegisters>();
        if (copies_weights && block.lane == 0) copy_weights(block);
        if ((Config::kChannelsFirst ? block.warp % 4 == 1 : 0 <= copier && copier < Block::kCopiers) && block.lane == 0)
            copy_pixels(block, copier);
    } else {
        take_registers<Config::kRegisters>();
        DirectRsProducts<Block, Means>{block, group}.run();
    }
}

#endif

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1) direct_rs_kernel(const __grid_constant__ SubtileParams params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    using Block = std::conditional_t<Config::kChannelsFirst, DirectRsNchwBlock<Config>, DirectRsBlock<Config>>;
    using Means = std::conditional_t<Config::kChannelsFirst, DirectRsNchwMeans<Config>, DirectRsMeans<Config>>;
    extern __shared__ __align__(1024) unsigned char memory[];
    // Block{Rings{SubtileGrid{params}, shared memory, warp, lane}}: each is the base of what is around it.
    run<Means>(Block{{{params}, shared_address(memory), static_cast<int>(threadIdx.x >> 5), static_cast<int>(threadIdx.x & 31)}});
#endif
}

namespace direct_rs {

// Kernels of a row: channels last one for each prologue; channels first where the padding is 1 modulo 4, and for others.
struct Instances {
    template <size_t kRow> static const void *kernel(int variant) {
        const void *const kernels[] = {kernel<kRow, 0>(), kernel<kRow, 1>(), kernel<kRow, 2>(), kernel<kRow, 3>()};
        return kernels[variant];
    }
    // Null where a row does not have the variant.
    template <size_t kRow, int kVariant> static const void *kernel() {
        constexpr Row row = kRows[kRow];
        constexpr Tile t = row.tile;
        if constexpr (t.channels_first && kVariant < 2)
            return reinterpret_cast<const void *>(
                &direct_rs_kernel<DirectRsNchwConfig<row.precision, row.packed, kVariant == 1, t.side, t.depth, t.k_parts,
                                                     t.block_n, t.stage_taps, t.stages, t.raw_stages, t.order>>);
        else if constexpr (!t.channels_first && row.takes(static_cast<RsPrologue>(kVariant)))
            return reinterpret_cast<const void *>(
                &direct_rs_kernel<
                    DirectRsConfig<row.precision, row.packed, t.kernel, t.pool, t.side, t.groups, t.k_parts, t.block_n,
                                   t.stage_taps, t.stages, t.raw_stages, t.order, t.splits, static_cast<RsPrologue>(kVariant)>>);
        else return nullptr;
    }
};

}  // namespace direct_rs
}  // namespace convpool

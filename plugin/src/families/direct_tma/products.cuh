// SPDX-License-Identifier: Apache-2.0
// direct_tma: the warpgroups that multiply box means by weights (wgmma), from their rings to Y.
#pragma once

#include "families/direct_tma/block.cuh"
#include "kernels/ptx/mbarrier.cuh"
#include "kernels/ptx/wgmma.cuh"
#include "kernels/tile/ring.cuh"
#include "subtiles/finish.cuh"

namespace convpool {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

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
#pragma unroll
        for (int tap = first_tap; tap < first_tap + kStageTaps; ++tap) {
            const int row = tap / kKernel, column = tap % kKernel;
            const int pitch = kKernel == 1 || column % 2 ? 8 : 9;
            const int plane = kKernel == 1 ? 0 : row % 2 ? (column % 2 ? 225 : 153) : (column % 2 ? 81 : 0);
            const int position = (plane + row / 2 * pitch + column / 2) * 16;
#pragma unroll
            for (int k = 0; k < kChunks / 2; ++k)
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
                     [4];  // (8 channels a fragment, 4 of 64 pixels x 8 channels): subtiles/finish.cuh has the map
#pragma unroll
            for (int f = 0; f < Config::kFragments; ++f)
#pragma unroll
                for (int i = 0; i < 4; ++i) acc[f][i] = 0.f;
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
#pragma unroll
                for (int first_tap = 0; first_tap < kTaps; first_tap += kStageTaps) {
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

#endif

}  // namespace convpool

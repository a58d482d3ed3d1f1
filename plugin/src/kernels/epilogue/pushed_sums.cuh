// SPDX-License-Identifier: Apache-2.0
// The split reduction of small tiles multiplied by wgmma: a cluster's blocks each hold a part of a tile's sum, add the parts up,
// and store Y.
//
// The tile's fragments of 16 pixels x 8 channels are dealt out to the blocks in order. Every block pushes its part of a fragment
// into the memory of the block that finishes it. That one adds the parts in the order of the blocks, so that the result does not
// depend on timing, and stores the sum. No block loads from another, which would take a round trip for every load.
//
//     init(), of one thread, and arrive()    at the start: from then on others may push
//     store()                                the warps that multiply, when the block's part is complete
#pragma once

#include "core/pushed_sums.h"
#include "kernels/epilogue/finish.cuh"
#include "kernels/ptx/cluster.cuh"
#include "kernels/ptx/mbarrier.cuh"

namespace convpool {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

template <class Element> struct alignas(2 * sizeof(Element)) PairOf {
    Element first, second;
};

// Each of kWarps warps has 16 pixels of the tile and kAcross fragments of them.
template <Precision P, int kWarps, int kAcross> struct PushedSums {
    static constexpr int kFragments = kWarps * kAcross;

    const uint32_t memory;  // shared: a barrier, and the parts that others push
    const int split, rank;
    const FastDiv &div_split;

    CONVPOOL_DEVICE uint32_t barrier() const { return memory; }
    // The lane's four sums of a block's part of one of the fragments that this block, or another, finishes.
    CONVPOOL_DEVICE uint32_t part(int block, int index) const {
        const int most = div_split.div(kFragments + split - 1);  // fragments that a block finishes
        return memory + kPushedHead + (block * most + index) * kPartBytes + (threadIdx.x & 31) * 16;
    }
    CONVPOOL_DEVICE int first_of(int block) const { return div_split.div(block * kFragments); }

    // Before a barrier of the block.
    CONVPOOL_DEVICE void init() const {
        barrier_init(barrier(), 1);
        publish_barriers();
        barrier_expect(barrier(), split * (first_of(rank + 1) - first_of(rank)) * kPartBytes);
    }
    // After it, all threads.
    CONVPOOL_DEVICE void arrive() const { cluster_arrive(); }

    // The sums are the warp's, fragment by fragment; pixel_of(row) is the tile's output pixel `row`.
    template <class PixelOf>
    CONVPOOL_DEVICE void store(const float (&sums)[kAcross][4], int warp, const Epilogue &e, const OutputView &view, int channel0,
                               PixelOf pixel_of) const {
        const int lane = threadIdx.x & 31;
        cluster_wait();  // all have arrived
#pragma unroll
        for (int i = 0; i < kAcross; ++i) {
            const int fragment = warp * kAcross + i, block = ((fragment + 1) * split - 1) / kFragments;
            push(part(rank, fragment - first_of(block)), block, sums[i], barrier());
        }
        barrier_wait_cluster(barrier(), 0);
        const int first = first_of(rank), count = first_of(rank + 1) - first;
#pragma unroll 1
        for (int i = warp; i < count; i += kWarps) {
            float sum[4], other[4];
            load_sums(part(0, i), sum);
#pragma unroll 2
            for (int block = 1; block < split; ++block) {
                load_sums(part(block, i), other);
#pragma unroll
                for (int j = 0; j < 4; ++j) sum[j] += other[j];
            }
            const int row = (first + i) / kAcross * 16 + (lane >> 2), column = (first + i) % kAcross * 8 + 2 * (lane & 3);
            finish(sum, e, view, row, channel0 + column, pixel_of);
        }
    }

private:
    // Bias, residual, activation and store of sums of two channels of the pixels of two rows, 8 apart.
    template <class PixelOf>
    CONVPOOL_DEVICE static void finish(float (&v)[4], const Epilogue &e, const OutputView &view, int row, int channel,
                                       PixelOf pixel_of) {
        using Element = typename Traits<P>::Element;
        using Pair = PairOf<Element>;
        if (channel >= view.m) return;
        const OutputPixel pixels[2] = {pixel_of(row), pixel_of(row + 8)};
        if (view.vectors) {  // whole chunks of channels, so whole pairs
            if (e.bias != nullptr) {
                const Pair bias = *reinterpret_cast<const Pair *>(static_cast<const Element *>(e.bias) + channel);
#pragma unroll
                for (int i = 0; i < 4; ++i) v[i] += to_float(i % 2 == 0 ? bias.first : bias.second);
            }
            if (e.residual != nullptr) {
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    if (!pixels[h].valid) continue;
                    const Pair r =
                        *reinterpret_cast<const Pair *>(static_cast<const Element *>(e.residual) + pixels[h].base + channel);
                    v[2 * h] += to_float(r.first);
                    v[2 * h + 1] += to_float(r.second);
                }
            }
            activate_all(v, e);
#pragma unroll
            for (int h = 0; h < 2; ++h)
                if (pixels[h].valid)
                    *reinterpret_cast<Pair *>(static_cast<Element *>(view.y) + pixels[h].base +
                                              channel) = {from_float<Element>(v[2 * h]), from_float<Element>(v[2 * h + 1])};
        } else {
#pragma unroll 1
            for (int i = 0; i < 4; ++i) {
                const OutputPixel pixel = i < 2 ? pixels[0] : pixels[1];
                const int c = channel + i % 2;
                const float value = i == 0 ? v[0] : i == 1 ? v[1] : i == 2 ? v[2] : v[3];  // registers have no addresses
                if (pixel.valid && c < view.m) finish_element<P>(value, e, view, pixel.base + c * view.step, c);
            }
        }
    }
};

#endif

}  // namespace convpool

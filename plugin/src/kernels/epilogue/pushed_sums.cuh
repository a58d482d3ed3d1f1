// SPDX-License-Identifier: Apache-2.0
// The split reductions: a cluster's blocks each hold a part of a tile's sum, add the parts up, store Y. PushedSums is for small
// tiles multiplied by wgmma, store_split, at the end, for others.
//
// PushedSums deals fragments of 16 pixels x 8 channels out to the blocks in order. Every block pushes its part of a fragment
// into the memory of the block that finishes it. That one adds the parts in the order of the blocks, so that the result does not
// depend on timing, and stores the sum. No block loads from another, which would take a round trip for every load.
//
//     init(), of one thread, and arrive()    at the start: from then on others may push
//     store()                                the warps that multiply, when the block's part is complete
#pragma once

#include "core/params.h"
#include "kernels/epilogue/finish.cuh"
#include "kernels/epilogue/store_rows.cuh"
#include "kernels/ptx/device.cuh"
#include "kernels/ptx/tma.cuh"
#include "kernels/tile/tile.cuh"

namespace convpool {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

template <class Element> struct alignas(2 * sizeof(Element)) PairOf {
    using Word = std::conditional_t<sizeof(Element) == 4, unsigned long long, uint32_t>;
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
        UNROLLED_FOR (int i = 0; i < kAcross; ++i) {
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
                UNROLLED_FOR (int j = 0; j < 4; ++j) sum[j] += other[j];
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
        if (channel >= view.m) return;
        const OutputPixel pixels[2] = {pixel_of(row), pixel_of(row + 8)};
        const auto exists = [&](int i) { return pixels[i / 2].valid && channel + i % 2 < view.m; };
        const auto place = [&](int i) { return pixels[i / 2].base + (channel + i % 2) * view.step; };
        const Element *const bias = static_cast<const Element *>(e.bias);
        UNROLLED_FOR (int i = 0; i < 4; ++i)
            if (bias != nullptr) v[i] += to_float(bias[min(channel + i % 2, view.m - 1)]);
        if (e.residual != nullptr) {
            UNROLLED_FOR (int i = 0; i < 4; ++i)
                if (exists(i)) v[i] += to_float(static_cast<const Element *>(e.residual)[place(i)]);
        }
        activate_all(v, e);
        Element *const y = static_cast<Element *>(view.y);
        UNROLLED_FOR (int i = 0; i < 4; ++i) {
            if (!exists(i)) continue;
            const Element value = from_float<Element>(v[i]);
            if (!view.vectors) y[place(i)] = value;
            else if (i % 2 == 0)  // whole chunks of channels, so whole pairs
                *reinterpret_cast<PairOf<Element> *>(y + place(i)) = {value, from_float<Element>(v[i + 1])};
        }
    }
};

#endif

// Shared memory of one block's part of the sum: rows of floats that are 8 longer, so that a warp's stores meet in no bank.
template <class Config> constexpr int kSplitBytes = Config::kBlockM * Config::kWarpsN * (Config::kWarpN + 8) * 4;

// Each block writes its accumulators to its shared memory (kSplitBytes, from the start), as [warp][pixel][channel]. Block r
// then adds up, in the order of the blocks, and stores every split-th group of 4 pixels of a warp from r on: the result
// does not depend on timing. Everything this block had in shared memory is lost.
template <class Config, class PixelOf>
CONVPOOL_DEVICE void store_split(const Accumulators<Config> &acc, uint32_t shared, int split, int rank, const Epilogue &e,
                                 const OutputView &view, int first_row, int channel0, int lane, PixelOf pixel_of) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    constexpr int kPitch = Config::kWarpN + 8, kRows = 4, kAcross = Config::kWarpN / 4;
    const uint32_t mine = shared + (threadIdx.x >> 5) * Config::kWarpM * kPitch * 4;
    const uint32_t target = mine + ((lane >> 2) * kPitch + 2 * (lane & 3)) * 4;
    // This block's part, all fragments of all warps.
    UNROLLED_FOR (int mi = 0; mi < Config::kFragmentsM; ++mi)
        UNROLLED_FOR (int ni = 0; ni < Config::kFragmentsN; ++ni) {
            const uint32_t at = target + (mi * 16 * kPitch + ni * 8) * 4;
            store_shared_pair(at, acc[mi][ni][0], acc[mi][ni][1]);
            store_shared_pair(at + 8 * kPitch * 4, acc[mi][ni][2], acc[mi][ni][3]);
        }
    cluster_barrier();  // all parts are complete
#pragma unroll 1
    for (int row = rank * kRows; row < Config::kWarpM; row += split * kRows) {
#pragma unroll 1
        for (int i = lane; i < kRows * kAcross; i += 32) {
            const uint32_t at = mine + ((row + i / kAcross) * kPitch + i % kAcross * 4) * 4;
            float4 sum{0.f, 0.f, 0.f, 0.f};
#pragma unroll 4
            for (int q = 0; q < split; ++q) {
                const float4 part = load_remote(at, q);
                sum.x += part.x;
                sum.y += part.y;
                sum.z += part.z;
                sum.w += part.w;
            }
            // No other block reads these pixels, so the sum may take its own part's place.
            store_shared(at, {__float_as_uint(sum.x), __float_as_uint(sum.y), __float_as_uint(sum.z), __float_as_uint(sum.w)});
        }
        __syncwarp();
        store_rows<Config, kRows, Config::kWarpN>(mine + row * kPitch * 4, e, view, first_row + row, channel0, lane, pixel_of);
    }
    cluster_barrier();  // no block leaves while another reads its memory
#endif
}

}  // namespace convpool

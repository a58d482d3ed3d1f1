// SPDX-License-Identifier: Apache-2.0
// The split reduction: a cluster's blocks each hold a part of a tile's sum, add the parts up and store Y.
#pragma once

#include "kernels/epilogue/store_rows.cuh"
#include "kernels/mma/accumulators.cuh"
#include "kernels/ptx/cluster.cuh"

namespace convpool {

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
#pragma unroll
    for (int mi = 0; mi < Config::kFragmentsM; ++mi)
#pragma unroll
        for (int ni = 0; ni < Config::kFragmentsN; ++ni) {
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

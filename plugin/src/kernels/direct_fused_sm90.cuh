// direct_fused on Hopper: box means formed in shared memory, while wgmma multiplies those of the slice before.
//
// The same tile, layouts and copies as direct_fused.cuh, with two buffers of box means P. A warpgroup multiplies 64 pixels,
// 8 rows of 8 (of one image), by all of the block's channels: since P keeps the pixels that neighbouring outputs see
// through a tap side by side, tap (a, b) is P itself, read from a shifted start:
//
//     GEMM row r of a warpgroup = output (r / 8, r % 8);  descriptor: start = (P + tap) bytes,
//     8 rows -> next 8 = one output row = stride_h * stride_w * phase_pitch * 16 bytes,  chunk -> chunk = plane * 16 bytes
//
// One step of the ring is one tap of one slice. In step i a block waits for the weights of i, fetches those of
// i + kStages - 2, starts the products of i, forms its share of the next slice's means while they run, and waits for the
// products of i - 1, whose weights' buffer step i + 1 then fills again.
#pragma once

#include "direct_fused.cuh"
#include "wgmma.cuh"

namespace convpool {

template <class Config> struct DirectFusedSm90 : DirectFused<Config> {
    using Base = DirectFused<Config>;
    using Tile = typename Base::Tile;
    static constexpr int kStages = Config::kStages, kChunks = Config::kChunks;
    static_assert(Config::kWarpM == 16 && Config::kWarpsN == 1, "a warp holds 16 rows of a warpgroup's product");
    static_assert(Config::kWarpsM % 4 == 0, "whole warpgroups");
    static_assert(kStages >= 4, "two steps of weights under way, two being multiplied");

    using Base::Base;

    CONVPOOL_DEVICE void run() const {
        const DirectFusedParams &p = this->p;
        const int rank = blockIdx.x % p.split, step = gridDim.x / p.split;
        const int first_slice = p.slices * rank / p.split, end_slice = p.slices * (rank + 1) / p.split;
        const int taps = p.taps;
        int index = blockIdx.x / p.split;
        if (index >= p.tiles) return;

        const uint64_t pixel_descriptor =
            matrix_descriptor(p.plane * 16, p.shape.stride_h * p.shape.stride_w * p.phase_pitch * 16, kNoSwizzle);
        const uint64_t weight_descriptor = matrix_descriptor(16, 8 * Config::kRowBytes, kSwizzle64);
        const uint32_t pixels = this->pixel_row(this->warp / 4 * 64);
        const uint32_t weights = this->shared + p.weight_offset;

        Tile tile = this->tile_at(index);
        typename Base::WeightCursor cursor = this->weight_cursor(index, first_slice);
        const typename Base::Walk walk =
            this->thread < p.walks ? this->walk_of(this->thread) : typename Base::Walk{0, 0, 0, 0, 0};
        this->load_raw(tile, first_slice);
#pragma unroll 1
        for (int i = 0; i < kStages - 2; ++i) {
            this->fetch(cursor, first_slice, end_slice, step);
            copy_commit();
        }
        copy_wait<0>();
        __syncthreads();
        this->walk_rows(walk, tile, 0, 0, p.segment_h);

        int buffer = 0;
        uint32_t means = 0;  // bytes from the first buffer of P to the one being multiplied
        for (; index < p.tiles; index += step) {
            Accumulators<Config> acc;
            clear<Config>(acc);
            Tile next_tile = tile;
#pragma unroll 1
            for (int slice = first_slice; slice < end_slice; ++slice) {
                const bool last_slice = slice + 1 == end_slice, more = !last_slice || index + step < p.tiles;
                if (last_slice && more) next_tile = this->tile_at(index + step);
#pragma unroll 1
                for (int tap = 0; tap < taps; ++tap) {
                    copy_wait<kStages - 3>();
                    publish_shared();
                    __syncthreads();
                    if (tap == 0 && more) this->load_raw(next_tile, last_slice ? first_slice : slice + 1);
                    this->fetch(cursor, first_slice, end_slice, step);
                    copy_commit();
                    wgmma_begin();
                    const uint32_t a = pixels + means + this->tap_offset(tap);
                    const uint32_t b = weights + buffer * Config::kWeightStageBytes;
#pragma unroll
                    for (int k = 0; k < kChunks / 2; ++k)
                        wgmma<Config::kPrecision>(acc[0], at_address(pixel_descriptor, a + k * 2 * p.plane * 16),
                                                  at_address(weight_descriptor, b + k * 32));
                    wgmma_commit();
                    // Raw pixels came with the copies of tap 0, and so have arrived kStages - 2 taps later.
                    if (tap >= kStages - 2 && more)
                        this->walk_rows(walk, next_tile, p.mean_bytes - means, (tap - (kStages - 2)) * p.rows_a_tap,
                                        (tap - (kStages - 3)) * p.rows_a_tap);
                    wgmma_wait<1>();
                    buffer = buffer + 1 == kStages ? 0 : buffer + 1;
                }
                means = p.mean_bytes - means;
            }
            wgmma_wait<0>();
            __syncthreads();  // the means are no longer read, and their place free for the accumulators
            if (p.split > 1)
                store_split<Config>(acc, this->shared, p.split, rank, p.epilogue, this->output_view(), this->warp * 16,
                                    tile.m_tile * Config::kBlockN, this->lane,
                                    [&](int row) { return this->output_pixel(tile, row); });
            else
                store_tile<Config>(acc, this->shared + p.mean_bytes - means, p.epilogue, this->output_view(),
                                   this->warp * 16, tile.m_tile * Config::kBlockN, this->lane,
                                   [&](int row) { return this->output_pixel(tile, row); });
            tile = next_tile;
        }
        copy_wait<0>();
    }
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kMinBlocks)
    direct_fused_sm90_kernel(const __grid_constant__ DirectFusedParams params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) unsigned char memory[];
    wait_for_previous_kernel();
    DirectFusedSm90<Config>(params, shared_address(memory)).run();
#endif
}

}  // namespace convpool

// SPDX-License-Identifier: Apache-2.0
// Implicit GEMM on Hopper: the same convolution as implicit_gemm, by wgmma.
//
// The sum over taps and channels is one long row of 16-byte chunks, as the weights lie in memory: chunk k is channels
// 8 (k mod C/8) .. of tap k / (C/8). A stage of the ring holds 8 chunks of it, so 64 values (32 of fp32) whatever C is, of
// the tile's pixels (gathered, zeros outside the tensor) and channels, both in wgmma's 128-byte swizzle.
//
// Weights of TF32 come rounded to it; pixels too, or the thread that copied them rounds them. Full fp32 is 3xTF32, of which
// mma/gemm_sums.cuh tells.
#pragma once

#include "families/implicit_gemm_cpasync/rows.h"
#include "gemm/rows.h"
#include "kernels/mma/gemm_sums.cuh"
#include "kernels/ptx/memory.cuh"
#include "kernels/tile/chunk.cuh"

namespace convpool {

template <class Config> struct ImplicitGemmCpAsync {
    using Element = typename Traits<Config::kPrecision>::Element;
    using Stage = GemmStage<Config>;
    static constexpr int kChunks = Stage::kChunks, kPerChunk = Config::kPerChunk, kRowBytes = Stage::kRowBytes;
    static constexpr int kStages = Config::kStages, kPixelBytes = Stage::kPixelBytes, kStageBytes = Stage::kBytes;
    static constexpr int kRowsAtOnce = Config::kThreads / kChunks;
    static constexpr int kRows = Config::kBlockM / kRowsAtOnce, kWeightRows = Config::kBlockN / kRowsAtOnce;
    static_assert(kRowsAtOnce % 8 == 0, "rows that one thread copies have one swizzle");
    static_assert(Config::kBlockM % kRowsAtOnce == 0 && Config::kBlockN % kRowsAtOnce == 0, "whole copies");
    static_assert(kStages >= 3, "one stage under way, two being multiplied");

    // Pixels that tap (0, 0) of kRows output pixels sees, kRowsAtOnce apart. They may lie outside X.
    struct Windows {
        int y[kRows], x[kRows];
        const Element *origin[kRows];  // their place in X

        CONVPOOL_DEVICE Windows(const ImplicitGemmParams &p, int first_pixel) {
            const Shape2d &s = p.shape;
            UNROLLED_FOR (int i = 0; i < kRows; ++i) {
                const int pixel = first_pixel + i * kRowsAtOnce;
                uint32_t n, rest, oy, ox;
                p.div_out_hw.divmod(pixel, n, rest);
                p.div_out_w.divmod(rest, oy, ox);
                // A row past the last pixel is put so far outside X that every tap sees zeros.
                y[i] = pixel < p.pixels ? static_cast<int>(oy) * s.stride_h - s.pad_h : INT32_MIN / 2;
                x[i] = static_cast<int>(ox) * s.stride_w - s.pad_w;
                origin[i] = static_cast<const Element *>(p.x) + ((static_cast<int64_t>(n) * s.h + y[i]) * s.w + x[i]) * s.c;
            }
        }
    };

    // Copies of this thread: one chunk of kRows pixels and of kWeightRows filters, kRowsAtOnce apart. Steps are counted from the
    // first of the block. A copy of no bytes reads nothing, so its source may lie anywhere.
    struct Copies {
        const ImplicitGemmParams &p;
        const uint32_t shared;
        const GemmTile<Config> &tile;
        const Windows &windows;  // not a member itself: arrays would keep the others from registers until loops are unrolled
        const int thread, chunk, thread_row;
        const uint32_t place =
            thread_row * kRowBytes + ((chunk ^ (thread_row & 7)) << 4);         // of the first row in a stage, swizzled
        const int64_t row_length = static_cast<int64_t>(p.chunks) * kPerChunk;  // elements from a filter to the next
        const Element *const weight_row = static_cast<const Element *>(p.w) + (tile.first_channel + thread_row) * row_length;
        const int weight_rows = p.shape.m - tile.first_channel - thread_row;  // valid ones from this thread's on
        const int2 part = tile.steps_of((p.chunks + kChunks - 1) / kChunks, p);
        const int first_step = part.x, steps = part.y;

        CONVPOOL_DEVICE void weights(int step, int stage) const {
            const int k = (first_step + step) * kChunks + chunk;  // of the row of all taps' chunks
            const uint32_t dst = shared + stage * kStageBytes + kPixelBytes + place;
            const Element *src = weight_row + k * kPerChunk;
            UNROLLED_FOR (int i = 0; i < kWeightRows; ++i) {
                copy_chunk(dst + i * kRowsAtOnce * kRowBytes, src, k < p.chunks && i * kRowsAtOnce < weight_rows);
                src += kRowsAtOnce * row_length;
            }
        }
        CONVPOOL_DEVICE void pixels(int step, int stage) const {
            const Shape2d &s = p.shape;
            const int k = (first_step + step) * kChunks + chunk;
            uint32_t tap, c, a, b;
            p.div_tap_chunks.divmod(k, tap, c);
            p.div_kw.divmod(tap, a, b);
            const bool inside = k < p.chunks;
            const int dy = a * s.dilation_h, dx = b * s.dilation_w;
            const int shift = (dy * s.w + dx) * s.c + c * kPerChunk;
            const uint32_t dst = shared + stage * kStageBytes + place;
            UNROLLED_FOR (int i = 0; i < kRows; ++i) {
                const bool valid = inside && static_cast<uint32_t>(windows.y[i] + dy) < static_cast<uint32_t>(s.h) &&
                                   static_cast<uint32_t>(windows.x[i] + dx) < static_cast<uint32_t>(s.w);
                copy_chunk(dst + i * kRowsAtOnce * kRowBytes, windows.origin[i] + shift, valid);
            }
        }
        // Rounds what this thread copied to TF32, in place; the tensor cores would truncate.
        CONVPOOL_DEVICE void round_pixels(int stage) const {
            uint32_t at = shared + stage * kStageBytes + place;
#pragma unroll 1
            for (int i = 0; i < kRows; ++i) {
                const uint4 v = load_shared(at);
                store_shared(at, {round_to_tf32(v.x), round_to_tf32(v.y), round_to_tf32(v.z), round_to_tf32(v.w)});
                at += kRowsAtOnce * kRowBytes;
            }
        }
    };

    // Weights of the first stages to shared memory and the others on their way to the L2, a part by each pixel tile: a line is
    // a step's part of a filter. Only where the kernel before does not write them, since this does not wait for it.
    static CONVPOOL_DEVICE void fetch_early_weights(const Copies &copies) {
        const ImplicitGemmParams &p = copies.p;
        const GemmTile<Config> &tile = copies.tile;
        const int steps = copies.steps;
#pragma unroll 1
        for (int step = 0; step < kStages - 2 && step < steps; ++step) copies.weights(step, step);
        const int later = max(steps - (kStages - 2), 0), rows = min(Config::kBlockN, p.shape.m - tile.first_channel);
        const int pixel_tiles = gridDim.x / (p.split * p.m_tiles);
        const char *const from =
            reinterpret_cast<const char *>(static_cast<const Element *>(p.w) + tile.first_channel * copies.row_length) +
            static_cast<int64_t>(copies.first_step + kStages - 2) * kRowBytes;
        for (int i = tile.pixel_tile * Config::kThreads + copies.thread; i < later * rows; i += pixel_tiles * Config::kThreads)
            prefetch_line(from + static_cast<int64_t>(i / later) * copies.row_length * sizeof(Element) + i % later * kRowBytes);
    }

    static CONVPOOL_DEVICE void run(const ImplicitGemmParams &p, uint32_t shared) {
        const GemmTile<Config> tile(p);
        const int thread = threadIdx.x, warp = thread >> 5, chunk = thread % kChunks, thread_row = thread / kChunks;
        const Windows windows(p, tile.first_pixel + thread_row);
        const Copies copies{p, shared, tile, windows, thread, chunk, thread_row};
        const int steps = copies.steps;
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
        if constexpr (pushes<Config>) {
            if (p.split > 1) {
                const auto sums = pushed_sums<Config>(p, shared, tile.rank);
                if (thread == 0) sums.init();
                __syncthreads();
                sums.arrive();
            }
        }
#endif

        // Fill all but two stages of the ring: one is being multiplied, and products of the one before may still read it.
        const uint32_t pixels = shared + warp / 4 * 64 * kRowBytes, weights = shared + kPixelBytes;
        if (p.early_weights) fetch_early_weights(copies);
        wait_for_previous_kernel();
        let_next_kernel_start();
#pragma unroll 1
        for (int step = 0; step < kStages - 2; ++step) {
            if (step < steps) {
                if (!p.early_weights) copies.weights(step, step);
                copies.pixels(step, step);
            }
            copy_commit();  // a group for every step, also past the last: copy_wait counts them
        }

        // Multiply.
        GemmSums<Config> sums;
        int stage = 0, free_stage = kStages - 2;
#pragma unroll 1
        for (int step = 0; step < steps; ++step) {
            copy_wait<kStages - 3>();
            if constexpr (Config::kPrecision == Precision::kTF32)
                if (p.round_pixels) copies.round_pixels(stage);
            // Hazard: each thread makes what it copied visible to the tensor cores before the barrier.
            publish_shared();
            __syncthreads();
            if (step + kStages - 2 < steps) {
                copies.pixels(step + kStages - 2, free_stage);
                copies.weights(step + kStages - 2, free_stage);
            }
            copy_commit();
            sums.multiply(step, pixels + stage * kStageBytes, weights + stage * kStageBytes);
            stage = stage + 1 == kStages ? 0 : stage + 1;
            free_stage = free_stage + 1 == kStages ? 0 : free_stage + 1;
        }
        sums.finish();

        // Store.
        copy_wait<0>();
        __syncthreads();  // the ring's place is free for the accumulators
        store_gemm_tile<Config>(sums.acc, shared, p, tile);
    }
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kMinBlocks)
    implicit_gemm_cpasync_kernel(const __grid_constant__ ImplicitGemmParams params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) unsigned char memory[];
    ImplicitGemmCpAsync<Config>::run(params, shared_address(memory));
#endif
}

}  // namespace convpool

namespace convpool::implicit_gemm_cpasync {

struct Instances {
    template <size_t kRow> static const void *kernel(int) {
        return reinterpret_cast<const void *>(&implicit_gemm_cpasync_kernel<TileConfigOf<kRows, kRow>>);
    }
};

}  // namespace convpool::implicit_gemm_cpasync

// SPDX-License-Identifier: Apache-2.0
// Implicit GEMM on Hopper, fed by TMA: the products of implicit_gemm_cpasync over stages that one thread fills.
//
// A stage is 128 bytes of channels of one tap. TMA's im2col mode copies those of kBlockM consecutive output pixels, whatever
// rows and images these lie in; it knows padding, strides and dilation, and writes zeros outside the tensor and past its
// channels. A box of the weights is the same of kBlockN channels of Y. Both arrive in wgmma's 128-byte swizzle, and fp32 that
// is multiplied as TF32 rounded to it. A tap's channels fill whole stages, so the last of them is zeros in part.
//
//     kWarps      wait until a stage is full, multiply, and hand back the stage before, whose products are done
//     a thread    of a warp besides, or of a warpgroup, waits until a stage is empty, and copies
//
// With an activation in front (16-bit types), which leaves zeros as they are, warps take their rows of pixels through registers.
//
// Of a convolution behind an upsampling (gemm/phases.h) a tile is of one phase: its pixels are places in X where windows start, its
// taps the phase's, and its sums go to every scale-th row and column of Y. The tiles of all phases and channels of the same places
// are neighbours, so that X comes from the L2 but once.
#pragma once

#include <type_traits>

#include "families/implicit_gemm_tma/params.h"
#include "families/implicit_gemm_tma/rows.h"
#include "kernels/mma/gemm_sums.cuh"
#include "kernels/mma/multiply_slice.cuh"
#include "kernels/prologue/prologue.cuh"
#include "kernels/ptx/tma.cuh"

namespace convpool {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// A tile of one phase of an upsampled convolution.
template <class Config> struct PhaseTile : GemmTile<Config> {
    int row, column;              // of the phase
    int shift_y, shift_x;         // from the window's start to the pixel of its first tap
    int first_row, first_column;  // of its taps among those of all phases
    int steps;

    CONVPOOL_DEVICE explicit PhaseTile(const ImplicitGemmTmaParams &p) : GemmTile<Config>(p.gemm) {
        const PhaseAxis &rows = p.phases.rows, &columns = p.phases.columns;
        uint32_t phase, channel_tile, v, u;
        p.div_phase_tiles.divmod(this->first_channel / Config::kBlockN, phase, channel_tile);
        p.div_columns.divmod(phase, v, u);
        this->first_channel = channel_tile * Config::kBlockN;
        row = v, column = u;
        shift_y = rows.shift(row), shift_x = columns.shift(column);
        first_row = rows.taps_before(row), first_column = columns.taps_before(column);
        steps = rows.taps(row) * columns.taps(column) * p.div_tap_steps.divisor;
    }
};
template <class Config> struct PlainTile : GemmTile<Config> {
    CONVPOOL_DEVICE explicit PlainTile(const ImplicitGemmTmaParams &p) : GemmTile<Config>(p.gemm) {}
};

template <class Config, bool kActivates, bool kPhases> struct ImplicitGemmTma {
    using Stage = GemmStage<Config>;
    static constexpr int kStages = Config::kStages, kChannels = Stage::kChunks * Config::kPerChunk;
    static constexpr int kGroups = Config::kWarps / 4;
    static constexpr int kCopyThreads = im2col_copy_threads(Config::kPrecision, Config::kBlockM, Config::kBlockN);
    static_assert(kStages >= 3, "a stage under way, two being multiplied");
    static_assert(Stage::kPixelBytes % 1024 == 0 && Stage::kBytes % 1024 == 0, "the swizzle is one of addresses");

    const ImplicitGemmTmaParams &p;
    const uint32_t shared;
    const std::conditional_t<kPhases, PhaseTile<Config>, PlainTile<Config>> tile;
    const int first_step, steps;

    CONVPOOL_DEVICE ImplicitGemmTma(const ImplicitGemmTmaParams &params, uint32_t memory)
        : p(params), shared(of_the_warp(memory)), tile(params), first_step(tile.steps_of(all_steps(), p.gemm).x),
          steps(tile.steps_of(all_steps(), p.gemm).y) {}

    // Of all blocks that share the tile's sum.
    CONVPOOL_DEVICE int all_steps() const {
        if constexpr (kPhases) return tile.steps;
        else return p.steps;
    }

    // A number that all lanes have, so that the compiler knows, and does not compute it again in every step.
    CONVPOOL_DEVICE static uint32_t of_the_warp(uint32_t number) { return __shfl_sync(0xffffffffu, number, 0); }
    CONVPOOL_DEVICE uint32_t stage_at(int i) const { return shared + i * Stage::kBytes; }
    CONVPOOL_DEVICE uint32_t full(int i) const { return shared + kStages * Stage::kBytes + i * 8; }
    CONVPOOL_DEVICE uint32_t empty(int i) const { return full(kStages + i); }

    // What a step of this block copies: 128 bytes of channels of one tap.
    struct Slice {
        int tap, channel;
    };
    CONVPOOL_DEVICE Slice slice_of(int step) const {
        uint32_t tap, slice;
        p.div_tap_steps.divmod(first_step + step, tap, slice);
        return {static_cast<int>(tap), static_cast<int>(slice) * kChannels};
    }
    // Row and column of a tap of the filter, or of the phase.
    CONVPOOL_DEVICE int2 place_of(int tap) const {
        uint32_t a, b;
        if constexpr (kPhases) p.div_phase_columns[tile.column].divmod(tap, a, b);
        else p.gemm.div_kw.divmod(tap, a, b);
        return {static_cast<int>(a), static_cast<int>(b)};
    }
    // A tap's number among those of W.
    CONVPOOL_DEVICE int weight_tap(int tap) const {
        if constexpr (kPhases) {
            const int2 place = place_of(tap);
            return (tile.first_row + place.x) * p.gemm.shape.kw + tile.first_column + place.y;
        } else {
            return tap;
        }
    }
    CONVPOOL_DEVICE void copy_weights(int step, int stage) const {
        const Slice slice = slice_of(step);
        barrier_expect(full(stage), Stage::kBytes);  // the pixels', too
        copy_box(stage_at(stage) + Stage::kPixelBytes, &p.w_map, full(stage), slice.channel, tile.first_channel,
                 weight_tap(slice.tap));
    }

    // The thread that copies. A column of the im2col map begins at the tile's first pixel; TMA goes on from there.
    CONVPOOL_DEVICE void copy() const {
        const ImplicitGemmParams &g = p.gemm;
        const Shape2d &s = g.shape;
        const int early = g.early_weights ? min(kStages, steps) : 0;
#pragma unroll 1
        for (int step = 0; step < early; ++step) copy_weights(step, step);
        if (g.early_weights) {  // the others on their way to the L2, a part by each pixel tile
            const int pixel_tiles = gridDim.x / (g.split * g.m_tiles);
#pragma unroll 1
            for (int step = early + tile.pixel_tile; step < steps; step += pixel_tiles) {
                const Slice slice = slice_of(step);
                prefetch_box(&p.w_map, slice.channel, tile.first_channel, weight_tap(slice.tap));
            }
        }
        wait_for_previous_kernel();
        let_next_kernel_start();
        // X may be what the kernel before has written.
        uint32_t n, rest, oy, ox;
        g.div_out_hw.divmod(tile.first_pixel, n, rest);
        g.div_out_w.divmod(rest, oy, ox);
        const int y = static_cast<int>(oy) * s.stride_h - s.pad_h, x = static_cast<int>(ox) * s.stride_w - s.pad_w;
        Ring<kStages> ring;
#pragma unroll 1
        for (int step = 0; step < steps; ++step) {
            barrier_wait(empty(ring.buffer), ring.parity ^ 1);
            if (step >= early) copy_weights(step, ring.buffer);
            const Slice slice = slice_of(step);
            int2 place = place_of(slice.tap);
            if constexpr (kPhases) place.x += tile.shift_y, place.y += tile.shift_x;
            copy_column(stage_at(ring.buffer), &p.x_map, full(ring.buffer), slice.channel, x, y, n, place.y * s.dilation_w,
                        place.x * s.dilation_h);
            ring.next();
        }
    }

    CONVPOOL_DEVICE void store(const Accumulators<Config> &acc) const {
        if constexpr (kPhases) {
            const ImplicitGemmParams &g = p.gemm;
            const Shape2d &s = g.shape;
            const int out_h = p.phases.out_h, out_w = p.phases.out_w;
            const int64_t out_pixels = static_cast<int64_t>(out_h) * out_w;
            const OutputView view{g.y, s.y_channels_last ? 1 : out_pixels, s.m, g.y_vectors != 0};
            store_gemm_tile<Config>(acc, shared, g, tile, view, [&](int of_tile) {
                const int pixel = tile.first_pixel + of_tile;
                uint32_t n, rest, y, x;
                g.div_out_hw.divmod(pixel, n, rest);
                g.div_out_w.divmod(rest, y, x);
                const int oy = y * p.phases.rows.scale + tile.row, ox = x * p.phases.columns.scale + tile.column;
                const int64_t place = static_cast<int64_t>(oy) * out_w + ox;
                return OutputPixel{s.y_channels_last ? (n * out_pixels + place) * s.m : n * s.m * out_pixels + place,
                                   pixel < g.pixels && oy < out_h && ox < out_w};
            });
        } else {
            store_gemm_tile<Config>(acc, shared, p.gemm, tile);
        }
    }

    // Warps that multiply pixels as they lie in the stage.
    CONVPOOL_DEVICE void multiply() const {
        wait_for_previous_kernel();
        let_next_kernel_start();
        const uint32_t rows = of_the_warp(threadIdx.x / 128) * 64 * Stage::kRowBytes;
        const bool elected = threadIdx.x % 128 == 0;
        GemmSums<Config> sums;
        Ring<kStages> ring;
        // Hazard: a stage is handed back one step later, when the products that read it are done.
        int held = -1;  // the stage that products still under way read
#pragma unroll 1
        for (int step = 0; step < steps; ++step) {
            barrier_wait(full(ring.buffer), ring.parity);
            const uint32_t at = stage_at(ring.buffer);
            sums.multiply(step, at + rows, at + Stage::kPixelBytes);
            if (held >= 0 && elected) barrier_arrive(empty(held));
            held = ring.buffer;
            ring.next();
        }
        sums.finish();
        barrier_of_first<Config::kThreads>();  // the ring's place is free for the accumulators
        store(sums.acc);
    }

    // Warps that take their rows of pixels through registers, where they activate them.
    CONVPOOL_DEVICE void multiply_activated() const {
        constexpr int kParts = Stage::kChunks / 2;  // of a stage: what one product takes
        wait_for_previous_kernel();
        let_next_kernel_start();
        const PackedPrologue<Config::kPrecision> f(p.prologue);
        const int lane = threadIdx.x & 31, row = threadIdx.x / 32 * 16 + (lane & 15);
        GemmSums<Config> sums;
        Ring<kStages> ring;
        int held = -1;
        uint32_t even[kParts][4], odd[kParts][4];  // pixels of a step, while products under way read those of the one before
        auto multiply_step = [&](uint32_t (&pixels)[kParts][4]) {
            barrier_wait(full(ring.buffer), ring.parity);
            const uint32_t at = stage_at(ring.buffer);
#pragma unroll
            for (int k = 0; k < kParts; ++k) {
                load_matrix(pixels[k], at + row * Stage::kRowBytes + (((2 * k + (lane >> 4)) ^ (row & 7)) << 4));
                const uint4 v = f(uint4{pixels[k][0], pixels[k][1], pixels[k][2], pixels[k][3]});
                pixels[k][0] = v.x, pixels[k][1] = v.y, pixels[k][2] = v.z, pixels[k][3] = v.w;
            }
            wgmma_wait<0>();  // the step before: its stage is free, and so are its registers
            if (held >= 0 && lane == 0) barrier_arrive(empty(held));
            sums.multiply(pixels, at + Stage::kPixelBytes);
            held = ring.buffer;
            ring.next();
        };
#pragma unroll 1
        for (int step = 0; step < steps; step += 2) {
            multiply_step(even);
            if (step + 1 < steps) multiply_step(odd);
        }
        sums.finish();
        barrier_of_first<Config::kThreads>();
        store(sums.acc);
    }

    CONVPOOL_DEVICE void run() const {
        const bool copies = threadIdx.x == Config::kThreads;
        if (copies) {
            prefetch_map(&p.x_map);
            prefetch_map(&p.w_map);
            for (int i = 0; i < kStages; ++i) {
                barrier_init(full(i), 1);
                barrier_init(empty(i), kActivates ? Config::kWarps : kGroups);
            }
            publish_barriers();
            if constexpr (pushes<Config>)
                if (p.gemm.split > 1) pushed_sums<Config>(p.gemm, shared, tile.rank).init();
        }
        __syncthreads();
        if constexpr (pushes<Config>)
            if (p.gemm.split > 1) pushed_sums<Config>(p.gemm, shared, tile.rank).arrive();
        // setmaxnreg moves registers from the warpgroup that copies to those that hold three sums.
        if (threadIdx.x < Config::kThreads) {
            if constexpr (kCopyThreads == 128) take_registers<232>();
            if constexpr (kActivates) multiply_activated();
            else multiply();
        } else {
            if constexpr (kCopyThreads == 128) give_registers<40>();
            if (copies) copy();
        }
    }
};

#endif

template <class Config, bool kActivates, bool kPhases>
__global__ void __launch_bounds__(Config::kThreads + im2col_copy_threads(Config::kPrecision, Config::kBlockM, Config::kBlockN),
                                  Config::kMinBlocks)
    implicit_gemm_tma_kernel(const __grid_constant__ ImplicitGemmTmaParams params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) unsigned char memory[];
    ImplicitGemmTma<Config, kActivates, kPhases>(params, shared_address(memory)).run();
#endif
}

}  // namespace convpool

namespace convpool::implicit_gemm_tma {

// From rows of implicit_gemm_tma to kernels.

struct Instances : RowsOf<kRows> {
    template <size_t kRow> static const void *kernel(bool activates) {
        constexpr Tile t = kRows[kRow].tile;
        constexpr Precision kPrecision = kRows[kRow].precision;
        constexpr bool kPhases = kRows[kRow].operand == gemm::Operand::kPhasesOfW;
        using Config = TileConfigOf<kRows, kRow>;
        if constexpr (can_activate(kPrecision, t.block_m, t.block_n, t.min_blocks))
            if (activates) return reinterpret_cast<const void *>(&implicit_gemm_tma_kernel<Config, true, kPhases>);
        return reinterpret_cast<const void *>(&implicit_gemm_tma_kernel<Config, false, kPhases>);
    }
};

}  // namespace convpool::implicit_gemm_tma

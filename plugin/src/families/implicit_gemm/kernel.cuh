// SPDX-License-Identifier: Apache-2.0
// Implicit GEMM: a convolution over a channels-last tensor, the second stage of direct_gemm (over the box means) and of
// filter_fused (over X itself).
//
// GEMM row r is output pixel r in the order image, row, column; column m an output channel; the sum runs over taps, then
// channels within a tap in slices of kChunks chunks. A stage of the ring holds one slice of one tap: the pixels that the
// tile's rows see through the tap (gathered, zeros outside the tensor) and the tap's weights.
//
// A tile of a convolution behind an upsampling (gemm/phases.h) is of one phase: its pixels are places in X where windows start, its
// taps the phase's, and its sums go to every scale-th row and column of Y.
#pragma once

#include "families/implicit_gemm/rows.h"
#include "gemm/rows.h"
#include "kernels/epilogue/store_rows.cuh"
#include "kernels/mma/multiply_slice.cuh"
#include "kernels/ptx/memory.cuh"
#include "kernels/tile/phase.cuh"

namespace convpool {

template <class Config, bool kPhases> struct ImplicitGemm {
    using Element = typename Traits<Config::kPrecision>::Element;
    static constexpr int kChunks = Config::kChunks, kPerChunk = Config::kPerChunk;
    static constexpr int kStageBytes = Config::kPixelStageBytes + Config::kWeightStageBytes;
    static constexpr int kSharedBytes = Config::kStages * kStageBytes;
    static constexpr int kRowsAtOnce = Config::kThreads / kChunks;
    static constexpr int kRows = Config::kBlockM / kRowsAtOnce;  // pixels that a thread copies
    static_assert(Staging<Config>::kBytes <= kSharedBytes, "accumulators pass through the ring's place");
    static_assert(kRowsAtOnce % 8 == 0, "rows that one thread copies have one swizzle");
    static_assert(Config::kBlockM % kRowsAtOnce == 0, "every thread copies the same number of pixels");

    // The tile's part of W and of a window: taps (a, b) up to `columns` in a row, from the tap `first` of W on, see pixels from
    // (shift_y, shift_x) of a window on.
    struct Taps {
        int count, columns, first, shift_y, shift_x;
    };

    // Pixels that tap (0, 0) of kRows output pixels sees, kRowsAtOnce apart. They may lie outside X.
    struct Windows {
        int y[kRows], x[kRows];
        int64_t origin[kRows];  // their element of X

        CONVPOOL_DEVICE Windows(const ImplicitGemmParams &p, int first_pixel, const Taps &taps) {
            const Shape2d &s = p.shape;
            UNROLLED_FOR (int i = 0; i < kRows; ++i) {
                const int pixel = first_pixel + i * kRowsAtOnce;
                uint32_t n, rest, oy, ox;
                p.div_out_hw.divmod(pixel, n, rest);
                p.div_out_w.divmod(rest, oy, ox);
                // A row past the last pixel is put so far outside X that every tap sees zeros.
                y[i] = pixel < p.pixels ? static_cast<int>(oy) * s.stride_h - s.pad_h + taps.shift_y : INT32_MIN / 2;
                x[i] = static_cast<int>(ox) * s.stride_w - s.pad_w + taps.shift_x;
                origin[i] = ((static_cast<int64_t>(n) * s.h + y[i]) * s.w + x[i]) * s.c;
            }
        }
    };

    // Copies of this thread: one chunk of kRows pixels, kRowsAtOnce apart, and of as many weights as that takes. next() copies the
    // next slice of a tap, then the next tap.
    struct Copies {
        const ImplicitGemmParams &p;
        const uint32_t shared;
        const Windows &windows;  // not a member itself: arrays would keep the others from registers until loops are unrolled
        const Taps taps;
        const int first_channel, chunk, thread_row;
        const int64_t row_length = static_cast<int64_t>(p.shape.kh) * p.shape.kw * p.shape.c;  // from a filter to the next
        int slice = 0, a = 0, b = 0, tap = taps.first;  // to copy next: slice of tap (a, b), which W has at `tap`

        CONVPOOL_DEVICE void next(int stage) {
            const Shape2d &s = p.shape;
            const int c = slice * Config::kSliceChannels + chunk * kPerChunk;
            const uint32_t dst = shared + stage * kStageBytes + chunk_in_row(thread_row, chunk);
            copy_pixels(dst, c, c < s.c);
            copy_weights(dst + Config::kPixelStageBytes, c, c < s.c);
            if (++slice == p.slices) {
                slice = 0;
                ++tap;
                if (++b == taps.columns) {
                    b = 0;
                    ++a;
                    if constexpr (kPhases) tap += s.kw - taps.columns;
                }
            }
        }
        CONVPOOL_DEVICE void copy_pixels(uint32_t dst, int c, bool channel_inside) const {
            const Shape2d &s = p.shape;
            const Element *const x = static_cast<const Element *>(p.x);
            const int dy = a * s.dilation_h, dx = b * s.dilation_w;
            const int64_t tap_shift = (static_cast<int64_t>(dy) * s.w + dx) * s.c + c;
            UNROLLED_FOR (int i = 0; i < kRows; ++i) {
                const bool valid = channel_inside && static_cast<uint32_t>(windows.y[i] + dy) < static_cast<uint32_t>(s.h) &&
                                   static_cast<uint32_t>(windows.x[i] + dx) < static_cast<uint32_t>(s.w);
                copy_chunk(dst + i * kRowsAtOnce * Config::kRowBytes, valid ? x + windows.origin[i] + tap_shift : x, valid);
            }
        }
        CONVPOOL_DEVICE void copy_weights(uint32_t dst, int c, bool channel_inside) const {
            const Element *const w = static_cast<const Element *>(p.w);
            const Element *src = w + (first_channel + thread_row) * row_length + tap * p.shape.c + c;
            UNROLLED_FOR (int row = 0; row < Config::kBlockN; row += kRowsAtOnce) {
                if (Config::kBlockN % kRowsAtOnce != 0 && row + thread_row >= Config::kBlockN) break;
                const bool valid = channel_inside && first_channel + thread_row + row < p.shape.m;
                copy_chunk(dst + row * Config::kRowBytes, valid ? src + row * row_length : w, valid);
            }
        }
    };

    static CONVPOOL_DEVICE void run(const PhasedGemmParams &params, uint32_t shared) {
        const ImplicitGemmParams &p = params.gemm;
        const Shape2d &s = p.shape;
        const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
        const int warp_m = warp / Config::kWarpsN, warp_n = warp % Config::kWarpsN;
        uint32_t m_tile, pixel_tile;
        p.div_m_tiles.divmod(blockIdx.x, pixel_tile, m_tile);
        const TilePhase phase(params.phases, m_tile);  // of a kernel without phases, unused
        const int first_pixel = pixel_tile * Config::kBlockM;
        const int first_channel = (kPhases ? phase.channel_tile : m_tile) * Config::kBlockN;
        const Taps taps = kPhases
                              ? Taps{phase.taps(), phase.columns(), phase.weight_tap({0, 0}, s.kw), phase.shift_y, phase.shift_x}
                              : Taps{s.kh * s.kw, s.kw, 0, 0, 0};
        const int chunk = thread % kChunks, thread_row = thread / kChunks;
        const Windows windows(p, first_pixel + thread_row, taps);
        Copies copies{p, shared, windows, taps, first_channel, chunk, thread_row};

        Accumulators<Config> acc;  // (kFragmentsM x 16 pixels, kFragmentsN x 8 channels)
        clear<Config>(acc);
        uint32_t pixel_rows[Config::kFragmentsM];  // this lane's ldmatrix rows in stage 0
        UNROLLED_FOR (int mi = 0; mi < Config::kFragmentsM; ++mi)
            pixel_rows[mi] = shared + pixel_lane_offset(warp_m * Config::kWarpM + mi * 16, lane);
        const uint32_t weight_lane = shared + Config::kPixelStageBytes + weight_lane_offset<Config>(warp_n, lane);

        // Fill the ring but for one stage. A group is committed for every step, also past the last, so that the number of
        // groups under way always is the same.
        const int steps = taps.count * p.slices;
        int fetched = 0;
#pragma unroll 1
        for (int stage = 0; stage < Config::kStages - 1; ++stage) {
            if (fetched < steps) copies.next(stage);
            ++fetched;
            copy_commit();
        }

        // Multiply a stage while the others arrive.
        int stage = 0, free_stage = Config::kStages - 1;
#pragma unroll 1
        for (int i = 0; i < steps; ++i) {
            copy_wait<Config::kStages - 2>();
            __syncthreads();  // the stage is complete for all, and free_stage, multiplied last, read by all
            if (fetched < steps) copies.next(free_stage);
            ++fetched;
            copy_commit();
            multiply<Config, Pixels::kRows>(acc, pixel_rows, stage * kStageBytes, 0, weight_lane + stage * kStageBytes);
            free_stage = stage;
            stage = stage + 1 == Config::kStages ? 0 : stage + 1;
        }
        copy_wait<0>();
        __syncthreads();  // the ring's place is free for the accumulators

        store(acc, shared, p, phase, first_pixel, first_channel);
    }

    // The tile's sums to Y. phase: of a kernel for phases.
    static CONVPOOL_DEVICE void store(const Accumulators<Config> &acc, uint32_t shared, const ImplicitGemmParams &p,
                                      const TilePhase &phase, int first_pixel, int first_channel) {
        const Shape2d &s = p.shape;
        const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
        const int first_row = warp / Config::kWarpsN * Config::kWarpM;
        const int channel = first_channel + warp % Config::kWarpsN * Config::kWarpN;
        if constexpr (kPhases) {
            store_tile<Config>(acc, shared, p.epilogue, phase.view(p), first_row, channel, lane,
                               [&](int row) { return phase.output_at(p, phase.place_in_y(p, first_pixel + row)); });
            return;
        }
        const int64_t pixels = static_cast<int64_t>(s.out_h) * s.out_w;
        const OutputView view{p.y, s.y_channels_last ? 1 : pixels, s.m, p.y_vectors != 0};
        store_tile<Config>(acc, shared, p.epilogue, view, first_row, channel, lane, [&](int row) {
            const int pixel = first_pixel + row;
            uint32_t n, rest;
            p.div_out_hw.divmod(pixel, n, rest);
            return OutputPixel{s.y_channels_last ? static_cast<int64_t>(pixel) * s.m
                                                 : static_cast<int64_t>(n) * s.m * pixels + rest,
                               pixel < p.pixels};
        });
    }
};

template <class Config, bool kPhases>
__global__ void __launch_bounds__(Config::kThreads, Config::kMinBlocks)
    implicit_gemm_kernel(const __grid_constant__ PhasedGemmParams params) {
    if constexpr (kCompiledForThisArch<Config::kPrecision>) {
        extern __shared__ __align__(1024) unsigned char memory[];
        wait_for_previous_kernel();
        ImplicitGemm<Config, kPhases>::run(params, shared_address(memory));
    }
}

}  // namespace convpool

namespace convpool::implicit_gemm {

struct Instances {
    template <size_t kRow> static const void *kernel(int) {
        constexpr bool kPhases = kRows[kRow].operand == gemm::Operand::kPhasesOfW;
        return reinterpret_cast<const void *>(&implicit_gemm_kernel<TileConfigOf<kRows, kRow>, kPhases>);
    }
};

}  // namespace convpool::implicit_gemm

// Implicit GEMM: a convolution over a channels-last tensor, the second stage of direct_gemm (over the box means) and of
// filter_fused (over X itself).
//
// GEMM row r is output pixel r in the order image, row, column; column m an output channel; the sum runs over taps, then
// channels within a tap in slices of kChunks chunks. A stage of the ring holds one slice of one tap: the pixels that the
// tile's rows see through the tap (gathered, zeros outside the tensor) and the tap's weights.
#pragma once

#include "kernels/epilogue/store_tile.cuh"
#include "kernels/mma/multiply_slice.cuh"
#include "kernels/ptx/cp_async.cuh"

namespace convpool {

template <class Config> struct ImplicitGemm {
    using Element = typename Traits<Config::kPrecision>::Element;
    static constexpr int kChunks = Config::kChunks, kPerChunk = Config::kPerChunk;
    static constexpr int kStageBytes = Config::kPixelStageBytes + Config::kWeightStageBytes;
    static constexpr int kSharedBytes = Config::kStages * kStageBytes;
    static constexpr int kRowsAtOnce = Config::kThreads / kChunks;
    static constexpr int kRows = Config::kBlockM / kRowsAtOnce;  // pixels that a thread copies
    static_assert(Staging<Config>::kBytes <= kSharedBytes, "accumulators pass through the ring's place");
    static_assert(kRowsAtOnce % 8 == 0, "rows that one thread copies have one swizzle");
    static_assert(Config::kBlockM % kRowsAtOnce == 0, "every thread copies the same number of pixels");

    static CONVPOOL_DEVICE void run(const ImplicitGemmParams &p, uint32_t shared) {
        const Shape2d &s = p.shape;
        const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
        const int warp_m = warp / Config::kWarpsN, warp_n = warp % Config::kWarpsN;
        uint32_t m_tile, pixel_tile;
        p.div_m_tiles.divmod(blockIdx.x, pixel_tile, m_tile);
        const int first_pixel = pixel_tile * Config::kBlockM, first_channel = m_tile * Config::kBlockN;
        const int chunk = thread % kChunks, thread_row = thread / kChunks;

        // The pixels this thread copies: position of tap (0, 0), and the element it has in x (may lie outside).
        int y0[kRows], x0[kRows];
        int64_t origin[kRows];
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            const int pixel = first_pixel + thread_row + i * kRowsAtOnce;
            uint32_t n, rest, oy, ox;
            p.div_out_hw.divmod(pixel, n, rest);
            p.div_out_w.divmod(rest, oy, ox);
            y0[i] = pixel < p.pixels ? static_cast<int>(oy) * s.stride_h - s.pad_h : INT32_MIN / 2;
            x0[i] = static_cast<int>(ox) * s.stride_w - s.pad_w;
            origin[i] = ((static_cast<int64_t>(n) * s.h + y0[i]) * s.w + x0[i]) * s.c;
        }
        const Element *x = static_cast<const Element *>(p.x), *w = static_cast<const Element *>(p.w);
        const int64_t row_length = static_cast<int64_t>(s.kh) * s.kw * s.c;

        int fetch_slice = 0, fetch_a = 0, fetch_b = 0, fetch_tap = 0;
        auto fetch = [&](int stage) {
            const int c = fetch_slice * Config::kSliceChannels + chunk * kPerChunk;
            const bool channel_inside = c < s.c;
            const int dy = fetch_a * s.dilation_h, dx = fetch_b * s.dilation_w;
            uint32_t dst = shared + stage * kStageBytes + chunk_in_row(thread_row, chunk);
            const int64_t tap_shift = (static_cast<int64_t>(dy) * s.w + dx) * s.c + c;
#pragma unroll
            for (int i = 0; i < kRows; ++i) {
                const bool valid = channel_inside && static_cast<uint32_t>(y0[i] + dy) < static_cast<uint32_t>(s.h) &&
                                   static_cast<uint32_t>(x0[i] + dx) < static_cast<uint32_t>(s.w);
                copy_chunk(dst + i * kRowsAtOnce * Config::kRowBytes, valid ? x + origin[i] + tap_shift : x, valid);
            }
            dst += Config::kPixelStageBytes;
            const Element *src = w + (first_channel + thread_row) * row_length + fetch_tap * s.c + c;
#pragma unroll
            for (int row = 0; row < Config::kBlockN; row += kRowsAtOnce) {
                if (Config::kBlockN % kRowsAtOnce != 0 && row + thread_row >= Config::kBlockN) break;
                const bool valid = channel_inside && first_channel + thread_row + row < s.m;
                copy_chunk(dst + row * Config::kRowBytes, valid ? src + row * row_length : w, valid);
            }
            if (++fetch_slice == p.slices) {
                fetch_slice = 0;
                ++fetch_tap;
                if (++fetch_b == s.kw) {
                    fetch_b = 0;
                    ++fetch_a;
                }
            }
        };

        Accumulators<Config> acc;
        clear<Config>(acc);
        uint32_t pixel_rows[Config::kFragmentsM];
#pragma unroll
        for (int mi = 0; mi < Config::kFragmentsM; ++mi)
            pixel_rows[mi] = shared + pixel_lane_offset(warp_m * Config::kWarpM + mi * 16, lane);
        const uint32_t weight_lane = shared + Config::kPixelStageBytes + weight_lane_offset<Config>(warp_n, lane);

        const int steps = s.kh * s.kw * p.slices;
        int fetched = 0;
#pragma unroll 1
        for (int stage = 0; stage < Config::kStages - 1; ++stage) {
            if (fetched < steps) fetch(stage);
            ++fetched;
            copy_commit();
        }
        int stage = 0, free_stage = Config::kStages - 1;
#pragma unroll 1
        for (int i = 0; i < steps; ++i) {
            copy_wait<Config::kStages - 2>();
            __syncthreads();
            if (fetched < steps) fetch(free_stage);
            ++fetched;
            copy_commit();
            multiply<Config, Pixels::kRows>(acc, pixel_rows, stage * kStageBytes, 0, weight_lane + stage * kStageBytes);
            free_stage = stage;
            stage = stage + 1 == Config::kStages ? 0 : stage + 1;
        }
        copy_wait<0>();
        __syncthreads();  // the ring's place is free for the accumulators

        const int64_t pixels = static_cast<int64_t>(s.out_h) * s.out_w;
        const OutputView view{p.y, s.y_channels_last ? 1 : pixels, s.m, p.y_vectors != 0};
        store_tile<Config>(acc, shared, p.epilogue, view, warp_m * Config::kWarpM, first_channel + warp_n * Config::kWarpN, lane,
                           [&](int row) {
                               const int pixel = first_pixel + row;
                               uint32_t n, rest;
                               p.div_out_hw.divmod(pixel, n, rest);
                               return OutputPixel{s.y_channels_last ? static_cast<int64_t>(pixel) * s.m
                                                                    : static_cast<int64_t>(n) * s.m * pixels + rest,
                                                  pixel < p.pixels};
                           });
    }
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kMinBlocks)
    implicit_gemm_kernel(const __grid_constant__ ImplicitGemmParams params) {
    if constexpr (kCompiledForThisArch<Config::kPrecision>) {
        extern __shared__ __align__(1024) unsigned char memory[];
        wait_for_previous_kernel();
        ImplicitGemm<Config>::run(params, shared_address(memory));
    }
}

}  // namespace convpool

// direct_fused on Hopper for 1x1 kernels and 2x2 pooling: a GEMM whose pixels are box means formed on the way in.
//
// A step is 128 bytes of channels. Each thread loads one chunk of the four pixels under a few output pixels, a step ahead and
// into registers, applies the prologue, and stores their mean where wgmma reads it, in the 128-byte swizzle; weights come by
// cp.async through a ring of kStages. X is read once for every kBlockN output channels, at the speed of memory.
#pragma once

#include "prologue.cuh"
#include "tensor_tile.cuh"
#include "wgmma.cuh"

namespace convpool {

template <class Config> struct PointwiseSm90 {
    static constexpr Precision kPrecision = Config::kPrecision;
    using Element = typename Traits<kPrecision>::Element;
    static constexpr int kChunks = 8, kPerChunk = Config::kPerChunk, kRowBytes = kChunks * 16;
    static constexpr int kStages = Config::kStages, kMeanStages = kPointwiseMeanStages;
    static constexpr int kMeanBytes = Config::kBlockM * kRowBytes, kWeightBytes = Config::kBlockN * kRowBytes;
    static constexpr int kRowsAtOnce = Config::kThreads / kChunks;
    static constexpr int kRows = Config::kBlockM / kRowsAtOnce, kWeightRows = Config::kBlockN / kRowsAtOnce;
    static_assert(Config::kWarpM == 16 && Config::kWarpsM % 4 == 0, "a warp holds 16 rows of a warpgroup's product");
    static_assert(kRowsAtOnce % 8 == 0, "rows that one thread copies have one swizzle");
    static_assert(Config::kBlockM % kRowsAtOnce == 0 && Config::kBlockN % kRowsAtOnce == 0, "whole copies");
    static_assert(kStages >= 3 && kMeanStages >= 3, "one stage under way, two being multiplied");

    // The four pixels under an output pixel: where the first is, and a bit for each that lies in X.
    struct Window {
        const uint4 *first;
        uint32_t inside;
    };

    static CONVPOOL_DEVICE void run(const PointwiseParams &p, uint32_t shared) {
        const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
        const int rank = blockIdx.x % p.split;
        uint32_t m_tile, pixel_tile;
        p.div_m_tiles.divmod(blockIdx.x / p.split, pixel_tile, m_tile);
        const int first_pixel = pixel_tile * Config::kBlockM, first_channel = m_tile * Config::kBlockN;
        const int chunk = thread % kChunks, thread_row = thread / kChunks;
        const uint32_t place = thread_row * kRowBytes + ((chunk ^ (thread_row & 7)) << 4);
        const uint32_t means = shared + kStages * kWeightBytes;

        Window windows[kRows];
#pragma unroll
        for (int i = 0; i < kRows; ++i) windows[i] = window_of(p, first_pixel + thread_row + i * kRowsAtOnce);
        const uint4 *const weight_row = static_cast<const uint4 *>(p.w) + static_cast<int64_t>(first_channel + thread_row) * p.chunks;
        const int weight_rows = p.m - first_channel - thread_row;  // valid ones from this thread's on
        const int all_steps = (p.chunks + kChunks - 1) / kChunks;
        const int first_step = all_steps * rank / p.split, steps = all_steps * (rank + 1) / p.split - first_step;
        wait_for_previous_kernel();
        let_next_kernel_start();

        uint4 pixels[kRows][4], scale{}, shift{};
        auto load_pixels = [&](int step) {
            const int k = (first_step + step) * kChunks + chunk;
            const bool valid = k < p.chunks;
#pragma unroll
            for (int i = 0; i < kRows; ++i)
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    pixels[i][j] = valid && (windows[i].inside >> j & 1)
                                       ? load_once(windows[i].first + k + (j & 1) * p.column + (j >> 1) * p.row)
                                       : uint4{0, 0, 0, 0};
            if (valid && p.prologue.scale != nullptr) {
                scale = static_cast<const uint4 *>(p.prologue.scale)[k];
                shift = static_cast<const uint4 *>(p.prologue.shift)[k];
            }
        };
        auto fetch_weights = [&](int step, int stage) {
            const int k = (first_step + step) * kChunks + chunk;
            const uint32_t dst = shared + stage * kWeightBytes + place;
            const uint4 *src = weight_row + k;
#pragma unroll
            for (int i = 0; i < kWeightRows; ++i) {
                copy_chunk(dst + i * kRowsAtOnce * kRowBytes, src, k < p.chunks && i * kRowsAtOnce < weight_rows);
                src += static_cast<int64_t>(kRowsAtOnce) * p.chunks;
            }
        };

        const uint64_t descriptor = matrix_descriptor(16, 8 * kRowBytes, kSwizzle128);
        const int warp_m = warp % Config::kWarpsM, warp_n = warp / Config::kWarpsM;
        const uint32_t a0 = means + warp_m / 4 * 64 * kRowBytes, b0 = shared + warp_n * Config::kWarpN * kRowBytes;
        load_pixels(0);
#pragma unroll 1
        for (int step = 0; step < kStages - 2; ++step) {
            if (step < steps) fetch_weights(step, step);
            copy_commit();
        }
        Accumulators<Config> acc;
        clear<Config>(acc);
        int stage = 0, free_stage = kStages - 2, mean_stage = 0;
#pragma unroll 1
        for (int step = 0; step < steps; ++step) {
#pragma unroll
            for (int i = 0; i < kRows; ++i)
                store_shared(means + mean_stage * kMeanBytes + place + i * kRowsAtOnce * kRowBytes,
                             mean(pixels[i], windows[i].inside, p.prologue, scale, shift));
            if (step + 1 < steps) load_pixels(step + 1);
            copy_wait<kStages - 3>();
            publish_shared();
            __syncthreads();
            if (step + kStages - 2 < steps) fetch_weights(step + kStages - 2, free_stage);
            copy_commit();
            wgmma_begin();
#pragma unroll
            for (int k = 0; k < kChunks / 2; ++k)
                wgmma<kPrecision>(acc[0], at_address(descriptor, a0 + mean_stage * kMeanBytes + k * 32),
                                  at_address(descriptor, b0 + stage * kWeightBytes + k * 32));
            wgmma_commit();
            wgmma_wait<1>();
            stage = stage + 1 == kStages ? 0 : stage + 1;
            free_stage = free_stage + 1 == kStages ? 0 : free_stage + 1;
            mean_stage = mean_stage + 1 == kMeanStages ? 0 : mean_stage + 1;
        }
        wgmma_wait<0>();
        copy_wait<0>();
        __syncthreads();  // the ring's place is free for the accumulators

        const int64_t out_pixels = static_cast<int64_t>(p.out_h) * p.out_w;
        const OutputView view{p.y, p.y_channels_last ? 1 : out_pixels, p.m, p.y_vectors != 0};
        auto pixel_of = [&](int row) {
            const int pixel = first_pixel + row;
            uint32_t n, rest;
            p.div_out_hw.divmod(pixel, n, rest);
            return OutputPixel{p.y_channels_last ? static_cast<int64_t>(pixel) * p.m
                                                 : static_cast<int64_t>(n) * p.m * out_pixels + rest,
                               pixel < p.pixels};
        };
        const int first_row = warp_m * 16, channel0 = first_channel + warp_n * Config::kWarpN;
        if (p.split > 1)
            store_split<Config>(acc, shared, p.split, rank, p.epilogue, view, first_row, channel0, lane, pixel_of);
        else
            store_tile<Config>(acc, shared, p.epilogue, view, first_row, channel0, lane, pixel_of);
    }

    static CONVPOOL_DEVICE Window window_of(const PointwiseParams &p, int pixel) {
        uint32_t n, rest, oy, ox;
        p.div_out_hw.divmod(pixel, n, rest);
        p.div_out_w.divmod(rest, oy, ox);
        const int y = static_cast<int>(oy) * p.stride_h - p.pad_h, x = static_cast<int>(ox) * p.stride_w - p.pad_w;
        uint32_t inside = 0;
#pragma unroll
        for (int j = 0; j < 4; ++j)
            if (static_cast<uint32_t>(y + (j >> 1) * p.dilation_h) < static_cast<uint32_t>(p.h) &&
                static_cast<uint32_t>(x + (j & 1) * p.dilation_w) < static_cast<uint32_t>(p.w_pixels))
                inside |= 1u << j;
        return {static_cast<const uint4 *>(p.x) + ((static_cast<int64_t>(n) * p.h + y) * p.w_pixels + x) * p.chunks,
                pixel < p.pixels ? inside : 0};
    }

    static CONVPOOL_DEVICE uint32_t word(const uint4 &chunk, int i) {
        return i == 0 ? chunk.x : i == 1 ? chunk.y : i == 2 ? chunk.z : chunk.w;
    }

    // Rounded once. A pixel outside X is zero whatever the prologue would make of it. A word at a time, for few registers.
    static CONVPOOL_DEVICE uint4 mean(const uint4 (&pixels)[4], uint32_t inside, const Prologue &prologue, const uint4 &scale,
                                      const uint4 &shift) {
        constexpr int kPerWord = kPerChunk / 4;
        float sum[kPerChunk];
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            float v[4][kPerWord];
#pragma unroll
            for (int j = 0; j < 4; ++j) unpack_word(word(pixels[j], w), v[j], Element{});
            if (prologue.scale != nullptr) {
                float s[kPerWord], t[kPerWord];
                unpack_word(word(scale, w), s, Element{});
                unpack_word(word(shift, w), t, Element{});
#pragma unroll
                for (int j = 0; j < 4; ++j)
#pragma unroll
                    for (int i = 0; i < kPerWord; ++i) v[j][i] = inside >> j & 1 ? fmaf(s[i], v[j][i], t[i]) : 0.f;
            }
            if (prologue.activation != Activation::kNone) {
#pragma unroll
                for (int j = 0; j < 4; ++j)
#pragma unroll
                    for (int i = 0; i < kPerWord; ++i) v[j][i] = activate(v[j][i], prologue);
            }
#pragma unroll
            for (int i = 0; i < kPerWord; ++i)
                sum[w * kPerWord + i] = ((v[0][i] + v[1][i]) + (v[2][i] + v[3][i])) * 0.25f;
        }
        return pack_chunk<kPrecision>(sum);
    }
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kMinBlocks)
    pointwise_sm90_kernel(const __grid_constant__ PointwiseParams params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) unsigned char memory[];
    PointwiseSm90<Config>::run(params, shared_address(memory));
#endif
}

}  // namespace convpool

// SPDX-License-Identifier: Apache-2.0
// direct_fused for sums so short that they need no loop: few input channels, as images have.
//
// The operands of an output pixel, one for each tap and channel, are box means of X. A lane gathers those of one pixel, a warp's
// lanes neighbouring ones, straight from X in either layout, of W's type or of floats, which it rounds: what pixels share comes
// from the L1. They pass through shared memory into fragments of mma.sync, zeros behind the last. The weights stay in shared
// memory, as fragments too. Warps need nothing of each other, so each goes on to its next 32 pixels by itself.
//
// A layer of 3 channels is bound by instructions: 16 pixels by 64 channels are 16 products and as many chunks to store as lanes.
// So most layers, with Y in chunks and no residual, have an end of their own.
#pragma once

#include "families/few_channels/rows.h"
#include "kernels/epilogue/store_rows.cuh"
#include "kernels/mma/multiply_slice.cuh"
#include "kernels/prologue/prologue.cuh"
#include "kernels/ptx/memory.cuh"
#include "kernels/ptx/numbers.cuh"
#include "kernels/tile/chunk.cuh"

namespace convpool {

template <Precision kPrecision, int kBlockM, int kBlockN, int kWarpsM, int kWarpsN, int kSteps_, int kMinBlocks>
struct FewChannelsConfig : TileConfig<kPrecision, kBlockM / 2, kBlockN, kWarpsM, kWarpsN, 2, kMinBlocks> {
    static constexpr int kSteps = kSteps_;  // of two chunks of operands
    static constexpr int kOperands = few_channels_step(kPrecision) * kSteps,
                         kPixels = 32;  // of a warp at a time, multiplied 16 and 16
    static_assert(kBlockM == kPixels * kWarpsM && kWarpsN == 1, "a pixel for each lane");
};

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800

template <class Config> struct FewChannels {
    static constexpr Precision kPrecision = Config::kPrecision;
    using Element = typename Traits<kPrecision>::Element;
    static constexpr int kSteps = Config::kSteps, kOperands = Config::kOperands, kBlockN = Config::kBlockN;
    static constexpr int kBytes = Config::kElementBytes, kStepOperands = few_channels_step(kPrecision);
    static constexpr bool kFloat = kBytes == 4;  // W is of floats, which are rounded to TF32, X and Y too
    // Bytes from one pixel's operands, or channels of Y, to the next's: eight of 16 bytes, or sixteen of 8, meet in no bank.
    static constexpr int kOperandPitch = kOperands * kBytes + 16, kOutputPitch = kBlockN * kBytes + (kFloat ? 32 : 16);
    static constexpr int kWarpBytes = few_channels_warp_bytes(kSteps, kBlockN), kStagingOffset = Config::kPixels * kOperandPitch;
    static_assert(kWarpBytes == kStagingOffset + Staging<Config>::kWarpBytes, "operands, then accumulators");
    static_assert(16 * kOutputPitch <= Staging<Config>::kWarpBytes, "or channels of Y");

    // A lane's output pixel: where its windows are counted from, in X.
    struct Origin {
        int y, x;
        const char *element;
    };

    const FewChannelsParams &p;
    const uint32_t shared;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const uint32_t bias = shared + p.weight_bytes, mine = bias + p.bias_bytes + warp * kWarpBytes;

    // Bits of the weight of channel m and operand k; zero past the last of either.
    CONVPOOL_DEVICE uint32_t weight(int m, int k) const {
        if (m >= p.shape.m || k >= p.operands) return 0;
        const int64_t element = static_cast<int64_t>(m) * p.operands + k;
        if constexpr (kFloat) return round_to_tf32(static_cast<const uint32_t *>(p.w)[element]);
        return static_cast<const uint16_t *>(p.w)[element];
    }
    // The word of a fragment that begins with operand k.
    CONVPOOL_DEVICE uint32_t weight_word(int m, int k) const {
        return kFloat ? weight(m, k) : weight(m, k) | weight(m, k + 1) << 16;
    }
    // Writes weights, as fragments, and bias, as floats, to shared memory.
    CONVPOOL_DEVICE void prepare() const {
        // Fragment (channels / 8, step): lane 4g + t has channel g, word t of either chunk: operands 2t and 2t + 1, of floats t.
        for (int i = threadIdx.x; i < static_cast<int>(p.weight_bytes) / 8; i += Config::kThreads) {
            const int m = i / (32 * kSteps) * 8 + (i % 32 >> 2);
            const int k = i / 32 % kSteps * kStepOperands + (kFloat ? i & 3 : 2 * (i & 3));
            store_shared_words(shared + i * 8, weight_word(m, k), weight_word(m, k + kStepOperands / 2));
        }
        for (int m = threadIdx.x; m < static_cast<int>(p.bias_bytes) / 4; m += Config::kThreads) {
            const bool valid = p.epilogue.bias != nullptr && m < p.shape.m;
            const float b = valid ? to_float(static_cast<const Element *>(p.epilogue.bias)[m]) : 0.f;
            store_shared_float(bias + m * 4, b);
        }
        __syncthreads();
    }

    // Past the last output pixel all of X is outside (kFewChannelsNowhere).
    CONVPOOL_DEVICE Origin origin_of(int pixel) const {
        uint32_t n, rest, oy, ox;
        p.div_out_hw.divmod(pixel, n, rest);
        p.div_out_w.divmod(rest, oy, ox);
        const int y = static_cast<int>(oy) * p.step_h, x = static_cast<int>(ox) * p.step_w;
        const int64_t element =
            static_cast<int64_t>(n) * p.image + static_cast<int64_t>(y) * p.row + static_cast<int64_t>(x) * p.column;
        return {pixel < p.pixels ? y : kFewChannelsNowhere, x, static_cast<const char *>(p.x) + element * p.x_element_bytes};
    }
    // A pixel of X in W's type, or zero.
    template <bool kFloats> CONVPOOL_DEVICE static float pixel_if(bool wanted, const char *x) {
        if constexpr (kFloat) return load_float_if(wanted, x);
        if constexpr (kFloats) return to_float(from_float<Element>(load_float_if(wanted, x)));
        const uint16_t bits = static_cast<uint16_t>(load_bits_if(wanted, x));
        return to_float(reinterpret_cast<const Element &>(bits));
    }
    // A bit for each operand whose pixel lies in X.
    CONVPOOL_DEVICE uint64_t inside(const Origin &at) const {
        uint64_t rows = 0, columns = 0;
        for (int a = 0; a < p.kh; ++a)
            rows |= static_cast<uint32_t>(at.y + p.rows[a].first) < static_cast<uint32_t>(p.shape.h) ? p.rows[a].operands : 0;
        for (int b = 0; b < p.kw; ++b)
            columns |=
                static_cast<uint32_t>(at.x + p.columns[b].first) < static_cast<uint32_t>(p.shape.w) ? p.columns[b].operands : 0;
        return rows & columns;
    }
    // The mean of a window of f(X), rounded once; zero where the convolution pads.
    template <bool kFloats> CONVPOOL_DEVICE uint32_t mean_bits(const FewChannelsOperand &o, const Origin &at) const {
        constexpr int kPixelBytes = kFloats ? 4 : 2;
        const int y = at.y + o.y, x = at.x + o.x;
        if (static_cast<uint32_t>(y + p.box.pad_h) >= p.pooled_rows || static_cast<uint32_t>(x + p.box.pad_w) >= p.pooled_columns)
            return 0;
        // Pixels outside X count as zero, whatever the prologue would make of them.
        const float scale = channel_value<Element>(p.prologue.scale, o.channel, 1.f);
        const float shift = channel_value<Element>(p.prologue.shift, o.channel, 0.f);
        float sum = 0.f;
#pragma unroll 2
        for (int u = 0; u < p.box.ph; ++u) {
            const int down = u * p.box.dilation_h;
            const bool row = static_cast<uint32_t>(y + down) < static_cast<uint32_t>(p.shape.h);
#pragma unroll 2
            for (int v = 0; v < p.box.pw; ++v) {
                const int right = v * p.box.dilation_w;
                const bool wanted = row && static_cast<uint32_t>(x + right) < static_cast<uint32_t>(p.shape.w);
                const float pixel =
                    pixel_if<kFloats>(wanted, at.element + o.offset + kPixelBytes * (down * p.row + right * p.column));
                sum += wanted ? activate(fmaf(pixel, scale, shift), p.prologue) : 0.f;
            }
        }
        if constexpr (kFloat) return round_to_tf32(__float_as_uint(mean_of(sum, p.box)));
        const Element mean = from_float<Element>(mean_of(sum, p.box));
        return reinterpret_cast<const uint16_t &>(mean);
    }
    // Writes a lane's row of operands to shared memory, 16 bytes at a time: pixels of X where every operand is one (plain), means
    // of windows otherwise.
    CONVPOOL_DEVICE void gather(const Origin &at) const {
        const uint32_t row = mine + lane * kOperandPitch;
        if (p.plain) {
            const uint64_t valid = inside(at);
            const char *x = at.element;
            asm volatile("" : "+l"(x));  // one number, to which offsets are added
            if constexpr (kFloat) {
                auto word = [&](int k) {
                    return round_to_tf32(__float_as_uint(load_float_if(valid >> k & 1, x + p.table[k].offset)));
                };
                UNROLLED_FOR (int k = 0; k < kOperands; k += 4)
                    store_shared(row + k * 4, {word(k), word(k + 1), word(k + 2), word(k + 3)});
            } else if (p.x_float) {
                auto pair = [&](int k) {
                    return pack2(load_float_if(valid >> k & 1, x + p.table[k].offset),
                                 load_float_if(valid >> (k + 1) & 1, x + p.table[k + 1].offset), Element{});
                };
                UNROLLED_FOR (int k = 0; k < kOperands; k += 8)
                    store_shared(row + k * 2, {pair(k), pair(k + 2), pair(k + 4), pair(k + 6)});
            } else {
                auto pair = [&](int k) {
                    return load_bits_if(valid >> k & 1, x + p.table[k].offset) |
                           load_bits_if(valid >> (k + 1) & 1, x + p.table[k + 1].offset) << 16;
                };
                UNROLLED_FOR (int k = 0; k < kOperands; k += 8)
                    store_shared(row + k * 2, {pair(k), pair(k + 2), pair(k + 4), pair(k + 6)});
            }
        } else if (kFloat || p.x_float) {
            gather_means<true>(at, row);
        } else {
            gather_means<false>(at, row);
        }
    }
    // Operands that are means, two at a time in a rolled loop.
    template <bool kFloats> CONVPOOL_DEVICE void gather_means(const Origin &at, uint32_t row) const {
#pragma unroll 1
        for (int k = 0; k < kOperands; k += 2) {
            const uint32_t first = k < p.operands ? mean_bits<kFloats>(p.table[k], at) : 0;
            const uint32_t second = k + 1 < p.operands ? mean_bits<kFloats>(p.table[k + 1], at) : 0;
            if constexpr (kFloat) store_shared_words(row + k * 4, first, second);
            else store_shared_word(row + k * 2, first | second << 16);
        }
    }

    // acc[16 pixels][kBlockN channels] = bias + operands[16][kOperands] weights[kBlockN][kOperands]^T.
    CONVPOOL_DEVICE static void multiply(Accumulators<Config> &acc, const uint32_t (&pixels)[kSteps][4], uint32_t weights,
                                         uint32_t first_bias) {
        UNROLLED_FOR (int ni = 0; ni < Config::kFragmentsN; ++ni) {
            load_constant_pair(first_bias + ni * 32, acc[0][ni][0], acc[0][ni][1]);
            acc[0][ni][2] = acc[0][ni][0];
            acc[0][ni][3] = acc[0][ni][1];
            uint32_t b[kSteps][2];
            UNROLLED_FOR (int step = 0; step < kSteps; ++step)
                load_constant_pair(weights + (ni * kSteps + step) * 256, b[step][0], b[step][1]);
            UNROLLED_FOR (int step = 0; step < kSteps; ++step) mma<kPrecision>(acc[0][ni], pixels[step], b[step][0], b[step][1]);
        }
    }

    // Stores 16 pixels in whole chunks of channels, with no activation, ReLU or LeakyReLU: the end that most layers have.
    CONVPOOL_DEVICE void store_chunks(Accumulators<Config> &acc, int first_pixel, int channel) const {
        const Epilogue &e = p.epilogue;
        const Element tag{};
        const uint32_t source = mine + kStagingOffset, target = source + (lane >> 2) * kOutputPitch + (lane & 3) * 2 * kBytes;
        const bool relu = e.activation == Activation::kRelu;
        if (e.activation == Activation::kLeakyRelu) {
            UNROLLED_FOR (int ni = 0; ni < Config::kFragmentsN; ++ni) rectify(acc[0][ni], e);
        }
        __syncwarp();  // the chunks before have been read
        UNROLLED_FOR (int ni = 0; ni < Config::kFragmentsN; ++ni) {
            const float (&v)[4] = acc[0][ni];
            if constexpr (kFloat) {
                uint32_t bits[4];
                UNROLLED_FOR (int i = 0; i < 4; ++i)
                    bits[i] = relu ? larger(__float_as_uint(v[i]), 0, tag) : __float_as_uint(v[i]);
                store_shared_words(target + ni * 32, bits[0], bits[1]);
                store_shared_words(target + ni * 32 + 8 * kOutputPitch, bits[2], bits[3]);
            } else {
                uint32_t upper = pack2(v[0], v[1], tag), lower = pack2(v[2], v[3], tag);
                if (relu) {
                    upper = larger(upper, 0, tag);
                    lower = larger(lower, 0, tag);
                }
                store_shared_word(target + ni * 16, upper);
                store_shared_word(target + ni * 16 + 8 * kOutputPitch, lower);
            }
        }
        __syncwarp();
        // A lane stores chunk lane % kAcross of every kRowsAtOnce-th pixel: neighbours store neighbouring chunks.
        constexpr int kPerChunk = Config::kPerChunk, kAcross = kBlockN / kPerChunk, kRowsAtOnce = 32 / kAcross;
        const int row = lane / kAcross, chunk = lane % kAcross;
        const bool inside = channel + chunk * kPerChunk < p.shape.m;
        Element *const y =
            static_cast<Element *>(p.y) + static_cast<int64_t>(first_pixel + row) * p.shape.m + channel + chunk * kPerChunk;
        UNROLLED_FOR (int i = 0; i < 16 / kRowsAtOnce; ++i) {
            const uint4 v = load_shared(source + (i * kRowsAtOnce + row) * kOutputPitch + chunk * 16);
            store_global_if(inside && first_pixel + i * kRowsAtOnce + row < p.pixels,
                            y + static_cast<int64_t>(i) * kRowsAtOnce * p.shape.m, v);
        }
    }

    // The same for floats with the channels first.  Eight lanes hold eight pixels of a channel and store these 32 bytes together.
    CONVPOOL_DEVICE void store_planes(Accumulators<Config> &acc, int first_pixel, int channel, int64_t out_pixels) const {
        const Epilogue &e = p.epilogue;
        const int first_channel = channel + 2 * (lane & 3);
        UNROLLED_FOR (int half = 0; half < 2; ++half) {
            const int pixel = first_pixel + 8 * half + (lane >> 2);
            uint32_t n, rest;
            p.div_out_hw.divmod(pixel, n, rest);
            float *y = static_cast<float *>(p.y) + (static_cast<int64_t>(n) * p.shape.m + first_channel) * out_pixels + rest;
            UNROLLED_FOR (int ni = 0; ni < Config::kFragmentsN; ++ni) {
                if (half == 0 && rectifies(e)) rectify(acc[0][ni], e);
                UNROLLED_FOR (int i = 0; i < 2; ++i)
                    if (pixel < p.pixels && first_channel + ni * 8 + i < p.shape.m)
                        y[(ni * 8 + i) * out_pixels] = acc[0][ni][2 * half + i];
            }
        }
    }

    CONVPOOL_DEVICE void run() const {
        const Shape2d &s = p.shape;
        const int64_t out_pixels = static_cast<int64_t>(s.out_h) * s.out_w;
        const OutputView view{p.y, s.y_channels_last ? 1 : out_pixels, s.m, p.y_vectors != 0, p.y_runs != 0};
        Epilogue after = p.epilogue;
        after.bias = nullptr;  // the sums begin with it
        const bool simple = after.residual == nullptr && (after.activation == Activation::kNone || rectifies(after));
        const bool chunks = simple && view.vectors, planes = kFloat && simple && !s.y_channels_last;
        wait_for_previous_kernel();
        let_next_kernel_start();
        prepare();
        uint32_t weights = shared + lane * 8, first_bias = bias + (lane & 3) * 8;
        asm volatile("" : "+r"(weights), "+r"(first_bias));  // known from here on, so nothing is loaded from there before
        const uint32_t everyones = mine + kStagingOffset - warp * Staging<Config>::kWarpBytes;  // as store_tile counts
        const int step = gridDim.x * Config::kWarps * Config::kPixels;
#pragma unroll 1
        for (int first = (blockIdx.x * Config::kWarps + warp) * Config::kPixels; first < p.pixels; first += step) {
            // Gather the operands of 32 pixels, a lane each.
            const Origin origin = origin_of(first + lane);
            __syncwarp();  // the place is free
            gather(origin);
            __syncwarp();
            // Multiply and store 16 of them at a time, kBlockN channels at a time.
#pragma unroll 1
            for (int half = 0; half < 2; ++half) {
                const int first_pixel = first + half * 16;
                uint32_t pixels[kSteps][4];  // (16 pixels, 16 operands) each
                UNROLLED_FOR (int k = 0; k < kSteps; ++k)
                    load_matrix(pixels[k], mine + (half * 16 + (lane & 15)) * kOperandPitch + k * 32 + (lane >> 4) * 16);
                auto pixel_of = [&](int row) {
                    const int pixel = first_pixel + row;
                    if (s.y_channels_last) return OutputPixel{static_cast<int64_t>(pixel) * s.m, pixel < p.pixels};
                    uint32_t n, rest;
                    p.div_out_hw.divmod(pixel, n, rest);
                    return OutputPixel{static_cast<int64_t>(n) * s.m * out_pixels + rest, pixel < p.pixels};
                };
#pragma unroll 1
                for (int channel = 0; channel < s.m; channel += kBlockN) {
                    Accumulators<Config> acc;  // (16 pixels, kBlockN channels)
                    multiply(acc, pixels, weights + channel * kSteps * 32, first_bias + channel * 4);
                    if (chunks) store_chunks(acc, first_pixel, channel);
                    else if (planes) store_planes(acc, first_pixel, channel, out_pixels);
                    else store_tile<Config>(acc, everyones, after, view, 0, channel, lane, pixel_of);
                }
            }
        }
    }
};

#endif

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kMinBlocks)
    few_channels_kernel(const __grid_constant__ FewChannelsParams params) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    extern __shared__ __align__(1024) unsigned char memory[];
    FewChannels<Config>{params, shared_address(memory)}.run();
#endif
}

namespace few_channels {

struct Instances {
    template <size_t kRow> static const void *kernel(int) {
        constexpr Tile t = kRows[kRow].tile;
        using Config = FewChannelsConfig<kRows[kRow].precision, t.block_m, t.block_n, t.warps, 1, t.steps, t.min_blocks>;
        return reinterpret_cast<const void *>(&few_channels_kernel<Config>);
    }
};

}  // namespace few_channels
}  // namespace convpool

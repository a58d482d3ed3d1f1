// What the host tells a kernel: plain structs passed by value.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace convpool {

enum class Precision : int32_t { kF16, kBF16, kTF32, kTF32x3 };
enum class Activation : int32_t { kNone, kRelu, kLeakyRelu, kTanh, kSigmoid, kClip };

// n / d and n % d for 0 <= n < 2^31 by one multiplication.
struct FastDiv {
    uint32_t divisor = 1, multiplier = 0, shift = 0;

    FastDiv() = default;
    explicit FastDiv(uint32_t d) : divisor(d) {
        if (d == 1) return;  // multiplier 0 marks it
        while ((1u << shift) < d) ++shift;
        multiplier = static_cast<uint32_t>(((uint64_t{1} << (31 + shift)) + d - 1) / d);
    }
#ifdef __CUDACC__
    __device__ __forceinline__ uint32_t div(uint32_t n) const {
        return multiplier == 0 ? n : __umulhi(n, multiplier) >> (shift - 1);
    }
    __device__ __forceinline__ void divmod(uint32_t n, uint32_t &q, uint32_t &r) const {
        q = div(n);
        r = n - q * divisor;
    }
#endif
};

// f(x) = activation(scale[channel] * x + shift[channel]), before X is padded with zeros.
struct Prologue {
    const void *scale, *shift;  // null: 1 and 0
    Activation activation;      // kNone, kRelu or kLeakyRelu
    float alpha;
};

struct Epilogue {
    const void *bias;      // null: none
    const void *residual;  // null: none
    Activation activation;
    float alpha, beta;
};

struct BoxMean {
    int32_t ph, pw, stride_h, stride_w, dilation_h, dilation_w, pad_h, pad_w;
    float count, inverse_count;  // ph * pw of the problem, whatever its rank
    int32_t count_is_power_of_two;
};

// A rank-1 problem is one of height 1.
struct Shape2d {
    int32_t n, c, m;
    int32_t h, w;                                                              // X
    int32_t pooled_h, pooled_w;                                                // AveragePool(X)
    int32_t out_h, out_w;                                                      // Y
    int32_t kh, kw, stride_h, stride_w, dilation_h, dilation_w, pad_h, pad_w;  // Conv over the pooled tensor
    int32_t x_channels_last, y_channels_last;
};

constexpr int kRunPixels = 4;  // of a channel of Y, channels first: stored together

constexpr int kMaxTaps = 81;  // of direct_fused

// direct_fused. Lengths in chunks of 16 bytes unless said otherwise.
struct DirectFusedParams {
    const void *x, *w;
    void *y;
    Prologue prologue;
    Epilogue epilogue;
    BoxMean box;
    Shape2d shape;
    int32_t x_chunked, w_chunked;  // rows of channels are whole aligned chunks: cp.async
    int32_t y_vectors;             // rows of channels of Y, residual and bias are whole aligned chunks
    int32_t y_runs;                // channels first: rows of pixels of Y and residual are whole aligned runs
    int32_t tile_images, tile_h_log2, tile_w_log2;
    int32_t tiles_h, tiles_w, m_tiles, tiles;
    int32_t slices;          // channel slices
    int32_t split;           // thread blocks of a cluster that share the slices
    int32_t resident;        // every weight of the block's slices stays in shared memory
    int32_t weight_stages;   // buffers of one tap and slice each
    int32_t halo_h, halo_w;  // box means per image of a tile
    int32_t raw_h, raw_w;    // pixels of X they cover
    int32_t taps;
    int32_t box_pairs;                  // windows of 2x2, one apart
    int32_t segments, segment_h;        // the rows of box means a thread walks down
    int32_t walks;                      // tile_images * segments * halo_w * kChunks
    int32_t phase_pitch;                // chunks between column phases; a row has stride_w phases
    int32_t plane;                      // chunks between planes of P: all positions of one channel chunk
    int32_t raw_offset, weight_offset;  // bytes into shared memory
    FastDiv div_m_tiles, div_tiles_w, div_tiles_h, div_raw_h, div_halo_w, div_stride_w, div_segments;
    int32_t tap_offsets[kMaxTaps];  // bytes from an output pixel's place in P to what a tap of it reads
};

// Shared memory of a direct_tma block, in bytes; `plane` in box means of 16 bytes, raw_* in pixels of one column parity.
struct DirectTmaShared {
    int weight_stage, raw_columns, raw_rows, raw_offset, plane, mean_offset, barrier_offset, bytes;
};
constexpr DirectTmaShared direct_tma_shared(int subtiles, int block_n, int kernel, int stage_taps, int stages, int raw_stages,
                                            int mean_stages) {
    DirectTmaShared s{};
    s.weight_stage = stage_taps * block_n * 64;
    s.raw_offset = stages * s.weight_stage;
    s.raw_columns = 8 + kernel / 2;
    s.raw_rows = 2 * s.raw_columns;
    // Two columns of neighbours, stored at once by eight lanes with four chunks, meet in no bank: 2 modulo 8.
    s.plane = kernel == 1 ? 66 : 290;
    const int means = mean_stages * subtiles * 4 * s.plane * 16;
    const int raw_stage = subtiles * 2 * s.raw_columns * s.raw_rows * 64;
    s.mean_offset = s.raw_offset + raw_stages * raw_stage;
    s.barrier_offset = s.mean_offset + means;
    s.bytes = s.barrier_offset + 2 * (stages + raw_stages + mean_stages) * 8;
    return s;
}

// direct_fused by TMA: families/direct_tma/kernel.cuh.
struct DirectTmaParams {
    CUtensorMap x_map[2];  // X [n,h,w/2,c]: even columns, odd columns
    CUtensorMap w_map;     // W [taps,m,c], a view
    void *y;
    Epilogue epilogue;
    int32_t images, out_h, out_w, m;
    int32_t pad_h, pad_w;  // of X
    int32_t slices, tiles;
    FastDiv div_m_tiles, div_tiles_w, div_tiles_h;
    Prologue prologue;
    int32_t h, w, c;   // of X
    int32_t resident;  // all weights fit into their ring: copied once
};

// direct_fused for 1x1 kernels and 2x2 pooling: families/pointwise/kernel.cuh. Lengths in chunks of 16 bytes.
struct PointwiseParams {
    const void *x, *w;
    void *y;
    Prologue prologue;
    Epilogue epilogue;
    int32_t h, w_pixels, chunks, m, out_h, out_w;
    int32_t stride_h, stride_w, dilation_h, dilation_w, pad_h, pad_w;  // from output pixels to their windows in X
    int32_t column, row;                                               // between pixels of a window
    int32_t y_channels_last, y_vectors;
    int32_t pixels;  // n * out_h * out_w
    int32_t split;   // thread blocks of a cluster that share the sum
    int32_t tiles;
    FastDiv div_out_w, div_out_hw, div_m_tiles;
};

// What a tap and channel see of X: their window's first pixel, and the bytes to it, from where the output pixel's are counted.
struct FewChannelsOperand {
    int32_t offset, y, x, channel;
};
// A row or column of taps: the same along one axis, and a bit for each of its operands.
struct FewChannelsTaps {
    uint64_t operands;
    int32_t first;
};
constexpr int kMaxOperands = 64;
constexpr int kFewChannelsNowhere = -(1 << 30);  // outside X, whatever is added

// direct_fused for few input channels: families/few_channels/kernel.cuh. Lengths in elements of X.
struct FewChannelsParams {
    const void *x, *w;  // x: of floats where x_float
    void *y;
    Prologue prologue;
    Epilogue epilogue;
    BoxMean box;
    Shape2d shape;
    int32_t plain;  // every operand is a pixel of X
    int32_t x_float, x_element_bytes;
    int32_t y_vectors, y_runs;
    int32_t operands;                      // of an output pixel: taps by channels
    uint32_t weight_bytes, bias_bytes;     // in shared memory
    int32_t step_h, step_w;                // pixels of X from one output pixel to the next
    uint32_t pooled_rows, pooled_columns;  // of AveragePool(X), in pixels of X
    int32_t channel, column, row;          // from one to the next
    int64_t image;
    int32_t pixels;  // of Y
    FastDiv div_out_w, div_out_hw;
    int32_t kh, kw;
    FewChannelsOperand table[kMaxOperands];
    FewChannelsTaps rows[kMaxOperands], columns[kMaxOperands];
};
// Shared memory of a few_channels warp: 32 pixels' operands, 16 bytes apart, then accumulators of 16.
constexpr int few_channels_warp_bytes(int steps, int block_n) { return 32 * (steps * 32 + 16) + 16 * (block_n + 8) * 4; }

// Shared memory of a pointwise block, in bytes: weights, box means (or accumulators on their way out), pixels of X.
struct PointwiseShared {
    int weight_stage, mean_offset, pixel_offset, pixel_stage, bytes;
};
constexpr PointwiseShared pointwise_shared(int block_m, int block_n, int warps, int warp_n, int stages) {
    PointwiseShared s{};
    s.weight_stage = block_n * 128;
    s.mean_offset = stages * s.weight_stage;
    const int means = 3 * block_m * 128, staging = warps * 16 * ((warp_n < 64 ? warp_n : 64) + 8) * 4;
    s.pixel_offset = s.mean_offset + (means > staging ? means : staging);
    s.pixel_stage = 4 * block_m * 128;
    s.bytes = s.pixel_offset + (stages - 1) * s.pixel_stage;
    return s;
}

// implicit GEMM over a channels-last tensor: direct_gemm and filter_fused.
struct ImplicitGemmParams {
    const void *x, *w;  // x [n,h,w,c], w [m,kh,kw,c], c a whole number of chunks
    void *y;
    Epilogue epilogue;
    Shape2d shape;  // shape.h, w: of x here; pooled_* unused
    int32_t y_vectors, y_runs;
    int32_t pixels;  // n * out_h * out_w
    int32_t slices, m_tiles;
    int32_t split;          // thread blocks of a cluster that share the sum
    int32_t round_pixels;   // sm90, TF32: x is not rounded to it
    int32_t early_weights;  // sm90: the kernel before this one does not write w, so it is read before that ends
    int32_t chunks;         // of a filter: taps times those of a tap
    FastDiv div_out_w, div_out_hw, div_m_tiles, div_tap_chunks, div_kw, div_split;
};

// The same fed by TMA: families/implicit_gemm_tma/kernel.cuh.
struct Im2colGemmParams {
    CUtensorMap x_map;        // X [n,h,w,c] by im2col: columns of a tile's output pixels
    CUtensorMap w_map;        // W [taps,m,c], a view
    ImplicitGemmParams gemm;  // x, w, slices, chunks, div_tap_chunks and round_pixels unused
    Prologue prologue;        // of a kernel that activates: an activation alone
    int32_t steps;            // of 128 bytes of channels
    FastDiv div_tap_steps;    // those of a tap
};

// Threads of a block that do not multiply: a warp, or a warpgroup that hands its registers to those that hold three sums.
constexpr int im2col_copy_threads(Precision precision, int block_m, int block_n) {
    return precision == Precision::kTF32x3 && block_m * block_n > 64 * 128 ? 128 : 32;
}

// Whether accumulators leave a thread the registers for a step's pixels; with more of them ptxas waits for every product.
constexpr bool im2col_activates(int block_m, int block_n, int min_blocks) {
    return block_m <= 128 && (block_n <= 64 || (block_n <= 128 && min_blocks == 1));
}

// Where in an image windows start, along rows and along columns: from `lower` on in steps of `strides`, before the image's
// size + `upper`. TMA's im2col mode walks over them, and on to the next image.
struct Im2colBox {
    int32_t lower[2], upper[2];
    uint32_t strides[2];
};

// How the passes before an implicit GEMM write fp32: as it is, rounded to TF32, or as the two TF32 numbers whose sum it is to
// 21 bits, kHalfChannels big ones and then their small ones.
enum class NumberFormat : int32_t { kAsIs, kTF32, kTF32Halves };
constexpr int kHalfChannels = 16;

// Box means of f(X), or a copy where ph = pw = 1, to channels last, channels padded to whole chunks with zeros.
struct BoxMeanParams {
    const void *x;
    void *out;
    Prologue prologue;
    BoxMean box;
    NumberFormat format;
    int32_t n, c, h, w, out_h, out_w, chunks, x_channels_last, x_chunked;  // chunks: of X, padded; halves count once
    FastDiv div_chunks, div_out_w, div_out_h, div_strips;
};

// Weights [m,kh,kw,c] to [m,fused_h,fused_w,chunks]: summed over the pooling window and divided by its size, or, with a
// window of 1, only padded.
struct WeightParams {
    const void *w;
    void *out;
    BoxMean box;
    int32_t m, c, kh, kw, tap_step_h, tap_step_w;  // taps of the conv, in steps of the fused kernel
    int32_t fused_h, fused_w, fused_dilation_h, fused_dilation_w;
    int32_t chunks;
    NumberFormat format;
};

// generic, normalised to rank 3 with leading ones.
struct GenericParams {
    const void *x, *w;
    void *y;
    Prologue prologue;
    Epilogue epilogue;
    int64_t outputs;
    int32_t c_per_group, m_per_group, m, c;
    int32_t in[3], pooled[3], out[3];
    int32_t pool_kernel[3], pool_strides[3], pool_pads[3], pool_dilations[3];
    int32_t kernel[3], strides[3], pads[3], dilations[3];
    int32_t x_channels_last, y_channels_last, x_float;
    float count;
};

}  // namespace convpool

// SPDX-License-Identifier: Apache-2.0
// Parameters of the kernels of all families: plain structs passed by value.
#pragma once

#include <cstddef>
#include <cstdint>

namespace convpool {

enum class Precision : int32_t { kF16, kBF16, kTF32, kTF32x3 };
inline constexpr size_t kPrecisions = 4;
enum class Activation : int32_t { kNone, kRelu, kLeakyRelu, kTanh, kSigmoid, kClip, kSilu };

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

// f(x) = activation(scale[channel] * x + shift[channel]), before X is padded with zeros. A kernel that does not say more takes
// a rectifying activation, and a scale and shift that all images share.
struct Prologue {
    const void *scale, *shift;  // null: 1 and 0
    Activation activation;      // kNone, kRelu, kLeakyRelu or kSilu
    float alpha;
    int32_t image_step;  // from an image's scale and shift to the next one's; 0: all share them
};

// The forms of a prologue. General: a SiLU, or scale and shift by image; the passes before an implicit GEMM have kernels for it.
enum class PrologueForm : int32_t { kNone, kRectifying, kGeneral };

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

// The shared memory by which the blocks of a cluster push parts of a tile's sum to each other (kernels/epilogue/pushed_sums.cuh).
constexpr int kPushedHead = 128;     // a barrier
constexpr int kPartBytes = 32 * 16;  // of a fragment, 16 pixels x 8 channels of floats

// Bytes of a block, for a tile's fragments.
constexpr int64_t pushed_bytes(int split, int fragments) {
    return split == 1 ? 0 : kPushedHead + int64_t{split} * ((fragments + split - 1) / split) * kPartBytes;
}

}  // namespace convpool

// SPDX-License-Identifier: Apache-2.0
// direct_rs: the prologue f(x) = activation(scale * x + shift) of pixels as ldmatrix gives them, in X's type.
//
// A word of a lane is of the same channels in all pixels of a slice, so scales and shifts stay in registers. Pixels outside X are zero
// as copied, and stay as they are where a shift might make f(0) another number.
#pragma once

#include "families/direct_rs/block.cuh"
#include "kernels/prologue/packed_prologue.cuh"
#include "kernels/ptx/packed_math.cuh"

namespace convpool {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

template <class Config> struct DirectRsPrologue {
    using Element = typename Traits<Config::kPrecision>::Element;
    static constexpr RsPrologue kKind = Config::kPrologue;
    static constexpr bool kAffine = kKind == RsPrologue::kRelu || kKind == RsPrologue::kAffine;
    static constexpr int kPool = Config::kPool, kPixels = Config::kKernel + kPool - 1,
                         kRows = kPixels + kPool;  // that a lane sees
    static_assert(!kAffine || kRows * kPixels <= 32, "a bit for each pixel");

    uint32_t scale[Config::kSteps][2], shift[Config::kSteps][2];  // of this lane's words: (step, chunk)
    uint32_t slope;
    uint32_t inside = ~0u;  // a bit for each pixel of two output rows: whether it lies in X

    CONVPOOL_DEVICE explicit DirectRsPrologue(const Prologue &p) {
        if constexpr (kKind != RsPrologue::kNone) {
            slope = packed(p.activation == Activation::kLeakyRelu ? p.alpha : 1.f);
#pragma unroll
            for (int k = 0; k < Config::kSteps; ++k)
#pragma unroll
                for (int chunk = 0; chunk < 2; ++chunk) scale[k][chunk] = packed(1.f), shift[k][chunk] = packed(0.f);
        }
    }
    // Of a slice's channels, or a part's; zeros past the last, where X is zero too.
    template <class Block> CONVPOOL_DEVICE void load(const Block &block, int slice, int part) {
        if constexpr (kAffine) {
            const Prologue &p = block.p.prologue;
            if (p.scale == nullptr) return;
#pragma unroll
            for (int k = 0; k < Config::kSteps; ++k)
#pragma unroll
                for (int chunk = 0; chunk < 2; ++chunk) {
                    const int at = slice * Config::kChunks + 2 * (part + k) + chunk;
                    const bool valid = at * Config::kPerChunk < block.p.c;
                    const int word = at * 4 + (block.lane & 3);
                    scale[k][chunk] = valid ? static_cast<const uint32_t *>(p.scale)[word] : 0;
                    shift[k][chunk] = valid ? static_cast<const uint32_t *>(p.shift)[word] : 0;
                }
        }
    }
    // Finds which pixels of a subtile lie in X.
    template <class Block> CONVPOOL_DEVICE void start_tile(const Block &block, int subtile) {
        if constexpr (kAffine) {
            if (block.p.prologue.scale == nullptr) return;
            const typename Block::Corner corner = block.corner_of(subtile);
            const int y = (corner.y + block.warp % 4 * 2 % Config::kSide) * kPool - block.p.pad_h;
            const int x = (corner.x + (block.lane >> 2) % Config::kSide) * kPool - block.p.pad_w;
            inside = 0;
#pragma unroll
            for (int row = 0; row < kRows; ++row)
#pragma unroll
                for (int i = 0; i < kPixels; ++i)
                    if (static_cast<uint32_t>(y + row) < static_cast<uint32_t>(block.p.h) &&
                        static_cast<uint32_t>(x + i) < static_cast<uint32_t>(block.p.w))
                        inside |= 1u << (row * kPixels + i);
        }
    }
    // f of a row of pixels.
    CONVPOOL_DEVICE void apply(uint32_t (&words)[Config::kSteps][2][kPixels], int row) const {
        if constexpr (kKind != RsPrologue::kNone) {
#pragma unroll
            for (int i = 0; i < kPixels; ++i)
                if (!kAffine || (inside >> (row * kPixels + i) & 1)) {
#pragma unroll
                    for (int k = 0; k < Config::kSteps; ++k)
#pragma unroll
                        for (int chunk = 0; chunk < 2; ++chunk)
                            words[k][chunk][i] = f(words[k][chunk][i], scale[k][chunk], shift[k][chunk]);
                }
        }
    }

private:
    CONVPOOL_DEVICE static uint32_t packed(float v) { return PackedPrologue<Config::kPrecision>::packed(v); }
    // max(u, slope * u) of u = scale * v + shift is an activation whose slope is at most 1; 1 stands for none.
    CONVPOOL_DEVICE uint32_t f(uint32_t v, uint32_t scale, uint32_t shift) const {
        if constexpr (kKind == RsPrologue::kRelu) {
            return fma_relu(v, scale, shift, Element{});
        } else {
            const uint32_t u = kAffine ? fma_packed(v, scale, shift, Element{}) : v;
            return larger(u, fma_packed(u, slope, 0, Element{}), Element{});
        }
    }
};

#endif

}  // namespace convpool

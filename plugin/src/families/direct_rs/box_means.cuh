// SPDX-License-Identifier: Apache-2.0
// direct_rs: box means in registers, as wgmma takes its first operand.
//
// Windows of 2x2 pixels.
// A warp has output rows 2w and 2w + 1 of a subtile; they see pixel rows 4w to 4w + kKernel + 2 of its window of X, or
// of those of two images: a subtile of four has the second beside the first, and two below. Pixels of
// even and of odd columns are two planes, [row][column] of 64 bytes in TMA's 64-byte swizzle, plane e and plane o. Output
// column x sees pixel columns e[x], o[x], e[x + 1], o[x + 1], ..: neighbouring outputs see neighbouring places, so that
// ldmatrix gives lane 4 x + t word t of a chunk of what column x sees: channels 2t and 2t + 1, or a float, channel t. Sums of
// neighbouring columns, then of neighbouring rows:
//
//     pixel row r      e[x]  o[x]  e[x+1]  o[x+1]
//     sums of r         \+/   \+/    \+/              one for each column of taps
//     sums of r + 1      +     +      +               mean row r: of tap row r of the first output row, r - 2 of the second
//
// Exact: sums in fp32, a quarter of them rounded once. Packed: in X's type, two channels an instruction, of quarters of pixels,
// so that no sum passes the type's range; rounded twice. Quarters are exact but for subnormal ones.
//
// Windows of 3x3 pixels.
// Three planes hold every third column, and the rows of output are 3 rows of pixels apart. Sums of three columns,
// then of three rows, in fp32; a ninth of them rounded once.
#pragma once

#include "families/direct_rs/block.cuh"
#include "kernels/mma/multiply_slice.cuh"
#include "kernels/ptx/numbers.cuh"

namespace convpool {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// The nearest TF32 number, ties away from zero, up to the low 13 bits, which wgmma ignores: half a unit of TF32 more in magnitude, in
// one instruction. NaN as arithmetic gives it is the largest integer: with the addition it would be less, so it stays.
CONVPOOL_DEVICE uint32_t round_tf32_operand(float v) {
    const int bits = __float_as_int(v);
    return static_cast<uint32_t>(__viaddmax_s32(bits, 0x1000, bits));
}

// Sums of two channels, and how they become a word of two box means.
template <Precision P, bool kPacked, int kPool> struct BoxSums;

template <Precision P> struct BoxSums<P, true, 2> {
    using Element = typename Traits<P>::Element;
    using Sum = uint32_t;

    CONVPOOL_DEVICE static uint32_t packed(float v) { return pack2(v, v, Element{}); }
    // sums[b] = (v[b] + v[b + 1]) / 4 of a row's pixels.
    template <int kSums> CONVPOOL_DEVICE static void add_row(Sum (&sums)[kSums], const uint32_t (&v)[kSums + 1], int) {
        const uint32_t quarter = packed(0.25f), zero = packed(-0.f);
        UNROLLED_FOR (int b = 0; b < kSums; b += 2) {  // v[b + 1] is in this sum and in the next
            const uint32_t shared = fma_packed(v[b + 1], quarter, zero, Element{});
            sums[b] = fma_packed(v[b], quarter, shared, Element{});
            if (b + 1 < kSums) sums[b + 1] = fma_packed(v[b + 2], quarter, shared, Element{});
        }
    }
    CONVPOOL_DEVICE static uint32_t mean(const Sum (&upper)[1], const Sum &lower, int) {
        return fma_packed(upper[0], packed(1.f), lower, Element{});
    }
};

template <Precision P> struct BoxSums<P, false, 2> {
    using Element = typename Traits<P>::Element;
    struct Sum {
        float v[2];
    };

    // Sums of odd rows are kept as quarters: each is in two means.
    template <int kSums> CONVPOOL_DEVICE static void add_row(Sum (&sums)[kSums], const uint32_t (&v)[kSums + 1], int row) {
        float left[2], right[2];
        unpack_word(v[0], left, Element{});
        UNROLLED_FOR (int b = 0; b < kSums; ++b) {
            unpack_word(v[b + 1], right, Element{});
            UNROLLED_FOR (int i = 0; i < 2; ++i) {
                sums[b].v[i] = left[i] + right[i];
                if (row % 2) sums[b].v[i] *= 0.25f;
                left[i] = right[i];
            }
        }
    }
    // The mean of pixel rows `row` and row + 1.
    CONVPOOL_DEVICE static uint32_t mean(const Sum (&upper)[1], const Sum &lower, int row) {
        const Sum &whole = row % 2 ? lower : upper[0], &quarter = row % 2 ? upper[0] : lower;
        return pack2(fmaf(whole.v[0], 0.25f, quarter.v[0]), fmaf(whole.v[1], 0.25f, quarter.v[1]), Element{});
    }
};

template <> struct BoxSums<Precision::kTF32, false, 2> {
    using Sum = float;

    // Sums of odd rows are kept as quarters: each is in two means.
    template <int kSums> CONVPOOL_DEVICE static void add_row(Sum (&sums)[kSums], const uint32_t (&v)[kSums + 1], int row) {
        UNROLLED_FOR (int b = 0; b < kSums; ++b) {
            sums[b] = __uint_as_float(v[b]) + __uint_as_float(v[b + 1]);
            if (row % 2) sums[b] *= 0.25f;
        }
    }
    // The mean of pixel rows `row` and row + 1.
    CONVPOOL_DEVICE static uint32_t mean(const Sum (&upper)[1], const Sum &lower, int row) {
        return round_tf32_operand(row % 2 ? fmaf(lower, 0.25f, upper[0]) : fmaf(upper[0], 0.25f, lower));
    }
};

// Means of 3x3 pixels: the sum of nine in fp32, times a ninth.
template <Precision P> struct BoxSums<P, false, 3> {
    using Element = typename Traits<P>::Element;
    static constexpr int kPerWord = Traits<P>::kPerChunk / 4;
    struct Sum {
        float v[kPerWord];
    };

    template <int kSums> CONVPOOL_DEVICE static void add_row(Sum (&sums)[kSums], const uint32_t (&v)[kSums + 2], int) {
        float pixels[kSums + 2][kPerWord];
        UNROLLED_FOR (int b = 0; b < kSums + 2; ++b) unpack_word(v[b], pixels[b], Element{});
        UNROLLED_FOR (int b = 0; b < kSums; ++b)
            UNROLLED_FOR (int i = 0; i < kPerWord; ++i) sums[b].v[i] = pixels[b][i] + pixels[b + 1][i] + pixels[b + 2][i];
    }
    CONVPOOL_DEVICE static uint32_t mean(const Sum (&upper)[2], const Sum &lower, int) {
        float mean[kPerWord];
        UNROLLED_FOR (int i = 0; i < kPerWord; ++i) mean[i] = (upper[0].v[i] + upper[1].v[i] + lower.v[i]) * (1.f / 9.f);
        if constexpr (kPerWord == 2) return pack2(mean[0], mean[1], Element{});
        else return round_tf32_operand(mean[0]);
    }
};

// The box means of a warp's two output rows for all taps of a slice, or of a part of it.
template <class Config> struct DirectRsMeans {
    using Block = DirectRsBlock<Config>;
    static constexpr int kKernel = Config::kKernel, kPool = Config::kPool, kColumns = Block::kColumns, kSteps = Config::kSteps;
    static constexpr int kPixels = kKernel + kPool - 1;    // of a row, that an output sees
    static constexpr int kApart = kPool == 2 ? 1 : kPool;  // columns that an ldmatrix loads: of both planes, or of the same one
    using Sums = BoxSums<Config::kPrecision, Config::kPacked, kPool>;
    using Words = uint32_t[kSteps][2][kPixels];  // (step, chunk, column)

    const uint32_t place;  // of this lane's row of the first ldmatrix, in bytes from a subtile's pixels
    const uint32_t chunk;  // its chunk of two
    uint32_t at[8];        // its address for each residue of the others' distance by 8, in the first step's chunks
    typename Sums::Sum above[kSteps][2][kKernel][kPool - 1];  // of the pixel rows before: (step, chunk, column of taps)
    DirectRsPrologue<Config> prologue;
    uint32_t a[kKernel][kKernel][kSteps][4];  // operands: (row and column of taps, step, two output rows of two chunks)

    // Lanes 0-7 and 8-15 give rows of a column, chunks 0 and 1; 16-23 and 24-31 of the column kApart further.
    CONVPOOL_DEVICE explicit DirectRsMeans(const Block &block)
        : place((block.lane >> 4) * (kPool == 2 ? Block::kPlaneBytes : 64) + position(block.warp % 4 * 2, block.lane & 7) * 64),
          chunk(block.lane >> 3 & 1), prologue(block.p.prologue) {}
    // In a plane of an image's pixels, where the window of an output pixel of the subtile begins.
    CONVPOOL_DEVICE static int position(int row, int column) {
        constexpr int kSide = Config::kSide;
        const int image = row / kSide * (8 / kSide) + column / kSide;
        return (image * Block::kRows + kPool * (row % kSide)) * kColumns + column % kSide;
    }
    // part: the first step's, of a slice's two.
    CONVPOOL_DEVICE void start(uint32_t pixels, int part) {
        UNROLLED_FOR (int i = 0; i < 8; ++i)
            at[i] = pixels + place + ((chunk ^ (2 * part) ^ ((pixels + place + i * 64) >> 7 & 3)) << 4);
    }
    CONVPOOL_DEVICE void load_row(Words &words, int row) const {
        UNROLLED_FOR (int k = 0; k < kSteps; ++k)
            UNROLLED_FOR (int i = 0; i < kPixels; ++i) {
                if (i / kApart % 2 != 0) continue;  // loaded with the column kApart before
                const int position = i % kApart * (Block::kPlaneBytes / 64) + row * kColumns + i / kPool;
                uint32_t v[4];  // (column, chunk)
                load_matrix(v, (at[position % 8] ^ (k * 32)) + position * 64);
                UNROLLED_FOR (int chunk = 0; chunk < 2; ++chunk) {
                    words[k][chunk][i] = v[chunk];
                    if (i + kApart < kPixels) words[k][chunk][i + kApart] = v[2 + chunk];
                }
            }
    }
    // Adds up one row of pixels and completes the means that it is the last of.
    CONVPOOL_DEVICE void add_row(int row) {
        Words words;
        load_row(words, row);
        prologue.apply(words, row);
        UNROLLED_FOR (int k = 0; k < kSteps; ++k)
            UNROLLED_FOR (int chunk = 0; chunk < 2; ++chunk) {
                typename Sums::Sum sums[kKernel];
                Sums::template add_row<kKernel>(sums, words[k][chunk], row);
                UNROLLED_FOR (int b = 0; b < kKernel; ++b) {
                    typename Sums::Sum(&upper)[kPool - 1] = above[k][chunk][b];
                    const int mean = row - (kPool - 1);
                    if (mean >= 0) set_mean(mean, b, k, chunk, Sums::mean(upper, sums[b], mean));
                    if constexpr (kPool == 3) upper[0] = upper[1];
                    upper[kPool - 2] = sums[b];
                }
            }
    }
    // Mean row r is tap row r of the first output row and r - kPool of the second. A mean that both need waits in the second's
    // place: products that read the first's may be under way.
    CONVPOOL_DEVICE void set_mean(int r, int b, int k, int chunk, uint32_t mean) {
        if (r < kKernel && r < kPool) a[r][b][k][2 * chunk] = mean;
        if (r >= kPool && r - kPool < kKernel) a[r - kPool][b][k][2 * chunk + 1] = mean;
    }
    CONVPOOL_DEVICE void share_row(int row) {
        if (row < kPool) return;
        UNROLLED_FOR (int b = 0; b < kKernel; ++b)
            UNROLLED_FOR (int k = 0; k < kSteps; ++k)
                UNROLLED_FOR (int chunk = 0; chunk < 2; ++chunk) a[row][b][k][2 * chunk] = a[row - kPool][b][k][2 * chunk + 1];
    }
    // Forms the operands of a row of taps; rows come in order.
    CONVPOOL_DEVICE void form(int row) {
        constexpr int kAhead = 2 * kPool - 1;  // the last row of pixels that the second output row needs for the first taps
        UNROLLED_FOR (int r = row == 0 ? 0 : row + kAhead; r <= row + kAhead; ++r) add_row(r);
        share_row(row);
    }
};

#endif

}  // namespace convpool

// SPDX-License-Identifier: Apache-2.0
// Upsampling by 2 and a 3x3 convolution in 12 products instead of 16. With taps A B C along the columns, S = A + B + C:
//
//     Y[2 j]     = S x[j] + 2 A * (x[j - 1] - x[j]) / 2
//     Y[2 j + 1] = S x[j] - 2 C * (x[j] - x[j + 1]) / 2
//
// A tile is 16 rows x 8 columns of places, of one phase of the rows and both of the columns. S x is summed up once, and the sums are
// copied; both go on with their own differences. TMA copies boxes of pixels, with a row and two columns more. wgmma takes S's pixels
// from there, and differences from registers, where a warp forms them. Half a difference does not overflow.
#pragma once

#include "families/implicit_gemm_tma/rows.h"
#include "kernels/mma/gemm_sums.cuh"
#include "kernels/mma/multiply_slice.cuh"
#include "kernels/prologue/prologue.cuh"
#include "kernels/ptx/tma.cuh"

namespace convpool {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// A ring of stages in shared memory, and its barriers. Of kThreads threads one hands stages back.
template <int kCount, int kBytes, int kThreads> struct StageRing {
    const uint32_t memory, barriers;
    Ring<kCount> ring;

    CONVPOOL_DEVICE uint32_t full(int i) const { return barriers + i * 8; }
    CONVPOOL_DEVICE void init() const {
        for (int i = 0; i < kCount; ++i) barrier_init(full(i), 1), barrier_init(full(kCount + i), 256 / kThreads);
    }
    // The next stage, for copies of so many bytes that full(stage) counts; or for readers, once it is full.
    CONVPOOL_DEVICE int fill(int bytes) {
        const int stage = ring.buffer;
        barrier_wait(full(kCount + stage), ring.parity ^ 1);
        barrier_expect(full(stage), bytes);
        ring.next();
        return stage;
    }
    CONVPOOL_DEVICE uint32_t take() {
        const int stage = ring.buffer;
        barrier_wait(full(stage), ring.parity);
        ring.next();
        return memory + stage * kBytes;
    }
    // Readers hand back the last stage that they took, or so many before that.
    CONVPOOL_DEVICE void give(int before) const {
        const int stage = ring.buffer - 1 - before;
        if (threadIdx.x % kThreads == 0) barrier_arrive(full(kCount + (stage < 0 ? stage + kCount : stage)));
    }
};

template <Precision kPrecision> struct Differences {
    using Config = TileConfig<kPrecision, 128, 128, 8, 1, kDifferencePixels, 1>;
    using Element = typename Traits<kPrecision>::Element;
    using Sums = Accumulators<Config>;
    static constexpr int kPitch = (8 + 2) * 128, kTapBytes = 128 * 128, kChannels = 8 * Config::kPerChunk;  // of a row; a stage

    const ImplicitGemmTmaParams &p;
    const uint32_t boxes;
    StageRing<kDifferencePixels, kDifferencePixelBytes, 32> pixels;
    StageRing<kDifferenceWeights, 2 * kTapBytes, 128> weights;
    const uint64_t weight_rows = matrix_descriptor(16, 8 * 128, kSwizzle128);
    int n, row, column, phase, channel;  // of the tile: places, phase of the rows, first channel

    CONVPOOL_DEVICE Differences(const ImplicitGemmTmaParams &params, uint32_t shared)
        : p(params), boxes(shared + kDifferenceBoxes), pixels{shared, boxes + kDifferenceBoxBytes, {}},
          weights{shared + kDifferencePixels * kDifferencePixelBytes, pixels.full(2 * kDifferencePixels), {}} {}

    CONVPOOL_DEVICE void start(int block) {
        uint32_t places, rest, i, j, image, v, tile;
        p.gemm.div_m_tiles.divmod(block, places, rest);
        p.phases.div_tiles.divmod(rest, v, tile);
        p.gemm.div_out_hw.divmod(places, image, rest);
        p.gemm.div_out_w.divmod(rest, i, j);
        n = image, row = i * 16, column = j * 8, phase = v, channel = tile * 128;
    }

    // The thread that copies: of 128 bytes of channels the pixels and both taps of S, and again with both taps of A and of C.
    CONVPOOL_DEVICE void copy() {
        const int taps = p.w_rows == 128 ? 2 : 1;  // of a box: both lie one behind the other where it is of all rows
        for (int step = 0; step < 2 * p.steps; ++step) {
            const bool merged = step < p.steps;
            const int c = (merged ? step : step - p.steps) * kChannels, to = pixels.fill(17 * kPitch);
            copy_box(pixels.memory + to * kDifferencePixelBytes, &p.x_map, pixels.full(to), c, column - p.gemm.shape.pad_w,
                     row - p.gemm.shape.pad_h + phase, n);
            for (int kind = merged ? 0 : 1; kind < (merged ? 1 : 3); ++kind) {
                const int stage = weights.fill(2 * p.w_rows * 128);
                for (int tap = 0; tap < 2; tap += taps)
                    copy_box(weights.memory + (2 * stage + tap) * kTapBytes, &p.w_map, weights.full(stage), c, channel, kind,
                             2 * phase + tap);
            }
        }
    }

    CONVPOOL_DEVICE void multiply_pixels(Sums &sums) {
        const uint32_t start = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0) * 8 * kPitch + 128;  // eight rows of places
#pragma unroll 1
        for (int step = 0; step < p.steps; ++step) {
            const uint64_t a = at_address(matrix_descriptor(16, kPitch, kSwizzle128), pixels.take() + start);
            const uint64_t b = at_address(weight_rows, weights.take());
            wgmma_begin();
            UNROLLED_FOR (int i = 0; i < 8; ++i)
                wgmma<kPrecision>(sums[0], moved(a, i / 4 * kPitch + i % 4 * 32), moved(b, i / 4 * kTapBytes + i % 4 * 32));
            wgmma_commit();
            wgmma_wait<1>();
            if (step > 0) pixels.give(1), weights.give(1);
        }
        wgmma_wait<0>();
        pixels.give(0), weights.give(0);
    }

    // (a - b) / 2 of a word's channels, rounded as they are multiplied.
    CONVPOOL_DEVICE static uint32_t half_difference(uint32_t a, uint32_t b) {
        auto packed = PackedPrologue<kPrecision>::packed;
        const uint32_t v = fma_packed(a, packed(.5f), fma_packed(b, packed(-.5f), packed(-0.f), Element{}), Element{});
        return sizeof(Element) == 4 ? round_to_tf32(v) : v;
    }
    // The lane's row of an ldmatrix: one of 8 pixels of a row, `shift` columns on, and a chunk of their channels.
    CONVPOOL_DEVICE static uint32_t lane_row(int row, int shift, int chunk) {
        const int at = row * (kPitch / 128) + (threadIdx.x & 7) + shift;
        return at * 128 + ((chunk ^ (at & 7)) << 4);
    }
    // Products of differences of the pixels at an address, with the next weights. left, right: the lane's rows of the warp's pixels,
    // and of those a column on; below: of both, in the row below. gives: the weights before may be handed back.
    CONVPOOL_DEVICE void multiply_side(Sums &sums, uint32_t at, uint32_t left, uint32_t right, uint32_t below, bool gives) {
        const uint64_t b = at_address(weight_rows, weights.take());
        uint32_t fragments[4][2][4];  // of both taps, as those of two steps are read while the next are made
        UNROLLED_FOR (int k = 0; k < 4; ++k) {
            uint32_t x[4], y[4], z[4];
            uint32_t (&f)[2][4] = fragments[k];
            load_matrix(x, at + (left ^ k * 32));
            load_matrix(y, at + (right ^ k * 32));
            load_matrix(z, at + (below ^ k * 32));
            wgmma_wait<2>();
            if (k == 2 && gives) weights.give(1);
            UNROLLED_FOR (int i = 0; i < 4; ++i) f[0][i] = half_difference(x[i], y[i]);
            UNROLLED_FOR (int i = 0; i < 2; ++i)  // the second tap sees the second row and the one below
                f[1][2 * i] = f[0][2 * i + 1], f[1][2 * i + 1] = half_difference(z[i], z[2 + i]);
            wgmma_begin();
            UNROLLED_FOR (int tap = 0; tap < 2; ++tap) wgmma<kPrecision>(sums[0], f[tap], moved(b, tap * kTapBytes + k * 32));
            wgmma_commit();
        }
    }
    CONVPOOL_DEVICE void multiply_differences(Sums &even, Sums &odd) {
        const int first = threadIdx.x / 32 * 2, matrix = threadIdx.x >> 3 & 3;
        auto row_of = [&](int shift) { return lane_row(first + (matrix & 1), shift, matrix >> 1); };
        auto below = [&](int shift) { return lane_row(first + 2, shift + (matrix >> 1), matrix & 1); };
        const uint32_t left = row_of(0), center = row_of(1), right = row_of(2), below_even = below(0), below_odd = below(1);
#pragma unroll 1
        for (int step = 0; step < p.steps; ++step) {
            const uint32_t at = pixels.take();
            multiply_side(even, at, left, center, below_even, step > 0);
            multiply_side(odd, at, center, right, below_odd, true);
            pixels.give(0);
        }
        wgmma_wait<0>();
        weights.give(0);
    }

    // The warp's sums to Y by TMA, a stage's channels at a time: a box for each row, of both phases' columns in turn.
    template <bool kRectify> CONVPOOL_DEVICE void store(const Sums &even, const Sums &odd) const {
        const Epilogue &e = p.gemm.epilogue;
        const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
        const uint32_t memory = boxes + warp * 2 * 2048;
        UNROLLED_FOR (int first = 0; first < 128; first += kChannels) {
            const int c = channel + first + 2 * lane;
            const auto *from = reinterpret_cast<const typename PairOf<Element>::Word *>(static_cast<const Element *>(e.bias) + c);
            const auto pair = e.bias != nullptr && c < p.gemm.shape.m ? *from : 0;
            bulk_wait_read();
            __syncwarp();  // copies have read what was here
            UNROLLED_FOR (int i = 0; i < kChannels / 2; ++i) {
                const int fragment = i / 4, h = i % 4 / 2, pixel = 2 * (lane >> 2) + i % 2, at = fragment * 8 + 2 * (lane & 3);
                const auto word = __shfl_sync(0xffffffffu, pair, at / 2);
                const auto &bias = reinterpret_cast<const PairOf<Element> &>(word);
                const float (&sums)[4] = (i % 2 == 0 ? even : odd)[0][first / 8 + fragment];
                float v[2] = {sums[2 * h] + to_float(bias.first), sums[2 * h + 1] + to_float(bias.second)};
                if constexpr (kRectify) rectify(v, e);
                store_shared_elements(memory + h * 2048 + pixel * 128 + (at * Config::kElementBytes ^ ((pixel & 7) << 4)), v[0],
                                      v[1], Element{});
            }
            publish_shared();
            __syncwarp();  // all lanes' are there
            if (lane < 2)
                store_box(&p.y_map, memory + lane * 2048, channel + first, 2 * column, 2 * (row + 2 * warp + lane) + phase, n, 0);
            bulk_commit();
        }
    }
};

#endif

template <Precision kPrecision>
__global__ void __launch_bounds__(384, 1) implicit_gemm_tma_differences_kernel(const __grid_constant__ ImplicitGemmTmaParams p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    using Gemm = Differences<kPrecision>;
    extern __shared__ __align__(1024) unsigned char memory[];
    Gemm gemm(p, __shfl_sync(0xffffffffu, shared_address(memory), 0));
    if (threadIdx.x == 256) {
        gemm.pixels.init();
        gemm.weights.init();
        publish_barriers();
    }
    __syncthreads();
    wait_for_previous_kernel();
    let_next_kernel_start();
    if (threadIdx.x < 256) {
        take_registers<232>();
#pragma unroll 1
        for (int block = blockIdx.x; block < p.blocks; block += gridDim.x) {
            gemm.start(block);
            typename Gemm::Sums even, odd;
            clear<typename Gemm::Config>(even);
            gemm.multiply_pixels(even);
            UNROLLED_FOR (int i = 0; i < 64; ++i) odd[0][i / 4][i % 4] = even[0][i / 4][i % 4];
            gemm.multiply_differences(even, odd);
            rectifies(p.gemm.epilogue) ? gemm.template store<true>(even, odd) : gemm.template store<false>(even, odd);
        }
        bulk_wait_read();  // the memory is the block's until then
    } else {
        give_registers<40>();
        if (threadIdx.x != 256) return;
#pragma unroll 1
        for (int block = blockIdx.x; block < p.blocks; block += gridDim.x) {
            gemm.start(block);
            gemm.copy();
        }
    }
#endif
}

}  // namespace convpool

// SPDX-License-Identifier: Apache-2.0
// A warp's sums of an implicit GEMM by wgmma.
//
// Full fp32 is 3xTF32: pixels and weights come as two TF32 numbers each, the big ones of 16 channels and then their small ones,
// which fill a stage. big*big, small*big and big*small are three products of the same bytes. The tensor cores truncate as they
// accumulate, each step an error of one sign: the last two, 2^-11 of the whole, have a sum of their own, and the first starts from
// zero every other stage and is added by a rounded addition. Emulated on random numbers, 256 to a sum, the error is 1.6e-7; with
// all in one sum, added every four stages, 5.8e-7; a chain of float32 additions has 2.8e-7, and pooling its results divides it by 2.
#pragma once

#include "kernels/mma/accumulators.cuh"
#include "kernels/ptx/wgmma.cuh"
#include "kernels/tile/gemm_tile.cuh"

namespace convpool {

// A warp's sums over stages.
template <class Config> struct GemmSums {
    static constexpr bool kSplit = Config::kPrecision == Precision::kTF32x3;
    static constexpr int kSumStages = 2;  // of split TF32: stages between rounded additions
    // acc is the sum. Of split TF32 it is what has been added up; part is big * big since then, small the small products.
    Accumulators<Config> acc, part, small;  // (1, kFragmentsN, 4): a warp's 16 pixels x 8 kFragmentsN channels
    const uint64_t descriptor = matrix_descriptor(16, 8 * GemmStage<Config>::kRowBytes, kSwizzle128);

    CONVPOOL_DEVICE GemmSums() {
        clear<Config>(acc);
        if constexpr (kSplit) {
            clear<Config>(part);
            clear<Config>(small);
        }
    }
    // Products of the step's rows of pixels and of weights at these addresses. Those of the step before are done on return.
    CONVPOOL_DEVICE void multiply(int step, uint32_t pixels, uint32_t weights) {
        const uint64_t a = at_address(descriptor, pixels), b = at_address(descriptor, weights);
        wgmma_begin();
        if constexpr (kSplit) {
#pragma unroll
            for (int k = 0; k < 2; ++k) {  // parts 0 and 1 are the big numbers, 2 and 3 their small ones
                multiply(small, a, k + 2, b, k);
                multiply(small, a, k, b, k + 2);
                multiply(part, a, k, b, k);
            }
        } else {
#pragma unroll
            for (int k = 0; k < GemmStage<Config>::kChunks / 2; ++k) multiply(acc, a, k, b, k);
        }
        wgmma_commit();
        wgmma_wait<1>();
        if constexpr (kSplit) {
            if (step % kSumStages == kSumStages - 1) {
                wgmma_wait<0>();
                add(part);
                clear<Config>(part);
            }
        }
    }
    // Products of the warp's rows of pixels in registers, [part of two chunks][fragment], and of weights at this address. Hazard:
    // the registers must stay as they are until wgmma_wait<0>().
    CONVPOOL_DEVICE void multiply(const uint32_t (&pixels)[GemmStage<Config>::kChunks / 2][4], uint32_t weights) {
        const uint64_t b = at_address(descriptor, weights);
        wgmma_begin();
#pragma unroll
        for (int k = 0; k < GemmStage<Config>::kChunks / 2; ++k) wgmma<Config::kPrecision>(acc[0], pixels[k], moved(b, k * 32));
        wgmma_commit();
    }
    // Waits for all products and completes acc.
    CONVPOOL_DEVICE void finish() {
        wgmma_wait<0>();
        if constexpr (kSplit) {
            add(part);
            add(small);
        }
    }

private:
    // sum += part of_a of the pixels x part of_b of the weights, a part being two chunks: 32 bytes further on.
    CONVPOOL_DEVICE static void multiply(Accumulators<Config> &sum, uint64_t a, int of_a, uint64_t b, int of_b) {
        wgmma<Config::kPrecision>(sum[0], moved(a, of_a * 32), moved(b, of_b * 32));
    }
    CONVPOOL_DEVICE void add(const Accumulators<Config> &sum) {
#pragma unroll
        for (int f = 0; f < Config::kFragmentsN; ++f)
#pragma unroll
            for (int i = 0; i < 4; ++i) acc[0][f][i] += sum[0][f][i];
    }
};

}  // namespace convpool

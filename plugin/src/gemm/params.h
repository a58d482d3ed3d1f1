// SPDX-License-Identifier: Apache-2.0
// What the host tells the kernels of implicit GEMM.
#pragma once

#include <cstdint>

#include "core/params.h"

namespace convpool {

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

// Whether blocks of a cluster push their parts of a tile's sum to each other (kernels/epilogue/pushed_sums.cuh), instead of loading
// them. Of larger tiles that takes longer; of full fp32 it was not measured.
constexpr bool pushes_sums(Precision precision, int block_m, int block_n) {
    return precision != Precision::kTF32x3 && block_m * block_n <= 64 * 64;
}
// Where the memory for that is: behind the ring of copies and its barriers.
constexpr int exchange_offset(int stages, int block_m, int block_n) { return stages * (block_m + block_n) * 128 + 128; }

}  // namespace convpool

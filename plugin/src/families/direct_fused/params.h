// SPDX-License-Identifier: Apache-2.0
// What the host tells direct_fused.
#pragma once

#include <cstdint>

#include "core/params.h"

namespace convpool {

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

}  // namespace convpool

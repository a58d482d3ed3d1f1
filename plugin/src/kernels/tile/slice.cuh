// SPDX-License-Identifier: Apache-2.0
// A slice: rows of 64 bytes (four chunks of channels) of pixels or weights in shared memory, and what a lane reads of them.
#pragma once

#include "kernels/ptx/device.cuh"
#include "kernels/tile/tile_config.h"

namespace convpool {

// Bytes from the start of a slice to a chunk of a row. Eight rows of one chunk, which an ldmatrix reads, lie in eight
// different bank groups, and so do two rows of all chunks. The pattern is the 64-byte swizzle of wgmma, too. Chunk c + 2 is
// chunk c with bit 5 turned.
CONVPOOL_DEVICE uint32_t chunk_in_row(int row, int chunk) { return row * 64 + ((chunk ^ (row >> 1 & 3)) << 4); }

// A lane's ldmatrix row of the weights: lanes 0-7 channels 0-7 of chunk 0, 8-15 the same of chunk 1, 16-31 channels 8-15
// likewise.
template <class Config> CONVPOOL_DEVICE uint32_t weight_lane_offset(int warp_n, int lane) {
    return chunk_in_row(warp_n * Config::kWarpN + (lane & 7) + ((lane >> 4) << 3), lane >> 3 & 1);
}

// A lane's ldmatrix row of pixels that lie as rows of a slice: lanes 0-15 their row of chunk 0, 16-31 of chunk 1.
CONVPOOL_DEVICE uint32_t pixel_lane_offset(int first_row, int lane) { return chunk_in_row(first_row + (lane & 15), lane >> 4); }

// Where pixels come from: kMeans, P of direct_fused, in planes of a chunk; kRows, rows of a slice as they are in memory,
// fp32 not yet rounded to TF32.
enum class Pixels { kMeans, kRows };

// Step k, two chunks, of a lane's row: an exclusive or moves by two chunks in a swizzled row, an addition by two planes in P.
template <Pixels kPixels> CONVPOOL_DEVICE uint32_t pixel_address(uint32_t row, uint32_t offset, uint32_t two_planes, int k) {
    return kPixels == Pixels::kRows ? (row ^ (k * 32)) + offset : row + offset + k * two_planes;
}

}  // namespace convpool

// SPDX-License-Identifier: Apache-2.0
// What the passes before an implicit GEMM share: their blocks, and stores of box means in the GEMM's number format.
#pragma once

#include "kernels/prepasses/prepasses.h"
#include "kernels/tile/chunk.cuh"

namespace convpool::prepasses {

// The precision whose chunks hold an element type as it is.
template <class Element> struct Chunked;
template <> struct Chunked<__half> {
    static constexpr Precision kPrecision = Precision::kF16;
};
template <> struct Chunked<__nv_bfloat16> {
    static constexpr Precision kPrecision = Precision::kBF16;
};
template <> struct Chunked<float> {
    static constexpr Precision kPrecision = Precision::kTF32x3;
};  // no rounding

constexpr int kThreads = 256;

// Stores a chunk, of those of all pixels the one at `position`, in the format asked for; other types than fp32 have one.
template <class Element> CONVPOOL_DEVICE void store_chunk(void *out, int64_t position, NumberFormat format, const uint4 &v) {
    uint4 *const to = static_cast<uint4 *>(out) + position;
    if (sizeof(Element) == 2 || format == NumberFormat::kAsIs) {
        *to = v;
    } else if (format == NumberFormat::kTF32) {
        *to = {round_to_tf32(v.x), round_to_tf32(v.y), round_to_tf32(v.z), round_to_tf32(v.w)};
    } else {
        constexpr int kBig = kSplitChannels / 4;  // chunks of a pixel are a multiple of it
        uint4 *const place = to + (position - position % kBig);
        uint4 big, small;
        split_tf32(v.x, big.x, small.x);
        split_tf32(v.y, big.y, small.y);
        split_tf32(v.z, big.z, small.z);
        split_tf32(v.w, big.w, small.w);
        place[0] = big;
        place[kBig] = small;
    }
}

constexpr int kStrip = 4;   // rows of means that a thread makes of a column
constexpr int kAtOnce = 4;  // places of windows whose loads are under way together: a window of 2x2, four rows of a copy

}  // namespace convpool::prepasses

// SPDX-License-Identifier: Apache-2.0
// The phases of an upsampled convolution: Y's rows v, v + s, v + 2 s, .. see X through one and the same small kernel.
//
// Along an axis, X is upsampled s times and convolved with k taps, stride 1, after `pad` zeros. Output s * i + v sees through tap u
// the upsampled place s * i + v - pad + u, which is pixel i + floor((v - pad + u) / s) of X. So the outputs of one v are a
// convolution over X itself, whose taps are sums of up to s neighbouring taps. With s = 2, k = 3, pad = 1, and taps A B C:
//
//     upsampled   0 0 | x0 x0 | x1 x1 | ..     Y[2 i]     = A x[i - 1] + (B + C) x[i]
//     Y[0] sees     A    B  C                  Y[2 i + 1] = (A + B) x[i] + C x[i + 1]
//
// All phases start from windows at the same pixels i - lead. Zeros around the upsampled map are zeros around X, whatever the pads.
#pragma once

#include <cstdint>

#include "core/params.h"

namespace convpool {

#ifdef __CUDACC__
#define CONVPOOL_ANYWHERE __host__ __device__ __forceinline__
#else
#define CONVPOOL_ANYWHERE inline
#endif

// Taps from `begin` up to `end` of a kernel.
struct TapRange {
    int32_t begin, end;
};

// One axis. A phase's own taps are numbered from 0; those of all phases, one phase behind the other, are rows (or columns) of the
// filter that the weights' pass writes.
struct PhaseAxis {
    int32_t scale = 1, kernel = 1;
    int32_t lead = 0;          // pixels before X at which the first window starts: ceil(pad / scale)
    int32_t early = 0;         // lead * scale - pad
    bool differences = false;  // of taps A B C, by 2: A + B + C of pixels, 2 A and -2 C of half of their differences

    PhaseAxis() = default;
    PhaseAxis(int32_t s, int32_t k, int32_t pad, bool apart = false)
        : scale(s), kernel(k), lead((pad + s - 1) / s), early(lead * s - pad), differences(apart) {}

    // The distance from the window's start to the pixel of the phase's first tap: 0 or 1.
    CONVPOOL_ANYWHERE int32_t shift(int32_t phase) const { return (phase + early) / scale; }
    // Upsampled places from that pixel's first copy to the phase's first output.
    CONVPOOL_ANYWHERE int32_t offset(int32_t phase) const { return (phase + early) % scale; }
    CONVPOOL_ANYWHERE int32_t taps(int32_t phase) const { return (offset(phase) + kernel - 1) / scale + 1; }
    // The taps of all phases before this one.
    CONVPOOL_ANYWHERE int32_t taps_before(int32_t phase) const {
        int32_t sum = 0;
        for (int32_t v = 0; v < phase; ++v) sum += taps(v);
        return sum;
    }
    CONVPOOL_ANYWHERE int32_t all_taps() const { return differences ? 3 : taps_before(scale); }
    // The taps of the convolution whose sum, times the factor, is this tap of all phases.
    CONVPOOL_ANYWHERE float factor(int32_t tap) const { return !differences || tap == 0 ? 1.f : tap == 1 ? 2.f : -2.f; }
    CONVPOOL_ANYWHERE TapRange summed(int32_t tap) const {
        if (differences) return {tap == 2 ? 2 : 0, tap == 1 ? 1 : 3};
        int32_t phase = 0;
        while (tap >= taps(phase)) tap -= taps(phase++);
        const int32_t begin = tap * scale - offset(phase), end = begin + scale;
        return {begin < 0 ? 0 : begin, end > kernel ? kernel : end};
    }
};

// Both axes of an image, and the size of Y.
struct Phases {
    PhaseAxis rows, columns;
    int32_t out_h = 0, out_w = 0;

    // Those that tiles are apart of.
    CONVPOOL_ANYWHERE int32_t count() const { return rows.scale * (columns.differences ? 1 : columns.scale); }
    // The same for every pixel of X that a window starts at; Y ends before the last ones where its size is no multiple of the scale.
    CONVPOOL_ANYWHERE int32_t grid_h() const { return (out_h + rows.scale - 1) / rows.scale; }
    CONVPOOL_ANYWHERE int32_t grid_w() const { return (out_w + columns.scale - 1) / columns.scale; }
};

// The phases as the kernels get them: the channel tiles of all phases lie one phase behind the other.
struct PhaseTiles {
    Phases phases;
    FastDiv div_tiles;    // channel tiles of a phase
    FastDiv div_columns;  // phases of the columns
    FastDiv div_taps[4];  // of a row, of each phase of the columns

    PhaseTiles() = default;
    PhaseTiles(const Phases &of, int32_t channel_tiles)
        : phases(of), div_tiles(static_cast<uint32_t>(channel_tiles / of.count())),
          div_columns(static_cast<uint32_t>(of.columns.scale)) {
        for (int32_t v = 0; v < of.columns.scale; ++v) div_taps[v] = FastDiv(static_cast<uint32_t>(of.columns.taps(v)));
    }
};

}  // namespace convpool

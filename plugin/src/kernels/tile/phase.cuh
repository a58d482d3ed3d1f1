// SPDX-License-Identifier: Apache-2.0
// The phase of an upsampled convolution that a tile of an implicit GEMM is of (gemm/phases.h).
#pragma once

#include "gemm/phases.h"
#include "gemm/rows.h"
#include "kernels/tile/tile.cuh"

namespace convpool {

struct TilePhase {
    const PhaseTiles &of;
    int channel_tile;             // of the phase's
    int row, column;              // of the phase: the first of Y that are its own
    int shift_y, shift_x;         // from the window's start to the pixel of its first tap
    int first_row, first_column;  // of its taps among those of all phases

    CONVPOOL_DEVICE TilePhase(const PhaseTiles &tiles, int tile) : of(tiles) {
        uint32_t phase, rest, v, u;
        of.div_tiles.divmod(tile, phase, rest);
        of.div_columns.divmod(phase, v, u);
        channel_tile = rest, row = v, column = u;
        shift_y = of.phases.rows.shift(row), shift_x = of.phases.columns.shift(column);
        first_row = of.phases.rows.taps_before(row), first_column = of.phases.columns.taps_before(column);
    }
    CONVPOOL_DEVICE int columns() const { return of.phases.columns.taps(column); }
    CONVPOOL_DEVICE int taps() const { return of.phases.rows.taps(row) * columns(); }
    // Row and column of one of its taps.
    CONVPOOL_DEVICE int2 place_of(int tap) const {
        uint32_t a, b;
        of.div_taps[column].divmod(tap, a, b);
        return {static_cast<int>(a), static_cast<int>(b)};
    }
    // The number of a tap among those of all phases, of which a row has kw.
    CONVPOOL_DEVICE int weight_tap(int2 place, int kw) const { return (first_row + place.x) * kw + first_column + place.y; }

    // The pixel of Y of window `pixel`, among those of all images; kNone where there is none. They count up to 2^30.
    static constexpr uint32_t kNone = 0xffffffffu;
    CONVPOOL_DEVICE uint32_t place_in_y(const ImplicitGemmParams &g, int pixel) const {
        const int out_h = of.phases.out_h, out_w = of.phases.out_w;
        uint32_t n, rest, i, j;
        g.div_out_hw.divmod(pixel, n, rest);
        g.div_out_w.divmod(rest, i, j);
        const int y = i * of.phases.rows.scale + row, x = j * of.phases.columns.scale + column;
        return pixel < g.pixels && y < out_h && x < out_w ? (n * out_h + y) * out_w + x : kNone;
    }
    CONVPOOL_DEVICE OutputPixel output_at(const ImplicitGemmParams &g, uint32_t place) const {
        const int64_t m = g.shape.m;
        // Y in chunks is channels last. Said here, it spares that path the question.
        if (g.y_vectors || g.shape.y_channels_last) return {place * m, place != kNone};
        const uint32_t image = of.phases.out_h * of.phases.out_w;
        return {place / image * (m - 1) * image + place, place != kNone};
    }
    CONVPOOL_DEVICE OutputView view(const ImplicitGemmParams &g) const {
        const int64_t out_pixels = static_cast<int64_t>(of.phases.out_h) * of.phases.out_w;
        return {g.y, g.shape.y_channels_last ? 1 : out_pixels, g.shape.m, g.y_vectors != 0};
    }
};

}  // namespace convpool

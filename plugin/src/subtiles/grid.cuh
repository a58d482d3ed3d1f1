// SPDX-License-Identifier: Apache-2.0
// Tiles of subtiles of 64 output pixels: where they are in Y. A subtile is 8 x 8 pixels of an image, or 4 x 4 of each of four.
#pragma once

#include "kernels/ptx/device.cuh"
#include "kernels/tile/output.cuh"
#include "subtiles/params.h"

namespace convpool {

// A tile: kSubtiles subtiles by kBlockN channels. kSide: of an image's pixels in a subtile.
template <int kSubtiles, int kBlockN, int kSide = 8> struct SubtileGrid {
    static constexpr int kImages = 64 / (kSide * kSide);
    static_assert(kSide == 8 || kSide == 4, "an image's rows are a row of the subtile, or a half");

    const SubtileParams &p;

    // This block's first tile and the way to its next one; its slices of each.
    CONVPOOL_DEVICE int first_tile() const { return blockIdx.x; }
    CONVPOOL_DEVICE int tile_step() const { return gridDim.x; }
    CONVPOOL_DEVICE int first_slice() const { return 0; }
    CONVPOOL_DEVICE int end_slice() const { return p.slices; }

    struct Tile {
        int channel, subtile;  // the first of each
    };
    // From the last tile to the first: the L2 holds what the layer before has written last.
    CONVPOOL_DEVICE Tile tile_at(int index) const {
        uint32_t m_tile, group;
        p.div_m_tiles.divmod(p.tiles - 1 - index, group, m_tile);  // channels first: neighbours share pixels
        return {static_cast<int>(m_tile) * kBlockN, static_cast<int>(group) * kSubtiles};
    }
    struct Corner {
        int image, y, x;  // the first image, output row and column
    };
    CONVPOOL_DEVICE Corner corner_of(int subtile) const {
        uint32_t rest, column, row, image;
        p.div_tiles_w.divmod(subtile, rest, column);
        p.div_tiles_h.divmod(rest, image, row);
        return {static_cast<int>(image) * kImages, static_cast<int>(row) * kSide, static_cast<int>(column) * kSide};
    }
    // Where in Y the channels of an output pixel of a subtile are.
    CONVPOOL_DEVICE OutputPixel pixel_of(int subtile, int pixel) const {
        const Corner corner = corner_of(subtile);
        const int row = pixel / 8, column = pixel % 8;
        const int image = corner.image + row / kSide * (8 / kSide) + column / kSide;
        const int y = corner.y + row % kSide, x = corner.x + column % kSide;
        return {((static_cast<int64_t>(image) * p.out_h + y) * p.out_w + x) * p.m,
                image < p.images && y < p.out_h && x < p.out_w};
    }
};

}  // namespace convpool

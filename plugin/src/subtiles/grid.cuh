// SPDX-License-Identifier: Apache-2.0
// Tiles of subtiles of 8 x 8 output pixels: where they are in Y.
#pragma once

#include "kernels/ptx/device.cuh"
#include "kernels/tile/output.cuh"
#include "subtiles/params.h"

namespace convpool {

// A tile: kSubtiles subtiles by kBlockN channels.
template <int kSubtiles, int kBlockN> struct SubtileGrid {
    const SubtileParams &p;

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
        int image, y, x;  // first output row and column
    };
    CONVPOOL_DEVICE Corner corner_of(int subtile) const {
        uint32_t rest, column, row, image;
        p.div_tiles_w.divmod(subtile, rest, column);
        p.div_tiles_h.divmod(rest, image, row);
        return {static_cast<int>(image), static_cast<int>(row) * 8, static_cast<int>(column) * 8};
    }
    // Where in Y the channels of an output pixel of a subtile are.
    CONVPOOL_DEVICE OutputPixel pixel_of(int subtile, int pixel) const {
        const Corner corner = corner_of(subtile);
        const int y = corner.y + pixel / 8, x = corner.x + pixel % 8;
        return {((static_cast<int64_t>(corner.image) * p.out_h + y) * p.out_w + x) * p.m,
                corner.image < p.images && y < p.out_h && x < p.out_w};
    }
};

}  // namespace convpool

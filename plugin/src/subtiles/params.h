// SPDX-License-Identifier: Apache-2.0
// Parameters of kernels that cut Y into subtiles of 64 pixels and copy X and W by TMA.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "core/params.h"

namespace convpool {

struct SubtileParams {
    CUtensorMap x_map[3];  // X [n,h,w/pool,c]: every pool-th column, one for each plane of pixels; or one of X [n,c,h,w]
    CUtensorMap w_map;     // W [taps,m,c], a view
    void *y;
    Epilogue epilogue;
    int32_t images, out_h, out_w, m;
    int32_t pad_h, pad_w;     // of X
    int32_t first_column[3];  // of each plane under the first output, in its map
    int32_t slices, tiles;
    FastDiv div_m_tiles, div_tiles_w, div_tiles_h;
    Prologue prologue;
    int32_t h, w, c;   // of X
    int32_t resident;  // all weights fit into their ring: copied once
    int32_t split;     // blocks of a cluster that share a tile's slices
    FastDiv div_split;
    int32_t early_weights;  // W is constant: it may be read while the kernel before still runs
};

}  // namespace convpool

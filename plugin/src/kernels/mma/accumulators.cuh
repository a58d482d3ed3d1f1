// SPDX-License-Identifier: Apache-2.0
// A warp's accumulators.
//
// Fragment (mi, ni) is 16 pixels x 8 channels; lane 4g+t holds pixels g and g+8, channels 2t, 2t+1.
#pragma once

#include "kernels/ptx/device.cuh"
#include "kernels/tile/tile_config.h"

namespace convpool {

// (mi, ni, register): registers 0 and 1 are pixel g, channels 2t and 2t+1; registers 2 and 3 pixel g+8, the same channels.
template <class Config> using Accumulators = float[Config::kFragmentsM][Config::kFragmentsN][4];

template <class Config> CONVPOOL_DEVICE void clear(Accumulators<Config> &acc) {
#pragma unroll
    for (int mi = 0; mi < Config::kFragmentsM; ++mi)
#pragma unroll
        for (int ni = 0; ni < Config::kFragmentsN; ++ni)
#pragma unroll
            for (int i = 0; i < 4; ++i) acc[mi][ni][i] = 0.f;
}

}  // namespace convpool

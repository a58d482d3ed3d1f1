// SPDX-License-Identifier: Apache-2.0
// Where results go: Y as an epilogue sees it, and the shared memory that accumulators pass through on the way.
#pragma once

#include "kernels/ptx/device.cuh"
#include "kernels/tile/tile_config.h"

namespace convpool {

// One output pixel: channel m of it is element base + m * step of Y. Or one part of it, at element base.
struct OutputPixel {
    int64_t base;
    bool valid;
};

// Y as an epilogue sees it.
struct OutputView {
    void *y;
    int64_t step;  // between channels
    int32_t m;
    bool vectors;       // Y, residual and bias are whole aligned chunks of channels
    bool runs = false;  // channels first: Y and residual are whole aligned runs of kRunPixels
};

// Shared memory that a warp's accumulators pass through: 16 pixels x kColumns channels of floats.
template <class Config> struct Staging {
    static constexpr int kColumns = Config::kWarpN < 64 ? Config::kWarpN : 64;  // channels at a time
    static constexpr int kPitch = kColumns + 8;                                 // floats: a warp's 8-byte stores meet in no bank
    static constexpr int kWarpBytes = 16 * kPitch * 4;
    static constexpr int kBytes = Config::kWarps * kWarpBytes;
};

// Whether a thread that holds the accumulators of a warp's tile has registers for several chunks beside them.
template <class Config>
constexpr bool kRegistersLeft =
    Config::kFragmentsM * Config::kFragmentsN * 4 <= (Config::kWarps * Config::kMinBlocks <= 8 ? 64 : 32);

}  // namespace convpool

// SPDX-License-Identifier: Apache-2.0
// The problem's form, tiles and parameters of the families that cut Y into subtiles of 64 pixels and copy X and W by TMA.
#pragma once

#include "core/launch.h"
#include "subtiles/params.h"

namespace convpool {

// The form of a row's tile, for the host.
struct SubtileShape {
    int32_t kernel, pool;           // rows and columns of them
    int32_t subtiles, block_n;      // of a tile
    int32_t stage_taps, stages;     // of the ring of weights
    int32_t raw_columns, raw_rows;  // pixels of X under a subtile, in a plane: every pool-th column
    int32_t x_swizzle;              // bytes, 0 or 64
    int32_t rows = 8, columns = 8;  // of an image's pixels in a subtile
    int32_t images = 1;             // in a subtile
    int32_t split = 1;              // blocks of a cluster that share a tile's slices; each has one tile then
};

// Empty, or the reason why the problem is not of the form: kernels and pooling of these sizes, steps over X of the pooling's, X and
// Y NHWC, or NCHW (channels_first).
std::string subtile_reason(const Problem &problem, const Tactic &tactic, int32_t kernel, int32_t pool,
                           bool channels_first = false);

// The tiles that the output is cut into.
struct SubtileTiles {
    int64_t height, width, channels, subtile_groups;

    SubtileTiles(const Problem &problem, const SubtileShape &shape);
    int64_t count() const { return subtile_groups * channels; }
};

// Plan of a persistent kernel: its grid is the smaller of tiles and multiprocessors; with a split, all blocks of all tiles.
class SubtilePlan : public OneKernelPlan {
public:
    SubtilePlan(const Problem &p, const Tactic &t, const Device &d, const Kernel &kernel, const SubtileShape &shape);
    cudaError_t launch(const convpool_tensors &tensors, cudaStream_t stream) const override;

protected:
    const SubtileParams &params() const { return params_; }
    virtual cudaError_t encode_x(const void *x, CUtensorMap *maps) const;

    const SubtileShape shape_;

private:
    cudaError_t encode_w(const void *w, CUtensorMap *map) const;

    const SubtileParams params_;
    mutable TensorMaps<3> x_maps_;
    mutable TensorMaps<1> w_map_;
};

}  // namespace convpool

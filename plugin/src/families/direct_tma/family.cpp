// SPDX-License-Identifier: Apache-2.0
// direct_tma: pooling 2x2 and convolution in one kernel on Hopper, for kernels of 3x3 and 1x1 whose steps over X are 2.
#include <algorithm>

#include "core/cost.h"
#include "core/driver.h"
#include "core/kernel_lookup.h"
#include "core/launch.h"
#include "core/naming.h"
#include "core/refusal.h"
#include "families/direct_tma/params.h"
#include "families/direct_tma/rows.h"

namespace convpool {
namespace direct_tma {
namespace {

// Empty, or the reason why the problem is not of the form that the tile is made for.
std::string form_reason(const Problem &p, const Tactic &t, const Tile &tile) {
    auto reject = [&](const std::string &what, const std::string &value, const std::string &expected) {
        return refusal(t, what, value, expected, "use another direct_fused tactic");
    };
    if (p.rank != 2) return reject("rank", std::to_string(p.rank), "2");
    if (!p.x_rows_chunked() || !p.y_channels_last)
        return reject("layout", p.x_channels_last && p.y_channels_last ? std::to_string(p.c) + " input channels" : "NCHW",
                      "NHWC and a multiple of " + std::to_string(p.per_chunk()) + " input channels");
    if (p.m % p.per_chunk() != 0)
        return reject("output channels", std::to_string(p.m), "a multiple of " + std::to_string(p.per_chunk()));
    if (p.activation != Activation::kNone && p.activation != Activation::kRelu && p.activation != Activation::kLeakyRelu &&
        p.activation != Activation::kClip)  // what activate_transcendental computes
        return reject("activation", std::to_string(static_cast<int>(p.activation)),
                      "0 (none), 1 (relu), 2 (leaky_relu) or 5 (clip)");
    for (int i = 1; i < kRank; ++i) {
        const std::string axis = " of dimension " + std::to_string(i - 1);
        if (p.kernel[i] != tile.kernel) return reject("kernel" + axis, std::to_string(p.kernel[i]), std::to_string(tile.kernel));
        if (p.pool_kernel[i] != 2 || p.pool_dilations[i] != 1)
            return reject("pooling window" + axis,
                          std::to_string(p.pool_kernel[i]) + ", dilation " + std::to_string(p.pool_dilations[i]),
                          "2, dilation 1");
        if (tile.kernel > 1 && (p.pool_strides[i] != 1 || p.dilations[i] != 1))
            return reject("pooling stride" + axis,
                          std::to_string(p.pool_strides[i]) + ", kernel dilation " + std::to_string(p.dilations[i]),
                          "1, dilation 1");
        if (const int64_t stride = int64_t{p.pool_strides[i]} * p.strides[i]; stride != 2)
            return reject("stride" + axis, std::to_string(stride), "2");
        // Box means over the padding of Conv must be zero as they are computed: over nothing but padding.
        const int64_t last = (p.out[i] - 1) * p.strides[i] - p.pads_begin[i] + p.kernel[i] - 1;
        if ((p.pads_begin[i] > 0 && p.pool_pads_begin[i] != 1) ||
            (last >= p.pooled[i] && (p.pooled[i] * p.pool_strides[i] - p.pool_pads_begin[i] < p.in[i])))
            return reject("pads" + axis, std::to_string(p.pads_begin[i]) + " and " + std::to_string(p.pads_end[i]),
                          "0, or a pooling padding of 1");
    }
    if (p.in[2] < 2) return reject("width", std::to_string(p.in[2]), "at least 2");
    const int64_t largest = std::max({p.n, p.in[1], p.in[2], p.c, p.m});
    return largest > kMaxCount ? reject("dimension", std::to_string(largest), kAtMostMaxCount) : std::string();
}

// The tiles that the output is cut into.
struct Tiles {
    int64_t height, width, channels, groups;  // groups: of subtiles

    Tiles(const Problem &p, const Tile &tile)
        : height(ceil_div(p.out[1], 8)), width(ceil_div(p.out[2], 8)), channels(ceil_div(p.m, tile.block_n)),
          groups(ceil_div(p.n * height * width, tile.subtiles)) {}
    int64_t count() const { return groups * channels; }
};

DirectTmaParams params_of(const Problem &p, const Tile &tile, const Tiles &tiles) {
    DirectTmaParams d{};
    d.images = static_cast<int32_t>(p.n);
    d.out_h = static_cast<int32_t>(p.out[1]);
    d.out_w = static_cast<int32_t>(p.out[2]);
    d.m = static_cast<int32_t>(p.m);
    // Where a box mean of stride s starts: s * (output * stride - pad) - pool_pad.
    d.pad_h = static_cast<int32_t>(p.pads_begin[1] * p.pool_strides[1] + p.pool_pads_begin[1]);
    d.pad_w = static_cast<int32_t>(p.pads_begin[2] * p.pool_strides[2] + p.pool_pads_begin[2]);
    d.h = static_cast<int32_t>(p.in[1]);
    d.w = static_cast<int32_t>(p.in[2]);
    d.c = static_cast<int32_t>(p.c);
    d.slices = static_cast<int32_t>(ceil_div(p.c, 4 * p.per_chunk()));
    d.tiles = static_cast<int32_t>(tiles.count());
    d.resident = tiles.channels == 1 && int64_t{d.slices} * p.taps() <= int64_t{tile.stages} * tile.stage_taps;
    d.div_m_tiles = FastDiv(static_cast<uint32_t>(tiles.channels));
    d.div_tiles_h = FastDiv(static_cast<uint32_t>(tiles.height));
    d.div_tiles_w = FastDiv(static_cast<uint32_t>(tiles.width));
    return d;
}

class DirectTmaPlan : public OneKernelPlan {
public:
    DirectTmaPlan(const Problem &p, const Tactic &t, const Device &d, const Kernel &kernel, const DirectTmaParams &params,
                  const DirectTmaShared &shared)
        : OneKernelPlan(p, t, d, kernel), params_(params), shared_(shared), row_(kRows[t.row]), grid_(kernel.grid) {
        // TMA copies 16 bytes at least, from addresses that are multiples of it; Y is written in chunks of it.
        vectors = kX | kW | kY | (p.has_bias ? kB : kNoTensors) | (p.has_residual ? kResidual : kNoTensors) |
                  (p.prologue_affine ? kScale | kShift : kNoTensors);
    }

    double expected_us() const override;

    cudaError_t launch(const convpool_tensors &t, cudaStream_t stream) const override {
        DirectTmaParams d = params_;
        d.y = t.y;
        d.prologue = prologue_of(problem, t);
        d.epilogue = epilogue_of(problem, t);
        cudaError_t error = x_maps_.get(t.x, d.x_map, [&](CUtensorMap *maps) { return encode_x(t.x, maps); });
        if (error == cudaSuccess) error = w_map_.get(t.w, &d.w_map, [&](CUtensorMap *map) { return encode_w(t.w, map); });
        return error == cudaSuccess ? launch_kernel(&d, stream) : error;
    }

private:
    uint64_t pixel_bytes() const { return static_cast<uint64_t>(problem.c) * problem.element_bytes(); }
    uint32_t slice() const { return static_cast<uint32_t>(4 * problem.per_chunk()); }

    // X [n,h,w/2,c]: even columns, odd columns.
    cudaError_t encode_x(const void *x, CUtensorMap *maps) const {
        const Problem &p = problem;
        const uint64_t h = static_cast<uint64_t>(p.in[1]), w = static_cast<uint64_t>(p.in[2]), pixel = pixel_bytes();
        for (int odd = 0; odd < 2; ++odd) {
            const uint64_t sizes[] = {static_cast<uint64_t>(p.c), (w + 1 - odd) / 2, h, static_cast<uint64_t>(p.n)};
            const uint64_t strides[] = {2 * pixel, w * pixel, h * w * pixel};
            const uint32_t box[] = {slice(), static_cast<uint32_t>(shared_.raw_columns), static_cast<uint32_t>(shared_.raw_rows),
                                    1};
            const cudaError_t error = encode_tensor_map(&maps[odd], row_.precision, 4, static_cast<const char *>(x) + odd * pixel,
                                                        sizes, strides, box, 0, false);
            if (error != cudaSuccess) return error;
        }
        return cudaSuccess;
    }

    // W [taps,m,c].
    cudaError_t encode_w(const void *w, CUtensorMap *map) const {
        const Problem &p = problem;
        const uint64_t taps = static_cast<uint64_t>(p.taps());
        const uint64_t sizes[] = {static_cast<uint64_t>(p.c), static_cast<uint64_t>(p.m), taps};
        const uint64_t strides[] = {pixel_bytes() * taps, pixel_bytes()};
        const uint32_t box[] = {slice(), static_cast<uint32_t>(row_.tile.block_n), static_cast<uint32_t>(row_.tile.stage_taps)};
        return encode_tensor_map(map, row_.precision, 3, w, sizes, strides, box, 64, true);
    }

    DirectTmaParams params_;
    DirectTmaShared shared_;
    const Row &row_;
    int64_t grid_;
    mutable TensorMaps<2> x_maps_;
    mutable TensorMaps<1> w_map_;
};

// Blocks take their tiles one after the other. Nothing hides the first slice of X and the last round of Y.
double DirectTmaPlan::expected_us() const {
    const Problem &p = problem;
    const Cost &cost = row_.tile.cost;
    double slice_us = cost.slice_us * (row_.precision == Precision::kTF32 ? 0.92 : 1.0);
    if (p.prologue_affine || (p.has_prologue() && row_.tile.kernel == 1)) slice_us = std::max(slice_us, cost.prologue_us);
    else if (p.has_prologue()) slice_us *= 1.3;  // only an activation; of 128 pixels 1.04 to 1.17, the rest is caution
    const double rounds = ceil_div(params_.tiles, grid_);
    const double exposed_bytes = (x_bytes(p) / params_.slices + y_bytes(p)) / rounds;
    return 2.03 + std::max(rounds * (params_.slices * slice_us + cost.end_us) + exposed_bytes / kBytesPerUs,
                           (x_bytes(p) + y_bytes(p)) / kBytesPerUs);
}

class DirectTma : public Family {
public:
    std::vector<Tactic> tactics() const override {
        std::vector<Tactic> all;
        for (const Row &row : kRows) {
            const std::string size = std::to_string(row.tile.kernel);
            all.push_back({row.id, this, all.size(),
                           tile_name("direct_fused", 90, true, row.precision, row.tile.block_m(), row.tile.block_n,
                                     is_16_bit(row.precision) ? 32 : 16) +
                               stages_name(row.tile.stages, 1) + "_tma" + size + "x" + size,
                           "direct_fused", static_cast<int32_t>(row.precision), 1, 90, true});
        }
        return all;
    }

    std::unique_ptr<Plan> plan(const Problem &p, const Tactic &t, const Device &device, std::string &reason) const override {
        const Tile &tile = kRows[t.row].tile;
        reason = problem_reason(p, t);
        if (reason.empty()) reason = form_reason(p, t, tile);
        if (!reason.empty()) return nullptr;
        const DirectTmaShared shared = direct_tma_shared(tile.subtiles, tile.block_n, tile.kernel, tile.stage_taps, tile.stages,
                                                         tile.raw_stages, tile.mean_stages);
        const Tiles tiles(p, tile);
        if (shared.bytes > device.shared_per_block)
            reason = refusal(t, "shared memory of a block", device.shared_per_block, std::to_string(shared.bytes),
                             "use another direct_fused tactic");
        else if (tiles.groups * std::max<int64_t>(tiles.channels, tile.subtiles) > kMaxCount)
            reason = refusal(t, "tiles", tiles.count(), kAtMostMaxCount, "use another direct_fused tactic");
        if (!reason.empty()) return nullptr;
        const void *function =
            kernel_of_row<kRows>(t.row, [&]<Precision kPrecision>() { return kernel<kPrecision>(t.row, p.has_prologue()); });
        const int64_t grid = std::min<int64_t>(tiles.count(), device.multiprocessors);
        const Kernel main{function, grid, (1 + tile.mean_warps + 8) * 32, 1, shared.bytes};
        return std::make_unique<DirectTmaPlan>(p, t, device, main, params_of(p, tile, tiles), shared);
    }
};

}  // namespace
}  // namespace direct_tma

const Family &direct_tma_family() {
    static const direct_tma::DirectTma family;
    return family;
}

}  // namespace convpool

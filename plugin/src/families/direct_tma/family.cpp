// SPDX-License-Identifier: Apache-2.0
// direct_tma: pooling 2x2 and convolution in one kernel on Hopper, for kernels of 3x3 and 1x1 whose steps over X are 2.
#include <algorithm>

#include "core/cost.h"
#include "families/direct_tma/rows.h"
#include "subtiles/plan.h"

namespace convpool::direct_tma {
namespace {

SubtileShape shape_of(const Tile &tile, const DirectTmaShared &shared) {
    return {tile.kernel, 2, tile.subtiles, tile.block_n, tile.stage_taps, tile.stages, shared.raw_columns, shared.raw_rows, 0};
}

class DirectTmaPlan : public SubtilePlan {
public:
    using SubtilePlan::SubtilePlan;

    // Blocks take their tiles one after the other. Nothing hides the first slice of X and the last round of Y.
    double expected_us() const override {
        const Problem &p = problem;
        const Row &row = kRows[tactic.row];
        const Cost &cost = row.tile.cost;
        double slice_us = cost.slice_us * (row.precision == Precision::kTF32 ? 0.92 : 1.0);
        if (p.prologue_affine || (p.has_prologue() && row.tile.kernel == 1)) slice_us = std::max(slice_us, cost.prologue_us);
        else if (p.has_prologue()) slice_us *= 1.3;  // only an activation; of 128 pixels 1.04 to 1.17, the rest is caution
        const double rounds = ceil_div(params().tiles, device.multiprocessors);
        const double exposed_bytes = (x_bytes(p) / params().slices + y_bytes(p)) / rounds;
        return 2.03 + std::max(rounds * (params().slices * slice_us + cost.end_us) + exposed_bytes / kBytesPerUs,
                               (x_bytes(p) + y_bytes(p)) / kBytesPerUs);
    }
};

class DirectTma : public Family {
public:
    std::vector<Tactic> tactics() const override {
        return hopper_tactics(*this, kRows, [](const Row &row) {
            const std::string size = std::to_string(row.tile.kernel);
            return tile_name("direct_fused", 90, true, row.precision, row.tile.block_m(), row.tile.block_n,
                             is_16_bit(row.precision) ? 32 : 16) +
                   stages_name(row.tile.stages, 1) + "_tma" + size + "x" + size;
        });
    }

    std::unique_ptr<Plan> plan(const Problem &p, const Tactic &t, const Device &device, std::string &reason) const override {
        const Tile &tile = kRows[t.row].tile;
        reason = problem_reason(p, t);
        if (reason.empty()) reason = subtile_reason(p, t, tile.kernel, 2);
        if (!reason.empty()) return nullptr;
        const DirectTmaShared shared = direct_tma_shared(tile.subtiles, tile.block_n, tile.kernel, tile.stage_taps, tile.stages,
                                                         tile.raw_stages, tile.mean_stages);
        const SubtileShape shape = shape_of(tile, shared);
        const SubtileTiles tiles(p, shape);
        if (shared.bytes > device.shared_per_block)
            reason = refusal(t, "shared memory of a block", device.shared_per_block, std::to_string(shared.bytes),
                             "use another direct_fused tactic");
        else if (tiles.subtile_groups * std::max<int64_t>(tiles.channels, tile.subtiles) > kMaxCount)
            reason = refusal(t, "tiles", tiles.count(), kAtMostMaxCount, "use another direct_fused tactic");
        if (!reason.empty()) return nullptr;
        const void *function = kernel_of_row<kRows>(t.row, p.has_prologue());
        const int64_t grid = std::min<int64_t>(tiles.count(), device.multiprocessors);
        const Kernel main{function, grid, (1 + tile.mean_warps + 8) * 32, 1, shared.bytes};
        return std::make_unique<DirectTmaPlan>(p, t, device, main, shape);
    }
};

}  // namespace

CONVPOOL_DEFINE_FAMILY(DirectTma)

}  // namespace convpool::direct_tma

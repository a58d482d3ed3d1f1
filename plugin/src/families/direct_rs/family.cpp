// SPDX-License-Identifier: Apache-2.0
// direct_rs: pooling and convolution in one kernel on Hopper, box means in registers, where windows lie side by side.
#include <algorithm>
#include <cmath>

#include "core/cost.h"
#include "core/kernel_lookup.h"
#include "core/launch.h"
#include "core/naming.h"
#include "core/pushed_sums.h"
#include "core/refusal.h"
#include "families/direct_rs/params.h"
#include "families/direct_rs/rows.h"
#include "subtiles/plan.h"

namespace convpool {
namespace direct_rs {
namespace {

constexpr double kStartUs = 2.03;  // of a kernel, with what nothing hides
// What it takes to add up the sums of a cluster's blocks, more for a larger tile.
constexpr double kSplitUs = 1.5, kSplitTileUs = 2;

DirectRsShared shared_of(const Tile &t) {
    return direct_rs_shared(t.side, t.subtiles(), t.k_parts, t.block_n, t.kernel, t.pool, t.stage_taps, t.stages, t.raw_stages);
}

// What the problem's prologue is to the kernels.
RsPrologue prologue_of(const Problem &p) {
    if (!p.has_prologue()) return RsPrologue::kNone;
    if (p.prologue_activation == Activation::kRelu) return RsPrologue::kRelu;
    return p.prologue_affine ? RsPrologue::kAffine : RsPrologue::kLeaky;
}

// What it adds to a slice of 128 pixels under 3x3 kernels: an instruction or more for each word of pixels.
double prologue_us(const Problem &p) {
    switch (prologue_of(p)) {
    case RsPrologue::kNone: return 0;
    case RsPrologue::kRelu: return p.prologue_affine ? 0.42 : 0.16;
    case RsPrologue::kLeaky: return 0.30;
    case RsPrologue::kAffine: return 0.95;
    }
    return 0;
}

// Empty, or the reason why the row does not take it.
std::string prologue_reason(const Problem &p, const Tactic &t) {
    constexpr float kLeast = 0x1p-24f;  // less is zero in fp16, and NaN times infinity
    const Row &row = kRows[t.row];
    const std::string next = "use another direct_fused tactic";
    if (!row.takes(prologue_of(p))) {
        const char *names[kRsPrologues] = {"none", "ReLU", "LeakyReLU", "scale and shift without ReLU"};
        return refusal(t, "prologue", names[static_cast<int>(prologue_of(p))],
                       row.takes(RsPrologue::kRelu) ? "none, or one with ReLU" : "none", next);
    }
    const float slope = p.prologue_alpha;
    if (p.prologue_activation == Activation::kLeakyRelu && !(slope <= 1.f && std::fabs(slope) >= kLeast))
        return refusal(t, "slope of the prologue", std::to_string(slope), "at most 1, and at least 2^-24 in size", next);
    return {};
}

class DirectRsPlan : public SubtilePlan {
public:
    using SubtilePlan::SubtilePlan;

    // Blocks take their tiles one after the other. Nothing hides the first slice of X and the last round of Y.
    double expected_us() const override {
        const Row &row = kRows[tactic.row];
        const int64_t clusters = std::max<int64_t>(1, int64_t(usable_multiprocessors(row.split, device)) / row.split);
        const double rounds = ceil_div(params().tiles, clusters);
        const double slices = ceil_div(params().slices, row.split), x = x_bytes(problem), y = y_bytes(problem);
        const double slice_us = row.slice_us() + prologue_us(problem) * row.tile.block_m() / 128;
        double tile_us = slices * slice_us + row.tile.cost.end_us;
        if (row.split > 1) tile_us += kSplitUs + kSplitTileUs * tile_share(row.tile.block_m(), row.tile.block_n);
        const double exposed_bytes = (x / params().slices + y) / rounds;
        return kStartUs + std::max(rounds * tile_us + exposed_bytes / kBytesPerUs, (x + y) / kBytesPerUs);
    }
};

class DirectRs : public Family {
public:
    std::vector<Tactic> tactics() const override {
        std::vector<Tactic> all;
        for (const Row &row : kRows) {
            const std::string size = std::to_string(row.tile.kernel);
            all.push_back({row.id, this, all.size(),
                           tile_name("direct_fused", 90, true, row.precision, row.tile.block_m(), row.tile.block_n,
                                     is_16_bit(row.precision) ? 32 : 16) +
                               stages_name(row.tile.stages, row.split) + (row.packed ? "_packed" : "") +
                               (row.tile.side == 4 ? "_of4" : "") + "_rs" + size + "x" + size +
                               (row.tile.pool == 2 ? "" : "_pool" + std::to_string(row.tile.pool)),
                           "direct_fused", static_cast<int32_t>(row.precision), row.split, 90, true, row.packed});
        }
        return all;
    }

    std::unique_ptr<Plan> plan(const Problem &p, const Tactic &t, const Device &device, std::string &reason) const override {
        const Tile &tile = kRows[t.row].tile;
        reason = problem_reason(p, t);
        if (reason.empty()) reason = subtile_reason(p, t, tile.kernel, tile.pool);
        if (reason.empty()) reason = prologue_reason(p, t);
        if (!reason.empty()) return nullptr;
        const int32_t split = kRows[t.row].split;
        const DirectRsShared shared = shared_of(tile);
        const SubtileShape shape{tile.kernel, tile.pool,          tile.subtiles(), tile.block_n, tile.stage_taps,
                                 tile.stages, shared.raw_columns, shared.raw_rows, 64,           tile.side,
                                 split};
        const SubtileTiles tiles(p, shape);
        const int64_t slices = ceil_div(p.c, 4 * p.per_chunk());
        const int64_t bytes =
            split == 1 ? shared.bytes : shared.push_offset + pushed_bytes(split, tile.block_m() * tile.block_n / 128);
        if (bytes > device.shared_per_block)
            reason = refusal(t, "shared memory of a block", device.shared_per_block, std::to_string(bytes),
                             "use another direct_fused tactic");
        else if (slices < split)
            reason =
                refusal(t, "slices of channels", slices, "at least " + std::to_string(split), "use another direct_fused tactic");
        else if (tiles.groups * std::max<int64_t>(tiles.channels * split, tile.subtiles()) > kMaxCount)
            reason = refusal(t, "tiles", tiles.count(), kAtMostMaxCount, "use another direct_fused tactic");
        if (!reason.empty()) return nullptr;
        const size_t instance = t.row * kRsPrologues + static_cast<size_t>(prologue_of(p));
        const void *function =
            kernel_of_row<kRows>(t.row, [&]<Precision kPrecision>() { return kernel<kPrecision>(instance, false); });
        const int64_t grid = split > 1 ? tiles.count() * split : std::min<int64_t>(tiles.count(), device.multiprocessors);
        const Kernel main{function, grid, 128 * (tile.groups + 1), split, bytes};
        return std::make_unique<DirectRsPlan>(p, t, device, main, shape);
    }
};

}  // namespace
}  // namespace direct_rs

const Family &direct_rs_family() {
    static const direct_rs::DirectRs family;
    return family;
}

}  // namespace convpool

// SPDX-License-Identifier: Apache-2.0
// direct_rs_nchw: direct_rs for X and Y with their channels first.
#include <algorithm>

#include "core/cost.h"
#include "core/driver.h"
#include "core/kernel_lookup.h"
#include "core/launch.h"
#include "core/naming.h"
#include "core/refusal.h"
#include "families/direct_rs_nchw/params.h"
#include "families/direct_rs_nchw/rows.h"
#include "subtiles/plan.h"

namespace convpool {
namespace direct_rs_nchw {
namespace {

constexpr double kStartUs = 2.03;  // of a kernel, with what nothing hides

DirectRsNchwShared shared_of(const Row &r) {
    const Tile &t = r.tile;
    return direct_rs_nchw_shared(is_16_bit(r.precision), t.columns, t.rows(), t.k_parts, t.block_n, t.stage_taps, t.stages,
                                 t.raw_stages);
}

// A tile is `depth` rectangles of outputs, one after the other: by columns, by rows, by images.
struct Tiles {
    int64_t height, width, channels, groups;

    Tiles(const Problem &p, const Tile &t)
        : height(ceil_div(p.out[1], t.rows())), width(ceil_div(p.out[2], t.columns)), channels(ceil_div(p.m, t.block_n)),
          groups(ceil_div(p.n * height * width, t.depth)) {}
};

class DirectRsNchwPlan : public SubtilePlan {
public:
    DirectRsNchwPlan(const Problem &p, const Tactic &t, const Device &d, const Kernel &kernel, const Tiles &tiles,
                     const SubtileShape &shape)
        : SubtilePlan(p, t, d, kernel, shape) {
        params_.tiles = static_cast<int32_t>(tiles.groups * tiles.channels);
        params_.div_tiles_h = FastDiv(static_cast<uint32_t>(tiles.height));
        params_.div_tiles_w = FastDiv(static_cast<uint32_t>(tiles.width));
        vectors = kX | kW;  // TMA copies 16 bytes at least, from addresses that are multiples of it
    }
    // Blocks take their tiles one after the other. Nothing hides the first slice of X and the last round of Y.
    double expected_us() const override {
        const Row &row = kRows[tactic.row];
        const double rounds = ceil_div(params().tiles, grid()), x = x_bytes(problem), y = y_bytes(problem);
        const double exposed_bytes = (x / params().slices + y) / rounds;
        return kStartUs +
               std::max(rounds * (params().slices * row.slice_us() + row.tile.cost.end_us) + exposed_bytes / kBytesPerUs,
                        (x + y) / kBytesPerUs);
    }

private:
    // X [n,c,h,w].
    cudaError_t encode_x(const void *x, CUtensorMap *maps) const override {
        const DirectRsNchwShared shared = shared_of(kRows[tactic.row]);
        const Problem &p = problem;
        const uint64_t n = static_cast<uint64_t>(p.n), c = static_cast<uint64_t>(p.c), h = static_cast<uint64_t>(p.in[1]),
                       w = static_cast<uint64_t>(p.in[2]), row = w * p.element_bytes();
        const uint64_t sizes[] = {w, h, c, n}, strides[] = {row, h * row, c * h * row};
        const uint32_t box[] = {static_cast<uint32_t>(shared.raw_columns), static_cast<uint32_t>(shared.raw_rows),
                                static_cast<uint32_t>(4 * p.per_chunk()), 1};
        return encode_tensor_map(maps, static_cast<Precision>(tactic.precision), 4, x, sizes, strides, box, 0, false);
    }
};

class DirectRsNchw : public Family {
public:
    std::vector<Tactic> tactics() const override {
        std::vector<Tactic> all;
        for (const Row &row : kRows)
            all.push_back({row.id, this, all.size(),
                           tile_name("direct_fused", 90, true, row.precision, row.tile.block_m(), row.tile.block_n,
                                     is_16_bit(row.precision) ? 32 : 16) +
                               stages_name(row.tile.stages, 1) + (row.packed ? "_packed" : "") + "_rs3x3_nchw" +
                               std::to_string(row.tile.columns),
                           "direct_fused", static_cast<int32_t>(row.precision), 1, 90, true, row.packed});
        return all;
    }

    std::unique_ptr<Plan> plan(const Problem &p, const Tactic &t, const Device &device, std::string &reason) const override {
        const Row &row = kRows[t.row];
        const Tile &tile = row.tile;
        reason = problem_reason(p, t);
        if (reason.empty()) reason = subtile_reason(p, t, 3, 2, true);
        if (reason.empty() && p.has_prologue()) reason = refusal(t, "prologue", "one", "none", "use another direct_fused tactic");
        if (!reason.empty()) return nullptr;
        const DirectRsNchwShared shared = shared_of(row);
        const Tiles tiles(p, tile);
        if (shared.bytes > device.shared_per_block)
            reason = refusal(t, "shared memory of a block", device.shared_per_block, std::to_string(shared.bytes),
                             "use another direct_fused tactic");
        else if (tiles.groups * std::max<int64_t>(tiles.channels, tile.depth) > kMaxCount)
            reason = refusal(t, "tiles", tiles.groups * tiles.channels, kAtMostMaxCount, "use another direct_fused tactic");
        if (!reason.empty()) return nullptr;
        const int64_t pad = int64_t{p.pads_begin[2]} * p.pool_strides[2] + p.pool_pads_begin[2];
        const void *function =
            kernel_of_row<kRows>(t.row, [&]<Precision kPrecision>() { return kernel<kPrecision>(t.row, pad % 4 == 1); });
        const int64_t grid = std::min<int64_t>(tiles.groups * tiles.channels, device.multiprocessors);
        const Kernel main{function, grid, 128 * 3, 1, shared.bytes};
        const SubtileShape shape{
            3, 2, tile.depth, tile.block_n, tile.stage_taps, tile.stages, shared.raw_columns, shared.raw_rows, 0};
        return std::make_unique<DirectRsNchwPlan>(p, t, device, main, tiles, shape);
    }
};

}  // namespace
}  // namespace direct_rs_nchw

const Family &direct_rs_nchw_family() {
    static const direct_rs_nchw::DirectRsNchw family;
    return family;
}

}  // namespace convpool

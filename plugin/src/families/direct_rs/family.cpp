// SPDX-License-Identifier: Apache-2.0
// direct_rs: pooling and convolution in one kernel on Hopper, box means in registers, where windows lie side by side; X and Y with
// their channels last, or both first.
#include <algorithm>
#include <cmath>

#include "core/cost.h"
#include "families/direct_rs/rows.h"
#include "subtiles/plan.h"

namespace convpool::direct_rs {
namespace {

constexpr double kStartUs = 2.03;  // of a kernel, with what nothing hides
// The time to add up the sums of a cluster's blocks, more for a larger tile.
constexpr double kSplitUs = 1.5, kSplitTileUs = 2;

DirectRsShared shared_of(const Row &row) {
    const Tile &t = row.tile;
    return t.channels_first ? direct_rs_nchw_shared(is_16_bit(row.precision), t.side, t.rows(), t.k_parts, t.block_n,
                                                    t.stage_taps, t.stages, t.raw_stages)
                            : direct_rs_shared(t.side, t.subtiles(), t.k_parts, t.block_n, t.kernel, t.pool, t.stage_taps,
                                               t.stages, t.raw_stages);
}

SubtileShape shape_of(const Row &row, const DirectRsShared &shared) {
    const Tile &t = row.tile;  // below: the fields in the order of subtiles/plan.h
    return {t.kernel,           t.pool,          t.subtiles(),
            t.block_n,          t.stage_taps,    t.stages,
            shared.raw_columns, shared.raw_rows, t.channels_first ? 0 : 64,
            t.rows(),           t.side,          t.images(),
            row.split};
}

// The kernels' form of the problem's prologue.
RsPrologue prologue_kind_of(const Problem &p) {
    if (!p.has_prologue()) return RsPrologue::kNone;
    if (p.prologue_activation == Activation::kRelu) return RsPrologue::kRelu;
    return p.prologue_affine ? RsPrologue::kAffine : RsPrologue::kLeaky;
}

// The time that it adds to a slice of 128 pixels under 3x3 kernels: an instruction or more for each word of pixels.
double prologue_us(const Problem &p) {
    switch (prologue_kind_of(p)) {
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
    if (!row.takes(prologue_kind_of(p))) {
        const char *names[] = {"none", "ReLU", "LeakyReLU", "scale and shift without ReLU"};
        return refusal(t, "prologue", names[static_cast<int>(prologue_kind_of(p))],
                       row.takes(RsPrologue::kRelu) ? "none, or one with ReLU" : "none", next);
    }
    const float slope = p.prologue_alpha;
    if (p.prologue_activation == Activation::kLeakyRelu && !(slope <= 1.f && std::fabs(slope) >= kLeast))
        return refusal(t, "slope of the prologue", std::to_string(slope), "at most 1, and at least 2^-24 in size", next);
    return {};
}

// Launched by SubtilePlan (subtiles/plan.cpp).
class DirectRsPlan : public SubtilePlan {
public:
    DirectRsPlan(const Problem &p, const Tactic &t, const Device &d, const Kernel &kernel, const SubtileShape &shape)
        : SubtilePlan(p, t, d, kernel, shape) {
        if (kRows[t.row].tile.channels_first) vector_tensors = kX | kW;  // what TMA copies
    }
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

private:
    // Channels first, X [n,c,h,w].
    cudaError_t encode_x(const void *x, CUtensorMap *maps) const override {
        if (!kRows[tactic.row].tile.channels_first) return SubtilePlan::encode_x(x, maps);
        const Problem &p = problem;
        const uint64_t n = static_cast<uint64_t>(p.n), c = static_cast<uint64_t>(p.c), h = static_cast<uint64_t>(p.in[1]),
                       w = static_cast<uint64_t>(p.in[2]), row = w * p.element_bytes();
        const uint64_t sizes[] = {w, h, c, n}, strides[] = {row, h * row, c * h * row};
        const uint32_t box[] = {static_cast<uint32_t>(shape_.raw_columns), static_cast<uint32_t>(shape_.raw_rows),
                                static_cast<uint32_t>(4 * p.per_chunk()), 1};
        return encode_tensor_map(maps, static_cast<Precision>(tactic.precision), 4, x, sizes, strides, box, 0, false);
    }
};

class DirectRs : public Family {
public:
    std::vector<Tactic> tactics() const override {
        return hopper_tactics(*this, kRows, [](const Row &row) {
            const Tile &tile = row.tile;
            const std::string size = std::to_string(tile.kernel);
            return tile_name("direct_fused", 90, true, row.precision, tile.block_m(), tile.block_n,
                             is_16_bit(row.precision) ? 32 : 16) +
                   stages_name(tile.stages, row.split) + (row.packed ? "_packed" : "") + (tile.images() == 4 ? "_of4" : "") +
                   "_rs" + size + "x" + size + (tile.pool == 2 ? "" : "_pool" + std::to_string(tile.pool)) +
                   (tile.channels_first ? "_nchw" + std::to_string(tile.side) : "");
        });
    }

    std::unique_ptr<Plan> plan(const Problem &p, const Tactic &t, const Device &device, std::string &reason) const override {
        const Row &row = kRows[t.row];
        const Tile &tile = row.tile;
        const std::string next = "use another direct_fused tactic";
        reason = problem_reason(p, t);
        if (reason.empty()) reason = subtile_reason(p, t, tile.kernel, tile.pool, tile.channels_first);
        if (reason.empty()) reason = prologue_reason(p, t);
        if (!reason.empty()) return nullptr;
        const DirectRsShared shared = shared_of(row);
        const SubtileShape shape = shape_of(row, shared);
        const SubtileTiles tiles(p, shape);
        const int64_t slices = ceil_div(p.c, 4 * p.per_chunk());
        const int64_t bytes =
            row.split == 1 ? shared.bytes : shared.push_offset + pushed_bytes(row.split, tile.block_m() * tile.block_n / 128);
        if (bytes > device.shared_per_block)
            reason = refusal(t, "shared memory of a block", device.shared_per_block, std::to_string(bytes), next);
        else if (slices < row.split)
            reason = refusal(t, "slices of channels", slices, "at least " + std::to_string(row.split), next);
        else if (tiles.subtile_groups * std::max<int64_t>(tiles.channels * row.split, tile.subtiles()) > kMaxCount)
            reason = refusal(t, "tiles", tiles.count(), kAtMostMaxCount, next);
        if (!reason.empty()) return nullptr;
        const int64_t pad = int64_t{p.pads_begin[2]} * p.pool_strides[2] + p.pool_pads_begin[2];
        const int variant = tile.channels_first ? pad % 4 == 1 /* kPaddedByOne */ : static_cast<int>(prologue_kind_of(p));
        const void *function = kernel_of_row<kRows>(t.row, variant);
        const int64_t grid = row.split > 1 ? tiles.count() * row.split : std::min<int64_t>(tiles.count(), device.multiprocessors);
        const Kernel main{function, grid, 128 * (tile.groups + 1), row.split, bytes};
        return std::make_unique<DirectRsPlan>(p, t, device, main, shape);
    }
};

}  // namespace

CONVPOOL_DEFINE_FAMILY(DirectRs)

}  // namespace convpool::direct_rs

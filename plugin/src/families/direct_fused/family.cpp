// SPDX-License-Identifier: Apache-2.0
// direct_fused: pooling and convolution in one kernel, on tensor cores by mma.sync. It takes every layout.
#include <algorithm>
#include <iterator>

#include "core/cost.h"
#include "core/kernel_lookup.h"
#include "core/launch.h"
#include "core/naming.h"
#include "core/refusal.h"
#include "families/direct_fused/layout.h"

namespace convpool {
namespace direct_fused {
namespace {

class DirectFusedPlan : public OneKernelPlan {
public:
    DirectFusedPlan(const Problem &p, const Tactic &t, const Device &d, const Kernel &kernel, const Layout &layout)
        : OneKernelPlan(p, t, d, kernel), layout_(layout), row_(kRows[t.row]) {}

    double expected_us() const override;

    cudaError_t launch(const convpool_tensors &t, cudaStream_t stream) const override {
        DirectFusedParams d = layout_.params;
        set_arrays(d, problem, t);
        d.x_chunked = problem.x_rows_chunked() && aligned(t.x, 16);
        d.w_chunked = problem.w_rows_chunked() && aligned(t.w, 16);
        d.y_vectors = y_vectors(problem, t);
        // No run leaves a tile's row.
        d.y_runs = y_runs(problem, t) && problem.out[2] % kRunPixels == 0 && 1 << d.tile_w_log2 >= kRunPixels;
        return launch_kernel(&d, stream);
    }

private:
    Layout layout_;
    const Row &row_;
};

double DirectFusedPlan::expected_us() const {
    const Problem &p = problem;
    const Tile &tile = row_.tile;
    const DirectFusedParams &d = layout_.params;
    const double share = tile_share(tile.block_m, tile.block_n), wider = row_.precision == Precision::kTF32x3 ? 1.6 : 1.0;
    const int threads = tile.warps_m * tile.warps_n * 32;
    const int64_t slices = ceil_div(d.slices, row_.split);
    Block block{slices * d.taps, {tile.step.issue_us * wider, tile.step.latency_us * wider}, 1.65 + 0.83 * share};
    block.ends_us +=
        channels_first_ends_us(p, double(tile.block_m) * tile.block_n / (threads * row_.split), p.out[2] % kRunPixels == 0);
    // Channels first, a warp gathers a chunk of a row of pixels at a time, and waits for each.
    const int64_t rows = ceil_div(int64_t{d.tile_images} * d.raw_h, threads / 32);
    if (!p.x_channels_last) block.ends_us += slices * rows * 4 * ceil_div(d.raw_w, 32) * kMemoryLatencyUs;
    // Box means of a slice, as far as products do not hide them; those of one tap hide nothing, whatever runs beside them.
    const double means_us = (d.taps == 1 ? 2.25 : 1.7) * (p.has_prologue() ? 3.0 : 1.0);
    if (d.taps == 1) {
        block.step.issue_us += means_us;
        block.step.latency_us += means_us;
    } else {
        block.ends_us += slices * means_us;
    }
    return rounds_us({d.tiles, row_.split, split_us(row_.split, share), layout_.blocks_per_multiprocessor}, block, device);
}

class DirectFused : public Family {
public:
    std::vector<Tactic> tactics() const override {
        std::vector<Tactic> all;
        for (const Row &row : kRows) {
            const Tile &t = row.tile;
            const int32_t min_cc = mma_min_cc(row.precision, row.split);
            all.push_back({row.id, this, all.size(),
                           tile_name("direct_fused", min_cc, false, row.precision, t.block_m, t.block_n,
                                     is_16_bit(row.precision) ? 32 : 16) +
                               stages_name(t.stages, row.split),
                           "direct_fused", static_cast<int32_t>(row.precision), row.split, min_cc, false});
        }
        return all;
    }

    std::unique_ptr<Plan> plan(const Problem &p, const Tactic &t, const Device &d, std::string &reason) const override {
        const Row &row = kRows[t.row];
        Layout layout;
        reason = problem_reason(p, t);
        if (reason.empty()) reason = lay_out(p, t, row, d, layout);
        if (!reason.empty()) return nullptr;
        const void *function =
            kernel_of_row<kRows>(t.row, [&]<Precision kPrecision>() { return kernel<kPrecision>(t.row, p.has_prologue()); });
        const Kernel main{function, layout.grid, row.tile.warps_m * row.tile.warps_n * 32, row.split, layout.shared_bytes};
        return std::make_unique<DirectFusedPlan>(p, t, d, main, layout);
    }
};

}  // namespace
}  // namespace direct_fused

const Family &direct_fused_family() {
    static const direct_fused::DirectFused family;
    return family;
}

}  // namespace convpool

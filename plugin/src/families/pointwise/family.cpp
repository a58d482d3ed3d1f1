// SPDX-License-Identifier: Apache-2.0
// pointwise: pooling 2x2 and convolution 1x1 in one kernel on Hopper, for 16-bit types.
#include <algorithm>

#include "core/cost.h"
#include "core/launch.h"
#include "families/pointwise/rows.h"

namespace convpool::pointwise {
namespace {

class PointwisePlan : public OneKernelPlan {
public:
    PointwisePlan(const Problem &p, const Tactic &t, const Device &d, const Kernel &kernel, const PointwiseParams &params)
        : OneKernelPlan(p, t, d, kernel), params_(params), row_(kRows[t.row]) {
        // X, W, scale and shift are read in chunks of 16 bytes.
        vector_tensors = kX | kW | (p.prologue_affine ? kScale | kShift : kNoTensors);
    }

    double expected_us() const override {
        const Problem &p = problem;
        const Tile &tile = row_.tile;
        Block block{ceil_div(ceil_div(params_.chunks, 8), row_.split), tile.step, tile.ends_us};
        const double lanes = tile.warps_m * tile.warps_n * 32 * row_.split;
        block.ends_us += channels_first_ends_us(p, double(tile.block_m) * tile.block_n / lanes, false);
        if (p.has_prologue()) {
            block.step.issue_us += 0.53;
            block.step.latency_us += 0.53;
        }
        const double added_up_us = split_us(row_.split, tile_share(tile.block_m, tile.block_n));
        return std::max(rounds_us({params_.tiles, row_.split, added_up_us, 1}, block, device),
                        (x_bytes(p) + y_bytes(p)) / kBytesPerUs + added_up_us);
    }

    cudaError_t launch(const convpool_tensors &t, cudaStream_t stream) const override {
        PointwiseParams d = params_;
        set_arrays(d, problem, t);
        d.y_vectors = y_vectors(problem, t);
        return launch_kernel(&d, stream);
    }

private:
    PointwiseParams params_;
    const Row &row_;
};

PointwiseParams params_of(const Problem &p, int split) {
    PointwiseParams d{};
    d.h = static_cast<int32_t>(p.in[1]), d.w_pixels = static_cast<int32_t>(p.in[2]);
    d.chunks = static_cast<int32_t>(p.c / p.per_chunk());
    d.m = static_cast<int32_t>(p.m);
    d.out_h = static_cast<int32_t>(p.out[1]), d.out_w = static_cast<int32_t>(p.out[2]);
    // Past 32 bits only where there is one output, and no step.
    d.stride_h = static_cast<int32_t>(int64_t{p.strides[1]} * p.pool_strides[1]);
    d.stride_w = static_cast<int32_t>(int64_t{p.strides[2]} * p.pool_strides[2]);
    d.dilation_h = p.pool_dilations[1], d.dilation_w = p.pool_dilations[2];
    d.pad_h = p.pool_pads_begin[1], d.pad_w = p.pool_pads_begin[2];
    d.y_channels_last = p.y_channels_last;
    d.pixels = static_cast<int32_t>(p.n * p.out_pixels());
    d.split = split;
    d.div_out_w = FastDiv(d.out_w), d.div_out_hw = FastDiv(static_cast<uint32_t>(p.out_pixels()));
    return d;
}

class Pointwise : public Family {
public:
    std::vector<Tactic> tactics() const override {
        return hopper_tactics(*this, kRows, [](const Row &row) {
            return tile_name("direct_fused", 90, true, row.precision, row.tile.block_m, row.tile.block_n, 64) +
                   stages_name(row.tile.stages, row.split) + "_1x1";
        });
    }

    std::unique_ptr<Plan> plan(const Problem &p, const Tactic &t, const Device &device, std::string &reason) const override {
        const Row &row = kRows[t.row];
        reason = problem_reason(p, t);
        if (reason.empty()) reason = form_reason(p, t);
        if (!reason.empty()) return nullptr;
        const int64_t shared_bytes = shared_bytes_of(row);
        const int64_t column = int64_t{p.pool_dilations[2]} * (p.c / p.per_chunk());
        const int64_t row_chunks = p.pool_dilations[1] * p.in[2] * (p.c / p.per_chunk());
        const int64_t m_tiles = ceil_div(p.m, row.tile.block_n);
        const int64_t tiles = m_tiles * ceil_div(p.n * p.out_pixels(), row.tile.block_m);
        if (shared_bytes > device.shared_per_block)
            reason = refusal(t, "shared memory of a block", device.shared_per_block, std::to_string(shared_bytes), kNext);
        else if (column > kMaxCount) reason = refusal(t, "chunks between columns of a window", column, kAtMostMaxCount, kNext);
        else if (row_chunks > kMaxCount)
            reason = refusal(t, "chunks between rows of a window", row_chunks, kAtMostMaxCount, kNext);
        else if (tiles * row.split > kMaxCount) reason = refusal(t, "tiles", tiles, kAtMostMaxCount, kNext);
        if (!reason.empty()) return nullptr;
        PointwiseParams d = params_of(p, row.split);
        d.column = static_cast<int32_t>(column);
        d.row = static_cast<int32_t>(row_chunks);
        d.tiles = static_cast<int32_t>(tiles);
        d.div_m_tiles = FastDiv(static_cast<uint32_t>(m_tiles));
        const void *function = kernel_of_row<kRows>(t.row, p.has_prologue());
        const int64_t grid = row.split > 1 ? tiles * row.split : std::min<int64_t>(tiles, device.multiprocessors);
        const Kernel main{function, grid, row.tile.warps_m * row.tile.warps_n * 32, row.split, shared_bytes};
        return std::make_unique<PointwisePlan>(p, t, device, main, d);
    }

private:
    static constexpr const char *kNext = "use another direct_fused tactic";

    // Empty, or the reason why the problem is no pooling 2x2 before an unpadded convolution 1x1 of whole chunks.
    static std::string form_reason(const Problem &p, const Tactic &t) {
        if (!p.x_rows_chunked())
            return refusal(t, "layout of X", p.x_channels_last ? std::to_string(p.c) + " channels" : "NCHW",
                           "NHWC and a multiple of " + std::to_string(p.per_chunk()) + " channels", kNext);
        if (p.rank != 2) return refusal(t, "rank", p.rank, "2", kNext);
        for (int i = 1; i < kRank; ++i) {
            const std::string axis = " of dimension " + std::to_string(i - 1);
            if (p.kernel[i] != 1) return refusal(t, "kernel" + axis, p.kernel[i], "1", kNext);
            if (p.pool_kernel[i] != 2) return refusal(t, "pooling window" + axis, p.pool_kernel[i], "2", kNext);
            if (p.pads_begin[i] > 0 || (p.out[i] - 1) * p.strides[i] >= p.pooled[i])
                return refusal(t, "pads" + axis, std::to_string(p.pads_begin[i]) + " and " + std::to_string(p.pads_end[i]), "0",
                               kNext);
        }
        return {};
    }

    // A cluster exchanges accumulators, from the start of the memory on.
    static int64_t shared_bytes_of(const Row &row) {
        const Tile &t = row.tile;
        const int warp_n = t.block_n / t.warps_n, exchange = t.block_m * t.warps_n * (warp_n + 8) * 4;
        const int bytes = pointwise_shared(t.block_m, t.block_n, t.warps_m * t.warps_n, warp_n, t.stages).bytes;
        return row.split > 1 ? std::max(bytes, exchange) : bytes;
    }
};

}  // namespace

CONVPOOL_DEFINE_FAMILY(Pointwise)

}  // namespace convpool::pointwise

// SPDX-License-Identifier: Apache-2.0
// few_channels: pooling and convolution in one kernel for filters of at most 64 elements, in 16-bit types, whose X may be fp32,
// and TF32.
#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "core/cost.h"
#include "core/launch.h"
#include "families/few_channels/rows.h"

namespace convpool::few_channels {
namespace {

static_assert(CONVPOOL_MAX_FLOAT_FILTER == kMaxOperands, "what convpool.h promises");

constexpr int64_t kMaxPixels = int64_t{1} << 29;  // twice as far, and some more, is still 32-bit

// Elements of X between channels, columns and rows.
struct Pitches {
    int64_t channel, column, row;

    explicit Pitches(const Problem &p)
        : channel(p.x_channels_last ? 1 : p.in_pixels()), column(p.x_channels_last ? p.c : 1), row(column * p.in[2]) {}
};

// Empty, or the reason why an operand lies too far from its output pixel, or a filter has too many of them.
std::string size_reason(const Problem &p, const Tactic &t, const Tile &tile) {
    auto reject = [&](const char *what, int64_t value, int64_t most) {
        return refusal(t, what, value, "at most " + std::to_string(most), "use another direct_fused tactic");
    };
    const int64_t operands = p.c * p.taps();
    const int64_t most_operands = few_channels_step(static_cast<Precision>(t.precision)) * tile.steps;
    if (operands > most_operands) return reject("taps by input channels", operands, most_operands);
    const Pitches pitches(p);
    int64_t reach = p.c * pitches.channel;
    for (int i = 1; i < kRank; ++i) {
        const int64_t first = -int64_t{p.pads_begin[i]} * p.pool_strides[i] - p.pool_pads_begin[i];
        const int64_t last = first + int64_t{p.kernel[i] - 1} * p.dilations[i] * p.pool_strides[i] +
                             int64_t{p.pool_kernel[i] - 1} * p.pool_dilations[i];
        const int64_t most = std::max(std::abs(first), std::abs(last));
        if (most > kMaxPixels) return reject("pixels to the end of a window", most, kMaxPixels);
        reach += most * (i == 1 ? pitches.row : pitches.column);
        const int64_t steps = (p.out[i] - 1) * p.strides[i] * p.pool_strides[i];
        if (steps > kMaxPixels) return reject("pixels to the last window", steps, kMaxPixels);
    }
    const int64_t elements = kMaxCount / p.x_element_bytes();  // table[].offset counts bytes in 32 bits
    return reach > elements ? reject("elements to the end of a window", reach, elements) : std::string();
}

// Which pixel of X, and which filter tap, each operand of an output pixel is.
void list_operands(const Problem &p, FewChannelsParams &d) {
    for (int k = 0; k < d.operands; ++k) {
        const int tap = k / d.shape.c, c = k % d.shape.c, a = tap / d.kw, b = tap % d.kw;
        const int y = (a * p.dilations[1] - p.pads_begin[1]) * p.pool_strides[1] - p.pool_pads_begin[1];
        const int x = (b * p.dilations[2] - p.pads_begin[2]) * p.pool_strides[2] - p.pool_pads_begin[2];
        d.table[k] = {(c * d.channel + y * d.row + x * d.column) * d.x_element_bytes, y, x, c};
        d.rows[a] = {d.rows[a].operands | uint64_t{1} << k, y};
        d.columns[b] = {d.columns[b].operands | uint64_t{1} << k, x};
    }
}

FewChannelsParams params_of(const Problem &p) {
    FewChannelsParams d{};
    d.box = box_of(p);
    d.shape = p.shape();
    d.operands = static_cast<int32_t>(p.c * p.taps());
    d.plain = p.pool_size() == 1 && p.pool_pads_begin[1] == 0 && p.pool_pads_begin[2] == 0 && p.pool_pads_end[1] == 0 &&
              p.pool_pads_end[2] == 0 && !p.has_prologue();
    d.x_float = p.x_float();
    d.x_element_bytes = p.x_element_bytes();
    d.step_h = static_cast<int32_t>(p.out[1] > 1 ? int64_t{p.strides[1]} * p.pool_strides[1] : 0);
    d.step_w = static_cast<int32_t>(p.out[2] > 1 ? int64_t{p.strides[2]} * p.pool_strides[2] : 0);
    d.pooled_rows = static_cast<uint32_t>(p.pooled[1] * p.pool_strides[1]);
    d.pooled_columns = static_cast<uint32_t>(p.pooled[2] * p.pool_strides[2]);
    const Pitches pitches(p);
    d.channel = static_cast<int32_t>(pitches.channel);
    d.column = static_cast<int32_t>(pitches.column);
    d.row = static_cast<int32_t>(pitches.row);
    d.image = p.c * p.in_pixels();
    d.kh = p.kernel[1], d.kw = p.kernel[2];
    list_operands(p, d);
    d.pixels = static_cast<int32_t>(p.n * p.out_pixels());
    d.div_out_w = FastDiv(d.shape.out_w), d.div_out_hw = FastDiv(static_cast<uint32_t>(p.out_pixels()));
    return d;
}

class FewChannelsPlan : public OneKernelPlan {
public:
    FewChannelsPlan(const Problem &p, const Tactic &t, const Device &d, const Kernel &kernel, const FewChannelsParams &params)
        : OneKernelPlan(p, t, d, kernel), params_(params), tile_(kRows[t.row].tile) {}

    // A warp's 32 pixels at a time: gathered, then multiplied and stored by 64 channels.
    double expected_us() const override {
        const Problem &p = problem;
        const double blocks = double(ceil_div(p.m, tile_.block_n)), parts = blocks * end(), waits = p.y_channels_last ? 0.6 : 3.0;
        const double loads = params_.plain ? 0 : double(params_.operands) * p.pool_size();  // one after the other
        const double gather_us = params_.plain ? tile_.cost.plain_gather_us : tile_.cost.gather_us + 0.0045 * loads;
        const double tiles = ceil_div(params_.pixels, 32) / double(device.multiprocessors);
        const double rounds = std::ceil(tiles / (tile_.min_blocks * tile_.warps));
        return 2.7 + std::max({tiles * (gather_us + parts * tile_.cost.part_us), rounds * (0.5 + waits * blocks + 0.15 * loads),
                               (x_bytes(p) + y_bytes(p)) / kBytesPerUs});
    }

    cudaError_t launch(const convpool_tensors &t, cudaStream_t stream) const override {
        FewChannelsParams d = params_;
        set_arrays(d, problem, t);
        d.y_vectors = y_vectors(problem, t);
        d.y_runs = y_runs(problem, t);
        return launch_kernel(&d, stream);
    }

private:
    // How many times as long products and stores take as with the channels last.
    double end() const {
        const Activation a = problem.activation;
        const bool is_rectified = a == Activation::kNone || a == Activation::kRelu || a == Activation::kLeakyRelu;
        if (problem.y_channels_last) return 1;
        if (problem.element_bytes() == 2) return 1.5;
        return is_rectified && !problem.has_residual ? 1.9 : 2.8;  // the latter through shared memory
    }

    FewChannelsParams params_;
    const Tile &tile_;
};

class FewChannels : public Family {
public:
    std::vector<Tactic> tactics() const override {
        return tactics_of(
            *this, kRows, false, [](const Row &) { return 80; },
            [](const Row &row) {
                return tile_name("direct_fused", 80, false, row.precision, row.tile.block_m, row.tile.block_n,
                                 few_channels_step(row.precision) * row.tile.steps) +
                       "_few";
            });
    }

    std::unique_ptr<Plan> plan(const Problem &p, const Tactic &t, const Device &device, std::string &reason) const override {
        const Tile &tile = kRows[t.row].tile;
        reason = problem_reason(p, t, true);
        if (reason.empty()) reason = size_reason(p, t, tile);
        if (!reason.empty()) return nullptr;
        // All weights, in steps of 32 bytes, and the bias.
        const int64_t channels = ceil_div(p.m, tile.block_n) * tile.block_n, weight_bytes = channels * 32 * tile.steps;
        const int64_t shared_bytes = weight_bytes + channels * 4 + tile.warps * few_channels_warp_bytes(tile.steps, tile.block_n);
        if (shared_bytes > device.shared_per_block) {
            reason = refusal(t, "bytes of shared memory of a block", shared_bytes,
                             "at most " + std::to_string(device.shared_per_block), "use another direct_fused tactic");
            return nullptr;
        }
        FewChannelsParams d = params_of(p);
        d.weight_bytes = static_cast<uint32_t>(weight_bytes);
        d.bias_bytes = static_cast<uint32_t>(channels * 4);
        const void *function = kernel_of_row<kRows>(t.row, p.has_prologue());
        const int64_t blocks = ceil_div(d.pixels, tile.block_m);
        const int64_t grid = std::min<int64_t>(blocks, int64_t{device.multiprocessors} * tile.min_blocks);
        const Kernel main{function, grid, tile.warps * 32, 1, shared_bytes};
        return std::make_unique<FewChannelsPlan>(p, t, device, main, d);
    }
};

}  // namespace

CONVPOOL_DEFINE_FAMILY(FewChannels)

}  // namespace convpool::few_channels

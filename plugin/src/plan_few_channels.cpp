// The problems that few_channels is made for.
#include <algorithm>
#include <cstdlib>

#include "tactics.h"

namespace convpool {

static_assert(CONVPOOL_MAX_FLOAT_FILTER == kMaxOperands, "what convpool.h promises");

bool plan_few_channels(const Problem &p, const Tactic &t, const Device &device, FewChannelsPlan &plan, std::string &reason) {
    auto reject = [&](const std::string &what, int64_t value, int64_t most) {
        reason = std::string(t.name()) + ": " + what + "; got " + std::to_string(value) + ", expected at most " +
                 std::to_string(most) + "; use another direct_fused tactic";
        return false;
    };
    const int64_t operands = p.c * p.taps();
    if (operands > 16 * t.stages) return reject("taps by input channels", operands, 16 * t.stages);
    // Elements of X: between channels, columns, rows and images.
    const int64_t channel = p.x_channels_last ? 1 : p.in_pixels(), column = p.x_channels_last ? p.c : 1, row = column * p.in[2];
    // As far as an operand's pixels lie from where its output pixel stands.
    constexpr int64_t kMost = int64_t{1} << 29;
    int64_t reach = p.c * channel;
    for (int i = 1; i < kRank; ++i) {
        const int64_t first = -int64_t{p.pads_begin[i]} * p.pool_strides[i] - p.pool_pads_begin[i];
        const int64_t last = first + int64_t{p.kernel[i] - 1} * p.dilations[i] * p.pool_strides[i] +
                             int64_t{p.pool_kernel[i] - 1} * p.pool_dilations[i];
        const int64_t most = std::max(std::abs(first), std::abs(last));
        if (most > kMost) return reject("pixels to the end of a window", most, kMost);
        reach += most * (i == 1 ? row : column);
        const int64_t steps = (p.out[i] - 1) * p.strides[i] * p.pool_strides[i];
        if (steps > kMost) return reject("pixels to the last window", steps, kMost);
    }
    const int64_t elements = (int64_t{1} << 30) / p.x_element_bytes();  // table[].offset counts bytes in 32 bits
    if (reach > elements) return reject("elements to the end of a window", reach, elements);
    FewChannelsParams &d = plan.params;
    d = {};
    const int64_t channels = (p.m + t.block_n - 1) / t.block_n * t.block_n, weight_bytes = channels * 32 * t.stages;
    const int64_t shared_bytes = weight_bytes + channels * 4 + t.warps_m * few_channels_warp_bytes(t.stages, t.block_n);
    if (shared_bytes > device.shared_per_block)
        return reject("bytes of shared memory of a block", shared_bytes, device.shared_per_block);
    plan.shared_bytes = static_cast<int>(shared_bytes);
    d.weight_bytes = static_cast<uint32_t>(weight_bytes);
    d.bias_bytes = static_cast<uint32_t>(channels * 4);
    d.box = box_of(p);
    Shape2d &s = d.shape;
    s.n = static_cast<int32_t>(p.n);
    s.c = static_cast<int32_t>(p.c);
    s.m = static_cast<int32_t>(p.m);
    s.h = static_cast<int32_t>(p.in[1]);
    s.w = static_cast<int32_t>(p.in[2]);
    s.out_h = static_cast<int32_t>(p.out[1]);
    s.out_w = static_cast<int32_t>(p.out[2]);
    s.y_channels_last = p.y_channels_last;
    d.operands = static_cast<int32_t>(operands);
    d.plain = p.pool_size() == 1 && p.pool_pads_begin[1] == 0 && p.pool_pads_begin[2] == 0 && p.pool_pads_end[1] == 0 &&
              p.pool_pads_end[2] == 0 && !p.has_prologue();
    d.x_float = p.x_float();
    d.x_element_bytes = p.x_element_bytes();
    d.step_h = static_cast<int32_t>(p.out[1] > 1 ? int64_t{p.strides[1]} * p.pool_strides[1] : 0);
    d.step_w = static_cast<int32_t>(p.out[2] > 1 ? int64_t{p.strides[2]} * p.pool_strides[2] : 0);
    d.pooled_rows = static_cast<uint32_t>(p.pooled[1] * p.pool_strides[1]);
    d.pooled_columns = static_cast<uint32_t>(p.pooled[2] * p.pool_strides[2]);
    d.channel = static_cast<int32_t>(channel);
    d.column = static_cast<int32_t>(column);
    d.row = static_cast<int32_t>(row);
    d.image = p.c * p.in_pixels();
    d.kh = p.kernel[1];
    d.kw = p.kernel[2];
    for (int k = 0; k < d.operands; ++k) {
        const int tap = k / s.c, c = k % s.c, a = tap / d.kw, b = tap % d.kw;
        const int y = (a * p.dilations[1] - p.pads_begin[1]) * p.pool_strides[1] - p.pool_pads_begin[1];
        const int x = (b * p.dilations[2] - p.pads_begin[2]) * p.pool_strides[2] - p.pool_pads_begin[2];
        d.table[k] = {(c * d.channel + y * d.row + x * d.column) * d.x_element_bytes, y, x, c};
        d.rows[a] = {d.rows[a].operands | uint64_t{1} << k, y};
        d.columns[b] = {d.columns[b].operands | uint64_t{1} << k, x};
    }
    d.pixels = static_cast<int32_t>(p.n * p.out_pixels());
    d.div_out_w = FastDiv(s.out_w);
    d.div_out_hw = FastDiv(static_cast<uint32_t>(p.out_pixels()));
    const int64_t blocks = (int64_t{d.pixels} + t.block_m - 1) / t.block_m;
    plan.grid = static_cast<int>(std::min<int64_t>(blocks, int64_t{device.multiprocessors} * t.min_blocks));
    return true;
}

}  // namespace convpool

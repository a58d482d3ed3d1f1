// The problems that pointwise_sm90 is made for.
#include <algorithm>

#include "tactics.h"

namespace convpool {

bool plan_pointwise(const Problem &p, const Tactic &t, const Device &device, PointwisePlan &plan, std::string &reason) {
    auto reject = [&](const std::string &what, const std::string &value, const std::string &expected) {
        reason = std::string(t.name()) + ": " + what + "; got " + value + ", expected " + expected +
                 "; use another direct_fused tactic";
        return false;
    };
    if (!p.x_rows_chunked())
        return reject("layout of X", p.x_channels_last ? std::to_string(p.c) + " channels" : "NCHW",
                      "NHWC and a multiple of " + std::to_string(p.per_chunk()) + " channels");
    if (p.rank != 2) return reject("rank", std::to_string(p.rank), "2");
    for (int i = 1; i < kRank; ++i) {
        const std::string axis = " of dimension " + std::to_string(i - 1);
        if (p.kernel[i] != 1) return reject("kernel" + axis, std::to_string(p.kernel[i]), "1");
        if (p.pool_kernel[i] != 2) return reject("pooling window" + axis, std::to_string(p.pool_kernel[i]), "2");
        if (p.pads_begin[i] > 0 || (p.out[i] - 1) * p.strides[i] >= p.pooled[i])
            return reject("pads" + axis, std::to_string(p.pads_begin[i]) + " and " + std::to_string(p.pads_end[i]), "0");
    }
    // A cluster exchanges accumulators from the start on.
    const int warp_n = t.block_n / t.warps_n, exchange = t.block_m * t.warps_n * (warp_n + 8) * 4;
    plan.shared_bytes = std::max(pointwise_shared(t.block_m, t.block_n, t.warps_m * t.warps_n, warp_n, t.stages).bytes,
                                 t.split > 1 ? exchange : 0);
    if (plan.shared_bytes > device.shared_per_block)
        return reject("shared memory of a block", std::to_string(device.shared_per_block), std::to_string(plan.shared_bytes));
    PointwiseParams &d = plan.params;
    d = {};
    d.h = static_cast<int32_t>(p.in[1]);
    d.w_pixels = static_cast<int32_t>(p.in[2]);
    d.chunks = static_cast<int32_t>(p.c / p.per_chunk());
    d.m = static_cast<int32_t>(p.m);
    d.out_h = static_cast<int32_t>(p.out[1]);
    d.out_w = static_cast<int32_t>(p.out[2]);
    // Past 32 bits only where there is one output, and no step.
    d.stride_h = static_cast<int32_t>(int64_t{p.strides[1]} * p.pool_strides[1]);
    d.stride_w = static_cast<int32_t>(int64_t{p.strides[2]} * p.pool_strides[2]);
    d.dilation_h = p.pool_dilations[1];
    d.dilation_w = p.pool_dilations[2];
    d.pad_h = p.pool_pads_begin[1];
    d.pad_w = p.pool_pads_begin[2];
    const int64_t column = int64_t{p.pool_dilations[2]} * d.chunks, row = p.pool_dilations[1] * p.in[2] * d.chunks;
    for (auto [between, chunks] : {std::pair{"columns", column}, std::pair{"rows", row}})
        if (chunks > (int64_t{1} << 30))
            return reject(std::string("chunks between ") + between + " of a window", std::to_string(chunks), "at most 2^30");
    d.column = static_cast<int32_t>(column);
    d.row = static_cast<int32_t>(row);
    d.y_channels_last = p.y_channels_last;
    d.pixels = static_cast<int32_t>(p.n * p.out_pixels());
    d.split = t.split;
    d.div_out_w = FastDiv(d.out_w);
    d.div_out_hw = FastDiv(static_cast<uint32_t>(p.out_pixels()));
    const int64_t m_tiles = (p.m + t.block_n - 1) / t.block_n, pixel_tiles = (int64_t{d.pixels} + t.block_m - 1) / t.block_m;
    if (m_tiles * pixel_tiles * t.split > (int64_t{1} << 30))
        return reject("tiles", std::to_string(m_tiles * pixel_tiles), "at most 2^30");
    d.div_m_tiles = FastDiv(static_cast<uint32_t>(m_tiles));
    d.tiles = static_cast<int32_t>(m_tiles * pixel_tiles);
    plan.grid = t.split > 1 ? d.tiles * t.split : std::min(d.tiles, device.multiprocessors * t.min_blocks);
    return true;
}

}  // namespace convpool

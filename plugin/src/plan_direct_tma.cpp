// The problems that direct_tma is made for, and how their output is cut.
#include <algorithm>

#include "tactics.h"

namespace convpool {
namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace

bool plan_direct_tma(const Problem &p, const Tactic &t, const Device &device, DirectTmaPlan &plan, std::string &reason) {
    auto reject = [&](const std::string &what, const std::string &value, const std::string &expected) {
        reason = std::string(t.name()) + ": " + what + "; got " + value + ", expected " + expected +
                 "; use another direct_fused tactic";
        return false;
    };
    if (p.rank != 2) return reject("rank", std::to_string(p.rank), "2");
    if (!p.x_rows_chunked() || !p.y_channels_last)
        return reject("layout", p.x_channels_last && p.y_channels_last ? std::to_string(p.c) + " input channels" : "NCHW",
                      "NHWC and a multiple of " + std::to_string(p.per_chunk()) + " input channels");
    if (p.m % p.per_chunk() != 0)
        return reject("output channels", std::to_string(p.m), "a multiple of " + std::to_string(p.per_chunk()));
    if (p.activation == Activation::kTanh || p.activation == Activation::kSigmoid)
        return reject("activation", "tanh or sigmoid", "none, relu, leaky_relu or clip");
    for (int i = 1; i < kRank; ++i) {
        const std::string axis = " of dimension " + std::to_string(i - 1);
        if (p.kernel[i] != t.kernel_size)
            return reject("kernel" + axis, std::to_string(p.kernel[i]), std::to_string(t.kernel_size));
        if (p.pool_kernel[i] != 2 || p.pool_dilations[i] != 1)
            return reject("pooling window" + axis,
                          std::to_string(p.pool_kernel[i]) + ", dilation " + std::to_string(p.pool_dilations[i]),
                          "2, dilation 1");
        if (t.kernel_size > 1 && (p.pool_strides[i] != 1 || p.dilations[i] != 1))
            return reject("pooling stride" + axis,
                          std::to_string(p.pool_strides[i]) + ", kernel dilation " + std::to_string(p.dilations[i]),
                          "1, dilation 1");
        if (const int64_t stride = int64_t{p.pool_strides[i]} * p.strides[i]; stride != 2)
            return reject("stride" + axis, std::to_string(stride), "2");
        // Box means over the padding of Conv must be zero as they are computed: over padding alone.
        const int64_t last = (p.out[i] - 1) * p.strides[i] - p.pads_begin[i] + p.kernel[i] - 1;
        if ((p.pads_begin[i] > 0 && p.pool_pads_begin[i] != 1) ||
            (last >= p.pooled[i] && (p.pooled[i] * p.pool_strides[i] - p.pool_pads_begin[i] < p.in[i])))
            return reject("pads" + axis, std::to_string(p.pads_begin[i]) + " and " + std::to_string(p.pads_end[i]),
                          "0, or a pooling padding of 1");
    }
    if (p.in[2] < 2) return reject("width", std::to_string(p.in[2]), "at least 2");
    if (std::max({p.n, p.in[1], p.in[2], p.c, p.m}) > (int64_t{1} << 30))
        return reject("dimension", std::to_string(std::max({p.n, p.in[1], p.in[2], p.c, p.m})), "at most 2^30");
    const int subtiles = t.block_m / 64;
    plan.shared = direct_tma_shared(subtiles, t.block_n, t.kernel_size, t.stage_taps, t.stages, t.raw_stages, t.mean_stages);
    if (plan.shared.bytes > device.shared_per_block)
        return reject("shared memory of a block", std::to_string(device.shared_per_block), std::to_string(plan.shared.bytes));

    DirectTmaParams &d = plan.params;
    d = {};
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
    const int64_t tiles_h = ceil_div(p.out[1], 8), tiles_w = ceil_div(p.out[2], 8), m_tiles = ceil_div(p.m, t.block_n);
    const int64_t groups = ceil_div(p.n * tiles_h * tiles_w, subtiles);
    if (groups * std::max<int64_t>(m_tiles, subtiles) > (int64_t{1} << 30))
        return reject("tiles", std::to_string(groups * m_tiles), "at most 2^30");
    d.tiles = static_cast<int32_t>(groups * m_tiles);
    d.resident = m_tiles == 1 && int64_t{d.slices} * p.taps() <= int64_t{t.stages} * t.stage_taps;
    d.div_m_tiles = FastDiv(static_cast<uint32_t>(m_tiles));
    d.div_tiles_h = FastDiv(static_cast<uint32_t>(tiles_h));
    d.div_tiles_w = FastDiv(static_cast<uint32_t>(tiles_w));
    plan.grid = std::min(d.tiles, device.multiprocessors);
    return true;
}

}  // namespace convpool

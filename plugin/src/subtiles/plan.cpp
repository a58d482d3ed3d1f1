// SPDX-License-Identifier: Apache-2.0
#include "subtiles/plan.h"

#include <algorithm>

#include "core/plan.h"

namespace convpool {

std::string subtile_reason(const Problem &p, const Tactic &t, int32_t kernel, int32_t pool, bool channels_first) {
    auto reject = [&](const std::string &what, const std::string &value, const std::string &expected) {
        return refusal(t, what, value, expected, "use another direct_fused tactic");
    };
    if (p.rank != 2) return reject("rank", std::to_string(p.rank), "2");
    if (p.x_channels_last == channels_first || p.y_channels_last == channels_first)
        return reject("layout", channels_first ? "NHWC" : "NCHW", channels_first ? "NCHW" : "NHWC");
    const std::string chunks = "a multiple of " + std::to_string(p.per_chunk());
    if (p.c % p.per_chunk() != 0) return reject("input channels", std::to_string(p.c), chunks);
    if (channels_first && p.in[2] % p.per_chunk() != 0) return reject("width", std::to_string(p.in[2]), chunks);
    if (!channels_first && p.m % p.per_chunk() != 0) return reject("output channels", std::to_string(p.m), chunks);
    if (p.activation != Activation::kNone && p.activation != Activation::kRelu && p.activation != Activation::kLeakyRelu &&
        p.activation != Activation::kClip)  // tanh, sigmoid, silu: what activate_transcendental computes
        return reject("activation", std::to_string(static_cast<int>(p.activation)),
                      "0 (none), 1 (relu), 2 (leaky_relu) or 5 (clip)");
    for (int i = 1; i < kRank; ++i) {
        const std::string axis = " of dimension " + std::to_string(i - 1);
        if (p.kernel[i] != kernel) return reject("kernel" + axis, std::to_string(p.kernel[i]), std::to_string(kernel));
        if (p.pool_kernel[i] != pool || p.pool_dilations[i] != 1)
            return reject("pooling window" + axis,
                          std::to_string(p.pool_kernel[i]) + ", dilation " + std::to_string(p.pool_dilations[i]),
                          std::to_string(pool) + ", dilation 1");
        if (kernel > 1 && (p.pool_strides[i] != 1 || p.dilations[i] != 1))
            return reject("pooling stride" + axis,
                          std::to_string(p.pool_strides[i]) + ", kernel dilation " + std::to_string(p.dilations[i]),
                          "1, dilation 1");
        if (const int64_t stride = int64_t{p.pool_strides[i]} * p.strides[i]; stride != pool)
            return reject("stride" + axis, std::to_string(stride), std::to_string(pool));
        // Box means over the padding of Conv must be zero as they are computed: over nothing but padding.
        const int64_t last = (p.out[i] - 1) * p.strides[i] - p.pads_begin[i] + p.kernel[i] - 1;
        if ((p.pads_begin[i] > 0 && p.pool_pads_begin[i] != pool - 1) ||
            (last >= p.pooled[i] && (p.pooled[i] * p.pool_strides[i] - p.pool_pads_begin[i] < p.in[i])))
            return reject("pads" + axis, std::to_string(p.pads_begin[i]) + " and " + std::to_string(p.pads_end[i]),
                          "0, or a pooling padding of " + std::to_string(pool - 1));
    }
    if (p.in[2] < pool) return reject("width", std::to_string(p.in[2]), "at least " + std::to_string(pool));
    const int64_t largest = std::max({p.n, p.in[1], p.in[2], p.c, p.m});
    return largest > kMaxCount ? reject("dimension", std::to_string(largest), kAtMostMaxCount) : std::string();
}

SubtileTiles::SubtileTiles(const Problem &p, const SubtileShape &shape)
    : height(ceil_div(p.out[1], shape.rows)), width(ceil_div(p.out[2], shape.columns)), channels(ceil_div(p.m, shape.block_n)),
      subtile_groups(ceil_div(ceil_div(p.n, shape.images) * height * width, shape.subtiles)) {}

namespace {

// The residue of columns of X, in 0 to pool - 1.
int32_t residue(int32_t column, int32_t pool) { return (column % pool + pool) % pool; }

SubtileParams params_of(const Problem &p, const SubtileShape &shape, const SubtileTiles &tiles) {
    SubtileParams d{};
    d.images = static_cast<int32_t>(p.n);
    d.out_h = static_cast<int32_t>(p.out[1]), d.out_w = static_cast<int32_t>(p.out[2]);
    d.m = static_cast<int32_t>(p.m);
    // Where a box mean of stride s starts: s * (output * stride - pad) - pool_pad.
    d.pad_h = static_cast<int32_t>(p.pads_begin[1] * p.pool_strides[1] + p.pool_pads_begin[1]);
    d.pad_w = static_cast<int32_t>(p.pads_begin[2] * p.pool_strides[2] + p.pool_pads_begin[2]);
    for (int plane = 0; plane < shape.pool; ++plane)
        d.first_column[plane] = (plane - d.pad_w - residue(plane - d.pad_w, shape.pool)) / shape.pool;
    d.h = static_cast<int32_t>(p.in[1]), d.w = static_cast<int32_t>(p.in[2]);
    d.c = static_cast<int32_t>(p.c);
    d.slices = static_cast<int32_t>(ceil_div(p.c, 4 * p.per_chunk()));
    d.tiles = static_cast<int32_t>(tiles.count());
    d.split = shape.split;
    d.div_split = FastDiv(static_cast<uint32_t>(shape.split));
    d.resident =
        shape.split == 1 && tiles.channels == 1 && int64_t{d.slices} * p.taps() <= int64_t{shape.stages} * shape.stage_taps;
    d.div_m_tiles = FastDiv(static_cast<uint32_t>(tiles.channels));
    d.div_tiles_h = FastDiv(static_cast<uint32_t>(tiles.height));
    d.div_tiles_w = FastDiv(static_cast<uint32_t>(tiles.width));
    return d;
}

}  // namespace

SubtilePlan::SubtilePlan(const Problem &p, const Tactic &t, const Device &d, const Kernel &kernel, const SubtileShape &shape)
    : OneKernelPlan(p, t, d, kernel), shape_(shape), params_(params_of(p, shape, SubtileTiles(p, shape))) {
    // TMA copies 16 bytes at least, from addresses that are multiples of it; Y is written in chunks of it.
    vector_tensors = kX | kW | kY | (p.has_bias ? kB : kNoTensors) | (p.has_residual ? kResidual : kNoTensors) |
                     (p.prologue_affine ? kScale | kShift : kNoTensors);
}

cudaError_t SubtilePlan::launch(const convpool_tensors &t, cudaStream_t stream) const {
    SubtileParams d = params_;
    d.y = t.y;
    d.prologue = prologue_of(problem, t);
    d.epilogue = epilogue_of(problem, t);
    d.early_weights = (t.flags & CONVPOOL_WEIGHTS_PREPARED) != 0;  // W is what it was: convpool.h
    cudaError_t error = x_maps_.get(t.x, d.x_map, [&](CUtensorMap *maps) { return encode_x(t.x, maps); });
    if (error == cudaSuccess) error = w_map_.get(t.w, &d.w_map, [&](CUtensorMap *map) { return encode_w(t.w, map); });
    return error == cudaSuccess ? launch_kernel(&d, stream) : error;
}

// X [n,h,w/pool,c] for each plane: of columns from its first one on.
cudaError_t SubtilePlan::encode_x(const void *x, CUtensorMap *maps) const {
    const Problem &p = problem;
    const uint64_t h = static_cast<uint64_t>(p.in[1]), w = static_cast<uint64_t>(p.in[2]),
                   pixel = static_cast<uint64_t>(p.c) * p.element_bytes();
    const int pool = shape_.pool;
    for (int plane = 0; plane < pool; ++plane) {
        const auto first = static_cast<uint64_t>(residue(plane - params_.pad_w, pool));
        const uint64_t sizes[] = {static_cast<uint64_t>(p.c), (w - first + pool - 1) / pool, h, static_cast<uint64_t>(p.n)};
        const uint64_t strides[] = {pool * pixel, w * pixel, h * w * pixel};
        const uint32_t box[] = {static_cast<uint32_t>(4 * p.per_chunk()), static_cast<uint32_t>(shape_.raw_columns),
                                static_cast<uint32_t>(shape_.raw_rows), static_cast<uint32_t>(shape_.images)};
        const cudaError_t error =
            encode_tensor_map(&maps[plane], static_cast<Precision>(tactic.precision), 4,
                              static_cast<const char *>(x) + first * pixel, sizes, strides, box, shape_.x_swizzle, false);
        if (error != cudaSuccess) return error;
    }
    return cudaSuccess;
}

// W [taps,m,c].
cudaError_t SubtilePlan::encode_w(const void *w, CUtensorMap *map) const {
    const Problem &p = problem;
    const uint64_t pixel = static_cast<uint64_t>(p.c) * p.element_bytes();
    const uint64_t taps = static_cast<uint64_t>(p.taps());
    const uint64_t sizes[] = {static_cast<uint64_t>(p.c), static_cast<uint64_t>(p.m), taps};
    const uint64_t strides[] = {pixel * taps, pixel};
    const uint32_t box[] = {static_cast<uint32_t>(4 * p.per_chunk()), static_cast<uint32_t>(shape_.block_n),
                            static_cast<uint32_t>(shape_.stage_taps)};
    return encode_tensor_map(map, static_cast<Precision>(tactic.precision), 3, w, sizes, strides, box, 64, true);
}

}  // namespace convpool

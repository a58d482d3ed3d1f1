// How long a tactic is expected to take: a model with few constants, fitted to the times of all float16 tactics on the 20
// layers of convpool-bench's suita-table2 on an H200 (benchmarks/log.md). It is there to rank tactics.
//
// Blocks run in rounds of as many as fit. A round takes steps * max(latency, issue * blocks a multiprocessor holds) and a
// while for the tile's start and end; box means and other passes over memory are added at the speed of memory.
#include <algorithm>
#include <cmath>

#include "tactics.h"

namespace convpool {
namespace {

// A slice of a 1x1 layer has too few products to hide its loads and box means behind: on an H200 the 1x1 layers of the
// SNGAN discriminator took 18 us in 4 slices and 31 us in 8.
constexpr double kPointwiseSliceUs = 3.3;
constexpr double kLaunchUs = 1.8, kPassUs = 0.9, kBytesPerUs = 3.6e6;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct Step {
    double issue_us;    // of a block that has a multiprocessor's tensor cores for itself
    double latency_us;  // no shorter than this, however little there is to do
    double chain_us = 0;  // of one tile's steps, one after the other: its least time whatever runs beside it
};

// Of 128 bytes of K of every pixel and channel of a tile: the Hopper implicit GEMM.
Step gemm_sm90_step(const Tactic &t) {
    const double products = t.reads_halves() ? 1.5 : 1.0;
    struct Fitted { int block_m, block_n, stages; Step step; };
    static constexpr Fitted kFitted[] = {
        {64, 64, 4, {0.229, 0.259}},   {64, 64, 8, {0.2, 0.198}},     {128, 64, 4, {0.329, 0.400}},
        {128, 64, 8, {0.335, 0.061}},  {128, 128, 3, {0.520, 0.061}}, {128, 128, 6, {0.489, 0.061}},
        {128, 256, 4, {0.786, 0.061}}, {256, 64, 5, {0.581, 0.061}},  {256, 128, 4, {0.875, 0.563}}};
    for (const Fitted &f : kFitted)
        if (f.block_m == t.block_m && f.block_n == t.block_n && f.stages == t.stages)
            return {f.step.issue_us * products, f.step.latency_us * products};
    return {t.block_m * t.block_n * 64 / 1.8e6, 0.2};
}

// Microseconds that 10^6 products take a multiprocessor at float16; the other types take as long for as many bytes, and
// 3xTF32 for its three products about twice as long again.
double us_per_million(const Tactic &t) {
    if (t.family == Family::kDirectFusedSm90) return 0.05 + 170.0 / t.block_n + 20.0 / t.block_m;
    if (t.family == Family::kDirectFused) return 0.3 + 85.0 / t.block_n + 29.0 / t.block_m;
    return t.block_m * t.block_n >= 128 * 128 ? 0.9 : 1.0;
}

Step portable_step(const Tactic &t) {
    const double products = double(t.block_m) * t.block_n * 32 / 1e6;  // of 64 bytes of K, as float16
    const double wider = t.precision == static_cast<int32_t>(Precision::kTF32x3) ? 2.2
                         : t.precision == static_cast<int32_t>(Precision::kTF32) ? 1.4
                                                                                 : 1.0;
    if (t.precision == static_cast<int32_t>(Precision::kTF32x3) && !t.direct_fused())
        return {0.385, 0.26, 1.2};  // of the 64x64 tiles that are all there are
    return {products * us_per_million(t) * wider, 0.26 * std::min(wider, 1.4)};
}

double rounds_us(int64_t tiles, int64_t steps, const Step &step, const Tactic &t, int blocks_a_multiprocessor,
                 const Device &device) {
    const int64_t blocks = tiles * t.split;
    // Clusters leave multiprocessors over in a GPC whose number is no multiple of theirs.
    const double usable = t.split == 1 ? 1.0 : t.split == 2 ? 0.98 : t.split == 4 ? 0.92 : 0.85;
    const int64_t slots = std::max<int64_t>(
        t.split, int64_t(device.multiprocessors * blocks_a_multiprocessor * usable) / t.split * t.split);
    const double ends = 0.59 + 1.38 * t.block_m * t.block_n / 16384;
    auto round = [&](int64_t held) { return steps * std::max(step.latency_us, step.issue_us * held) + ends; };
    double us = double(blocks / slots) * round(blocks_a_multiprocessor);
    if (blocks % slots != 0) us += round(ceil_div(blocks % slots, device.multiprocessors));
    us = std::max(us, steps * step.chain_us + ends);
    if (t.split > 1)
        us += (t.split == 2 ? 1.3 : t.split == 4 ? 1.3 : 4.35) * (0.5 + 0.5 * t.block_m * t.block_n / 8192);
    return us;
}

// Blocks take their tiles one after the other; microseconds of a slice and of a tile's end, by subtiles and channels.
double direct_tma_us(const Problem &p, const DirectTmaPlan &plan, const Tactic &t) {
    struct Fitted { int kernel, block_m, block_n; double slice_us, end_us; };
    static constexpr Fitted kFitted[] = {
        {3, 128, 256, 3.5, 4.0}, {3, 128, 128, 2.3, 1.5}, {3, 128, 64, 2.05, 1.0}, {3, 128, 32, 1.8, 0.6},
        {3, 64, 256, 2.05, 1.5}, {3, 64, 128, 1.57, 0.8}, {3, 64, 64, 1.55, 0.5},
        {1, 64, 256, 0.8, 0.8},  {1, 64, 128, 0.58, 0.4}, {1, 128, 64, 1.2, 0.4}};
    for (const Fitted &f : kFitted)
        if (f.kernel == t.kernel_size && f.block_m == t.block_m && f.block_n == t.block_n) {
            const double bytes = (double(p.n) * p.c * p.in_pixels() + double(p.n) * p.m * p.out_pixels()) * p.element_bytes();
            const double slice_us = f.slice_us * (p.has_prologue() ? 1.1 : 1.0);  // not measured
            const double rounds = ceil_div(plan.params.tiles, plan.grid);
            return 0.8 + std::max(rounds * (plan.params.slices * slice_us + f.end_us), bytes / kBytesPerUs);
        }
    return 1e30;
}

// Each step waits for its pixels, which were asked for one step before.
double pointwise_us(const Problem &p, const PointwisePlan &plan, const Tactic &t, const Device &device) {
    const int64_t steps = ceil_div(ceil_div(plan.params.chunks, 8), t.split);
    const double bytes = (double(p.n) * p.c * p.in_pixels() + double(p.n) * p.m * p.out_pixels()) * p.element_bytes();
    const Step step{0.1 + t.block_m * t.block_n / 8192.0 * 0.1, 1.0};
    return std::max(rounds_us(plan.grid / t.split, steps, step, t, t.min_blocks, device), bytes / kBytesPerUs);
}

}  // namespace

double expected_us(const Problem &p, const Tactic &t, const Device &device) {
    if (t.family == Family::kGeneric) {
        const double operations =
            2.0 * p.n * p.m * p.out_pixels() * p.taps() * (double(p.c) / p.group) * (p.pool_size() + 1);
        return 3 + operations / (device.multiprocessors * 2e4);
    }
    if (t.direct_tma()) {
        DirectTmaPlan plan;
        std::string reason;
        if (!plan_direct_tma(p, t, device, plan, reason)) return 1e30;
        return kLaunchUs + direct_tma_us(p, plan, t);
    }
    if (t.pointwise()) {
        PointwisePlan plan;
        std::string reason;
        if (!plan_pointwise(p, t, device, plan, reason)) return 1e30;
        return kLaunchUs + pointwise_us(p, plan, t, device);
    }
    if (t.direct_fused()) {
        DirectFusedPlan plan;
        std::string reason;
        if (!plan_direct_fused(p, t, device, plan, reason)) return 1e30;
        const int64_t steps = ceil_div(plan.params.slices, t.split) * plan.params.taps;
        Step step = portable_step(t);
        if (plan.params.taps == 1) step.latency_us = std::max(step.latency_us, kPointwiseSliceUs);
        return kLaunchUs + rounds_us(plan.params.tiles, steps, step, t, plan.blocks_per_multiprocessor, device);
    }
    const Shape2d s = gemm_shape(p, t);
    const WorkspaceLayout layout = workspace_layout(p, t);
    const int64_t tiles = ceil_div(p.n * p.out_pixels(), t.block_m) * ceil_div(p.m, t.block_n);
    const int64_t row_chunks = int64_t{s.kh} * s.kw * (s.c / p.per_chunk());
    const int64_t steps = t.sm90() ? ceil_div(ceil_div(row_chunks, 8), t.split)
                                   : int64_t{s.kh} * s.kw * ceil_div(s.c / p.per_chunk(), 4);
    double us = kLaunchUs + rounds_us(tiles, steps, t.sm90() ? gemm_sm90_step(t) : portable_step(t), t, t.min_blocks,
                                      device);
    if (layout.box_pass)
        us += kPassUs + (double(p.n) * p.c * p.in_pixels() * p.element_bytes() + double(layout.x_bytes)) / kBytesPerUs;
    // Fused weights are made once and kept by a caller that runs a layer again and again, so they do not count.
    return us;
}

}  // namespace convpool

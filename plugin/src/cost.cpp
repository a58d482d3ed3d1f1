// How long a tactic is expected to take: a model with few constants, fitted to the times of nearly all tactics on an H200 in
// convpool-bench's suita-table2, tokura, densenet, batch1 and networks (float16, TF32 and full fp32, with and without a
// prologue). It is there to rank tactics. Constants are microseconds.
//
// Blocks run in rounds of as many as fit. A round takes steps * max(latency, issue * blocks a multiprocessor holds) and a
// while for the tile's start and end; box means and other passes over memory are added at the speed of memory.
//
// What channels first costs besides is reckoned from the kernels, but for the pass, which is fitted to TF32 and full fp32
// (`convpool-bench --layout nchw` measures it).
#include <algorithm>
#include <cmath>

#include "tactics.h"

namespace convpool {
namespace {

constexpr double kBytesPerUs = 3.75e6;
constexpr double kL2BytesPerUs = 11.6e6;         // to shared memory
constexpr double kMemoryLatencyUs = 0.6;         // of a load that a warp waits for
constexpr double kStoreRoundUs = 0.03;           // of 32 lanes that take sums from shared memory and store them
constexpr double kChannelsFirstPassBytes = 1.4;  // a byte of a pass that transposes, in bytes of one that does not
constexpr double kExposedShare = 0.65;           // of X, as it is read from memory, by implicit GEMM that TMA feeds

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

double x_bytes(const Problem &p) { return double(p.n) * p.c * p.in_pixels() * p.x_element_bytes(); }
double y_bytes(const Problem &p) { return double(p.n) * p.m * p.out_pixels() * p.y_element_bytes(); }
bool is_tf32(const Tactic &t) { return t.precision == static_cast<int32_t>(Precision::kTF32); }
bool is_tf32x3(const Tactic &t) { return t.precision == static_cast<int32_t>(Precision::kTF32x3); }
double tile_share(const Tactic &t) { return t.block_m * t.block_n / 16384.0; }  // of a tile of 128x128

struct Step {
    double issue_us;        // of a block that has a multiprocessor's tensor cores for itself
    double latency_us = 0;  // no shorter than this, however little there is to do
};

// The step of tactics by their tiles.
struct FittedStep {
    int block_m, block_n, stages;
    Step step;
};

template <size_t N> Step step_of(const FittedStep (&fitted)[N], const Tactic &t, Step otherwise) {
    for (const FittedStep &f : fitted)
        if (f.block_m == t.block_m && f.block_n == t.block_n && f.stages == t.stages) return f.step;
    return otherwise;
}

// One block's work: steps, and what it takes besides.
struct Block {
    int64_t steps;
    Step step;
    double ends_us;
};

double gemm_ends_us(const Tactic &t) { return 1.38 + 0.96 * tile_share(t); }

// Of 128 bytes of K of every pixel and channel of a tile: the Hopper implicit GEMM. Latencies where blocks share a
// multiprocessor; elsewhere they are not told from the issue.
Step gemm_sm90_step(const Tactic &t) {
    static constexpr FittedStep kFitted[] = {{64, 64, 4, {0.172, 0.227}}, {64, 64, 8, {0.200}},   {128, 64, 4, {0.304, 0.310}},
                                             {128, 64, 8, {0.307}},       {128, 128, 3, {0.516}}, {128, 128, 6, {0.475}},
                                             {128, 256, 4, {0.768}},      {256, 64, 5, {0.574}},  {256, 128, 4, {0.838}}};
    // Three products of half the channels; or pixels that are rounded first, while the tensor cores wait.
    const double products = t.reads_halves() ? 1.34 : t.filter_fused() && is_tf32(t) ? 2.2 : 1.0;
    // X comes from memory, box means from the cache: a ring of 8 stages hides the difference, one of 4 does not.
    const double memory = t.filter_fused() && t.stages <= 4 ? 1.22 : 1.0;
    const Step step = step_of(kFitted, t, {t.block_m * t.block_n * 64 / 1.8e6, 0.2});
    return {step.issue_us * products, step.latency_us * products * memory};
}

// The same fed by TMA, which also rounds to TF32.
Step gemm_im2col_step(const Tactic &t) {
    static constexpr FittedStep kFitted[] = {{64, 64, 4, {0.094, 0.233}},  {64, 64, 8, {0.206}},   {64, 128, 8, {0.238}},
                                             {128, 64, 4, {0.194, 0.228}}, {128, 64, 8, {0.227}},  {128, 128, 3, {0.332, 0.331}},
                                             {128, 128, 6, {0.314}},       {128, 256, 4, {0.574}}, {256, 128, 4, {0.587}}};
    const double products = t.reads_halves() ? 0.97 + 0.82 * tile_share(t) : is_tf32(t) ? 1.07 : 1.0;
    const Step step = step_of(kFitted, t, {t.block_m * t.block_n * 64 / 3.5e6, 0.2});
    return {step.issue_us * products, step.latency_us * products};
}

// Of 64 bytes of K, by mma.sync. A block alone lacks the warps to fill the tensor cores.
Step portable_gemm_step(const Tactic &t) {
    if (is_tf32x3(t)) return {0.385, 0.525};  // of the 64x64 tiles that are all there are
    const double wider = is_tf32(t) ? 1.2 : 1.0;
    return {tile_share(t) * (t.block_m * t.block_n >= 128 * 128 ? 0.42 : 0.585) * wider, (0.1 + 0.6 * tile_share(t)) * wider};
}

Step direct_fused_step(const Tactic &t) {
    const double products = t.block_m * t.block_n * 32 / 1e6;
    const double wider = is_tf32x3(t) ? 1.6 : 1.0;
    return {products * (0.19 + 59.0 / t.block_n + 54.0 / t.block_m) * wider, (0.23 + 0.65 * tile_share(t)) * wider};
}

double split_us(const Tactic &t) {
    if (t.split == 1) return 0;
    return (t.split == 2 ? 1.65 : t.split == 4 ? 1.1 : 1.5) * (0.7 + 0.6 * tile_share(t));
}

// Y channels first: the rounds of stores of a tile that channels last does not have, where it stores a chunk a lane.
double channels_first_ends_us(const Problem &p, const Tactic &t, bool runs) {
    if (p.y_channels_last) return 0;
    const double elements = double(t.block_m) * t.block_n / (t.warps_m * t.warps_n * 32 * t.split);  // of a lane
    const double rounds = elements / (runs ? kRunPixels : 1) - elements / p.per_chunk();
    return rounds * (kStoreRoundUs + (p.has_residual ? kMemoryLatencyUs : 0));
}

// crowded: the kernel before still holds the multiprocessors, so blocks of the first round fill one after the other.
double rounds_us(int64_t tiles, const Block &block, const Tactic &t, int blocks_a_multiprocessor, const Device &device,
                 bool crowded = false) {
    const int64_t blocks = tiles * t.split;
    // Clusters leave multiprocessors over in a GPC whose number is no multiple of theirs.
    const double usable = device.multiprocessors * (t.split == 1 ? 1.0 : t.split == 2 ? 0.98 : t.split == 4 ? 0.92 : 0.85);
    const int64_t slots = std::max<int64_t>(t.split, int64_t(usable * blocks_a_multiprocessor) / t.split * t.split);
    const double place_us = t.split >= 4 ? 0.003 : 0;  // clusters start one after the other
    auto round = [&](int64_t held, int64_t running) {
        return block.steps * std::max(block.step.latency_us, block.step.issue_us * held) + block.ends_us + split_us(t) +
               place_us * running;
    };
    const int64_t last = blocks % slots;
    double us = double(blocks / slots) * round(blocks_a_multiprocessor, slots);
    if (last != 0) {
        const int together = crowded && blocks < slots ? blocks_a_multiprocessor : 1;
        const int64_t held = ceil_div(last, std::max<int64_t>(1, int64_t(usable / together)));
        us += round(std::min<int64_t>(blocks_a_multiprocessor, held), last);
    }
    return us;
}

// Blocks take their tiles one after the other. Nothing hides the first slice of X and the last round of Y.
double direct_tma_us(const Problem &p, const DirectTmaPlan &plan, const Tactic &t) {
    // Of a slice, of one with scale and shift in front (1x1: any prologue), and of a tile's end.
    struct Fitted {
        int kernel, block_m, block_n;
        double slice_us, prologue_us, end_us;
    };
    static constexpr Fitted kFitted[] = {
        {3, 128, 256, 3.47, 6.24, 4.8}, {3, 128, 128, 2.25, 3.71, 1.33}, {3, 128, 64, 2.06, 3.82, 0.42},
        {3, 128, 32, 1.97, 3.71, 0.31}, {3, 64, 256, 2.05, 3.13, 1.11},  {3, 64, 128, 1.52, 2.90, 0.77},
        {3, 64, 64, 1.52, 3.08, 0.23},  {1, 64, 128, 0.35, 0.79, 0.51},  {1, 64, 256, 0.50, 0.84, 0.81}};
    for (const Fitted &f : kFitted)
        if (f.kernel == t.kernel_size && f.block_m == t.block_m && f.block_n == t.block_n) {
            double slice_us = f.slice_us * (is_tf32(t) ? 0.92 : 1.0);
            if (p.prologue_affine || (p.has_prologue() && t.kernel_size == 1)) slice_us = std::max(slice_us, f.prologue_us);
            else if (p.has_prologue()) slice_us *= 1.3;  // an activation alone; of 128 pixels 1.04 to 1.17, the rest is caution
            const double rounds = ceil_div(plan.params.tiles, plan.grid);
            const double exposed_bytes = (x_bytes(p) / plan.params.slices + y_bytes(p)) / rounds;
            return 2.03 + std::max(rounds * (plan.params.slices * slice_us + f.end_us) + exposed_bytes / kBytesPerUs,
                                   (x_bytes(p) + y_bytes(p)) / kBytesPerUs);
        }
    return 1e30;
}

double pointwise_us(const Problem &p, const PointwisePlan &plan, const Tactic &t, const Device &device) {
    Block block{ceil_div(ceil_div(plan.params.chunks, 8), t.split), {}, 0};
    if (t.block_n == 64) block = {block.steps, {0.65}, 1.67};
    else if (t.block_n == 128) block = {block.steps, {0.78}, 1.86};
    else block = {block.steps, {1.14}, 3.29};
    block.ends_us += channels_first_ends_us(p, t, false);
    if (p.has_prologue()) {
        block.step.issue_us += 0.53;
        block.step.latency_us += 0.53;
    }
    return std::max(rounds_us(plan.params.tiles, block, t, t.min_blocks, device),
                    (x_bytes(p) + y_bytes(p)) / kBytesPerUs + split_us(t));
}

// A warp's 32 pixels at a time: gathered, then multiplied and stored by 64 channels. Fitted to six layers of 3 channels.
double few_channels_us(const Problem &p, const FewChannelsPlan &plan, const Tactic &t, const Device &device) {
    const double operands = 16.0 * t.stages, parts = double(ceil_div(p.m, t.block_n)) * (p.y_channels_last ? 1.0 : 1.5);
    const double loads = plan.params.plain ? 0 : double(plan.params.operands) * p.pool_size();  // one after the other
    const double gather_us = plan.params.plain ? 0.03 + 0.0012 * operands : 0.1 + 0.0014 * operands + 0.0045 * loads;
    const double part_us = 0.08 + 0.0019 * operands;
    const double tiles = ceil_div(plan.params.pixels, 32) / double(device.multiprocessors);
    const double rounds = std::ceil(tiles / (t.min_blocks * t.warps_m));
    return 2.7 + std::max({tiles * (gather_us + parts * part_us), rounds * (2.0 + 0.6 * parts + 0.06 * loads),
                           (x_bytes(p) + y_bytes(p)) / kBytesPerUs});
}

double direct_fused_us(const Problem &p, const DirectFusedPlan &plan, const Tactic &t, const Device &device) {
    const int64_t slices = ceil_div(plan.params.slices, t.split);
    const DirectFusedParams &d = plan.params;
    Block block{slices * d.taps, direct_fused_step(t), 1.65 + 0.83 * tile_share(t)};
    block.ends_us += channels_first_ends_us(p, t, p.out[2] % kRunPixels == 0);
    // Channels first, a warp gathers a chunk of a row of pixels at a time, and waits for each.
    const int64_t rows = ceil_div(int64_t{d.tile_images} * d.raw_h, t.threads() / 32);
    if (!p.x_channels_last) block.ends_us += slices * rows * 4 * ceil_div(d.raw_w, 32) * kMemoryLatencyUs;
    // Box means of a slice, as far as products do not hide them; those of one tap hide nothing, whatever runs beside them.
    const double means_us = (d.taps == 1 ? 2.25 : 1.7) * (p.has_prologue() ? 3.0 : 1.0);
    if (d.taps == 1) {
        block.step.issue_us += means_us;
        block.step.latency_us += means_us;
    } else {
        block.ends_us += slices * means_us;
    }
    return rounds_us(d.tiles, block, t, plan.blocks_per_multiprocessor, device);
}

double box_pass_us(const Problem &p, const WorkspaceLayout &layout) {
    const double transposed = p.x_channels_last ? 1.0 : kChannelsFirstPassBytes;
    const double bytes_us = (x_bytes(p) + double(layout.x_bytes)) * transposed / kBytesPerUs;
    const double strided_us = p.pool_strides[1] > 1 || p.pool_strides[2] > 1 ? 1.33 : 0;  // windows share no sums
    return strided_us + (p.has_prologue() ? 2.23 + 1.55 * bytes_us : 1.43 + bytes_us);
}

double implicit_gemm_us(const Problem &p, const Tactic &t, const Device &device) {
    const Shape2d s = gemm_shape(p, t);
    const WorkspaceLayout layout = workspace_layout(p, t);
    const int64_t tiles = ceil_div(p.n * p.out_pixels(), t.block_m) * ceil_div(p.m, t.block_n);
    const int64_t tap_chunks = s.c / p.per_chunk(), taps = int64_t{s.kh} * s.kw;
    const int64_t steps = t.im2col() ? ceil_div(taps * ceil_div(tap_chunks, 8), t.split)  // whole ones of every tap
                          : t.sm90() ? ceil_div(ceil_div(taps * tap_chunks, 8), t.split)
                                     : taps * ceil_div(tap_chunks, 4);
    Step step = t.im2col() ? gemm_im2col_step(t) : t.sm90() ? gemm_sm90_step(t) : portable_gemm_step(t);
    if (prologue_in_kernel(p, t)) {  // through registers, while the tensor cores wait
        const double slower = t.block_m == 64 ? 1.09 : 1.25;
        step = {slower * step.issue_us, slower * step.latency_us};
    }
    const bool runs = t.sm90() && p.out_pixels() % kRunPixels == 0;
    const Block block{steps, step, gemm_ends_us(t) + channels_first_ends_us(p, t, runs)};
    const bool crowded = layout.box_pass && device.cc >= 90;  // where launches overlap
    // Fused weights are made once and kept by a caller that runs a layer again and again, so they do not count.
    const double copied_bytes = double(tiles) * t.split * steps * (t.block_m + t.block_n) * (t.sm90() ? 128 : 64);
    const double gemm_us = std::max(rounds_us(tiles, block, t, t.min_blocks, device, crowded), copied_bytes / kL2BytesPerUs);
    if (layout.box_pass) return gemm_us + box_pass_us(p, layout);
    return gemm_us + (t.im2col() ? kExposedShare * x_bytes(p) / kBytesPerUs : 0);
}

}  // namespace

double expected_us(const Problem &p, const Tactic &t, const Device &device) {
    std::string reason;
    if (t.family == Family::kGeneric) {
        const double operations = 2.0 * p.n * p.m * p.out_pixels() * p.taps() * (double(p.c) / p.group) * (p.pool_size() + 1);
        return 3 + operations / (device.multiprocessors * 2e4);
    }
    if (t.direct_tma()) {
        DirectTmaPlan plan;
        return plan_direct_tma(p, t, device, plan, reason) ? direct_tma_us(p, plan, t) : 1e30;
    }
    if (t.pointwise()) {
        PointwisePlan plan;
        return plan_pointwise(p, t, device, plan, reason) ? pointwise_us(p, plan, t, device) : 1e30;
    }
    if (t.few_channels()) {
        FewChannelsPlan plan;
        return plan_few_channels(p, t, device, plan, reason) ? few_channels_us(p, plan, t, device) : 1e30;
    }
    if (t.direct_fused()) {
        DirectFusedPlan plan;
        return plan_direct_fused(p, t, device, plan, reason) ? direct_fused_us(p, plan, t, device) : 1e30;
    }
    return implicit_gemm_us(p, t, device);
}

}  // namespace convpool

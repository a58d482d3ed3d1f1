// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <numeric>

#include "core/plan.h"
#include "gemm/plan.h"

namespace convpool::gemm {
namespace {

constexpr BoxMean kNoPooling{1, 1, 1, 1, 1, 1, 0, 0, 1.f, 1.f, 1};

// Conv of dilation d over a pooling of stride s and dilation e reads X at a*d*s + u*e: steps of the fused kernel.
struct FusedKernel {
    int64_t size, dilation, tap_step, reach;  // reach: pixels from the first to the last

    FusedKernel(const Problem &p, int i) {
        const int64_t step = int64_t{p.dilations[i]} * p.pool_strides[i];
        dilation = 1;
        if (p.kernel[i] > 1 && p.pool_kernel[i] > 1) dilation = std::gcd(step, int64_t{p.pool_dilations[i]});
        else if (p.kernel[i] > 1) dilation = step;
        else if (p.pool_kernel[i] > 1) dilation = p.pool_dilations[i];
        reach = (p.kernel[i] - 1) * step + int64_t{p.pool_kernel[i] - 1} * p.pool_dilations[i];
        size = reach / dilation + 1;
        tap_step = step;
    }
};

bool pools(const Problem &p) {
    for (int i = 0; i < kRank; ++i)
        if (p.pool_kernel[i] != 1 || p.pool_strides[i] != 1 || p.pool_pads_begin[i] != 0 || p.pool_pads_end[i] != 0) return true;
    return false;
}

int64_t pass_chunks(const Problem &p, const Form &form) {
    const int whole = form.splits_tf32() ? kSplitChannels : p.per_chunk();
    return ceil_div(p.c, whole) * whole / p.per_chunk();
}

// Channels of the operands: padded, and twice as many where each is a big and a small number.
int64_t channels(const Problem &p, const Form &form) {
    return pass_chunks(p, form) * p.per_chunk() * (form.splits_tf32() ? 2 : 1);
}

// Past 32 bits are steps and paddings of a single output, which takes none, and sizes of problems that operands_reason refuses.
int32_t narrow(int64_t value) { return static_cast<int32_t>(std::min<int64_t>(value, INT32_MAX)); }

// The phases of a problem: one where it does not upsample.
Phases phases_of(const Problem &p, bool differences) {
    return {PhaseAxis(p.upsample[1], p.kernel[1], p.pads_begin[1]),
            PhaseAxis(p.upsample[2], p.kernel[2], p.pads_begin[2], differences), static_cast<int32_t>(p.out[1]),
            static_cast<int32_t>(p.out[2])};
}

Shape2d shape_of(const Problem &p, const Form &form) {
    Shape2d s = p.shape();
    s.c = narrow(channels(p, form));
    s.x_channels_last = 1;
    if (form.upsamples()) {
        const Phases phases = phases_of(p, form.differences);
        s.out_h = phases.grid_h();
        s.out_w = phases.grid_w();
        s.kh = phases.rows.all_taps();
        s.kw = phases.columns.all_taps();
        s.stride_h = s.stride_w = s.dilation_h = s.dilation_w = 1;
        s.pad_h = phases.rows.lead;
        s.pad_w = phases.columns.lead;
    } else if (form.pools_x()) {
        s.h = s.pooled_h;
        s.w = s.pooled_w;
    } else {
        const FusedKernel h(p, 1), w(p, 2);
        s.kh = static_cast<int32_t>(h.size);
        s.kw = static_cast<int32_t>(w.size);
        s.dilation_h = narrow(h.dilation);
        s.dilation_w = narrow(w.dilation);
        s.stride_h = narrow(int64_t{p.strides[1]} * p.pool_strides[1]);
        s.stride_w = narrow(int64_t{p.strides[2]} * p.pool_strides[2]);
        s.pad_h = static_cast<int32_t>(int64_t{p.pads_begin[1]} * p.pool_strides[1] + p.pool_pads_begin[1]);
        s.pad_w = static_cast<int32_t>(int64_t{p.pads_begin[2]} * p.pool_strides[2] + p.pool_pads_begin[2]);
    }
    return s;
}

// Which passes there are.
void choose_passes(const Problem &p, const Form &form, Operands &o) {
    const bool converted = form.format != NumberFormat::kAsIs;
    o.weight_pass = converted || !p.w_rows_chunked() || (!form.pools_x() && p.pool_size() > 1) || form.upsamples();
    // In the kernel, where the zeros around X stay zero; with a pooling, where direct_fused competes, that was not measured.
    const bool activates =
        form.activates && !converted && !p.prologue_affine && p.prologue_form() != PrologueForm::kGeneral && !pools(p);
    o.box_pass = (converted && form.pools_x()) || (form.splits_tf32() && form.upsamples()) || !p.x_rows_chunked() ||
                 (form.pools_x() && pools(p)) || (p.has_prologue() && !activates);
    o.prologue_in_kernel = p.has_prologue() && !o.box_pass;
    const Shape2d &s = o.shape;
    if (o.weight_pass) o.workspace.weights_bytes = round_up_256(size_t{1} * s.m * s.kh * s.kw * s.c * p.element_bytes());
    if (o.box_pass) o.workspace.x_bytes = round_up_256(size_t{1} * s.n * s.h * s.w * s.c * p.element_bytes());
}

WeightParams weight_params(const Problem &p, const Form &form, const Operands &o) {
    WeightParams w{};
    w.m = o.shape.m;
    w.c = static_cast<int32_t>(p.c);
    w.kh = p.kernel[1];
    w.kw = p.kernel[2];
    w.fused_h = o.shape.kh;
    w.fused_w = o.shape.kw;
    w.format = form.format;
    w.chunks = static_cast<int32_t>(o.chunks);
    w.box = kNoPooling;
    w.tap_step_h = w.tap_step_w = w.fused_dilation_h = w.fused_dilation_w = 1;
    w.phases = form.upsamples();
    if (form.upsamples()) {
        w.rows = o.phases.rows;
        w.columns = o.phases.columns;
    } else if (!form.pools_x()) {
        const FusedKernel h(p, 1), v(p, 2);
        w.box = box_of(p);
        w.tap_step_h = narrow(h.tap_step);
        w.tap_step_w = narrow(v.tap_step);
        w.fused_dilation_h = narrow(h.dilation);
        w.fused_dilation_w = narrow(v.dilation);
    }
    return w;
}

BoxMeanParams box_params(const Problem &p, const Form &form, const Operands &o) {
    BoxMeanParams b{};
    b.box = form.pools_x() ? box_of(p) : kNoPooling;
    b.n = o.shape.n;
    b.c = static_cast<int32_t>(p.c);
    b.h = static_cast<int32_t>(p.in[1]);
    b.w = static_cast<int32_t>(p.in[2]);
    b.out_h = o.shape.h;
    b.out_w = o.shape.w;
    b.format = form.format;
    b.chunks = static_cast<int32_t>(o.chunks);
    b.x_channels_last = p.x_channels_last;
    b.x_chunked = p.x_rows_chunked() && o.chunks * p.per_chunk() == p.c;
    b.div_chunks = FastDiv(b.chunks);
    b.div_out_w = FastDiv(b.out_w);
    b.div_out_h = FastDiv(b.out_h);
    return b;
}

// Sizes that the fused kernel must have before its shape is worked out.
std::string fused_size_reason(const Problem &p, const Tactic &t) {
    for (int i = 1; i < kRank; ++i) {
        const int64_t seen = (p.out[i] - 1) * p.strides[i] * p.pool_strides[i] + FusedKernel(p, i).reach;
        const int64_t pad = int64_t{p.pads_begin[i]} * p.pool_strides[i] + p.pool_pads_begin[i];
        if (std::max(seen, pad) >= kMaxCount)  // a row that is none counts as -2^30
            return refusal(t, "pixels that Y sees along dimension " + std::to_string(i - (kRank - p.rank)), std::max(seen, pad),
                           "less than 2^30", "use direct_gemm or generic");
    }
    const int64_t taps = FusedKernel(p, 1).size * FusedKernel(p, 2).size;
    if (taps > kMaxCount) return refusal(t, "taps of the fused filter", taps, kAtMostMaxCount, "use direct_gemm or generic");
    return {};
}

// The reason why a tactic cannot run a convolution behind an upsampling.
std::string phases_reason(const Problem &p, const Tactic &t) {
    for (int i = 1; i < kRank; ++i)
        for (auto [name, value] : {Count{"stride", p.strides[i]}, {"dilation", p.dilations[i]}})
            if (value != 1)
                return refusal(t, std::string(name) + " of dimension " + std::to_string(i - (kRank - p.rank)), value, "1",
                               kUseGeneric);
    return {};
}

// Zeros that Conv pads around the pooled tensor must be what box means over a padded X are there: zero.
std::string fused_pads_reason(const Problem &p, const Tactic &t) {
    for (int i = 1; i < kRank; ++i) {
        const int64_t window = int64_t{p.pool_dilations[i]} * (p.pool_kernel[i] - 1);
        const int64_t last = (p.out[i] - 1) * p.strides[i] - p.pads_begin[i] + int64_t{p.kernel[i] - 1} * p.dilations[i];
        const std::string side = " pads of dimension " + std::to_string(i - (kRank - p.rank));
        if (p.pads_begin[i] > 0 && p.pool_pads_begin[i] + p.pool_strides[i] <= window)
            return refusal(t, "leading" + side, p.pads_begin[i], "0, or pooling pads that reach past X",
                           "use direct_fused or direct_gemm");
        if (last >= p.pooled[i] && p.pooled[i] * p.pool_strides[i] - p.pool_pads_begin[i] < p.in[i])
            return refusal(t, "trailing" + side, p.pads_end[i], "0, or pooling pads that reach past X",
                           "use direct_fused or direct_gemm");
    }
    return {};
}

// The reason why sizes of the problem are beyond the passes or the kernel. adds_spans: it adds 32-bit distances between taps to
// 64-bit places.
std::string operands_reason(const Problem &p, const Tactic &t, const Form &form, bool adds_spans) {
    std::string reason = form.upsamples() ? phases_reason(p, t) : form.pools_x() ? std::string() : fused_size_reason(p, t);
    if (!reason.empty()) return reason;
    Operands o{};
    o.shape = shape_of(p, form);
    o.chunks = pass_chunks(p, form);
    choose_passes(p, form, o);
    const Shape2d &s = o.shape;
    const char *next = "use direct_fused or generic";
    const int64_t pass_items = int64_t{s.n} * s.h * s.w * o.chunks;
    if (o.box_pass && pass_items > INT32_MAX)
        return refusal(t, "16-byte chunks of the tensor to convolve", pass_items, "less than 2^31", next);
    const int64_t padded = channels(p, form);
    for (auto [name, value] : {Count{"elements of an image to convolve, channels padded", int64_t{s.h} * s.w * padded},
                               {"elements of a filter, channels padded", int64_t{s.kh} * s.kw * padded}})
        if (value > kMaxCount) return refusal(t, name, value, kAtMostMaxCount, next);
    // Padding lets a filter reach further than an image.
    const int64_t span = ((int64_t{s.kh} - 1) * s.dilation_h * s.w + (int64_t{s.kw} - 1) * s.dilation_w + 1) * padded;
    if (adds_spans && span > kMaxCount)
        return refusal(t, "elements between a filter's first and last tap", span, kAtMostMaxCount, "use a tactic without sm90a");
    if (o.weight_pass && p.m > 65535) return refusal(t, "output channels", p.m, "at most 65535", next);  // blocks along y
    if (form.pools_x()) return {};
    reason = form.upsamples() ? std::string() : fused_pads_reason(p, t);
    const int64_t filter_bytes = int64_t{s.kh} * s.kw * o.chunks * 16;
    if (reason.empty() && filter_bytes > kMaxCount)
        return refusal(t, "bytes of a fused filter", filter_bytes, kAtMostMaxCount, "use direct_fused or direct_gemm");
    return reason;
}

constexpr double kL2BytesPerUs = 11.6e6;         // to shared memory
constexpr double kPassBytesPerUs = 3.0e6;        // of a pass over X: between those of an H100, 2.6e6, and of an H200, 3.75e6
constexpr int kReservedBytes = 1024;             // of shared memory, for each block
constexpr double kChannelsFirstPassBytes = 1.4;  // a byte of a pass that transposes, in bytes of one that does not
constexpr double kWindowBytesPerUs = 7e6;        // of the loads of means over 9 and 16 values
constexpr double kWindowLoadsPerUs = 1.8e6;      // the same where channels come first: loads of one value
constexpr int32_t kStripRows = 4, kAtOnce = 4;   // as in prepasses.cu

int64_t tiles_of(const Problem &p, const Tile &tile) {
    const Phases phases = phases_of(p, tile.differences);
    const int64_t places = tile.differences ? p.n * ceil_div(phases.grid_h(), 16) * ceil_div(phases.grid_w(), 8)
                                            : ceil_div(p.n * phases.grid_h() * phases.grid_w(), tile.block_m);
    return places * ceil_div(p.m, tile.block_n) * phases.count();
}

ImplicitGemmParams gemm_params(const Problem &p, const Row &row, const Operands &o) {
    ImplicitGemmParams g{};
    g.shape = o.shape;
    const int32_t image = o.shape.out_h * o.shape.out_w;
    g.pixels = o.shape.n * image;
    g.slices = static_cast<int32_t>(ceil_div(o.shape.c, 4 * p.per_chunk()));
    g.m_tiles = static_cast<int32_t>(ceil_div(o.shape.m, row.tile.block_n)) * o.phases.count();
    const int64_t across = ceil_div(o.shape.out_w, row.tile.differences ? 8 : 1);  // pixels, or tiles of 16 x 8
    g.div_out_w = FastDiv(static_cast<uint32_t>(across));
    g.div_out_hw = FastDiv(static_cast<uint32_t>(across * ceil_div(o.shape.out_h, row.tile.differences ? 16 : 1)));
    g.div_m_tiles = FastDiv(g.m_tiles);
    g.split = row.split;
    g.div_split = FastDiv(row.split);
    g.round_pixels = o.box.format == NumberFormat::kTF32 && !o.box_pass;
    g.early_weights = o.box_pass;  // which starts after whatever came before has ended, the weights' pass included
    const int tap_chunks = o.shape.c / p.per_chunk();
    g.chunks = o.shape.kh * o.shape.kw * tap_chunks;
    g.div_tap_chunks = FastDiv(tap_chunks);
    g.div_kw = FastDiv(o.shape.kw);
    return g;
}

// Bytes of shared memory of a block.
int64_t shared_bytes(const Row &row, const KernelTraits &traits) {
    const Tile &t = row.tile;
    if (t.differences) return kDifferenceBytes;
    if (traits.phases && row.split == 1)
        return exchange_offset(t.stages, t.block_m, t.block_n) + t.staged_bytes() + t.block_m * 4;  // and places in Y
    const int ring = t.stages * (t.block_m + t.block_n) * traits.row_chunks * 16 + traits.barrier_bytes;
    if (row.split == 1) return ring;
    if (traits.row_chunks == 8 && pushes_sums(row.precision, t.block_m, t.block_n))
        return exchange_offset(t.stages, t.block_m, t.block_n) + pushed_bytes(row.split, t.block_m * t.block_n / 128);
    return std::max(ring, t.block_m * (t.block_n + 8) * 4);  // accumulators that others load
}

int64_t grid_of(int64_t blocks, const Row &row, const KernelTraits &traits, const Device &d) {
    return traits.persistent ? std::min<int64_t>(blocks, int64_t{d.multiprocessors} * row.tile.min_blocks) : blocks;
}

}  // namespace

NumberFormat wgmma_format(Precision precision) {
    return precision == Precision::kTF32     ? NumberFormat::kTF32
           : precision == Precision::kTF32x3 ? NumberFormat::kTF32Split
                                             : NumberFormat::kAsIs;
}

int wgmma_channels(Precision precision) {
    return precision == Precision::kTF32x3 ? kSplitChannels : precision == Precision::kTF32 ? 32 : 64;
}

Operands operands_of(const Problem &p, const Form &form) {
    Operands o{};
    o.shape = shape_of(p, form);
    o.chunks = pass_chunks(p, form);
    if (form.upsamples()) o.phases = phases_of(p, form.differences);
    choose_passes(p, form, o);
    o.weights = weight_params(p, form, o);
    o.box = box_params(p, form, o);
    return o;
}

int64_t GemmPlan::blocks() const { return tiles_of(problem, row_.tile) * row_.split; }

GemmPlan::GemmPlan(const Problem &p, const Tactic &t, const Device &d, const Row &row, const Operands &operands,
                   const KernelTraits &traits, const void *kernel)
    : Plan(p, t, d), row_(row), operands_(operands), traits_(traits), gemm_(gemm_params(p, row, operands)),
      kernel_{kernel, grid_of(blocks(), row, traits, d), row.tile.warps_m * row.tile.warps_n * 32 + traits.copy_threads,
              row.split, shared_bytes(row, traits)},
      overlap_(launches_overlap(d)) {
    workspace = operands.workspace;
    vector_tensors = (operands.box_pass ? kNoTensors : kX) | (operands.weight_pass ? kNoTensors : kW);
    if (row.tile.differences) vector_tensors |= kY | (p.has_bias ? kB : kNoTensors);
}

cudaError_t GemmPlan::load() const {
    const cudaError_t error = kernel_.load(device);
    if (error != cudaSuccess) return error;
    return outside_captures([&] { return load_passes(row_.precision, problem.prologue_form()); });
}

cudaError_t GemmPlan::launch(const convpool_tensors &t, cudaStream_t stream) const {
    char *const memory = static_cast<char *>(t.workspace);
    ImplicitGemmParams g = gemm_;
    g.x = t.x;
    g.w = t.w;
    if (operands_.weight_pass) {
        void *const prepared = t.prepared != nullptr ? t.prepared : memory;
        g.w = prepared;
        if ((t.flags & CONVPOOL_WEIGHTS_PREPARED) != 0) {
            g.early_weights = 1;  // the kernel that last read them had waited for what wrote them
        } else {
            WeightParams weights = operands_.weights;
            weights.w = t.w;
            weights.out = prepared;
            const cudaError_t error = launch_fuse_weights(weights, row_.precision, stream);
            if (error != cudaSuccess) return error;
        }
    }
    if (operands_.box_pass) {
        BoxMeanParams box = operands_.box;
        box.x = t.x;
        box.out = memory + (t.prepared != nullptr ? 0 : workspace.weights_bytes);
        g.x = box.out;
        box.prologue = prologue_of(problem, t);
        box.x_chunked = box.x_chunked && aligned(t.x, 16);
        const cudaError_t error = launch_box_mean(box, row_.precision, overlap_, stream);
        if (error != cudaSuccess) return error;
    }
    g.y = t.y;
    g.epilogue = epilogue_of(problem, t);
    g.y_vectors = y_vectors(problem, t);
    g.y_runs = y_runs(problem, t);
    return launch_gemm(g, t, stream);
}

cudaError_t GemmPlan::launch_gemm(ImplicitGemmParams &gemm, const convpool_tensors &, cudaStream_t stream) const {
    return launch_kernel(&gemm, stream);
}

double GemmPlan::passes_and_rounds_us(int64_t steps, Step step) const {
    const Problem &p = problem;
    const Tile &tile = row_.tile;
    const double share = tile_share(tile.block_m, tile.block_n), lanes = tile.warps_m * tile.warps_n * 32;
    const bool runs = traits_.stores_runs && !p.upsamples() && p.out_pixels() % kRunPixels == 0;
    const double first_us = channels_first_ends_us(p, double(tile.block_m) * tile.block_n / (lanes * row_.split), runs);
    const int64_t tiles = tiles_of(p, tile);
    const bool crowded = operands_.box_pass && device.cc >= 90;  // where launches overlap
    int blocks = tile.min_blocks;
    if (row_.split > 1)  // the memory by which they exchange their sums may leave room for fewer
        blocks =
            std::clamp(device.shared_per_multiprocessor / (static_cast<int>(kernel_.shared_bytes) + kReservedBytes), 1, blocks);
    const bool pushes = traits_.row_chunks == 8 && pushes_sums(row_.precision, tile.block_m, tile.block_n);
    const double split = pushes ? pushed_split_us(row_.split, share) : split_us(row_.split, share);
    const Rounds rounds{tiles, row_.split, split, blocks, crowded};
    const double ends_us = p.upsamples() && tile.phase_ends_us > 0 ? tile.phase_ends_us : 1.38 + 0.96 * share;
    const double blocks_us = rounds_us(rounds, {steps, step, ends_us + first_us}, device);
    // Fused weights are made once and kept by a caller that runs a layer again and again, so they do not count.
    const double copied_bytes = double(tiles) * row_.split * steps * (tile.block_m + tile.block_n) * (16 * traits_.row_chunks);
    const double gemm_us = std::max(blocks_us, copied_bytes / kL2BytesPerUs);
    if (!operands_.box_pass) return gemm_us;
    const double transposed = p.x_channels_last ? 1.0 : kChannelsFirstPassBytes;
    // Windows of 2x2 share their sums. A thread loads all of a larger one, from the caches: of one mean, or of a strip's where
    // channels come first. It waits for each of its rounds of loads, however few threads there are.
    double loads_us = 0, waits_us = 0;
    const int64_t window = int64_t{operands_.box.box.ph} * operands_.box.box.pw;
    if (window > 4) {
        const double loads = double(window) * workspace.x_bytes;
        loads_us = p.x_channels_last ? loads / kWindowBytesPerUs : loads / p.element_bytes() / kWindowLoadsPerUs;
        const int64_t means = p.x_channels_last ? 1 : std::min(kStripRows, operands_.box.out_h);
        waits_us = double(ceil_div(window * means, kAtOnce) - 1) * (p.x_channels_last ? 0.65 : 0.4);
    }
    const double bytes_us = std::max((x_bytes(p) + double(workspace.x_bytes)) * transposed / kPassBytesPerUs, loads_us);
    const double strided_us = p.pool_strides[1] > 1 || p.pool_strides[2] > 1 ? 1.33 : 0;  // windows share no sums
    return gemm_us + waits_us + (strided_us + (p.has_prologue() ? 2.23 + 1.55 * bytes_us : 1.43 + bytes_us));
}

std::string gemm_reason(const Problem &p, const Tactic &t, const Device &device, const Row &row, const Form &form,
                        const KernelTraits &traits) {
    std::string reason = problem_reason(p, t);
    if (reason.empty()) reason = operands_reason(p, t, form, traits.row_chunks == 8);
    if (!reason.empty()) return reason;
    if (shared_bytes(row, traits) > device.shared_per_block)
        return refusal(t, "shared memory of a block", std::to_string(device.shared_per_block) + " bytes",
                       std::to_string(shared_bytes(row, traits)), "use a tactic with smaller tiles");
    const int64_t blocks = tiles_of(p, row.tile) * row.split;
    if (blocks > INT32_MAX)
        return refusal(t, "thread blocks", blocks, "less than 2^31", "use a tactic with less split or generic");
    return {};
}

std::vector<Tactic> tactics_of(const Family &family, std::span<const Row> rows, bool wgmma, const char *suffix) {
    std::vector<Tactic> all;
    for (const Row &row : rows) {
        const bool upsamples = row.operand == Operand::kPhasesOfW;
        const char *name = upsamples ? "upsample" : row.operand == Operand::kPooledX ? "direct_gemm" : "filter_fused";
        const int32_t min_cc = wgmma ? 90 : mma_min_cc(row.precision, row.split);
        const int channels = wgmma ? wgmma_channels(row.precision) : is_16_bit(row.precision) ? 32 : 16;
        all.push_back({row.id, &family, all.size(),
                       tile_name(name, min_cc, wgmma, row.precision, row.tile.block_m, row.tile.block_n, channels) +
                           stages_name(row.tile.stages, row.split) + (row.tile.differences ? "_differences" : suffix),
                       name, static_cast<int32_t>(row.precision), row.split, min_cc, wgmma, false, upsamples, true});
    }
    return all;
}

}  // namespace convpool::gemm

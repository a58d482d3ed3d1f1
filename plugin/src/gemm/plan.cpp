// SPDX-License-Identifier: Apache-2.0
#include "gemm/plan.h"

#include <algorithm>

#include "core/naming.h"
#include "core/pushed_sums.h"
#include "core/refusal.h"

namespace convpool::gemm {
namespace {

constexpr double kL2BytesPerUs = 11.6e6;         // to shared memory
constexpr int kReservedBytes = 1024;             // of shared memory, for each block
constexpr double kChannelsFirstPassBytes = 1.4;  // a byte of a pass that transposes, in bytes of one that does not
constexpr double kWindowBytesPerUs = 7e6;        // of the loads of means over 9 and 16 values

int64_t tiles_of(const Problem &p, const Tile &tile) {
    return ceil_div(p.n * p.out_pixels(), tile.block_m) * ceil_div(p.m, tile.block_n);
}

ImplicitGemmParams gemm_params(const Problem &p, const Row &row, const Operands &o) {
    ImplicitGemmParams g{};
    g.shape = o.shape;
    g.pixels = static_cast<int32_t>(p.n * p.out_pixels());
    g.slices = static_cast<int32_t>(ceil_div(o.shape.c, 4 * p.per_chunk()));
    g.m_tiles = static_cast<int32_t>(ceil_div(o.shape.m, row.tile.block_n));
    g.div_out_w = FastDiv(o.shape.out_w);
    g.div_out_hw = FastDiv(static_cast<uint32_t>(p.out_pixels()));
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

}  // namespace

GemmPlan::GemmPlan(const Problem &p, const Tactic &t, const Device &d, const Row &row, const Operands &operands,
                   const KernelTraits &traits, const void *kernel)
    : Plan(p, t, d), row_(row), operands_(operands), traits_(traits), gemm_(gemm_params(p, row, operands)),
      kernel_{kernel, tiles_of(p, row.tile) * row.split, row.tile.warps_m * row.tile.warps_n * 32 + traits.copy_threads,
              row.split, shared_bytes(row, traits)},
      overlap_(launches_overlap(d)) {
    workspace = operands.workspace;
    vectors = (operands.box_pass ? kNoTensors : kX) | (operands.weight_pass ? kNoTensors : kW);
}

cudaError_t GemmPlan::load() const {
    const cudaError_t error = kernel_.load(device);
    if (error != cudaSuccess) return error;
    return outside_captures([&] { return load_passes(row_.precision, problem.has_prologue()); });
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
    const bool runs = traits_.stores_runs && p.out_pixels() % kRunPixels == 0;
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
    const double blocks_us = rounds_us(rounds, {steps, step, 1.38 + 0.96 * share + first_us}, device);
    // Fused weights are made once and kept by a caller that runs a layer again and again, so they do not count.
    const double copied_bytes = double(tiles) * row_.split * steps * (tile.block_m + tile.block_n) * (16 * traits_.row_chunks);
    const double gemm_us = std::max(blocks_us, copied_bytes / kL2BytesPerUs);
    if (!operands_.box_pass) return gemm_us;
    const double transposed = p.x_channels_last ? 1.0 : kChannelsFirstPassBytes;
    // Windows of 2x2 share their sums; a mean of a larger one loads all of its window, from the caches.
    const double loads_us =
        p.x_channels_last && p.pool_size() > 4 ? double(p.pool_size()) * workspace.x_bytes / kWindowBytesPerUs : 0;
    const double bytes_us = std::max((x_bytes(p) + double(workspace.x_bytes)) * transposed / kBytesPerUs, loads_us);
    const double strided_us = p.pool_strides[1] > 1 || p.pool_strides[2] > 1 ? 1.33 : 0;  // windows share no sums
    return gemm_us + (strided_us + (p.has_prologue() ? 2.23 + 1.55 * bytes_us : 1.43 + bytes_us));
}

int64_t shared_bytes(const Row &row, const KernelTraits &traits) {
    const Tile &t = row.tile;
    const int ring = t.stages * (t.block_m + t.block_n) * traits.row_chunks * 16 + traits.barrier_bytes;
    if (row.split == 1) return ring;
    if (traits.row_chunks == 8 && pushes_sums(row.precision, t.block_m, t.block_n))
        return exchange_offset(t.stages, t.block_m, t.block_n) + pushed_bytes(row.split, t.block_m * t.block_n / 128);
    return std::max(ring, t.block_m * (t.block_n + 8) * 4);  // accumulators that others load
}

std::string block_reason(const Problem &p, const Tactic &t, const Device &device, const Row &row, const KernelTraits &traits) {
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
        const char *name = row.operand == Operand::kPooledX ? "direct_gemm" : "filter_fused";
        const int32_t min_cc = wgmma ? 90 : mma_min_cc(row.precision, row.split);
        const int channels = wgmma ? wgmma_channels(row.precision) : is_16_bit(row.precision) ? 32 : 16;
        all.push_back({row.id, &family, all.size(),
                       tile_name(name, min_cc, wgmma, row.precision, row.tile.block_m, row.tile.block_n, channels) +
                           stages_name(row.tile.stages, row.split) + suffix,
                       name, static_cast<int32_t>(row.precision), row.split, min_cc, wgmma});
    }
    return all;
}

}  // namespace convpool::gemm

// SPDX-License-Identifier: Apache-2.0
// direct_fused: pooling and convolution in one kernel, on tensor cores by mma.sync. It takes every layout. First the box of output
// pixels that a tile covers, and the layout of its shared memory.

#include <algorithm>

#include "core/cost.h"
#include "core/launch.h"
#include "families/direct_fused/rows.h"

namespace convpool::direct_fused {
namespace {

// All but the pointers of a launch.
struct Placement {
    DirectFusedParams params;
    int64_t grid, shared_bytes;
    int blocks_per_multiprocessor;
};

constexpr int kChunks = 4;               // TileConfig::kChunks
constexpr int64_t kMaxExtent = 1 << 20;  // past it no shared memory holds a line, and products of extents leave 64 bits

// The least number not below `value` that is 2 modulo 8: four chunks of two neighbours, which eight lanes store at once,
// then fall into eight different bank groups.
int64_t pad_plane(int64_t value) {
    while (value % 8 != 2) ++value;
    return value;
}

struct TileBox {
    int images, h_log2, w_log2;
    int64_t halo_h, halo_w, raw_h, raw_w, phase_pitch, plane;
    int64_t tiles;    // boxes that cover the output
    int64_t staging;  // bytes through which accumulators pass, at P's place
    int64_t mean_bytes() const { return std::max(kChunks * 16 * plane, staging); }
    int64_t raw_bytes() const { return kChunks * 16 * images * raw_h * raw_w; }
    // Weights follow, from a multiple of 1024 on, which their swizzle counts from.
    int64_t pixel_bytes() const { return ceil_div(mean_bytes() + raw_bytes(), 1024) * 1024; }
};

// Accumulators of `rows` pixels and up to `columns` channels of every warp, a pitch of 8 floats more: Staging.
int64_t staging_bytes(const Tile &t, int rows, int columns) {
    return int64_t{t.warps_m} * t.warps_n * rows * (std::min(columns, t.block_n / t.warps_n) + 8) * 4;
}

TileBox make_box(const Problem &p, const Tile &t, int images, int h_log2, int w_log2) {
    TileBox b{};
    b.images = images;
    b.h_log2 = h_log2, b.w_log2 = w_log2;
    b.staging = staging_bytes(t, 16, 64);
    const int h = 1 << h_log2, w = 1 << w_log2;
    b.halo_h = int64_t{h - 1} * p.strides[1] + int64_t{p.kernel[1] - 1} * p.dilations[1] + 1;
    b.halo_w = int64_t{w - 1} * p.strides[2] + int64_t{p.kernel[2] - 1} * p.dilations[2] + 1;
    b.raw_h = (b.halo_h - 1) * p.pool_strides[1] + int64_t{p.pool_kernel[1] - 1} * p.pool_dilations[1] + 1;
    b.raw_w = (b.halo_w - 1) * p.pool_strides[2] + int64_t{p.pool_kernel[2] - 1} * p.pool_dilations[2] + 1;
    for (int64_t *extent : {&b.halo_h, &b.halo_w, &b.raw_h, &b.raw_w}) *extent = std::min(*extent, kMaxExtent);
    b.phase_pitch = ceil_div(b.halo_w, p.strides[2]) | 1;
    b.plane = pad_plane(images * b.halo_h * p.strides[2] * b.phase_pitch);
    b.tiles = ceil_div(p.n, images) * ceil_div(p.out[1], h) * ceil_div(p.out[2], w);
    return b;
}

// Rows per segment: with few segments threads idle, with many the pair sums at their borders are made twice.
int segment_height(const TileBox &b, int threads) {
    int best = static_cast<int>(b.halo_h);
    int64_t best_cost = INT64_MAX;
    for (int height = 1; height <= b.halo_h; ++height) {
        const int64_t walks = b.images * ceil_div(b.halo_h, height) * b.halo_w * kChunks;
        const int64_t cost = ceil_div(walks, threads) * (2 * height + 3);
        if (cost < best_cost) {
            best_cost = cost;
            best = height;
        }
    }
    return best;
}

// How often a row's blocks fit on a device.
struct Occupancy {
    const Tile &tile;
    const Device &device;

    int blocks(int64_t bytes) const {
        const int reserved = device.cc >= 80 ? 1024 : 0;  // of every resident block, taken by the system
        return static_cast<int>(std::min<int64_t>(tile.min_blocks, device.shared_per_multiprocessor / (bytes + reserved)));
    }
};

// Bytes of shared memory: at least those through which a cluster exchanges accumulators, pixels, and weights.
struct Memory {
    int64_t least, stage_bytes;

    Memory(const Tile &t, int split)
        : least(split > 1 ? staging_bytes(t, t.block_m / t.warps_m, t.block_n) : 0), stage_bytes(t.block_n * kChunks * 16) {}
    int64_t bytes(const TileBox &box, int64_t weight_stages) const {
        return std::max(least, box.pixel_bytes() + weight_stages * stage_bytes);
    }
};

// The cheapest box that fits. False if none does; `smallest` is then what the smallest needs.
bool find_box(const Problem &p, const Row &row, const Device &device, TileBox &best, int64_t &smallest) {
    const Tile &t = row.tile;
    const Memory memory(t, row.split);
    const Occupancy occupancy{t, device};
    double best_cost = 0;
    smallest = INT64_MAX;
    for (int images = 1; images <= t.block_m; images *= 2) {
        if (images > 1 && images / 2 >= p.n) break;
        for (int h_log2 = 0; images << h_log2 <= t.block_m; ++h_log2) {
            int w_log2 = 0;
            while (images << (h_log2 + w_log2) < t.block_m) ++w_log2;
            const TileBox box = make_box(p, t, images, h_log2, w_log2);
            const int64_t bytes = memory.bytes(box, t.stages);
            smallest = std::min(smallest, bytes);
            if (bytes > device.shared_per_block || box.plane * kChunks * 16 >= kMaxCount) continue;
            // Multiplications, and about as much again for eight halo positions as for one tap of a pixel; eight pixels
            // of a tile row are read without bank conflicts.
            const double work =
                static_cast<double>(box.tiles) * (t.block_m * p.taps() + (box.plane + box.images * box.raw_h * box.raw_w) * 1.5);
            const double cost = work * (1 + 0.2 * (t.min_blocks - occupancy.blocks(bytes))) * (w_log2 < 2 ? 1.2 : 1.0);
            if (best_cost == 0 || cost < best_cost) {
                best_cost = cost;
                best = box;
            }
        }
    }
    return best_cost != 0;
}

// How a tile's box lies in X, in the output and in shared memory; d.shape is set.
void place_box(const Problem &p, const Row &row, const TileBox &box, DirectFusedParams &d) {
    const Shape2d &s = d.shape;
    d.tile_images = box.images;
    d.tile_h_log2 = box.h_log2, d.tile_w_log2 = box.w_log2;
    d.tiles_h = static_cast<int32_t>(ceil_div(p.out[1], 1 << box.h_log2));
    d.tiles_w = static_cast<int32_t>(ceil_div(p.out[2], 1 << box.w_log2));
    d.halo_h = static_cast<int32_t>(box.halo_h), d.halo_w = static_cast<int32_t>(box.halo_w);
    d.raw_h = static_cast<int32_t>(box.raw_h), d.raw_w = static_cast<int32_t>(box.raw_w);
    d.segment_h = segment_height(box, row.tile.warps_m * row.tile.warps_n * 32);
    d.segments = static_cast<int32_t>(ceil_div(box.halo_h, d.segment_h));
    d.walks = box.images * d.segments * d.halo_w * kChunks;
    d.phase_pitch = static_cast<int32_t>(box.phase_pitch);
    d.plane = static_cast<int32_t>(box.plane);
    d.raw_offset = static_cast<int32_t>(box.mean_bytes());
    d.weight_offset = static_cast<int32_t>(box.pixel_bytes());
    d.div_m_tiles = FastDiv(d.m_tiles);
    d.div_tiles_w = FastDiv(d.tiles_w);
    d.div_tiles_h = FastDiv(d.tiles_h);
    d.div_raw_h = FastDiv(d.raw_h);
    d.div_halo_w = FastDiv(d.halo_w);
    d.div_stride_w = FastDiv(s.stride_w);
    d.div_segments = FastDiv(d.segments);
    for (int tap = 0; tap < d.taps; ++tap) {
        const int a = tap / s.kw * s.dilation_h, b = tap % s.kw * s.dilation_w;
        d.tap_offsets[tap] = ((a * s.stride_w + b % s.stride_w) * d.phase_pitch + b / s.stride_w) * 16;
    }
}

// Weights that all fit, at no cost in resident blocks, are copied once: no copies and barriers between taps.
void place_weights(const Row &row, const Device &device, const TileBox &box, Placement &placement) {
    DirectFusedParams &d = placement.params;
    const Memory memory(row.tile, row.split);
    const Occupancy occupancy{row.tile, device};
    const int64_t tiles = d.tiles, all_stages = ceil_div(d.slices, row.split) * d.taps;
    const int64_t pipelined = memory.bytes(box, row.tile.stages), kept = memory.bytes(box, all_stages);
    const bool one_tile_each = tiles * row.split <= int64_t{device.multiprocessors} * occupancy.blocks(kept);
    d.resident = kept <= device.shared_per_block && (d.m_tiles == 1 || one_tile_each) &&
                 (occupancy.blocks(kept) == occupancy.blocks(pipelined) || (row.split == 1 && one_tile_each));
    d.weight_stages = static_cast<int32_t>(d.resident ? all_stages : row.tile.stages);
    placement.shared_bytes = d.resident ? kept : pipelined;
    placement.blocks_per_multiprocessor = occupancy.blocks(placement.shared_bytes);
    const int64_t slots = int64_t{device.multiprocessors} * placement.blocks_per_multiprocessor;
    placement.grid = row.split > 1 ? tiles * row.split : std::min(tiles, slots);
}

// Empty, or the reason why no tile of the row takes the problem on such a device.
std::string place(const Problem &p, const Tactic &t, const Row &row, const Device &device, Placement &placement) {
    const int64_t slices = ceil_div(p.c, kChunks * p.per_chunk());
    if (slices < row.split)
        return refusal(t, "channel slices", slices, "at least " + std::to_string(row.split), "use a tactic with less split");
    if (p.taps() > kMaxTaps)
        return refusal(t, "taps of the kernel", p.taps(), "at most " + std::to_string(kMaxTaps), "use direct_gemm or generic");
    TileBox box{};
    int64_t smallest = 0;
    if (!find_box(p, row, device, box, smallest))
        return refusal(t, "shared memory of a block", std::to_string(device.shared_per_block) + " bytes",
                       "at least " + std::to_string(smallest), "use a tactic with smaller tiles, direct_gemm or generic");
    DirectFusedParams &d = placement.params;
    d = DirectFusedParams{};
    d.shape = p.shape();
    d.box = box_of(p);
    d.m_tiles = static_cast<int32_t>(ceil_div(p.m, row.tile.block_n));
    const int64_t tiles = box.tiles * d.m_tiles;
    if (tiles * row.split >= kMaxCount)
        return refusal(t, "tiles", tiles, "less than 2^30", "use a tactic with larger tiles or generic");
    d.tiles = static_cast<int32_t>(tiles);
    d.slices = static_cast<int32_t>(slices);
    d.split = row.split;
    d.taps = static_cast<int32_t>(p.taps());
    d.box_pairs = p.pool_kernel[1] == 2 && p.pool_kernel[2] == 2 && p.pool_strides[1] == 1 && p.pool_strides[2] == 1 &&
                  p.pool_dilations[1] == 1 && p.pool_dilations[2] == 1;
    place_box(p, row, box, d);
    place_weights(row, device, box, placement);
    return {};
}

class DirectFusedPlan : public OneKernelPlan {
public:
    DirectFusedPlan(const Problem &p, const Tactic &t, const Device &device, const Kernel &kernel, const Placement &placement)
        : OneKernelPlan(p, t, device, kernel), placement_(placement), row_(kRows[t.row]) {}

    double expected_us() const override {
        const Problem &p = problem;
        const Tile &tile = row_.tile;
        const DirectFusedParams &d = placement_.params;
        const double share = tile_share(tile.block_m, tile.block_n), wider = row_.precision == Precision::kTF32x3 ? 1.6 : 1.0;
        const int threads = tile.warps_m * tile.warps_n * 32;
        const int64_t slices = ceil_div(d.slices, row_.split);
        Block block{slices * d.taps, {tile.step.issue_us * wider, tile.step.latency_us * wider}, 1.65 + 0.83 * share};
        block.ends_us +=
            channels_first_ends_us(p, double(tile.block_m) * tile.block_n / (threads * row_.split), p.out[2] % kRunPixels == 0);
        // Channels first, a warp gathers a chunk of a row of pixels at a time, and waits for each.
        const int64_t rows = ceil_div(int64_t{d.tile_images} * d.raw_h, threads / 32);
        if (!p.x_channels_last) block.ends_us += slices * rows * 4 * ceil_div(d.raw_w, 32) * kMemoryLatencyUs;
        // Box means of a slice, as far as products do not hide them; those of one tap hide nothing, whatever runs beside them.
        // A thread loads larger windows than 2x2 place by place, for each of its means.
        const int64_t means = ceil_div(int64_t{d.tile_images} * d.halo_h * d.halo_w * kChunks, threads);
        const double window_us = p.pool_size() > 4 ? 0.07 * double(means * p.pool_size()) : 0;
        const double means_us = (d.taps == 1 ? 2.25 : 1.7) * (p.has_prologue() ? 3.0 : 1.0) + window_us;
        if (d.taps == 1) {
            block.step.issue_us += means_us;
            block.step.latency_us += means_us;
        } else {
            block.ends_us += slices * means_us;
        }
        return rounds_us({d.tiles, row_.split, split_us(row_.split, share), placement_.blocks_per_multiprocessor}, block, device);
    }

    cudaError_t launch(const convpool_tensors &t, cudaStream_t stream) const override {
        DirectFusedParams d = placement_.params;
        set_arrays(d, problem, t);
        d.x_chunked = problem.x_rows_chunked() && aligned(t.x, 16);
        d.w_chunked = problem.w_rows_chunked() && aligned(t.w, 16);
        d.y_vectors = y_vectors(problem, t);
        // No run leaves a tile's row.
        d.y_runs = y_runs(problem, t) && problem.out[2] % kRunPixels == 0 && 1 << d.tile_w_log2 >= kRunPixels;
        return launch_kernel(&d, stream);
    }

private:
    Placement placement_;
    const Row &row_;
};

class DirectFused : public Family {
public:
    std::vector<Tactic> tactics() const override {
        const auto min_cc = [](const Row &row) { return mma_min_cc(row.precision, row.split); };
        return tactics_of(*this, kRows, false, min_cc, [&](const Row &row) {
            return tile_name("direct_fused", min_cc(row), false, row.precision, row.tile.block_m, row.tile.block_n,
                             is_16_bit(row.precision) ? 32 : 16) +
                   stages_name(row.tile.stages, row.split);
        });
    }

    std::unique_ptr<Plan> plan(const Problem &p, const Tactic &t, const Device &device, std::string &reason) const override {
        const Row &row = kRows[t.row];
        Placement placement;
        reason = problem_reason(p, t);
        if (reason.empty()) reason = place(p, t, row, device, placement);
        if (!reason.empty()) return nullptr;
        const void *function = kernel_of_row<kRows>(t.row);
        const Kernel main{function, placement.grid, row.tile.warps_m * row.tile.warps_n * 32, row.split, placement.shared_bytes};
        return std::make_unique<DirectFusedPlan>(p, t, device, main, placement);
    }
};

}  // namespace

CONVPOOL_DEFINE_FAMILY(DirectFused)

}  // namespace convpool::direct_fused

// Chooses the box of output pixels that a direct_fused tile covers, and lays out its shared memory.
#include <algorithm>

#include "tactics.h"

namespace convpool {
namespace {

constexpr int kChunks = 4;               // TileConfig::kChunks
constexpr int64_t kMaxExtent = 1 << 20;  // past it no shared memory holds a line, and products of extents leave 64 bits

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The least number not below `value` that is 2 modulo 8: four chunks of two neighbours, which eight lanes store at once,
// then fall into eight different bank groups.
int64_t pad_plane(int64_t value) {
    while (value % 8 != 2) ++value;
    return value;
}

struct Box {
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
int64_t staging_bytes(const Tactic &t, int rows, int columns) {
    return int64_t{t.warps_m} * t.warps_n * rows * (std::min(columns, t.block_n / t.warps_n) + 8) * 4;
}

Box make_box(const Problem &p, const Tactic &t, int images, int h_log2, int w_log2) {
    Box b{};
    b.images = images;
    b.h_log2 = h_log2;
    b.w_log2 = w_log2;
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
int segment_height(const Box &b, int threads) {
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

}  // namespace

bool plan_direct_fused(const Problem &p, const Tactic &t, const Device &device, DirectFusedPlan &plan, std::string &reason) {
    const int stage_bytes = t.block_n * kChunks * 16;
    const int taps = p.kernel[1] * p.kernel[2];
    const int slices = static_cast<int>(ceil_div(p.c, kChunks * p.per_chunk()));
    if (slices < t.split) {
        reason = std::string(t.name()) + ": channel slices; got " + std::to_string(slices) + ", expected at least " +
                 std::to_string(t.split) + "; use a tactic with less split";
        return false;
    }
    const int64_t least = t.split > 1 ? staging_bytes(t, t.block_m / t.warps_m, t.block_n) : 0;  // exchange of accumulators
    const int reserved = device.cc >= 80 ? 1024 : 0;  // of every resident block, taken by the system
    auto occupancy = [&](int64_t bytes) {
        return static_cast<int>(std::min<int64_t>(t.min_blocks, device.shared_per_multiprocessor / (bytes + reserved)));
    };

    if (taps > kMaxTaps) {
        reason = std::string(t.name()) + ": taps of the kernel; got " + std::to_string(taps) + ", expected at most " +
                 std::to_string(kMaxTaps) + "; use direct_gemm or generic";
        return false;
    }

    Box best{};
    double best_cost = 0;
    int64_t smallest = INT64_MAX;
    for (int images = 1; images <= t.block_m; images *= 2) {
        if (images > 1 && images / 2 >= p.n) break;
        for (int h_log2 = 0; images << h_log2 <= t.block_m; ++h_log2) {
            int w_log2 = 0;
            while (images << (h_log2 + w_log2) < t.block_m) ++w_log2;
            const Box box = make_box(p, t, images, h_log2, w_log2);
            const int64_t bytes = std::max(least, box.pixel_bytes() + t.stages * stage_bytes);
            smallest = std::min(smallest, bytes);
            if (bytes > device.shared_per_block || box.plane * kChunks * 16 > INT32_MAX / 2) continue;
            // Multiplications, and about as much again for eight halo positions as for one tap of a pixel; eight pixels
            // of a tile row are read without bank conflicts.
            const double work =
                static_cast<double>(box.tiles) * (t.block_m * taps + (box.plane + box.images * box.raw_h * box.raw_w) * 1.5);
            const double cost = work * (1 + 0.2 * (t.min_blocks - occupancy(bytes))) * (w_log2 < 2 ? 1.2 : 1.0);
            if (best_cost == 0 || cost < best_cost) {
                best_cost = cost;
                best = box;
            }
        }
    }
    if (best_cost == 0) {
        reason = std::string(t.name()) + ": shared memory of a block; got " + std::to_string(device.shared_per_block) +
                 " bytes, expected at least " + std::to_string(smallest) +
                 "; use a tactic with smaller tiles, direct_gemm or generic";
        return false;
    }

    DirectFusedParams &d = plan.params;
    d = DirectFusedParams{};
    Shape2d &s = d.shape;
    s.n = static_cast<int32_t>(p.n);
    s.c = static_cast<int32_t>(p.c);
    s.m = static_cast<int32_t>(p.m);
    s.h = static_cast<int32_t>(p.in[1]);
    s.w = static_cast<int32_t>(p.in[2]);
    s.pooled_h = static_cast<int32_t>(p.pooled[1]);
    s.pooled_w = static_cast<int32_t>(p.pooled[2]);
    s.out_h = static_cast<int32_t>(p.out[1]);
    s.out_w = static_cast<int32_t>(p.out[2]);
    s.kh = p.kernel[1];
    s.kw = p.kernel[2];
    s.stride_h = p.strides[1];
    s.stride_w = p.strides[2];
    s.dilation_h = p.dilations[1];
    s.dilation_w = p.dilations[2];
    s.pad_h = p.pads_begin[1];
    s.pad_w = p.pads_begin[2];
    s.x_channels_last = p.x_channels_last;
    s.y_channels_last = p.y_channels_last;
    d.box = box_of(p);
    d.tile_images = best.images;
    d.tile_h_log2 = best.h_log2;
    d.tile_w_log2 = best.w_log2;
    d.tiles_h = static_cast<int32_t>(ceil_div(p.out[1], 1 << best.h_log2));
    d.tiles_w = static_cast<int32_t>(ceil_div(p.out[2], 1 << best.w_log2));
    d.m_tiles = static_cast<int32_t>(ceil_div(p.m, t.block_n));
    const int64_t tiles = best.tiles * d.m_tiles;
    if (tiles * t.split > INT32_MAX / 2) {
        reason = std::string(t.name()) + ": tiles; got " + std::to_string(tiles) +
                 ", expected less than 2^30; use a tactic with larger tiles or generic";
        return false;
    }
    d.tiles = static_cast<int32_t>(tiles);
    d.slices = slices;
    d.split = t.split;
    d.halo_h = static_cast<int32_t>(best.halo_h);
    d.halo_w = static_cast<int32_t>(best.halo_w);
    d.raw_h = static_cast<int32_t>(best.raw_h);
    d.raw_w = static_cast<int32_t>(best.raw_w);
    d.taps = taps;
    d.box_pairs = p.pool_kernel[1] == 2 && p.pool_kernel[2] == 2 && p.pool_strides[1] == 1 && p.pool_strides[2] == 1 &&
                  p.pool_dilations[1] == 1 && p.pool_dilations[2] == 1;
    d.segment_h = segment_height(best, t.threads());
    d.segments = static_cast<int32_t>(ceil_div(best.halo_h, d.segment_h));
    d.walks = best.images * d.segments * d.halo_w * kChunks;
    d.phase_pitch = static_cast<int32_t>(best.phase_pitch);
    d.plane = static_cast<int32_t>(best.plane);
    d.raw_offset = static_cast<int32_t>(best.mean_bytes());
    d.weight_offset = static_cast<int32_t>(best.pixel_bytes());
    d.div_m_tiles = FastDiv(d.m_tiles);
    d.div_tiles_w = FastDiv(d.tiles_w);
    d.div_tiles_h = FastDiv(d.tiles_h);
    d.div_raw_h = FastDiv(d.raw_h);
    d.div_halo_w = FastDiv(d.halo_w);
    d.div_stride_w = FastDiv(s.stride_w);
    d.div_segments = FastDiv(d.segments);
    for (int tap = 0; tap < taps; ++tap) {
        const int a = tap / s.kw * s.dilation_h, b = tap % s.kw * s.dilation_w;
        d.tap_offsets[tap] = ((a * s.stride_w + b % s.stride_w) * d.phase_pitch + b / s.stride_w) * 16;
    }

    // Weights that all fit, at no cost in resident blocks, are copied once: no copies and barriers between taps.
    const int64_t pipelined = std::max(least, best.pixel_bytes() + int64_t{t.stages} * stage_bytes);
    const int64_t all_stages = ceil_div(slices, t.split) * taps;
    const int64_t kept = std::max(least, best.pixel_bytes() + all_stages * stage_bytes);
    const bool one_tile_each = tiles * t.split <= int64_t{device.multiprocessors} * occupancy(kept);
    d.resident = kept <= device.shared_per_block && (d.m_tiles == 1 || one_tile_each) &&
                 (occupancy(kept) == occupancy(pipelined) || (t.split == 1 && one_tile_each));
    d.weight_stages = static_cast<int32_t>(d.resident ? all_stages : t.stages);
    const int64_t bytes = d.resident ? kept : pipelined;
    plan.shared_bytes = static_cast<int>(bytes);
    plan.blocks_per_multiprocessor = occupancy(bytes);
    const int64_t slots = int64_t{device.multiprocessors} * plan.blocks_per_multiprocessor;
    plan.grid = static_cast<int>(t.split > 1 ? tiles * t.split : std::min(tiles, slots));
    return true;
}

}  // namespace convpool

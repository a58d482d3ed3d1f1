// SPDX-License-Identifier: Apache-2.0
#include "core/cost.h"

#include <algorithm>

#include "core/plan.h"

namespace convpool {
namespace {

constexpr double kStoreRoundUs = 0.03;  // of 32 lanes that take sums from shared memory and store them

}  // namespace

double x_bytes(const Problem &p) { return double(p.n) * p.c * p.in_pixels() * p.x_element_bytes(); }
double y_bytes(const Problem &p) { return double(p.n) * p.m * p.out_pixels() * p.y_element_bytes(); }

double split_us(int split, double tile_share) {
    if (split == 1) return 0;
    return (split == 2 ? 1.65 : split == 3 ? 1.3 : split == 4 ? 1.1 : 1.5) * (0.7 + 0.6 * tile_share);
}

double pushed_split_us(int split, double tile_share) {
    const double least = split == 2 ? 0.8 : split == 3 ? 0.7 : split == 4 ? 0.3 : split == 6 ? 0.5 : 0.4;
    return split == 1 ? 0 : least + 4.5 * (tile_share - 0.125);
}

double channels_first_ends_us(const Problem &p, double elements, bool runs) {
    if (p.y_channels_last) return 0;
    const double rounds = elements / (runs ? kRunPixels : 1) - elements / p.per_chunk();
    return rounds * (kStoreRoundUs + (p.has_residual ? kMemoryLatencyUs : 0));
}

double usable_multiprocessors(int split, const Device &device) {
    // Clusters leave multiprocessors over in a GPC whose number is no multiple of theirs.
    return device.multiprocessors * (split == 1   ? 1.0
                                     : split == 2 ? 0.98
                                     : split == 3 ? 0.97
                                     : split == 4 ? 0.92
                                     : split == 6 ? 0.91
                                                  : 0.85);
}

double rounds_us(const Rounds &r, const Block &block, const Device &device) {
    const int64_t blocks = r.tiles * r.split;
    const double usable = usable_multiprocessors(r.split, device);
    const int64_t slots = std::max<int64_t>(r.split, int64_t(usable * r.blocks_a_multiprocessor) / r.split * r.split);
    const double place_us = r.split >= 4 ? 0.003 : 0;  // clusters start one after the other
    auto round = [&](int64_t held, int64_t running) {
        return block.steps * std::max(block.step.latency_us, block.step.issue_us * held) + block.ends_us + r.split_us +
               place_us * running;
    };
    const int64_t last = blocks % slots;
    double us = double(blocks / slots) * round(r.blocks_a_multiprocessor, slots);
    if (last != 0) {
        const int together = r.crowded && blocks < slots ? r.blocks_a_multiprocessor : 1;
        const int64_t held = ceil_div(last, std::max<int64_t>(1, int64_t(usable / together)));
        us += round(std::min<int64_t>(r.blocks_a_multiprocessor, held), last);
    }
    return us;
}

}  // namespace convpool

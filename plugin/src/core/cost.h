// SPDX-License-Identifier: Apache-2.0
// Expected times: what the families' models have in common. Times are in microseconds.
//
// Every family has a model with few constants, fitted to the times of nearly all tactics on an H200 in the suites suita-table2,
// tokura, densenet, batch1 and networks of benchmarks/layers (float16, TF32 and full fp32, with and without a prologue). It ranks
// tactics. Constants of a tile stand in the family's rows.h, the others in its family.cpp.
//
// Blocks run in rounds of as many as fit. A round takes steps * max(latency, issue * blocks a multiprocessor holds), and a while
// for the tile's start and end. Box means and other passes over memory are added at the speed of memory.
//
// The other costs of channels first are estimated from the kernels' instruction counts, except the pass that transposes: it is
// fitted to TF32 and full fp32 (`python -m benchmarks layers --layout nchw` measures it).
#pragma once

#include <cstdint>

#include "core/problem.h"
#include "core/rows.h"
#include "core/tactic.h"

namespace convpool {

constexpr double kBytesPerUs = 3.75e6;
constexpr double kMemoryLatencyUs = 0.6;  // of a load that a warp waits for

double x_bytes(const Problem &problem);
double y_bytes(const Problem &problem);

// The time of a cluster of `split` blocks to add up its sums, which they load from each other.
double split_us(int split, double tile_share);
// The same where they push them to each other.
double pushed_split_us(int split, double tile_share);

// Y channels first: the rounds of stores of a tile that channels last, which stores a chunk a lane, does not have. runs: four
// pixels are stored together.
double channels_first_ends_us(const Problem &problem, double elements_of_a_lane, bool runs);

// One block's work.
struct Block {
    int64_t steps;
    Step step;
    double ends_us;  // besides the steps
};

// How many multiprocessors clusters of `split` blocks fill.
double usable_multiprocessors(int split, const Device &device);

struct Rounds {
    int64_t tiles;
    int split;
    double split_us;  // to add up the sums of a cluster
    int blocks_a_multiprocessor;
    bool crowded =
        false;  // the kernel before still holds the multiprocessors: blocks of the first round fill one after the other
};

double rounds_us(const Rounds &rounds, const Block &block, const Device &device);

}  // namespace convpool

// SPDX-License-Identifier: Apache-2.0
// The transformed weights of one layer in one execution context, kept from run to run.
//
// A plugin cannot see whether W is a constant of the engine: a tensor computed anew, or a constant that is refitted, may
// come by the same address with other values.  So nothing is kept unless the node says constant_weights = 1.  Then:
//
//   first run outside a graph          transforms W into memory of this object, and runs on it
//   later runs, problem and W equal    run on what is there
//   first run inside a graph capture   transforms W into TensorRT's workspace, as part of the graph
//   another problem or W               as the first run; inside TensorRT's workspace once a graph runs on what is here,
//                                      since that graph may be launched again
//
// One object belongs to one execution context, whose runs TensorRT wants in order; clones start with nothing.
#pragma once

#include <convpool.h>

#include <cstddef>
#include <cstdint>

namespace convpool::tensorrt {

class WeightCache {
public:
    WeightCache() = default;
    ~WeightCache() { release(); }
    WeightCache(const WeightCache &) = delete;
    WeightCache &operator=(const WeightCache &) = delete;

    // Takes so much memory, unless it has enough or may not let go of what it has.  Without memory nothing is kept, and
    // nothing else changes.
    void reserve(size_t bytes);
    void release();

    // Points the tensors' prepared weights here if this launch, which transforms W to `wanted` bytes, can run on kept weights
    // or make them; false: it stays as it is.
    bool place(const convpool_problem &problem, int32_t tactic, size_t wanted, void *stream, convpool_tensors &tensors);
    // Whether the launch that `place` said true for was queued.
    void launched(bool queued) { prepared_ = queued; }

    size_t bytes() const { return bytes_; }

private:
    void *memory_ = nullptr;
    size_t bytes_ = 0;
    bool prepared_ = false;
    bool in_graph_ = false;  // a captured graph reads the memory: it stays as it is
    convpool_problem problem_{};
    int32_t tactic_ = 0;
    const void *w_ = nullptr;
};

}  // namespace convpool::tensorrt

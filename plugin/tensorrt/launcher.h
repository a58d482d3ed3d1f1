// SPDX-License-Identifier: Apache-2.0
// Runs the tactics of one plugin: which device, which tactic, how much workspace, and the launch itself.
#pragma once

#include <cstddef>
#include <utility>

#include "plugin_core.h"

namespace convpool::tensorrt {

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
    bool lend(const convpool_problem &problem, int32_t tactic, size_t wanted, void *stream, convpool_tensors &pointers);
    // Takes whether the launch that `lend` said true for was queued.
    void launched(bool queued) { prepared_ = queued; }

private:
    void *memory_ = nullptr;
    size_t bytes_ = 0;
    bool prepared_ = false;
    bool in_graph_ = false;  // a captured graph reads the memory: it stays as it is
    convpool_problem problem_{};
    int32_t tactic_ = 0;
    const void *w_ = nullptr;
};

// Compute capability, multiprocessors and shared memory of a device: what the C API's cost rule looks at.
struct DeviceSize {
    int32_t cc, multiprocessors, shared_bytes;
};
// The current device; throws without one.
DeviceSize device_size();

// Bytes that `tactic` needs; 0 stands for the default one of `device`.
size_t workspace_bytes(const convpool_problem &problem, int32_t tactic, const DeviceSize &device);
// That of generic, which takes least: 0 where nothing is normalized.
size_t least_workspace_bytes(const convpool_problem &problem);
// True where this library has a tactic of this id.
bool has_tactic(int32_t id);
bool can_run(const convpool_problem &problem, int32_t tactic, const DeviceSize &device);
// Ids of the tactics that can run every one of the problems on the device.
std::vector<int32_t> tactics_for(const std::vector<convpool_problem> &problems, const DeviceSize &device);
// The most bytes that any of them needs for `problem`.
size_t most_workspace_bytes(const convpool_problem &problem, const DeviceSize &device);

// The arguments of convpool_plan_create: a tactic, 0 for the best, within the bytes of workspace that TensorRT gives.
struct Request {
    int32_t tactic = 0;
    size_t workspace_bytes = 0;
};

// The needs of enqueue for the tensors of one shape, but pointers.
struct Run {
    Tensors tensors;
    convpool_problem problem{};
    Request request;
    PlanHandle plan;  // null for an empty batch
    int32_t tactic = 0;
    size_t prepared_bytes = 0;  // of transformed weights
    PlanHandle fallback;        // for pointers or a workspace that the plan cannot run on
};

// One plugin's launches.  Belongs to one execution context (or to the builder), whose calls come in order.
class Launcher {
public:
    explicit Launcher(std::string layer) : layer_(std::move(layer)) {}
    Launcher(const Launcher &) = delete;

    // The run kept for these tensors, or null.
    Run *find(const Tensors &tensors);
    // Plans a run and keeps it.  Its kernels are loaded, so that the first launch may lie in a graph capture.  Takes memory
    // for weights that are the same in every run.  A tactic that cannot run this very problem gives way to the default one.
    Run &plan_run(const Tensors &tensors, const convpool_problem &problem, const Request &request, bool constant_weights);
    // For adapter_v2: loads the kernels of what `plan_run` would plan, and takes memory for weights; the plan itself goes.
    void load(const convpool_problem &problem, const Request &request, bool constant_weights);
    void forget() { runs_.clear(); }

    // Launches, on cached weights where there are any.  Where the tactic cannot run on these very pointers, or has not the
    // workspace, the default tactic runs in its place.
    void launch(Run &run, const void *const *inputs, void *output, void *workspace, void *stream);

    WeightCache &cache() { return cache_; }
    const std::string &layer() const { return layer_; }

private:
    convpool_status launch_fallback(Run &run, const convpool_tensors &pointers, void *stream);
    // Once for a shape.
    void tell_fallback(const Tensors &tensors, int32_t tactic, const std::string &reason, const convpool_plan &instead);

    std::string layer_;  // its name in the network
    WeightCache cache_;
    std::vector<std::unique_ptr<Run>> runs_;  // the latest last
    std::vector<Tensors> told_;
};

}  // namespace convpool::tensorrt

// SPDX-License-Identifier: Apache-2.0
// Runs the tactics of one plugin: which device, which tactic, how much workspace, and the launch itself.
#pragma once

#include "plugin_core.h"
#include "weight_cache.h"

#include <convpool.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace convpool::tensorrt {

// Compute capability, multiprocessors and shared memory of a device: what the C API's cost rule looks at.
struct Device {
    int32_t cc, multiprocessors, shared_bytes;
};
// The current device; throws without one.
Device current_device();

// Bytes that `tactic` needs; 0 stands for the default one of `device`.
size_t workspace_bytes(const convpool_problem &problem, int32_t tactic, const Device &device);
// Whether this library has a tactic of this id.
bool has_tactic(int32_t id);
bool runs(const convpool_problem &problem, int32_t tactic, const Device &device);
// Ids of the tactics that can run every one of the problems on the device.
std::vector<int32_t> tactics_for(const std::vector<convpool_problem> &problems, const Device &device);
// The most bytes that any of them needs for `problem`.
size_t most_workspace_bytes(const convpool_problem &problem, const Device &device);

struct DestroyPlan {
    void operator()(convpool_plan *plan) const { convpool_plan_destroy(plan); }
};
using Plan = std::unique_ptr<convpool_plan, DestroyPlan>;

// A tactic asked for, and the bytes of workspace that TensorRT gives it.  Tactic 0: the best within them.
struct Request {
    int32_t tactic = 0;
    size_t workspace = 0;
};

// What enqueue needs for the tensors of one shape, but pointers.
struct Run {
    Tensors tensors;
    convpool_problem problem{};
    Request request;
    Plan plan;  // null for an empty batch
    int32_t tactic = 0;
    size_t prepared_bytes = 0;  // of transformed weights
    Plan fallback;              // for pointers or a workspace that the plan cannot run on
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
    Run &keep(const Tensors &tensors, const convpool_problem &problem, const Request &request, bool constant_weights);
    // As much of it as can be done before the tensors are known.
    void load(const convpool_problem &problem, const Request &request, bool constant_weights);
    void forget() { runs_.clear(); }

    // Launches, on cached weights where there are any.  Where the tactic cannot run on these very pointers, or has not the
    // workspace, the default tactic runs in its place.
    void launch(Run &run, const void *const *inputs, void *output, void *workspace, void *stream);

    WeightCache &cache() { return cache_; }
    const std::string &layer() const { return layer_; }

private:
    convpool_status launch_fallback(Run &run, const convpool_tensors &tensors, void *stream);
    // Once for a shape.
    void tell_fallback(const Tensors &tensors, int32_t tactic, const std::string &reason, const convpool_plan &instead);

    std::string layer_;  // its name in the network
    WeightCache cache_;
    std::vector<std::unique_ptr<Run>> runs_;  // the latest last
    std::vector<Tensors> told_;
};

}  // namespace convpool::tensorrt

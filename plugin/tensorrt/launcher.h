// Runs the tactics of one plugin: which device, which tactic, how much workspace, and the launch itself.
#pragma once

#include "plugin_core.h"
#include "weight_cache.h"

#include <convpool.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace convpool::tensorrt {

// Compute capability, multiprocessors and shared memory of a device: what the C API's cost rule looks at.
struct Device {
    int32_t cc, multiprocessors, shared_bytes;
};
// The current device; throws without one.
Device current_device();

// What the cost rule picks within `workspace_size` bytes.
int32_t default_tactic(const convpool_problem &problem, size_t workspace_size, const Device &device);
// Bytes that `tactic` needs; 0 stands for the default one of `device`.
size_t workspace_bytes(const convpool_problem &problem, int32_t tactic, const Device &device);
// Whether this library has a tactic of this id.
bool has_tactic(int32_t id);
// Ids of the tactics that can run every one of the problems on the device.
std::vector<int32_t> tactics_for(const std::vector<convpool_problem> &problems, const Device &device);
// The most bytes that any of them needs for `problem`.
size_t most_workspace_bytes(const convpool_problem &problem, const Device &device);

// What enqueue needs for the tensors of one shape, but pointers.
struct Run {
    Tensors tensors;
    convpool_problem problem{};
    int32_t tactic = 0;    // 0: the default one within `workspace`
    size_t workspace = 0;  // bytes that TensorRT gives
};

// One plugin's launches.  Belongs to one execution context (or to the builder), whose calls come in order.
class Launcher {
public:
    explicit Launcher(std::string layer) : layer_(std::move(layer)) {}
    Launcher(const Launcher &) = delete;

    // The run kept for these tensors, or null.
    const Run *find(const Tensors &tensors) const;
    // Loads the tactic's kernels, so that the first launch may lie in a graph capture, and takes memory for weights that
    // are the same in every run.
    void load(const convpool_problem &problem, int32_t tactic, bool constant_weights);
    // Loads, and keeps the run.
    const Run &keep(const Run &run, bool constant_weights);
    void forget() { runs_.clear(); }

    // Launches on cached weights where there are any.  Where the tactic cannot run these very tensors, or has not the
    // workspace, falls back to the default tactic within the run's workspace, and says so once for each problem.
    void launch(const Run &run, const void *const *inputs, void *output, void *workspace, void *stream);

    WeightCache &cache() { return cache_; }
    const std::string &layer() const { return layer_; }

private:
    void tell_fallback(const Run &run, const std::string &reason);

    std::string layer_;  // its name in the network
    WeightCache cache_;
    std::vector<Run> runs_;  // the latest last
    std::vector<convpool_problem> told_;
};

}  // namespace convpool::tensorrt

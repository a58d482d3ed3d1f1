// SPDX-License-Identifier: Apache-2.0
// A plan: a problem worked out for one tactic on one device, with everything that a launch needs but pointers; the choice of one.
#pragma once

#include <array>
#include <cstring>

#include "core/tactic.h"

namespace convpool {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline bool aligned(const void *pointer, size_t bytes) { return reinterpret_cast<uintptr_t>(pointer) % bytes == 0; }

// The tensors of a launch, as bits of a set.
enum TensorSet : uint32_t { kX = 1, kW = 2, kB = 4, kResidual = 8, kY = 16, kScale = 32, kShift = 64, kWScale = 128 };
constexpr TensorSet kNoTensors{0}, kAllTensors{255};

// The demands of a launch on one pointer of convpool_tensors.
struct PointerRule {
    const char *name;
    TensorSet tensor;
    size_t offset;  // of the pointer in convpool_tensors
    bool read;      // false: the problem has no such tensor, and the pointer is ignored
    int32_t element_bytes;

    const void *pointer(const convpool_tensors &tensors) const;
};
constexpr int kPointers = 8;
std::array<PointerRule, kPointers> pointer_rules(const Problem &problem);

// The tensors whose pointers are multiples of 16; those that the problem does not have count as such.
uint32_t vector_aligned(const Problem &problem, const convpool_tensors &tensors);

// Device memory that a launch is given: transformed weights first, then transformed X, then what normalizes it: multiples of 256.
struct Workspace {
    size_t weights_bytes = 0, x_bytes = 0, statistics_bytes = 0;

    size_t without_weights() const { return x_bytes + statistics_bytes; }
    size_t total() const { return weights_bytes + without_weights(); }
};

class Plan {
public:
    Plan(const Problem &problem, const Tactic &tactic, const Device &device);
    virtual ~Plan() = default;
    Plan(const Plan &) = delete;

    // Expected time in microseconds, for the choice between tactics.
    virtual double expected_us() const = 0;
    // Loads the kernels into the current context, and lets the main one use the device's shared memory.
    virtual cudaError_t load() const = 0;
    // Queues the kernels. Nothing is checked here: the pointers have been. Several threads may do it at once.
    virtual cudaError_t launch(const convpool_tensors &tensors, cudaStream_t stream) const = 0;

    const Problem problem;
    const Tactic &tactic;
    const Device device;
    Workspace workspace;
    uint32_t vector_tensors = kNoTensors;  // the tensors whose pointers must be multiples of 16
    const std::array<PointerRule, kPointers> pointers;
};

// With CONVPOOL_LOG=1 in the environment: one line on stderr for a problem and its tactic, the first time.
void log_plan(const Plan &plan, int32_t chosen_by);

// An NVTX range around a launch. Without a profiler it costs a comparison; without NVTX's header at build time, nothing.
class ProfilerRange {
public:
    explicit ProfilerRange(const char *name);
    ~ProfilerRange();
    ProfilerRange(const ProfilerRange &) = delete;
};

struct Choice {
    std::unique_ptr<Plan> plan;
    bool measured;  // else by the cost rule
};

// The fastest tactic that needs at most `max_workspace_bytes` and takes pointers of which only those of `aligned_tensors` are
// multiples of 16. Generic runs every problem, so no plan, with a reason, means that no tactic runs on such a device,
// or that there is less memory than what normalizes X takes.
Choice choose(const Problem &problem, const Device &device, size_t max_workspace_bytes, uint32_t aligned_tensors,
              std::string &reason);

// The tactic measured fastest for exactly this problem on such a device, else for the same without its residual, by the rows of
// tuned.def and of the file that CONVPOOL_TUNED names; 0 if there is none.
int32_t tuned_tactic(const Problem &problem, const Device &device);

// Why the file that CONVPOOL_TUNED names, or a row of it, is not used; empty if it is, or if there is none.
const std::string &tuned_error();

}  // namespace convpool

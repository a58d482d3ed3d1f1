// A plan: a problem worked out for one tactic on one device, with everything that a launch needs but pointers.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "convpool.h"
#include "tactics.h"

namespace convpool {

inline bool aligned(const void *pointer, size_t bytes) { return reinterpret_cast<uintptr_t>(pointer) % bytes == 0; }

// The tensors of a launch, as bits of a set.
enum TensorSet : uint32_t {
    kX = 1,
    kW = 2,
    kB = 4,
    kResidual = 8,
    kY = 16,
    kScale = 32,
    kShift = 64,
    kWScale = 128,
    kNoTensors = 0,
    kAllTensors = 255
};

// What a launch demands of one pointer of convpool_tensors.
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

class Plan {
public:
    Plan(const Problem &problem, const Tactic &tactic, const Device &device);
    virtual ~Plan() = default;
    Plan(const Plan &) = delete;

    // Loads the kernels into the current context, and lets the main one use the device's shared memory.
    virtual cudaError_t load() const = 0;
    // Queues the kernels. Nothing is checked here: the pointers have been.
    virtual cudaError_t launch(const convpool_tensors &tensors, cudaStream_t stream) const = 0;

    const Problem problem;
    const Tactic &tactic;
    const Device device;
    WorkspaceLayout workspace{};
    uint32_t vectors = kNoTensors;  // the tensors whose pointers must be multiples of 16
    double expected_us = 0;
    std::array<PointerRule, kPointers> pointers;
};

// Null, with a reason, if the tactic does not run the problem on such a device.
std::unique_ptr<Plan> make_plan(const Problem &problem, const Tactic &tactic, const Device &device, std::string &reason);

}  // namespace convpool

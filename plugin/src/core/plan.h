// SPDX-License-Identifier: Apache-2.0
// A plan: a problem worked out for one tactic on one device, with everything that a launch needs but pointers.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <cstddef>
#include <cstdint>

#include "convpool.h"
#include "core/tactic.h"

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

// Device memory that a launch is given: transformed weights first, then transformed X, both multiples of 256.
struct Workspace {
    size_t weights_bytes = 0, x_bytes = 0;

    size_t total() const { return weights_bytes + x_bytes; }
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
    uint32_t vectors = kNoTensors;  // the tensors whose pointers must be multiples of 16
    const std::array<PointerRule, kPointers> pointers;
};

}  // namespace convpool

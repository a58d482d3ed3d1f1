// Launches of a tactic. Nothing here checks: reject_reason, the workspace and the pointers' alignment have been.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "convpool.h"
#include "tactics.h"

namespace convpool {

inline bool aligned(const void *pointer, size_t bytes) { return reinterpret_cast<uintptr_t>(pointer) % bytes == 0; }

// Loads what the tactic launches for the problem, and lets its main kernel use the device's shared memory; does nothing
// when called again in a context.
cudaError_t load_kernels(const Problem &problem, const Tactic &tactic, const Device &device);

cudaError_t run_tactic(const Problem &problem, const Tactic &tactic, const Device &device, const convpool_tensors &tensors,
                       cudaStream_t stream);

}  // namespace convpool

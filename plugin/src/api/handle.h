// SPDX-License-Identifier: Apache-2.0
// convpool_plan, and the plans that the stateless launch keeps.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "convpool.h"
#include "core/plan.h"

// A plan on the device that was current when it was made. It does not change but for the context, so threads share it.
struct convpool_plan {
    std::unique_ptr<convpool::Plan> work;
    int32_t chosen_by;
    int ordinal;                    // of the device
    std::atomic<uint64_t> context;  // the last one that the kernels were loaded into; 0: unknown
};

namespace convpool {

struct PlanRequest {
    int32_t tactic;              // 0: choose
    size_t max_workspace_bytes;  // of the plan's workspace
    uint32_t vector_tensors;     // the tensors whose pointers are multiples of 16
};

// A plan for the current device, its kernels loaded.
convpool_status create_plan(const Problem &problem, const PlanRequest &request, std::unique_ptr<convpool_plan> &plan);
// The same from a small cache, for a description that check_problem has taken as `problem`.
convpool_status cached_plan(const convpool_problem &description, const Problem &problem, const PlanRequest &request,
                            std::shared_ptr<convpool_plan> &plan);

convpool_status check_tensors(const std::array<PointerRule, kPointers> &pointers, const convpool_tensors *tensors);
// Checks what depends on the plan and queues its kernels; the tensors have passed check_tensors.
convpool_status launch_plan(convpool_plan &plan, const convpool_tensors &tensors, cudaStream_t stream);

}  // namespace convpool

// SPDX-License-Identifier: Apache-2.0
// What the C API functions share: failures, a status and a message that the thread keeps (api.cpp); plans (plan_api.cpp).
#pragma once

#include <exception>
#include <initializer_list>

#include "core/launch.h"

namespace convpool {

// The text that convpool_last_error returns.
std::string &last_error();

convpool_status fail(convpool_status status, const std::string &message);  // worded by mismatch() or refusal()
inline convpool_status invalid(const std::string &what, int64_t got, const std::string &expected) {
    return fail(CONVPOOL_INVALID_ARGUMENT, mismatch(what, got, expected));
}
convpool_status read_tactic(int32_t id, const Tactic *&tactic);
convpool_status read_problem(const convpool_problem *description, Problem &problem);
// The current device.
convpool_status read_device(Device &device);
struct PointerArgument {
    const char *name;
    const void *pointer;
    size_t alignment;
    const char *multiple = nullptr;  // of what it is; null: of so many bytes
};
// Whether none is null, and all are aligned.
convpool_status check_pointers(std::initializer_list<PointerArgument> pointers);
convpool_status cuda_status(const char *what, cudaError_t error);

// Every entry point that does more than return a constant runs in here: nothing throws out of the library.
template <class Body> convpool_status guarded(Body body) noexcept {
    try {
        last_error().clear();
        return body();
    } catch (const std::exception &e) {
        try {
            return fail(CONVPOOL_INVALID_ARGUMENT, std::string("internal error: ") + e.what());
        } catch (...) {
            return CONVPOOL_INVALID_ARGUMENT;
        }
    } catch (...) {
        return CONVPOOL_INVALID_ARGUMENT;
    }
}

}  // namespace convpool

// A plan on the device that was current when it was made. It does not change but for the context, so threads share it.
struct convpool_plan {
    std::unique_ptr<convpool::Plan> work;  // what a launch queues
    int32_t chosen_by;
    int ordinal;                    // of the device
    std::atomic<uint64_t> context;  // the last one that the kernels were loaded into; 0: unknown
};

namespace convpool {

struct PlanRequest {
    int32_t tactic;              // 0: choose
    size_t max_workspace_bytes;  // of the plan's workspace
    uint32_t aligned_tensors;    // the tensors whose pointers are multiples of 16
};

// A plan for the current device, its kernels loaded.
convpool_status create_plan(const Problem &problem, const PlanRequest &request, std::unique_ptr<convpool_plan> &plan);

convpool_status check_tensors(const std::array<PointerRule, kPointers> &pointers, const convpool_tensors *tensors);
// Checks what depends on the plan and queues its kernels; the tensors have passed check_tensors.
convpool_status launch_plan(convpool_plan &plan, const convpool_tensors &tensors, cudaStream_t stream);

}  // namespace convpool

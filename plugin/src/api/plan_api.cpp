// SPDX-License-Identifier: Apache-2.0
// The C API of plans.
#include <utility>

#include "api/common.h"
#include "kernels/passes.h"

namespace convpool {

namespace {

convpool_status too_small(const Tactic &tactic, const char *what, size_t got, size_t expected) {
    return fail(CONVPOOL_WORKSPACE_TOO_SMALL,
                tactic.name + ": " + what + "; got " + std::to_string(got) + " bytes, expected " + std::to_string(expected));
}

convpool_status misaligned(const Tactic &tactic, const char *what, const std::string &got) {
    return fail(CONVPOOL_MISALIGNED,
                tactic.name + ": address of " + what + "; got " + got + ", expected a multiple of 16; use generic or tactic 0");
}

cudaError_t load_kernels(const Plan &plan) {  // and those that normalize X by its statistics
    const cudaError_t error = plan.workspace.statistics_bytes > 0 ? statistics::load(plan.problem) : cudaSuccess;
    return error == cudaSuccess ? plan.load() : error;
}

convpool_status plan_tactic(const Problem &problem, const Device &device, const PlanRequest &request,
                            std::unique_ptr<Plan> &work) {
    const Tactic *tactic = nullptr;
    if (const convpool_status status = read_tactic(request.tactic, tactic); status != CONVPOOL_OK) return status;
    std::string reason;
    work = make_plan(problem, *tactic, device, reason);
    if (work == nullptr) return fail(CONVPOOL_UNSUPPORTED, reason);
    if (work->workspace.total() > request.max_workspace_bytes)
        return too_small(*tactic, "workspace", request.max_workspace_bytes, work->workspace.total());
    for (const PointerRule &rule : work->pointers)
        if ((work->vector_tensors & rule.tensor & ~request.aligned_tensors) != 0)
            return misaligned(*tactic, rule.name, "one that may be unaligned");
    return CONVPOOL_OK;
}

}  // namespace

convpool_status create_plan(const Problem &problem, const PlanRequest &request, std::unique_ptr<convpool_plan> &result) {
    Device device;
    int ordinal = 0;
    cudaError_t error = cudaGetDevice(&ordinal);
    if (error == cudaSuccess) error = current_device(device);
    if (error != cudaSuccess) return cuda_status("no current CUDA device", error);
    auto plan = std::make_unique<convpool_plan>();
    plan->ordinal = ordinal;
    plan->chosen_by = CONVPOOL_CHOSEN_BY_NAME;
    if (request.tactic != 0) {
        if (convpool_status status = plan_tactic(problem, device, request, plan->work); status != CONVPOOL_OK) return status;
    } else {
        last_error() = tuned_error();  // which stays the last message if all goes well
        std::string reason;
        Choice choice = choose(problem, device, request.max_workspace_bytes, request.aligned_tensors, reason);
        if (choice.plan == nullptr) return fail(CONVPOOL_UNSUPPORTED, reason);
        plan->work = std::move(choice.plan);
        plan->chosen_by = choice.measured ? CONVPOOL_CHOSEN_BY_MEASUREMENT : CONVPOOL_CHOSEN_BY_RULE;
    }
    error = load_kernels(*plan->work);
    if (error != cudaSuccess) return cuda_status(plan->work->tactic.name.c_str(), error);
    plan->context = current_context();
    log_plan(*plan->work, plan->chosen_by);
    result = std::move(plan);
    return CONVPOOL_OK;
}

convpool_status check_tensors(const std::array<PointerRule, kPointers> &pointers, const convpool_tensors *t) {
    if (t == nullptr) return fail(CONVPOOL_INVALID_ARGUMENT, "tensors: the pointer is null");
    if (t->struct_size < sizeof(convpool_tensors) || t->struct_size > CONVPOOL_MAX_STRUCT_SIZE)
        return invalid("tensors: struct_size", t->struct_size,
                       at_least(sizeof(convpool_tensors)) + ", at most " + std::to_string(CONVPOOL_MAX_STRUCT_SIZE));
    const unsigned char *bytes = reinterpret_cast<const unsigned char *>(t);
    for (size_t i = sizeof(convpool_tensors); i < t->struct_size; ++i)
        if (bytes[i] != 0)
            return fail(CONVPOOL_INVALID_ARGUMENT,
                        "tensors: byte " + std::to_string(i) + " is set, of a field that this version does not know; expected 0");
    if ((t->flags & ~CONVPOOL_WEIGHTS_PREPARED) != 0)
        return invalid("tensors: flags", t->flags, "0 or CONVPOOL_WEIGHTS_PREPARED");
    for (const PointerRule &rule : pointers) {
        if (!rule.read) continue;
        const void *value = rule.pointer(*t);
        if (value == nullptr) return fail(CONVPOOL_INVALID_ARGUMENT, std::string("tensors: ") + rule.name + " is null");
        if (!aligned(value, static_cast<size_t>(rule.element_bytes)))
            return fail(CONVPOOL_MISALIGNED, std::string("tensors: ") + rule.name + " is not aligned to its " +
                                                 std::to_string(rule.element_bytes) + "-byte elements");
    }
    return CONVPOOL_OK;
}

namespace {

convpool_status check_memory(const Plan &plan, const convpool_tensors &t) {
    const bool kept = t.prepared != nullptr;
    struct Memory {
        const char *name;
        const void *start;
        size_t bytes, needed;
    };
    for (auto [name, start, bytes, needed] :
         {Memory{"prepared", t.prepared, t.prepared_bytes, kept ? plan.workspace.weights_bytes : 0},
          {"workspace", t.workspace, t.workspace_bytes, kept ? plan.workspace.without_weights() : plan.workspace.total()}}) {
        if (needed == 0) continue;
        if (start == nullptr || bytes < needed) return too_small(plan.tactic, name, start == nullptr ? 0 : bytes, needed);
        if (!aligned(start, 256))
            return fail(CONVPOOL_MISALIGNED, plan.tactic.name + ": " + name + " is not aligned to 256 bytes");
    }
    return CONVPOOL_OK;
}

// The plan's device is current, and its kernels are loaded there: a context of the device's that is new to it loads them.
convpool_status enter_context(convpool_plan &plan) {
    const uint64_t context = current_context();
    if (context != 0 && context == plan.context.load(std::memory_order_acquire)) return CONVPOOL_OK;
    int ordinal = 0;
    cudaError_t error = cudaGetDevice(&ordinal);
    if (error != cudaSuccess) return cuda_status("no current CUDA device", error);
    if (ordinal != plan.ordinal)
        return invalid(plan.work->tactic.name + ": current device", ordinal,
                       "the plan's, " + std::to_string(plan.ordinal) + "; make a plan for each device");
    error = load_kernels(*plan.work);
    if (error != cudaSuccess) return cuda_status(plan.work->tactic.name.c_str(), error);
    plan.context.store(current_context(), std::memory_order_release);
    return CONVPOOL_OK;
}

}  // namespace

convpool_status launch_plan(convpool_plan &plan, const convpool_tensors &t, cudaStream_t stream) {
    const Plan &work = *plan.work;
    if (convpool_status status = check_memory(work, t); status != CONVPOOL_OK) return status;
    for (const PointerRule &rule : work.pointers)
        if ((work.vector_tensors & rule.tensor) != 0 && !aligned(rule.pointer(t), 16))
            return misaligned(work.tactic, rule.name,
                              "one that is " + std::to_string(reinterpret_cast<uintptr_t>(rule.pointer(t)) % 16) + " modulo 16");
    if (convpool_status status = enter_context(plan); status != CONVPOOL_OK) return status;
    const ProfilerRange range(work.tactic.name.c_str());
    convpool_tensors tensors = t;
    cudaError_t error = cudaSuccess;
    if (work.workspace.statistics_bytes > 0) {
        const size_t behind_x = (t.prepared != nullptr ? 0 : work.workspace.weights_bytes) + work.workspace.x_bytes;
        error = statistics::launch(work.problem, tensors, static_cast<char *>(t.workspace) + behind_x, stream);
    }
    if (error == cudaSuccess) error = work.launch(tensors, stream);
    return cuda_status(work.tactic.name.c_str(), error);
}

}  // namespace convpool

using namespace convpool;

extern "C" {

convpool_status convpool_plan_create(const convpool_problem *problem, int32_t tactic, size_t max_workspace_bytes, uint32_t flags,
                                     convpool_plan **out) {
    return guarded([&] {
        if (out == nullptr) return fail(CONVPOOL_INVALID_ARGUMENT, "out: the pointer is null");
        *out = nullptr;
        if ((flags & ~CONVPOOL_PLAN_UNALIGNED) != 0) return invalid("flags", flags, "0 or CONVPOOL_PLAN_UNALIGNED");
        Problem p;
        const uint32_t vectors = (flags & CONVPOOL_PLAN_UNALIGNED) != 0 ? kNoTensors : kAllTensors;
        std::unique_ptr<convpool_plan> plan;
        convpool_status status = read_problem(problem, p);
        if (status == CONVPOOL_OK) status = create_plan(p, {tactic, max_workspace_bytes, vectors}, plan);
        if (status == CONVPOOL_OK) *out = plan.release();
        return status;
    });
}

convpool_status convpool_plan_launch(convpool_plan *plan, const convpool_tensors *tensors, void *stream) {
    return guarded([&] {
        if (plan == nullptr) return fail(CONVPOOL_INVALID_ARGUMENT, "plan: the pointer is null");
        const convpool_status status = check_tensors(plan->work->pointers, tensors);
        return status == CONVPOOL_OK ? launch_plan(*plan, *tensors, static_cast<cudaStream_t>(stream)) : status;
    });
}

convpool_status convpool_plan_info(const convpool_plan *plan, convpool_plan_properties *properties) {
    return guarded([&] {
        if (plan == nullptr) return fail(CONVPOOL_INVALID_ARGUMENT, "plan: the pointer is null");
        if (properties == nullptr) return fail(CONVPOOL_INVALID_ARGUMENT, "properties: the pointer is null");
        const uint32_t size = properties->struct_size;
        if (size != sizeof(convpool_plan_properties))
            return invalid("properties: struct_size", size, std::to_string(sizeof(convpool_plan_properties)));
        const Plan &work = *plan->work;
        convpool_plan_properties &out = *properties;
        out = {};
        out.struct_size = size;
        out.tactic = work.tactic.id;
        out.name = work.tactic.name.c_str();
        out.chosen_by = plan->chosen_by;
        out.device = plan->ordinal;
        out.expected_us = work.expected_us();
        out.workspace_bytes = work.workspace.total();
        out.prepared_bytes = work.workspace.weights_bytes;
        int32_t *const alignments[] = {&out.x_alignment, &out.w_alignment,     &out.b_alignment,     &out.residual_alignment,
                                       &out.y_alignment, &out.scale_alignment, &out.shift_alignment, &out.w_scale_alignment};
        for (int i = 0; i < kPointers; ++i)
            if (work.pointers[i].read)
                *alignments[i] = (work.vector_tensors & work.pointers[i].tensor) != 0 ? 16 : work.pointers[i].element_bytes;
        for (int i = 0; i < work.problem.rank; ++i) out.out_spatial[i] = work.problem.out[kRank - work.problem.rank + i];
        return CONVPOOL_OK;
    });
}

void convpool_plan_destroy(convpool_plan *plan) { delete plan; }

}  // extern "C"

// SPDX-License-Identifier: Apache-2.0
// The C API of plans.
#include <cstdint>
#include <memory>
#include <string>

#include "api/errors.h"
#include "api/handle.h"
#include "convpool.h"

using namespace convpool;

extern "C" {

convpool_status convpool_plan_create(const convpool_problem *problem, int32_t tactic, size_t max_workspace_bytes, uint32_t flags,
                                     convpool_plan **out) {
    return guarded([&] {
        if (out == nullptr) return fail(CONVPOOL_INVALID_ARGUMENT, "out: the pointer is null");
        *out = nullptr;
        if ((flags & ~CONVPOOL_PLAN_UNALIGNED) != 0)
            return fail(CONVPOOL_INVALID_ARGUMENT,
                        "flags; got " + std::to_string(flags) + ", expected 0 or CONVPOOL_PLAN_UNALIGNED");
        Problem p;
        std::string error;
        if (!check_problem(problem, p, error)) return fail(CONVPOOL_INVALID_ARGUMENT, error);
        const uint32_t vectors = (flags & CONVPOOL_PLAN_UNALIGNED) != 0 ? kNoTensors : kAllTensors;
        std::unique_ptr<convpool_plan> plan;
        const convpool_status status = create_plan(p, {tactic, max_workspace_bytes, vectors}, plan);
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
            return fail(CONVPOOL_INVALID_ARGUMENT, "properties: struct_size; got " + std::to_string(size) + ", expected " +
                                                       std::to_string(sizeof(convpool_plan_properties)));
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
                *alignments[i] = (work.vectors & work.pointers[i].tensor) != 0 ? 16 : work.pointers[i].element_bytes;
        for (int i = 0; i < work.problem.rank; ++i) out.out_spatial[i] = work.problem.out[kRank - work.problem.rank + i];
        return CONVPOOL_OK;
    });
}

void convpool_plan_destroy(convpool_plan *plan) { delete plan; }

}  // extern "C"

// SPDX-License-Identifier: Apache-2.0
#include "core/plan.h"

#include <cstring>

namespace convpool {

const void *PointerRule::pointer(const convpool_tensors &tensors) const {
    const void *value = nullptr;
    std::memcpy(&value, reinterpret_cast<const char *>(&tensors) + offset, sizeof value);
    return value;
}

std::array<PointerRule, kPointers> pointer_rules(const Problem &p) {
    const int bytes = p.element_bytes(), y_bytes = p.y_element_bytes();
    return {{{"x", kX, offsetof(convpool_tensors, x), true, p.x_element_bytes()},
             {"w", kW, offsetof(convpool_tensors, w), true, bytes},
             {"b", kB, offsetof(convpool_tensors, b), p.has_bias, y_bytes},
             {"residual", kResidual, offsetof(convpool_tensors, residual), p.has_residual, y_bytes},
             {"y", kY, offsetof(convpool_tensors, y), true, y_bytes},
             {"scale", kScale, offsetof(convpool_tensors, scale), p.prologue_affine, bytes},
             {"shift", kShift, offsetof(convpool_tensors, shift), p.prologue_affine, bytes},
             {"w_scale", kWScale, offsetof(convpool_tensors, w_scale), p.has_w_scale, 4}}};
}

uint32_t vector_aligned(const Problem &problem, const convpool_tensors &tensors) {
    uint32_t set = kNoTensors;
    for (const PointerRule &rule : pointer_rules(problem))
        if (!rule.read || aligned(rule.pointer(tensors), 16)) set |= rule.tensor;
    return set;
}

Plan::Plan(const Problem &p, const Tactic &t, const Device &d) : problem(p), tactic(t), device(d), pointers(pointer_rules(p)) {}

}  // namespace convpool

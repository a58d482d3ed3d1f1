// SPDX-License-Identifier: Apache-2.0
// The choice between tactics: by measurement, else by the cost rule.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "core/plan.h"

namespace convpool {

struct Choice {
    std::unique_ptr<Plan> plan;
    bool measured;  // else by the cost rule
};

// The fastest tactic that needs at most `max_workspace_bytes` and takes pointers of which only those of `vector_tensors` are
// multiples of 16. Generic runs every problem, so no plan, with a reason, means that no tactic runs on such a device.
Choice choose(const Problem &problem, const Device &device, size_t max_workspace_bytes, uint32_t vector_tensors,
              std::string &reason);

}  // namespace convpool

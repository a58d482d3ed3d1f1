// SPDX-License-Identifier: Apache-2.0
#include "core/choose.h"

#include <string>
#include <utility>

#include "core/tuned.h"

namespace convpool {

Choice choose(const Problem &problem, const Device &device, size_t max_workspace_bytes, uint32_t vector_tensors,
              std::string &reason) {
    auto usable = [&](const Tactic &tactic) {
        std::unique_ptr<Plan> plan = make_plan(problem, tactic, device, reason);
        const bool fits =
            plan != nullptr && plan->workspace.total() <= max_workspace_bytes && (plan->vectors & ~vector_tensors) == 0;
        return fits ? std::move(plan) : nullptr;
    };
    if (const Tactic *tuned = find_tactic(tuned_tactic(problem, device)); tuned != nullptr)
        if (auto plan = usable(*tuned)) return {std::move(plan), true};
    std::unique_ptr<Plan> best;
    double best_us = 0;
    std::string refused;  // why the first tactic, generic, does not run
    for (const Tactic &tactic : tactics()) {
        auto plan = usable(tactic);
        if (&tactic == &tactics().front()) refused = reason;
        if (plan == nullptr) continue;
        const double us = plan->expected_us();
        if (best != nullptr && us >= best_us) continue;
        best = std::move(plan);
        best_us = us;
    }
    reason = refused;
    return {std::move(best), false};
}

}  // namespace convpool

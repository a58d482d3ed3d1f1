#include "choose.h"

#include <string>
#include <utility>

#include "tuned.h"

namespace convpool {

Choice choose(const Problem &problem, const Device &device, size_t max_workspace_bytes, uint32_t vector_tensors,
              std::string &reason) {
    auto usable = [&](const Tactic &tactic) {
        std::unique_ptr<Plan> plan = make_plan(problem, tactic, device, reason);
        const bool fits =
            plan != nullptr && plan->workspace.total <= max_workspace_bytes && (plan->vectors & ~vector_tensors) == 0;
        return fits ? std::move(plan) : nullptr;
    };
    if (const Tactic *tuned = find_tactic(tuned_tactic(problem, device)); tuned != nullptr)
        if (auto plan = usable(*tuned)) return {std::move(plan), true};
    std::unique_ptr<Plan> best;
    std::string refused;  // why the first tactic, generic, does not run
    for (int i = 0; i < tactic_count(); ++i) {
        auto plan = usable(tactic_at(i));
        if (i == 0) refused = reason;
        if (plan != nullptr && (best == nullptr || plan->expected_us < best->expected_us)) best = std::move(plan);
    }
    reason = refused;
    return {std::move(best), false};
}

}  // namespace convpool

// SPDX-License-Identifier: Apache-2.0
// The families, and what they say of tactics together.
#include <algorithm>

#include "core/plan.h"
#include "core/refusal.h"
#include "core/tactic.h"

// One line for a family: its folder, whose family.cpp defines <name>_family().
#define CONVPOOL_FAMILIES(FAMILY) \
    FAMILY(generic)               \
    FAMILY(direct_fused)          \
    FAMILY(direct_tma)            \
    FAMILY(direct_rs)             \
    FAMILY(direct_rs_nchw)        \
    FAMILY(pointwise)             \
    FAMILY(few_channels)          \
    FAMILY(implicit_gemm)         \
    FAMILY(implicit_gemm_cpasync) \
    FAMILY(implicit_gemm_tma)

namespace convpool {

#define CONVPOOL_DECLARE(name) const Family &name##_family();
CONVPOOL_FAMILIES(CONVPOOL_DECLARE)
#undef CONVPOOL_DECLARE

const std::vector<Tactic> &tactics() {
    static const std::vector<Tactic> all = [] {
        std::vector<Tactic> found;
        auto add = [&](const Family &family) {
            for (Tactic &tactic : family.tactics()) {
                tactic.family = &family;
                found.push_back(std::move(tactic));
            }
        };
#define CONVPOOL_ADD(name) add(name##_family());
        CONVPOOL_FAMILIES(CONVPOOL_ADD)
#undef CONVPOOL_ADD
        std::sort(found.begin(), found.end(), [](const Tactic &a, const Tactic &b) { return a.id < b.id; });
        return found;
    }();
    return all;
}

const Tactic *find_tactic(int32_t id) {
    const std::vector<Tactic> &all = tactics();
    const auto found =
        std::lower_bound(all.begin(), all.end(), id, [](const Tactic &t, int32_t wanted) { return t.id < wanted; });
    return found != all.end() && found->id == id ? &*found : nullptr;
}

namespace {

// Empty, or the reason why such a device does not run the tactic's code.
std::string device_reason(const Tactic &t, const Device &device) {
    if (device.cc < t.min_cc)
        return refusal(t, "compute capability", device.cc, at_least(t.min_cc),
                       device.cc < tactics().front().min_cc ? "no tactic runs on such a device" : kUseGeneric);
    // Code of an older architecture has empty kernels where it lacks the instructions.
    const int code = code_architecture(device.cc);
    if (code != 0 && code < t.min_cc)
        return refusal(t, "architecture of the code that such a device runs", code, at_least(t.min_cc),
                       "build the library for it, or use another tactic");
    if (t.sm90a && (device.cc != 90 || !built_for_sm90a()))
        return refusal(t, "compute capability", std::to_string(device.cc) + (built_for_sm90a() ? "" : ", built without 90"),
                       "90, and a library built for it", "use a tactic without sm90a");
    return {};
}

}  // namespace

std::unique_ptr<Plan> make_plan(const Problem &problem, const Tactic &tactic, const Device &device, std::string &reason) {
    reason = device_reason(tactic, device);
    return reason.empty() ? tactic.family->plan(problem, tactic, device, reason) : nullptr;
}

std::unique_ptr<Plan> make_plan_for_any_device(const Problem &problem, const Tactic &tactic, std::string &reason) {
    constexpr int kBytes = 1 << 24;  // the most that the API takes for a device's shared memory
    return tactic.family->plan(problem, tactic, {tactic.min_cc, 1, kBytes, kBytes}, reason);
}

}  // namespace convpool

// SPDX-License-Identifier: Apache-2.0
// The families, their tactics, plans and reasons, and the devices that run them (core/tactic.h, core/plan.h).

#include <algorithm>
#include <cstdlib>

#include "core/plan.h"
#include "kernels/passes.h"

// One line for a family: its folder, whose family.cpp defines <name>::family().
#define CONVPOOL_FAMILIES(FAMILY) \
    FAMILY(generic)               \
    FAMILY(direct_fused)          \
    FAMILY(direct_tma)            \
    FAMILY(direct_rs)             \
    FAMILY(pointwise)             \
    FAMILY(few_channels)          \
    FAMILY(implicit_gemm)         \
    FAMILY(implicit_gemm_cpasync) \
    FAMILY(implicit_gemm_tma)

namespace convpool {

#define CONVPOOL_DECLARE(name) \
    namespace name {           \
    const Family &family();    \
    }
CONVPOOL_FAMILIES(CONVPOOL_DECLARE)

const std::vector<Tactic> &tactics() {
    static const std::vector<Tactic> all = [] {
        std::vector<Tactic> found;
        auto add = [&](const Family &family) {
            for (Tactic &tactic : family.tactics()) {
                tactic.family = &family;
                found.push_back(std::move(tactic));
            }
        };
#define CONVPOOL_ADD(name) add(name::family());
        CONVPOOL_FAMILIES(CONVPOOL_ADD)
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

std::unique_ptr<Plan> plan_of(const Problem &problem, const Tactic &tactic, const Device &device, std::string &reason) {
    std::unique_ptr<Plan> plan = tactic.family->plan(problem, tactic, device, reason);
    if (plan != nullptr) plan->workspace.statistics_bytes = statistics::bytes(problem);
    return plan;
}

}  // namespace

std::unique_ptr<Plan> make_plan(const Problem &problem, const Tactic &tactic, const Device &device, std::string &reason) {
    reason = device_reason(tactic, device);
    return reason.empty() ? plan_of(problem, tactic, device, reason) : nullptr;
}

std::unique_ptr<Plan> make_plan_for_any_device(const Problem &problem, const Tactic &tactic, std::string &reason) {
    constexpr int kBytes = 1 << 24;  // the most that the API takes for a device's shared memory
    return plan_of(problem, tactic, {tactic.min_cc, 1, kBytes, kBytes}, reason);
}

cudaError_t current_device(Device &device) {
    int number = 0, major = 0, minor = 0;
    cudaError_t error = cudaGetDevice(&number);
    auto attribute = [&](int &value, cudaDeviceAttr name) {
        if (error == cudaSuccess) error = cudaDeviceGetAttribute(&value, name, number);
    };
    attribute(major, cudaDevAttrComputeCapabilityMajor);
    attribute(minor, cudaDevAttrComputeCapabilityMinor);
    attribute(device.multiprocessors, cudaDevAttrMultiProcessorCount);
    attribute(device.shared_per_block, cudaDevAttrMaxSharedMemoryPerBlockOptin);
    attribute(device.shared_per_multiprocessor, cudaDevAttrMaxSharedMemoryPerMultiprocessor);
    device.cc = major * 10 + minor;
    return error;
}

int code_architecture(int cc) {
    static const std::vector<int> built = [] {  // asked for every tactic that is planned
        std::vector<int> numbers;
        for (const char *text = CONVPOOL_ARCHITECTURES; text != nullptr; text = std::strchr(text, ',')) {
            text += *text == ',';
            numbers.push_back(std::atoi(text));
        }
        return numbers;
    }();
    int own = 0;
    for (int number : built)
        if (number / 10 == cc / 10 && number <= cc) own = std::max(own, number);
    return own != 0 ? own : built.back() <= cc ? built.back() : 0;
}

bool built_for_sm90a() { return CONVPOOL_HAS_SM90A; }

std::string problem_reason(const Problem &p, const Tactic &t, bool takes_float_x) {
    const Precision precision = static_cast<Precision>(t.precision);
    const int dtype = precision == Precision::kF16 ? CONVPOOL_F16 : precision == Precision::kBF16 ? CONVPOOL_BF16 : CONVPOOL_F32;
    if (p.w_dtype != dtype)
        return refusal(t, "dtype", kTypes[p.w_dtype].name, kTypes[dtype].name,
                       p.eight_bit() ? kUseGeneric : "use a tactic of that type");
    if (p.x_float() && !takes_float_x)
        return refusal(t, "type of X", "F32", kTypes[dtype].name, "use a few_channels tactic or generic");
    if (precision == Precision::kTF32 && !p.allow_tf32)
        return refusal(t, "allow_tf32", "0", "1", "use a tf32x3 tactic for full precision");
    if (t.packed && !p.allow_packed)
        return refusal(t, "accumulation", "0 (the default)", "1 (packed)", "use a tactic that is not packed");
    if (p.upsamples() != t.upsamples)
        return refusal(t, "upsampling of X", p.upsamples() ? "some" : "none", t.upsamples ? "some" : "none",
                       t.upsamples ? "use another tactic" : "use an upsample tactic or generic");
    if (p.prologue_form() == PrologueForm::kGeneral && !t.any_prologue)
        return refusal(t, "prologue", p.prologue_by_image ? "scale and shift by image" : "SiLU",
                       "scale and shift by channel, a ReLU or LeakyReLU", "use a direct_gemm or filter_fused tactic, or generic");
    if (p.rank > 2) return refusal(t, "rank", p.rank, "1 or 2", kUseGeneric);
    if (p.group != 1) return refusal(t, "group", p.group, "1", kUseGeneric);
    for (auto [name, value] : {Count{"n * output pixels", p.n * p.out_pixels()},
                               {"output channels", p.m},
                               {"input channels", p.c},
                               {"elements of an input image", p.in_pixels() * p.c},
                               {"pooling window", p.pool_size()},
                               {"elements of a filter", p.taps() * p.c},
                               {"pooled size", std::max(p.pooled[1], p.pooled[2])}})
        if (value > kMaxCount) return refusal(t, name, value, kAtMostMaxCount, kUseGeneric);
    return {};
}

}  // namespace convpool

// SPDX-License-Identifier: Apache-2.0
// Pointers that a launch takes, and what is told of it: the log of plans, ranges in a profiler.
#include <cctype>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <set>

#include "core/plan.h"

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

#if __has_include(<nvtx3/nvToolsExt.h>)
#include <nvtx3/nvToolsExt.h>
#else
static void nvtxRangePushA(const char *) {}
static void nvtxRangePop() {}
#endif

namespace convpool {
namespace {

bool enabled() {
    static const bool on = [] {
        const char *value = std::getenv("CONVPOOL_LOG");
        return value != nullptr && std::strcmp(value, "") != 0 && std::strcmp(value, "0") != 0;
    }();
    return on;
}

template <class Int> std::string joined(const Int *values, int rank, const char *separator) {
    std::string text;
    for (int i = kRank - rank; i < kRank; ++i) {
        if (!text.empty()) text += separator;
        text += std::to_string(values[i]);
    }
    return text;
}

// A window's size, and how it differs from one of stride 1, unpadded and dense.
std::string window(int rank, const int32_t *kernel, const int32_t *strides, const int32_t *begin, const int32_t *end,
                   const int32_t *dilations) {
    return joined(kernel, rank, "x") + " stride " + joined(strides, rank, ",") + " pads " + joined(begin, rank, ",") + "/" +
           joined(end, rank, ",") + " dilation " + joined(dilations, rank, ",");
}

std::string type_name(int32_t dtype) {
    std::string name = kTypes[dtype].name;
    for (char &letter : name) letter = static_cast<char>(std::tolower(static_cast<unsigned char>(letter)));
    return name;
}

std::string describe(const Problem &p) {
    const char *activations[] = {"", "relu", "leaky_relu", "tanh", "sigmoid", "clip", "silu"};
    std::string text = type_name(p.w_dtype);
    if (p.x_dtype != p.w_dtype) text += " of " + type_name(p.x_dtype);
    if (p.y_dtype != p.w_dtype) text += " to " + type_name(p.y_dtype);
    if (p.w_dtype == CONVPOOL_F32 && p.allow_tf32) text += " (tf32)";
    if (p.allow_packed) text += " (packed)";
    text += " n" + std::to_string(p.n) + " c" + std::to_string(p.c) + " m" + std::to_string(p.m) + " " +
            joined(p.in, p.rank, "x") + (p.x_channels_last ? " channels last" : " channels first");
    if (p.x_channels_last != p.y_channels_last) text += p.y_channels_last ? " to last" : " to first";
    if (p.upsamples()) text += ", upsample " + joined(p.upsample, p.rank, "x");
    else text += ", pool " + window(p.rank, p.pool_kernel, p.pool_strides, p.pool_pads_begin, p.pool_pads_end, p.pool_dilations);
    text += ", conv " + window(p.rank, p.kernel, p.strides, p.pads_begin, p.pads_end, p.dilations);
    if (p.group != 1) text += " group " + std::to_string(p.group);
    if (p.prologue_groups > 0) text += ", normalized in " + std::to_string(p.prologue_groups) + " groups";
    else if (p.prologue_affine) text += p.prologue_by_image ? ", scale and shift by image" : ", scale and shift";
    if (p.prologue_activation != Activation::kNone)
        text += std::string(", prologue ") + activations[static_cast<int>(p.prologue_activation)];
    if (p.has_bias) text += ", bias";
    if (p.has_residual) text += ", residual";
    if (p.activation != Activation::kNone) text += std::string(", ") + activations[static_cast<int>(p.activation)];
    return text;
}

}  // namespace

void log_plan(const Plan &plan, int32_t chosen_by) {
    if (!enabled()) return;
    static std::mutex mutex;
    static std::set<std::string> told;
    const char *how = chosen_by == CONVPOOL_CHOSEN_BY_NAME ? "named" : chosen_by == CONVPOOL_CHOSEN_BY_RULE ? "rule" : "measured";
    char us[32];
    std::snprintf(us, sizeof us, "%.1f", plan.expected_us());
    const std::string line =
        "convpool: " + describe(plan.problem) + ": " + plan.tactic.name + " (" + how + "), expected " + us + " us\n";
    const std::lock_guard<std::mutex> lock(mutex);
    if (told.insert(line).second) std::fputs(line.c_str(), stderr);
}

ProfilerRange::ProfilerRange(const char *name) { nvtxRangePushA(name); }
ProfilerRange::~ProfilerRange() { nvtxRangePop(); }

}  // namespace convpool

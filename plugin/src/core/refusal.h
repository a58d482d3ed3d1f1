// SPDX-License-Identifier: Apache-2.0
// Refusals of tactics: "<tactic>: <what>; got X, expected Y; <next step>".
#pragma once

#include <cstdint>
#include <string>

#include "core/tactic.h"

namespace convpool {

inline constexpr const char *kUseGeneric = "use the tactic generic";

// Coordinates, counts and distances of elements, and their sums with tile sizes, are 32-bit in all kernels but generic.
inline constexpr int64_t kMaxCount = int64_t{1} << 30;
inline constexpr const char *kAtMostMaxCount = "at most 2^30";

inline std::string refusal(const Tactic &tactic, const std::string &what, const std::string &got, const std::string &expected,
                           const std::string &next) {
    return tactic.name + ": " + what + "; got " + got + ", expected " + expected + "; " + next;
}
inline std::string refusal(const Tactic &tactic, const std::string &what, int64_t got, const std::string &expected,
                           const std::string &next) {
    return refusal(tactic, what, std::to_string(got), expected, next);
}
inline std::string at_least(int64_t value) { return std::to_string(value) + " or more"; }

// A quantity and what it must not exceed.
struct Count {
    const char *name;
    int64_t value;
};

// What all families but generic demand of a problem: the tactic's types, rank 1 or 2, one group, and sizes of 32 bits. Empty, or
// the reason. takes_float_x: X may be fp32 beside 16-bit weights.
std::string problem_reason(const Problem &problem, const Tactic &tactic, bool takes_float_x = false);

}  // namespace convpool

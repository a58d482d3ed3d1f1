// SPDX-License-Identifier: Apache-2.0
// Tactics and the families that they belong to. Outside its folder, a family is what is declared here.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/device.h"
#include "core/params.h"
#include "core/problem.h"

namespace convpool {

class Family;
class Plan;

// One kernel configuration: what all families' have in common.
struct Tactic {
    int32_t id;
    const Family *family;
    size_t row;  // of the family's table
    std::string name;
    const char *family_name;  // the public one: direct_gemm, direct_fused, filter_fused or generic
    int32_t precision;        // a Precision, or kAnyPrecision
    int32_t split;            // thread blocks of a cluster that share a tile's channels
    int32_t min_cc;
    bool sm90a;           // needs instructions that only compute capability 9.0 has
    bool packed = false;  // box means are summed in X's type

    // Roundings of an operand to the type that is multiplied. Packed: of a sum of two pixels, and of two such sums.
    int32_t roundings() const;
};
constexpr int32_t kAnyPrecision = -1;

inline int32_t Tactic::roundings() const { return precision == kAnyPrecision ? 0 : packed ? 2 : 1; }

class Family {
public:
    virtual ~Family() = default;

    virtual std::vector<Tactic> tactics() const = 0;

    // The problem worked out for one of these tactics and a device that runs its code; null, with a reason, if the tactic
    // does not run it. The plan says what it needs and expects to take, and loads and launches its kernels.
    virtual std::unique_ptr<Plan> plan(const Problem &problem, const Tactic &tactic, const Device &device,
                                       std::string &reason) const = 0;
};

// All tactics, by their ids: generic is the first.
const std::vector<Tactic> &tactics();
const Tactic *find_tactic(int32_t id);

// Null, with a reason, if the tactic does not run the problem on such a device.
std::unique_ptr<Plan> make_plan(const Problem &problem, const Tactic &tactic, const Device &device, std::string &reason);
// The same for a device of any size that runs the tactic: for what depends only on problem and tactic.
std::unique_ptr<Plan> make_plan_for_any_device(const Problem &problem, const Tactic &tactic, std::string &reason);

}  // namespace convpool

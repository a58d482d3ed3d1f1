// SPDX-License-Identifier: Apache-2.0
// Devices, tactics and the families that they belong to; how refusals and names of tactics read.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/params.h"
#include "core/problem.h"

namespace convpool {

struct Device {
    int cc = 0, multiprocessors = 0, shared_per_block = 0, shared_per_multiprocessor = 0;
};

cudaError_t current_device(Device &device);

// The architecture of the code that a device of this compute capability runs, except for tactics named sm90a: compiled for
// its major version, else PTX of the last architecture built for. 0: none.
int code_architecture(int cc);

// True where the library holds code for Hopper's own instructions.
bool built_for_sm90a();

class Family;
class Plan;

constexpr int32_t kAnyPrecision = -1;

// One kernel configuration: what all families' have in common.
struct Tactic {
    int32_t id;
    const Family *family;
    size_t row;  // of the family's table
    std::string name;
    const char *method;  // the public name: direct_gemm, direct_fused (several folders' rows), filter_fused, upsample, generic
    int32_t precision;   // a Precision, or kAnyPrecision
    int32_t split;       // thread blocks of a cluster that share a tile's channels
    int32_t min_cc;
    bool sm90a;                 // needs instructions that only compute capability 9.0 has
    bool packed = false;        // box means are summed in X's type
    bool upsamples = false;     // runs problems that upsample X, and no others
    bool any_prologue = false;  // a SiLU, and scales and shifts by image, too

    // Roundings of an operand to the type that is multiplied. Packed: of a sum of two pixels, and of two such sums.
    int32_t roundings() const { return precision == kAnyPrecision ? 0 : packed ? 2 : 1; }
};

class Family {
public:
    virtual ~Family() = default;

    virtual std::vector<Tactic> tactics() const = 0;

    // The problem worked out for one of these tactics and a device that runs its code; null, with a reason, if the tactic
    // does not run it. The plan says what it needs and expects to take, and loads and launches its kernels.
    virtual std::unique_ptr<Plan> plan(const Problem &problem, const Tactic &tactic, const Device &device,
                                       std::string &reason) const = 0;
};

// Defines what the registry asks for, in the namespace of the family's folder: the one object of its class.
#define CONVPOOL_DEFINE_FAMILY(Class) \
    const Family &family() {          \
        static const Class one;       \
        return one;                   \
    }

// All tactics, by their ids: generic is the first.
const std::vector<Tactic> &tactics();
const Tactic *find_tactic(int32_t id);

// Null, with a reason, if the tactic does not run the problem on such a device.
std::unique_ptr<Plan> make_plan(const Problem &problem, const Tactic &tactic, const Device &device, std::string &reason);
// The same for a device of any size that runs the tactic: for what depends only on problem and tactic.
std::unique_ptr<Plan> make_plan_for_any_device(const Problem &problem, const Tactic &tactic, std::string &reason);

// Refusals of tactics: "<tactic>: <what>; got X, expected Y; <next step>".

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

// The demands of all families but generic on a problem: the tactic's types, pooling or upsampling, rank 1 or 2, one group, and sizes
// of 32 bits. Empty, or the reason. takes_float_x: X may be fp32 beside 16-bit weights.
std::string problem_reason(const Problem &problem, const Tactic &tactic, bool takes_float_x = false);

// Names of tactics: conv_avgpool_<method>_sm<capability>_<precision>_m<pixels>n<channels>k<channels of X>...
inline bool is_16_bit(Precision precision) { return precision == Precision::kF16 || precision == Precision::kBF16; }

// The least compute capability of kernels that multiply by mma.sync.
inline int32_t mma_min_cc(Precision precision, int32_t split) { return split > 1 ? 90 : precision == Precision::kF16 ? 75 : 80; }

inline std::string tile_name(const char *method, int32_t min_cc, bool sm90a, Precision precision, int block_m, int block_n,
                             int block_k) {
    const char *precisions[] = {"f16", "bf16", "tf32", "tf32x3"};
    return std::string("conv_avgpool_") + method + "_sm" + std::to_string(min_cc) + (sm90a ? "a_" : "_") +
           precisions[static_cast<int>(precision)] + "_m" + std::to_string(block_m) + "n" + std::to_string(block_n) + "k" +
           std::to_string(block_k);
}
inline std::string stages_name(int stages, int split) {
    return "_s" + std::to_string(stages) + (split > 1 ? "_split" + std::to_string(split) : "");
}

// The tactics of the rows of a family of the method direct_fused.
template <class Rows, class MinCcOf, class NameOf>
std::vector<Tactic> tactics_of(const Family &family, const Rows &rows, bool sm90a, MinCcOf min_cc_of, NameOf name_of) {
    std::vector<Tactic> all;
    for (const auto &row : rows) {
        all.push_back({row.id, &family, all.size(), name_of(row), "direct_fused", static_cast<int32_t>(row.precision), row.split,
                       min_cc_of(row), sm90a});
        if constexpr (requires { row.packed; }) all.back().packed = row.packed;
    }
    return all;
}
// Of one that needs Hopper's own instructions.
template <class Rows, class NameOf> std::vector<Tactic> hopper_tactics(const Family &family, const Rows &rows, NameOf name_of) {
    return tactics_of(family, rows, true, [](const auto &) { return 90; }, name_of);
}

}  // namespace convpool

// SPDX-License-Identifier: Apache-2.0
// implicit_gemm_cpasync: implicit GEMM on Hopper's tensor cores (wgmma), fed by cp.async.
#include "families/implicit_gemm_cpasync/rows.h"
#include "gemm/plan.h"

namespace convpool::implicit_gemm_cpasync {
namespace {

constexpr gemm::KernelTraits kTraits{.row_chunks = 8, .copy_threads = 0, .barrier_bytes = 0, .stores_runs = true};

class ImplicitGemmCpAsyncPlan : public gemm::GemmPlan {
public:
    using GemmPlan::GemmPlan;

    double expected_us() const override {
        const bool fused_w = row_.operand == gemm::Operand::kFusedW;
        // Three products of half the channels; or pixels that are rounded first, while the tensor cores wait.
        const double products = row_.precision == Precision::kTF32x3            ? 1.34
                                : fused_w && row_.precision == Precision::kTF32 ? 2.2
                                                                                : 1.0;
        // X comes from memory, box means from the cache: a ring of 8 stages hides the difference, one of 4 does not.
        const double memory = fused_w && row_.tile.stages <= 4 ? 1.22 : 1.0;
        const Shape2d &s = operands_.shape;
        const int64_t tap_chunks = s.c / problem.per_chunk(), taps = int64_t{s.kh} * s.kw;
        const int64_t steps = ceil_div(ceil_div(taps * tap_chunks, kTraits.row_chunks), row_.split);
        const Step &step = row_.tile.step;
        return passes_and_rounds_us(steps, {step.issue_us * products, step.latency_us * products * memory});
    }
};

class ImplicitGemmCpAsync : public Family {
public:
    std::vector<Tactic> tactics() const override { return gemm::tactics_of(*this, kRows, true, ""); }

    std::unique_ptr<Plan> plan(const Problem &p, const Tactic &t, const Device &d, std::string &reason) const override {
        const Row &row = kRows[t.row];
        const gemm::Form form{row.operand, gemm::wgmma_format(row.precision), false};
        reason = gemm_reason(p, t, d, row, form, kTraits);
        if (!reason.empty()) return nullptr;
        const void *function = kernel_of_row<kRows>(t.row);
        return std::make_unique<ImplicitGemmCpAsyncPlan>(p, t, d, row, gemm::operands_of(p, form), kTraits, function);
    }
};

}  // namespace

CONVPOOL_DEFINE_FAMILY(ImplicitGemmCpAsync)

}  // namespace convpool::implicit_gemm_cpasync

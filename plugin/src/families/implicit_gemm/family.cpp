// SPDX-License-Identifier: Apache-2.0
// implicit_gemm: implicit GEMM on tensor cores by mma.sync, on every GPU from Turing on.
#include "families/implicit_gemm/rows.h"
#include "gemm/plan.h"

namespace convpool::implicit_gemm {
namespace {

constexpr gemm::KernelTraits kTraits{.row_chunks = 4, .copy_threads = 0, .barrier_bytes = 0, .stores_runs = false};

class ImplicitGemmPlan : public gemm::GemmPlan {
public:
    using GemmPlan::GemmPlan;

    double expected_us() const override {
        const Shape2d &s = operands_.shape;
        const int64_t taps = ceil_div(int64_t{s.kh} * s.kw, operands_.phases.count());  // of a phase
        return passes_and_rounds_us(taps * ceil_div(s.c / problem.per_chunk(), kTraits.row_chunks), row_.tile.step);
    }

protected:
    cudaError_t launch_gemm(ImplicitGemmParams &g, const convpool_tensors &, cudaStream_t stream) const override {
        PhasedGemmParams params{g, PhaseTiles(operands_.phases, g.m_tiles)};
        return launch_kernel(&params, stream);
    }
};

class ImplicitGemm : public Family {
public:
    std::vector<Tactic> tactics() const override { return gemm::tactics_of(*this, kRows, false, ""); }

    std::unique_ptr<Plan> plan(const Problem &p, const Tactic &t, const Device &d, std::string &reason) const override {
        const Row &row = kRows[t.row];
        const gemm::Form form{row.operand, NumberFormat::kAsIs, false};
        reason = gemm_reason(p, t, d, row, form, kTraits);
        if (!reason.empty()) return nullptr;
        const void *function = kernel_of_row<kRows>(t.row);
        return std::make_unique<ImplicitGemmPlan>(p, t, d, row, gemm::operands_of(p, form), kTraits, function);
    }
};

}  // namespace

CONVPOOL_DEFINE_FAMILY(ImplicitGemm)

}  // namespace convpool::implicit_gemm

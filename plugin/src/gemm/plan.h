// SPDX-License-Identifier: Apache-2.0
// Plans of implicit GEMM: passes over X and W, then a kernel of one of three families.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "core/cost.h"
#include "core/launch.h"
#include "gemm/operands.h"
#include "gemm/rows.h"

namespace convpool::gemm {

// What a family's kernel makes of a tile.
struct KernelTraits {
    int row_chunks;     // 16-byte chunks of a pixel's channels in a stage: 4 or 8
    int copy_threads;   // of a block that do not multiply
    int barrier_bytes;  // in shared memory
    bool stores_runs;   // channels first: whole runs of pixels at once
};

class GemmPlan : public Plan {
public:
    GemmPlan(const Problem &problem, const Tactic &tactic, const Device &device, const Row &row, const Operands &operands,
             const KernelTraits &traits, const void *kernel);

    cudaError_t load() const override;
    cudaError_t launch(const convpool_tensors &tensors, cudaStream_t stream) const override;

protected:
    // The kernel over operands and results whose pointers are set.
    virtual cudaError_t launch_gemm(ImplicitGemmParams &gemm, const convpool_tensors &tensors, cudaStream_t stream) const;
    cudaError_t launch_kernel(void *params, cudaStream_t stream) const { return kernel_.launch(params, overlap_, stream); }

    // What the passes and the rounds of the kernel's blocks take.
    double passes_and_rounds_us(int64_t steps, Step step) const;

    const Row &row_;
    const Operands operands_;
    const KernelTraits traits_;

private:
    ImplicitGemmParams gemm_;
    Kernel kernel_;
    bool overlap_;
};

// Bytes of shared memory of a block.
int64_t shared_bytes(const Row &row, const KernelTraits &traits);

// Empty, or the reason why the device has too little shared memory, or a grid cannot have so many blocks.
std::string block_reason(const Problem &problem, const Tactic &tactic, const Device &device, const Row &row,
                         const KernelTraits &traits);

// The tactics of a family's rows. wgmma: they multiply by Hopper's own instructions, in stages of 128 bytes of channels.
std::vector<Tactic> tactics_of(const Family &family, std::span<const Row> rows, bool wgmma, const char *suffix);

}  // namespace convpool::gemm

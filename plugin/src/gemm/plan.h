// SPDX-License-Identifier: Apache-2.0
// Plans of implicit GEMM: passes over X and W, then a kernel of one of three families, which runs another convolution.
#pragma once

#include <span>

#include "core/cost.h"
#include "core/launch.h"
#include "gemm/rows.h"
#include "kernels/passes.h"

namespace convpool::gemm {

// How a tactic takes its operands.
struct Form {
    Operand operand;
    NumberFormat format;  // in which the passes write fp32
    bool activates;       // the kernel itself can apply an activation in front, and no scale and shift
    bool differences = false;

    bool pools_x() const { return operand == Operand::kPooledX; }
    bool upsamples() const { return operand == Operand::kPhasesOfW; }
    bool splits_tf32() const { return format == NumberFormat::kTF32Split; }
};

// The format of a tactic of Hopper's, whose tensor cores take fp32 from passes only.
NumberFormat wgmma_format(Precision precision);
// Channels of X in 128 bytes of such operands.
int wgmma_channels(Precision precision);

// The problem as a tactic sees it, without its pointers.
struct Operands {
    Shape2d shape;   // of the convolution, over pooled X or over X; of an upsampled one of all phases, a phase's pixels
    Phases phases;   // one by default
    int64_t chunks;  // of 16 bytes: a pixel's or tap's channels, as the passes write them; big and small numbers count once
    bool box_pass, weight_pass;  // false: X or W is read where it is
    bool prologue_in_kernel;
    Workspace workspace;
    WeightParams weights;
    BoxMeanParams box;
};

// The operands of a problem that gemm_reason takes.
Operands operands_of(const Problem &problem, const Form &form);

// The form of a tile in a family's kernel.
struct KernelTraits {
    int row_chunks;           // 16-byte chunks of a pixel's channels in a stage: 4 or 8
    int copy_threads;         // of a block that do not multiply
    int barrier_bytes;        // in shared memory
    bool stores_runs;         // channels first: whole runs of pixels at once
    bool phases = false;      // a kernel of phases on Hopper, with memory behind the ring
    bool persistent = false;  // blocks take tiles one after the other, as many blocks as the device holds
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

    // Blocks of all tiles.
    int64_t blocks() const;
    // The time of the passes and of the rounds of the kernel's blocks.
    double passes_and_rounds_us(int64_t steps, Step step) const;

    const Row &row_;
    const Operands operands_;
    const KernelTraits traits_;

private:
    ImplicitGemmParams gemm_;
    Kernel kernel_;
    bool overlap_;
};

// Empty, or the reason why the tactic does not run the problem: its form, sizes that are beyond the passes or the kernels, too little
// shared memory, or more blocks than a grid can have.
std::string gemm_reason(const Problem &problem, const Tactic &tactic, const Device &device, const Row &row, const Form &form,
                        const KernelTraits &traits);

// The tactics of a family's rows. wgmma: they multiply by Hopper's own instructions, in stages of 128 bytes of channels.
std::vector<Tactic> tactics_of(const Family &family, std::span<const Row> rows, bool wgmma, const char *suffix);

}  // namespace convpool::gemm

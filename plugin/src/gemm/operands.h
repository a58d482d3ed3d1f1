// SPDX-License-Identifier: Apache-2.0
// The convolution that an implicit GEMM runs in place of a problem, and the passes over X and W before it.
#pragma once

#include <cstdint>
#include <string>

#include "core/plan.h"
#include "gemm/params.h"
#include "gemm/rows.h"
#include "kernels/prepasses/prepasses.h"

namespace convpool::gemm {

// How a tactic takes its operands.
struct Form {
    Operand operand;
    NumberFormat format;  // in which the passes write fp32
    bool activates;       // the kernel itself can apply an activation in front, and no scale and shift

    bool pools_x() const { return operand == Operand::kPooledX; }
    bool splits_tf32() const { return format == NumberFormat::kTF32Split; }
};

// The format of a tactic of Hopper's, whose tensor cores take fp32 from passes only.
NumberFormat wgmma_format(Precision precision);
// Channels of X in 128 bytes of such operands.
int wgmma_channels(Precision precision);

// The problem as a tactic sees it, without its pointers.
struct Operands {
    Shape2d shape;   // of the convolution, over pooled X or over X
    int64_t chunks;  // of 16 bytes: a pixel's or tap's channels, as the passes write them; big and small numbers count once
    bool box_pass, weight_pass;  // false: X or W is read where it is
    bool prologue_in_kernel;
    Workspace workspace;
    WeightParams weights;
    BoxMeanParams box;
};

// Empty, or the reason why the sizes of the problem are beyond the passes or the kernels. adds_spans: the kernel adds 32-bit
// distances between taps to 64-bit places.
std::string operands_reason(const Problem &problem, const Tactic &tactic, const Form &form, bool adds_spans);

// The operands of a problem that operands_reason takes.
Operands operands_of(const Problem &problem, const Form &form);

}  // namespace convpool::gemm

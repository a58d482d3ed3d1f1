// The table of tactics and what each makes of a problem on a device.
#pragma once

#include <string>

#include "problem.h"

namespace convpool {

enum class Family : int32_t {
    kGeneric,
    kDirectGemm,
    kDirectGemmSm90,
    kDirectGemmIm2col,
    kDirectFused,
    kFilterFused,
    kFilterFusedSm90,
    kFilterFusedIm2col,
    kDirectTma,
    kPointwiseSm90,
    kFewChannels
};

struct Tactic {
    Family family;
    int32_t precision;  // a Precision, or -1 for any
    int32_t id, block_m, block_n, warps_m, warps_n, stages, min_blocks, split;

    int kernel_size = 0, stage_taps = 0, raw_stages = 0, mean_stages = 0, mean_warps = 0;  // of kDirectTma

    int threads() const {
        if (direct_tma()) return (1 + mean_warps + 8) * 32;
        return warps_m * warps_n * 32 + (im2col() ? im2col_copy_threads(static_cast<Precision>(precision), block_m, block_n) : 0);
    }
    const char *family_name() const;
    const char *name() const;  // static storage
    int min_cc() const;
    bool sm90() const {
        return family == Family::kDirectGemmSm90 || family == Family::kFilterFusedSm90 || im2col() || direct_tma() || pointwise();
    }
    bool im2col() const { return family == Family::kDirectGemmIm2col || family == Family::kFilterFusedIm2col; }
    bool direct_tma() const { return family == Family::kDirectTma; }
    bool pointwise() const { return family == Family::kPointwiseSm90; }
    bool direct_gemm() const {
        return family == Family::kDirectGemm || family == Family::kDirectGemmSm90 || family == Family::kDirectGemmIm2col;
    }
    bool filter_fused() const {
        return family == Family::kFilterFused || family == Family::kFilterFusedSm90 || family == Family::kFilterFusedIm2col;
    }
    bool few_channels() const { return family == Family::kFewChannels; }  // stages: of 16 taps and channels
    bool direct_fused() const { return family == Family::kDirectFused; }
    // Implicit GEMM on Hopper: how wgmma needs fp32 operands, from passes of their own.
    NumberFormat number_format() const {
        if (!sm90() || !(direct_gemm() || filter_fused())) return NumberFormat::kAsIs;
        return precision == static_cast<int32_t>(Precision::kTF32)     ? NumberFormat::kTF32
               : precision == static_cast<int32_t>(Precision::kTF32x3) ? NumberFormat::kTF32Halves
                                                                       : NumberFormat::kAsIs;
    }
    bool reads_halves() const { return number_format() == NumberFormat::kTF32Halves; }
    const void *kernel(bool prologue) const;  // null for generic
};

int tactic_count();
const Tactic &tactic_at(int index);
const Tactic *find_tactic(int id);

struct Device {
    int cc = 0, multiprocessors = 0, shared_per_block = 0, shared_per_multiprocessor = 0;
};

// The architecture of the code that a device of this compute capability runs, except for tactics named sm90a: compiled for
// its major version, else PTX of the last architecture built for. 0: none.
int code_architecture(int cc);

// What a direct_fused launch consists of.
struct DirectFusedPlan {
    DirectFusedParams params;  // pointers unset
    int grid, shared_bytes, blocks_per_multiprocessor;
};

// What a direct_tma launch consists of.
struct DirectTmaPlan {
    DirectTmaParams params;  // pointers and tensor maps unset
    DirectTmaShared shared;
    int grid;
};

// What a pointwise launch consists of.
struct PointwisePlan {
    PointwiseParams params;  // pointers unset
    int grid, shared_bytes;
};

// What a few_channels launch consists of.
struct FewChannelsPlan {
    FewChannelsParams params;  // pointers unset
    int grid, shared_bytes;
};

struct WorkspaceLayout {
    size_t weights_bytes, x_bytes, total;  // weights first, both multiples of 256
    bool box_pass, weight_pass;            // false: X or W is read as it is
};

// Empty, or the reason why the tactic does not run the problem on such a device.
std::string reject_reason(const Problem &problem, const Tactic &tactic, const Device &device);

// False, with a reason, if no tile fits into the device's shared memory.
bool plan_direct_fused(const Problem &problem, const Tactic &tactic, const Device &device, DirectFusedPlan &plan,
                       std::string &reason);

// False, with a reason, if the problem is not of the form that the tactic is made for.
bool plan_direct_tma(const Problem &problem, const Tactic &tactic, const Device &device, DirectTmaPlan &plan,
                     std::string &reason);
bool plan_pointwise(const Problem &problem, const Tactic &tactic, const Device &device, PointwisePlan &plan, std::string &reason);
bool plan_few_channels(const Problem &problem, const Tactic &tactic, const Device &device, FewChannelsPlan &plan,
                       std::string &reason);

// False, with a reason that names the tactic, if TMA cannot walk over the windows of such a convolution.
bool plan_im2col(const Shape2d &shape, const char *tactic, Im2colBox &box, std::string &reason);

// direct_gemm and filter_fused: the 16-byte chunks of channels of a pixel or tap that the passes before the GEMM write, halves
// counted once.
int64_t pass_chunks(const Problem &problem, const Tactic &tactic);
// The convolution that the implicit GEMM runs, over box means or over X.
Shape2d gemm_shape(const Problem &problem, const Tactic &tactic);
WorkspaceLayout workspace_layout(const Problem &problem, const Tactic &tactic);
// Whether the tactic's kernel applies the prologue, and not a pass before it.
bool prologue_in_kernel(const Problem &problem, const Tactic &tactic);
int implicit_gemm_shared_bytes(const Tactic &tactic);
WeightParams weight_params(const Problem &problem, const Tactic &tactic);
BoxMean box_of(const Problem &problem);

// Expected time in microseconds, for the choice between tactics.
double expected_us(const Problem &problem, const Tactic &tactic, const Device &device);

}  // namespace convpool

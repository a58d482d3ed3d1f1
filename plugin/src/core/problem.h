// SPDX-License-Identifier: Apache-2.0
// The element types by their numbers; a checked problem, from which all tactics plan.
#pragma once

#include <cfloat>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <string>

#include "convpool.h"
#include "core/params.h"

namespace convpool {

struct ElementType {
    const char *name;
    int32_t bytes;
    float largest;  // finite number, of a type that prologue, sums and results may have; 0: of X and W only, summed exactly
};
// Types in the order of convpool_dtype. To add one is to add a line here, and what generic reads of it.
inline constexpr ElementType kTypes[] = {
    {"F16", 2, 65504.f}, {"BF16", 2, 0x1.FEp127f}, {"F32", 4, FLT_MAX}, {"I8", 1, 0}, {"F8E4M3", 1, 0},
};

constexpr bool is_type(int32_t dtype) { return dtype >= 0 && dtype < static_cast<int32_t>(std::size(kTypes)); }
constexpr bool is_float(int32_t dtype) { return kTypes[dtype].largest > 0; }

constexpr int kRank = CONVPOOL_MAX_RANK;

// A checked problem: ranks padded to 3 with leading ones, output sizes computed.
struct Problem {
    int32_t rank, x_dtype, w_dtype, y_dtype;
    bool x_channels_last, y_channels_last, allow_tf32, allow_packed, has_w_scale, has_bias, has_residual;
    int64_t n, c, m;
    int32_t group;
    int64_t in[kRank], pooled[kRank], out[kRank];
    int32_t pool_kernel[kRank], pool_strides[kRank], pool_pads_begin[kRank], pool_pads_end[kRank], pool_dilations[kRank];
    int32_t kernel[kRank], strides[kRank], pads_begin[kRank], pads_end[kRank], dilations[kRank];
    int32_t upsample[kRank];  // copies of a pixel along each dimension; `pooled` is the upsampled size then
    Activation activation;
    float alpha, beta;
    bool prologue_affine, prologue_by_image;
    Activation prologue_activation;
    float prologue_alpha;
    int32_t prologue_groups;  // of channels that are normalized before scale and shift; 0: nothing is
    float prologue_epsilon;

    // Only generic runs such a problem.
    bool eight_bit() const { return !is_float(w_dtype); }
    // X is fp32 beside a 16-bit W, and rounded to W's type as it is read.
    bool x_float() const { return x_dtype != w_dtype; }
    // Bytes of W's elements; but for 8-bit types also of Y's, of all that is added to it, and of the prologue's.
    int element_bytes() const { return kTypes[w_dtype].bytes; }
    int x_element_bytes() const { return kTypes[x_dtype].bytes; }
    int y_element_bytes() const { return kTypes[y_dtype].bytes; }
    int per_chunk() const { return 16 / element_bytes(); }
    int64_t pool_size() const { return int64_t{1} * pool_kernel[0] * pool_kernel[1] * pool_kernel[2]; }
    int64_t taps() const { return int64_t{1} * kernel[0] * kernel[1] * kernel[2]; }
    int64_t out_pixels() const { return out[0] * out[1] * out[2]; }
    int64_t in_pixels() const { return in[0] * in[1] * in[2]; }
    // X is upsampled, and not pooled.
    bool upsamples() const { return upsample[0] > 1 || upsample[1] > 1 || upsample[2] > 1; }
    bool has_prologue() const { return prologue_affine || prologue_activation != Activation::kNone; }
    PrologueForm prologue_form() const {
        if (prologue_by_image || prologue_activation == Activation::kSilu) return PrologueForm::kGeneral;
        return has_prologue() ? PrologueForm::kRectifying : PrologueForm::kNone;
    }
    // Rows of channels are whole 16-byte chunks.
    bool x_rows_chunked() const { return x_channels_last && c % per_chunk() == 0; }
    bool w_rows_chunked() const { return (c / group) % per_chunk() == 0; }

    // Sizes and windows for kernels of two dimensions.
    Shape2d shape() const;
    // The convolution's windows, for kernels of two dimensions.
    template <class Parameters> void set_windows(Parameters &to) const {
        to.stride_h = strides[1], to.stride_w = strides[2];
        to.dilation_h = dilations[1], to.dilation_w = dilations[2];
        to.pad_h = pads_begin[1], to.pad_w = pads_begin[2];
    }
};

// Bytes of device memory, up to a multiple of 256.
inline size_t round_up_256(size_t bytes) { return (bytes + 255) / 256 * 256; }

// "<what>; got X, expected Y", as refusals of problems read.
std::string mismatch(const std::string &what, int64_t got, const std::string &expected);

// Fills `out`; false, and the reason in `error`, if the description is no ConvAvgPool.
bool check_problem(const convpool_problem *description, Problem &out, std::string &error);

}  // namespace convpool

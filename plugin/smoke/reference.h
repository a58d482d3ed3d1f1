// SPDX-License-Identifier: Apache-2.0
// What the smoke test compares with: small problems of whole numbers, and ConvAvgPool straight from its definition.
#pragma once

#include <cstddef>
#include <vector>

namespace smoke {

using Values = std::vector<double>;

// AveragePool(window) behind Conv(kernel, pads), as it is rewritten: pooling first.  Square windows, stride 1.
struct Problem {
    const char *name;
    int n, c, m, height, width, kernel, window, pads;
    bool epilogue;  // bias, residual and ReLU
    bool prologue;  // scale, shift and ReLU

    // A pointwise convolution keeps the pooling's stride where it is; others take it over.
    bool pointwise() const { return kernel == 1; }
    int pool_stride() const { return pointwise() ? window : 1; }
    int conv_stride() const { return pointwise() ? 1 : window; }
    int pool_pad() const { return pads < window - 1 ? pads : window - 1; }
    int conv_pad() const { return pads - pool_pad(); }
    int pooled(int size) const { return (size + 2 * pool_pad() - window) / pool_stride() + 1; }
    int out(int size) const { return (pooled(size) + 2 * conv_pad() - kernel) / conv_stride() + 1; }
};

// x [N,C,H,W], w [M,kernel,kernel,C], residual [N,M,out,out], bias [M], scale and shift [C].
struct Tensors {
    Values x, w, residual, bias, scale, shift;
};

// Whole numbers of which box means are whole too, or, for tactics that fold the mean into the weights, those weights.
Tensors make_tensors(const Problem &p, bool filter_fused);

// Y [N,M,out,out].
Values reference(const Problem &p, const Tensors &t);

// [N,C,...] as [N,...,C].
Values channels_last(const Values &values, int n, int channels);

}  // namespace smoke

// SPDX-License-Identifier: Apache-2.0
// A node on the CPU provider: plain loops, for any type, rank and layout, so that a model runs where no GPU is.
#pragma once

#include "node.h"

#include <cstdint>

namespace convpool::onnxruntime {

class CpuKernel {
public:
    // element_type: an ElementType, of all tensors.
    CpuKernel(const OrtApi &api, const nodes::Operator &op, int32_t element_type, const OrtKernelInfo *info)
        : api_(api), node_(api, op, info), element_type_(element_type), constants_(constant_sizes(api, info)) {}

    // May be called from several threads at once.
    void compute(OrtKernelContext *context) const;
    const OrtApi &api() const { return api_; }

private:
    const OrtApi &api_;
    Node node_;
    int32_t element_type_;
    ConstantSizes constants_;
};

}  // namespace convpool::onnxruntime

// SPDX-License-Identifier: Apache-2.0
// One node of ai.convpool: an operator with its attributes, and what they say of shapes.  No GPU.
//
// Errors are std::invalid_argument whose message names the operator, the attribute or the tensor.
#pragma once

#include "attributes.h"

#include <convpool.h>

#include <cstdint>
#include <vector>

namespace convpool::onnxruntime {

class Node {
public:
    Node(const tensorrt::Operator &op, const AttributeSource &source);

    // Y's sizes, -1 where the inputs do not tell.  sizes: of the inputs in order, unknown ones -1; the operator's optional
    // bias may be absent.
    Sizes output_sizes(const std::vector<Sizes> &sizes) const;
    static constexpr int kBatch = 0;  // the axis
    // What the C API knows the node as, on inputs of these sizes.  dtype: convpool_dtype of all tensors.
    convpool_problem problem(const std::vector<Sizes> &sizes, int32_t dtype, bool allow_tf32) const;

    const tensorrt::Operator &op() const { return *op_; }
    bool constant_weights() const { return value(tensorrt::kConstantWeights) != 0; }
    bool allow_tf32() const { return value(tensorrt::kAllowTf32) != 0; }

private:
    int32_t value(int id, int i = 0) const { return values_[id][i]; }
    void check_name() const;
    void check_weight_perm(const AttributeSource &source) const;
    void check_inputs(const std::vector<Sizes> &sizes) const;
    void expect(const std::vector<Sizes> &sizes, int input, const Sizes &wanted) const;
    int channel_axis() const { return channels_last_ ? rank_ + 1 : 1; }
    int first_axis() const { return channels_last_ ? 1 : 2; }

    const tensorrt::Operator *op_;
    std::vector<std::vector<int32_t>> values_;  // one per attribute
    int rank_;
    bool channels_last_ = false;
};

// The inputs of one call.
class Inputs {
public:
    Inputs(const OrtApi &api, const OrtKernelContext *context);

    const std::vector<Sizes> &sizes() const { return sizes_; }
    const OrtValue *x() const { return values_[tensorrt::kX]; }
    // Their pointers, and Y's.
    convpool_tensors tensors(const convpool_problem &problem, const OrtValue *y) const;

private:
    const OrtApi &api_;
    std::vector<const OrtValue *> values_;
    std::vector<Sizes> sizes_;
};

}  // namespace convpool::onnxruntime

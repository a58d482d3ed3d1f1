// SPDX-License-Identifier: Apache-2.0
// One node of ai.convpool: an operator with its attributes, and what they say of shapes.  No GPU.
//
// Errors are std::invalid_argument whose message names the operator, the attribute or the tensor.
#pragma once

#include "attributes.h"

#include <convpool.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace convpool::onnxruntime {

class Node {
public:
    Node(const nodes::Operator &op, const AttributeSource &source);
    // Of a kernel: also refuses inputs whose sizes, as far as they are known, contradict the attributes.
    Node(const OrtApi &api, const nodes::Operator &op, const OrtKernelInfo *info);

    // Y's sizes, -1 where the inputs do not tell.  sizes: of the inputs in order, unknown ones -1; the operator's optional
    // bias may be absent.
    Sizes output_sizes(const std::vector<Sizes> &sizes) const;
    static constexpr int kBatch = 0;  // the axis
    // What the C API knows the node as, on inputs of these sizes.  dtype: convpool_dtype of all tensors.
    convpool_problem problem(const std::vector<Sizes> &sizes, int32_t dtype, bool allow_tf32) const;

    const nodes::Operator &op() const { return *op_; }
    bool constant_weights() const { return value(nodes::kConstantWeights) != 0; }
    bool allow_tf32() const { return value(nodes::kAllowTf32) != 0; }

private:
    int32_t value(int id, int i = 0) const { return values_[id][i]; }
    void check_name() const;
    void read_layouts(const AttributeSource &source);
    void check_perm(const AttributeSource &source, const char *name, const std::vector<int64_t> &wanted) const;
    void check_inputs(const std::vector<Sizes> &sizes) const;
    void expect(const std::vector<Sizes> &sizes, int input, const Sizes &wanted) const;
    void check_elements(const char *tensor, const Sizes &sizes) const;
    // Of a tensor with the channels last or behind the batch: the channels, and the first spatial axis.
    int channel_axis(bool last) const { return last ? rank_ + 1 : 1; }
    static int first_axis(bool last) { return last ? 1 : 2; }

    const nodes::Operator *op_;
    std::vector<std::vector<int32_t>> values_;  // one per attribute
    int rank_;
    bool x_last_ = false, y_last_ = false;  // [N, spatial..., channels]; R is as Y
};

// Sizes of a kernel's inputs that are constants of the model; none of the others.  Asking for them in every call takes longer
// than a small kernel runs.
using ConstantSizes = std::vector<std::optional<Sizes>>;
ConstantSizes constant_sizes(const OrtApi &api, const OrtKernelInfo *info);

// The inputs of one call.
class Inputs {
public:
    Inputs(const OrtApi &api, const OrtKernelContext *context, const ConstantSizes &constants);

    const std::vector<Sizes> &sizes() const { return sizes_; }
    const OrtValue *x() const { return values_[nodes::kX]; }
    // Their pointers, and Y's.
    convpool_tensors tensors(const convpool_problem &problem, const OrtValue *y) const;

private:
    const OrtApi &api_;
    std::vector<const OrtValue *> values_;
    std::vector<Sizes> sizes_;
};

}  // namespace convpool::onnxruntime

// SPDX-License-Identifier: Apache-2.0
// One plugin of ai.convpool as the adapters see it: an operator with its attributes (a NodeSpec of nodes/operators.h), and the
// questions that TensorRT asks about it, answered by the C API.  No TensorRT type, no kernel, no GPU call but through convpool.h.
//
// Errors are exceptions whose message names the attribute or tensor; the adapters' guard turns them into a status.
#pragma once

#include "nodes/operators.h"

namespace convpool::tensorrt {

using namespace nodes;

inline constexpr int kMaxDims = 8;
inline constexpr int kMostTensors = 7;  // X, W, B, scale, shift, R, Y

// A tensor as TensorRT describes it.  `type` and `format` are TensorRT's numbers, the same in every version; sizes behind
// `rank` are 0, and one below 0 is unknown.
struct Tensor {
    int32_t type;
    int32_t format;
    int32_t rank;
    int32_t unused;  // no padding: tensors are compared byte by byte
    int64_t d[kMaxDims];
};
std::string shape_text(const Tensor &tensor);

// A call's tensors: inputs, then the output.
struct Tensors {
    int32_t inputs = 0;
    int32_t unused = 0;
    Tensor all[kMostTensors]{};

    const Tensor &output() const { return all[inputs]; }
    const Tensor &residual() const { return all[inputs - 1]; }
};
bool same(const Tensors &a, const Tensors &b);

class PluginCore : public NodeSpec {
public:
    // op: one of operators().
    PluginCore(const Operator &op, const Field *fields, int32_t count);

    // Output types and sizes, before any is known: throws if input `index` cannot have this type.
    void check_type(int32_t index, int32_t type) const;
    void check_rank(int32_t dimensions_of_x) const;
    // Checks of the weights, whose sizes are constants in most networks.
    void check_weights(int32_t dimensions, const int64_t *sizes) const;
    // The residual, if there is one, against the output.
    void check_residual(const Tensors &tensors) const;
    // Residual and output of a run against `problem`.  No part of problem(), as bounds of open sizes need not agree.
    void check_run(const Tensors &tensors, const convpool_problem &problem) const;

    // True where tensor `position` may have its type and format, given those before it.
    bool supports(int32_t position, const Tensors &tensors) const;

    // The problem that the C API knows this as.
    convpool_problem problem(const Tensors &tensors) const;
    // Throws unless `problem`, which came with an engine, is one that problem() can have given for so many inputs.
    void check_problem(const convpool_problem &problem, int32_t inputs) const;

    // Everything that the plugin's speed depends on besides shapes and types: the library's build and the attributes.
    // Lives as long as the object.
    const std::string &identity() const { return identity_; }

private:
    void check_shapes(const Tensors &tensors) const;
    bool takes_slope(int32_t dtype) const;
    bool takes_types(const Tensor &x, const Tensor &w) const;

    std::string identity_;
};

}  // namespace convpool::tensorrt

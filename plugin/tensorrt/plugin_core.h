// One of the operators of ai.convpool as the adapters see it: its attributes, checked, and the questions that
// TensorRT asks about it, answered by the C API.  No TensorRT type, no kernel, no GPU call but through convpool.h.
//
// Errors are exceptions whose message names the attribute or tensor; the adapters' guard turns them into a status.
#pragma once

#include "weight_cache.h"

#include <convpool.h>

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace convpool::tensorrt {

inline constexpr char kVersion[] = "1";
inline constexpr char kNamespace[] = "";
inline constexpr int kMaxDims = 8;

// Inputs in order; ConvAvgPool's bias may be absent.  R, where an operator has it, is the last.
enum Input : int { kX = 0, kW = 1, kB = 2, kScale = 3, kShift = 4 };

// A tensor as TensorRT describes it.  `type` and `format` are TensorRT's numbers, the same in every version.
struct Tensor {
    int32_t type;
    int32_t format;
    int32_t rank;
    int64_t d[kMaxDims];
};

// A plugin field.  `type` is TensorRT's number.
struct Field {
    const char *name;
    const void *data;
    int32_t type;
    int32_t length;
};

// Compute capability, multiprocessors and shared memory of a device: what the C API's cost rule looks at.
struct Device {
    int32_t cc, multiprocessors, shared_bytes;
};
// The current device; throws without one.
Device current_device();

// One attribute of an operator: `values` entries a spatial dimension, 0 for a scalar.  A real one is a float, unbounded.
struct Attribute {
    const char *name;
    int32_t values;
    int32_t least, most;
    bool required;
    int32_t fallback;
    bool real = false;
};
// Positions in Operator::attributes(), the order of serialisation.  Pooling and convolution have the same four.
enum AttributeId : int {
    kPooling = 0,
    kConvolution = 4,
    kGroup = 8,
    kAllowTf32 = 9,
    kConstantWeights = 10,
    kPrologueAffine = 11,
    kPrologueActivation,
    kPrologueAlpha,
    kResidual,
    kActivation,
    kAlpha
};
enum Window : int { kKernelShape = 0, kStrides = 1, kPads = 2, kDilations = 3 };

// An operator of ai.convpool: [Affine][Relu|LeakyRelu]ConvAvgPool[Add][Relu|LeakyRelu] does what its name says.
struct Operator {
    bool affine;
    int32_t before;  // convpool_activation in front of the pooling
    bool residual;
    int32_t after;  // convpool_activation of what comes last
    std::string name;
    std::vector<std::string> inputs;

    bool plain() const { return !affine && before == CONVPOOL_ACT_NONE && !residual && after == CONVPOOL_ACT_NONE; }
    // allow_tf32 and constant_weights are not the operator's.  The first says how a builder wants float32 products to be
    // formed; the second that W never changes in the engine's life, so that what is made of it may be kept.
    const std::vector<Attribute> &attributes() const;
};
// ConvAvgPool and its 35 fused variants.  They stay to the very end of the process, as engines may.
const std::vector<Operator> &operators();

class PluginCore {
public:
    // op: one of operators().
    PluginCore(const Operator &op, const Field *fields, int32_t count);

    // Output types and sizes, before any is known: throws if input `index` cannot have this type.
    void check_input_count(int32_t count) const;
    void check_type(int32_t index, int32_t type) const;
    void check_rank(int32_t dimensions_of_x) const;
    // Checks of the weights, whose sizes are constants in most networks; -1 stands for an unknown size, here and below.
    void check_weights(int32_t dimensions, const int64_t *sizes) const;
    // The residual, if there is one, against the output; no part of problem(), as bounds of open sizes need not agree.
    void check_residual(const Tensor *tensors, int32_t inputs) const;

    // Whether tensor `position` of inputs then outputs may have its type and format, given those before it.
    bool supports(int32_t position, const Tensor *tensors, int32_t inputs) const;

    // The problem that the C API knows this as.  tensors: inputs, then the output.
    convpool_problem problem(const Tensor *tensors, int32_t inputs) const;

    // Ids of the tactics that can run every one of the problems on the device.
    std::vector<int32_t> tactics(const std::vector<convpool_problem> &problems, const Device &device) const;

    const Operator &op() const { return *op_; }
    int32_t rank() const { return rank_; }
    // One value of attribute `id`; pads: the leading sides, then the trailing ones.
    int32_t value(int id, int i = 0) const { return values_[id].at(i); }
    // As op().attributes(); a real one by its bits.
    const std::vector<std::vector<int32_t>> &values() const { return values_; }
    // Everything that the layer's speed depends on besides shapes and types; static for the object's life.
    const std::string &identity() const { return identity_; }

private:
    void check_name() const;
    bool takes_slope(int32_t dtype) const;
    bool takes_types(const Tensor &x, const Tensor &w) const;

    const Operator *op_;
    int32_t rank_ = 0;
    std::vector<std::vector<int32_t>> values_;  // one per attribute
    std::string identity_;
};

// What the cost rule picks within `workspace_size` bytes.
int32_t default_tactic(const convpool_problem &problem, size_t workspace_size, const Device &device);
// Bytes that `tactic` needs; 0 stands for the default one of `device`.
size_t workspace_bytes(const convpool_problem &problem, int32_t tactic, const Device &device);
// Launches, on kept weights where there are any, and falls back to the default tactic within `workspace_size` where
// `tactic` cannot run these very tensors.
void launch(const convpool_problem &problem, int32_t tactic, const void *const *inputs, void *output, void *workspace,
            size_t workspace_size, WeightCache &kept, void *stream);

std::string shape_text(const Tensor &tensor);

// What is known of a shape while the network is made.
template <typename Api> Tensor known_sizes(const typename Api::DimsExprs &shape) {
    Tensor t{0, 0, shape.nbDims, {}};
    for (int i = 0; i < shape.nbDims && i < kMaxDims; ++i)
        t.d[i] = shape.d[i]->isConstant() ? static_cast<int64_t>(shape.d[i]->getConstantValue()) : -1;
    return t;
}

// Sizes of the output as expressions of the input's: [N, M, ...], each spatial one two windows' places,
//     places(size) = floor((size + pads - (dilation * (kernel - 1) + 1)) / stride) + 1.
// Throws where constant sizes contradict each other.  Api has the members Expr, Builder, kSum, kFloorDiv of one TensorRT
// version's interface.
template <typename Api>
void output_shape(const PluginCore &core, const typename Api::DimsExprs *inputs, int32_t count, typename Api::DimsExprs &output,
                  typename Api::Builder &builder) {
    using Expr = const typename Api::Expr *;
    core.check_input_count(count);
    const Tensor w = known_sizes<Api>(inputs[kW]);
    core.check_weights(w.rank, w.d);
    core.check_rank(inputs[kX].nbDims);
    auto places = [&](Expr size, int i, int group) -> Expr {
        const int64_t window = int64_t{core.value(group + kDilations, i)} * (core.value(group + kKernelShape, i) - 1) + 1;
        const int32_t pads = core.value(group + kPads, i) + core.value(group + kPads, i + core.rank());
        if (window > INT32_MAX)
            throw std::invalid_argument("window; got " + std::to_string(window) + " elements, expected at most 2^31 - 1");
        Expr reach = builder.operation(Api::kSum, *size, *builder.constant(pads - static_cast<int32_t>(window)));
        Expr steps = builder.operation(Api::kFloorDiv, *reach, *builder.constant(core.value(group + kStrides, i)));
        return builder.operation(Api::kSum, *steps, *builder.constant(1));
    };
    output.nbDims = core.rank() + 2;
    output.d[0] = inputs[kX].d[0];
    output.d[1] = inputs[kW].d[0];
    for (int i = 0; i < core.rank(); ++i) {
        const Expr pooled = places(inputs[kX].d[2 + i], i, kPooling);
        output.d[2 + i] = places(pooled, i, kConvolution);
    }
    if (!core.op().residual) return;
    std::vector<Tensor> known;
    for (int i = 0; i < count; ++i) known.push_back(known_sizes<Api>(inputs[i]));
    known.push_back(known_sizes<Api>(output));
    core.check_residual(known.data(), count);
}

}  // namespace convpool::tensorrt

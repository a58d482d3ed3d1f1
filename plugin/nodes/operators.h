// SPDX-License-Identifier: Apache-2.0
// The operators of ai.convpool for the runtimes that run them: their names, inputs and attributes, and how a node's fields
// become the attributes' values.  No runtime's types.
//
// Errors are std::exceptions whose message names the attribute or tensor; the adapters' guard turns them into a status.
#pragma once

#include <convpool.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace convpool::nodes {

// Throws "<what>; got <got>, expected <expected>".
[[noreturn]] void refuse(const std::string &what, const std::string &got, const std::string &expected);

// Inputs in order; ConvAvgPool's bias may be absent.  R, where an operator has it, is the last.
enum Input : int { kInputX = 0, kInputW = 1, kInputB = 2, kInputScale = 3, kInputShift = 4 };

// A field of a node.  `type` is TensorRT's number, the same in every version, for onnxruntime as well.
struct Field {
    const char *name;
    const void *data;
    int32_t type;
    int32_t length;
};

// One attribute of an operator: `values` entries a spatial dimension, 0 for a scalar.  A real one is a float, unbounded.
struct Attribute {
    const char *name;
    int32_t values;
    int32_t least, most;
    bool required;
    int32_t default_value;
    bool real = false;
};
// The attributes in order, which is that of serialisation: Operator::position() has the place in Operator::attributes().  Pooling
// and convolution have the same four; an operator that upsamples has kUpsample in the pooling's place.
enum AttributeId : int {
    kPooling = 0,
    kUpsample = 0,
    kConvolution = 4,
    kGroup = 8,
    kAllowTf32 = 9,
    kConstantWeights = 10,
    kAccumulation = 11,
    kPrologueAffine = 12,
    kPrologueActivation,
    kPrologueAlpha,
    kResidual,
    kActivation,
    kAlpha,
    kNormGroups,
    kEpsilon
};
inline constexpr int kKernelShape = 0, kStrides = 1, kPads = 2, kDilations = 3;

// The format of the fields that an engine stores, as a field of this name beside the attributes: an engine of a later
// format may mean something else by them and is refused.  Engines of before it have no such field; they mean format 1.
inline constexpr char kFormatField[] = "format";
inline constexpr int32_t kFieldFormat = 1;

// An attribute of nodes for onnxruntime's CUDA provider, whose tensors may have the channels last in ONNX's own order of sizes.
// In TensorRT formats say how a tensor lies in memory, so that a plugin only has 0; no engine stores it.
inline constexpr char kChannelsLastField[] = "channels_last";
// An attribute of nodes that upsample, for their function only.
inline constexpr char kScalesField[] = "scales";

// An operator of ai.convpool: [Affine|Modulated|Normalized][Relu|LeakyRelu|Silu](ConvAvgPool|UpsampleConv)[Add][Relu|LeakyRelu|
// Tanh|Sigmoid|Silu] does what its name says.
struct Operator {
    bool upsamples;    // in front of the convolution, and does not pool
    int32_t affine;    // 1: scale and shift X by channel; 2: by image and channel, [N, C, 1...]; 3: by channel once normalized
    int32_t prologue;  // convpool_activation in front of the pooling
    bool residual;
    int32_t epilogue;  // convpool_activation of what comes last
    std::string name;
    std::vector<std::string> inputs;

    bool normalizes() const { return affine == 3; }
    bool plain() const { return affine == 0 && prologue == CONVPOOL_ACT_NONE && !residual && epilogue == CONVPOOL_ACT_NONE; }
    // allow_tf32, constant_weights and accumulation change nothing that the operator means.  The first says how a builder wants
    // float32 products to be formed; the second that W never changes in the engine's life, so that what is made of it may be
    // kept; the third how box means of half and bfloat16 may be summed.
    const std::vector<Attribute> &attributes() const;
    // The position of an attribute that the operator has in attributes().
    int position(int id) const { return upsamples && id >= kConvolution ? id - (kConvolution - 1) : id; }
};
// ConvAvgPool and its 191 fused variants, then UpsampleConv and its.  They stay to the very end of the process, as engines may.
const std::vector<Operator> &operators();

// The attributes' values, one list per attribute of `op`; of a real attribute the float's bits.  Throws where a field is
// unknown, doubled, missing, or has a wrong type, length or value.
std::vector<std::vector<int32_t>> read_attributes(const Operator &op, const Field *fields, int32_t count);

// What both runtimes' nodes do with the C API. Throws its message.
inline void check_status(convpool_status status) {
    if (status != CONVPOOL_OK) throw std::runtime_error(convpool_last_error());
}
struct DestroyPlan {
    void operator()(convpool_plan *plan) const { convpool_plan_destroy(plan); }
};
using PlanHandle = std::unique_ptr<convpool_plan, DestroyPlan>;
inline convpool_plan_properties properties_of(const convpool_plan &plan) {
    convpool_plan_properties properties{};
    properties.struct_size = sizeof properties;
    check_status(convpool_plan_info(&plan, &properties));
    return properties;
}

inline float float_of(int32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}
std::string float_text(float value);

// A window along one axis, of the pooling or the convolution.
struct AxisWindow {
    std::string name;  // of its size's attribute, with the axis
    int64_t reach;     // dilation * (size - 1) + 1
    int64_t pads;
    int32_t stride;

    // Its places over so many elements; throws where it fits nowhere.  -1 stands for an unknown size.
    int64_t places(int64_t size) const;
};

// One node, whichever runtime has it: an operator with its attributes, and what they say of windows and of the problem.
class NodeSpec {
public:
    // op: one of operators().  values: as read_attributes() gives them; throws where they deny what the operator's name says.
    NodeSpec(const Operator &op, std::vector<std::vector<int32_t>> values);

    const Operator &op() const { return *op_; }
    int32_t rank() const { return rank_; }
    // One value of attribute `id`; pads: the leading sides, then the trailing ones.
    int32_t value(int id, int i = 0) const { return values_[op_->position(id)].at(i); }
    // Values in the order of op().attributes(); a real one by its bits.
    const std::vector<std::vector<int32_t>> &values() const { return values_; }
    bool constant_weights() const { return value(kConstantWeights) != 0; }
    // Groups of channels that are normalized apart; 1 where nothing is.
    int32_t norm_groups() const { return op_->normalizes() ? value(kNormGroups) : 1; }

    void check_input_count(int64_t count) const;
    // first: kPooling or kConvolution.
    AxisWindow window(AttributeId first, int axis) const;
    // The size of AveragePool(X), or of Upsample(X), along an axis of X of so many elements; -1 where that is unknown.
    int64_t size_before_conv(int axis, int64_t size) const;
    // Sets what does not depend on the tensors' sizes, types and layouts.
    void set_attributes(convpool_problem &problem, int64_t inputs) const;

private:
    void check_name() const;

    const Operator *op_;
    std::vector<std::vector<int32_t>> values_;  // one per attribute
    int32_t rank_;
};

}  // namespace convpool::nodes

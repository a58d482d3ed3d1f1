// SPDX-License-Identifier: Apache-2.0
#include "node.h"

#include <algorithm>

namespace convpool::onnxruntime {

using nodes::kB;
using nodes::kConvolution;
using nodes::kDilations;
using nodes::kKernelShape;
using nodes::kPads;
using nodes::kPooling;
using nodes::kScale;
using nodes::kShift;
using nodes::kStrides;
using nodes::kW;
using nodes::kX;
using nodes::refuse;

namespace {

constexpr int64_t kUnknown = -1;
constexpr double kMostElements = 1099511627776.0;  // of a tensor: 2^40, the C API's own bound

bool agree(int64_t size, int64_t wanted) { return size < 0 || wanted < 0 || size == wanted; }

// Places of a window along an axis of `size` elements; kUnknown stands for an unknown size.
int64_t places(const std::string &name, int64_t size, int64_t kernel, int64_t pads, int64_t dilation, int64_t stride) {
    if (size < 0) return kUnknown;
    const int64_t reach = dilation * (kernel - 1) + 1;
    if (size > INT32_MAX || size + pads < reach)
        refuse(name + ": elements under the window", std::to_string(size) + " and " + std::to_string(pads) + " pads",
               "at least " + std::to_string(reach) + ", and fewer than 2^31");
    return (size + pads - reach) / stride + 1;
}

}  // namespace

Node::Node(const nodes::Operator &op, const AttributeSource &source)
    : op_(&op), values_(values_of(op, source)), rank_(static_cast<int>(values_[kConvolution + kKernelShape].size())) {
    if (!op.plain()) check_name();
    read_layouts(source);
}

Node::Node(const OrtApi &api, const nodes::Operator &op, const OrtKernelInfo *info) : Node(op, KernelAttributes(api, info)) {
    size_t count = 0;
    check(api, api.KernelInfo_GetInputCount()(info, &count));
    std::vector<Sizes> sizes;
    for (size_t i = 0; i < count; ++i) {
        OrtTypeInfo *type = nullptr;
        const OrtTensorTypeAndShapeInfo *tensor = nullptr;
        if (!succeeded(api, api.KernelInfo_GetInputTypeInfo()(info, i, &type))) return;  // a shape that is not known at all
        const bool has_shape = succeeded(api, api.CastTypeInfoToTensorInfo()(type, &tensor)) && tensor != nullptr;
        if (has_shape) sizes.push_back(sizes_of(api, tensor));
        api.ReleaseTypeInfo()(type);
        if (!has_shape || sizes.back().empty()) return;
    }
    output_sizes(sizes);
}

// The attributes of a fused variant say again what its name says.
void Node::check_name() const {
    using nodes::float_of;
    const std::pair<int, int32_t> said[] = {{nodes::kPrologueAffine, op_->affine},
                                            {nodes::kPrologueActivation, op_->prologue},
                                            {nodes::kResidual, op_->residual},
                                            {nodes::kActivation, op_->epilogue}};
    for (auto [id, wanted] : said)
        if (value(id) != wanted)
            refuse(op_->name + ": " + op_->attributes()[id].name, std::to_string(value(id)),
                   std::to_string(wanted) + " by the operator's name");
    const std::pair<int, int32_t> slopes[] = {{nodes::kPrologueAlpha, op_->prologue}, {nodes::kAlpha, op_->epilogue}};
    for (auto [id, activation] : slopes)
        if (activation != CONVPOOL_ACT_LEAKY_RELU && float_of(value(id)) != 0.f)
            refuse(op_->name + ": " + op_->attributes()[id].name, nodes::float_text(float_of(value(id))),
                   "0, as the operator's name has no LeakyRelu there");
}

// channels_last says how X, R and Y lie.  The functions go by permutations, which have to say the same.
void Node::read_layouts(const AttributeSource &source) {
    int64_t layouts = 0;
    const char *const name = nodes::kChannelsLastField;
    const bool there = source.number(name, layouts);
    if ((!there && source.has(name)) || layouts < 0 || layouts > 3)
        refuse(op_->name + ": " + name, there ? std::to_string(layouts) : "an attribute of another type", "0 to 3");
    x_last_ = layouts == 1 || layouts == 3;
    y_last_ = layouts == 1 || layouts == 2;
    std::vector<int64_t> same{0, 1}, to_first{0, rank_ + 1}, to_last{0};
    for (int i = 0; i < rank_; ++i) {
        same.push_back(i + 2);
        to_first.push_back(i + 1);
        to_last.push_back(i + 2);
    }
    to_last.push_back(1);
    check_perm(source, "weight_perm", to_first);
    check_perm(source, "x_perm", x_last_ ? to_first : same);
    check_perm(source, "r_perm", y_last_ ? to_first : same);
    check_perm(source, "y_perm", y_last_ ? to_last : same);
}

void Node::check_perm(const AttributeSource &source, const char *name, const std::vector<int64_t> &wanted) const {
    std::vector<int64_t> perm;
    const bool there = source.numbers(name, perm);
    if (there ? perm != wanted : source.has(name))
        refuse(op_->name + ": " + name, there ? text_of(perm) : "an attribute of another type", text_of(wanted));
}

// `wanted`: kUnknown for a size that nothing tells.
void Node::expect(const std::vector<Sizes> &sizes, int input, const Sizes &wanted) const {
    const Sizes &got = sizes[input];
    if (got.size() == wanted.size() && std::equal(got.begin(), got.end(), wanted.begin(), agree)) return;
    refuse(op_->name + ": shape of " + op_->inputs[input], text_of(got), text_of(wanted));
}

void Node::check_inputs(const std::vector<Sizes> &sizes) const {
    const size_t most = op_->inputs.size(), count = sizes.size();
    if (count != most && !(op_->plain() && count == kB))
        refuse(op_->name + ": inputs", std::to_string(count), std::to_string(most) + (op_->plain() ? ", or 2 without B" : ""));
    const size_t dimensions = static_cast<size_t>(rank_) + 2;
    for (int input : {kX, kW})
        if (sizes[input].size() != dimensions)
            refuse(op_->name + ": number of dimensions of " + op_->inputs[input], std::to_string(sizes[input].size()),
                   std::to_string(dimensions) + " for a kernel_shape of " + std::to_string(rank_));
    Sizes weights(dimensions, kUnknown);
    for (int i = 0; i < rank_; ++i) weights[1 + i] = value(kConvolution + kKernelShape, i);
    const int64_t channels = sizes[kX][channel_axis(x_last_)], group = value(nodes::kGroup), outputs = sizes[kW][0];
    if (channels >= 0 && channels % group != 0)
        refuse(op_->name + ": channels of X", std::to_string(channels), "a multiple of group " + std::to_string(group));
    if (outputs >= 0 && outputs % group != 0)
        refuse(op_->name + ": outputs of W", std::to_string(outputs), "a multiple of group " + std::to_string(group));
    if (channels >= 0) weights[rank_ + 1] = channels / group;
    expect(sizes, kW, weights);
    if (count > kB) expect(sizes, kB, {outputs});
    for (int input : {kScale, kShift})
        if (op_->affine) expect(sizes, input, {channels});
}

// In floating point, as the product may be beyond 64 bits.  A size that is not known may be 0.
void Node::check_elements(const char *tensor, const Sizes &sizes) const {
    double elements = 1;
    for (int64_t size : sizes) {
        if (size < 0) return;
        elements *= static_cast<double>(size);
    }
    if (elements > kMostElements) refuse(op_->name + ": sizes of " + tensor, text_of(sizes), "at most 2^40 elements");
}

Sizes Node::output_sizes(const std::vector<Sizes> &sizes) const {
    check_inputs(sizes);
    Sizes pooled = sizes[kX], y(static_cast<size_t>(rank_) + 2);
    y[kBatch] = sizes[kX][0];
    y[channel_axis(y_last_)] = sizes[kW][0];
    for (int i = 0; i < rank_; ++i) {
        const auto under = [&](int group, int64_t size) {
            return places(op_->name + ": " + op_->attributes()[group + kKernelShape].name + "[" + std::to_string(i) + "]", size,
                          value(group + kKernelShape, i), int64_t{value(group + kPads, i)} + value(group + kPads, i + rank_),
                          value(group + kDilations, i), value(group + kStrides, i));
        };
        int64_t &size = pooled[first_axis(x_last_) + i];
        size = under(kPooling, size);
        y[first_axis(y_last_) + i] = under(kConvolution, size);
    }
    if (op_->residual) expect(sizes, static_cast<int>(sizes.size()) - 1, y);
    check_elements("X", sizes[kX]);
    check_elements("AveragePool(X)", pooled);
    check_elements("W", sizes[kW]);
    check_elements("Y", y);
    return y;
}

convpool_problem Node::problem(const std::vector<Sizes> &sizes, int32_t dtype, bool allow_tf32) const {
    convpool_problem p{};
    p.struct_size = sizeof p;
    p.rank = rank_;
    p.x_dtype = p.w_dtype = p.y_dtype = dtype;
    p.x_layout = x_last_ ? CONVPOOL_CHANNELS_LAST : CONVPOOL_CHANNELS_FIRST;
    p.y_layout = y_last_ ? CONVPOOL_CHANNELS_LAST : CONVPOOL_CHANNELS_FIRST;
    p.allow_tf32 = allow_tf32 && dtype == CONVPOOL_F32;
    p.accumulation = value(nodes::kAccumulation);
    p.n = sizes[kX][kBatch];
    p.c = sizes[kX][channel_axis(x_last_)];
    p.m = sizes[kW][0];
    for (int i = 0; i < rank_; ++i) p.spatial[i] = sizes[kX][first_axis(x_last_) + i];
    p.group = value(nodes::kGroup);
    p.has_bias = sizes.size() > kB;
    p.has_residual = op_->residual;
    p.activation = op_->epilogue;
    p.prologue_affine = op_->affine;
    p.prologue_activation = op_->prologue;
    if (!op_->plain()) {
        p.alpha = nodes::float_of(value(nodes::kAlpha));
        p.prologue_alpha = nodes::float_of(value(nodes::kPrologueAlpha));
    }
    for (int i = 0; i < rank_; ++i) {
        p.pool_kernel[i] = value(kPooling + kKernelShape, i);
        p.pool_strides[i] = value(kPooling + kStrides, i);
        p.pool_dilations[i] = value(kPooling + kDilations, i);
        p.kernel[i] = value(kConvolution + kKernelShape, i);
        p.strides[i] = value(kConvolution + kStrides, i);
        p.dilations[i] = value(kConvolution + kDilations, i);
    }
    for (int i = 0; i < 2 * rank_; ++i) {
        p.pool_pads[i] = value(kPooling + kPads, i);
        p.pads[i] = value(kConvolution + kPads, i);
    }
    return p;
}

ConstantSizes constant_sizes(const OrtApi &api, const OrtKernelInfo *info) {
    size_t count = 0;
    check(api, api.KernelInfo_GetInputCount()(info, &count));
    if (count < kB) refuse("inputs", std::to_string(count), "X and W");
    ConstantSizes sizes(count);
    for (size_t i = 0; i < count; ++i) {
        int constant = 0;
        const OrtValue *value = nullptr;
        if (succeeded(api, api.KernelInfoGetConstantInput_tensor()(info, i, &constant, &value)) && constant != 0 &&
            value != nullptr)
            sizes[i] = sizes_of(api, value);
    }
    return sizes;
}

Inputs::Inputs(const OrtApi &api, const OrtKernelContext *context, const ConstantSizes &constants) : api_(api) {
    size_t count = 0;
    check(api, api.KernelContext_GetInputCount()(context, &count));
    for (size_t i = 0; i < count; ++i) {
        const OrtValue *value = nullptr;
        check(api, api.KernelContext_GetInput()(context, i, &value));
        if (value == nullptr && i == kB) break;  // an optional bias that is not there
        if (value == nullptr) throw std::invalid_argument("input " + std::to_string(i) + "; got none, expected a tensor");
        values_.push_back(value);
        sizes_.push_back(i < constants.size() && constants[i] ? *constants[i] : sizes_of(api, value));
    }
    if (values_.size() < kB) refuse("inputs", std::to_string(values_.size()), "X and W");
}

convpool_tensors Inputs::tensors(const convpool_problem &problem, const OrtValue *y) const {
    convpool_tensors t{};
    t.struct_size = sizeof t;
    t.x = data_of(api_, values_[kX]);
    t.w = data_of(api_, values_[kW]);
    if (problem.has_bias) t.b = data_of(api_, values_[kB]);
    if (problem.prologue_affine) {
        t.scale = data_of(api_, values_[kScale]);
        t.shift = data_of(api_, values_[kShift]);
    }
    if (problem.has_residual) t.residual = data_of(api_, values_.back());
    t.y = data_of(api_, y);
    return t;
}

}  // namespace convpool::onnxruntime

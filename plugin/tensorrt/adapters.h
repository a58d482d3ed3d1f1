// SPDX-License-Identifier: Apache-2.0
// What both adapters share: descriptors as Tensors, Y's sizes as expressions, creators. logging.h has the guard of callbacks.
#pragma once

#include <algorithm>

#include "plugin_core.h"

namespace convpool::tensorrt {

// Api: the names of one TensorRT version's interface.
#define CONVPOOL_TENSORRT_API(version)                                             \
    struct Api {                                                                   \
        using DimsExprs = version::DimsExprs;                                      \
        using Expr = version::IDimensionExpr;                                      \
        using Builder = version::IExprBuilder;                                     \
        static constexpr auto kSum = version::DimensionOperation::kSUM;            \
        static constexpr auto kProd = version::DimensionOperation::kPROD;          \
        static constexpr auto kFloorDiv = version::DimensionOperation::kFLOOR_DIV; \
        using Field = version::PluginField;                                        \
        using FieldCollection = version::PluginFieldCollection;                    \
        using FieldType = version::PluginFieldType;                                \
    };

template <typename Desc, typename Dims> Tensor tensor_of(const Desc &desc, const Dims &dims) {
    Tensor t{};
    t.type = static_cast<int32_t>(desc.type);
    t.format = static_cast<int32_t>(desc.format);
    t.rank = dims.nbDims;
    std::copy_n(dims.d, std::clamp(dims.nbDims, 0, kMaxDims), t.d);
    return t;
}

inline void expect_one_output(int32_t outputs) {
    if (outputs != 1) refuse("outputs", std::to_string(outputs), "1");
}

// Inputs and output, each as `tensor` makes it of its descriptor.  Their numbers are checked before any is read.
template <typename Desc, typename Function>
Tensors tensors_of(const PluginCore &core, const Desc *in, int32_t inputs, const Desc *out, int32_t outputs, Function &&tensor) {
    expect_one_output(outputs);
    core.check_input_count(inputs);
    Tensors tensors;
    tensors.inputs = inputs;
    for (int32_t i = 0; i < inputs; ++i) tensors.all[i] = tensor(in[i]);
    tensors.all[inputs] = tensor(out[0]);
    return tensors;
}

// Tensors of the shape at hand.
template <typename Desc>
Tensors tensors_of(const PluginCore &core, const Desc *in, int32_t inputs, const Desc *out, int32_t outputs) {
    return tensors_of(core, in, inputs, out, outputs, [](const Desc &desc) { return tensor_of(desc, desc.dims); });
}

// With the sizes that `sizes` picks.
template <typename Desc, typename Dims>
Tensors tensors_of(const PluginCore &core, const Desc *in, int32_t inputs, const Desc *out, int32_t outputs, Dims Desc::*sizes) {
    return tensors_of(core, in, inputs, out, outputs, [&](const Desc &desc) { return tensor_of(desc.desc, desc.*sizes); });
}

// supportsFormatCombination: of `in_out`, the tensors behind `position` mean nothing.
template <typename Desc, typename Function>
bool supports_format(const PluginCore &core, int32_t position, const Desc *in_out, int32_t inputs, int32_t outputs,
                     Function &&tensor) {
    expect_one_output(outputs);
    core.check_input_count(inputs);
    Tensors tensors;
    tensors.inputs = inputs;
    for (int32_t i = 0; i <= std::min(position, inputs); ++i) tensors.all[i] = tensor(in_out[i]);
    return core.supports(position, tensors);
}

// The known part of a shape while the network is made.
template <typename Api> Tensor known_sizes(const typename Api::DimsExprs &shape) {
    Tensor t{};
    t.rank = shape.nbDims;
    for (int i = 0; i < std::min(shape.nbDims, kMaxDims); ++i)
        t.d[i] = shape.d[i] != nullptr && shape.d[i]->isConstant() ? int64_t{shape.d[i]->getConstantValue()} : -1;
    return t;
}

// Sizes of the output as expressions of the input's: [N, M, ...], each spatial one two windows' places,
//     places(size) = floor((size + pads - (dilation * (kernel - 1) + 1)) / stride) + 1,
// or one's over the upsampled size.
// Throws where constant sizes contradict each other or the windows.
template <typename Api>
void output_shape(const PluginCore &core, const typename Api::DimsExprs *inputs, int32_t count, typename Api::DimsExprs &output,
                  typename Api::Builder &builder) {
    using Expr = const typename Api::Expr *;
    core.check_input_count(count);
    Tensors known;
    known.inputs = count;
    for (int i = 0; i < count; ++i) known.all[i] = known_sizes<Api>(inputs[i]);
    core.check_weights(known.all[kInputW].rank, known.all[kInputW].d);
    core.check_rank(inputs[kInputX].nbDims);
    output.nbDims = core.rank() + 2;
    output.d[0] = inputs[kInputX].d[0];
    output.d[1] = inputs[kInputW].d[0];
    for (int i = 0; i < core.rank(); ++i) {
        Expr size = inputs[kInputX].d[2 + i];
        const auto slide = [&](const AxisWindow &window) {
            Expr reach = builder.operation(Api::kSum, *size, *builder.constant(static_cast<int32_t>(window.pads - window.reach)));
            Expr steps = builder.operation(Api::kFloorDiv, *reach, *builder.constant(window.stride));
            size = builder.operation(Api::kSum, *steps, *builder.constant(1));
        };
        const int64_t convolved = core.size_before_conv(i, known.all[kInputX].d[2 + i]);
        const AxisWindow window = core.window(kConvolution, i);
        window.places(convolved);
        if (core.op().upsamples) size = builder.operation(Api::kProd, *size, *builder.constant(core.value(kUpsample, i)));
        else slide(core.window(kPooling, i));
        slide(window);
        output.d[2 + i] = size;
    }
    known.all[count] = known_sizes<Api>(output);
    core.check_residual(known);
}

inline constexpr char kVersion[] = "1";
inline constexpr char kNamespace[] = "";

template <typename Api> typename Api::FieldType field_type(const Attribute &attribute) {
    return attribute.real ? Api::FieldType::kFLOAT32 : Api::FieldType::kINT32;
}

// An operator's attributes as the fields that a creator lists; TensorRT's ONNX parser hands on no others.
template <typename Api> class FieldNames {
public:
    explicit FieldNames(const Operator &op) {
        for (const Attribute &attribute : op.attributes())
            fields_.push_back({attribute.name, nullptr, field_type<Api>(attribute), 1});
        fields_.push_back({kChannelsLastField, nullptr, Api::FieldType::kINT32, 1});
        collection_ = {static_cast<int32_t>(fields_.size()), fields_.data()};
    }
    FieldNames(const FieldNames &) = delete;  // the collection points to its own fields
    const typename Api::FieldCollection *collection() const { return &collection_; }

private:
    std::vector<typename Api::Field> fields_;
    typename Api::FieldCollection collection_{};
};

// The plugin that a creator's fields describe.
template <typename Api> PluginCore core_of(const Operator &op, const typename Api::FieldCollection *given) {
    if (given == nullptr || given->nbFields < 0 || (given->nbFields > 0 && given->fields == nullptr))
        refuse("fields", given == nullptr || given->nbFields >= 0 ? "null" : std::to_string(given->nbFields), "a collection");
    std::vector<Field> fields;
    for (int32_t i = 0; i < given->nbFields; ++i) {
        const typename Api::Field &field = given->fields[i];
        fields.push_back({field.name, field.data, static_cast<int32_t>(field.type), field.length});
    }
    return PluginCore(op, fields.data(), static_cast<int32_t>(fields.size()));
}

// One creator of each operator; they stay to the very end of the process, as TensorRT's registry does.
template <typename Creator, typename Interface> const std::vector<Interface *> &all_creators() {
    static auto &creators = *new std::vector<Creator>(operators().begin(), operators().end());
    static const auto &pointers = *[] {
        auto *all = new std::vector<Interface *>;
        for (Creator &creator : creators) all->push_back(&creator);
        return all;
    }();
    return pointers;
}

}  // namespace convpool::tensorrt

// SPDX-License-Identifier: Apache-2.0
// TensorRT's tensor descriptors, of either version, as Tensors.
#pragma once

#include "plugin_core.h"

#include <algorithm>

namespace convpool::tensorrt {

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

// Of the shape at hand.
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

}  // namespace convpool::tensorrt

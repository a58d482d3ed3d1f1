// SPDX-License-Identifier: Apache-2.0
// Y's sizes as expressions of X's and W's, for both versions of TensorRT's shape expressions.
#pragma once

#include "plugin_core.h"

#include <algorithm>

namespace convpool::tensorrt {

// What is known of a shape while the network is made.
template <typename Api> Tensor known_sizes(const typename Api::DimsExprs &shape) {
    Tensor t{};
    t.rank = shape.nbDims;
    for (int i = 0; i < std::min(shape.nbDims, kMaxDims); ++i)
        t.d[i] = shape.d[i] != nullptr && shape.d[i]->isConstant() ? int64_t{shape.d[i]->getConstantValue()} : -1;
    return t;
}

// One of the two windows along one axis.
struct AxisWindow {
    const char *name;  // of its size's attribute
    int axis;
    int64_t reach;  // dilation * (size - 1) + 1
    int64_t pads;
    int32_t stride;

    // Sizes are known in most networks; throws where the window fits nowhere.  -1 stands for an unknown size.
    int64_t places(int64_t size) const;
};
AxisWindow axis_window(const PluginCore &core, AttributeId group, int axis);

// Sizes of the output as expressions of the input's: [N, M, ...], each spatial one two windows' places,
//     places(size) = floor((size + pads - (dilation * (kernel - 1) + 1)) / stride) + 1.
// Throws where constant sizes contradict each other or the windows.  Api has the members Expr, Builder, kSum, kFloorDiv
// of one TensorRT version's interface.
template <typename Api>
void output_shape(const PluginCore &core, const typename Api::DimsExprs *inputs, int32_t count, typename Api::DimsExprs &output,
                  typename Api::Builder &builder) {
    using Expr = const typename Api::Expr *;
    core.check_input_count(count);
    Tensors known;
    known.inputs = count;
    for (int i = 0; i < count; ++i) known.all[i] = known_sizes<Api>(inputs[i]);
    core.check_weights(known.all[kW].rank, known.all[kW].d);
    core.check_rank(inputs[kX].nbDims);
    output.nbDims = core.rank() + 2;
    output.d[0] = inputs[kX].d[0];
    output.d[1] = inputs[kW].d[0];
    for (int i = 0; i < core.rank(); ++i) {
        Expr size = inputs[kX].d[2 + i];
        int64_t known_size = known.all[kX].d[2 + i];
        for (AttributeId group : {kPooling, kConvolution}) {
            const AxisWindow window = axis_window(core, group, i);
            known_size = window.places(known_size);
            Expr reach = builder.operation(Api::kSum, *size, *builder.constant(static_cast<int32_t>(window.pads - window.reach)));
            Expr steps = builder.operation(Api::kFloorDiv, *reach, *builder.constant(window.stride));
            size = builder.operation(Api::kSum, *steps, *builder.constant(1));
        }
        output.d[2 + i] = size;
    }
    known.all[count] = known_sizes<Api>(output);
    core.check_residual(known);
}

}  // namespace convpool::tensorrt

// SPDX-License-Identifier: Apache-2.0

#include <algorithm>

#include "build_hash.h"
#include "plugin_core.h"

namespace convpool::tensorrt {
namespace {

// TensorRT's numbers.
enum Type : int32_t { kFloat = 0, kHalf = 1, kBFloat16 = 7 };
enum Format : int32_t { kLinear = 0, kHwc8 = 2, kDhwc8 = 6, kHwc = 8 };

bool convpool_type(int32_t type, int32_t &dtype) {
    dtype = type == kFloat ? CONVPOOL_F32 : type == kHalf ? CONVPOOL_F16 : type == kBFloat16 ? CONVPOOL_BF16 : -1;
    return dtype >= 0;
}

std::string type_name(int32_t type) {
    static const char *const names[] = {"float", "half", "int8", "int32", "bool", "uint8", "fp8", "bfloat16", "int64"};
    return type >= 0 && type < 9 ? names[type] : "type " + std::to_string(type);
}

// TensorRT pads the channels of its 8-channel formats to a multiple of 8; the C API knows dense tensors only, so these
// formats are for channel counts that need no padding.  Sizes below 0 are unknown.
bool convpool_format(const Tensor &t, int32_t &layout) {
    layout = CONVPOOL_CHANNELS_LAST;
    const bool sixteen_bits = t.type == kHalf || t.type == kBFloat16;
    const bool chunks = t.d[1] > 0 && t.d[1] % 8 == 0;
    switch (t.format) {
    case kLinear: layout = CONVPOOL_CHANNELS_FIRST; return true;
    case kHwc8: return t.rank == 4 && sixteen_bits && chunks;
    case kDhwc8: return t.rank == 5 && sixteen_bits && chunks;
    case kHwc: return t.rank == 4 && t.type == kFloat;
    default: return false;
    }
}

// "convpool 0.2.0, build 0123456789ab for 90, CUDA 13.0"; the kernels' speed is that of this build on a device.
std::string build_identity() {
    const int32_t cuda = convpool_cuda_version();
    return std::string("convpool ") + convpool_version() + ", build " + kBuildHash + " for " + convpool_architectures() +
           ", CUDA " + std::to_string(cuda / 1000) + "." + std::to_string(cuda % 1000 / 10);
}

}  // namespace

PluginCore::PluginCore(const Operator &op, const Field *fields, int32_t count)
    : NodeSpec(op, read_attributes(op, fields, count)) {
    const std::vector<Attribute> &attributes = op.attributes();
    identity_ = build_identity() + "; " + op.name;
    for (size_t a = 0; a < attributes.size(); ++a) {
        identity_ += std::string("; ") + attributes[a].name;
        for (int32_t value : values()[a])
            identity_ += " " + (attributes[a].real ? float_text(float_of(value)) : std::to_string(value));
    }
}

void PluginCore::check_type(int32_t index, int32_t type) const {
    int32_t dtype = 0;
    if (!convpool_type(type, dtype)) refuse(op().inputs[index] + ": type", type_name(type), "float, half or bfloat16");
}

void PluginCore::check_rank(int32_t dimensions) const {
    if (dimensions != rank() + 2)
        refuse("X: number of dimensions", std::to_string(dimensions), std::to_string(rank() + 2) + ": [N, C, spatial]");
}

void PluginCore::check_weights(int32_t dimensions, const int64_t *sizes) const {
    if (dimensions != rank() + 2)
        refuse("W: number of dimensions", std::to_string(dimensions),
               std::to_string(rank() + 2) + ": [M, kernel_shape, C/group]");
    for (int i = 0; i < rank(); ++i) {
        const int32_t kernel = value(kConvolution + kKernelShape, i);
        if (sizes[1 + i] >= 0 && sizes[1 + i] != kernel)
            refuse("W: dimension " + std::to_string(1 + i), std::to_string(sizes[1 + i]),
                   "kernel_shape[" + std::to_string(i) + "] = " + std::to_string(kernel));
    }
    if (sizes[0] >= 0 && sizes[0] % value(kGroup) != 0)
        refuse("W: dimension 0", std::to_string(sizes[0]), "a multiple of group " + std::to_string(value(kGroup)));
}

void PluginCore::check_residual(const Tensors &tensors) const {
    if (!op().residual) return;
    const Tensor &r = tensors.residual(), &y = tensors.output();
    bool same = r.rank == y.rank && y.rank == rank() + 2;
    for (int i = 0; i < rank() + 2 && same; ++i) same = r.d[i] < 0 || y.d[i] < 0 || r.d[i] == y.d[i];
    if (!same) refuse("R: shape", shape_text(r), "that of Y, " + shape_text(y) + ": nothing is broadcast");
}

void PluginCore::check_run(const Tensors &tensors, const convpool_problem &problem) const {
    check_residual(tensors);
    Tensor y{};
    y.rank = rank() + 2;
    y.d[0] = problem.n;
    y.d[1] = problem.m;
    convpool_problem one = problem;
    one.n = std::max<int64_t>(problem.n, 1);  // an empty batch has its sizes all the same
    if (convpool_output_shape(&one, &y.d[2]) != CONVPOOL_OK) throw std::invalid_argument(convpool_last_error());
    bool same = tensors.output().rank == y.rank;
    for (int i = 0; i < y.rank && same; ++i) same = tensors.output().d[i] == y.d[i];
    if (!same) refuse("Y: shape", shape_text(tensors.output()), shape_text(y) + " by X, W and the attributes");
}

// True where the dtype has the prologue's slope.
bool PluginCore::takes_slope(int32_t dtype) const {
    if (op().prologue != CONVPOOL_ACT_LEAKY_RELU) return true;
    convpool_problem p{};
    p.struct_size = sizeof p;
    p.x_dtype = p.w_dtype = p.y_dtype = dtype;
    p.rank = p.n = p.c = p.m = p.group = p.spatial[0] = 1;
    p.pool_kernel[0] = p.pool_strides[0] = p.pool_dilations[0] = p.kernel[0] = p.strides[0] = p.dilations[0] = 1;
    p.prologue_activation = op().prologue;
    p.prologue_alpha = float_of(value(kPrologueAlpha));
    return convpool_output_shape(&p, nullptr) == CONVPOOL_OK;
}

// True where X, of a type and format that it may have by itself, goes with W: they share their type, or X is an image of floats,
// for which no kernel upsamples.
bool PluginCore::takes_types(const Tensor &x, const Tensor &w) const {
    if (x.type == w.type) return true;
    if (x.type != kFloat || op().upsamples || rank() != 2 || value(kGroup) != 1 || w.rank != 4) return false;
    int64_t filter = 1;
    for (int i = 1; i < 4; ++i)
        if (w.d[i] < 1 || w.d[i] > CONVPOOL_MAX_FLOAT_FILTER || (filter *= w.d[i]) > CONVPOOL_MAX_FLOAT_FILTER) return false;
    return true;
}

bool PluginCore::supports(int32_t position, const Tensors &tensors) const {
    check_input_count(tensors.inputs);
    if (position < 0 || position > tensors.inputs) refuse("position", std::to_string(position), "that of a tensor");
    const Tensor &tensor = tensors.all[position];
    int32_t dtype = 0, layout = 0;
    if (!convpool_type(tensor.type, dtype)) return false;
    if (position == kInputW ? !takes_types(tensors.all[kInputX], tensor)
                            : position > kInputW && tensor.type != tensors.all[kInputW].type)
        return false;
    const int32_t residual = op().residual ? tensors.inputs - 1 : tensors.inputs;
    if (position != kInputX && position < residual) return tensor.format == kLinear;
    // In a weakly typed network TensorRT then keeps all of them in float; in others the build fails.
    if (!takes_slope(dtype)) return false;
    const bool as_residual = position == residual || position == kInputX || tensor.format == tensors.all[residual].format;
    return as_residual && convpool_format(tensor, layout);
}

// Types, numbers of dimensions and sizes of the inputs, and the residual's format, which is the output's.
void PluginCore::check_shapes(const Tensors &tensors) const {
    check_input_count(tensors.inputs);
    const Tensor &x = tensors.all[kInputX], &w = tensors.all[kInputW], &y = tensors.output();
    for (int i = 0; i < tensors.inputs; ++i) {
        const Tensor &tensor = tensors.all[i];
        const int like = i > kInputW ? kInputW : kInputX;
        const bool beside_floats = i == kInputW && x.type == kFloat;
        check_type(i, tensor.type);
        if (tensor.type != tensors.all[like].type && !beside_floats)
            refuse(op().inputs[i] + ": type", type_name(tensor.type),
                   "that of " + op().inputs[like] + ", " + type_name(tensors.all[like].type));
        for (int d = 0; d < std::min(tensor.rank, kMaxDims); ++d)  // products of two sizes are formed below
            if (tensor.d[d] < 0 || tensor.d[d] > INT32_MAX)
                refuse(op().inputs[i] + ": dimension " + std::to_string(d), std::to_string(tensor.d[d]), "0 to 2^31 - 1");
    }
    check_rank(x.rank);
    check_weights(w.rank, w.d);
    const int64_t channels = w.d[rank() + 1] * value(kGroup);
    if (x.d[1] != channels)
        refuse("X: channels", std::to_string(x.d[1]) + " in " + shape_text(x),
               std::to_string(channels) + " by W " + shape_text(w) + " and group " + std::to_string(value(kGroup)));
    if (tensors.inputs > kInputB && (tensors.all[kInputB].rank != 1 || tensors.all[kInputB].d[0] != w.d[0]))
        refuse("B: shape", shape_text(tensors.all[kInputB]), "[" + std::to_string(w.d[0]) + "]");
    Tensor factors{};
    factors.rank = 1;
    factors.d[0] = channels;
    if (op().affine == 2) {
        factors.rank = x.rank;
        std::fill_n(factors.d, x.rank, 1);
        factors.d[0] = x.d[0];
        factors.d[1] = channels;
    }
    for (int i : {kInputScale, kInputShift})
        if (op().affine != 0 &&
            (tensors.all[i].rank != factors.rank || !std::equal(factors.d, factors.d + factors.rank, tensors.all[i].d)))
            refuse(op().inputs[i] + ": shape", shape_text(tensors.all[i]), shape_text(factors));
    if (op().residual && tensors.residual().format != y.format)
        refuse("R: format", std::to_string(tensors.residual().format), "that of Y, " + std::to_string(y.format));
}

convpool_problem PluginCore::problem(const Tensors &tensors) const {
    check_shapes(tensors);
    const Tensor &x = tensors.all[kInputX], &w = tensors.all[kInputW], &y = tensors.output();
    convpool_problem p{};
    set_attributes(p, tensors.inputs);
    convpool_type(x.type, p.x_dtype);
    convpool_type(w.type, p.w_dtype);
    p.y_dtype = p.w_dtype;
    if (!convpool_format(x, p.x_layout)) refuse("X: format", std::to_string(x.format), "linear or channels last");
    if (!convpool_format(y, p.y_layout)) refuse("Y: format", std::to_string(y.format), "linear or channels last");
    p.n = x.d[0];
    p.c = x.d[1];
    p.m = w.d[0];
    for (int i = 0; i < rank(); ++i) p.spatial[i] = x.d[2 + i];
    return p;
}

void PluginCore::check_problem(const convpool_problem &problem, int32_t inputs) const {
    check_input_count(inputs);
    convpool_problem expected = problem;
    set_attributes(expected, inputs);
    if (std::memcmp(&problem, &expected, sizeof problem) != 0)
        throw std::invalid_argument("largest problem: not one of this operator's attributes");
    if (convpool_output_shape(&problem, nullptr) != CONVPOOL_OK) throw std::invalid_argument(convpool_last_error());
}

bool same(const Tensors &a, const Tensors &b) { return std::memcmp(&a, &b, sizeof a) == 0; }

std::string shape_text(const Tensor &tensor) {
    std::string text = "[";
    for (int i = 0; i < tensor.rank && i < kMaxDims; ++i) text += (i ? ", " : "") + std::to_string(tensor.d[i]);
    return text + "]";
}

}  // namespace convpool::tensorrt

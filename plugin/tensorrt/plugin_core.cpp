#include "plugin_core.h"

#include <atomic>
#include <cstdio>
#include <cstring>
#include <stdexcept>

#include "logging.h"

namespace convpool::tensorrt {
namespace {

// TensorRT's numbers.
enum Type : int32_t { kFloat = 0, kHalf = 1, kBFloat16 = 7 };
enum Format : int32_t { kLinear = 0, kHwc8 = 2, kDhwc8 = 6, kHwc = 8 };
enum FieldType : int32_t { kFloat32Field = 1, kInt32Field = 5, kInt64Field = 10 };

[[noreturn]] void refuse(const std::string &what, const std::string &got, const std::string &expected) {
    throw std::invalid_argument(what + "; got " + got + ", expected " + expected);
}

void check(convpool_status status) {
    if (status != CONVPOOL_OK) throw std::runtime_error(convpool_last_error());
}

bool convpool_type(int32_t type, int32_t &dtype) {
    switch (type) {
    case kFloat: dtype = CONVPOOL_F32; return true;
    case kHalf: dtype = CONVPOOL_F16; return true;
    case kBFloat16: dtype = CONVPOOL_BF16; return true;
    default: return false;
    }
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

// The values; of floats their bits.
std::vector<int32_t> read_field(const Field &field, bool real) {
    std::vector<int32_t> values;
    const bool wide = field.type == kInt64Field;
    if (real ? field.type != kFloat32Field : !wide && field.type != kInt32Field)
        refuse(std::string(field.name) + ": type of the field", std::to_string(field.type), real ? "float" : "integers");
    if (field.length < 0 || (field.length > 0 && field.data == nullptr))
        refuse(std::string(field.name) + ": field", "length " + std::to_string(field.length) + " without data", "its values");
    for (int32_t i = 0; i < field.length; ++i) {
        int32_t word = 0;
        int64_t value = 0;
        const char *const data = static_cast<const char *>(field.data);  // aligned to nothing
        if (wide) {
            std::memcpy(&value, data + i * sizeof value, sizeof value);
        } else {
            std::memcpy(&word, data + i * sizeof word, sizeof word);
            value = word;
        }
        if (value < INT32_MIN || value > INT32_MAX)
            refuse(std::string(field.name) + ": value", std::to_string(value), "at most 2^31 - 1");
        values.push_back(static_cast<int32_t>(value));
    }
    return values;
}

float float_of(int32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

std::string float_text(float value) {
    char text[32];
    std::snprintf(text, sizeof text, "%.9g", value);
    return text;
}

}  // namespace

Device current_device() {
    Device device{};
    check(convpool_device(&device.cc, &device.multiprocessors, &device.shared_bytes));
    return device;
}

const std::vector<Operator> &operators() {
    static const std::vector<Operator> &all = *[] {
        const char *const activations[] = {"", "Relu", "LeakyRelu"};  // by their convpool_activation
        auto *made = new std::vector<Operator>;
        for (bool affine : {false, true})
            for (int32_t before : {CONVPOOL_ACT_NONE, CONVPOOL_ACT_RELU, CONVPOOL_ACT_LEAKY_RELU})
                for (bool residual : {false, true})
                    for (int32_t after : {CONVPOOL_ACT_NONE, CONVPOOL_ACT_RELU, CONVPOOL_ACT_LEAKY_RELU}) {
                        Operator op{affine, before, residual, after, {}, {"X", "W", "B"}};
                        op.name = std::string(affine ? "Affine" : "") + activations[before] + "ConvAvgPool" +
                                  (residual ? "Add" : "") + activations[after];
                        for (const char *name : {"scale", "shift"})
                            if (affine) op.inputs.push_back(name);
                        if (residual) op.inputs.push_back("R");
                        made->push_back(op);
                    }
        return made;
    }();
    return all;
}

const std::vector<Attribute> &Operator::attributes() const {
    constexpr int32_t kMost = 65535;  // convpool.h's own bound
    static const auto &all = *new std::vector<Attribute>{
        // to the very end, as operators()
        {"pool_kernel_shape", 1, 1, kMost, true, 0},
        {"pool_strides", 1, 1, kMost, false, 1},
        {"pool_pads", 2, 0, kMost, false, 0},
        {"pool_dilations", 1, 1, kMost, false, 1},
        {"kernel_shape", 1, 1, kMost, true, 0},
        {"strides", 1, 1, kMost, false, 1},
        {"pads", 2, 0, kMost, false, 0},
        {"dilations", 1, 1, kMost, false, 1},
        {"group", 0, 1, INT32_MAX, false, 1},
        {"allow_tf32", 0, 0, 1, false, 0},
        {"constant_weights", 0, 0, 1, false, 0},
    };
    static const auto &of_variants = *[] {
        auto *longer = new std::vector<Attribute>(all);
        longer->insert(longer->end(), {{"prologue_affine", 0, 0, 1, true, 0},
                                       {"prologue_activation", 0, 0, CONVPOOL_ACT_LEAKY_RELU, true, 0},
                                       {"prologue_alpha", 0, 0, 0, true, 0, true},
                                       {"residual", 0, 0, 1, true, 0},
                                       {"activation", 0, 0, CONVPOOL_ACT_LEAKY_RELU, true, 0},
                                       {"alpha", 0, 0, 0, true, 0, true}});
        return longer;
    }();
    return plain() ? all : of_variants;
}

PluginCore::PluginCore(const Operator &op, const Field *fields, int32_t count) : op_(&op) {
    const std::vector<Attribute> &attributes = op.attributes();
    if (count < 0 || (count > 0 && fields == nullptr)) refuse("fields", std::to_string(count), "a list");
    values_.resize(attributes.size());
    std::vector<bool> seen(attributes.size());
    for (int32_t f = 0; f < count; ++f) {
        if (fields[f].name == nullptr) refuse("fields: name of field " + std::to_string(f), "null", "a name");
        for (size_t a = 0; a < attributes.size(); ++a)
            if (std::strcmp(attributes[a].name, fields[f].name) == 0) {
                values_[a] = read_field(fields[f], attributes[a].real);
                seen[a] = true;
            }
    }
    rank_ = static_cast<int32_t>(values_[kConvolution + kKernelShape].size());
    for (size_t a = 0; a < attributes.size(); ++a)
        if (attributes[a].required && !seen[a]) refuse(attributes[a].name, "no such attribute", "one on the node");
    if (rank_ < 1 || rank_ > CONVPOOL_MAX_RANK) refuse("kernel_shape", std::to_string(rank_) + " values", "1 to 3");
    for (size_t a = 0; a < attributes.size(); ++a) {
        const Attribute &attribute = attributes[a];
        const size_t length = attribute.values == 0 ? 1 : static_cast<size_t>(attribute.values) * rank_;
        if (!seen[a]) values_[a].assign(length, attribute.fallback);
        if (values_[a].size() != length)
            refuse(attribute.name, std::to_string(values_[a].size()) + " values",
                   std::to_string(length) + " for a kernel_shape of " + std::to_string(rank_));
        for (size_t i = 0; i < length && !attribute.real; ++i)
            if (values_[a][i] < attribute.least || values_[a][i] > attribute.most)
                refuse(std::string(attribute.name) + "[" + std::to_string(i) + "]", std::to_string(values_[a][i]),
                       std::to_string(attribute.least) + " to " + std::to_string(attribute.most));
    }
    if (!op.plain()) check_name();
    identity_ = std::string("convpool ") + convpool_version() + "; " + op.name;
    for (size_t a = 0; a < attributes.size(); ++a) {
        identity_ += std::string("; ") + attributes[a].name;
        for (int32_t value : values_[a])
            identity_ += " " + (attributes[a].real ? float_text(float_of(value)) : std::to_string(value));
    }
}

// The attributes say again what the name says.
void PluginCore::check_name() const {
    struct Said {
        int id;
        int32_t value;
    };
    for (auto [id, said] : {Said{kPrologueAffine, op_->affine},
                            {kPrologueActivation, op_->before},
                            {kResidual, op_->residual},
                            {kActivation, op_->after}})
        if (value(id) != said)
            refuse(op_->name + ": " + op_->attributes()[id].name, std::to_string(value(id)),
                   std::to_string(said) + " by the operator's name");
    for (auto [id, activation] : {Said{kPrologueAlpha, op_->before}, {kAlpha, op_->after}})
        if (activation != CONVPOOL_ACT_LEAKY_RELU && float_of(value(id)) != 0.f)
            refuse(op_->name + ": " + op_->attributes()[id].name, float_text(float_of(value(id))),
                   "0, as the operator's name has no LeakyRelu there");
    if (!takes_slope(CONVPOOL_F32))
        refuse(op_->name + ": prologue_alpha", float_text(float_of(value(kPrologueAlpha))), "a finite number");
}

void PluginCore::check_input_count(int32_t count) const {
    const int32_t most = static_cast<int32_t>(op_->inputs.size());
    if (count == most || (op_->plain() && count == kB)) return;
    std::string names;
    for (const std::string &name : op_->inputs) names += (names.empty() ? "" : ", ") + name;
    refuse(op_->name + ": inputs", std::to_string(count),
           std::to_string(most) + ": " + names + (op_->plain() ? "; or 2 without B" : ""));
}

void PluginCore::check_type(int32_t index, int32_t type) const {
    int32_t dtype = 0;
    if (!convpool_type(type, dtype)) refuse(op_->inputs[index] + ": type", type_name(type), "float, half or bfloat16");
}

void PluginCore::check_rank(int32_t dimensions) const {
    if (dimensions != rank_ + 2)
        refuse("X: number of dimensions", std::to_string(dimensions), std::to_string(rank_ + 2) + ": [N, C, spatial]");
}

void PluginCore::check_weights(int32_t dimensions, const int64_t *sizes) const {
    if (dimensions != rank_ + 2)
        refuse("W: number of dimensions", std::to_string(dimensions), std::to_string(rank_ + 2) + ": [M, kernel_shape, C/group]");
    for (int i = 0; i < rank_; ++i) {
        const int32_t kernel = value(kConvolution + kKernelShape, i);
        if (sizes[1 + i] >= 0 && sizes[1 + i] != kernel)
            refuse("W: dimension " + std::to_string(1 + i), std::to_string(sizes[1 + i]),
                   "kernel_shape[" + std::to_string(i) + "] = " + std::to_string(kernel));
    }
    if (sizes[0] >= 0 && sizes[0] % value(kGroup) != 0)
        refuse("W: dimension 0", std::to_string(sizes[0]), "a multiple of group " + std::to_string(value(kGroup)));
}

void PluginCore::check_residual(const Tensor *tensors, int32_t inputs) const {
    if (!op_->residual) return;
    const Tensor &r = tensors[inputs - 1], &y = tensors[inputs];
    bool same = r.rank == y.rank;
    for (int i = 0; i < y.rank && same; ++i) same = r.d[i] < 0 || y.d[i] < 0 || r.d[i] == y.d[i];
    if (!same) refuse("R: shape", shape_text(r), "that of Y, " + shape_text(y) + ": nothing is broadcast");
}

// Whether the dtype has the prologue's slope.
bool PluginCore::takes_slope(int32_t dtype) const {
    if (op_->before != CONVPOOL_ACT_LEAKY_RELU) return true;
    convpool_problem p{};
    p.struct_size = sizeof p;
    p.dtype = dtype;
    p.rank = p.n = p.c = p.m = p.group = p.spatial[0] = 1;
    p.pool_kernel[0] = p.pool_strides[0] = p.pool_dilations[0] = p.kernel[0] = p.strides[0] = p.dilations[0] = 1;
    p.prologue_activation = op_->before;
    p.prologue_alpha = float_of(value(kPrologueAlpha));
    return convpool_output_shape(&p, nullptr) == CONVPOOL_OK;
}

// Whether X, of a type and format that it may have by itself, goes with W: they share their type, or X is an image of floats.
bool PluginCore::takes_types(const Tensor &x, const Tensor &w) const {
    if (x.type == w.type) return true;
    if (x.type != kFloat || rank_ != 2 || value(kGroup) != 1 || w.rank != 4) return false;
    int64_t filter = 1;
    for (int i = 1; i < 4; ++i)
        if (w.d[i] < 1 || (filter *= w.d[i]) > CONVPOOL_MAX_FLOAT_FILTER) return false;
    return true;
}

bool PluginCore::supports(int32_t position, const Tensor *tensors, int32_t inputs) const {
    check_input_count(inputs);
    if (position < 0 || position > inputs) refuse("position", std::to_string(position), "that of a tensor");
    const Tensor &tensor = tensors[position];
    int32_t dtype = 0, layout = 0;
    if (!convpool_type(tensor.type, dtype)) return false;
    if (position == kW ? !takes_types(tensors[kX], tensor) : position > kW && tensor.type != tensors[kW].type) return false;
    const int32_t residual = op_->residual ? inputs - 1 : inputs;
    if (position != kX && position < residual) return tensor.format == kLinear;
    // In a weakly typed network TensorRT then keeps all of them in float; in others the build fails.
    if (!takes_slope(dtype)) return false;
    const bool as_residual = position == residual || position == kX || tensor.format == tensors[residual].format;
    return as_residual && convpool_format(tensor, layout);
}

convpool_problem PluginCore::problem(const Tensor *tensors, int32_t inputs) const {
    check_input_count(inputs);
    const Tensor &x = tensors[kX], &w = tensors[kW], &y = tensors[inputs];
    for (int i = 0; i < inputs; ++i) {
        check_type(i, tensors[i].type);
        const int like = i > kW ? kW : kX;
        const bool beside_floats = i == kW && x.type == kFloat;
        if (tensors[i].type != tensors[like].type && !beside_floats)
            refuse(op_->inputs[i] + ": type", type_name(tensors[i].type),
                   "that of " + op_->inputs[like] + ", " + type_name(tensors[like].type));
    }
    check_rank(x.rank);
    check_weights(w.rank, w.d);
    const int64_t channels = w.d[rank_ + 1] * value(kGroup);
    if (x.d[1] != channels)
        refuse("X: channels", std::to_string(x.d[1]) + " in " + shape_text(x),
               std::to_string(channels) + " by W " + shape_text(w) + " and group " + std::to_string(value(kGroup)));
    if (inputs > kB && (tensors[kB].rank != 1 || tensors[kB].d[0] != w.d[0]))
        refuse("B: shape", shape_text(tensors[kB]), "[" + std::to_string(w.d[0]) + "]");
    for (int i : {kScale, kShift})
        if (op_->affine && (tensors[i].rank != 1 || tensors[i].d[0] != channels))
            refuse(op_->inputs[i] + ": shape", shape_text(tensors[i]), "[" + std::to_string(channels) + "]");
    if (op_->residual && tensors[inputs - 1].format != y.format)
        refuse("R: format", std::to_string(tensors[inputs - 1].format), "that of Y, " + std::to_string(y.format));

    convpool_problem p{};
    p.struct_size = sizeof p;
    p.rank = rank_;
    convpool_type(w.type, p.dtype);
    p.x_float = x.type != w.type;
    if (!convpool_format(x, p.x_layout)) refuse("X: format", std::to_string(x.format), "linear or channels last");
    if (!convpool_format(y, p.y_layout)) refuse("Y: format", std::to_string(y.format), "linear or channels last");
    p.allow_tf32 = value(kAllowTf32);
    p.n = x.d[0];
    p.c = x.d[1];
    p.m = w.d[0];
    p.group = value(kGroup);
    p.has_bias = inputs > kB;
    p.has_residual = op_->residual;
    p.activation = op_->after;
    p.prologue_affine = op_->affine;
    p.prologue_activation = op_->before;
    if (!op_->plain()) {
        p.alpha = float_of(value(kAlpha));
        p.prologue_alpha = float_of(value(kPrologueAlpha));
    }
    for (int i = 0; i < rank_; ++i) {
        p.spatial[i] = x.d[2 + i];
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

std::vector<int32_t> PluginCore::tactics(const std::vector<convpool_problem> &problems, const Device &device) const {
    std::vector<convpool_tactic_info> infos(convpool_tactics(nullptr, 0));
    if (!infos.empty()) infos[0].struct_size = sizeof(convpool_tactic_info);
    convpool_tactics(infos.data(), static_cast<int32_t>(infos.size()));
    std::vector<int32_t> ids;
    for (const convpool_tactic_info &info : infos) {
        bool every = true;
        for (const convpool_problem &p : problems) {
            const convpool_status status = convpool_supports(&p, info.id, device.cc, device.shared_bytes);
            if (status != CONVPOOL_UNSUPPORTED) check(status);
            every = every && status == CONVPOOL_OK;
        }
        if (every) ids.push_back(info.id);
    }
    return ids;
}

int32_t default_tactic(const convpool_problem &problem, size_t workspace_size, const Device &device) {
    int32_t tactic = 0;
    check(convpool_default_tactic(&problem, device.cc, device.multiprocessors, device.shared_bytes, workspace_size, &tactic));
    // A file of measured tactics that cannot be used is told once.
    static std::atomic_flag told = ATOMIC_FLAG_INIT;
    if (*convpool_last_error() != '\0' && !told.test_and_set()) log_error("tuned tactics", convpool_last_error());
    return tactic;
}

size_t workspace_bytes(const convpool_problem &problem, int32_t tactic, const Device &device) {
    if (tactic == 0) tactic = default_tactic(problem, SIZE_MAX, device);
    size_t bytes = 0;
    check(convpool_workspace_bytes(&problem, tactic, &bytes));
    return bytes;
}

void launch(const convpool_problem &problem, int32_t tactic, const void *const *inputs, void *output, void *workspace,
            size_t workspace_size, WeightCache &kept, void *stream) {
    convpool_tensors tensors{};
    tensors.struct_size = sizeof tensors;
    tensors.x = inputs[kX];
    tensors.w = inputs[kW];
    tensors.b = problem.has_bias ? inputs[kB] : nullptr;
    if (problem.prologue_affine) tensors.scale = inputs[kScale], tensors.shift = inputs[kShift];
    if (problem.has_residual) tensors.residual = inputs[problem.prologue_affine ? kShift + 1 : kB + 1];
    tensors.y = output;
    tensors.workspace = workspace;
    tensors.workspace_bytes = workspace == nullptr ? 0 : workspace_size;
    convpool_tensors placed = tensors;
    const bool keeps = kept.place(problem, tactic, stream, placed);
    convpool_status status = convpool_launch(&problem, tactic, &placed, stream);
    if (keeps) kept.launched(status == CONVPOOL_OK);
    if (tactic != 0 && (status == CONVPOOL_UNSUPPORTED || status == CONVPOOL_MISALIGNED))
        status = convpool_launch(&problem, 0, &tensors, stream);
    check(status);
}

std::string shape_text(const Tensor &tensor) {
    std::string text = "[";
    for (int i = 0; i < tensor.rank && i < kMaxDims; ++i) text += (i ? ", " : "") + std::to_string(tensor.d[i]);
    return text + "]";
}

}  // namespace convpool::tensorrt

// SPDX-License-Identifier: Apache-2.0

#include <array>
#include <cmath>
#include <cstdio>
#include <iterator>
#include <utility>

#include "operators.h"

namespace convpool::nodes {
namespace {

enum FieldType : int32_t { kFloat32Field = 1, kInt32Field = 5, kInt64Field = 10 };  // TensorRT's numbers

size_t length_of(const Attribute &attribute, int32_t rank) {
    return attribute.values == 0 ? 1 : static_cast<size_t>(attribute.values) * rank;
}

void check_field(const Field &field, bool real) {
    const std::string name = field.name;
    if (real ? field.type != kFloat32Field : field.type != kInt64Field && field.type != kInt32Field)
        refuse(name + ": type of the field", std::to_string(field.type), real ? "float" : "integers");
    if (field.length < 0 || (field.length > 0 && field.data == nullptr))
        refuse(name + ": field", "length " + std::to_string(field.length) + " without data", "its values");
}

// The values of a checked field; of floats their bits.
std::vector<int32_t> read_field(const Field &field) {
    const bool wide = field.type == kInt64Field;
    std::vector<int32_t> values;
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

void check_format(const Field &field) {
    check_field(field, false);
    if (field.length != 1) refuse("format; the field", std::to_string(field.length) + " values", "1");
    const int32_t format = read_field(field)[0];
    if (format != kFieldFormat)
        refuse("format of the engine's fields", std::to_string(format),
               std::to_string(kFieldFormat) + "; the engine is from another version, build it anew");
}

void check_channels_last(const Operator &op, const Field &field) {
    check_field(field, false);
    for (int32_t value : read_field(field))
        if (value != 0)
            refuse(op.name + ": " + kChannelsLastField, std::to_string(value),
                   "0 in TensorRT; convpool build makes such nodes of the original model");
}

// The field of each attribute, null where there is none.
std::vector<const Field *> match_fields(const Operator &op, const Field *fields, int32_t count) {
    const std::vector<Attribute> &attributes = op.attributes();
    if (count < 0 || (count > 0 && fields == nullptr)) refuse("fields", std::to_string(count), "a list");
    std::vector<const Field *> given(attributes.size());
    bool format_seen = false;
    for (int32_t f = 0; f < count; ++f) {
        const char *const name = fields[f].name;
        if (name == nullptr) refuse("fields: name of field " + std::to_string(f), "null", "a name");
        if (std::strcmp(name, kChannelsLastField) == 0) {
            check_channels_last(op, fields[f]);
            continue;
        }
        const bool is_format = std::strcmp(name, kFormatField) == 0;
        size_t a = 0;
        while (!is_format && a < attributes.size() && std::strcmp(attributes[a].name, name) != 0) ++a;
        if (a == attributes.size()) refuse(op.name + ": fields", "'" + std::string(name) + "'", "an attribute of the operator");
        if (is_format ? format_seen : given[a] != nullptr) refuse(std::string(name) + ": field", "it twice", "it once");
        if (is_format) {
            check_format(fields[f]);
            format_seen = true;
        } else {
            given[a] = &fields[f];
        }
    }
    return given;
}

void check_values(const Attribute &attribute, const std::vector<int32_t> &values) {
    for (size_t i = 0; i < values.size(); ++i) {
        const std::string name = std::string(attribute.name) + (attribute.real ? "" : "[" + std::to_string(i) + "]");
        if (attribute.real && std::isnan(float_of(values[i]))) refuse(name, "nan", "a number");
        if (!attribute.real && (values[i] < attribute.least || values[i] > attribute.most))
            refuse(name, std::to_string(values[i]), std::to_string(attribute.least) + " to " + std::to_string(attribute.most));
    }
}

struct NamedActivation {
    int32_t activation;  // convpool_activation
    const char *name;
    bool leads = false;  // variants have it in front, too
};
// The activations that variants have, by their numbers.
constexpr NamedActivation kActivations[] = {
    // clang-format off
    {CONVPOOL_ACT_NONE, "", true},
    {CONVPOOL_ACT_RELU, "Relu", true},
    {CONVPOOL_ACT_LEAKY_RELU, "LeakyRelu", true},
    {CONVPOOL_ACT_TANH, "Tanh"},
    {CONVPOOL_ACT_SIGMOID, "Sigmoid"},
    {CONVPOOL_ACT_SILU, "Silu", true},
    // clang-format on
};
// What scales and shifts X, by the numbers of prologue_affine.
constexpr const char *kAffines[] = {"", "Affine", "Modulated", "Normalized"};
constexpr int32_t kLastPrologue = CONVPOOL_ACT_SILU, kLastEpilogue = std::rbegin(kActivations)->activation;

}  // namespace

void refuse(const std::string &what, const std::string &got, const std::string &expected) {
    throw std::invalid_argument(what + "; got " + got + ", expected " + expected);
}

std::string float_text(float value) {
    char text[32];
    std::snprintf(text, sizeof text, "%.9g", value);
    return text;
}

const std::vector<Operator> &operators() {
    static const std::vector<Operator> &all = *[] {
        auto *made = new std::vector<Operator>;
        for (bool upsamples : {false, true})
            for (int32_t affine = 0; affine < static_cast<int32_t>(std::size(kAffines)); ++affine)
                for (const NamedActivation &prologue : kActivations)
                    for (bool residual : {false, true})
                        for (const NamedActivation &epilogue : kActivations) {
                            if (!prologue.leads) continue;
                            Operator op{upsamples,           affine, prologue.activation, residual,
                                        epilogue.activation, {},     {"X", "W", "B"}};
                            op.name = std::string(kAffines[affine]) + prologue.name +
                                      (upsamples ? "UpsampleConv" : "ConvAvgPool") + (residual ? "Add" : "") + epilogue.name;
                            for (const char *name : {"scale", "shift"})
                                if (affine != 0) op.inputs.push_back(name);
                            if (residual) op.inputs.push_back("R");
                            made->push_back(op);
                        }
        return made;
    }();
    return all;
}

const std::vector<Attribute> &Operator::attributes() const {
    constexpr int32_t kMost = 65535;    // convpool.h's own bound
    constexpr int32_t kMostCopies = 4;  // as well
    static constexpr Attribute pooling[]{{"pool_kernel_shape", 1, 1, kMost, true, 0},
                                         {"pool_strides", 1, 1, kMost, false, 1},
                                         {"pool_pads", 2, 0, kMost, false, 0},
                                         {"pool_dilations", 1, 1, kMost, false, 1}};
    static constexpr Attribute upsampling[]{{"upsample", 1, 1, kMostCopies, true, 1}};
    static constexpr Attribute others[]{
        {"kernel_shape", 1, 1, kMost, true, 0},
        {"strides", 1, 1, kMost, false, 1},
        {"pads", 2, 0, kMost, false, 0},
        {"dilations", 1, 1, kMost, false, 1},
        {"group", 0, 1, INT32_MAX, false, 1},
        {"allow_tf32", 0, 0, 1, false, 0},
        {"constant_weights", 0, 0, 1, false, 0},
        {"accumulation", 0, CONVPOOL_ACCUMULATE_DEFAULT, CONVPOOL_ACCUMULATE_PACKED, false, CONVPOOL_ACCUMULATE_DEFAULT},
    };
    static constexpr Attribute parts[]{
        {"prologue_affine", 0, 0, 3, true, 0},        {"prologue_activation", 0, 0, kLastPrologue, true, 0},
        {"prologue_alpha", 0, 0, 0, true, 0, true},   {"residual", 0, 0, 1, true, 0},
        {"activation", 0, 0, kLastEpilogue, true, 0}, {"alpha", 0, 0, 0, true, 0, true}};
    static constexpr Attribute normalization[]{{"norm_groups", 0, 1, INT32_MAX, true, 0}, {"epsilon", 0, 0, 0, true, 0, true}};
    static const auto &lists = *[] {  // to the very end, as operators()
        auto *all = new std::array<std::vector<Attribute>, 6>;
        for (size_t i = 0; i < all->size(); ++i) {
            std::vector<Attribute> &list = (*all)[i];
            const auto add = [&](const auto &more) { list.insert(list.end(), std::begin(more), std::end(more)); };
            if (i / 3) add(upsampling);
            else add(pooling);
            add(others);
            if (i % 3 > 0) add(parts);
            if (i % 3 > 1) add(normalization);
        }
        return all;
    }();
    return lists[3 * upsamples + (normalizes() ? 2 : !plain())];
}

std::vector<std::vector<int32_t>> read_attributes(const Operator &op, const Field *fields, int32_t count) {
    const std::vector<Attribute> &attributes = op.attributes();
    const std::vector<const Field *> given = match_fields(op, fields, count);
    for (size_t a = 0; a < attributes.size(); ++a) {
        if (attributes[a].required && given[a] == nullptr) refuse(attributes[a].name, "no such attribute", "one on the node");
        if (given[a] != nullptr) check_field(*given[a], attributes[a].real);
    }
    const int32_t rank = given[op.position(kConvolution + kKernelShape)]->length;
    if (rank < 1 || rank > CONVPOOL_MAX_RANK) refuse("kernel_shape", std::to_string(rank) + " values", "1 to 3");
    std::vector<std::vector<int32_t>> values(attributes.size());
    for (size_t a = 0; a < attributes.size(); ++a) {
        const size_t length = length_of(attributes[a], rank);
        if (given[a] == nullptr) {
            values[a].assign(length, attributes[a].default_value);
            continue;
        }
        if (static_cast<size_t>(given[a]->length) != length)  // before any of them is read
            refuse(attributes[a].name, std::to_string(given[a]->length) + " values",
                   std::to_string(length) + " for a kernel_shape of " + std::to_string(rank));
        values[a] = read_field(*given[a]);
        check_values(attributes[a], values[a]);
    }
    return values;
}

NodeSpec::NodeSpec(const Operator &op, std::vector<std::vector<int32_t>> values)
    : op_(&op), values_(std::move(values)),
      rank_(static_cast<int32_t>(values_[op.position(kConvolution + kKernelShape)].size())) {
    if (!op.plain()) check_name();
}

// The attributes of a fused variant say again what its name says.
void NodeSpec::check_name() const {
    const std::pair<int, int32_t> said[] = {{kPrologueAffine, op_->affine},
                                            {kPrologueActivation, op_->prologue},
                                            {kResidual, op_->residual},
                                            {kActivation, op_->epilogue}};
    auto name = [&](int id) { return op_->name + ": " + op_->attributes()[op_->position(id)].name; };
    for (auto [id, wanted] : said)
        if (value(id) != wanted) refuse(name(id), std::to_string(value(id)), std::to_string(wanted) + " by the operator's name");
    const std::pair<int, int32_t> slopes[] = {{kPrologueAlpha, op_->prologue}, {kAlpha, op_->epilogue}};
    for (auto [id, activation] : slopes)
        if (activation != CONVPOOL_ACT_LEAKY_RELU && float_of(value(id)) != 0.f)
            refuse(name(id), float_text(float_of(value(id))), "0, as the operator's name has no LeakyRelu there");
    if (const float slope = float_of(value(kPrologueAlpha)); !std::isfinite(slope))
        refuse(name(kPrologueAlpha), float_text(slope), "a finite number");
    if (const float epsilon = op_->normalizes() ? float_of(value(kEpsilon)) : 0.f; !std::isfinite(epsilon) || epsilon < 0)
        refuse(name(kEpsilon), float_text(epsilon), "a finite number of at least 0");
}

void NodeSpec::check_input_count(int64_t count) const {
    const auto most = static_cast<int64_t>(op_->inputs.size());
    if (count == most || (op_->plain() && count == kInputB)) return;
    std::string names;
    for (const std::string &name : op_->inputs) names += (names.empty() ? "" : ", ") + name;
    refuse(op_->name + ": inputs", std::to_string(count),
           std::to_string(most) + ": " + names + (op_->plain() ? "; or 2 without B" : ""));
}

AxisWindow NodeSpec::window(AttributeId first, int axis) const {
    const int64_t reach = int64_t{value(first + kDilations, axis)} * (value(first + kKernelShape, axis) - 1) + 1;
    const std::string name =
        op_->name + ": " + op_->attributes()[op_->position(first + kKernelShape)].name + "[" + std::to_string(axis) + "]";
    if (reach > INT32_MAX) refuse(name + ": window", std::to_string(reach) + " elements", "at most 2^31 - 1");
    return {name, reach, int64_t{value(first + kPads, axis)} + value(first + kPads, axis + rank_), value(first + kStrides, axis)};
}

int64_t AxisWindow::places(int64_t size) const {
    if (size < 0) return -1;
    if (size > INT32_MAX || size + pads < reach)
        refuse(name + ": elements under the window", std::to_string(size) + " and " + std::to_string(pads) + " pads",
               "at least " + std::to_string(reach) + ", and fewer than 2^31");
    return (size + pads - reach) / stride + 1;
}

int64_t NodeSpec::size_before_conv(int axis, int64_t size) const {
    if (!op_->upsamples) return window(kPooling, axis).places(size);
    if (size == 0 || size > INT32_MAX)
        refuse(op_->name + ": dimension " + std::to_string(2 + axis) + " of X", std::to_string(size), "1 to 2^31 - 1 elements");
    return size < 0 ? -1 : size * value(kUpsample, axis);
}

void NodeSpec::set_attributes(convpool_problem &p, int64_t inputs) const {
    p.struct_size = sizeof p;
    p.rank = rank_;
    p.allow_tf32 = value(kAllowTf32);
    p.accumulation = value(kAccumulation);
    p.group = value(kGroup);
    p.has_bias = inputs > kInputB;
    p.has_residual = op_->residual;
    p.activation = op_->epilogue;
    p.prologue_affine = op_->affine;
    p.prologue_activation = op_->prologue;
    if (!op_->plain()) {
        p.alpha = float_of(value(kAlpha));
        p.prologue_alpha = float_of(value(kPrologueAlpha));
    }
    if (op_->normalizes()) {
        p.prologue_groups = value(kNormGroups);
        p.prologue_epsilon = float_of(value(kEpsilon));
    }
    for (int i = 0; i < rank_; ++i) {
        p.upsample[i] = op_->upsamples ? value(kUpsample, i) : 0;
        p.pool_kernel[i] = op_->upsamples ? 1 : value(kPooling + kKernelShape, i);
        p.pool_strides[i] = op_->upsamples ? 1 : value(kPooling + kStrides, i);
        p.pool_dilations[i] = op_->upsamples ? 1 : value(kPooling + kDilations, i);
        p.kernel[i] = value(kConvolution + kKernelShape, i);
        p.strides[i] = value(kConvolution + kStrides, i);
        p.dilations[i] = value(kConvolution + kDilations, i);
    }
    for (int i = 0; i < 2 * rank_; ++i) {
        p.pool_pads[i] = op_->upsamples ? 0 : value(kPooling + kPads, i);
        p.pads[i] = value(kConvolution + kPads, i);
    }
}

}  // namespace convpool::nodes

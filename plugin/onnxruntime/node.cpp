// SPDX-License-Identifier: Apache-2.0

#include "node.h"

#include <algorithm>

namespace convpool::onnxruntime {

void check(const OrtApi &api, OrtStatus *status) {
    if (status == nullptr) return;
    const std::string message = api.GetErrorMessage()(status);
    api.ReleaseStatus()(status);
    throw std::runtime_error(message);
}

bool succeeded(const OrtApi &api, OrtStatus *status) {
    if (status == nullptr) return true;
    api.ReleaseStatus()(status);
    return false;
}

std::string text_of(const Sizes &sizes) {
    std::string text = "[";
    for (size_t i = 0; i < sizes.size(); ++i) text += (i ? ", " : "") + (sizes[i] < 0 ? "?" : std::to_string(sizes[i]));
    return text + "]";
}

Sizes sizes_of(const OrtApi &api, const OrtTensorTypeAndShapeInfo *info) {
    size_t count = 0;
    check(api, api.GetDimensionsCount()(info, &count));
    Sizes sizes(count);
    check(api, api.GetDimensions()(info, sizes.data(), count));
    return sizes;
}

Sizes sizes_of(const OrtApi &api, const OrtValue *value) {
    OrtTensorTypeAndShapeInfo *info = nullptr;
    check(api, api.GetTensorTypeAndShape()(value, &info));
    const ShapeInfoOwner owner(api, info);
    return sizes_of(api, info);
}

void *data_of(const OrtApi &api, const OrtValue *value) {
    void *data = nullptr;
    check(api, api.GetTensorMutableData()(const_cast<OrtValue *>(value), &data));
    return data;
}

DeviceMemory::DeviceMemory(const OrtApi &api, const OrtKernelContext *context, const OrtMemoryInfo *info, OrtAllocator *allocator,
                           size_t bytes)
    : api_(api), allocator_(allocator) {
    if (bytes > 0) check(api, api.KernelContext_GetScratchBuffer()(context, info, bytes, &memory_));
}

DeviceMemory::DeviceMemory(const OrtApi &api, OrtAllocator *allocator, size_t bytes) : api_(api), allocator_(allocator) {
    if (!succeeded(api, api.AllocatorAlloc()(allocator, bytes, &memory_))) memory_ = nullptr;
}

DeviceMemory::~DeviceMemory() {
    if (memory_ != nullptr) succeeded(api_, api_.AllocatorFree()(allocator_, memory_));
}

namespace {

constexpr size_t kMostValues = 64;  // no attribute of these operators has more

enum FieldType : int32_t { kFloatField = 1, kInt64Field = 10 };  // of operators.cpp

class KernelAttributes final : public AttributeSource {
public:
    KernelAttributes(const OrtApi &api, const OrtKernelInfo *info) : api_(api), info_(info) {}
    bool number(const char *name, int64_t &value) const override {
        return succeeded(api_, api_.KernelInfoGetAttribute_int64()(info_, name, &value));
    }
    bool numbers(const char *name, std::vector<int64_t> &values) const override {
        return list(api_.KernelInfoGetAttributeArray_int64(), api_.KernelInfoGetAttribute_int64(), name, values);
    }
    bool real(const char *name, float &value) const override {
        return succeeded(api_, api_.KernelInfoGetAttribute_float()(info_, name, &value));
    }
    bool reals(const char *name, std::vector<float> &values) const override {
        return list(api_.KernelInfoGetAttributeArray_float(), api_.KernelInfoGetAttribute_float(), name, values);
    }
    bool has(const char *name) const override {
        int64_t value = 0;
        float real_value = 0;
        size_t size = 0;
        std::vector<int64_t> values;
        std::vector<float> real_values;
        return number(name, value) || numbers(name, values) || real(name, real_value) || reals(name, real_values) ||
               succeeded(api_, api_.KernelInfoGetAttribute_string()(info_, name, nullptr, &size));
    }

private:
    template <class Get, class GetOne, class Value>
    bool list(Get get, GetOne get_one, const char *name, std::vector<Value> &values) const {
        size_t count = 0;
        if (!succeeded(api_, get(info_, name, nullptr, &count))) return false;
        values.resize(count);
        Value value = 0;
        if (count == 0) return !succeeded(api_, get_one(info_, name,
                                                        &value));  // one by itself passes for a list of none
        return succeeded(api_, get(info_, name, values.data(), &count));
    }

    const OrtApi &api_;
    const OrtKernelInfo *info_;
};

class InferenceAttributes final : public AttributeSource {
public:
    InferenceAttributes(const OrtApi &api, const OrtShapeInferContext *context) : api_(api), context_(context) {}
    bool number(const char *name, int64_t &value) const override { return read(name, kIntAttribute, &value, 1) >= 0; }
    bool numbers(const char *name, std::vector<int64_t> &values) const override { return list(name, kIntsAttribute, values); }
    bool real(const char *name, float &value) const override { return read(name, kFloatAttribute, &value, 1) >= 0; }
    bool reals(const char *name, std::vector<float> &values) const override { return list(name, kFloatsAttribute, values); }
    bool has(const char *name) const override { return find(name) != nullptr; }

private:
    const OrtOpAttr *find(const char *name) const {
        const OrtOpAttr *attribute = nullptr;
        return succeeded(api_, api_.ShapeInferContext_GetAttribute()(context_, name, &attribute)) ? attribute : nullptr;
    }
    // How many of at most `count` values there are; -1 where there is no such attribute.
    template <class Value> int64_t read(const char *name, AttributeType type, Value *values, size_t count) const {
        size_t bytes = 0;
        const OrtOpAttr *const attribute = find(name);
        if (attribute == nullptr || !succeeded(api_, api_.ReadOpAttr()(attribute, type, values, count * sizeof(Value), &bytes)))
            return -1;
        return static_cast<int64_t>(bytes / sizeof(Value));
    }
    template <class Value> bool list(const char *name, AttributeType type, std::vector<Value> &values) const {
        values.resize(kMostValues);
        const int64_t count = read(name, type, values.data(), kMostValues);
        values.resize(static_cast<size_t>(std::max<int64_t>(count, 0)));
        return count >= 0;
    }

    const OrtApi &api_;
    const OrtShapeInferContext *context_;
};

// The values of an operator's attributes, one list per entry of op.attributes(); of a real attribute the float's bits.
// Throws where one is missing, or has a wrong type, length or value.
std::vector<std::vector<int32_t>> values_of(const nodes::Operator &op, const AttributeSource &source) {
    const std::vector<nodes::Attribute> &attributes = op.attributes();
    std::vector<std::vector<int64_t>> numbers(attributes.size());
    std::vector<float> reals(attributes.size());
    std::vector<nodes::Field> fields;
    for (size_t a = 0; a < attributes.size(); ++a) {
        const nodes::Attribute &attribute = attributes[a];
        bool there = false;
        if (attribute.real) {
            there = source.real(attribute.name, reals[a]);
        } else if (attribute.values > 0) {
            there = source.numbers(attribute.name, numbers[a]);
        } else {
            numbers[a].resize(1);
            there = source.number(attribute.name, numbers[a][0]);
        }
        if (!there && source.has(attribute.name))
            nodes::refuse(op.name + ": " + attribute.name, "an attribute of another type",
                          attribute.real         ? "a float"
                          : attribute.values > 0 ? "integers"
                                                 : "an integer");
        if (!there) continue;
        if (attribute.real) fields.push_back({attribute.name, &reals[a], kFloatField, 1});
        else fields.push_back({attribute.name, numbers[a].data(), kInt64Field, static_cast<int32_t>(numbers[a].size())});
    }
    return nodes::read_attributes(op, fields.data(), static_cast<int32_t>(fields.size()));
}

using namespace nodes;

constexpr int64_t kUnknown = -1;
constexpr double kMostElements = 1099511627776.0;  // of a tensor: 2^40, the C API's own bound

bool agree(int64_t size, int64_t wanted) { return size < 0 || wanted < 0 || size == wanted; }

}  // namespace

Node::Node(const nodes::Operator &op, const AttributeSource &source) : NodeSpec(op, values_of(op, source)) {
    read_layouts(source);
}

Node::Node(const OrtApi &api, const nodes::Operator &op, const OrtShapeInferContext *context)
    : Node(op, InferenceAttributes(api, context)) {}

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

// channels_last says how X, R and Y lie.  The functions go by permutations, which have to say the same.
void Node::read_layouts(const AttributeSource &source) {
    int64_t layouts = 0;
    const char *const name = nodes::kChannelsLastField;
    const bool there = source.number(name, layouts);
    if ((!there && source.has(name)) || layouts < 0 || layouts > 3)
        refuse(op().name + ": " + name, there ? std::to_string(layouts) : "an attribute of another type", "0 to 3");
    x_last_ = layouts == 1 || layouts == 3;
    y_last_ = layouts == 1 || layouts == 2;
    std::vector<int64_t> same{0, 1}, to_first{0, rank() + 1}, to_last{0};
    for (int i = 0; i < rank(); ++i) {
        same.push_back(i + 2);
        to_first.push_back(i + 1);
        to_last.push_back(i + 2);
    }
    to_last.push_back(1);
    if (op().upsamples) check_scales(source);
    check_perm(source, "weight_perm", to_first);
    check_perm(source, "x_perm", x_last_ ? to_first : same);
    check_perm(source, "r_perm", y_last_ ? to_first : same);
    check_perm(source, "y_perm", y_last_ ? to_last : same);
}

// The function's Resize goes by scales.
void Node::check_scales(const AttributeSource &source) const {
    const char *const name = nodes::kScalesField;
    std::vector<float> scales, wanted{1, 1};
    for (int i = 0; i < rank(); ++i) wanted.push_back(static_cast<float>(value(nodes::kUpsample, i)));
    const bool there = source.reals(name, scales);
    if (there ? scales == wanted : !source.has(name)) return;
    std::string got;
    for (float scale : scales) got += (got.empty() ? "" : ", ") + nodes::float_text(scale);
    refuse(op().name + ": " + name, there ? "[" + got + "]" : "an attribute of another type",
           "1, 1, then " + std::string("upsample"));
}

void Node::check_perm(const AttributeSource &source, const char *name, const std::vector<int64_t> &wanted) const {
    std::vector<int64_t> perm;
    const bool there = source.numbers(name, perm);
    if (there ? perm != wanted : source.has(name))
        refuse(op().name + ": " + name, there ? text_of(perm) : "an attribute of another type", text_of(wanted));
}

// `wanted`: kUnknown for a size that nothing tells.
void Node::expect(const std::vector<Sizes> &sizes, int input, const Sizes &wanted) const {
    const Sizes &got = sizes[input];
    if (got.size() == wanted.size() && std::equal(got.begin(), got.end(), wanted.begin(), agree)) return;
    refuse(op().name + ": shape of " + op().inputs[input], text_of(got), text_of(wanted));
}

void Node::check_inputs(const std::vector<Sizes> &sizes) const {
    const size_t count = sizes.size();
    check_input_count(static_cast<int64_t>(count));
    const size_t dimensions = static_cast<size_t>(rank()) + 2;
    for (int input : {kInputX, kInputW})
        if (sizes[input].size() != dimensions)
            refuse(op().name + ": number of dimensions of " + op().inputs[input], std::to_string(sizes[input].size()),
                   std::to_string(dimensions) + " for a kernel_shape of " + std::to_string(rank()));
    Sizes weights(dimensions, kUnknown);
    for (int i = 0; i < rank(); ++i) weights[1 + i] = value(kConvolution + kKernelShape, i);
    const int64_t channels = sizes[kInputX][channel_axis(x_last_)], group = value(nodes::kGroup), outputs = sizes[kInputW][0];
    for (auto [name, parts] : {std::pair{"group ", group}, {"norm_groups ", norm_groups()}})
        if (channels >= 0 && channels % parts != 0)
            refuse(op().name + ": channels of X", std::to_string(channels), "a multiple of " + (name + std::to_string(parts)));
    if (outputs >= 0 && outputs % group != 0)
        refuse(op().name + ": outputs of W", std::to_string(outputs), "a multiple of group " + std::to_string(group));
    if (channels >= 0) weights[rank() + 1] = channels / group;
    expect(sizes, kInputW, weights);
    if (count > kInputB) expect(sizes, kInputB, {outputs});
    Sizes factors{channels};
    if (op().affine == 2) {
        factors.assign(dimensions, 1);
        factors[0] = sizes[kInputX][kBatch];
        factors[1] = channels;
    }
    for (int input : {kInputScale, kInputShift})
        if (op().affine != 0) expect(sizes, input, factors);
}

// In floating point, as the product may be beyond 64 bits.  A size that is not known may be 0.
void Node::check_elements(const char *tensor, const Sizes &sizes) const {
    double elements = 1;
    for (int64_t size : sizes) {
        if (size < 0) return;
        elements *= static_cast<double>(size);
    }
    if (elements > kMostElements) refuse(op().name + ": sizes of " + tensor, text_of(sizes), "at most 2^40 elements");
}

Sizes Node::output_sizes(const std::vector<Sizes> &sizes) const {
    check_inputs(sizes);
    Sizes before = sizes[kInputX], y(static_cast<size_t>(rank()) + 2);
    y[kBatch] = sizes[kInputX][0];
    y[channel_axis(y_last_)] = sizes[kInputW][0];
    for (int i = 0; i < rank(); ++i) {
        int64_t &size = before[first_axis(x_last_) + i];
        size = size_before_conv(i, size);
        y[first_axis(y_last_) + i] = window(kConvolution, i).places(size);
    }
    if (op().residual) expect(sizes, static_cast<int>(sizes.size()) - 1, y);
    check_elements("X", sizes[kInputX]);
    check_elements(op().upsamples ? "Upsample(X)" : "AveragePool(X)", before);
    check_elements("W", sizes[kInputW]);
    check_elements("Y", y);
    return y;
}

convpool_problem Node::problem(const std::vector<Sizes> &sizes, int32_t dtype, bool allow_tf32) const {
    convpool_problem p{};
    set_attributes(p, static_cast<int64_t>(sizes.size()));
    p.x_dtype = p.w_dtype = p.y_dtype = dtype;
    p.x_layout = x_last_ ? CONVPOOL_CHANNELS_LAST : CONVPOOL_CHANNELS_FIRST;
    p.y_layout = y_last_ ? CONVPOOL_CHANNELS_LAST : CONVPOOL_CHANNELS_FIRST;
    p.allow_tf32 = allow_tf32 && dtype == CONVPOOL_F32;
    p.n = sizes[kInputX][kBatch];
    p.c = sizes[kInputX][channel_axis(x_last_)];
    p.m = sizes[kInputW][0];
    for (int i = 0; i < rank(); ++i) p.spatial[i] = sizes[kInputX][first_axis(x_last_) + i];
    return p;
}

ConstantSizes constant_sizes(const OrtApi &api, const OrtKernelInfo *info) {
    size_t count = 0;
    check(api, api.KernelInfo_GetInputCount()(info, &count));
    if (count < kInputB) refuse("inputs", std::to_string(count), "X and W");
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
        if (value == nullptr && i == kInputB) break;  // an optional bias that is not there
        if (value == nullptr) throw std::invalid_argument("input " + std::to_string(i) + "; got none, expected a tensor");
        values_.push_back(value);
        sizes_.push_back(i < constants.size() && constants[i] ? *constants[i] : sizes_of(api, value));
    }
    if (values_.size() < kInputB) refuse("inputs", std::to_string(values_.size()), "X and W");
}

convpool_tensors Inputs::pointers(const convpool_problem &problem, const OrtValue *y) const {
    convpool_tensors t{};
    t.struct_size = sizeof t;
    t.x = data_of(api_, values_[kInputX]);
    t.w = data_of(api_, values_[kInputW]);
    if (problem.has_bias) t.b = data_of(api_, values_[kInputB]);
    if (problem.prologue_affine) {
        t.scale = data_of(api_, values_[kInputScale]);
        t.shift = data_of(api_, values_[kInputShift]);
    }
    if (problem.has_residual) t.residual = data_of(api_, values_.back());
    t.y = data_of(api_, y);
    return t;
}

}  // namespace convpool::onnxruntime

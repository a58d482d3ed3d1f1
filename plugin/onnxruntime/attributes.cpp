// SPDX-License-Identifier: Apache-2.0
#include "attributes.h"

namespace convpool::onnxruntime {
namespace {

constexpr size_t kMostValues = 64;  // no attribute of these operators has more

enum FieldType : int32_t { kFloatField = 1, kInt64Field = 10 };  // of operators.h

}  // namespace

bool KernelAttributes::number(const char *name, int64_t &value) const {
    return succeeded(api_, api_.KernelInfoGetAttribute_int64()(info_, name, &value));
}

bool KernelAttributes::numbers(const char *name, std::vector<int64_t> &values) const {
    size_t count = 0;
    if (!succeeded(api_, api_.KernelInfoGetAttributeArray_int64()(info_, name, nullptr, &count))) return false;
    values.resize(count);
    int64_t value = 0;
    if (count == 0) return !number(name, value);  // a number by itself passes for a list of none
    return succeeded(api_, api_.KernelInfoGetAttributeArray_int64()(info_, name, values.data(), &count));
}

bool KernelAttributes::real(const char *name, float &value) const {
    return succeeded(api_, api_.KernelInfoGetAttribute_float()(info_, name, &value));
}

bool KernelAttributes::has(const char *name) const {
    int64_t value = 0;
    float real_value = 0;
    size_t size = 0;
    std::vector<int64_t> values;
    return number(name, value) || numbers(name, values) || real(name, real_value) ||
           succeeded(api_, api_.KernelInfoGetAttributeArray_float()(info_, name, nullptr, &size)) ||
           succeeded(api_, api_.KernelInfoGetAttribute_string()(info_, name, nullptr, &size));
}

const OrtOpAttr *InferenceAttributes::find(const char *name) const {
    const OrtOpAttr *attribute = nullptr;
    return succeeded(api_, api_.ShapeInferContext_GetAttribute()(context_, name, &attribute)) ? attribute : nullptr;
}

bool InferenceAttributes::number(const char *name, int64_t &value) const {
    size_t bytes = 0;
    const OrtOpAttr *const attribute = find(name);
    return attribute != nullptr && succeeded(api_, api_.ReadOpAttr()(attribute, kIntAttribute, &value, sizeof value, &bytes));
}

bool InferenceAttributes::numbers(const char *name, std::vector<int64_t> &values) const {
    const OrtOpAttr *const attribute = find(name);
    if (attribute == nullptr) return false;
    size_t bytes = 0;
    values.resize(kMostValues);
    if (!succeeded(api_, api_.ReadOpAttr()(attribute, kIntsAttribute, values.data(), kMostValues * sizeof(int64_t), &bytes)))
        return false;
    values.resize(bytes / sizeof(int64_t));
    return true;
}

bool InferenceAttributes::real(const char *name, float &value) const {
    size_t bytes = 0;
    const OrtOpAttr *const attribute = find(name);
    return attribute != nullptr && succeeded(api_, api_.ReadOpAttr()(attribute, kFloatAttribute, &value, sizeof value, &bytes));
}

bool InferenceAttributes::has(const char *name) const { return find(name) != nullptr; }

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

}  // namespace convpool::onnxruntime

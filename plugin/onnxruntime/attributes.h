// SPDX-License-Identifier: Apache-2.0
// A node's attributes, as onnxruntime gives them while shapes are inferred and when a kernel is made.
#pragma once

#include "api.h"
#include "nodes/operators.h"

#include <cstdint>
#include <string>
#include <vector>

namespace convpool::onnxruntime {

class AttributeSource {
public:
    virtual ~AttributeSource() = default;
    // Each false where the node has no such attribute, or one of another type.
    virtual bool number(const char *name, int64_t &value) const = 0;
    virtual bool numbers(const char *name, std::vector<int64_t> &values) const = 0;
    virtual bool real(const char *name, float &value) const = 0;
    // Whether there is an attribute of the name, of any type.
    virtual bool has(const char *name) const = 0;
};

class KernelAttributes final : public AttributeSource {
public:
    KernelAttributes(const OrtApi &api, const OrtKernelInfo *info) : api_(api), info_(info) {}
    bool number(const char *name, int64_t &value) const override;
    bool numbers(const char *name, std::vector<int64_t> &values) const override;
    bool real(const char *name, float &value) const override;
    bool has(const char *name) const override;

private:
    const OrtApi &api_;
    const OrtKernelInfo *info_;
};

class InferenceAttributes final : public AttributeSource {
public:
    InferenceAttributes(const OrtApi &api, const OrtShapeInferContext *context) : api_(api), context_(context) {}
    bool number(const char *name, int64_t &value) const override;
    bool numbers(const char *name, std::vector<int64_t> &values) const override;
    bool real(const char *name, float &value) const override;
    bool has(const char *name) const override;

private:
    const OrtOpAttr *find(const char *name) const;

    const OrtApi &api_;
    const OrtShapeInferContext *context_;
};

// The values of an operator's attributes, one list per entry of op.attributes(); of a real attribute the float's bits.
// Throws where one is missing, or has a wrong type, length or value.
std::vector<std::vector<int32_t>> values_of(const nodes::Operator &op, const AttributeSource &source);

}  // namespace convpool::onnxruntime

// SPDX-License-Identifier: Apache-2.0
// A node of ai.convpool in onnxruntime: its attributes, and what they say of shapes.  First onnxruntime's objects in C++: statuses as
// exceptions, shapes and memory with owners.
#pragma once

#include <exception>
#include <new>
#include <optional>
#include <utility>

#include "declared/c_api.h"
#include "nodes/operators.h"

namespace convpool::onnxruntime {

// Throws the status's message; frees the status.
void check(const OrtApi &api, OrtStatus *status);
// True where it is none; frees it.
bool succeeded(const OrtApi &api, OrtStatus *status);

// Runs a callback's body; nothing may be thrown into onnxruntime, so an exception becomes a status with its message.
template <typename Body> OrtStatus *guarded(const OrtApi &api, Body &&body) noexcept {
    try {
        std::forward<Body>(body)();
        return nullptr;
    } catch (const std::invalid_argument &error) {
        return api.CreateStatus()(kInvalidArgument, error.what());
    } catch (const std::bad_alloc &) {
        return api.CreateStatus()(kFail, "convpool: host memory; got none for a node's intermediate sums");
    } catch (const std::exception &error) {
        return api.CreateStatus()(kFail, error.what());
    } catch (...) {
        return api.CreateStatus()(kFail, "convpool: unknown exception");
    }
}

// Sizes of a tensor; -1 for one that is unknown before a run.
using Sizes = std::vector<int64_t>;
std::string text_of(const Sizes &sizes);

// Releases a tensor's type and shape.
class ShapeInfoOwner {
public:
    ShapeInfoOwner(const OrtApi &api, OrtTensorTypeAndShapeInfo *info) : api_(api), info_(info) {}
    ~ShapeInfoOwner() { api_.ReleaseTensorTypeAndShapeInfo()(info_); }
    ShapeInfoOwner(const ShapeInfoOwner &) = delete;

private:
    const OrtApi &api_;
    OrtTensorTypeAndShapeInfo *info_;
};

Sizes sizes_of(const OrtApi &api, const OrtTensorTypeAndShapeInfo *info);
Sizes sizes_of(const OrtApi &api, const OrtValue *value);
void *data_of(const OrtApi &api, const OrtValue *value);

// Device memory, from the provider's allocator.
class DeviceMemory {
public:
    // For one call, from the arena, on the call's stream. allocator: the context's for the info, which takes it back.
    DeviceMemory(const OrtApi &api, const OrtKernelContext *context, const OrtMemoryInfo *info, OrtAllocator *allocator,
                 size_t bytes);
    // For as long as a kernel.
    DeviceMemory(const OrtApi &api, OrtAllocator *allocator, size_t bytes);
    ~DeviceMemory();
    DeviceMemory(const DeviceMemory &) = delete;

    void *get() const { return memory_; }  // null for no bytes, or of a kernel's if there were none left

private:
    const OrtApi &api_;
    OrtAllocator *allocator_;
    void *memory_ = nullptr;
};

class AttributeSource {
public:
    virtual ~AttributeSource() = default;
    // Each false where the node has no such attribute, or one of another type.
    virtual bool number(const char *name, int64_t &value) const = 0;
    virtual bool numbers(const char *name, std::vector<int64_t> &values) const = 0;
    virtual bool real(const char *name, float &value) const = 0;
    virtual bool reals(const char *name, std::vector<float> &values) const = 0;
    // True where there is an attribute of the name, of any type.
    virtual bool has(const char *name) const = 0;
};

class Node : public nodes::NodeSpec {
public:
    Node(const nodes::Operator &op, const AttributeSource &source);
    // Reads a kernel's node: also refuses inputs whose sizes, as far as they are known, contradict the attributes.
    Node(const OrtApi &api, const nodes::Operator &op, const OrtKernelInfo *info);
    Node(const OrtApi &api, const nodes::Operator &op, const OrtShapeInferContext *context);

    // Y's sizes, -1 where the inputs do not tell.  sizes: of the inputs in order, unknown ones -1; the operator's optional
    // bias may be absent.
    Sizes output_sizes(const std::vector<Sizes> &sizes) const;
    static constexpr int kBatch = 0;  // the axis
    // The node as the C API knows it, on inputs of these sizes.  dtype: convpool_dtype of all tensors.
    convpool_problem problem(const std::vector<Sizes> &sizes, int32_t dtype, bool allow_tf32) const;

    bool allow_tf32() const { return value(nodes::kAllowTf32) != 0; }

private:
    void read_layouts(const AttributeSource &source);
    void check_scales(const AttributeSource &source) const;
    void check_perm(const AttributeSource &source, const char *name, const std::vector<int64_t> &wanted) const;
    void check_inputs(const std::vector<Sizes> &sizes) const;
    void expect(const std::vector<Sizes> &sizes, int input, const Sizes &wanted) const;
    void check_elements(const char *tensor, const Sizes &sizes) const;
    // The channels' axis and the first spatial one of a tensor with the channels last or behind the batch.
    int channel_axis(bool last) const { return last ? rank() + 1 : 1; }
    static int first_axis(bool last) { return last ? 1 : 2; }

    bool x_last_ = false, y_last_ = false;  // [N, spatial..., channels]; R is as Y
};

// Sizes of a kernel's inputs that are constants of the model; none of the others.  Asking for them in every call takes longer
// than a small kernel runs.
using ConstantSizes = std::vector<std::optional<Sizes>>;
ConstantSizes constant_sizes(const OrtApi &api, const OrtKernelInfo *info);

// The inputs of one call.
class Inputs {
public:
    Inputs(const OrtApi &api, const OrtKernelContext *context, const ConstantSizes &constants);

    const std::vector<Sizes> &sizes() const { return sizes_; }
    const OrtValue *x() const { return values_[nodes::kInputX]; }
    // Their pointers, and Y's.
    convpool_tensors pointers(const convpool_problem &problem, const OrtValue *y) const;

private:
    const OrtApi &api_;
    std::vector<const OrtValue *> values_;
    std::vector<Sizes> sizes_;
};

}  // namespace convpool::onnxruntime

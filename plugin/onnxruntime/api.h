// SPDX-License-Identifier: Apache-2.0
// onnxruntime's objects in C++: statuses as exceptions, shapes and memory with owners.
#pragma once

#include "declared/c_api.h"

#include <cstddef>
#include <cstdint>
#include <exception>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

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

// Device memory of one call, from the provider's arena, on the call's stream.
class Scratch {
public:
    // allocator: the context's for the info, which frees it.
    Scratch(const OrtApi &api, const OrtKernelContext *context, const OrtMemoryInfo *info, OrtAllocator *allocator, size_t bytes);
    ~Scratch();
    Scratch(const Scratch &) = delete;

    void *get() const { return memory_; }

private:
    const OrtApi &api_;
    OrtAllocator *allocator_;
    void *memory_ = nullptr;
};

// Device memory that stays as long as a kernel, from the provider's allocator.
class KeptMemory {
public:
    KeptMemory(const OrtApi &api, OrtAllocator *allocator, size_t bytes);
    ~KeptMemory();
    KeptMemory(const KeptMemory &) = delete;

    void *get() const { return memory_; }  // null if there was none left

private:
    const OrtApi &api_;
    OrtAllocator *allocator_;
    void *memory_ = nullptr;
};

}  // namespace convpool::onnxruntime

// SPDX-License-Identifier: Apache-2.0
#include "api.h"

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

Scratch::Scratch(const OrtApi &api, const OrtKernelContext *context, const OrtMemoryInfo *info, OrtAllocator *allocator,
                 size_t bytes)
    : api_(api), allocator_(allocator) {
    if (bytes > 0) check(api, api.KernelContext_GetScratchBuffer()(context, info, bytes, &memory_));
}

Scratch::~Scratch() {
    if (memory_ != nullptr) succeeded(api_, api_.AllocatorFree()(allocator_, memory_));
}

KeptMemory::KeptMemory(const OrtApi &api, OrtAllocator *allocator, size_t bytes) : api_(api), allocator_(allocator) {
    if (!succeeded(api, api.AllocatorAlloc()(allocator, bytes, &memory_))) memory_ = nullptr;
}

KeptMemory::~KeptMemory() {
    if (memory_ != nullptr) succeeded(api_, api_.AllocatorFree()(allocator_, memory_));
}

}  // namespace convpool::onnxruntime

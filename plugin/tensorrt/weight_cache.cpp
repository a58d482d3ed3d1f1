// SPDX-License-Identifier: Apache-2.0
#include "weight_cache.h"

#include <cuda_runtime_api.h>

#include <cstring>

namespace convpool::tensorrt {
namespace {

// Allocation is no stream operation, but a capture in strict mode, on whatever thread, would object to it.
class Relaxed {
public:
    Relaxed() { cudaThreadExchangeStreamCaptureMode(&mode_); }
    ~Relaxed() { cudaThreadExchangeStreamCaptureMode(&mode_); }

private:
    cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

bool may_be_captured(void *stream) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    if (cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &status) != cudaSuccess) {
        cudaGetLastError();
        return true;
    }
    return status != cudaStreamCaptureStatusNone;
}

}  // namespace

void WeightCache::reserve(size_t wanted) {
    if (wanted <= bytes_ || in_graph_) return;
    release();
    const Relaxed relaxed;
    if (cudaMalloc(&memory_, wanted) != cudaSuccess) {
        cudaGetLastError();
        memory_ = nullptr;
        return;
    }
    bytes_ = wanted;
}

void WeightCache::release() {
    prepared_ = in_graph_ = false;
    bytes_ = 0;
    if (memory_ == nullptr) return;
    const Relaxed relaxed;
    if (cudaFree(memory_) != cudaSuccess) cudaGetLastError();  // the device may be gone at the end of a process
    memory_ = nullptr;
}

bool WeightCache::place(const convpool_problem &problem, int32_t tactic, size_t wanted, void *stream, convpool_tensors &tensors) {
    if (memory_ == nullptr || wanted == 0) return false;
    const bool same = prepared_ && tactic == tactic_ && tensors.w == w_ && std::memcmp(&problem, &problem_, sizeof problem) == 0;
    if (same) {
        in_graph_ = in_graph_ || may_be_captured(stream);
        tensors.flags = CONVPOOL_WEIGHTS_PREPARED;
    } else {
        if (in_graph_ || wanted > bytes_ || may_be_captured(stream)) return false;
        prepared_ = false;
        problem_ = problem;
        tactic_ = tactic;
        w_ = tensors.w;
    }
    tensors.prepared = memory_;
    tensors.prepared_bytes = bytes_;
    return true;
}

}  // namespace convpool::tensorrt

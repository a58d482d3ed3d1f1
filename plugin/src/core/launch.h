// SPDX-License-Identifier: Apache-2.0
// What families' plans are made of: a kernel with its launch configuration, tensor maps, and parameters that most kernels have.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "core/plan.h"

namespace convpool {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Loading a kernel is no stream operation, but a capture in strict mode on another thread would object to it.
template <class Body> cudaError_t outside_captures(Body body) {
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    cudaError_t error = cudaThreadExchangeStreamCaptureMode(&mode);
    if (error != cudaSuccess) return error;
    error = body();
    cudaThreadExchangeStreamCaptureMode(&mode);
    return error;
}

// A tactic's main kernel and how it is launched.
struct Kernel {
    const void *function = nullptr;
    int64_t grid = 0;
    int threads = 0, cluster = 1;
    int64_t shared_bytes = 0;

    cudaError_t load(const Device &device) const;
    // overlap: may start before the kernel before it ends, for which it waits itself: wait_for_previous_kernel().
    cudaError_t launch(void *params, bool overlap, cudaStream_t stream) const;
};

// Whether kernels of a launch may overlap with those before them on such a device.
inline bool launches_overlap(const Device &device) { return code_architecture(device.cc) >= 90; }

// A plan of one kernel that reads X and W where they are.
class OneKernelPlan : public Plan {
public:
    OneKernelPlan(const Problem &p, const Tactic &t, const Device &d, const Kernel &kernel)
        : Plan(p, t, d), kernel_(kernel), overlap_(launches_overlap(d)) {}
    cudaError_t load() const override { return kernel_.load(device); }

protected:
    cudaError_t launch_kernel(void *params, cudaStream_t stream) const { return kernel_.launch(params, overlap_, stream); }

private:
    Kernel kernel_;
    bool overlap_;
};

// The tensor maps of the launch before, by address: to encode them takes the driver longer than the rest of a launch. A thread
// that finds another one at them encodes its own.
template <int kCount> class TensorMaps {
public:
    template <class Encode> cudaError_t get(const void *address, CUtensorMap *maps, Encode encode) {
        if (!busy_.test_and_set(std::memory_order_acquire)) {
            const bool kept = address_ == address;
            if (kept) std::memcpy(maps, maps_, sizeof maps_);
            busy_.clear(std::memory_order_release);
            if (kept) return cudaSuccess;
        }
        const cudaError_t error = encode(maps);
        if (error == cudaSuccess && !busy_.test_and_set(std::memory_order_acquire)) {
            address_ = address;
            std::memcpy(maps_, maps, sizeof maps_);
            busy_.clear(std::memory_order_release);
        }
        return error;
    }

private:
    std::atomic_flag busy_ = ATOMIC_FLAG_INIT;
    const void *address_ = nullptr;  // null: no maps yet
    CUtensorMap maps_[kCount];
};

BoxMean box_of(const Problem &problem);
Prologue prologue_of(const Problem &problem, const convpool_tensors &tensors);
Epilogue epilogue_of(const Problem &problem, const convpool_tensors &tensors);
// Rows of channels of Y, the residual (which has Y's layout) and the bias are whole aligned chunks.
bool y_vectors(const Problem &problem, const convpool_tensors &tensors);
// Channels of Y and of the residual, channels first, are whole aligned runs of pixels.
bool y_runs(const Problem &problem, const convpool_tensors &tensors);

// The pointers of kernels that read X and W where they are.
template <class Params> void set_arrays(Params &params, const Problem &p, const convpool_tensors &t) {
    params.x = t.x;
    params.w = t.w;
    params.y = t.y;
    params.prologue = prologue_of(p, t);
    params.epilogue = epilogue_of(p, t);
}

}  // namespace convpool

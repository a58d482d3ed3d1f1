// SPDX-License-Identifier: Apache-2.0
// Launching: a family's main kernel, its parameters from problem and tensors, tensor maps. The driver's functions for these are found
// through the runtime, so that the library needs no libcuda to load.
#pragma once

#include <cuda.h>

#include <atomic>

#include "core/plan.h"

namespace convpool {

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

    // Lets it use all of the device's shared memory, which loads it into the current context.
    cudaError_t load(const Device &device) const;
    // overlap: may start before the kernel before it ends, for which it waits itself: wait_for_previous_kernel().
    cudaError_t launch(void *params, bool overlap, cudaStream_t stream) const;
};

// True where kernels of a launch may overlap with those before them on such a device.
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

// Where in an image windows start, along rows and along columns: from `lower` on in steps of `strides`, before the image's
// size + `upper`. TMA's im2col mode walks over them, and on to the next image.
struct Im2colBox {
    int32_t lower[2], upper[2];
    uint32_t strides[2];
};

// A tensor of `rank` dimensions, the innermost first; strides[i] is that of dimension i + 1. Strides and `swizzle` (0, 64 or
// 128) are in bytes.
// `operand`: what is copied goes to the tensor cores as it is, and so is rounded to TF32 if that is the precision.
// The driver's cuTensorMapEncodeTiled does it; cudaErrorNotSupported if it has none.
cudaError_t encode_tensor_map(CUtensorMap *map, Precision precision, int rank, const void *address, const uint64_t *sizes,
                              const uint64_t *strides, const uint32_t *box, int swizzle, bool operand);

// A tensor [n,h,w,c] whose columns of `pixels` windows are copied, `channels` of one tap of each: operands in the 128-byte
// swizzle. Sizes and strides as above.
cudaError_t encode_im2col_map(CUtensorMap *map, Precision precision, const void *address, const uint64_t *sizes,
                              const uint64_t *strides, const Im2colBox &box, uint32_t channels, uint32_t pixels);

// The current context's number, unique in the process; 0 if there is none, or the driver does not say.
uint64_t current_context();

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

}  // namespace convpool

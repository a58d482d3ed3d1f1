// SPDX-License-Identifier: Apache-2.0
// A plan: a problem worked out for one tactic on one device, with everything that a launch needs but pointers; kernels, tensor maps.
#pragma once

#include <cuda.h>

#include <array>
#include <atomic>
#include <cstring>

#include "core/tactic.h"

namespace convpool {

inline bool aligned(const void *pointer, size_t bytes) { return reinterpret_cast<uintptr_t>(pointer) % bytes == 0; }

// The tensors of a launch, as bits of a set.
enum TensorSet : uint32_t { kX = 1, kW = 2, kB = 4, kResidual = 8, kY = 16, kScale = 32, kShift = 64, kWScale = 128 };
constexpr TensorSet kNoTensors{0}, kAllTensors{255};

// The demands of a launch on one pointer of convpool_tensors.
struct PointerRule {
    const char *name;
    TensorSet tensor;
    size_t offset;  // of the pointer in convpool_tensors
    bool read;      // false: the problem has no such tensor, and the pointer is ignored
    int32_t element_bytes;

    const void *pointer(const convpool_tensors &tensors) const;
};
constexpr int kPointers = 8;
std::array<PointerRule, kPointers> pointer_rules(const Problem &problem);

// The tensors whose pointers are multiples of 16; those that the problem does not have count as such.
uint32_t vector_aligned(const Problem &problem, const convpool_tensors &tensors);

// Device memory that a launch is given: transformed weights first, then transformed X, then what normalizes it: multiples of 256.
struct Workspace {
    size_t weights_bytes = 0, x_bytes = 0, statistics_bytes = 0;

    size_t without_weights() const { return x_bytes + statistics_bytes; }
    size_t total() const { return weights_bytes + without_weights(); }
};

class Plan {
public:
    Plan(const Problem &problem, const Tactic &tactic, const Device &device);
    virtual ~Plan() = default;
    Plan(const Plan &) = delete;

    // Expected time in microseconds, for the choice between tactics.
    virtual double expected_us() const = 0;
    // Loads the kernels into the current context, and lets the main one use the device's shared memory.
    virtual cudaError_t load() const = 0;
    // Queues the kernels. Nothing is checked here: the pointers have been. Several threads may do it at once.
    virtual cudaError_t launch(const convpool_tensors &tensors, cudaStream_t stream) const = 0;

    const Problem problem;
    const Tactic &tactic;
    const Device device;
    Workspace workspace;
    uint32_t vectors = kNoTensors;  // the tensors whose pointers must be multiples of 16
    const std::array<PointerRule, kPointers> pointers;
};

// With CONVPOOL_LOG=1 in the environment: one line on stderr for a problem and its tactic, the first time.
void log_plan(const Plan &plan, int32_t chosen_by);

// An NVTX range around a launch. Without a profiler it costs a comparison; without NVTX's header at build time, nothing.
class ProfilerRange {
public:
    explicit ProfilerRange(const char *name);
    ~ProfilerRange();
    ProfilerRange(const ProfilerRange &) = delete;
};

struct Choice {
    std::unique_ptr<Plan> plan;
    bool measured;  // else by the cost rule
};

// The fastest tactic that needs at most `max_workspace_bytes` and takes pointers of which only those of `vector_tensors` are
// multiples of 16. Generic runs every problem, so no plan, with a reason, means that no tactic runs on such a device,
// or that there is less memory than what normalizes X takes.
Choice choose(const Problem &problem, const Device &device, size_t max_workspace_bytes, uint32_t vector_tensors,
              std::string &reason);

// The tactic measured fastest for exactly this problem on such a device, else for the same without its residual, by the rows of
// tuned.def and of the file that CONVPOOL_TUNED names; 0 if there is none.
int32_t tuned_tactic(const Problem &problem, const Device &device);

// Why the file that CONVPOOL_TUNED names, or a row of it, is not used; empty if it is, or if there is none.
const std::string &tuned_error();

// Where in an image windows start, along rows and along columns: from `lower` on in steps of `strides`, before the image's
// size + `upper`. TMA's im2col mode walks over them, and on to the next image.
struct Im2colBox {
    int32_t lower[2], upper[2];
    uint32_t strides[2];
};

// Functions of the CUDA driver, found through the runtime, so that the library needs no libcuda to load.
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

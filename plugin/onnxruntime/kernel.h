// SPDX-License-Identifier: Apache-2.0
// A node on the CUDA provider: a plan for each shape, and launches on the provider's stream.
//
// Weights.  Where W is a constant of the model, what a plan makes of it is kept in memory of the provider's allocator:
//
//   first run of a shape                  transforms W into that memory, runs on it, and waits for the stream once
//   later runs                            run on what is there: no allocation but the workspace, no waiting
//   first run inside a graph capture      transforms W into the workspace, as part of the graph
//
// Memory of this kind is never let go of before the kernel, as a captured graph may read it; after kMostPrepared shapes
// further ones transform W in every run.
#pragma once

#include <atomic>
#include <mutex>

#include "node.h"

namespace convpool::onnxruntime {

using nodes::PlanHandle;

// The needs of a launch for inputs of one set of sizes, but pointers.
struct Run {
    std::vector<Sizes> inputs;
    bool tf32 = false;
    Sizes output;
    convpool_problem problem{};
    PlanHandle plan;  // null for an empty batch
    convpool_plan_properties properties{};
    bool keeps_weights = false;  // may take memory for transformed weights
    std::atomic<bool> prepared{false};
    std::mutex preparing;                   // of the next two
    std::unique_ptr<DeviceMemory> weights;  // transformed, once `prepared`
    PlanHandle fallback;                    // for pointers that are aligned to their elements only
};

// Where a call runs.
struct Target {
    const OrtKernelContext *context;
    const OrtMemoryInfo *memory;  // of the device
    OrtAllocator *allocator;      // of its arena
    void *stream;
};

// convpool.h's number of an element type; -1 for those that its kernels do not have.
constexpr int32_t dtype_of(int32_t element_type) {
    return element_type == kFloat16Type    ? CONVPOOL_F16
           : element_type == kBFloat16Type ? CONVPOOL_BF16
           : element_type == kFloatType    ? CONVPOOL_F32
                                           : -1;
}

class Kernel {
public:
    // element_type: an ElementType that dtype_of knows, of all tensors.
    Kernel(const OrtApi &api, const nodes::Operator &op, int32_t element_type, const OrtKernelInfo *info);
    ~Kernel();
    Kernel(const Kernel &) = delete;

    static constexpr const char *kProvider = "CUDAExecutionProvider";
    // May be called from several threads at once.
    void compute(OrtKernelContext *context);
    const OrtApi &api() const { return api_; }

private:
    std::shared_ptr<Run> run_for(const std::vector<Sizes> &inputs, bool tf32);
    std::shared_ptr<Run> plan_run(const std::vector<Sizes> &inputs, bool tf32);
    bool tf32(const OrtKernelContext *context);
    // Transforms the weights, launches and waits; false where this run cannot.
    bool launch_first(Run &run, const convpool_tensors &pointers, const Target &target);
    void launch(Run &run, const convpool_tensors &pointers, const Target &target);
    void launch_unaligned(Run &run, convpool_tensors pointers, const Target &target);
    OrtAllocator *scratch_allocator(const OrtKernelContext *context, const OrtMemoryInfo *memory);
    void warn(const std::string &text) const;

    const OrtApi &api_;
    std::string name_;  // the node's
    Node node_;
    int32_t dtype_;
    ConstantSizes constants_;
    static constexpr int kUnasked = -1;
    std::atomic<int> use_tf32_{kUnasked};  // the provider's option, the same in every run
    bool constant_weights_ = false;
    const OrtLogger *logger_ = nullptr;
    OrtAllocator *weights_allocator_ = nullptr;               // null where W is no constant
    std::atomic<OrtAllocator *> scratch_allocator_{nullptr};  // the context's, from the first run on
    std::mutex mutex_;                                        // of the next two
    std::vector<std::shared_ptr<Run>> runs_;                  // the latest last
    int with_weights_ = 0;                                    // how many of them keep weights
};

// A node on the CPU provider: plain loops, for any type, rank and layout, so that a model runs where no GPU is.
class CpuKernel {
public:
    // element_type: an ElementType, of all tensors.
    CpuKernel(const OrtApi &api, const nodes::Operator &op, int32_t element_type, const OrtKernelInfo *info)
        : api_(api), node_(api, op, info), element_type_(element_type), constants_(constant_sizes(api, info)) {}

    static constexpr const char *kProvider = "CPUExecutionProvider";
    // May be called from several threads at once.
    void compute(OrtKernelContext *context) const;
    const OrtApi &api() const { return api_; }

private:
    const OrtApi &api_;
    Node node_;
    int32_t element_type_;
    ConstantSizes constants_;
};

}  // namespace convpool::onnxruntime

// SPDX-License-Identifier: Apache-2.0
#include "kernel.h"

#include <cuda_runtime_api.h>

#include <algorithm>

namespace convpool::onnxruntime {
namespace {

constexpr size_t kMostRuns = 64;   // of shapes in turn; more are planned anew
constexpr int kMostPrepared = 16;  // of them with weights of their own

using nodes::check_status;

void check_cuda(cudaError_t error) {
    if (error != cudaSuccess) throw std::runtime_error(std::string("CUDA: ") + cudaGetErrorString(error));
}

bool is_captured(void *stream) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    check_cuda(cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &status));
    return status != cudaStreamCaptureStatusNone;
}

PlanHandle plan_for(const convpool_problem &problem, uint32_t flags) {
    convpool_plan *made = nullptr;
    check_status(convpool_plan_create(&problem, 0, SIZE_MAX, flags, &made));
    return PlanHandle(made);
}

// The provider's device, for as long as this lives; onnxruntime may call from a thread of the application.
class OnDevice {
public:
    explicit OnDevice(int device) {
        check_cuda(cudaGetDevice(&before_));
        if (device == before_) return;
        check_cuda(cudaSetDevice(device));
        changed_ = true;
    }
    ~OnDevice() {
        if (changed_ && cudaSetDevice(before_) != cudaSuccess) cudaGetLastError();
    }
    OnDevice(const OnDevice &) = delete;

private:
    int before_ = 0;
    bool changed_ = false;
};

// Taking memory and waiting are no operations of a stream that another thread captures, but a strict capture objects to them.
class Relaxed {
public:
    Relaxed() { check_cuda(cudaThreadExchangeStreamCaptureMode(&mode_)); }
    ~Relaxed() {
        if (cudaThreadExchangeStreamCaptureMode(&mode_) != cudaSuccess) cudaGetLastError();
    }
    Relaxed(const Relaxed &) = delete;

private:
    cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

std::string name_of(const OrtApi &api, const OrtKernelInfo *info) {
    size_t size = 0;
    if (!succeeded(api, api.KernelInfo_GetNodeName()(info, nullptr, &size)) || size == 0) return {};
    std::string name(size, '\0');
    if (!succeeded(api, api.KernelInfo_GetNodeName()(info, name.data(), &size))) return {};
    name.resize(std::strlen(name.c_str()));
    return name;
}

}  // namespace

Kernel::Kernel(const OrtApi &api, const nodes::Operator &op, int32_t element_type, const OrtKernelInfo *info)
    : api_(api), name_(name_of(api, info)), node_(api, op, info), dtype_(dtype_of(element_type)),
      constants_(constant_sizes(api, info)) {
    if (!succeeded(api, api.KernelInfo_GetLogger()(info, &logger_))) logger_ = nullptr;
    constant_weights_ = constants_[nodes::kInputW].has_value() || node_.constant_weights();
    if (constant_weights_) check(api, api.KernelInfoGetAllocator()(info, kDefaultMemory, &weights_allocator_));
}

Kernel::~Kernel() {
    runs_.clear();
    for (OrtAllocator *allocator : {weights_allocator_, scratch_allocator_.load()})
        if (allocator != nullptr) api_.ReleaseAllocator()(allocator);
}

OrtAllocator *Kernel::scratch_allocator(const OrtKernelContext *context, const OrtMemoryInfo *memory) {
    if (OrtAllocator *kept = scratch_allocator_.load()) return kept;
    const std::lock_guard<std::mutex> lock(mutex_);
    OrtAllocator *made = scratch_allocator_.load();
    if (made == nullptr) {
        check(api_, api_.KernelContext_GetAllocator()(context, memory, &made));
        scratch_allocator_.store(made);
    }
    return made;
}

// The provider's option decides; the node's attribute where no provider tells.
bool Kernel::tf32(const OrtKernelContext *context) {
    if (dtype_ != CONVPOOL_F32) return false;
    int use = use_tf32_.load(std::memory_order_relaxed);
    if (use != kUnasked) return use;
    void *option = nullptr;
    if (succeeded(api_, api_.KernelContext_GetResource()(context, kCudaResourceVersion, kUseTf32, &option))) {
        bool on = false;
        std::memcpy(&on, &option, sizeof on);  // a bool in a pointer's place
        use = on;
    } else {
        use = node_.allow_tf32();
    }
    use_tf32_.store(use, std::memory_order_relaxed);
    return use;
}

std::shared_ptr<Run> Kernel::plan_run(const std::vector<Sizes> &inputs, bool tf32) {
    auto run = std::make_shared<Run>();
    run->output = node_.output_sizes(inputs);
    run->problem = node_.problem(inputs, dtype_, tf32);
    run->inputs = inputs;
    run->tf32 = tf32;
    if (run->problem.n > 0) {
        run->plan = plan_for(run->problem, 0);
        run->properties = nodes::properties_of(*run->plan);
    }
    return run;
}

// Plans under the lock, so that threads which meet a shape together plan it once.
std::shared_ptr<Run> Kernel::run_for(const std::vector<Sizes> &inputs, bool tf32) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto run = runs_.rbegin(); run != runs_.rend(); ++run)
        if ((*run)->tf32 == tf32 && (*run)->inputs == inputs) return *run;
    std::shared_ptr<Run> run = plan_run(inputs, tf32);
    if (constant_weights_ && run->properties.prepared_bytes > 0 && with_weights_ < kMostPrepared) {
        run->keeps_weights = true;
        ++with_weights_;
    }
    if (runs_.size() >= kMostRuns)
        runs_.erase(std::find_if(runs_.begin(), runs_.end(), [](const auto &kept) { return !kept->keeps_weights; }));
    runs_.push_back(run);
    return run;
}

bool Kernel::launch_first(Run &run, const convpool_tensors &pointers, const Target &target) {
    if (is_captured(target.stream)) return false;
    const Relaxed relaxed;
    const std::lock_guard<std::mutex> lock(run.preparing);
    if (run.prepared) return false;  // by another thread; the launch runs on it
    const size_t bytes = run.properties.prepared_bytes;
    if (run.weights == nullptr) run.weights = std::make_unique<DeviceMemory>(api_, weights_allocator_, bytes);
    if (run.weights->get() == nullptr) return false;
    const DeviceMemory scratch(api_, target.context, target.memory, target.allocator, run.properties.workspace_bytes - bytes);
    convpool_tensors placed = pointers;
    placed.workspace = scratch.get(), placed.workspace_bytes = run.properties.workspace_bytes - bytes;
    placed.prepared = run.weights->get(), placed.prepared_bytes = bytes;
    if (convpool_plan_launch(run.plan.get(), &placed, target.stream) != CONVPOOL_OK)
        return false;  // told by the launch that follows
    check_cuda(cudaStreamSynchronize(static_cast<cudaStream_t>(target.stream)));
    run.prepared = true;
    return true;
}

void Kernel::launch(Run &run, const convpool_tensors &pointers, const Target &target) {
    convpool_tensors placed = pointers;
    placed.workspace_bytes = run.properties.workspace_bytes;
    if (run.prepared) {
        placed.flags = CONVPOOL_WEIGHTS_PREPARED;
        placed.prepared = run.weights->get(), placed.prepared_bytes = run.properties.prepared_bytes;
        placed.workspace_bytes -= run.properties.prepared_bytes;
    } else if (constants_[nodes::kInputW].has_value() && run.properties.prepared_bytes == 0) {
        placed.flags = CONVPOOL_WEIGHTS_PREPARED;  // of an initializer, which no kernel writes: it may be read early
    }
    const DeviceMemory scratch(api_, target.context, target.memory, target.allocator, placed.workspace_bytes);
    placed.workspace = scratch.get();
    const convpool_status status = convpool_plan_launch(run.plan.get(), &placed, target.stream);
    if (status == CONVPOOL_MISALIGNED) launch_unaligned(run, pointers, target);
    else check_status(status);
}

void Kernel::launch_unaligned(Run &run, convpool_tensors pointers, const Target &target) {
    const std::string reason = convpool_last_error();
    {
        const std::lock_guard<std::mutex> lock(run.preparing);
        if (run.fallback == nullptr) {
            run.fallback = plan_for(run.problem, CONVPOOL_PLAN_UNALIGNED);
            warn(reason + "; " + nodes::properties_of(*run.fallback).name + " runs in its place");
        }
    }
    const convpool_plan_properties properties = nodes::properties_of(*run.fallback);
    const DeviceMemory scratch(api_, target.context, target.memory, target.allocator, properties.workspace_bytes);
    pointers.workspace = scratch.get(), pointers.workspace_bytes = properties.workspace_bytes;
    check_status(convpool_plan_launch(run.fallback.get(), &pointers, target.stream));
}

void Kernel::warn(const std::string &text) const {
    if (logger_ == nullptr) return;
    const std::string message = "convpool: " + node_.op().name + " " + name_ + ": " + text;
    succeeded(api_, api_.Logger_LogMessage()(logger_, kWarning, message.c_str(), __FILE__, __LINE__, "compute"));
}

void Kernel::compute(OrtKernelContext *context) {
    const Inputs inputs(api_, context, constants_);
    const OrtMemoryInfo *memory = nullptr;
    check(api_, api_.GetTensorMemoryInfo()(inputs.x(), &memory));
    int device = 0;
    check(api_, api_.MemoryInfoGetId()(memory, &device));
    const OnDevice on_device(device);
    const std::shared_ptr<Run> run = run_for(inputs.sizes(), tf32(context));
    OrtValue *y = nullptr;
    check(api_, api_.KernelContext_GetOutput()(context, 0, run->output.data(), run->output.size(), &y));
    if (run->plan == nullptr) return;  // an empty batch

    const convpool_tensors pointers = inputs.pointers(run->problem, y);
    Target target{context, memory, scratch_allocator(context, memory), nullptr};
    check(api_, api_.KernelContext_GetGPUComputeStream()(context, &target.stream));
    if (run->keeps_weights && !run->prepared && launch_first(*run, pointers, target)) return;
    launch(*run, pointers, target);
}

}  // namespace convpool::onnxruntime

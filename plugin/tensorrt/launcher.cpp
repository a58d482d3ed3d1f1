// SPDX-License-Identifier: Apache-2.0

#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>

#include "launcher.h"
#include "logging.h"

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

std::vector<convpool_tactic_info> all_tactics() {
    std::vector<convpool_tactic_info> infos(convpool_tactics(nullptr, 0));
    if (!infos.empty()) infos[0].struct_size = sizeof(convpool_tactic_info);
    convpool_tactics(infos.data(), static_cast<int32_t>(infos.size()));
    return infos;
}

std::string tactic_name(int32_t id) {
    for (const convpool_tactic_info &info : all_tactics())
        if (info.id == id) return info.name;
    return "tactic " + std::to_string(id);
}

bool falls_back(convpool_status status) {
    return status == CONVPOOL_UNSUPPORTED || status == CONVPOOL_MISALIGNED || status == CONVPOOL_WORKSPACE_TOO_SMALL;
}

// After a choice of tactic that succeeded: a file of measured tactics that cannot be used is told once.
void tell_tuned_error() {
    static std::atomic_flag told = ATOMIC_FLAG_INIT;
    if (*convpool_last_error() != '\0' && !told.test_and_set()) log_error("tuned tactics", convpool_last_error());
}

convpool_status plan_for(const convpool_problem &problem, const Request &request, uint32_t flags, PlanHandle &plan) {
    convpool_plan *made = nullptr;
    const convpool_status status = convpool_plan_create(&problem, request.tactic, request.workspace_bytes, flags, &made);
    plan.reset(made);
    if (status == CONVPOOL_OK && request.tactic == 0) tell_tuned_error();
    return status;
}

constexpr size_t kMostRuns = 16;  // of shapes in turn; more are planned anew

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

bool WeightCache::lend(const convpool_problem &problem, int32_t tactic, size_t wanted, void *stream, convpool_tensors &pointers) {
    if (memory_ == nullptr || wanted == 0) return false;
    const bool same = prepared_ && tactic == tactic_ && pointers.w == w_ && std::memcmp(&problem, &problem_, sizeof problem) == 0;
    if (same) {
        in_graph_ = in_graph_ || may_be_captured(stream);
        pointers.flags = CONVPOOL_WEIGHTS_PREPARED;
    } else {
        if (in_graph_ || wanted > bytes_ || may_be_captured(stream)) return false;
        prepared_ = false;
        problem_ = problem;
        tactic_ = tactic;
        w_ = pointers.w;
    }
    pointers.prepared = memory_;
    pointers.prepared_bytes = bytes_;
    return true;
}

DeviceSize device_size() {
    DeviceSize device{};
    check_status(convpool_device(&device.cc, &device.multiprocessors, &device.shared_bytes));
    return device;
}

size_t workspace_bytes(const convpool_problem &problem, int32_t tactic, const DeviceSize &device) {
    if (tactic == 0) {
        check_status(
            convpool_default_tactic(&problem, device.cc, device.multiprocessors, device.shared_bytes, SIZE_MAX, &tactic));
        tell_tuned_error();
    }
    size_t bytes = 0;
    check_status(convpool_workspace_bytes(&problem, tactic, &bytes));
    return bytes;
}

size_t least_workspace_bytes(const convpool_problem &problem) {
    size_t bytes = 0;
    check_status(convpool_workspace_bytes(&problem, all_tactics().front().id, &bytes));
    return bytes;
}

bool has_tactic(int32_t id) {
    const std::vector<convpool_tactic_info> all = all_tactics();
    return std::any_of(all.begin(), all.end(), [&](const convpool_tactic_info &info) { return info.id == id; });
}

bool can_run(const convpool_problem &problem, int32_t tactic, const DeviceSize &device) {
    const convpool_status status = convpool_supports(&problem, tactic, device.cc, device.shared_bytes);
    if (status != CONVPOOL_UNSUPPORTED) check_status(status);
    return status == CONVPOOL_OK;
}

std::vector<int32_t> tactics_for(const std::vector<convpool_problem> &problems, const DeviceSize &device) {
    std::vector<int32_t> ids;
    for (const convpool_tactic_info &info : all_tactics())
        if (std::all_of(problems.begin(), problems.end(), [&](const auto &p) { return can_run(p, info.id, device); }))
            ids.push_back(info.id);
    return ids;
}

size_t most_workspace_bytes(const convpool_problem &problem, const DeviceSize &device) {
    size_t most = 0;
    for (int32_t id : tactics_for({problem}, device)) most = std::max(most, workspace_bytes(problem, id, device));
    return most;
}

Run *Launcher::find(const Tensors &tensors) {
    for (auto run = runs_.rbegin(); run != runs_.rend(); ++run)
        if (same((*run)->tensors, tensors)) return run->get();
    return nullptr;
}

void Launcher::load(const convpool_problem &problem, const Request &request, bool constant_weights) {
    PlanHandle plan;
    check_status(plan_for(problem, request, 0, plan));
    if (constant_weights) cache_.reserve(properties_of(*plan).prepared_bytes);
}

Run &Launcher::plan_run(const Tensors &tensors, const convpool_problem &problem, const Request &request, bool constant_weights) {
    auto run = std::make_unique<Run>();
    run->tensors = tensors;
    run->problem = problem;
    run->request = request;
    if (problem.n > 0) {
        convpool_status status = plan_for(problem, request, 0, run->plan);
        if (request.tactic != 0 && falls_back(status)) {
            const std::string reason = convpool_last_error();
            status = plan_for(problem, {0, request.workspace_bytes}, 0, run->plan);
            if (status == CONVPOOL_OK) tell_fallback(tensors, request.tactic, reason, *run->plan);
        }
        check_status(status);
        const convpool_plan_properties properties = properties_of(*run->plan);
        run->tactic = properties.tactic;
        run->prepared_bytes = properties.prepared_bytes;
        if (constant_weights) cache_.reserve(run->prepared_bytes);
    }
    if (runs_.size() == kMostRuns) runs_.erase(runs_.begin());
    runs_.push_back(std::move(run));
    return *runs_.back();
}

void Launcher::launch(Run &run, const void *const *inputs, void *output, void *workspace, void *stream) {
    const convpool_problem &problem = run.problem;
    if (problem.n == 0) return;  // an empty batch
    convpool_tensors pointers{};
    pointers.struct_size = sizeof pointers;
    pointers.x = inputs[kInputX];
    pointers.w = inputs[kInputW];
    pointers.b = problem.has_bias ? inputs[kInputB] : nullptr;
    if (problem.prologue_affine) pointers.scale = inputs[kInputScale], pointers.shift = inputs[kInputShift];
    if (problem.has_residual) pointers.residual = inputs[problem.prologue_affine ? kInputShift + 1 : kInputB + 1];  // last
    pointers.y = output;
    pointers.workspace = workspace;
    pointers.workspace_bytes = workspace == nullptr ? 0 : run.request.workspace_bytes;
    convpool_tensors placed = pointers;  // perhaps with kept weights, which a fallback does not read
    const bool cached = cache_.lend(problem, run.tactic, run.prepared_bytes, stream, placed);
    convpool_status status = convpool_plan_launch(run.plan.get(), &placed, stream);
    if (cached) cache_.launched(status == CONVPOOL_OK);
    check_status(falls_back(status) ? launch_fallback(run, pointers, stream) : status);
}

// Launches what the workspace that there is allows, for pointers of any alignment.
convpool_status Launcher::launch_fallback(Run &run, const convpool_tensors &pointers, void *stream) {
    const std::string reason = convpool_last_error();
    if (run.fallback == nullptr) {
        const convpool_status status =
            plan_for(run.problem, {0, pointers.workspace_bytes}, CONVPOOL_PLAN_UNALIGNED, run.fallback);
        if (status != CONVPOOL_OK) return status;
    }
    const convpool_status status = convpool_plan_launch(run.fallback.get(), &pointers, stream);
    if (status == CONVPOOL_OK) tell_fallback(run.tensors, run.tactic, reason, *run.fallback);
    return status;
}

void Launcher::tell_fallback(const Tensors &tensors, int32_t tactic, const std::string &reason, const convpool_plan &instead) {
    for (const Tensors &earlier : told_)
        if (same(earlier, tensors)) return;
    told_.push_back(tensors);
    const std::string text = layer_ + ": X " + shape_text(tensors.all[kInputX]) + ": " + tactic_name(tactic) +
                             " does not run: " + reason + "; " + properties_of(instead).name + " runs in its place";
    log_warning("enqueue", text.c_str());
}

}  // namespace convpool::tensorrt

#include "launcher.h"

#include "logging.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <stdexcept>

namespace convpool::tensorrt {
namespace {

void check(convpool_status status) {
    if (status != CONVPOOL_OK) throw std::runtime_error(convpool_last_error());
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

constexpr size_t kMostRuns = 16;  // of shapes in turn; more are prepared anew

}  // namespace

Device current_device() {
    Device device{};
    check(convpool_device(&device.cc, &device.multiprocessors, &device.shared_bytes));
    return device;
}

int32_t default_tactic(const convpool_problem &problem, size_t workspace_size, const Device &device) {
    int32_t tactic = 0;
    check(convpool_default_tactic(&problem, device.cc, device.multiprocessors, device.shared_bytes, workspace_size, &tactic));
    // A file of measured tactics that cannot be used is told once.
    static std::atomic_flag told = ATOMIC_FLAG_INIT;
    if (*convpool_last_error() != '\0' && !told.test_and_set()) log_error("tuned tactics", convpool_last_error());
    return tactic;
}

size_t workspace_bytes(const convpool_problem &problem, int32_t tactic, const Device &device) {
    if (tactic == 0) tactic = default_tactic(problem, SIZE_MAX, device);
    size_t bytes = 0;
    check(convpool_workspace_bytes(&problem, tactic, &bytes));
    return bytes;
}

bool has_tactic(int32_t id) {
    const std::vector<convpool_tactic_info> all = all_tactics();
    return std::any_of(all.begin(), all.end(), [&](const convpool_tactic_info &info) { return info.id == id; });
}

std::vector<int32_t> tactics_for(const std::vector<convpool_problem> &problems, const Device &device) {
    std::vector<int32_t> ids;
    for (const convpool_tactic_info &info : all_tactics()) {
        bool every = true;
        for (const convpool_problem &p : problems) {
            const convpool_status status = convpool_supports(&p, info.id, device.cc, device.shared_bytes);
            if (status != CONVPOOL_UNSUPPORTED) check(status);
            every = every && status == CONVPOOL_OK;
        }
        if (every) ids.push_back(info.id);
    }
    return ids;
}

size_t most_workspace_bytes(const convpool_problem &problem, const Device &device) {
    size_t most = 0;
    for (int32_t id : tactics_for({problem}, device)) most = std::max(most, workspace_bytes(problem, id, device));
    return most;
}

const Run *Launcher::find(const Tensors &tensors) const {
    const auto found = std::find_if(runs_.rbegin(), runs_.rend(), [&](const Run &run) { return same(run.tensors, tensors); });
    return found == runs_.rend() ? nullptr : &*found;
}

void Launcher::load(const convpool_problem &problem, int32_t tactic, bool constant_weights) {
    const convpool_status status = convpool_prepare(&problem, tactic);
    if (status != CONVPOOL_UNSUPPORTED) check(status);  // the launch then falls back
    if (constant_weights) cache_.reserve(problem, tactic);
}

const Run &Launcher::keep(const Run &run, bool constant_weights) {
    if (run.problem.n > 0 && run.tactic != 0) load(run.problem, run.tactic, constant_weights);
    if (runs_.size() == kMostRuns) runs_.erase(runs_.begin());
    runs_.push_back(run);
    return runs_.back();
}

void Launcher::launch(const Run &run, const void *const *inputs, void *output, void *workspace, void *stream) {
    const convpool_problem &problem = run.problem;
    if (problem.n == 0) return;  // an empty batch
    convpool_tensors tensors{};
    tensors.struct_size = sizeof tensors;
    tensors.x = inputs[kX];
    tensors.w = inputs[kW];
    tensors.b = problem.has_bias ? inputs[kB] : nullptr;
    if (problem.prologue_affine) tensors.scale = inputs[kScale], tensors.shift = inputs[kShift];
    if (problem.has_residual) tensors.residual = inputs[problem.prologue_affine ? kShift + 1 : kB + 1];
    tensors.y = output;
    tensors.workspace = workspace;
    tensors.workspace_bytes = workspace == nullptr ? 0 : run.workspace;
    convpool_tensors placed = tensors;
    const bool cached = cache_.place(problem, run.tactic, stream, placed);
    convpool_status status = convpool_launch(&problem, run.tactic, &placed, stream);
    if (cached) cache_.launched(status == CONVPOOL_OK);
    if (run.tactic != 0 && falls_back(status)) {
        const std::string reason = convpool_last_error();
        status = convpool_launch(&problem, 0, &tensors, stream);
        if (status == CONVPOOL_OK) tell_fallback(run, reason);
    }
    check(status);
}

void Launcher::tell_fallback(const Run &run, const std::string &reason) {
    const auto same = [&](const convpool_problem &one) { return std::memcmp(&run.problem, &one, sizeof one) == 0; };
    if (std::any_of(told_.begin(), told_.end(), same)) return;
    told_.push_back(run.problem);
    const std::string text = layer_ + ": X " + shape_text(run.tensors.all[kX]) + ": " + tactic_name(run.tactic) +
                             " does not run: " + reason + "; the default tactic runs in its place";
    log_warning("enqueue", text.c_str());
}

}  // namespace convpool::tensorrt

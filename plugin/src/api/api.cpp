// SPDX-License-Identifier: Apache-2.0
// The C API: checks and choice. Nothing throws out of here.

#include <algorithm>

#include "api/common.h"

namespace convpool {
namespace {

static_assert(sizeof(convpool_problem) == 264, "no padding: unknown bytes are checked to be zero");

// The caller's description of a device, or the current one where cc is 0.
convpool_status device_for(int32_t cc, int32_t multiprocessors, int32_t shared_bytes, Device &device) {
    if (cc == 0) return read_device(device);
    if (cc < 0 || multiprocessors < 0 || shared_bytes < 0)
        return fail(CONVPOOL_INVALID_ARGUMENT, "device: a negative size; expected 0 or more");
    if (shared_bytes > 1 << 24) return invalid("device: shared_bytes", shared_bytes, "at most 2^24: bytes that a block may have");
    device.cc = cc;
    device.multiprocessors = multiprocessors > 0 ? multiprocessors : 1;
    device.shared_per_block = shared_bytes > 0 ? shared_bytes : 48 * 1024;
    device.shared_per_multiprocessor = device.shared_per_block + 1024;
    return CONVPOOL_OK;
}

convpool_status read_both(const convpool_problem *description, int32_t id, Problem &problem, const Tactic *&tactic) {
    const convpool_status status = read_problem(description, problem);
    return status == CONVPOOL_OK ? read_tactic(id, tactic) : status;
}

// size: that of a workspace which is asked for.
template <class Size> convpool_status workspace_bytes(const convpool_problem *problem, int32_t tactic, size_t *bytes, Size size) {
    Problem p;
    const Tactic *t = nullptr;
    if (const convpool_status status = read_both(problem, tactic, p, t); status != CONVPOOL_OK) return status;
    if (bytes == nullptr) return fail(CONVPOOL_INVALID_ARGUMENT, "bytes: the pointer is null");
    std::string reason;
    const std::unique_ptr<Plan> plan = make_plan_for_any_device(p, *t, reason);
    if (plan == nullptr) return fail(CONVPOOL_UNSUPPORTED, reason);
    *bytes = size(plan->workspace);
    return CONVPOOL_OK;
}

}  // namespace
}  // namespace convpool

using namespace convpool;

extern "C" {

int32_t convpool_abi_version(void) { return CONVPOOL_ABI_VERSION; }

#define CONVPOOL_QUOTED(number) #number
#define CONVPOOL_DOTTED(major, minor, patch) CONVPOOL_QUOTED(major) "." CONVPOOL_QUOTED(minor) "." CONVPOOL_QUOTED(patch)

const char *convpool_version(void) {
    return CONVPOOL_DOTTED(CONVPOOL_VERSION_MAJOR, CONVPOOL_VERSION_MINOR, CONVPOOL_VERSION_PATCH);
}
const char *convpool_architectures(void) { return CONVPOOL_ARCHITECTURES; }
int32_t convpool_cuda_version(void) { return CUDART_VERSION; }
const char *convpool_last_error(void) { return last_error().c_str(); }

const char *convpool_status_name(convpool_status status) {
    static constexpr const char *names[] = {"ok",         "invalid argument", "unsupported", "workspace too small",
                                            "misaligned", "CUDA error"};
    const auto number = static_cast<size_t>(status);
    return number < std::size(names) ? names[number] : "unknown status";
}

int32_t convpool_tactics(convpool_tactic_info *infos, int32_t capacity) {
    const convpool_status status = guarded([&] {
        const std::vector<Tactic> &all = tactics();
        if (infos == nullptr || capacity < 1) return CONVPOOL_OK;
        if (infos[0].struct_size != sizeof(convpool_tactic_info))
            return invalid("infos: struct_size", infos[0].struct_size, std::to_string(sizeof(convpool_tactic_info)));
        for (size_t i = 0; i < std::min<size_t>(static_cast<size_t>(capacity), all.size()); ++i) {
            const Tactic &t = all[i];
            const int dtype = t.precision == kAnyPrecision ? -1 : std::min(t.precision, int32_t{CONVPOOL_F32});
            const int tf32 = t.precision == static_cast<int32_t>(Precision::kTF32);
            infos[i] = {sizeof infos[i], t.id, t.name.c_str(), t.method, dtype, tf32, t.min_cc, t.split, t.packed, t.roundings()};
        }
        return CONVPOOL_OK;
    });
    return status == CONVPOOL_OK ? static_cast<int32_t>(tactics().size()) : 0;
}

convpool_status convpool_output_shape(const convpool_problem *problem, int64_t *out_spatial) {
    return guarded([&] {
        Problem p;
        convpool_status status = read_problem(problem, p);
        if (status == CONVPOOL_OK && out_spatial != nullptr)
            for (int i = 0; i < p.rank; ++i) out_spatial[i] = p.out[kRank - p.rank + i];
        return status;
    });
}

convpool_status convpool_device(int32_t *cc, int32_t *multiprocessors, int32_t *shared_bytes) {
    return guarded([&] {
        Device device;
        if (const convpool_status status = read_device(device); status != CONVPOOL_OK) return status;
        if (cc != nullptr) *cc = device.cc;
        if (multiprocessors != nullptr) *multiprocessors = device.multiprocessors;
        if (shared_bytes != nullptr) *shared_bytes = device.shared_per_block;
        return CONVPOOL_OK;
    });
}

convpool_status convpool_supports(const convpool_problem *problem, int32_t tactic, int32_t cc, int32_t shared_bytes) {
    return guarded([&] {
        Problem p;
        const Tactic *t = nullptr;
        Device device;
        convpool_status status = read_both(problem, tactic, p, t);
        if (status == CONVPOOL_OK) status = device_for(cc, 0, shared_bytes, device);
        if (status != CONVPOOL_OK) return status;
        std::string reason;
        return make_plan(p, *t, device, reason) != nullptr ? CONVPOOL_OK : fail(CONVPOOL_UNSUPPORTED, reason);
    });
}

convpool_status convpool_workspace_bytes(const convpool_problem *problem, int32_t tactic, size_t *bytes) {
    return guarded([&] { return workspace_bytes(problem, tactic, bytes, [](const Workspace &w) { return w.total(); }); });
}

convpool_status convpool_prepared_bytes(const convpool_problem *problem, int32_t tactic, size_t *bytes) {
    return guarded([&] { return workspace_bytes(problem, tactic, bytes, [](const Workspace &w) { return w.weights_bytes; }); });
}

convpool_status convpool_default_tactic(const convpool_problem *problem, int32_t cc, int32_t multiprocessors,
                                        int32_t shared_bytes, size_t max_workspace_bytes, int32_t *tactic) {
    return guarded([&] {
        Problem p;
        Device device;
        convpool_status status = read_problem(problem, p);
        if (status == CONVPOOL_OK) status = device_for(cc, multiprocessors, shared_bytes, device);
        if (status != CONVPOOL_OK) return status;
        if (tactic == nullptr) return fail(CONVPOOL_INVALID_ARGUMENT, "tactic: the pointer is null");
        last_error() = tuned_error();  // which stays the last message
        std::string reason;
        const Choice choice = choose(p, device, max_workspace_bytes, kAllTensors, reason);
        if (choice.plan == nullptr) return fail(CONVPOOL_UNSUPPORTED, reason);
        *tactic = choice.plan->tactic.id;
        return CONVPOOL_OK;
    });
}

convpool_status convpool_prepare(const convpool_problem *problem, int32_t tactic) {
    return guarded([&] {
        Problem p;
        const Tactic *t = nullptr;
        std::unique_ptr<convpool_plan> plan;
        const convpool_status status = read_both(problem, tactic, p, t);
        return status == CONVPOOL_OK ? create_plan(p, {tactic, SIZE_MAX, kAllTensors}, plan) : status;
    });
}

convpool_status convpool_launch(const convpool_problem *problem, int32_t tactic, const convpool_tensors *tensors, void *stream) {
    return guarded([&] {
        Problem p;
        convpool_status status = read_problem(problem, p);
        if (status == CONVPOOL_OK) status = check_tensors(pointer_rules(p), tensors);
        if (status != CONVPOOL_OK) return status;
        const convpool_tensors &t = *tensors;
        PlanRequest request{tactic, SIZE_MAX, kAllTensors};
        if (tactic == 0) {
            if (t.prepared != nullptr || t.flags != 0)
                return fail(CONVPOOL_INVALID_ARGUMENT, std::string("tensors: ") + (t.prepared != nullptr ? "prepared" : "flags") +
                                                           ", and tactic 0; expected the tactic that it is for");
            request = {0, t.workspace != nullptr ? t.workspace_bytes : 0, vector_aligned(p, t)};
        }
        std::unique_ptr<convpool_plan> plan;
        status = create_plan(p, request, plan);
        return status == CONVPOOL_OK ? launch_plan(*plan, t, static_cast<cudaStream_t>(stream)) : status;
    });
}

}  // extern "C"

namespace convpool {

std::string &last_error() {
    static thread_local std::string message;
    return message;
}

convpool_status fail(convpool_status status, const std::string &message) {
    last_error() = message;
    return status;
}

convpool_status read_tactic(int32_t id, const Tactic *&tactic) {
    tactic = find_tactic(id);
    return tactic != nullptr ? CONVPOOL_OK : invalid("tactic: no such id", id, "one that convpool_tactics lists");
}

convpool_status read_problem(const convpool_problem *description, Problem &problem) {
    std::string error;
    return check_problem(description, problem, error) ? CONVPOOL_OK : fail(CONVPOOL_INVALID_ARGUMENT, error);
}

convpool_status read_device(Device &device) { return cuda_status("no current CUDA device", current_device(device)); }

convpool_status check_pointers(std::initializer_list<PointerArgument> pointers) {
    for (auto [name, pointer, alignment, multiple] : pointers) {
        if (pointer == nullptr) return fail(CONVPOOL_INVALID_ARGUMENT, std::string(name) + ": the pointer is null");
        if (!aligned(pointer, alignment))
            return fail(CONVPOOL_MISALIGNED, std::string(name) + ": not aligned to " +
                                                 (multiple != nullptr ? multiple : std::to_string(alignment) + " bytes"));
    }
    return CONVPOOL_OK;
}

convpool_status cuda_status(const char *what, cudaError_t error) {
    if (error == cudaSuccess) return CONVPOOL_OK;
    return fail(CONVPOOL_CUDA_ERROR, std::string(what) + ": " + cudaGetErrorName(error) + ", " + cudaGetErrorString(error));
}

}  // namespace convpool

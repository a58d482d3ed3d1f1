// The C API: checks and choice. Nothing throws out of here.
#include <algorithm>
#include <cstdint>
#include <exception>
#include <string>

#include <cuda_runtime_api.h>

#include "convpool.h"
#include "problem.h"
#include "run.h"
#include "tactics.h"
#include "tuned.h"

#ifndef CONVPOOL_ARCHITECTURES
#error "the build defines CONVPOOL_ARCHITECTURES"
#endif

namespace convpool {
namespace {

static_assert(sizeof(convpool_problem) == 248, "no padding: unknown bytes are checked to be zero");

thread_local std::string last_error;

convpool_status fail(convpool_status status, const std::string &message) {
    last_error = message;
    return status;
}

convpool_status cuda_failure(const char *what, cudaError_t error) {
    return fail(CONVPOOL_CUDA_ERROR, std::string(what) + ": " + cudaGetErrorName(error) + ", " + cudaGetErrorString(error));
}

// Every entry point that does more than return a constant runs in here.
template <class Body> convpool_status guarded(Body body) noexcept {
    try {
        last_error.clear();
        return body();
    } catch (const std::exception &e) {
        try {
            return fail(CONVPOOL_INVALID_ARGUMENT, std::string("internal error: ") + e.what());
        } catch (...) {
            return CONVPOOL_INVALID_ARGUMENT;
        }
    } catch (...) {
        return CONVPOOL_INVALID_ARGUMENT;
    }
}

cudaError_t current_device(Device &device) {
    int number = 0, major = 0, minor = 0;
    cudaError_t error = cudaGetDevice(&number);
    auto attribute = [&](int &value, cudaDeviceAttr name) {
        if (error == cudaSuccess) error = cudaDeviceGetAttribute(&value, name, number);
    };
    attribute(major, cudaDevAttrComputeCapabilityMajor);
    attribute(minor, cudaDevAttrComputeCapabilityMinor);
    attribute(device.multiprocessors, cudaDevAttrMultiProcessorCount);
    attribute(device.shared_per_block, cudaDevAttrMaxSharedMemoryPerBlockOptin);
    attribute(device.shared_per_multiprocessor, cudaDevAttrMaxSharedMemoryPerMultiprocessor);
    device.cc = major * 10 + minor;
    return error;
}

// The caller's description of a device, or the current one where cc is 0.
convpool_status device_for(int32_t cc, int32_t multiprocessors, int32_t shared_bytes, Device &device) {
    if (cc == 0) {
        const cudaError_t error = current_device(device);
        if (error != cudaSuccess) return cuda_failure("no current CUDA device", error);
        return CONVPOOL_OK;
    }
    if (cc < 0 || multiprocessors < 0 || shared_bytes < 0)
        return fail(CONVPOOL_INVALID_ARGUMENT, "device: a negative size; expected 0 or more");
    if (shared_bytes > 1 << 24)
        return fail(CONVPOOL_INVALID_ARGUMENT, "device: shared_bytes; got " + std::to_string(shared_bytes) +
                                                   ", expected at most 2^24: bytes that a block may have");
    device.cc = cc;
    device.multiprocessors = multiprocessors > 0 ? multiprocessors : 1;
    device.shared_per_block = shared_bytes > 0 ? shared_bytes : 48 * 1024;
    device.shared_per_multiprocessor = device.shared_per_block + 1024;
    return CONVPOOL_OK;
}

convpool_status read_problem(const convpool_problem *description, Problem &problem) {
    std::string error;
    return check_problem(description, problem, error) ? CONVPOOL_OK : fail(CONVPOOL_INVALID_ARGUMENT, error);
}

convpool_status read_tactic(int32_t id, const Tactic *&tactic) {
    tactic = find_tactic(id);
    return tactic != nullptr ? CONVPOOL_OK
                             : fail(CONVPOOL_INVALID_ARGUMENT, "tactic: no such id; got " + std::to_string(id) +
                                                                   ", expected one that convpool_tactics lists");
}

bool is_implicit_gemm(const Tactic &t) { return t.direct_gemm() || t.filter_fused(); }

// The tactic measured fastest, or by the cost rule; where X or W is not aligned to 16 bytes, one that takes it so. That the
// measured ones could not be read stays the last message.
const Tactic &best_tactic(const Problem &problem, const Device &device, size_t max_workspace_bytes, bool vectors_aligned) {
    auto runs = [&](const Tactic &t) {
        return (vectors_aligned || !is_implicit_gemm(t)) && reject_reason(problem, t, device).empty() &&
               workspace_layout(problem, t).total <= max_workspace_bytes;
    };
    last_error = tuned_error();
    const Tactic *best = find_tactic(tuned_tactic(problem, device));
    if (best != nullptr && runs(*best)) return *best;
    best = find_tactic(1);
    double best_us = 1e300;
    for (int i = 0; i < tactic_count(); ++i) {
        const Tactic &t = tactic_at(i);
        if (!runs(t)) continue;
        const double us = expected_us(problem, t, device);
        if (us < best_us) {
            best_us = us;
            best = &t;
        }
    }
    return *best;
}

convpool_status check_tensors(const Problem &p, const convpool_tensors *t) {
    if (t == nullptr) return fail(CONVPOOL_INVALID_ARGUMENT, "tensors: the pointer is null");
    if (t->struct_size < sizeof(convpool_tensors))
        return fail(CONVPOOL_INVALID_ARGUMENT, "tensors: struct_size; got " + std::to_string(t->struct_size) + ", expected " +
                                                   std::to_string(sizeof(convpool_tensors)) + " or more");
    const unsigned char *bytes = reinterpret_cast<const unsigned char *>(t);
    for (size_t i = sizeof(convpool_tensors); i < t->struct_size; ++i)
        if (bytes[i] != 0)
            return fail(CONVPOOL_INVALID_ARGUMENT,
                        "tensors: byte " + std::to_string(i) + " is set, of a field that this version does not know; expected 0");
    if ((t->flags & ~CONVPOOL_WEIGHTS_PREPARED) != 0)
        return fail(CONVPOOL_INVALID_ARGUMENT,
                    "tensors: flags; got " + std::to_string(t->flags) + ", expected 0 or CONVPOOL_WEIGHTS_PREPARED");
    struct Pointer {
        const char *name;
        const void *value;
        bool needed;
        int bytes;
    };
    const int bytes_each = p.element_bytes();
    for (auto [name, value, needed, element] : {Pointer{"x", t->x, true, p.x_element_bytes()},
                                                {"w", t->w, true, bytes_each},
                                                {"b", t->b, p.has_bias, bytes_each},
                                                {"residual", t->residual, p.has_residual, bytes_each},
                                                {"y", t->y, true, bytes_each},
                                                {"scale", t->scale, p.prologue_affine, bytes_each},
                                                {"shift", t->shift, p.prologue_affine, bytes_each}}) {
        if (!needed) continue;
        if (value == nullptr) return fail(CONVPOOL_INVALID_ARGUMENT, std::string("tensors: ") + name + " is null");
        if (!aligned(value, element))
            return fail(CONVPOOL_MISALIGNED,
                        std::string("tensors: ") + name + " is not aligned to its " + std::to_string(element) + "-byte elements");
    }
    return CONVPOOL_OK;
}

convpool_status launch(const Problem &problem, int32_t id, const convpool_tensors &t, cudaStream_t stream) {
    if (id == 0 && (t.prepared != nullptr || t.flags != 0))
        return fail(CONVPOOL_INVALID_ARGUMENT, std::string("tensors: ") + (t.prepared != nullptr ? "prepared" : "flags") +
                                                   ", and tactic 0; expected the tactic that it is for");
    Device device;
    cudaError_t error = current_device(device);
    if (error != cudaSuccess) return cuda_failure("no current CUDA device", error);
    const bool vectors_aligned = aligned(t.x, 16) && aligned(t.w, 16);
    const Tactic *tactic = nullptr;
    if (id == 0) {
        tactic = &best_tactic(problem, device, t.workspace != nullptr ? t.workspace_bytes : 0, vectors_aligned);
    } else {
        if (convpool_status status = read_tactic(id, tactic); status != CONVPOOL_OK) return status;
        if (std::string reason = reject_reason(problem, *tactic, device); !reason.empty())
            return fail(CONVPOOL_UNSUPPORTED, reason);
    }
    const WorkspaceLayout layout = workspace_layout(problem, *tactic);
    const bool kept = t.prepared != nullptr;
    struct Memory {
        const char *name;
        const void *start;
        size_t bytes, needed;
    };
    for (auto [name, start, bytes, needed] :
         {Memory{"prepared", t.prepared, t.prepared_bytes, kept ? layout.weights_bytes : 0},
          {"workspace", t.workspace, t.workspace_bytes, kept ? layout.x_bytes : layout.total}}) {
        if (needed == 0) continue;
        if (start == nullptr || bytes < needed)
            return fail(CONVPOOL_WORKSPACE_TOO_SMALL, std::string(tactic->name()) + ": " + name + "; got " +
                                                          std::to_string(start == nullptr ? 0 : bytes) + " bytes, expected " +
                                                          std::to_string(needed));
        if (!aligned(start, 256))
            return fail(CONVPOOL_MISALIGNED, std::string(tactic->name()) + ": " + name + " is not aligned to 256 bytes");
    }
    if (is_implicit_gemm(*tactic) && ((!layout.box_pass && !aligned(t.x, 16)) || (!layout.weight_pass && !aligned(t.w, 16))))
        return fail(CONVPOOL_MISALIGNED,
                    std::string(tactic->name()) + ": x and w are not aligned to 16 bytes; use direct_fused or generic");
    error = run_tactic(problem, *tactic, device, t, stream);
    return error == cudaSuccess ? CONVPOOL_OK : cuda_failure(tactic->name(), error);
}

}  // namespace
}  // namespace convpool

using namespace convpool;

extern "C" {

#define CONVPOOL_QUOTED(number) #number
#define CONVPOOL_DOTTED(major, minor, patch) CONVPOOL_QUOTED(major) "." CONVPOOL_QUOTED(minor) "." CONVPOOL_QUOTED(patch)

const char *convpool_version(void) {
    return CONVPOOL_DOTTED(CONVPOOL_VERSION_MAJOR, CONVPOOL_VERSION_MINOR, CONVPOOL_VERSION_PATCH);
}
const char *convpool_architectures(void) { return CONVPOOL_ARCHITECTURES; }
int32_t convpool_cuda_version(void) { return CUDART_VERSION; }
const char *convpool_last_error(void) { return last_error.c_str(); }

const char *convpool_status_name(convpool_status status) {
    switch (status) {
    case CONVPOOL_OK: return "ok";
    case CONVPOOL_INVALID_ARGUMENT: return "invalid argument";
    case CONVPOOL_UNSUPPORTED: return "unsupported";
    case CONVPOOL_WORKSPACE_TOO_SMALL: return "workspace too small";
    case CONVPOOL_MISALIGNED: return "misaligned";
    case CONVPOOL_CUDA_ERROR: return "CUDA error";
    }
    return "unknown status";
}

int32_t convpool_tactics(convpool_tactic_info *infos, int32_t capacity) {
    if (infos == nullptr) return tactic_count();
    if (capacity > 0 && infos[0].struct_size != sizeof(convpool_tactic_info)) return 0;
    for (int i = 0; i < std::min<int>(capacity, tactic_count()); ++i) {
        const Tactic &t = tactic_at(i);
        const int dtypes[] = {CONVPOOL_F16, CONVPOOL_BF16, CONVPOOL_F32, CONVPOOL_F32};
        infos[i] = {sizeof(convpool_tactic_info),
                    t.id,
                    t.name(),
                    t.family_name(),
                    t.precision < 0 ? -1 : dtypes[t.precision],
                    t.precision == static_cast<int32_t>(Precision::kTF32),
                    t.min_cc(),
                    t.split};
    }
    return tactic_count();
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
        const cudaError_t error = current_device(device);
        if (error != cudaSuccess) return cuda_failure("no current CUDA device", error);
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
        convpool_status status = read_problem(problem, p);
        if (status == CONVPOOL_OK) status = read_tactic(tactic, t);
        if (status == CONVPOOL_OK) status = device_for(cc, 0, shared_bytes, device);
        if (status != CONVPOOL_OK) return status;
        const std::string reason = reject_reason(p, *t, device);
        return reason.empty() ? CONVPOOL_OK : fail(CONVPOOL_UNSUPPORTED, reason);
    });
}

convpool_status convpool_workspace_bytes(const convpool_problem *problem, int32_t tactic, size_t *bytes) {
    return guarded([&] {
        Problem p;
        const Tactic *t = nullptr;
        convpool_status status = read_problem(problem, p);
        if (status == CONVPOOL_OK) status = read_tactic(tactic, t);
        if (status != CONVPOOL_OK) return status;
        if (bytes == nullptr) return fail(CONVPOOL_INVALID_ARGUMENT, "bytes: the pointer is null");
        *bytes = workspace_layout(p, *t).total;
        return CONVPOOL_OK;
    });
}

convpool_status convpool_prepared_bytes(const convpool_problem *problem, int32_t tactic, size_t *bytes) {
    return guarded([&] {
        Problem p;
        const Tactic *t = nullptr;
        convpool_status status = read_problem(problem, p);
        if (status == CONVPOOL_OK) status = read_tactic(tactic, t);
        if (status != CONVPOOL_OK) return status;
        if (bytes == nullptr) return fail(CONVPOOL_INVALID_ARGUMENT, "bytes: the pointer is null");
        *bytes = workspace_layout(p, *t).weights_bytes;
        return CONVPOOL_OK;
    });
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
        *tactic = best_tactic(p, device, max_workspace_bytes, true).id;
        return CONVPOOL_OK;
    });
}

convpool_status convpool_prepare(const convpool_problem *problem, int32_t tactic) {
    return guarded([&] {
        Problem p;
        const Tactic *t = nullptr;
        Device device;
        convpool_status status = read_problem(problem, p);
        if (status == CONVPOOL_OK) status = read_tactic(tactic, t);
        if (status == CONVPOOL_OK) status = device_for(0, 0, 0, device);
        if (status != CONVPOOL_OK) return status;
        if (std::string reason = reject_reason(p, *t, device); !reason.empty()) return fail(CONVPOOL_UNSUPPORTED, reason);
        const cudaError_t error = load_kernels(p, *t, device);
        return error == cudaSuccess ? CONVPOOL_OK : cuda_failure(t->name(), error);
    });
}

convpool_status convpool_launch(const convpool_problem *problem, int32_t tactic, const convpool_tensors *tensors, void *stream) {
    return guarded([&] {
        Problem p;
        convpool_status status = read_problem(problem, p);
        if (status == CONVPOOL_OK) status = check_tensors(p, tensors);
        if (status != CONVPOOL_OK) return status;
        return launch(p, tactic, *tensors, static_cast<cudaStream_t>(stream));
    });
}

}  // extern "C"

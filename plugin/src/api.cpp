// The C API: checks, dispatch and launches. Nothing throws out of here.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <exception>
#include <string>

#include <cuda_runtime_api.h>

#include "convpool.h"
#include "launch.h"
#include "problem.h"
#include "tactics.h"

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
    cudaError_t error = cudaGetDevice(&device.ordinal);
    int major = 0, minor = 0;
    auto attribute = [&](int &value, cudaDeviceAttr name) {
        if (error == cudaSuccess) error = cudaDeviceGetAttribute(&value, name, device.ordinal);
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

const Tactic &best_tactic(const Problem &problem, const Device &device, size_t max_workspace_bytes) {
    const Tactic *best = find_tactic(1);
    double best_us = 1e300;
    for (int i = 0; i < tactic_count(); ++i) {
        const Tactic &t = tactic_at(i);
        if (!reject_reason(problem, t, device).empty()) continue;
        if (workspace_layout(problem, t).total > max_workspace_bytes) continue;
        const double us = expected_us(problem, t, device);
        if (us < best_us) {
            best_us = us;
            best = &t;
        }
    }
    return *best;
}

// Raises a kernel's limit of dynamic shared memory, once per device. Two threads may both do it, to the same value.
cudaError_t raise_shared_limit(const Tactic &tactic, const Device &device) {
    constexpr int kDevices = 64;
    static std::atomic<uint64_t> raised[256];  // by row: a bit per device
    const int row = static_cast<int>(&tactic - &tactic_at(0));
    const bool remembered = device.ordinal < kDevices && row < 256;
    const uint64_t bit = remembered ? uint64_t{1} << device.ordinal : 0;
    if (remembered && (raised[row].load(std::memory_order_acquire) & bit) != 0) return cudaSuccess;
    // Loading the kernel is no stream operation, but a capture in strict mode on another thread would object to it.
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    cudaError_t error = cudaThreadExchangeStreamCaptureMode(&mode);
    if (error != cudaSuccess) return error;
    error = cudaFuncSetAttribute(tactic.kernel(), cudaFuncAttributeMaxDynamicSharedMemorySize, device.shared_per_block);
    cudaThreadExchangeStreamCaptureMode(&mode);
    if (error == cudaSuccess && remembered) raised[row].fetch_or(bit, std::memory_order_release);
    return error;
}

cudaError_t launch_kernel(const Tactic &tactic, const Device &device, unsigned grid, size_t shared_bytes, void *params,
                          cudaStream_t stream) {
    cudaError_t error = raise_shared_limit(tactic, device);
    if (error != cudaSuccess) return error;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(grid);
    config.blockDim = dim3(tactic.threads());
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    cudaLaunchAttribute attributes[2]{};
    config.attrs = attributes;
    if (tactic.split > 1) {
        attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
        attributes[config.numAttrs++].val.clusterDim = {static_cast<unsigned>(tactic.split), 1, 1};
    }
    if (device.cc >= 90) {  // the kernels wait for the one before them themselves: wait_for_previous_kernel()
        attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
    }
    void *arguments[] = {params};
    return cudaLaunchKernelExC(&config, tactic.kernel(), arguments);
}

bool aligned(const void *pointer, size_t bytes) { return reinterpret_cast<uintptr_t>(pointer) % bytes == 0; }

Epilogue epilogue_of(const Problem &p, const convpool_tensors &t) {
    return {p.has_bias ? t.b : nullptr, p.has_residual ? t.residual : nullptr, p.activation, p.alpha, p.beta};
}

// Rows of channels of Y, the residual (which has Y's layout) and the bias are whole aligned chunks.
bool y_vectors(const Problem &p, const convpool_tensors &t) {
    return p.y_channels_last && p.m % p.per_chunk() == 0 && aligned(t.y, 16) &&
           (!p.has_residual || aligned(t.residual, 16)) && (!p.has_bias || aligned(t.b, 16));
}

cudaError_t run_generic(const Problem &p, const convpool_tensors &t, cudaStream_t stream) {
    GenericParams g{};
    g.x = t.x;
    g.w = t.w;
    g.y = t.y;
    g.epilogue = epilogue_of(p, t);
    g.outputs = p.n * p.m * p.out_pixels();
    g.c_per_group = static_cast<int32_t>(p.c / p.group);
    g.m_per_group = static_cast<int32_t>(p.m / p.group);
    g.c = static_cast<int32_t>(p.c);
    g.m = static_cast<int32_t>(p.m);
    for (int i = 0; i < kRank; ++i) {
        g.in[i] = static_cast<int32_t>(p.in[i]);
        g.pooled[i] = static_cast<int32_t>(p.pooled[i]);
        g.out[i] = static_cast<int32_t>(p.out[i]);
        g.pool_kernel[i] = p.pool_kernel[i];
        g.pool_strides[i] = p.pool_strides[i];
        g.pool_pads[i] = p.pool_pads_begin[i];
        g.pool_dilations[i] = p.pool_dilations[i];
        g.kernel[i] = p.kernel[i];
        g.strides[i] = p.strides[i];
        g.pads[i] = p.pads_begin[i];
        g.dilations[i] = p.dilations[i];
    }
    g.x_channels_last = p.x_channels_last;
    g.y_channels_last = p.y_channels_last;
    g.count = static_cast<float>(p.pool_size());
    const Precision precision = p.dtype == CONVPOOL_F16    ? Precision::kF16
                                : p.dtype == CONVPOOL_BF16 ? Precision::kBF16
                                                           : Precision::kTF32x3;
    return launch_generic(g, precision, stream);
}

cudaError_t run_direct_fused(const Problem &p, const Tactic &tactic, const Device &device, const convpool_tensors &t,
                             cudaStream_t stream) {
    DirectFusedPlan plan;
    std::string reason;
    if (!plan_direct_fused(p, tactic, device, plan, reason)) return cudaErrorInvalidValue;  // supports() has said so
    DirectFusedParams &d = plan.params;
    d.x = t.x;
    d.w = t.w;
    d.y = t.y;
    d.epilogue = epilogue_of(p, t);
    d.x_chunked = p.x_rows_chunked() && aligned(t.x, 16);
    d.w_chunked = p.w_rows_chunked() && aligned(t.w, 16);
    d.y_vectors = y_vectors(p, t);
    return launch_kernel(tactic, device, plan.grid, plan.shared_bytes, &d, stream);
}

cudaError_t run_implicit_gemm(const Problem &p, const Tactic &tactic, const Device &device, const convpool_tensors &t,
                              cudaStream_t stream) {
    const WorkspaceLayout layout = workspace_layout(p, tactic);
    const Shape2d shape = gemm_shape(p, tactic);
    const Precision precision = static_cast<Precision>(tactic.precision);
    char *workspace = static_cast<char *>(t.workspace);
    const void *x = t.x, *w = t.w;
    if (layout.weight_pass) {
        w = workspace;
        if ((t.flags & CONVPOOL_WEIGHTS_PREPARED) == 0) {
            WeightParams params = weight_params(p, tactic);
            params.w = t.w;
            params.out = workspace;
            const cudaError_t error = launch_fuse_weights(params, precision, stream);
            if (error != cudaSuccess) return error;
        }
    }
    if (layout.box_pass) {
        BoxMeanParams b{};
        b.x = t.x;
        b.out = workspace + layout.weights_bytes;
        x = b.out;
        b.box = tactic.direct_gemm() ? box_of(p) : BoxMean{1, 1, 1, 1, 1, 1, 0, 0, 1.f, 1.f, 1};
        b.n = shape.n;
        b.c = static_cast<int32_t>(p.c);
        b.h = static_cast<int32_t>(p.in[1]);
        b.w = static_cast<int32_t>(p.in[2]);
        b.out_h = shape.h;
        b.out_w = shape.w;
        b.chunks = shape.c / p.per_chunk();
        b.x_channels_last = p.x_channels_last;
        b.x_chunked = p.x_rows_chunked() && aligned(t.x, 16);
        b.div_chunks = FastDiv(b.chunks);
        b.div_out_w = FastDiv(b.out_w);
        b.div_out_h = FastDiv(b.out_h);
        const cudaError_t error = launch_box_mean(b, precision, device.cc >= 90, stream);
        if (error != cudaSuccess) return error;
    }
    ImplicitGemmParams g{};
    g.x = x;
    g.w = w;
    g.y = t.y;
    g.epilogue = epilogue_of(p, t);
    g.shape = shape;
    g.y_vectors = y_vectors(p, t);
    g.pixels = static_cast<int32_t>(p.n * p.out_pixels());
    const int slice = 4 * p.per_chunk();
    g.slices = (shape.c + slice - 1) / slice;
    g.m_tiles = (shape.m + tactic.block_n - 1) / tactic.block_n;
    g.div_out_w = FastDiv(shape.out_w);
    g.div_out_hw = FastDiv(static_cast<uint32_t>(p.out_pixels()));
    g.div_m_tiles = FastDiv(g.m_tiles);
    g.split = tactic.split;
    const int tap_chunks = shape.c / p.per_chunk();
    g.chunks = shape.kh * shape.kw * tap_chunks;
    g.div_tap_chunks = FastDiv(tap_chunks);
    g.div_kw = FastDiv(shape.kw);
    const int64_t tiles = (int64_t{g.pixels} + tactic.block_m - 1) / tactic.block_m * g.m_tiles;
    return launch_kernel(tactic, device, static_cast<unsigned>(tiles * tactic.split), implicit_gemm_shared_bytes(tactic), &g, stream);
}

convpool_status check_tensors(const Problem &p, const convpool_tensors *t) {
    if (t == nullptr) return fail(CONVPOOL_INVALID_ARGUMENT, "tensors: the pointer is null");
    if (t->struct_size != sizeof(convpool_tensors))
        return fail(CONVPOOL_INVALID_ARGUMENT, "tensors: struct_size; got " + std::to_string(t->struct_size) +
                                                   ", expected " + std::to_string(sizeof(convpool_tensors)));
    if ((t->flags & ~CONVPOOL_WEIGHTS_PREPARED) != 0)
        return fail(CONVPOOL_INVALID_ARGUMENT, "tensors: flags; got " + std::to_string(t->flags) +
                                                   ", expected 0 or CONVPOOL_WEIGHTS_PREPARED");
    struct Pointer { const char *name; const void *value; bool needed; };
    for (auto [name, value, needed] : {Pointer{"x", t->x, true}, {"w", t->w, true}, {"b", t->b, p.has_bias},
                                       {"residual", t->residual, p.has_residual}, {"y", t->y, true}}) {
        if (!needed) continue;
        if (value == nullptr)
            return fail(CONVPOOL_INVALID_ARGUMENT, std::string("tensors: ") + name + " is null");
        if (!aligned(value, p.element_bytes()))
            return fail(CONVPOOL_MISALIGNED, std::string("tensors: ") + name + " is not aligned to its " +
                                                 std::to_string(p.element_bytes()) + "-byte elements");
    }
    return CONVPOOL_OK;
}

convpool_status launch(const Problem &problem, int32_t id, const convpool_tensors &t, cudaStream_t stream) {
    Device device;
    cudaError_t error = current_device(device);
    if (error != cudaSuccess) return cuda_failure("no current CUDA device", error);
    const bool vectors_aligned = aligned(t.x, 16) && aligned(t.w, 16);
    const Tactic *tactic = nullptr;
    if (id == 0) {
        tactic = &best_tactic(problem, device, vectors_aligned ? t.workspace_bytes : 0);
    } else {
        if (convpool_status status = read_tactic(id, tactic); status != CONVPOOL_OK) return status;
        if (std::string reason = reject_reason(problem, *tactic, device); !reason.empty())
            return fail(CONVPOOL_UNSUPPORTED, reason);
    }
    const WorkspaceLayout layout = workspace_layout(problem, *tactic);
    if (layout.total > 0) {
        if (t.workspace == nullptr || t.workspace_bytes < layout.total)
            return fail(CONVPOOL_WORKSPACE_TOO_SMALL,
                        std::string(tactic->name()) + ": workspace; got " +
                            std::to_string(t.workspace == nullptr ? 0 : t.workspace_bytes) + " bytes, expected " +
                            std::to_string(layout.total));
        if (!aligned(t.workspace, 256))
            return fail(CONVPOOL_MISALIGNED, std::string(tactic->name()) + ": workspace is not aligned to 256 bytes");
    }
    switch (tactic->family) {
    case Family::kGeneric: error = run_generic(problem, t, stream); break;
    case Family::kDirectFused:
    case Family::kDirectFusedSm90: error = run_direct_fused(problem, *tactic, device, t, stream); break;
    default:
        if ((!layout.box_pass && !aligned(t.x, 16)) || (!layout.weight_pass && !aligned(t.w, 16)))
            return fail(CONVPOOL_MISALIGNED, std::string(tactic->name()) +
                                                 ": x and w are not aligned to 16 bytes; use direct_fused or generic");
        error = run_implicit_gemm(problem, *tactic, device, t, stream);
    }
    return error == cudaSuccess ? CONVPOOL_OK : cuda_failure(tactic->name(), error);
}

}  // namespace
}  // namespace convpool

using namespace convpool;

extern "C" {

const char *convpool_version(void) { return "0.1.0"; }
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
        infos[i] = {sizeof(convpool_tactic_info), t.id, t.name(), t.family_name(),
                    t.precision < 0 ? -1 : dtypes[t.precision],
                    t.precision == static_cast<int32_t>(Precision::kTF32), t.min_cc(), t.split};
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
        *tactic = best_tactic(p, device, max_workspace_bytes).id;
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
        if (std::string reason = reject_reason(p, *t, device); !reason.empty())
            return fail(CONVPOOL_UNSUPPORTED, reason);
        const cudaError_t error = t->kernel() == nullptr ? cudaSuccess : raise_shared_limit(*t, device);
        return error == cudaSuccess ? CONVPOOL_OK : cuda_failure(t->name(), error);
    });
}

convpool_status convpool_launch(const convpool_problem *problem, int32_t tactic, const convpool_tensors *tensors,
                                void *stream) {
    return guarded([&] {
        Problem p;
        convpool_status status = read_problem(problem, p);
        if (status == CONVPOOL_OK) status = check_tensors(p, tensors);
        if (status != CONVPOOL_OK) return status;
        return launch(p, tactic, *tensors, static_cast<cudaStream_t>(stream));
    });
}

}  // extern "C"

// A pretended CUDA runtime and driver: devices to choose from, and a record of what the library asked them to do. Nothing runs.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstring>
#include <mutex>
#include <vector>

namespace {

struct Launch {
    const void *function;
    unsigned grid, threads, cluster;
    size_t shared_bytes;
};

std::mutex mutex;
thread_local int ordinal = -1;  // the current device; -1: none
thread_local uint64_t context = 0;
int capability = 90, multiprocessors = 132, shared_bytes = 232448;
std::vector<Launch> launches;
int loads = 0, encodings = 0;

CUresult encode(CUtensorMap *map, void *address) {
    const std::lock_guard<std::mutex> lock(mutex);
    ++encodings;
    std::memset(map, 0, sizeof *map);
    std::memcpy(map, &address, sizeof address);
    return reinterpret_cast<uintptr_t>(address) % 16 == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult encode_tiled(CUtensorMap *map, CUtensorMapDataType, cuuint32_t, void *address, const cuuint64_t *, const cuuint64_t *,
                      const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
                      CUtensorMapFloatOOBfill) {
    return encode(map, address);
}

CUresult encode_im2col(CUtensorMap *map, CUtensorMapDataType, cuuint32_t, void *address, const cuuint64_t *, const cuuint64_t *,
                       const int *, const int *, cuuint32_t, cuuint32_t, const cuuint32_t *, CUtensorMapInterleave,
                       CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
    return encode(map, address);
}

CUresult context_id(CUcontext, unsigned long long *id) {
    if (context == 0) return CUDA_ERROR_INVALID_CONTEXT;
    *id = context;
    return CUDA_SUCCESS;
}

cudaError_t entry_point(const char *name, void **function, cudaDriverEntryPointQueryResult *result) {
    *function = std::strcmp(name, "cuTensorMapEncodeTiled") == 0    ? reinterpret_cast<void *>(&encode_tiled)
                : std::strcmp(name, "cuTensorMapEncodeIm2col") == 0 ? reinterpret_cast<void *>(&encode_im2col)
                : std::strcmp(name, "cuCtxGetId") == 0              ? reinterpret_cast<void *>(&context_id)
                                                                    : nullptr;
    *result = *function == nullptr ? cudaDriverEntryPointSymbolNotFound : cudaDriverEntryPointSuccess;
    return cudaSuccess;
}

}  // namespace

extern "C" {

#define PRETENDED __attribute__((visibility("default")))

// The thread's current device and context from now on; -1: there is none.
PRETENDED void pretended_set_device(int device, uint64_t context_number) {
    ordinal = device;
    context = context_number;
}
// What every device is from now on.
PRETENDED void pretended_describe(int cc, int processors, int shared) {
    capability = cc, multiprocessors = processors, shared_bytes = shared;
}
PRETENDED void pretended_forget(void) {
    const std::lock_guard<std::mutex> lock(mutex);
    launches.clear();
    loads = encodings = 0;
}
PRETENDED int pretended_launches(void) {
    const std::lock_guard<std::mutex> lock(mutex);
    return static_cast<int>(launches.size());
}
PRETENDED const Launch *pretended_launch(int index) { return &launches.at(index); }
PRETENDED int pretended_loads(void) { return loads; }
PRETENDED int pretended_encodings(void) { return encodings; }

cudaError_t __wrap_cudaGetDevice(int *device) {
    if (ordinal < 0) return cudaErrorNoDevice;
    *device = ordinal;
    return cudaSuccess;
}

cudaError_t __wrap_cudaDeviceGetAttribute(int *value, cudaDeviceAttr name, int) {
    switch (name) {
    case cudaDevAttrComputeCapabilityMajor: *value = capability / 10; break;
    case cudaDevAttrComputeCapabilityMinor: *value = capability % 10; break;
    case cudaDevAttrMultiProcessorCount: *value = multiprocessors; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = shared_bytes; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = shared_bytes + 1024; break;
    default: return cudaErrorInvalidValue;
    }
    return cudaSuccess;
}

cudaError_t __wrap_cudaFuncSetAttribute(const void *function, cudaFuncAttribute, int) {
    const std::lock_guard<std::mutex> lock(mutex);
    ++loads;
    return function == nullptr ? cudaErrorInvalidDeviceFunction : cudaSuccess;
}

cudaError_t __wrap_cudaFuncGetAttributes(cudaFuncAttributes *attributes, const void *function) {
    *attributes = {};
    return __wrap_cudaFuncSetAttribute(function, cudaFuncAttributeMax, 0);
}

cudaError_t __wrap_cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode *mode) {
    thread_local cudaStreamCaptureMode current = cudaStreamCaptureModeGlobal;
    const cudaStreamCaptureMode before = current;
    current = *mode;
    *mode = before;
    return cudaSuccess;
}

cudaError_t __wrap_cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *function, void **) {
    const std::lock_guard<std::mutex> lock(mutex);
    Launch launch{function, config->gridDim.x, config->blockDim.x, 1, config->dynamicSmemBytes};
    for (unsigned i = 0; i < config->numAttrs; ++i)
        if (config->attrs[i].id == cudaLaunchAttributeClusterDimension) launch.cluster = config->attrs[i].val.clusterDim.x;
    launches.push_back(launch);
    return function == nullptr ? cudaErrorInvalidDeviceFunction : cudaSuccess;
}

cudaError_t __wrap_cudaGetDriverEntryPoint(const char *name, void **function, unsigned long long,
                                           cudaDriverEntryPointQueryResult *result) {
    return entry_point(name, function, result);
}

cudaError_t __wrap_cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned, unsigned long long,
                                                    cudaDriverEntryPointQueryResult *result) {
    return entry_point(name, function, result);
}

}  // extern "C"

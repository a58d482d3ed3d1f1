// SPDX-License-Identifier: Apache-2.0
// A pretended CUDA runtime and driver: devices to choose from, and a record of what the library asked them to do. Nothing runs.
// Device memory is host memory. It stands in the place of NVIDIA's runtime: a function that the library newly calls is added
// here.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
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
constexpr size_t kDeviceBytes = size_t{80} << 30;
size_t taken_bytes = 0;
std::map<void *, size_t> allocations;

// CUDA's limits of a tensor map.
bool encodes(unsigned rank, const void *address, const cuuint64_t *sizes, const cuuint64_t *strides) {
    bool right = rank >= 1 && rank <= 5 && reinterpret_cast<uintptr_t>(address) % 16 == 0;
    for (unsigned i = 0; right && i < rank; ++i) right = sizes[i] >= 1 && sizes[i] <= uint64_t{1} << 32;
    for (unsigned i = 0; right && i + 1 < rank; ++i) right = strides[i] % 16 == 0 && strides[i] < uint64_t{1} << 40;
    return right;
}

CUresult encode(CUtensorMap *map, unsigned rank, void *address, const cuuint64_t *sizes, const cuuint64_t *strides) {
    const std::lock_guard<std::mutex> lock(mutex);
    ++encodings;
    std::memset(map, 0, sizeof *map);
    std::memcpy(map, &address, sizeof address);
    return encodes(rank, address, sizes, strides) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult encode_tiled(CUtensorMap *map, CUtensorMapDataType, cuuint32_t rank, void *address, const cuuint64_t *sizes,
                      const cuuint64_t *strides, const cuuint32_t *box, const cuuint32_t *, CUtensorMapInterleave,
                      CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
    for (unsigned i = 0; i < rank; ++i)
        if (box[i] < 1 || box[i] > 256) return CUDA_ERROR_INVALID_VALUE;
    return encode(map, rank, address, sizes, strides);
}

CUresult encode_im2col(CUtensorMap *map, CUtensorMapDataType, cuuint32_t rank, void *address, const cuuint64_t *sizes,
                       const cuuint64_t *strides, const int *, const int *, cuuint32_t channels, cuuint32_t pixels,
                       const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
                       CUtensorMapFloatOOBfill) {
    return channels <= 256 && pixels <= 1024 ? encode(map, rank, address, sizes, strides) : CUDA_ERROR_INVALID_VALUE;
}

// CUDA's limits of a launch.
bool fits(const cudaLaunchConfig_t &config) {
    const dim3 grid = config.gridDim, block = config.blockDim;
    return grid.x >= 1 && grid.x <= INT32_MAX && grid.y >= 1 && grid.y <= 65535 && grid.z >= 1 && grid.z <= 65535 &&
           block.x >= 1 && block.y >= 1 && block.z >= 1 && uint64_t{block.x} * block.y * block.z <= 1024 &&
           config.dynamicSmemBytes <= static_cast<size_t>(shared_bytes);
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
// Device memory that is taken.
PRETENDED int64_t pretended_bytes(void) {
    const std::lock_guard<std::mutex> lock(mutex);
    return static_cast<int64_t>(taken_bytes);
}
PRETENDED int pretended_loads(void) { return loads; }
PRETENDED int pretended_encodings(void) { return encodings; }

cudaError_t cudaGetDevice(int *device) {
    if (ordinal < 0) return cudaErrorNoDevice;
    *device = ordinal;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
    ordinal = device;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr name, int) {
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

cudaError_t cudaFuncSetAttribute(const void *function, cudaFuncAttribute, int) {
    const std::lock_guard<std::mutex> lock(mutex);
    ++loads;
    return function == nullptr ? cudaErrorInvalidDeviceFunction : cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *attributes, const void *function) {
    *attributes = {};
    return cudaFuncSetAttribute(function, cudaFuncAttributeMax, 0);
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode *mode) {
    thread_local cudaStreamCaptureMode current = cudaStreamCaptureModeGlobal;
    const cudaStreamCaptureMode before = current;
    current = *mode;
    *mode = before;
    return cudaSuccess;
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *function, void **) {
    const std::lock_guard<std::mutex> lock(mutex);
    Launch launch{function, config->gridDim.x, config->blockDim.x, 1, config->dynamicSmemBytes};
    for (unsigned i = 0; i < config->numAttrs; ++i)
        if (config->attrs[i].id == cudaLaunchAttributeClusterDimension) launch.cluster = config->attrs[i].val.clusterDim.x;
    if (function == nullptr) return cudaErrorInvalidDeviceFunction;
    if (!fits(*config)) return cudaErrorInvalidConfiguration;
    launches.push_back(launch);
    return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPoint(const char *name, void **function, unsigned long long,
                                    cudaDriverEntryPointQueryResult *result) {
    return entry_point(name, function, result);
}

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult *result) {
    return entry_point(name, function, result);
}

cudaError_t cudaMalloc(void **memory, size_t size) {
    const std::lock_guard<std::mutex> lock(mutex);
    *memory = nullptr;
    if (size > kDeviceBytes - taken_bytes) return cudaErrorMemoryAllocation;
    *memory = std::aligned_alloc(256, (size + 255) / 256 * 256);
    if (*memory == nullptr) return cudaErrorMemoryAllocation;
    allocations[*memory] = size;
    taken_bytes += size;
    return cudaSuccess;
}

cudaError_t cudaFree(void *memory) {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto found = allocations.find(memory);
    if (found == allocations.end()) return memory == nullptr ? cudaSuccess : cudaErrorInvalidValue;
    taken_bytes -= found->second;
    allocations.erase(found);
    std::free(memory);
    return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus *status) {
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
const char *cudaGetErrorName(cudaError_t error) { return error == cudaErrorNoDevice ? "cudaErrorNoDevice" : "cudaError"; }
const char *cudaGetErrorString(cudaError_t error) {
    return error == cudaErrorNoDevice ? "no CUDA-capable device is detected" : "a pretended error";
}

// What the objects of nvcc call to make their kernels known and to launch them by <<<>>>, which none does.
void **__cudaRegisterFatBinary(void *) {
    static void *handle = nullptr;
    return &handle;
}
void __cudaRegisterFatBinaryEnd(void **) {}
void __cudaUnregisterFatBinary(void **) {}
void __cudaRegisterFunction(void **, const char *, char *, const char *, int, uint3 *, uint3 *, dim3 *, dim3 *, int *) {}
cudaError_t __cudaGetKernel(cudaKernel_t *, const void *) { return cudaErrorNotSupported; }
cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void **, size_t, cudaStream_t) { return cudaErrorNotSupported; }
unsigned __cudaPopCallConfiguration(dim3 *, dim3 *, size_t *, void *) { return 1; }

}  // extern "C"

// A CUDA runtime without a GPU, in the place of NVIDIA's: it believes in an H100, device memory is host memory, and a
// launch is checked against CUDA's limits, counted, and not run.  A function that the library newly calls is added here.
#include "pretended_cuda.h"

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

namespace {

std::atomic<int64_t> launches{0}, bytes{0};
std::mutex mutex;
std::map<void *, size_t> allocations;
constexpr size_t kDeviceBytes = size_t{80} << 30;
constexpr int kSharedBytes = 232448;

CUresult encode_map(CUtensorMap *map, unsigned rank, const void *address, const cuuint64_t *sizes, const cuuint64_t *strides) {
    bool right = map != nullptr && rank >= 1 && rank <= 5 && address != nullptr && reinterpret_cast<size_t>(address) % 16 == 0;
    for (unsigned i = 0; right && i < rank; ++i) right = sizes[i] >= 1 && sizes[i] <= (uint64_t{1} << 32);
    for (unsigned i = 0; right && i + 1 < rank; ++i) right = strides[i] % 16 == 0 && strides[i] < (uint64_t{1} << 40);
    if (right) std::memset(static_cast<void *>(map), 1, sizeof *map);
    return right ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult encode_tiled(CUtensorMap *map, CUtensorMapDataType, cuuint32_t rank, void *address, const cuuint64_t *sizes,
                      const cuuint64_t *strides, const cuuint32_t *box, const cuuint32_t *, CUtensorMapInterleave,
                      CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
    for (unsigned i = 0; i < rank; ++i)
        if (box[i] < 1 || box[i] > 256) return CUDA_ERROR_INVALID_VALUE;
    return encode_map(map, rank, address, sizes, strides);
}

CUresult encode_im2col(CUtensorMap *map, CUtensorMapDataType, cuuint32_t rank, void *address, const cuuint64_t *sizes,
                       const cuuint64_t *strides, const int *, const int *, cuuint32_t channels, cuuint32_t pixels,
                       const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
                       CUtensorMapFloatOOBfill) {
    if (channels > 256 || pixels > 1024) return CUDA_ERROR_INVALID_VALUE;
    return encode_map(map, rank, address, sizes, strides);
}

CUresult context_id(CUcontext, unsigned long long *id) { return *id = 1, CUDA_SUCCESS; }

bool fits(const cudaLaunchConfig_t &config) {
    const dim3 grid = config.gridDim, block = config.blockDim;
    return grid.x >= 1 && grid.x <= INT32_MAX && grid.y >= 1 && grid.y <= 65535 && grid.z >= 1 && grid.z <= 65535 &&
           block.x >= 1 && block.y >= 1 && block.z >= 1 && uint64_t{block.x} * block.y * block.z <= 1024 &&
           config.dynamicSmemBytes <= static_cast<size_t>(kSharedBytes);
}

}  // namespace

extern "C" {

int64_t pretended_launches() { return launches; }
int64_t pretended_bytes() { return bytes; }

cudaError_t cudaGetDevice(int *device) { return *device = 0, cudaSuccess; }

cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int) {
    switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = 9; return cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor: *value = 0; return cudaSuccess;
    case cudaDevAttrMultiProcessorCount: *value = 132; return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = kSharedBytes; return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = 233472; return cudaSuccess;
    default: return cudaErrorInvalidValue;
    }
}

cudaError_t cudaMalloc(void **memory, size_t size) {
    *memory = nullptr;
    const std::lock_guard<std::mutex> lock(mutex);
    if (size > kDeviceBytes - static_cast<size_t>(bytes)) return cudaErrorMemoryAllocation;
    // Nothing reads or writes it: address space is enough.
    *memory = std::aligned_alloc(256, (size + 255) / 256 * 256);
    if (*memory == nullptr) return cudaErrorMemoryAllocation;
    allocations[*memory] = size;
    bytes += static_cast<int64_t>(size);
    return cudaSuccess;
}

cudaError_t cudaFree(void *memory) {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto found = allocations.find(memory);
    if (found == allocations.end()) return memory == nullptr ? cudaSuccess : cudaErrorInvalidValue;
    bytes -= static_cast<int64_t>(found->second);
    allocations.erase(found);
    std::free(memory);
    return cudaSuccess;
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *kernel, void **arguments) {
    if (kernel == nullptr || arguments == nullptr || !fits(*config)) return cudaErrorInvalidConfiguration;
    ++launches;
    return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult *result) {
    const std::map<std::string, void *> known{{"cuTensorMapEncodeTiled", reinterpret_cast<void *>(encode_tiled)},
                                              {"cuTensorMapEncodeIm2col", reinterpret_cast<void *>(encode_im2col)},
                                              {"cuCtxGetId", reinterpret_cast<void *>(context_id)}};
    const auto found = known.find(name);
    *function = found == known.end() ? nullptr : found->second;
    *result = *function == nullptr ? cudaDriverEntryPointSymbolNotFound : cudaDriverEntryPointSuccess;
    return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void *, cudaFuncAttribute, int) { return cudaSuccess; }
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *attributes, const void *) { return *attributes = {}, cudaSuccess; }
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode *) { return cudaSuccess; }
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus *status) {
    return *status = cudaStreamCaptureStatusNone, cudaSuccess;
}
cudaError_t cudaGetLastError() { return cudaSuccess; }
const char *cudaGetErrorName(cudaError_t) { return "pretended error"; }
const char *cudaGetErrorString(cudaError_t) { return "no GPU is here"; }

// What nvcc's objects call to make their kernels known.
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

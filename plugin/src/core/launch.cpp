// SPDX-License-Identifier: Apache-2.0
// Launching a kernel: its parameters from problem and tensors, and the driver's functions that it needs.
#include <cudaTypedefs.h>

#include "core/launch.h"

namespace convpool {

cudaError_t Kernel::load(const Device &device) const {
    return outside_captures(
        [&] { return cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, device.shared_per_block); });
}

cudaError_t Kernel::launch(void *params, bool overlap, cudaStream_t stream) const {
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(grid));
    config.blockDim = dim3(static_cast<unsigned>(threads));
    config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
    config.stream = stream;
    cudaLaunchAttribute attributes[2]{};
    config.attrs = attributes;
    if (cluster > 1) {
        attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
        attributes[config.numAttrs++].val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
    }
    if (overlap) {
        attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
    }
    void *arguments[] = {params};
    return cudaLaunchKernelExC(&config, function, arguments);
}

BoxMean box_of(const Problem &p) {
    const int64_t size = p.pool_size();
    return {p.pool_kernel[1],         p.pool_kernel[2],
            p.pool_strides[1],        p.pool_strides[2],
            p.pool_dilations[1],      p.pool_dilations[2],
            p.pool_pads_begin[1],     p.pool_pads_begin[2],
            static_cast<float>(size), 1.f / static_cast<float>(size),
            (size & (size - 1)) == 0};
}

Prologue prologue_of(const Problem &p, const convpool_tensors &t) {
    return {p.prologue_affine ? t.scale : nullptr, p.prologue_affine ? t.shift : nullptr, p.prologue_activation, p.prologue_alpha,
            p.prologue_by_image ? static_cast<int32_t>(p.c) : 0};
}

Epilogue epilogue_of(const Problem &p, const convpool_tensors &t) {
    return {p.has_bias ? t.b : nullptr, p.has_residual ? t.residual : nullptr, p.activation, p.alpha, p.beta};
}

bool y_vectors(const Problem &p, const convpool_tensors &t) {
    return p.y_channels_last && p.m % p.per_chunk() == 0 && aligned(t.y, 16) && (!p.has_residual || aligned(t.residual, 16)) &&
           (!p.has_bias || aligned(t.b, 16));
}

bool y_runs(const Problem &p, const convpool_tensors &t) {
    const int bytes = kRunPixels * p.element_bytes();
    return !p.y_channels_last && p.out_pixels() % kRunPixels == 0 && aligned(t.y, bytes) &&
           (!p.has_residual || aligned(t.residual, bytes));
}

namespace {

// The function as of CUDA 12.0; null if the driver has none.
template <class Function> Function find(const char *name) {
    void *function = nullptr;
    cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
    const cudaError_t error = cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &result);
#else
    const cudaError_t error = cudaGetDriverEntryPoint(name, &function, cudaEnableDefault, &result);
#endif
    if (error != cudaSuccess || result != cudaDriverEntryPointSuccess) return nullptr;
    return reinterpret_cast<Function>(function);
}

CUtensorMapDataType data_type(Precision precision, bool operand) {
    return precision == Precision::kF16               ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
           : precision == Precision::kBF16            ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
           : operand && precision == Precision::kTF32 ? CU_TENSOR_MAP_DATA_TYPE_TFLOAT32
                                                      : CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
}

}  // namespace

cudaError_t encode_tensor_map(CUtensorMap *map, Precision precision, int rank, const void *address, const uint64_t *sizes,
                              const uint64_t *strides, const uint32_t *box, int swizzle, bool operand) {
    static const auto encode = find<PFN_cuTensorMapEncodeTiled_v12000>("cuTensorMapEncodeTiled");
    if (encode == nullptr) return cudaErrorNotSupported;
    const CUtensorMapSwizzle pattern = swizzle == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
                                       : swizzle == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                                       : CU_TENSOR_MAP_SWIZZLE_NONE;
    const cuuint32_t element_strides[5] = {1, 1, 1, 1, 1};
    const CUresult result =
        encode(map, data_type(precision, operand), rank, const_cast<void *>(address), sizes, strides, box, element_strides,
               CU_TENSOR_MAP_INTERLEAVE_NONE, pattern, CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

cudaError_t encode_im2col_map(CUtensorMap *map, Precision precision, const void *address, const uint64_t *sizes,
                              const uint64_t *strides, const Im2colBox &box, uint32_t channels, uint32_t pixels) {
    static const auto encode = find<PFN_cuTensorMapEncodeIm2col_v12000>("cuTensorMapEncodeIm2col");
    if (encode == nullptr) return cudaErrorNotSupported;
    const cuuint32_t element_strides[4] = {1, box.strides[0], box.strides[1], 1};
    const CUresult result =
        encode(map, data_type(precision, true), 4, const_cast<void *>(address), sizes, strides, box.lower, box.upper, channels,
               pixels, element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
               CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

uint64_t current_context() {
    static const auto get_id = find<PFN_cuCtxGetId_v12000>("cuCtxGetId");
    unsigned long long id = 0;
    return get_id != nullptr && get_id(nullptr, &id) == CUDA_SUCCESS ? id : 0;
}

}  // namespace convpool

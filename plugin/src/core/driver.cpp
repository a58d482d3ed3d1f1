// SPDX-License-Identifier: Apache-2.0
#include "core/driver.h"

#include <cudaTypedefs.h>

namespace convpool {
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

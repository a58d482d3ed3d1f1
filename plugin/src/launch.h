// From host code to kernels. Every launch returns the runtime's error.
#pragma once

#include <cuda_runtime_api.h>

#include "params.h"

namespace convpool {

// The kernel of a row of tactics.def, or null if the row is of another precision; one function per compiled file.
const void *direct_fused_kernel_f16(int id);
const void *direct_fused_kernel_bf16(int id);
const void *direct_fused_kernel_tf32(int id);
const void *direct_fused_kernel_tf32x3(int id);
const void *implicit_gemm_kernel_f16(int id);
const void *implicit_gemm_kernel_bf16(int id);
const void *implicit_gemm_kernel_tf32(int id);
const void *implicit_gemm_kernel_tf32x3(int id);

const void *implicit_gemm_sm90_kernel_f16(int id);
const void *implicit_gemm_sm90_kernel_bf16(int id);
const void *implicit_gemm_sm90_kernel_tf32(int id);
const void *implicit_gemm_sm90_kernel_tf32x3(int id);

const void *implicit_gemm_im2col_kernel_f16(int id, bool activates);
const void *implicit_gemm_im2col_kernel_bf16(int id, bool activates);
const void *implicit_gemm_im2col_kernel_tf32(int id);
const void *implicit_gemm_im2col_kernel_tf32x3(int id);

const void *few_channels_kernel_f16(int id);
const void *few_channels_kernel_bf16(int id);

const void *pointwise_sm90_kernel_f16(int id, bool prologue);
const void *pointwise_sm90_kernel_bf16(int id, bool prologue);

const void *direct_tma_kernel_f16(int id, bool prologue);
const void *direct_tma_kernel_bf16(int id, bool prologue);
const void *direct_tma_kernel_tf32(int id, bool prologue);

// overlap: may start while the kernel before it ends (compute capability 9.0 and later).
cudaError_t launch_box_mean(const BoxMeanParams &params, Precision precision, bool overlap, cudaStream_t stream);
cudaError_t launch_fuse_weights(const WeightParams &params, Precision precision, cudaStream_t stream);
// Loads the kernels that these two launch, on the current device.
cudaError_t load_passes(Precision precision, bool prologue);
cudaError_t launch_generic(const GenericParams &params, Precision precision, cudaStream_t stream);
cudaError_t load_generic(Precision precision);

}  // namespace convpool

// SPDX-License-Identifier: Apache-2.0
// Arithmetic on a word of a chunk: on two 16-bit values at once, or on one float. From sm_80 on.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/ptx/device.cuh"

namespace convpool {

// max(a * b + c, 0) of each value in a word, rounded once; NaN stays NaN.
CONVPOOL_DEVICE uint32_t fma_relu(uint32_t a, uint32_t b, uint32_t c, __half) {
    uint32_t d;
    asm("fma.rn.relu.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}
CONVPOOL_DEVICE uint32_t fma_relu(uint32_t a, uint32_t b, uint32_t c, __nv_bfloat16) {
    uint32_t d;
    asm("fma.rn.relu.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}
CONVPOOL_DEVICE uint32_t fma_relu(uint32_t a, uint32_t b, uint32_t c, float) {
    float d;
    asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(d) : "f"(fmaf(__uint_as_float(a), __uint_as_float(b), __uint_as_float(c))));
    return __float_as_uint(d);
}
// a * b + c of each value in a word, rounded once.
CONVPOOL_DEVICE uint32_t fma_packed(uint32_t a, uint32_t b, uint32_t c, __half) {
    uint32_t d;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}
CONVPOOL_DEVICE uint32_t fma_packed(uint32_t a, uint32_t b, uint32_t c, __nv_bfloat16) {
    uint32_t d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}
CONVPOOL_DEVICE uint32_t fma_packed(uint32_t a, uint32_t b, uint32_t c, float) {
    return __float_as_uint(fmaf(__uint_as_float(a), __uint_as_float(b), __uint_as_float(c)));
}

// The larger of each two values in a word; NaN stays NaN.
CONVPOOL_DEVICE uint32_t larger(uint32_t a, uint32_t b, __half) {
    uint32_t d;
    asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}
CONVPOOL_DEVICE uint32_t larger(uint32_t a, uint32_t b, __nv_bfloat16) {
    uint32_t d;
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}
CONVPOOL_DEVICE uint32_t larger(uint32_t a, uint32_t b, float) {
    float d;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(d) : "f"(__uint_as_float(a)), "f"(__uint_as_float(b)));
    return __float_as_uint(d);
}

}  // namespace convpool

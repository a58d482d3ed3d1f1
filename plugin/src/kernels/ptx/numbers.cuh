// SPDX-License-Identifier: Apache-2.0
// Conversions of numbers: 16-bit types and floats, two to a word, and TF32.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/ptx/device.cuh"

namespace convpool {

CONVPOOL_DEVICE float to_float(__half v) { return __half2float(v); }
CONVPOOL_DEVICE float to_float(__nv_bfloat16 v) { return __bfloat162float(v); }
CONVPOOL_DEVICE float to_float(float v) { return v; }
template <class T> CONVPOOL_DEVICE T from_float(float v);
template <> CONVPOOL_DEVICE __half from_float<__half>(float v) { return __float2half_rn(v); }
template <> CONVPOOL_DEVICE __nv_bfloat16 from_float<__nv_bfloat16>(float v) { return __float2bfloat16_rn(v); }
template <> CONVPOOL_DEVICE float from_float<float>(float v) { return v; }

// body(an element of a convpool_dtype, or of a precision's arrays: those of 16 bits have the same numbers).
template <class Type, class Body> auto with_element(Type type, Body body) {
    if (type == static_cast<Type>(0)) return body(__half{});
    return type == static_cast<Type>(1) ? body(__nv_bfloat16{}) : body(float{});
}

// Two numbers in a word, rounded once, the first in its lower half.
CONVPOOL_DEVICE uint32_t pack2(float lo, float hi, __half) {
    __half2 v = __floats2half2_rn(lo, hi);
    return *reinterpret_cast<uint32_t *>(&v);
}
CONVPOOL_DEVICE uint32_t pack2(float lo, float hi, __nv_bfloat16) {
    __nv_bfloat162 v = __floats2bfloat162_rn(lo, hi);
    return *reinterpret_cast<uint32_t *>(&v);
}

// One word of a chunk as floats: two for 16-bit types, one for fp32.
CONVPOOL_DEVICE void unpack_word(uint32_t word, float *out, __half) {
    float2 f = __half22float2(*reinterpret_cast<__half2 *>(&word));
    out[0] = f.x;
    out[1] = f.y;
}
CONVPOOL_DEVICE void unpack_word(uint32_t word, float *out, __nv_bfloat16) {
    out[0] = __uint_as_float(word << 16);
    out[1] = __uint_as_float(word & 0xffff0000u);
}
CONVPOOL_DEVICE void unpack_word(uint32_t word, float *out, float) { out[0] = __uint_as_float(word); }

// The nearest TF32 number, ties away from zero. Before sm_80 nothing multiplies TF32.
CONVPOOL_DEVICE uint32_t round_to_tf32(uint32_t bits) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    uint32_t out;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(out) : "f"(__uint_as_float(bits)));
    return out;
#else
    return bits;
#endif
}

// v = big + small, both TF32, to 21 bits: what 3xTF32 multiplies as big*small + small*big + big*big.
CONVPOOL_DEVICE void split_tf32(uint32_t v, uint32_t &big, uint32_t &small) {
    big = round_to_tf32(v);
    small = round_to_tf32(__float_as_uint(__uint_as_float(v) - __uint_as_float(big)));
}

// Arithmetic on a word of a chunk: on two 16-bit values, by one instruction, or on one float. From sm_80 on.
#define CONVPOOL_FMA(name, instruction, Element)                                 \
    CONVPOOL_DEVICE uint32_t name(uint32_t a, uint32_t b, uint32_t c, Element) { \
        uint32_t d;                                                              \
        asm(instruction " %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));  \
        return d;                                                                \
    }
// max(a * b + c, 0) of each value in a word, rounded once; NaN stays NaN.
CONVPOOL_FMA(fma_relu, "fma.rn.relu.f16x2", __half)
CONVPOOL_FMA(fma_relu, "fma.rn.relu.bf16x2", __nv_bfloat16)
CONVPOOL_DEVICE uint32_t fma_relu(uint32_t a, uint32_t b, uint32_t c, float) {
    float d;
    asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(d) : "f"(fmaf(__uint_as_float(a), __uint_as_float(b), __uint_as_float(c))));
    return __float_as_uint(d);
}
// a * b + c of each value in a word, rounded once.
CONVPOOL_FMA(fma_packed, "fma.rn.f16x2", __half)
CONVPOOL_FMA(fma_packed, "fma.rn.bf16x2", __nv_bfloat16)
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

// In all lanes of a warp.
CONVPOOL_DEVICE float warp_sum(float v) {
    UNROLLED_FOR (int step = 16; step > 0; step /= 2) v += __shfl_xor_sync(~0u, v, step);
    return v;
}

}  // namespace convpool

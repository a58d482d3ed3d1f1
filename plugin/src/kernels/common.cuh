// Building blocks of the tensor-core kernels: 16-byte chunks, cp.async, ldmatrix, mma.sync, activations.
//
// Every operand lies in shared memory as 16-byte chunks along the reduction dimension: 8 halves or 4 floats. One
// ldmatrix of eight chunks is then an operand fragment for either, since m16n8k16 (16-bit) and m16n8k8 (TF32) give a
// thread the same 4-byte words of the same chunks. So the kernels count in chunks and only mma() knows the type.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "../params.h"

namespace convpool {

#define CONVPOOL_DEVICE __device__ __forceinline__

template <Precision P> struct Traits;
template <> struct Traits<Precision::kF16> {
    using Element = __half;
    static constexpr int kPerChunk = 8;
    static constexpr int kMinArch = 750;
};
template <> struct Traits<Precision::kBF16> {
    using Element = __nv_bfloat16;
    static constexpr int kPerChunk = 8;
    static constexpr int kMinArch = 800;
};
template <> struct Traits<Precision::kTF32> {
    using Element = float;
    static constexpr int kPerChunk = 4;
    static constexpr int kMinArch = 800;
};
template <> struct Traits<Precision::kTF32x3> {
    using Element = float;
    static constexpr int kPerChunk = 4;
    static constexpr int kMinArch = 800;
};

// Whether this compilation pass can hold kernels of the precision; if not, their bodies are empty and never launched.
#ifdef __CUDA_ARCH__
template <Precision P> constexpr bool kCompiledForThisArch = __CUDA_ARCH__ >= Traits<P>::kMinArch;
#else
template <Precision P> constexpr bool kCompiledForThisArch = true;
#endif

CONVPOOL_DEVICE float to_float(__half v) { return __half2float(v); }
CONVPOOL_DEVICE float to_float(__nv_bfloat16 v) { return __bfloat162float(v); }
CONVPOOL_DEVICE float to_float(float v) { return v; }
template <class T> CONVPOOL_DEVICE T from_float(float v);
template <> CONVPOOL_DEVICE __half from_float<__half>(float v) { return __float2half_rn(v); }
template <> CONVPOOL_DEVICE __nv_bfloat16 from_float<__nv_bfloat16>(float v) { return __float2bfloat16_rn(v); }
template <> CONVPOOL_DEVICE float from_float<float>(float v) { return v; }

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

template <Precision P> CONVPOOL_DEVICE void unpack_chunk(const uint4 &chunk, float (&out)[Traits<P>::kPerChunk]) {
    constexpr int kPerWord = Traits<P>::kPerChunk / 4;
    typename Traits<P>::Element tag{};
    unpack_word(chunk.x, out, tag);
    unpack_word(chunk.y, out + kPerWord, tag);
    unpack_word(chunk.z, out + 2 * kPerWord, tag);
    unpack_word(chunk.w, out + 3 * kPerWord, tag);
}

CONVPOOL_DEVICE uint32_t round_to_tf32(uint32_t bits) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    uint32_t out;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(out) : "f"(__uint_as_float(bits)));
    return out;
#else
    return bits;
#endif
}

// Rounds once, to the type that the tensor cores read.
template <Precision P> CONVPOOL_DEVICE uint4 pack_chunk(const float (&v)[Traits<P>::kPerChunk]) {
    if constexpr (P == Precision::kTF32) {
        return {round_to_tf32(__float_as_uint(v[0])), round_to_tf32(__float_as_uint(v[1])), round_to_tf32(__float_as_uint(v[2])),
                round_to_tf32(__float_as_uint(v[3]))};
    } else if constexpr (P == Precision::kTF32x3) {
        return {__float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]), __float_as_uint(v[3])};
    } else {
        typename Traits<P>::Element tag{};
        return {pack2(v[0], v[1], tag), pack2(v[2], v[3], tag), pack2(v[4], v[5], tag), pack2(v[6], v[7], tag)};
    }
}

// Four numbers in a row, rounded once.
template <class Element> using Quad = std::conditional_t<sizeof(Element) == 4, uint4, uint2>;
CONVPOOL_DEVICE uint4 pack_quad(const float (&v)[4], float) { return pack_chunk<Precision::kTF32x3>(v); }
template <class Element> CONVPOOL_DEVICE uint2 pack_quad(const float (&v)[4], Element tag) {
    return {pack2(v[0], v[1], tag), pack2(v[2], v[3], tag)};
}
CONVPOOL_DEVICE void unpack_quad(const uint4 &quad, float (&out)[4], float) { unpack_chunk<Precision::kTF32x3>(quad, out); }
template <class Element> CONVPOOL_DEVICE void unpack_quad(const uint2 &quad, float (&out)[4], Element tag) {
    unpack_word(quad.x, out, tag);
    unpack_word(quad.y, out + 2, tag);
}

// A launch may overlap the end of the kernel before it in the stream (programmatic dependent launch): before anything is
// read or written, wait until that kernel's results are there. Returns at once where the launch did not ask for overlap.
CONVPOOL_DEVICE void wait_for_previous_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// The next kernel's blocks may be started where there is room; they wait as above.
CONVPOOL_DEVICE void let_next_kernel_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// ---- copies -------------------------------------------------------------------------------------------------------

CONVPOOL_DEVICE uint32_t shared_address(const void *p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

CONVPOOL_DEVICE void store_shared(uint32_t address, const uint4 &v) {
    asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
CONVPOOL_DEVICE uint4 load_shared(uint32_t address) {
    uint4 v;
    asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address) : "memory");
    return v;
}

// 16 bytes from global to shared memory, or zeros. Before sm_80 the copy is synchronous and commit and wait do nothing.
CONVPOOL_DEVICE void copy_chunk(uint32_t dst, const void *src, bool valid) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    int bytes = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(bytes) : "memory");
#else
    uint4 v = valid ? *reinterpret_cast<const uint4 *>(src) : uint4{0, 0, 0, 0};
    store_shared(dst, v);
#endif
}
// A line of 128 bytes on its way to the L2, ahead of its use.
CONVPOOL_DEVICE void prefetch_line(const void *src) { asm volatile("prefetch.global.L2 [%0];" ::"l"(src)); }
CONVPOOL_DEVICE void copy_commit() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
template <int kPending> CONVPOOL_DEVICE void copy_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
#endif
}

// A chunk whose channels are apart in memory or not 16-byte aligned: element by element, zeros past `count`.
template <Precision P>
CONVPOOL_DEVICE void copy_elements(uint32_t dst, const typename Traits<P>::Element *src, int64_t step, int count) {
    using Element = typename Traits<P>::Element;
    constexpr int kPerChunk = Traits<P>::kPerChunk;
    union {
        uint4 chunk;
        Element e[kPerChunk];
    } v;
    v.chunk = uint4{0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < kPerChunk; ++i)
        if (i < count) v.e[i] = src[i * step];
    store_shared(dst, v.chunk);
}

// ---- tensor cores -------------------------------------------------------------------------------------------------

CONVPOOL_DEVICE void load_matrix(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

CONVPOOL_DEVICE void mma_tf32(float (&d)[4], const uint32_t (&a)[4], const uint32_t b0, const uint32_t b1) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                 "{%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

// d[16][8] += a[16][2 chunks] b[8][2 chunks]^T
template <Precision P> CONVPOOL_DEVICE void mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t b0, const uint32_t b1) {
    if constexpr (P == Precision::kF16) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                     "{%0,%1,%2,%3};"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 750
        asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                     : "r"(a[0]), "r"(a[1]), "r"(b0));
        asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                     : "r"(a[2]), "r"(a[3]), "r"(b1));
#endif
    } else if constexpr (P == Precision::kBF16) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                     "{%0,%1,%2,%3};"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
    } else {
        mma_tf32(d, a, b0, b1);
    }
}

// v = big + small, both TF32, to 21 bits: what 3xTF32 multiplies as big*small + small*big + big*big.
CONVPOOL_DEVICE void split_tf32(uint32_t v, uint32_t &big, uint32_t &small) {
    big = round_to_tf32(v);
    small = round_to_tf32(__float_as_uint(__uint_as_float(v) - __uint_as_float(big)));
}

// ---- epilogue arithmetic ------------------------------------------------------------------------------------------

// Out of line: inlined into every fragment of an epilogue, these would be most of a kernel's code.
static __device__ __noinline__ float activate_transcendental(float v, Activation a) {
    return a == Activation::kTanh ? tanhf(v) : 1.f / (1.f + expf(-v));
}

CONVPOOL_DEVICE bool rectifies(const Epilogue &e) {
    return e.activation == Activation::kRelu || e.activation == Activation::kLeakyRelu;
}
// Comparisons are false for a NaN, which so comes through, as in ONNX.
template <int kCount> CONVPOOL_DEVICE void rectify(float (&v)[kCount], const Epilogue &e) {
    const bool leaky = e.activation == Activation::kLeakyRelu;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        const float scaled = v[i] * e.alpha;
        v[i] = v[i] < 0.f ? (leaky ? scaled : 0.f) : v[i];  // of -inf, too
    }
}
// One branch for all values, selections for each.
template <int kCount> CONVPOOL_DEVICE void clip_or_rectify(float (&v)[kCount], const Epilogue &e) {
    if (rectifies(e)) {
        rectify(v, e);
    } else if (e.activation == Activation::kClip) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) {  // selections, of which one inside another would be branches
            const float raised = v[i] < e.alpha ? e.alpha : v[i];
            v[i] = raised > e.beta ? e.beta : raised;
        }
    }
}
template <int kCount> CONVPOOL_DEVICE void activate_all(float (&v)[kCount], const Epilogue &e) {
    if (e.activation == Activation::kNone) return;
    if (e.activation == Activation::kTanh || e.activation == Activation::kSigmoid) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) v[i] = activate_transcendental(v[i], e.activation);
    } else {
        clip_or_rectify(v, e);
    }
}
CONVPOOL_DEVICE float activate(float v, const Epilogue &e) {
    float values[1] = {v};
    activate_all(values, e);
    return values[0];
}

// sum / count to within a rounding of fp32, so that a sum that is a multiple of count gives an integer.
CONVPOOL_DEVICE float mean_of(float sum, const BoxMean &box) {
    float q = sum * box.inverse_count;
    if (!box.count_is_power_of_two) {
        float fixed = fmaf(fmaf(-q, box.count, sum), box.inverse_count, q);
        q = isfinite(q) ? fixed : q;
    }
    return q;
}

}  // namespace convpool

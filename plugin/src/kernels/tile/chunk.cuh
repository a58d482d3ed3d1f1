// SPDX-License-Identifier: Apache-2.0
// Chunks: 16 bytes of neighbouring channels, 8 of a 16-bit type or 4 floats, in which kernels copy, load and store.
#pragma once

#include <type_traits>

#include "core/params.h"
#include "kernels/ptx/device.cuh"
#include "kernels/ptx/memory.cuh"
#include "kernels/ptx/numbers.cuh"

namespace convpool {

// The type of X, W and Y, how many of it are a chunk, and the first architecture whose tensor cores multiply it.
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
template <> struct Traits<Precision::kTF32x3> : Traits<Precision::kTF32> {};

// True where this compilation pass can hold kernels of the precision; else their bodies are empty and never launched.
#ifdef __CUDA_ARCH__
template <Precision P> constexpr bool kCompiledForThisArch = __CUDA_ARCH__ >= Traits<P>::kMinArch;
#else
template <Precision P> constexpr bool kCompiledForThisArch = true;
#endif

// The precision whose packing leaves what goes to memory as it is.
template <Precision P>
constexpr Precision kStored = P == Precision::kTF32 ? Precision::kTF32x3 : P;  // fp32 in memory is not rounded to TF32

template <Precision P> CONVPOOL_DEVICE void unpack_chunk(const uint4 &chunk, float (&out)[Traits<P>::kPerChunk]) {
    constexpr int kPerWord = Traits<P>::kPerChunk / 4;
    typename Traits<P>::Element tag{};
    unpack_word(chunk.x, out, tag);
    unpack_word(chunk.y, out + kPerWord, tag);
    unpack_word(chunk.z, out + 2 * kPerWord, tag);
    unpack_word(chunk.w, out + 3 * kPerWord, tag);
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

// Two to shared memory, rounded once.
CONVPOOL_DEVICE void store_shared_elements(uint32_t address, float x, float y, float) { store_shared_pair(address, x, y); }
template <class Element> CONVPOOL_DEVICE void store_shared_elements(uint32_t address, float x, float y, Element tag) {
    store_shared_word(address, pack2(x, y, tag));
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
    UNROLLED_FOR (int i = 0; i < kPerChunk; ++i)
        if (i < count) v.e[i] = src[i * step];
    store_shared(dst, v.chunk);
}

// A window's mean from its sum, to within a rounding of fp32, so that a sum that is a multiple of count gives an integer.
CONVPOOL_DEVICE float mean_of(float sum, const BoxMean &box) {
    float q = sum * box.inverse_count;
    if (!box.count_is_power_of_two) {
        float fixed = fmaf(fmaf(-q, box.count, sum), box.inverse_count, q);
        q = isfinite(q) ? fixed : q;
    }
    return q;
}

}  // namespace convpool

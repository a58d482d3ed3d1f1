// SPDX-License-Identifier: Apache-2.0
// Activations of an epilogue, on fp32 values in registers, and the ends of output values: bias, residual, activation, store.
#pragma once

#include "core/params.h"
#include "kernels/ptx/device.cuh"
#include "kernels/tile/chunk.cuh"
#include "kernels/tile/tile.cuh"

namespace convpool {

// Out of line: inlined into every fragment of an epilogue, these would be most of a kernel's code.
static __device__ __noinline__ float activate_transcendental(float v, Activation a) {
    if (a == Activation::kTanh) return tanhf(v);
    const float sigmoid = 1.f / (1.f + expf(-v));
    return a == Activation::kSilu ? v * sigmoid : sigmoid;
}

// True where the activation multiplies what is negative, by 0 or by alpha.
CONVPOOL_DEVICE bool rectifies(const Epilogue &e) {
    return e.activation == Activation::kRelu || e.activation == Activation::kLeakyRelu;
}

// Comparisons are false for a NaN, which so comes through, as in ONNX.
template <int kCount> CONVPOOL_DEVICE void rectify(float (&v)[kCount], const Epilogue &e) {
    const bool leaky = e.activation == Activation::kLeakyRelu;
    UNROLLED_FOR (int i = 0; i < kCount; ++i) {
        const float scaled = v[i] * e.alpha;
        v[i] = v[i] < 0.f ? (leaky ? scaled : 0.f) : v[i];  // of -inf, too
    }
}

// One branch for all values, selections for each.
template <int kCount> CONVPOOL_DEVICE void clip_or_rectify(float (&v)[kCount], const Epilogue &e) {
    if (rectifies(e)) {
        rectify(v, e);
    } else if (e.activation == Activation::kClip) {
        UNROLLED_FOR (int i = 0; i < kCount; ++i) {  // selections, of which one inside another would be branches
            const float raised = v[i] < e.alpha ? e.alpha : v[i];
            v[i] = raised > e.beta ? e.beta : raised;
        }
    }
}

// Any activation, of values in one place; one branch for all of them.
template <int kCount> CONVPOOL_DEVICE void activate_all(float (&v)[kCount], const Epilogue &e) {
    if (e.activation == Activation::kNone) return;
    if (e.activation == Activation::kTanh || e.activation == Activation::kSigmoid || e.activation == Activation::kSilu) {
        UNROLLED_FOR (int i = 0; i < kCount; ++i) v[i] = activate_transcendental(v[i], e.activation);
    } else {
        clip_or_rectify(v, e);
    }
}
CONVPOOL_DEVICE float activate(float v, const Epilogue &e) {
    float values[1] = {v};
    activate_all(values, e);
    return values[0];
}

// kCount floats from shared memory, 16 bytes at a time.
template <int kCount> CONVPOOL_DEVICE void load_sums(uint32_t source, float (&v)[kCount]) {
    UNROLLED_FOR (int i = 0; i < kCount; i += 4) {
        const uint4 part = load_shared(source + i * 4);
        v[i] = __uint_as_float(part.x);
        v[i + 1] = __uint_as_float(part.y);
        v[i + 2] = __uint_as_float(part.z);
        v[i + 3] = __uint_as_float(part.w);
    }
}

// Bias, residual, activation of one chunk of channels of one pixel, from fp32 sums at `source`, to element `index` of Y. Rounded
// once, at the end.
template <Precision P>
CONVPOOL_DEVICE void finish_chunk(uint32_t source, const Epilogue &e, const uint4 *residual, const OutputView &view,
                                  int64_t index, int channel) {
    using Element = typename Traits<P>::Element;
    constexpr int kPerChunk = Traits<P>::kPerChunk;
    float v[kPerChunk], addend[kPerChunk];
    uint4 bias{};  // loaded ahead of the sums, which wait for shared memory
    if (e.bias != nullptr) bias = *reinterpret_cast<const uint4 *>(static_cast<const Element *>(e.bias) + channel);
    load_sums(source, v);
    if (e.bias != nullptr) {
        unpack_chunk<P>(bias, addend);
        UNROLLED_FOR (int i = 0; i < kPerChunk; ++i) v[i] += addend[i];
    }
    if (residual != nullptr) {
        unpack_chunk<P>(*residual, addend);
        UNROLLED_FOR (int i = 0; i < kPerChunk; ++i) v[i] += addend[i];
    }
    activate_all(v, e);
    *reinterpret_cast<uint4 *>(static_cast<Element *>(view.y) + index) = pack_chunk<kStored<P>>(v);
}

// The sums of a run: kRunPixels pixels of one channel, which lie `pitch` bytes apart. run: its number.
CONVPOOL_DEVICE void load_run(uint32_t source, uint32_t pitch, int run, float *v) {
    static_assert(kRunPixels == 4, "a quad");
    // Four runs of a channel, of rows that start in one bank, each begin with another of their rows, so that they meet in none.
    UNROLLED_FOR (int i = 0; i < 4; ++i) v[i] = load_shared_float(source + ((i + run) & 3) * pitch);
    auto exchange = [&](bool wanted, int i, int j) {
        const float first = wanted ? v[j] : v[i];
        v[j] = wanted ? v[i] : v[j];
        v[i] = first;
    };
    // v[i] holds pixel (i + run) % 4. Back into order: a rotation by two where run & 2, by one where run & 1.
    exchange(run & 2, 0, 2);
    exchange(run & 2, 1, 3);
    exchange(run & 1, 0, 3);
    exchange(run & 1, 1, 3);
    exchange(run & 1, 2, 3);
}

}  // namespace convpool

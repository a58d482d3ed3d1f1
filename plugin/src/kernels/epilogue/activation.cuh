// SPDX-License-Identifier: Apache-2.0
// Activations of an epilogue, on fp32 values in registers.
#pragma once

#include "core/params.h"
#include "kernels/ptx/device.cuh"

namespace convpool {

// Out of line: inlined into every fragment of an epilogue, these would be most of a kernel's code.
static __device__ __noinline__ float activate_transcendental(float v, Activation a) {
    return a == Activation::kTanh ? tanhf(v) : 1.f / (1.f + expf(-v));
}

// Whether the activation multiplies what is negative, by 0 or by alpha.
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

// Any activation, of values in one place; one branch for all of them.
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

}  // namespace convpool

// The prologue f(x) = activation(scale * x + shift) of the pixels of X.
#pragma once

#include "common.cuh"

namespace convpool {

// scale or shift of a channel, `neutral` where there is none.
template <class Element> CONVPOOL_DEVICE float channel_value(const void *values, int channel, float neutral) {
    return values == nullptr ? neutral : to_float(static_cast<const Element *>(values)[channel]);
}

CONVPOOL_DEVICE float activate(float v, const Prologue &p) {
    if (p.activation == Activation::kRelu) return v < 0.f ? 0.f : v;
    if (p.activation == Activation::kLeakyRelu) return v < 0.f ? v * p.alpha : v;
    return v;
}

}  // namespace convpool

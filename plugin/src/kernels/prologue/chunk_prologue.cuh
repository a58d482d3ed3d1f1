// SPDX-License-Identifier: Apache-2.0
// The prologue f(x) = activation(scale * x + shift) of the pixels of X, in fp32.
#pragma once

#include "kernels/tile/chunk.cuh"

namespace convpool {

__host__ __device__ __forceinline__ bool is_present(const Prologue &p) {
    return p.scale != nullptr || p.activation != Activation::kNone;
}

// scale or shift of a channel, `neutral` where there is none.
template <class Element> CONVPOOL_DEVICE float channel_value(const void *values, int channel, float neutral) {
    return values == nullptr ? neutral : to_float(static_cast<const Element *>(values)[channel]);
}

// The activation of a prologue: none, ReLU or LeakyReLU.
CONVPOOL_DEVICE float activate(float v, const Prologue &p) {
    // No branches: there would be one for each value of a chunk.
    const float slope = p.activation == Activation::kLeakyRelu ? p.alpha : 1.f;
    const float negative = p.activation == Activation::kRelu ? 0.f : v * slope;
    return v < 0.f ? negative : v;
}

// f of one chunk of channels, in fp32. Channels that X does not have stay zero, which they are.
template <Precision P> struct ChunkPrologue {
    static constexpr int kPerChunk = Traits<P>::kPerChunk;
    float scale[kPerChunk], shift[kPerChunk];

    CONVPOOL_DEVICE void load(const Prologue &p, int first_channel, int channels) {
        load_values(scale, p.scale, 1.f, first_channel, channels);
        load_values(shift, p.shift, 0.f, first_channel, channels);
    }
    // Scale or shift of the chunk: 16 bytes at once where they are whole and aligned, else one by one, zeros past the last.
    CONVPOOL_DEVICE static void load_values(float (&out)[kPerChunk], const void *values, float neutral, int first_channel,
                                            int channels) {
        const auto *src = static_cast<const typename Traits<P>::Element *>(values) + first_channel;
        if (values != nullptr && first_channel + kPerChunk <= channels && reinterpret_cast<uintptr_t>(src) % 16 == 0) {
            unpack_chunk<P>(*reinterpret_cast<const uint4 *>(src), out);
        } else {
#pragma unroll
            for (int i = 0; i < kPerChunk; ++i)
                out[i] = values == nullptr ? neutral : first_channel + i < channels ? to_float(src[i]) : 0.f;
        }
    }
    CONVPOOL_DEVICE void apply(const Prologue &p, float (&v)[kPerChunk]) const {
#pragma unroll
        for (int i = 0; i < kPerChunk; ++i) v[i] = activate(fmaf(v[i], scale[i], shift[i]), p);
    }
};

}  // namespace convpool

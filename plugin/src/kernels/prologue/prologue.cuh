// SPDX-License-Identifier: Apache-2.0
// The prologue f(x) = activation(scale * x + shift) of the pixels of X, in fp32.
#pragma once

#include "kernels/ptx/numbers.cuh"
#include "kernels/tile/chunk.cuh"

namespace convpool {

__host__ __device__ __forceinline__ bool is_present(const Prologue &p) {
    return p.scale != nullptr || p.activation != Activation::kNone;
}

// scale or shift of a channel, `neutral` where there is none.
template <class Element> CONVPOOL_DEVICE float channel_value(const void *values, int64_t channel, float neutral) {
    return values == nullptr ? neutral : to_float(static_cast<const Element *>(values)[channel]);
}

// The activation of a rectifying prologue: none, ReLU or LeakyReLU.
CONVPOOL_DEVICE float activate(float v, const Prologue &p) {
    // No branches: there would be one for each value of a chunk.
    const float slope = p.activation == Activation::kLeakyRelu ? p.alpha : 1.f;
    const float negative = p.activation == Activation::kRelu ? 0.f : v * slope;
    return v < 0.f ? negative : v;
}

inline PrologueForm form_of(const Prologue &p) {
    if (p.activation == Activation::kSilu || p.image_step != 0) return PrologueForm::kGeneral;
    return is_present(p) ? PrologueForm::kRectifying : PrologueForm::kNone;
}

// The activation of a prologue of a form.
template <PrologueForm kForm, class Element> CONVPOOL_DEVICE float activate(float v, const Prologue &p) {
    if constexpr (kForm == PrologueForm::kGeneral)
        if (p.activation == Activation::kSilu)
            return sizeof(Element) == 4 ? v / (1.f + expf(-v)) : __fdividef(v, 1.f + __expf(-v));
    return activate(v, p);
}

// f of one chunk of channels, in fp32. Channels that X does not have stay zero, which they are.
template <Precision P, PrologueForm kForm = PrologueForm::kRectifying> struct ChunkPrologue {
    static constexpr int kPerChunk = Traits<P>::kPerChunk;
    float scale[kPerChunk], shift[kPerChunk];

    CONVPOOL_DEVICE void load(const Prologue &p, int first_channel, int channels, int64_t image = 0) {
        load_values(scale, p.scale, 1.f, first_channel, channels, image * p.image_step);
        load_values(shift, p.shift, 0.f, first_channel, channels, image * p.image_step);
    }
    // Scale or shift of the chunk: 16 bytes at once where they are whole and aligned, else one by one, zeros past the last.
    CONVPOOL_DEVICE static void load_values(float (&out)[kPerChunk], const void *values, float neutral, int first_channel,
                                            int channels, int64_t offset) {
        const auto *src = static_cast<const typename Traits<P>::Element *>(values) + first_channel;
        if constexpr (kForm == PrologueForm::kGeneral) src += offset;
        if (values != nullptr && first_channel + kPerChunk <= channels && reinterpret_cast<uintptr_t>(src) % 16 == 0) {
            unpack_chunk<P>(*reinterpret_cast<const uint4 *>(src), out);
        } else {
            UNROLLED_FOR (int i = 0; i < kPerChunk; ++i)
                out[i] = values == nullptr ? neutral : first_channel + i < channels ? to_float(src[i]) : 0.f;
        }
    }
    CONVPOOL_DEVICE void apply(const Prologue &p, float (&v)[kPerChunk]) const {
        UNROLLED_FOR (int i = 0; i < kPerChunk; ++i)
            v[i] = activate<kForm, typename Traits<P>::Element>(fmaf(v[i], scale[i], shift[i]), p);
    }
};

// f of one chunk in X's type, two 16-bit values an instruction: relu(v) - slope * relu(-v), where the second part is left
// out without a slope and exact with a slope of 1, which stands for no activation. From sm_80 on.
template <Precision P> struct PackedPrologue {
    using Element = typename Traits<P>::Element;
    uint4 scale, shift;
    uint32_t minus_slope;
    bool sloped;

    CONVPOOL_DEVICE explicit PackedPrologue(const Prologue &p)
        : scale(filled(1.f)), shift(filled(0.f)), minus_slope(packed(p.activation == Activation::kLeakyRelu ? -p.alpha : -1.f)),
          sloped(p.activation != Activation::kRelu) {}

    // Whole, aligned chunks of channels; zeros past the last, where X is zero too.
    CONVPOOL_DEVICE void load(const Prologue &p, int first_channel, int channels) {
        if (p.scale == nullptr) return;
        scale = shift = uint4{0, 0, 0, 0};
        if (first_channel >= channels) return;
        scale = *reinterpret_cast<const uint4 *>(static_cast<const Element *>(p.scale) + first_channel);
        shift = *reinterpret_cast<const uint4 *>(static_cast<const Element *>(p.shift) + first_channel);
    }
    CONVPOOL_DEVICE uint4 operator()(const uint4 &x) const {
        constexpr uint32_t kSigns = sizeof(Element) == 4 ? 0x80000000u : 0x80008000u;
        auto word = [&](uint32_t v, uint32_t a, uint32_t b) {
            const uint32_t positive = fma_relu(v, a, b, Element{});
            if (!sloped) return positive;
            return fma_packed(fma_relu(v, a ^ kSigns, b ^ kSigns, Element{}), minus_slope, positive, Element{});
        };
        return {word(x.x, scale.x, shift.x), word(x.y, scale.y, shift.y), word(x.z, scale.z, shift.z),
                word(x.w, scale.w, shift.w)};
    }

    CONVPOOL_DEVICE static uint32_t packed(float v) {
        if constexpr (sizeof(Element) == 4) return __float_as_uint(v);
        else return pack2(v, v, Element{});
    }

private:
    CONVPOOL_DEVICE static uint4 filled(float v) { return {packed(v), packed(v), packed(v), packed(v)}; }
};

// Only an activation, in X's type: max(v, slope * v), or max(v, 0). For a slope of at most 1 that is not zero in X's type.
template <Precision P, bool kSloped> struct PackedActivation {
    using Element = typename Traits<P>::Element;
    uint32_t slope;

    CONVPOOL_DEVICE explicit PackedActivation(const Prologue &p) : slope(PackedPrologue<P>::packed(p.alpha)) {}
    CONVPOOL_DEVICE uint4 operator()(const uint4 &x) const { return {word(x.x), word(x.y), word(x.z), word(x.w)}; }

private:
    CONVPOOL_DEVICE uint32_t word(uint32_t v) const {
        return larger(v, kSloped ? fma_packed(v, slope, 0, Element{}) : 0, Element{});
    }
};

}  // namespace convpool

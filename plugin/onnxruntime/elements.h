// SPDX-License-Identifier: Apache-2.0
// Elements of tensors in host memory, and the type that their sums are kept in.
#pragma once

#include <cstdint>
#include <cstring>

namespace convpool::onnxruntime {

template <typename Number> struct Plain {
    using Sum = Number;
    Number value;
    Sum read() const { return value; }
    void write(Sum sum) { value = sum; }
};

inline float float_of_bits(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline uint32_t bits_of_float(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

struct BFloat16 {
    using Sum = float;
    uint16_t bits;
    Sum read() const { return float_of_bits(uint32_t{bits} << 16); }
    // To nearest, ties to even; a NaN stays one.
    void write(Sum sum) {
        const uint32_t all = bits_of_float(sum);
        bits = static_cast<uint16_t>(sum != sum ? (all >> 16) | 0x40 : (all + 0x7fff + ((all >> 16) & 1)) >> 16);
    }
};

struct Float16 {
    using Sum = float;
    uint16_t bits;
    // 5 exponent bits of bias 15, 10 of the fraction.  Multiplying by 2^112 moves the bias to a float's, subnormals included.
    Sum read() const {
        const uint32_t magnitude = bits & 0x7fffu, sign = uint32_t{bits & 0x8000u} << 16;
        const float value = magnitude >= 0x7c00 ? float_of_bits(0x7f800000u | (magnitude & 0x3ff) << 13)
                                                : float_of_bits(magnitude << 13) * 0x1p112f;
        return float_of_bits(bits_of_float(value) | sign);
    }
    // To nearest, ties to even.
    void write(Sum sum) {
        const uint32_t all = bits_of_float(sum), sign = all >> 16 & 0x8000u, magnitude = all & 0x7fffffffu;
        uint32_t rounded;
        if (magnitude > 0x7f800000u) {  // NaN
            rounded = 0x7e00;
        } else if (magnitude >= 0x47800000u) {  // 65536 and more
            rounded = 0x7c00;
        } else if (magnitude < 0x38800000u) {  // below 2^-14: units of 2^-24, which adding 0.5 leaves in a float's last bits
            rounded = bits_of_float(float_of_bits(magnitude) + 0.5f) - 0x3f000000u;
        } else {
            rounded = (magnitude - 0x38000000u + 0xfff + (magnitude >> 13 & 1)) >> 13;
        }
        bits = static_cast<uint16_t>(sign | rounded);
    }
};

}  // namespace convpool::onnxruntime

// SPDX-License-Identifier: Apache-2.0
// Loads and stores of global memory under a predicate. An if in C++ might become a branch, which other loads do not pass.
#pragma once

#include "kernels/ptx/device.cuh"

namespace convpool {

CONVPOOL_DEVICE void store_global_if(bool wanted, void *to, const uint4 &v) {
    asm volatile(
        "{\n.reg .pred wanted;\nsetp.ne.u32 wanted, %5, 0;\n@wanted st.global.v4.b32 [%0], {%1, %2, %3, %4};\n}" ::"l"(to),
        "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(static_cast<uint32_t>(wanted))
        : "memory");
}

// 16 bits, or zeros.
CONVPOOL_DEVICE uint32_t load_bits_if(bool wanted, const char *from) {
    uint16_t bits = 0;
    asm("{\n.reg .pred wanted;\nsetp.ne.u32 wanted, %2, 0;\n@wanted ld.global.u16 %0, [%1];\n}"
        : "+h"(bits)
        : "l"(from), "r"(static_cast<uint32_t>(wanted)));
    return bits;
}
// A float, or zero.
CONVPOOL_DEVICE float load_float_if(bool wanted, const char *from) {
    float value = 0.f;
    asm("{\n.reg .pred wanted;\nsetp.ne.u32 wanted, %2, 0;\n@wanted ld.global.f32 %0, [%1];\n}"
        : "+f"(value)
        : "l"(from), "r"(static_cast<uint32_t>(wanted)));
    return value;
}

}  // namespace convpool

// SPDX-License-Identifier: Apache-2.0
// Loads and stores of shared memory by 32-bit addresses.
//
// But for load_constant_pair they are volatile and clobber memory, so the compiler keeps their order among each other and around
// barriers.
#pragma once

#include "kernels/ptx/device.cuh"

namespace convpool {

// The address in the window of shared memory, as asm statements take it.
CONVPOOL_DEVICE uint32_t shared_address(const void *p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

CONVPOOL_DEVICE void store_shared(uint32_t address, const uint4 &v) {
    asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
CONVPOOL_DEVICE uint4 load_shared(uint32_t address) {
    uint4 v;
    asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address) : "memory");
    return v;
}

CONVPOOL_DEVICE void store_shared_pair(uint32_t address, float x, float y) {
    asm volatile("st.shared.v2.f32 [%0], {%1,%2};" ::"r"(address), "f"(x), "f"(y) : "memory");
}
CONVPOOL_DEVICE float load_shared_float(uint32_t address) {
    float v;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(address) : "memory");
    return v;
}

CONVPOOL_DEVICE void store_shared_word(uint32_t address, uint32_t v) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(v) : "memory");
}
CONVPOOL_DEVICE void store_shared_words(uint32_t address, uint32_t first, uint32_t second) {
    asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(address), "r"(first), "r"(second) : "memory");
}
CONVPOOL_DEVICE void store_shared_float(uint32_t address, float v) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(v) : "memory");
}

// Loads from where nothing is stored any more: not volatile, so they may run ahead. Hazard: also ahead of the barrier after the
// last store, unless the address is unknown to the compiler before.
CONVPOOL_DEVICE void load_constant_pair(uint32_t address, float &first, float &second) {
    asm("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(first), "=f"(second) : "r"(address));
}
CONVPOOL_DEVICE void load_constant_pair(uint32_t address, uint32_t &first, uint32_t &second) {
    asm("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(first), "=r"(second) : "r"(address));
}

}  // namespace convpool

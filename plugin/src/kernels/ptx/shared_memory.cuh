// Loads and stores of shared memory by 32-bit addresses, and a store to global memory under a predicate.
//
// They are volatile and clobber memory, so the compiler keeps their order among each other and around barriers.
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

// Stores 16 bytes to global memory if wanted. An if in C++ might become a branch.
CONVPOOL_DEVICE void store_global_if(bool wanted, void *to, const uint4 &v) {
    asm volatile(
        "{\n.reg .pred wanted;\nsetp.ne.u32 wanted, %5, 0;\n@wanted st.global.v4.b32 [%0], {%1, %2, %3, %4};\n}" ::"l"(to),
        "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(static_cast<uint32_t>(wanted))
        : "memory");
}

}  // namespace convpool

// SPDX-License-Identifier: Apache-2.0
// Loads, stores and asynchronous copies of shared and of global memory.
#pragma once

#include "kernels/ptx/device.cuh"

namespace convpool {

// Loads and stores of shared memory by 32-bit addresses. But for load_constant_pair they are volatile and clobber memory, so the
// compiler keeps their order among each other and around barriers.

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

CONVPOOL_DEVICE uint32_t load_shared_word(uint32_t address) { return __float_as_uint(load_shared_float(address)); }
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

// 16 bytes from global to shared memory, or zeros, by cp.async, in groups that a thread commits and waits for. Before sm_80 the
// copy is synchronous, and commit and wait do nothing.
CONVPOOL_DEVICE void copy_chunk(uint32_t dst, const void *src, bool valid) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    int bytes = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(bytes) : "memory");
#else
    uint4 v = valid ? *reinterpret_cast<const uint4 *>(src) : uint4{0, 0, 0, 0};
    store_shared(dst, v);
#endif
}

// Starts to load a line of 128 bytes to the L2, ahead of its use.
CONVPOOL_DEVICE void prefetch_line(const void *src) { asm volatile("prefetch.global.L2 [%0];" ::"l"(src)); }

// Ends a group of this thread's copies; a group may be empty.
CONVPOOL_DEVICE void copy_commit() { CONVPOOL_ASM_SM80("cp.async.commit_group;" :: : "memory"); }
// Until at most the last kPending groups of this thread are under way. Hazard: other threads' copies need a barrier besides.
template <int kPending> CONVPOOL_DEVICE void copy_wait() {
    CONVPOOL_ASM_SM80("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Loads and stores of global memory under a predicate. An if in C++ might become a branch, which other loads do not pass.
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

// SPDX-License-Identifier: Apache-2.0
// Hopper's warpgroup products: wgmma from shared memory, accumulators in registers. sm_90a only.
//
// Operands lie as chunks of 16 bytes along the reduction dimension. Unswizzled, eight consecutive rows of one chunk are a
// core matrix of 128 bytes, and a descriptor gives its start, the bytes from a chunk to the next and from eight rows to the
// next eight; a start may be any multiple of 16 bytes, so a shifted window is one as well. With the 64-byte swizzle, a row's
// four chunks lie side by side, chunk c at place c ^ (row / 2 % 4), and a start moves by 32 bytes for the next two chunks;
// with the 128-byte swizzle eight, at c ^ (row % 8).
#pragma once

#include "core/params.h"
#include "kernels/ptx/device.cuh"

namespace convpool {

constexpr uint64_t kNoSwizzle = 0, kSwizzle128 = uint64_t{1} << 62, kSwizzle64 = uint64_t{2} << 62;

// All of a descriptor but the address. chunk_bytes: from a chunk of a row to the next (swizzled: unused by the hardware);
// eight_rows_bytes: from eight rows to the next eight.
CONVPOOL_DEVICE uint64_t matrix_descriptor(uint32_t chunk_bytes, uint32_t eight_rows_bytes, uint64_t swizzle) {
    return (static_cast<uint64_t>(chunk_bytes >> 4) << 16) | (static_cast<uint64_t>(eight_rows_bytes >> 4) << 32) | swizzle;
}

// In a cluster, upper bits of a shared address name the block; a descriptor has 18 bits.
CONVPOOL_DEVICE uint64_t at_address(uint64_t descriptor, uint32_t address) { return descriptor | ((address & 0x3ffffu) >> 4); }

// Bytes further on, at an address that still has 18 bits.
CONVPOOL_DEVICE uint64_t moved(uint64_t descriptor, uint32_t bytes) {
    return (descriptor & ~uint64_t{0xffffffffu}) | (static_cast<uint32_t>(descriptor) + (bytes >> 4));
}

// Makes what this thread wrote to shared memory, copies included that it waited for, visible to the tensor cores of
// threads that pass a later barrier.
CONVPOOL_DEVICE void publish_shared() { CONVPOOL_ASM_SM90A("fence.proxy.async.shared::cta;" :: : "memory"); }
// Hazard: before the first product, and wherever registers of accumulators or of a were written since: orders those writes
// before the products.
CONVPOOL_DEVICE void wgmma_begin() { CONVPOOL_ASM_SM90A("wgmma.fence.sync.aligned;" :: : "memory"); }
// Ends a group of products; wgmma_wait() counts groups.
CONVPOOL_DEVICE void wgmma_commit() { CONVPOOL_ASM_SM90A("wgmma.commit_group.sync.aligned;" :: : "memory"); }
// Until at most kPending groups are under way. Hazard: only then may their operands' memory be written and accumulators read.
template <int kPending> CONVPOOL_DEVICE void wgmma_wait() {
    CONVPOOL_ASM_SM90A("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// A warpgroup's registers a thread from here on: fewer, which others may take, or more, once they are free. All of its warps.
template <int kRegisters> CONVPOOL_DEVICE void give_registers() {
    CONVPOOL_ASM_SM90A("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters> CONVPOOL_DEVICE void take_registers() {
    CONVPOOL_ASM_SM90A("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Accumulators as operands of an asm statement, 8 fragments of 4 at a time, and their numbers.
#define CONVPOOL_D4(d, i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define CONVPOOL_D16(d, i) CONVPOOL_D4(d, i), CONVPOOL_D4(d, i + 1), CONVPOOL_D4(d, i + 2), CONVPOOL_D4(d, i + 3)
#define CONVPOOL_D32(d, i) CONVPOOL_D16(d, i), CONVPOOL_D16(d, i + 4)
#define CONVPOOL_D64(d, i) CONVPOOL_D32(d, i), CONVPOOL_D32(d, i + 8)
#define CONVPOOL_D96(d, i) CONVPOOL_D64(d, i), CONVPOOL_D32(d, i + 16)
#define CONVPOOL_D128(d, i) CONVPOOL_D96(d, i), CONVPOOL_D32(d, i + 24)
#define CONVPOOL_R16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define CONVPOOL_R32 CONVPOOL_R16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define CONVPOOL_R64                                                                                             \
    CONVPOOL_R32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54," \
                 "%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define CONVPOOL_R96                                                                                             \
    CONVPOOL_R64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86," \
                 "%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define CONVPOOL_R128                                                                                           \
    CONVPOOL_R96 ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114," \
                 "%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
// A product of n columns, whose sums are the first n / 2 operands, and k values of a type. operands: a and b by their numbers.
#define CONVPOOL_ISSUE(n, sums, k, type, layout, operands, ...)                                            \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k" #k ".f32." type "." type " {" CONVPOOL_R##sums \
                 "}, " operands ", 1, 1, 1" layout ";"                                                     \
                 : CONVPOOL_D##sums(d, 0)                                                                  \
                 : __VA_ARGS__)
#define CONVPOOL_PRODUCT(k, type, layout, operands, ...)                                                                       \
    if constexpr (kFragments == 4) CONVPOOL_ISSUE(32, 16, k, type, layout, operands(16, 17, 18, 19, 20), __VA_ARGS__);         \
    else if constexpr (kFragments == 8) CONVPOOL_ISSUE(64, 32, k, type, layout, operands(32, 33, 34, 35, 36), __VA_ARGS__);    \
    else if constexpr (kFragments == 16) CONVPOOL_ISSUE(128, 64, k, type, layout, operands(64, 65, 66, 67, 68), __VA_ARGS__);  \
    else if constexpr (kFragments == 24) CONVPOOL_ISSUE(192, 96, k, type, layout, operands(96, 97, 98, 99, 100), __VA_ARGS__); \
    else CONVPOOL_ISSUE(256, 128, k, type, layout, operands(128, 129, 130, 131, 132), __VA_ARGS__)
// A product of the precision P. 16-bit types say how a and b lie.
#define CONVPOOL_OF_PRECISION(layout, ...)                                                                        \
    static_assert(kFragments == 4 || kFragments == 8 || kFragments == 16 || kFragments == 24 || kFragments == 32, \
                  "32, 64, 128, 192 or 256 columns");                                                             \
    if constexpr (P == Precision::kF16) {                                                                         \
        CONVPOOL_PRODUCT(16, "f16", layout, __VA_ARGS__);                                                         \
    } else if constexpr (P == Precision::kBF16) {                                                                 \
        CONVPOOL_PRODUCT(16, "bf16", layout, __VA_ARGS__);                                                        \
    } else {                                                                                                      \
        CONVPOOL_PRODUCT(8, "tf32", "", __VA_ARGS__);                                                             \
    }
#define CONVPOOL_BOTH_SHARED(a, b, ...) "%" #a ", %" #b
#define CONVPOOL_A_IN_REGISTERS(a0, a1, a2, a3, b) "{%" #a0 ",%" #a1 ",%" #a2 ",%" #a3 "}, %" #b

// d[64][kFragments * 8] += a[64][2 chunks] b[kFragments * 8][2 chunks]^T, asynchronously. Thread's fragment i holds rows g
// and g + 8 of its warp's 16, columns 8 i + 2 t and the next, as mma.sync's does.
template <Precision P, int kFragments> CONVPOOL_DEVICE void wgmma(float (&d)[kFragments][4], uint64_t a, uint64_t b) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    CONVPOOL_OF_PRECISION(", 0, 0", CONVPOOL_BOTH_SHARED, "l"(a), "l"(b))
#endif
}

// The same with a in registers: each warp has its 16 rows of it, as mma.sync's fragment has them. TF32 ignores the low 13 bits of a,
// a truncation. Hazard: the registers of a are read until wgmma_wait() says that the product is done.
template <Precision P, int kFragments> CONVPOOL_DEVICE void wgmma(float (&d)[kFragments][4], const uint32_t (&a)[4], uint64_t b) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    static_assert(P != Precision::kTF32x3, "one product");
    CONVPOOL_OF_PRECISION(", 0", CONVPOOL_A_IN_REGISTERS, "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
#endif
}

}  // namespace convpool

// SPDX-License-Identifier: Apache-2.0
// A warp's matrix instructions: ldmatrix and mma.sync.
//
// m16n8k16 (16-bit types) and m16n8k8 (TF32) give a lane the same 4-byte words of the same 16-byte chunks. So one ldmatrix of
// eight chunks is an operand fragment of either, callers count in chunks, and only mma() knows the type.
#pragma once

#include "core/params.h"
#include "kernels/ptx/device.cuh"
#include "kernels/ptx/numbers.cuh"
#include "kernels/tile/tile.cuh"

namespace convpool {

// Four 8 x 8 matrices of 16-byte rows: lane 8i + j gives the address of row j of matrix i; r[i] is this lane's word of matrix i,
// word lane % 4 of row lane / 4.
CONVPOOL_DEVICE void load_matrix(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

#define CONVPOOL_MMA(shape, type)                                                                                            \
    CONVPOOL_ASM_SM80("mma.sync.aligned." shape ".row.col.f32." type "." type ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, " \
                      "{%0,%1,%2,%3};" : "+f"(d[0]),                                                                         \
                      "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))

// d[16][8] += a[16][8] b[8][8]^T. The low 13 bits of a and b, which TF32 does not have, are ignored: a truncation.
CONVPOOL_DEVICE void mma_tf32(float (&d)[4], const uint32_t (&a)[4], const uint32_t b0, const uint32_t b1) {
    CONVPOOL_MMA("m16n8k8", "tf32");
}

// d[16][8] += a[16][2 chunks] b[8][2 chunks]^T. sm_75 has no m16n8k16 and takes two steps of one chunk.
template <Precision P> CONVPOOL_DEVICE void mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t b0, const uint32_t b1) {
    if constexpr (P == Precision::kF16) {
        CONVPOOL_MMA("m16n8k16", "f16");
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 750 && __CUDA_ARCH__ < 800
        asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                     : "r"(a[0]), "r"(a[1]), "r"(b0));
        asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                     : "r"(a[2]), "r"(a[3]), "r"(b1));
#endif
    } else if constexpr (P == Precision::kBF16) {
        CONVPOOL_MMA("m16n8k16", "bf16");
    } else {
        mma_tf32(d, a, b0, b1);
    }
}

// acc += pixels x weights over one slice. pixel_rows[mi]: this lane's ldmatrix row (pixel lane % 16, chunk lane / 16).
// two_planes: bytes from a chunk of means to the one after the next.
template <class Config, Pixels kPixels>
CONVPOOL_DEVICE void multiply_slice(Accumulators<Config> &acc, const uint32_t (&pixel_rows)[Config::kFragmentsM],
                                    uint32_t pixel_offset, uint32_t two_planes, uint32_t weight_row) {
    constexpr Precision kPrecision = Config::kPrecision;
    UNROLLED_FOR (int k = 0; k < Config::kChunks / 2; ++k) {
        uint32_t a[Config::kFragmentsM][4];      // (16 pixels, 2 chunks) each
        uint32_t b[Config::kFragmentsN / 2][4];  // (16 channels, 2 chunks) each
        UNROLLED_FOR (int mi = 0; mi < Config::kFragmentsM; ++mi)
            load_matrix(a[mi], pixel_address<kPixels>(pixel_rows[mi], pixel_offset, two_planes, k));
        UNROLLED_FOR (int nj = 0; nj < Config::kFragmentsN / 2; ++nj)
            load_matrix(b[nj], (weight_row ^ (k * 32)) + nj * 16 * Config::kRowBytes);
        // Operands that memory holds as fp32 are rounded here; means were rounded when they were formed.
        if constexpr (kPrecision == Precision::kTF32) {
            UNROLLED_FOR (int nj = 0; nj < Config::kFragmentsN / 2; ++nj)
                UNROLLED_FOR (int i = 0; i < 4; ++i) b[nj][i] = round_to_tf32(b[nj][i]);
            if constexpr (kPixels == Pixels::kRows) {
                UNROLLED_FOR (int mi = 0; mi < Config::kFragmentsM; ++mi)
                    UNROLLED_FOR (int i = 0; i < 4; ++i) a[mi][i] = round_to_tf32(a[mi][i]);
            }
        }
        UNROLLED_FOR (int ni = 0; ni < Config::kFragmentsN; ++ni)
            UNROLLED_FOR (int mi = 0; mi < Config::kFragmentsM; ++mi)
                mma<kPrecision>(acc[mi][ni], a[mi], b[ni / 2][(ni & 1) * 2], b[ni / 2][(ni & 1) * 2 + 1]);
    }
}

// acc += pixels x weights over one slice at full fp32 precision (3xTF32: each operand is a big and a small TF32 number). The
// tensor cores truncate as they accumulate, an error that grows with the length of the sum, so each slice starts from zero
// and is added to acc by a rounded addition. The small products come first, so that the large one is added to their sum.
template <class Config, Pixels kPixels>
CONVPOOL_DEVICE void multiply_slice_tf32x3(Accumulators<Config> &acc, const uint32_t (&pixel_rows)[Config::kFragmentsM],
                                           uint32_t pixel_offset, uint32_t two_planes, uint32_t weight_row) {
    constexpr int kSteps = Config::kChunks / 2;
    uint32_t a_big[kSteps][Config::kFragmentsM][4], a_small[kSteps][Config::kFragmentsM][4];  // (16 pixels, 2 chunks) each
    UNROLLED_FOR (int k = 0; k < kSteps; ++k)
        UNROLLED_FOR (int mi = 0; mi < Config::kFragmentsM; ++mi) {
            uint32_t a[4];
            load_matrix(a, pixel_address<kPixels>(pixel_rows[mi], pixel_offset, two_planes, k));
            UNROLLED_FOR (int i = 0; i < 4; ++i) split_tf32(a[i], a_big[k][mi][i], a_small[k][mi][i]);
        }
    UNROLLED_FOR (int nj = 0; nj < Config::kFragmentsN / 2; ++nj) {
        uint32_t b_big[kSteps][4], b_small[kSteps][4];  // (16 channels, 2 chunks) each
        UNROLLED_FOR (int k = 0; k < kSteps; ++k) {
            uint32_t b[4];
            load_matrix(b, (weight_row ^ (k * 32)) + nj * 16 * Config::kRowBytes);
            UNROLLED_FOR (int i = 0; i < 4; ++i) split_tf32(b[i], b_big[k][i], b_small[k][i]);
        }
        UNROLLED_FOR (int half = 0; half < 2; ++half)
            UNROLLED_FOR (int mi = 0; mi < Config::kFragmentsM; ++mi) {
                float part[4] = {0.f, 0.f, 0.f, 0.f};  // (16 pixels, 8 channels)
                UNROLLED_FOR (int k = 0; k < kSteps; ++k) {
                    mma_tf32(part, a_small[k][mi], b_big[k][2 * half], b_big[k][2 * half + 1]);
                    mma_tf32(part, a_big[k][mi], b_small[k][2 * half], b_small[k][2 * half + 1]);
                }
                UNROLLED_FOR (int k = 0; k < kSteps; ++k)
                    mma_tf32(part, a_big[k][mi], b_big[k][2 * half], b_big[k][2 * half + 1]);
                UNROLLED_FOR (int i = 0; i < 4; ++i) acc[mi][nj * 2 + half][i] += part[i];
            }
    }
}

// acc += pixels x weights over one slice, in the precision of Config.
template <class Config, Pixels kPixels>
CONVPOOL_DEVICE void multiply(Accumulators<Config> &acc, const uint32_t (&pixel_rows)[Config::kFragmentsM], uint32_t pixel_offset,
                              uint32_t two_planes, uint32_t weight_row) {
    if constexpr (Config::kPrecision == Precision::kTF32x3)
        multiply_slice_tf32x3<Config, kPixels>(acc, pixel_rows, pixel_offset, two_planes, weight_row);
    else multiply_slice<Config, kPixels>(acc, pixel_rows, pixel_offset, two_planes, weight_row);
}

}  // namespace convpool

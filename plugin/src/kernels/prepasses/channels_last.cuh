// SPDX-License-Identifier: Apache-2.0
// Box means of a channels-last X, by chunks of channels.
#pragma once

#include "kernels/prepasses/prepasses.h"
#include "kernels/prepasses/store.cuh"
#include "kernels/prologue/chunk_prologue.cuh"
#include "kernels/tile/box_mean.cuh"

namespace convpool::prepasses {

// 2x2 windows one apart over chunked channels last: a thread makes one chunk of a strip. A row's pair sum serves two windows,
// and all loads are under way before the first is used.
template <class Element, bool kPrologue>
__global__ void __launch_bounds__(kThreads) box_pairs_kernel(const __grid_constant__ BoxMeanParams p, uint32_t items) {
    constexpr Precision kPrecision = Chunked<Element>::kPrecision;
    constexpr int kPerChunk = Traits<kPrecision>::kPerChunk;
    wait_for_previous_kernel();
    let_next_kernel_start();
    const uint32_t item = blockIdx.x * kThreads + threadIdx.x;
    if (item >= items) return;
    uint32_t rest, chunk, column, strip, n;
    p.div_chunks.divmod(item, rest, chunk);
    p.div_out_w.divmod(rest, rest, column);
    p.div_strips.divmod(rest, n, strip);
    // The strip's first window begins here; it may lie outside X.
    const int y0 = strip * kStrip - p.box.pad_h, x0 = static_cast<int>(column) - p.box.pad_w;
    const bool left = static_cast<uint32_t>(x0) < static_cast<uint32_t>(p.w);
    const bool right = static_cast<uint32_t>(x0 + 1) < static_cast<uint32_t>(p.w);
    const uint4 *x = static_cast<const uint4 *>(p.x);
    uint4 loaded[kStrip + 1][2];  // (row of the strip and one below, left and right pixel)
    // All loads of the strip, before the first is used.
#pragma unroll
    for (int i = 0; i <= kStrip; ++i) {
        const bool inside = static_cast<uint32_t>(y0 + i) < static_cast<uint32_t>(p.h);
        const int64_t at = ((static_cast<int64_t>(n) * p.h + y0 + i) * p.w + x0) * p.chunks + chunk;
        loaded[i][0] = inside && left ? x[at] : uint4{0, 0, 0, 0};
        loaded[i][1] = inside && right ? x[at + p.chunks] : uint4{0, 0, 0, 0};
    }
    ChunkPrologue<kPrecision> f;
    if constexpr (kPrologue) f.load(p.prologue, chunk * kPerChunk, p.c);
    // v = f of a pixel of row i; zeros outside X stay.
    auto unpack = [&](int i, int side, float (&v)[kPerChunk]) {
        unpack_chunk<kPrecision>(loaded[i][side], v);
        if constexpr (kPrologue)
            if (static_cast<uint32_t>(y0 + i) < static_cast<uint32_t>(p.h) && (side == 0 ? left : right)) f.apply(p.prologue, v);
    };
    // Walk down: above is the pair sum of the row before, below that of this row.
    float above[kPerChunk], below[kPerChunk], other[kPerChunk];
    unpack(0, 0, above);
    unpack(0, 1, other);
#pragma unroll
    for (int j = 0; j < kPerChunk; ++j) above[j] += other[j];
#pragma unroll
    for (int i = 0; i < kStrip; ++i) {
        unpack(i + 1, 0, below);
        unpack(i + 1, 1, other);
#pragma unroll
        for (int j = 0; j < kPerChunk; ++j) {
            below[j] += other[j];
            other[j] = (above[j] + below[j]) * 0.25f;
            above[j] = below[j];
        }
        const int y = strip * kStrip + i;
        if (y < p.out_h)
            store_chunk<Element>(p.out, ((static_cast<int64_t>(n) * p.out_h + y) * p.out_w + column) * p.chunks + chunk, p.format,
                                 pack_chunk<kPrecision>(other));
    }
}

// Any windows: a thread makes one chunk of one pixel, kAtOnce places of the window at a time.
template <class Element, bool kPrologue>
__global__ void __launch_bounds__(kThreads) box_mean_kernel(const __grid_constant__ BoxMeanParams p, int64_t items) {
    constexpr Precision kPrecision = Chunked<Element>::kPrecision;
    constexpr int kPerChunk = Traits<kPrecision>::kPerChunk;
    wait_for_previous_kernel();
    let_next_kernel_start();
    const Element *x = static_cast<const Element *>(p.x);
    const int64_t plane = static_cast<int64_t>(p.h) * p.w;
    for (int64_t item = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; item < items;
         item += static_cast<int64_t>(gridDim.x) * kThreads) {
        uint32_t chunk, n, oy, ox, rest;
        p.div_chunks.divmod(static_cast<uint32_t>(item), rest, chunk);
        p.div_out_w.divmod(rest, rest, ox);
        p.div_out_h.divmod(rest, n, oy);
        const int c = chunk * kPerChunk;
        ChunkPrologue<kPrecision> f;
        if constexpr (kPrologue) f.load(p.prologue, c, p.c);
        float sum[kPerChunk] = {};
        const int y0 = static_cast<int>(oy) * p.box.stride_h - p.box.pad_h;
        const int x0 = static_cast<int>(ox) * p.box.stride_w - p.box.pad_w, window = p.box.ph * p.box.pw;
        int u = 0, v = 0;  // the place in the window to load next
        for (int t = 0; t < window; t += kAtOnce) {
            bool inside[kAtOnce];
            const Element *at[kAtOnce];
            uint4 loaded[kAtOnce];
            // Start loads of kAtOnce places, then add them up: one wait for memory instead of four.
#pragma unroll
            for (int j = 0; j < kAtOnce; ++j) {
                const int y = y0 + u * p.box.dilation_h, column = x0 + v * p.box.dilation_w;
                inside[j] = t + j < window && static_cast<uint32_t>(y) < static_cast<uint32_t>(p.h) &&
                            static_cast<uint32_t>(column) < static_cast<uint32_t>(p.w);
                at[j] = x + (n * plane + static_cast<int64_t>(y) * p.w + column) * p.c + c;
                if (p.x_chunked && inside[j]) loaded[j] = *reinterpret_cast<const uint4 *>(at[j]);
                if (++v == p.box.pw) {
                    v = 0;
                    ++u;
                }
            }
#pragma unroll
            for (int j = 0; j < kAtOnce; ++j) {
                if (!inside[j]) continue;
                float value[kPerChunk];
                if (p.x_chunked) {
                    unpack_chunk<kPrecision>(loaded[j], value);
                } else {
#pragma unroll
                    for (int i = 0; i < kPerChunk; ++i) value[i] = c + i < p.c ? to_float(at[j][i]) : 0.f;
                }
                if constexpr (kPrologue) f.apply(p.prologue, value);
#pragma unroll
                for (int i = 0; i < kPerChunk; ++i) sum[i] += value[i];
            }
        }
        if (p.box.count != 1.f) {
#pragma unroll
            for (int i = 0; i < kPerChunk; ++i) sum[i] = mean_of(sum[i], p.box);
        }
        store_chunk<Element>(p.out, item, p.format, pack_chunk<kPrecision>(sum));
    }
}

}  // namespace convpool::prepasses

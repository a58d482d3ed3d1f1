// SPDX-License-Identifier: Apache-2.0
// Box means of a channels-first X, by quads: four channels of a pixel.
#pragma once

#include "kernels/prepasses/prepasses.h"
#include "kernels/prepasses/store.cuh"
#include "kernels/prologue/chunk_prologue.cuh"
#include "kernels/tile/box_mean.cuh"

namespace convpool::prepasses {

// A quad of floats is a chunk; of 16-bit types it is half of one.
CONVPOOL_DEVICE void store_quad(void *out, int64_t position, NumberFormat format, const uint4 &v) {
    store_chunk<float>(out, position, format, v);
}
CONVPOOL_DEVICE void store_quad(void *out, int64_t position, NumberFormat, const uint2 &v) {
    static_cast<uint2 *>(out)[position] = v;
}

// kStrip rows of means of one quad and column, from the row of X at y0 and the column at x0 on.
template <class Element, bool kPrologue> struct QuadStrip {
    using Loaded = Element[4];
    using Sum = float[4];

    const BoxMeanParams &p;
    const int channels, y0, x0;
    const Element *planes[4];  // for a channel that X lacks the last it has; its means become zero
    float scale[4], shift[4];

    CONVPOOL_DEVICE QuadStrip(const BoxMeanParams &params, int n, int c, int strip, int column)
        : p(params), channels(p.c - c), y0(strip * kStrip * p.box.stride_h - p.box.pad_h),
          x0(column * p.box.stride_w - p.box.pad_w) {
        const Element *const image = static_cast<const Element *>(p.x) + static_cast<int64_t>(n) * p.c * (p.h * p.w);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int channel = min(c + i, p.c - 1);
            planes[i] = image + channel * (p.h * p.w);
            asm("" : "+l"(planes[i]));  // or each load's address would be summed up from p.x
            __builtin_assume(__isGlobal(planes[i]));
            if constexpr (kPrologue) {
                scale[i] = channel_value<Element>(p.prologue.scale, channel, 1.f);
                shift[i] = channel_value<Element>(p.prologue.shift, channel, 0.f);
            }
        }
    }
    CONVPOOL_DEVICE bool row_inside(int y) const { return static_cast<uint32_t>(y) < static_cast<uint32_t>(p.h); }
    CONVPOOL_DEVICE bool column_inside(int at) const { return static_cast<uint32_t>(at) < static_cast<uint32_t>(p.w); }

    // Four channels of a pixel of X's plane, or zeros.
    CONVPOOL_DEVICE void load(Loaded &out, int pixel, bool inside) const {
#pragma unroll
        for (int i = 0; i < 4; ++i) out[i] = inside ? planes[i][pixel] : from_float<Element>(0.f);
    }
    // sum += f of a pixel; of one outside X, zero.
    CONVPOOL_DEVICE void add(Sum &sum, const Loaded &loaded, bool inside) const {
        const uint32_t mask = inside ? ~0u : 0;  // no branch, which loads could not pass
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float value = to_float(loaded[i]);
            if constexpr (kPrologue)
                value = __uint_as_float(__float_as_uint(activate(fmaf(value, scale[i], shift[i]), p.prologue)) & mask);
            sum[i] += value;
        }
    }
    CONVPOOL_DEVICE Quad<Element> pack(Sum &mean) const {
#pragma unroll
        for (int i = 0; i < 4; ++i) mean[i] = i < channels ? mean[i] : 0.f;
        return pack_quad(mean, Element{});
    }

    // 2x2 windows one apart: store(row, quad) of all rows. A row's pair sum serves two windows, and all loads are under way
    // before the first is used.
    template <class Store> CONVPOOL_DEVICE void pairs(Store store) const {
        const bool left = column_inside(x0), right = column_inside(x0 + 1);
        Loaded loaded[kStrip + 1][2];
#pragma unroll
        for (int i = 0; i <= kStrip; ++i) {
            const int at = (y0 + i) * p.w + x0;
            load(loaded[i][0], at, row_inside(y0 + i) && left);
            load(loaded[i][1], at + 1, row_inside(y0 + i) && right);
        }
        Sum above = {};
#pragma unroll
        for (int i = 0; i <= kStrip; ++i) {
            Sum below = {}, mean;
            add(below, loaded[i][0], row_inside(y0 + i) && left);
            add(below, loaded[i][1], row_inside(y0 + i) && right);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                mean[j] = (above[j] + below[j]) * 0.25f;
                above[j] = below[j];
            }
            if (i > 0) store(i - 1, pack(mean));
        }
    }

    // Any windows: store(row, quad) of as many rows as an image has, up to kStrip.
    template <class Store> CONVPOOL_DEVICE void windows(Store store) const {
        static_assert(kStrip % kAtOnce == 0, "the last round has no row past the strip's");
        const int window = p.box.ph * p.box.pw;
        const int64_t places = static_cast<int64_t>(window) * min(kStrip, p.out_h);
        Sum sum = {};
        int u = 0, v = 0, y = y0, added = 0, row = 0;
#pragma unroll 1
        for (int64_t t = 0; t < places; t += kAtOnce) {
            bool inside[kAtOnce];
            Loaded loaded[kAtOnce];
#pragma unroll
            for (int j = 0; j < kAtOnce; ++j) {
                const int at_y = y + u * p.box.dilation_h, at_x = x0 + v * p.box.dilation_w;
                inside[j] = t + j < places && row_inside(at_y) && column_inside(at_x);
                load(loaded[j], at_y * p.w + at_x, inside[j]);
                if (++v < p.box.pw) continue;
                v = 0;
                if (++u < p.box.ph) continue;
                u = 0;
                y += p.box.stride_h;
            }
#pragma unroll
            for (int j = 0; j < kAtOnce; ++j) {
                add(sum, loaded[j], inside[j]);
                if (++added < window) continue;
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    if (p.box.count != 1.f) sum[i] = mean_of(sum[i], p.box);
                store(row++, pack(sum));
                added = 0;
#pragma unroll
                for (int i = 0; i < 4; ++i) sum[i] = 0.f;
            }
        }
    }
};

// A block makes `across` neighbouring quads (a power of two up to 8) of kThreads / across walks, a walk being one column of a
// strip. A thread forms the means of one walk and quad, its neighbours those of the next walks, as X lies in memory; then it
// gets others through shared memory to store, its neighbours the next quads of the same pixels.
template <class Element, bool kPrologue, bool kPairs>
__global__ void __launch_bounds__(kThreads, 3) channels_first_kernel(const __grid_constant__ BoxMeanParams p, uint32_t walks,
                                                                     uint32_t quads, uint32_t groups, int across_log2) {
    constexpr uint32_t kLine = 128 / sizeof(Quad<Element>);  // quads that fill all banks
    __shared__ Quad<Element> means[kStrip][kThreads];
    wait_for_previous_kernel();
    let_next_kernel_start();
    const uint32_t across = 1u << across_log2, block_walks = kThreads >> across_log2;
    // From the last image on: its X, which was written last, is still in the L2, as the means of the first image will be when
    // the GEMM begins with them.
    const uint32_t block = gridDim.x - 1 - blockIdx.x;
    const uint32_t first_walk = block / groups * block_walks, first_quad = block % groups * across;
    // kLine walks of one quad, written at once, and kLine places in a row, read at once, meet in no bank.
    auto place = [&](uint32_t walk, uint32_t quad) {
        const uint32_t i = walk * across + quad;
        return i ^ (i / kLine & (across - 1));
    };
    auto exists = [&](uint32_t walk, uint32_t quad) { return first_walk + walk < walks && first_quad + quad < quads; };
    auto split = [&](uint32_t walk, uint32_t &n, uint32_t &strip, uint32_t &column) {
        p.div_out_w.divmod(first_walk + walk, walk, column);
        p.div_strips.divmod(walk, n, strip);
    };
    // Form: lanes run along walks, as X lies in memory.
    uint32_t n, strip, column;
    const uint32_t formed_walk = threadIdx.x % block_walks, formed_quad = threadIdx.x / block_walks;
    if (exists(formed_walk, formed_quad)) {
        split(formed_walk, n, strip, column);
        const uint32_t at = place(formed_walk, formed_quad);
        auto store = [&](int row, const Quad<Element> &quad) { means[row][at] = quad; };
        const QuadStrip<Element, kPrologue> of(p, n, (first_quad + formed_quad) * 4, strip, column);
        if constexpr (kPairs) of.pairs(store);
        else of.windows(store);
    }
    __syncthreads();
    // Store: lanes run along quads, as the means lie in memory.
    const uint32_t walk = threadIdx.x / across, quad = threadIdx.x % across, at = place(walk, quad);
    if (!exists(walk, quad)) return;
    split(walk, n, strip, column);
    const int64_t row = static_cast<int64_t>(p.out_w) * quads;
    int64_t position = (static_cast<int64_t>(n) * p.out_h + strip * kStrip) * row + column * quads + first_quad + quad;
#pragma unroll
    for (int i = 0; i < kStrip; ++i, position += row)
        if (strip * kStrip + i < static_cast<uint32_t>(p.out_h)) store_quad(p.out, position, p.format, means[i][at]);
}

}  // namespace convpool::prepasses

// SPDX-License-Identifier: Apache-2.0
// direct_rs_nchw: from a warpgroup's sums to Y: bias, residual, activation, store.
//
// Lane 4g + t has of fragment f the sums of outputs 2g and 2g + 1 of a warp's 16, channels 8f + 2t and 8f + 2t + 1:
//
//     acc[f][4]        channel 8f + 2t      8f + 2t + 1
//     output 2g            acc[f][0]          acc[f][1]
//     output 2g + 1        acc[f][2]          acc[f][3]
#pragma once

#include "families/direct_rs_nchw/block.cuh"
#include "kernels/epilogue/activation.cuh"

namespace convpool {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

template <class Block, int kFragments>
CONVPOOL_DEVICE void finish_channels_first(const Block &block, float (&acc)[kFragments][4], int subtile, int first_channel) {
    using Element = typename Traits<Block::Config::kPrecision>::Element;
    const SubtileParams &p = block.p;
    const Epilogue &e = p.epilogue;
    const typename Block::Corner corner = block.corner_of(subtile);
    const int channel = first_channel + 2 * (block.lane & 3), y = corner.y + block.row(),
              x = corner.x + block.column() + block.lane_column() / 2;
    const int outputs = corner.image < p.images && y < p.out_h ? p.out_w - x : 0;  // of the row, from this lane's first on
    const int64_t plane = static_cast<int64_t>(p.out_h) * p.out_w;
    const int64_t first = (static_cast<int64_t>(corner.image) * p.m + channel) * plane + static_cast<int64_t>(y) * p.out_w + x;
    Element *const out = static_cast<Element *>(p.y) + first;
    if (e.bias != nullptr) {
        const Element *const bias = static_cast<const Element *>(e.bias) + channel;
#pragma unroll
        for (int f = 0; f < kFragments; ++f)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float b = channel + 8 * f + i < p.m ? to_float(bias[8 * f + i]) : 0.f;
                acc[f][i] += b;
                acc[f][2 + i] += b;
            }
    }
    if (e.residual != nullptr) {
        const Element *const residual = static_cast<const Element *>(e.residual) + first;
#pragma unroll
        for (int f = 0; f < kFragments; ++f)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (channel + 8 * f + i % 2 < p.m && i / 2 < outputs)
                    acc[f][i] += to_float(residual[(8 * f + i % 2) * plane + i / 2]);
    }
    if (e.activation != Activation::kNone) clip_or_rectify(reinterpret_cast<float (&)[kFragments * 4]>(acc), e);
    const bool pairs = p.out_w % 2 == 0 && reinterpret_cast<uintptr_t>(p.y) % (2 * sizeof(Element)) == 0;
#pragma unroll
    for (int f = 0; f < kFragments; ++f)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            Element *const place = out + (8 * f + i) * plane;
            if (channel + 8 * f + i >= p.m || outputs <= 0) continue;
            if (pairs) {
                if constexpr (sizeof(Element) == 4) *reinterpret_cast<float2 *>(place) = make_float2(acc[f][i], acc[f][2 + i]);
                else *reinterpret_cast<uint32_t *>(place) = pack2(acc[f][i], acc[f][2 + i], Element{});
            } else {
                place[0] = from_float<Element>(acc[f][i]);
                if (outputs > 1) place[1] = from_float<Element>(acc[f][2 + i]);
            }
        }
}

#endif

}  // namespace convpool

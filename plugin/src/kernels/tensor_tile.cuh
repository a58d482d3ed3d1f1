// What a warp does with operands in shared memory and with the accumulators that result.
//
// A warp's accumulator fragment (mi, ni) is 16 pixels x 8 channels; lane 4g+t holds pixels g and g+8, channels 2t, 2t+1.
#pragma once

#include "../tile_config.h"
#include "common.cuh"

namespace convpool {

template <class Config> using Accumulators = float[Config::kFragmentsM][Config::kFragmentsN][4];

template <class Config> CONVPOOL_DEVICE void clear(Accumulators<Config> &acc) {
#pragma unroll
    for (int mi = 0; mi < Config::kFragmentsM; ++mi)
#pragma unroll
        for (int ni = 0; ni < Config::kFragmentsN; ++ni)
#pragma unroll
            for (int i = 0; i < 4; ++i) acc[mi][ni][i] = 0.f;
}

// Where a lane's ldmatrix row of the weights starts: lanes 0-7 channels 0-7 of chunk 0, 8-15 the same of chunk 1, 16-31
// channels 8-15 likewise.
template <class Config> CONVPOOL_DEVICE uint32_t weight_lane_offset(int warp_n, int lane) {
    int channel = warp_n * Config::kWarpN + (lane & 7) + ((lane >> 4) << 3);
    return (((lane >> 3) & 1) * Config::kWeightPlane + channel) * 16;
}

// acc += pixels x weights over one slice. pixel_rows[mi]: this lane's ldmatrix row (pixel lane % 16, chunk lane / 16).
// two_planes: bytes from a chunk of pixels to the one after the next. kRoundPixels: fp32 pixels not yet rounded to TF32.
template <class Config, bool kRoundPixels>
CONVPOOL_DEVICE void multiply_slice(Accumulators<Config> &acc, const uint32_t (&pixel_rows)[Config::kFragmentsM],
                                    uint32_t pixel_offset, uint32_t two_planes, uint32_t weight_row) {
    constexpr Precision kPrecision = Config::kPrecision;
#pragma unroll
    for (int k = 0; k < Config::kChunks / 2; ++k) {
        uint32_t a[Config::kFragmentsM][4], b[Config::kFragmentsN / 2][4];
#pragma unroll
        for (int mi = 0; mi < Config::kFragmentsM; ++mi)
            load_matrix(a[mi], pixel_rows[mi] + pixel_offset + k * two_planes);
#pragma unroll
        for (int nj = 0; nj < Config::kFragmentsN / 2; ++nj)
            load_matrix(b[nj], weight_row + (2 * k * Config::kWeightPlane + nj * 16) * 16);
        if constexpr (kPrecision == Precision::kTF32) {
#pragma unroll
            for (int nj = 0; nj < Config::kFragmentsN / 2; ++nj)
#pragma unroll
                for (int i = 0; i < 4; ++i) b[nj][i] = round_to_tf32(b[nj][i]);
            if constexpr (kRoundPixels) {
#pragma unroll
                for (int mi = 0; mi < Config::kFragmentsM; ++mi)
#pragma unroll
                    for (int i = 0; i < 4; ++i) a[mi][i] = round_to_tf32(a[mi][i]);
            }
        }
#pragma unroll
        for (int ni = 0; ni < Config::kFragmentsN; ++ni)
#pragma unroll
            for (int mi = 0; mi < Config::kFragmentsM; ++mi)
                mma<kPrecision>(acc[mi][ni], a[mi], b[ni / 2][(ni & 1) * 2], b[ni / 2][(ni & 1) * 2 + 1]);
    }
}

// The same at full fp32 precision. The tensor cores truncate as they accumulate, an error that grows with the length of
// the sum, so each slice starts from zero and is added to acc by a rounded addition.
template <class Config>
CONVPOOL_DEVICE void multiply_slice_tf32x3(Accumulators<Config> &acc,
                                           const uint32_t (&pixel_rows)[Config::kFragmentsM], uint32_t pixel_offset,
                                           uint32_t two_planes, uint32_t weight_row) {
    constexpr int kSteps = Config::kChunks / 2;
    uint32_t a_big[kSteps][Config::kFragmentsM][4], a_small[kSteps][Config::kFragmentsM][4];
#pragma unroll
    for (int k = 0; k < kSteps; ++k)
#pragma unroll
        for (int mi = 0; mi < Config::kFragmentsM; ++mi) {
            uint32_t a[4];
            load_matrix(a, pixel_rows[mi] + pixel_offset + k * two_planes);
#pragma unroll
            for (int i = 0; i < 4; ++i) split_tf32(a[i], a_big[k][mi][i], a_small[k][mi][i]);
        }
#pragma unroll
    for (int nj = 0; nj < Config::kFragmentsN / 2; ++nj) {
        uint32_t b_big[kSteps][4], b_small[kSteps][4];
#pragma unroll
        for (int k = 0; k < kSteps; ++k) {
            uint32_t b[4];
            load_matrix(b, weight_row + (2 * k * Config::kWeightPlane + nj * 16) * 16);
#pragma unroll
            for (int i = 0; i < 4; ++i) split_tf32(b[i], b_big[k][i], b_small[k][i]);
        }
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int mi = 0; mi < Config::kFragmentsM; ++mi) {
                float part[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
                for (int k = 0; k < kSteps; ++k) {
                    mma_tf32(part, a_small[k][mi], b_big[k][2 * half], b_big[k][2 * half + 1]);
                    mma_tf32(part, a_big[k][mi], b_small[k][2 * half], b_small[k][2 * half + 1]);
                }
#pragma unroll
                for (int k = 0; k < kSteps; ++k)
                    mma_tf32(part, a_big[k][mi], b_big[k][2 * half], b_big[k][2 * half + 1]);
#pragma unroll
                for (int i = 0; i < 4; ++i) acc[mi][nj * 2 + half][i] += part[i];
            }
    }
}

template <class Config, bool kRoundPixels>
CONVPOOL_DEVICE void multiply(Accumulators<Config> &acc, const uint32_t (&pixel_rows)[Config::kFragmentsM],
                              uint32_t pixel_offset, uint32_t two_planes, uint32_t weight_row) {
    if constexpr (Config::kPrecision == Precision::kTF32x3)
        multiply_slice_tf32x3<Config>(acc, pixel_rows, pixel_offset, two_planes, weight_row);
    else
        multiply_slice<Config, kRoundPixels>(acc, pixel_rows, pixel_offset, two_planes, weight_row);
}

// ---- epilogue -----------------------------------------------------------------------------------------------------

// One output pixel: channel m of it is element base + m * step of Y.
struct OutputPixel {
    int64_t base;
    bool valid;
};

struct OutputView {
    void *y;
    int64_t step;  // between channels
    int32_t m;
    bool vectors;
};

// Bias, residual, activation of two channels of one pixel.
template <class Element>
CONVPOOL_DEVICE float2 finish(float2 v, const Epilogue &e, const OutputView &view, int64_t index, int channel) {
    bool first = channel < view.m, second = channel + 1 < view.m;
    if (e.bias != nullptr) {
        const Element *bias = static_cast<const Element *>(e.bias);
        if (first) v.x += to_float(bias[channel]);
        if (second) v.y += to_float(bias[channel + 1]);
    }
    if (e.residual != nullptr) {
        const Element *residual = static_cast<const Element *>(e.residual);
        if (first) v.x += to_float(residual[index]);
        if (second) v.y += to_float(residual[index + view.step]);
    }
    return {activate(v.x, e), activate(v.y, e)};
}

// Two channels of a pixel, whatever the layout.
template <class Element>
CONVPOOL_DEVICE void store_fragment(float2 v, const OutputPixel &pixel, const Epilogue &e, const OutputView &view,
                                    int channel) {
    if (!pixel.valid || channel >= view.m) return;
    const int64_t index = pixel.base + channel * view.step;
    v = finish<Element>(v, e, view, index, channel);
    Element *y = static_cast<Element *>(view.y);
    if (view.vectors) {  // then m is even and the step 1
        if constexpr (sizeof(Element) == 4)
            *reinterpret_cast<float2 *>(y + index) = v;
        else
            *reinterpret_cast<uint32_t *>(y + index) = pack2(v.x, v.y, Element{});
    } else {
        y[index] = from_float<Element>(v.x);
        if (channel + 1 < view.m) y[index + view.step] = from_float<Element>(v.y);
    }
}

// The four lanes of a quad hold 4 words each of fragments 0-3; afterwards lane t holds the 16 bytes of fragment t.
CONVPOOL_DEVICE uint4 transpose_quad(uint4 v, int t) {
    uint32_t sent, got;
    sent = (t & 1) ? v.x : v.y;
    got = __shfl_xor_sync(0xffffffffu, sent, 1);
    if (t & 1) v.x = got; else v.y = got;
    sent = (t & 1) ? v.z : v.w;
    got = __shfl_xor_sync(0xffffffffu, sent, 1);
    if (t & 1) v.z = got; else v.w = got;
    sent = (t & 2) ? v.x : v.z;
    got = __shfl_xor_sync(0xffffffffu, sent, 2);
    if (t & 2) v.x = got; else v.z = got;
    sent = (t & 2) ? v.y : v.w;
    got = __shfl_xor_sync(0xffffffffu, sent, 2);
    if (t & 2) v.y = got; else v.w = got;
    return v;
}

// pixel_of(row of the block's tile) gives an OutputPixel; channel0 is the warp's first channel.
template <class Config, class PixelOf>
CONVPOOL_DEVICE void store_tile(const Accumulators<Config> &acc, const Epilogue &e, const OutputView &view,
                                int first_row, int channel0, int lane, PixelOf pixel_of) {
    using Element = typename Traits<Config::kPrecision>::Element;
    const int g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int mi = 0; mi < Config::kFragmentsM; ++mi)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const OutputPixel pixel = pixel_of(first_row + mi * 16 + half * 8 + g);
            if constexpr (sizeof(Element) == 2 && Config::kFragmentsN % 4 == 0) {
                if (view.vectors) {
#pragma unroll
                    for (int nq = 0; nq < Config::kFragmentsN; nq += 4) {
                        uint32_t words[4];
#pragma unroll
                        for (int q = 0; q < 4; ++q) {
                            int channel = channel0 + (nq + q) * 8 + 2 * t;
                            float2 v{acc[mi][nq + q][2 * half], acc[mi][nq + q][2 * half + 1]};
                            if (pixel.valid)
                                v = finish<Element>(v, e, view, pixel.base + channel, channel);
                            words[q] = pack2(v.x, v.y, Element{});
                        }
                        uint4 chunk = transpose_quad({words[0], words[1], words[2], words[3]}, t);
                        int channel = channel0 + (nq + t) * 8;
                        if (pixel.valid && channel < view.m)
                            *reinterpret_cast<uint4 *>(static_cast<Element *>(view.y) + pixel.base + channel) = chunk;
                    }
                    continue;
                }
            }
#pragma unroll
            for (int ni = 0; ni < Config::kFragmentsN; ++ni)
                store_fragment<Element>({acc[mi][ni][2 * half], acc[mi][ni][2 * half + 1]}, pixel, e, view,
                                        channel0 + ni * 8 + 2 * t);
        }
}

}  // namespace convpool

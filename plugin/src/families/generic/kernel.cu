// SPDX-License-Identifier: Apache-2.0
// The common part of generic's kernels: one thread per output of any rank, stride, dilation and group, and the order of its sum.

#include <cstdint>

#include "convpool.h"
#include "families/generic/params.h"
#include "kernels/epilogue/finish.cuh"
#include "kernels/prologue/prologue.cuh"
#include "kernels/ptx/device.cuh"
#include "kernels/ptx/numbers.cuh"

namespace convpool {

constexpr int kGenericThreads = 128;

inline unsigned generic_blocks(int64_t outputs) {
    const int64_t blocks = (outputs + kGenericThreads - 1) / kGenericThreads;
    return static_cast<unsigned>(blocks < (1 << 20) ? blocks : (1 << 20));
}

// Calls, for each output of this thread: sum.start(); for each tap inside the pooled tensor and each channel of the group
// start_channel(place in scale and shift), add_pixel(its place in X) for the pixels of the window that X has, end_channel(channel in the group,
// place in W), and after its channels end_tap(); at last store(m, place in Y).
template <class Sum> CONVPOOL_DEVICE void sum_outputs(const GenericParams &p, Sum sum) {
    const int64_t in_pixels = static_cast<int64_t>(p.in[0]) * p.in[1] * p.in[2];
    const int64_t out_pixels = static_cast<int64_t>(p.out[0]) * p.out[1] * p.out[2];
    const int taps = p.kernel[0] * p.kernel[1] * p.kernel[2];
    for (int64_t item = static_cast<int64_t>(blockIdx.x) * kGenericThreads + threadIdx.x; item < p.outputs;
         item += static_cast<int64_t>(gridDim.x) * kGenericThreads) {
        // Threads run along Y's memory.
        int64_t n, pixel;
        int m;
        if (p.y_channels_last) {
            m = static_cast<int>(item % p.m);
            pixel = item / p.m % out_pixels;
            n = item / p.m / out_pixels;
        } else {
            pixel = item % out_pixels;
            m = static_cast<int>(item / out_pixels % p.m);
            n = item / out_pixels / p.m;
        }
        const int o[3] = {static_cast<int>(pixel / p.out[2] / p.out[1]), static_cast<int>(pixel / p.out[2] % p.out[1]),
                          static_cast<int>(pixel % p.out[2])};
        const int group = m / p.m_per_group;
        const int64_t x_step = p.x_channels_last ? 1 : in_pixels, pixel_step = p.x_channels_last ? p.c : 1;
        const int64_t image = n * in_pixels * p.c + group * p.c_per_group * x_step;
        sum.start();
        for (int tap = 0; tap < taps; ++tap) {
            const int t[3] = {tap / p.kernel[2] / p.kernel[1], tap / p.kernel[2] % p.kernel[1], tap % p.kernel[2]};
            int origin[3];
            bool inside = true;
            for (int d = 0; d < 3; ++d) {
                origin[d] = o[d] * p.strides[d] - p.pads[d] + t[d] * p.dilations[d];
                inside = inside && origin[d] >= 0 && origin[d] < p.pooled[d];
            }
            if (!inside) continue;
            for (int d = 0; d < 3; ++d)
                origin[d] = static_cast<int>(p.div_upsample[d].div(origin[d] * p.pool_strides[d])) - p.pool_pads[d];
            const int64_t weights = (static_cast<int64_t>(m) * taps + tap) * p.c_per_group;
            for (int c = 0; c < p.c_per_group; ++c) {
                sum.start_channel(n * p.prologue.image_step + group * p.c_per_group + c);
                for (int i = 0; i < p.pool_kernel[0]; ++i) {
                    const int z = origin[0] + i * p.pool_dilations[0];
                    if (z < 0 || z >= p.in[0]) continue;
                    for (int j = 0; j < p.pool_kernel[1]; ++j) {
                        const int y = origin[1] + j * p.pool_dilations[1];
                        if (y < 0 || y >= p.in[1]) continue;
                        for (int k = 0; k < p.pool_kernel[2]; ++k) {
                            const int column = origin[2] + k * p.pool_dilations[2];
                            if (column < 0 || column >= p.in[2]) continue;
                            const int64_t at = (static_cast<int64_t>(z) * p.in[1] + y) * p.in[2] + column;
                            sum.add_pixel(image + at * pixel_step + c * x_step);
                        }
                    }
                }
                sum.end_channel(c, weights + c);
            }
            sum.end_tap();
        }
        sum.store(m, item);
    }
}

// generic: the definition of the operator for float types, sums in fp32.

namespace {

constexpr int kChain = 16;  // products added one to another: a long chain of additions rounds off more

template <class Element> struct FloatSum {
    const GenericParams &p;
    float sum, part, scale, shift, box;

    CONVPOOL_DEVICE explicit FloatSum(const GenericParams &params) : p(params) {}
    CONVPOOL_DEVICE void start() { sum = part = 0.f; }
    CONVPOOL_DEVICE void start_channel(int64_t channel) {
        scale = channel_value<Element>(p.prologue.scale, channel, 1.f);
        shift = channel_value<Element>(p.prologue.shift, channel, 0.f);
        box = 0.f;
    }
    CONVPOOL_DEVICE void add_pixel(int64_t at) {
        box += activate<PrologueForm::kGeneral, float>(fmaf(pixel(at), scale, shift), p.prologue);
    }
    CONVPOOL_DEVICE void end_channel(int c, int64_t weight) {
        part = fmaf(box / p.count, to_float(static_cast<const Element *>(p.w)[weight]), part);
        if (c % kChain == kChain - 1) end_tap();
    }
    CONVPOOL_DEVICE void end_tap() {
        sum += part;
        part = 0.f;
    }
    CONVPOOL_DEVICE void store(int m, int64_t item) {
        if (p.epilogue.bias != nullptr) sum += to_float(static_cast<const Element *>(p.epilogue.bias)[m]);
        if (p.epilogue.residual != nullptr) sum += to_float(static_cast<const Element *>(p.epilogue.residual)[item]);
        static_cast<Element *>(p.y)[item] = from_float<Element>(activate(sum, p.epilogue));
    }

private:
    CONVPOOL_DEVICE float pixel(int64_t at) const {
        if (!p.x_float) return to_float(static_cast<const Element *>(p.x)[at]);
        return to_float(from_float<Element>(static_cast<const float *>(p.x)[at]));
    }
};

template <class Element>
__global__ void __launch_bounds__(kGenericThreads) generic_kernel(const __grid_constant__ GenericParams p) {
    sum_outputs(p, FloatSum<Element>(p));
}

}  // namespace

cudaError_t load_generic(Precision precision) {
    cudaFuncAttributes attributes;
    return with_element(precision, [&](auto e) { return cudaFuncGetAttributes(&attributes, generic_kernel<decltype(e)>); });
}

cudaError_t launch_generic(const GenericParams &params, Precision precision, cudaStream_t stream) {
    return with_element(precision, [&](auto element) {
        return queue({dim3(generic_blocks(params.outputs)), kGenericThreads, stream}, generic_kernel<decltype(element)>, params);
    });
}

// generic for int8 and fp8 e4m3: the sum over window, taps and channels is exact, and rounded at the end. The reference for
// kernels of these types.
//
// An e4m3 number is a multiple of 2^-9 of at most 448 < 2^9, so a product is a multiple of 2^-18 below 2^18: an integer below
// 2^36 in units of 2^-18. The 2^27 of them that check_problem allows are an integer of 64 bits. Products of int8 are below 2^15.

namespace {

// A byte of a type as an integer number of units.
struct Int8 {
    static constexpr double kUnit = 1.0;
    CONVPOOL_DEVICE static int units(uint8_t byte) { return static_cast<int8_t>(byte); }
    CONVPOOL_DEVICE static bool is_nan(uint8_t) { return false; }
};
struct Float8E4M3 {
    static constexpr double kUnit = 1.0 / 512;
    CONVPOOL_DEVICE static int units(uint8_t byte) {
        const int exponent = byte >> 3 & 15, fraction = byte & 7;
        const int size = exponent == 0 ? fraction : (8 + fraction) << (exponent - 1);
        return byte & 0x80 ? -size : size;
    }
    CONVPOOL_DEVICE static bool is_nan(uint8_t byte) { return (byte & 0x7f) == 0x7f; }
};

CONVPOOL_DEVICE double read_float(const void *values, int32_t dtype, int64_t at) {
    if (dtype == CONVPOOL_F16) return to_float(static_cast<const __half *>(values)[at]);
    if (dtype == CONVPOOL_BF16) return to_float(static_cast<const __nv_bfloat16 *>(values)[at]);
    return static_cast<const float *>(values)[at];
}

CONVPOOL_DEVICE void write_float(void *values, int32_t dtype, int64_t at, float value) {
    if (dtype == CONVPOOL_F16) static_cast<__half *>(values)[at] = from_float<__half>(value);
    else if (dtype == CONVPOOL_BF16) static_cast<__nv_bfloat16 *>(values)[at] = from_float<__nv_bfloat16>(value);
    else static_cast<float *>(values)[at] = value;
}

template <class Type> struct ExactSum {
    const ExactParams &e;
    int64_t sum, box;
    bool nan;

    CONVPOOL_DEVICE explicit ExactSum(const ExactParams &params) : e(params) {}
    CONVPOOL_DEVICE void start() {
        sum = 0;
        nan = false;
    }
    CONVPOOL_DEVICE void start_channel(int64_t) { box = 0; }
    CONVPOOL_DEVICE void add_pixel(int64_t at) { box += read(e.problem.x, at); }
    CONVPOOL_DEVICE void end_channel(int, int64_t weight) { sum += box * read(e.problem.w, weight); }
    CONVPOOL_DEVICE void end_tap() {}
    CONVPOOL_DEVICE void store(int m, int64_t item) {
        const GenericParams &p = e.problem;
        const double window = static_cast<double>(p.pool_kernel[0]) * p.pool_kernel[1] * p.pool_kernel[2];
        double value = static_cast<double>(sum) * (Type::kUnit * Type::kUnit) / window;
        if (nan) value = __longlong_as_double(0x7ff8000000000000ll);
        if (e.w_scale != nullptr) value = __dmul_rn(value, e.w_scale[m]);  // rounded: not one fma with the sum below
        if (p.epilogue.bias != nullptr) value += read_float(p.epilogue.bias, e.y_dtype, m);
        if (p.epilogue.residual != nullptr) value += read_float(p.epilogue.residual, e.y_dtype, item);
        write_float(p.y, e.y_dtype, item, activate(static_cast<float>(value), p.epilogue));
    }

private:
    CONVPOOL_DEVICE int64_t read(const void *values, int64_t at) {
        const uint8_t byte = static_cast<const uint8_t *>(values)[at];
        nan = nan || Type::is_nan(byte);
        return Type::units(byte);
    }
};

template <class Type>
__global__ void __launch_bounds__(kGenericThreads) generic_exact_kernel(const __grid_constant__ ExactParams p) {
    sum_outputs(p.problem, ExactSum<Type>(p));
}

// body(the kernel of an 8-bit type).
template <class Body> cudaError_t with_kernel(int32_t dtype, Body body) {
    switch (dtype) {
    case CONVPOOL_I8: return body(generic_exact_kernel<Int8>);
    case CONVPOOL_F8E4M3: return body(generic_exact_kernel<Float8E4M3>);
    default: return cudaErrorInvalidValue;
    }
}

}  // namespace

cudaError_t load_generic_exact(int32_t dtype) {
    cudaFuncAttributes attributes;
    return with_kernel(dtype, [&](auto kernel) { return cudaFuncGetAttributes(&attributes, kernel); });
}

cudaError_t launch_generic_exact(const ExactParams &params, int32_t dtype, cudaStream_t stream) {
    const Launch launch{dim3(generic_blocks(params.problem.outputs)), kGenericThreads, stream};
    return with_kernel(dtype, [&](auto kernel) { return queue(launch, kernel, params); });
}

}  // namespace convpool

// SPDX-License-Identifier: Apache-2.0
// generic for int8 and fp8 e4m3: the sum over window, taps and channels is exact, and rounded at the end. The reference for
// kernels of these types.
//
// An e4m3 number is a multiple of 2^-9 of at most 448 < 2^9, so a product is a multiple of 2^-18 below 2^18: an integer below
// 2^36 in units of 2^-18. The 2^27 of them that check_problem allows are an integer of 64 bits. Products of int8 are below 2^15.
#include "convpool.h"
#include "families/generic/kernel.h"
#include "families/generic/sum_outputs.cuh"
#include "kernels/epilogue/activation.cuh"
#include "kernels/ptx/convert.cuh"

namespace convpool {
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
    CONVPOOL_DEVICE void start_channel(int) { box = 0; }
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
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(generic_blocks(params.problem.outputs));
    config.blockDim = dim3(kGenericThreads);
    config.stream = stream;
    return with_kernel(dtype, [&](auto kernel) { return cudaLaunchKernelEx(&config, kernel, params); });
}

}  // namespace convpool

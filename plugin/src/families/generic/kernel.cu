// SPDX-License-Identifier: Apache-2.0
// generic: the definition of the operator for float types, sums in fp32.
#include "families/generic/kernel.h"
#include "families/generic/sum_outputs.cuh"
#include "kernels/epilogue/activation.cuh"
#include "kernels/prologue/chunk_prologue.cuh"

namespace convpool {
namespace {

constexpr int kChain = 16;  // products added one to another: a long chain of additions rounds off more

template <class Element> struct FloatSum {
    const GenericParams &p;
    float sum, part, scale, shift, box;

    CONVPOOL_DEVICE explicit FloatSum(const GenericParams &params) : p(params) {}
    CONVPOOL_DEVICE void start() { sum = part = 0.f; }
    CONVPOOL_DEVICE void start_channel(int channel) {
        scale = channel_value<Element>(p.prologue.scale, channel, 1.f);
        shift = channel_value<Element>(p.prologue.shift, channel, 0.f);
        box = 0.f;
    }
    CONVPOOL_DEVICE void add_pixel(int64_t at) { box += activate(fmaf(pixel(at), scale, shift), p.prologue); }
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
    if (precision == Precision::kF16) return cudaFuncGetAttributes(&attributes, generic_kernel<__half>);
    if (precision == Precision::kBF16) return cudaFuncGetAttributes(&attributes, generic_kernel<__nv_bfloat16>);
    return cudaFuncGetAttributes(&attributes, generic_kernel<float>);
}

cudaError_t launch_generic(const GenericParams &params, Precision precision, cudaStream_t stream) {
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(generic_blocks(params.outputs));
    config.blockDim = dim3(kGenericThreads);
    config.stream = stream;
    if (precision == Precision::kF16) return cudaLaunchKernelEx(&config, generic_kernel<__half>, params);
    if (precision == Precision::kBF16) return cudaLaunchKernelEx(&config, generic_kernel<__nv_bfloat16>, params);
    return cudaLaunchKernelEx(&config, generic_kernel<float>, params);
}

}  // namespace convpool

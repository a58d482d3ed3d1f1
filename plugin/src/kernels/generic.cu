// generic: one thread per output, any rank, stride, dilation and group. The definition, sums in fp32.
#include "../launch.h"
#include "kernels/epilogue/activation.cuh"
#include "kernels/prologue/chunk_prologue.cuh"

namespace convpool {
namespace {

constexpr int kThreads = 128, kChain = 16;

template <class Element> __global__ void __launch_bounds__(kThreads) generic_kernel(const __grid_constant__ GenericParams p) {
    const Element *w = static_cast<const Element *>(p.w);
    auto pixel_of_x = [&](int64_t i) {
        if (!p.x_float) return to_float(static_cast<const Element *>(p.x)[i]);
        return to_float(from_float<Element>(static_cast<const float *>(p.x)[i]));
    };
    const int64_t in_pixels = static_cast<int64_t>(p.in[0]) * p.in[1] * p.in[2];
    const int64_t out_pixels = static_cast<int64_t>(p.out[0]) * p.out[1] * p.out[2];
    const int taps = p.kernel[0] * p.kernel[1] * p.kernel[2];
    for (int64_t item = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; item < p.outputs;
         item += static_cast<int64_t>(gridDim.x) * kThreads) {
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
        float sum = 0.f;
        for (int tap = 0; tap < taps; ++tap) {
            const int t[3] = {tap / p.kernel[2] / p.kernel[1], tap / p.kernel[2] % p.kernel[1], tap % p.kernel[2]};
            int origin[3];
            bool inside = true;
            for (int d = 0; d < 3; ++d) {
                const int pooled = o[d] * p.strides[d] - p.pads[d] + t[d] * p.dilations[d];
                inside = inside && pooled >= 0 && pooled < p.pooled[d];
                origin[d] = pooled * p.pool_strides[d] - p.pool_pads[d];
            }
            if (!inside) continue;
            const Element *weights = w + (static_cast<int64_t>(m) * taps + tap) * p.c_per_group;
            float part = 0.f;  // of at most kChain products: a long chain of additions rounds off more
            for (int c = 0; c < p.c_per_group; ++c) {
                const int channel = group * p.c_per_group + c;
                const float scale = channel_value<Element>(p.prologue.scale, channel, 1.f);
                const float shift = channel_value<Element>(p.prologue.shift, channel, 0.f);
                float box = 0.f;
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
                            const float value = pixel_of_x(image + at * pixel_step + c * x_step);
                            box += activate(fmaf(value, scale, shift), p.prologue);
                        }
                    }
                }
                part = fmaf(box / p.count, to_float(weights[c]), part);
                if (c % kChain == kChain - 1) {
                    sum += part;
                    part = 0.f;
                }
            }
            sum += part;
        }
        if (p.epilogue.bias != nullptr) sum += to_float(static_cast<const Element *>(p.epilogue.bias)[m]);
        if (p.epilogue.residual != nullptr) sum += to_float(static_cast<const Element *>(p.epilogue.residual)[item]);
        static_cast<Element *>(p.y)[item] = from_float<Element>(activate(sum, p.epilogue));
    }
}

}  // namespace

cudaError_t load_generic(Precision precision) {
    cudaFuncAttributes attributes;
    if (precision == Precision::kF16) return cudaFuncGetAttributes(&attributes, generic_kernel<__half>);
    if (precision == Precision::kBF16) return cudaFuncGetAttributes(&attributes, generic_kernel<__nv_bfloat16>);
    return cudaFuncGetAttributes(&attributes, generic_kernel<float>);
}

cudaError_t launch_generic(const GenericParams &params, Precision precision, cudaStream_t stream) {
    const int64_t blocks = (params.outputs + kThreads - 1) / kThreads;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(blocks < (1 << 20) ? blocks : (1 << 20)));
    config.blockDim = dim3(kThreads);
    config.stream = stream;
    if (precision == Precision::kF16) return cudaLaunchKernelEx(&config, generic_kernel<__half>, params);
    if (precision == Precision::kBF16) return cudaLaunchKernelEx(&config, generic_kernel<__nv_bfloat16>, params);
    return cudaLaunchKernelEx(&config, generic_kernel<float>, params);
}

}  // namespace convpool

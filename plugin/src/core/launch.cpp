// SPDX-License-Identifier: Apache-2.0
#include "core/launch.h"

namespace convpool {

cudaError_t Kernel::load(const Device &device) const {
    return outside_captures(
        [&] { return cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, device.shared_per_block); });
}

cudaError_t Kernel::launch(void *params, bool overlap, cudaStream_t stream) const {
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(grid));
    config.blockDim = dim3(static_cast<unsigned>(threads));
    config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
    config.stream = stream;
    cudaLaunchAttribute attributes[2]{};
    config.attrs = attributes;
    if (cluster > 1) {
        attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
        attributes[config.numAttrs++].val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
    }
    if (overlap) {
        attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
    }
    void *arguments[] = {params};
    return cudaLaunchKernelExC(&config, function, arguments);
}

BoxMean box_of(const Problem &p) {
    const int64_t size = p.pool_size();
    return {p.pool_kernel[1],         p.pool_kernel[2],
            p.pool_strides[1],        p.pool_strides[2],
            p.pool_dilations[1],      p.pool_dilations[2],
            p.pool_pads_begin[1],     p.pool_pads_begin[2],
            static_cast<float>(size), 1.f / static_cast<float>(size),
            (size & (size - 1)) == 0};
}

Prologue prologue_of(const Problem &p, const convpool_tensors &t) {
    return {p.prologue_affine ? t.scale : nullptr, p.prologue_affine ? t.shift : nullptr, p.prologue_activation,
            p.prologue_alpha};
}

Epilogue epilogue_of(const Problem &p, const convpool_tensors &t) {
    return {p.has_bias ? t.b : nullptr, p.has_residual ? t.residual : nullptr, p.activation, p.alpha, p.beta};
}

bool y_vectors(const Problem &p, const convpool_tensors &t) {
    return p.y_channels_last && p.m % p.per_chunk() == 0 && aligned(t.y, 16) && (!p.has_residual || aligned(t.residual, 16)) &&
           (!p.has_bias || aligned(t.b, 16));
}

bool y_runs(const Problem &p, const convpool_tensors &t) {
    const int bytes = kRunPixels * p.element_bytes();
    return !p.y_channels_last && p.out_pixels() % kRunPixels == 0 && aligned(t.y, bytes) &&
           (!p.has_residual || aligned(t.residual, bytes));
}

}  // namespace convpool

// SPDX-License-Identifier: Apache-2.0
// Launches the gradients at the weights and the bias of a convolution whose filters have few elements.
#include "kernels/weight_gradient/weight_gradient.cuh"

#include <algorithm>

namespace convpool::weight_gradient {
namespace {

constexpr int64_t kMostParts = 256;   // two blocks on nearly all of an H200's multiprocessors
constexpr int64_t kPartPixels = 512;  // of a part at least: four steps of each warp

template <Precision kPrecision, class Element> cudaError_t launch_of(const Params &p, bool overlap, cudaStream_t stream) {
    const unsigned tiles = static_cast<unsigned>((p.m + kChannels - 1) / kChannels);
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(p.parts), tiles);
    config.blockDim = dim3(kThreads);
    config.stream = stream;
    const int elements = p.elements + (p.db != nullptr);
    const bool rows = p.out_w % kPixels == 0;
    auto kernel = rows ? sum_kernel<kPrecision, 2, true> : sum_kernel<kPrecision, 2, false>;
    if (elements <= 16) kernel = rows ? sum_kernel<kPrecision, 1, true> : sum_kernel<kPrecision, 1, false>;
    if (const cudaError_t error = cudaLaunchKernelEx(&config, kernel, p); error != cudaSuccess) return error;
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    config.attrs = &attribute;
    config.numAttrs = overlap ? 1 : 0;
    config.gridDim = dim3(static_cast<unsigned>(elements), tiles);
    config.blockDim = dim3(kSumThreads);
    return cudaLaunchKernelEx(&config, add_kernel<Element>, p);
}

}  // namespace

int32_t parts_of(int64_t pixels) { return static_cast<int32_t>(std::min(kMostParts, (pixels + kPartPixels - 1) / kPartPixels)); }

cudaError_t launch(Params p, Precision precision, bool overlap, cudaStream_t stream) {
    p.div_out_w = FastDiv(p.out_w);
    p.div_out_pixels = FastDiv(p.out_pixels);
    return precision == Precision::kF16 ? launch_of<Precision::kF16, __half>(p, overlap, stream)
                                        : launch_of<Precision::kBF16, __nv_bfloat16>(p, overlap, stream);
}

}  // namespace convpool::weight_gradient

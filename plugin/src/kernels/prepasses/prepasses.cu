// SPDX-License-Identifier: Apache-2.0
// Launches the passes before an implicit GEMM: box means (or a copy) to channels last, and weights of the fused kernel.
#include <algorithm>
#include <type_traits>

#include "kernels/prepasses/channels_first.cuh"
#include "kernels/prepasses/channels_last.cuh"
#include "kernels/prepasses/fuse_weights.cuh"
#include "kernels/prepasses/prepasses.h"

namespace convpool {

using namespace prepasses;

namespace {

// Loads every kernel of an element type, which the first launch of each would do otherwise.
template <class Element, bool kPrologue> cudaError_t load() {
    cudaFuncAttributes attributes;
    cudaError_t error = cudaSuccess;
    for (auto kernel : {reinterpret_cast<const void *>(box_pairs_kernel<Element, kPrologue>),
                        reinterpret_cast<const void *>(box_mean_kernel<Element, kPrologue>),
                        reinterpret_cast<const void *>(channels_first_kernel<Element, kPrologue, true>),
                        reinterpret_cast<const void *>(channels_first_kernel<Element, kPrologue, false>),
                        reinterpret_cast<const void *>(fuse_weights_kernel<Element>)})
        if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, kernel);
    return error;
}

}  // namespace

cudaError_t launch_box_mean(const BoxMeanParams &params, Precision precision, bool overlap, cudaStream_t stream) {
    const BoxMean &box = params.box;
    const bool pairs = box.ph == 2 && box.pw == 2 && box.stride_h == 1 && box.stride_w == 1 && box.dilation_h == 1 &&
                       box.dilation_w == 1 && (params.x_chunked || !params.x_channels_last);
    BoxMeanParams p = params;
    const int strips = (p.out_h + kStrip - 1) / kStrip;
    p.div_strips = FastDiv(strips);
    const int64_t walks = static_cast<int64_t>(p.n) * strips * p.out_w;
    const int64_t items = (pairs ? walks : static_cast<int64_t>(p.n) * p.out_h * p.out_w) * p.chunks;
    const bool quads_are_chunks = precision == Precision::kTF32 || precision == Precision::kTF32x3;
    const uint32_t quads = static_cast<uint32_t>(p.chunks) * (quads_are_chunks ? 1 : 2);
    // Neighbouring quads that a block makes: a power of two up to 8, no more than it takes for all.
    int across_log2 = 0;
    while (across_log2 < 3 && (1u << across_log2) < quads) ++across_log2;
    const uint32_t groups = (quads + (1u << across_log2) - 1) >> across_log2;
    int64_t blocks = (items + kThreads - 1) / kThreads;
    if (!p.x_channels_last) blocks = ((walks << across_log2) + kThreads - 1) / kThreads * groups;
    else if (!pairs) blocks = std::min<int64_t>(blocks, 1 << 20);
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(blocks));
    config.blockDim = dim3(kThreads);
    config.stream = stream;
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    config.attrs = &attribute;
    config.numAttrs = overlap ? 1 : 0;
    auto launch_with = [&](auto element, auto prologue) {
        using Element = decltype(element);
        constexpr bool kPrologue = decltype(prologue)::value;
        if (!p.x_channels_last) {
            const auto kernel =
                pairs ? channels_first_kernel<Element, kPrologue, true> : channels_first_kernel<Element, kPrologue, false>;
            return cudaLaunchKernelEx(&config, kernel, p, static_cast<uint32_t>(walks), quads, groups, across_log2);
        }
        if (pairs) return cudaLaunchKernelEx(&config, box_pairs_kernel<Element, kPrologue>, p, static_cast<uint32_t>(items));
        return cudaLaunchKernelEx(&config, box_mean_kernel<Element, kPrologue>, p, items);
    };
    auto launch = [&](auto element) {
        return is_present(p.prologue) ? launch_with(element, std::true_type{}) : launch_with(element, std::false_type{});
    };
    if (precision == Precision::kF16) return launch(__half{});
    if (precision == Precision::kBF16) return launch(__nv_bfloat16{});
    return launch(float{});
}

cudaError_t load_passes(Precision precision, bool prologue) {
    if (precision == Precision::kF16) return prologue ? load<__half, true>() : load<__half, false>();
    if (precision == Precision::kBF16) return prologue ? load<__nv_bfloat16, true>() : load<__nv_bfloat16, false>();
    return prologue ? load<float, true>() : load<float, false>();
}

cudaError_t launch_fuse_weights(const WeightParams &params, Precision precision, cudaStream_t stream) {
    const int per_chunk = precision == Precision::kF16 || precision == Precision::kBF16 ? 8 : 4;
    const int row = params.fused_h * params.fused_w * params.chunks * per_chunk;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3((row + kThreads - 1) / kThreads, params.m);
    config.blockDim = dim3(kThreads);
    config.stream = stream;
    if (precision == Precision::kF16) return cudaLaunchKernelEx(&config, fuse_weights_kernel<__half>, params);
    if (precision == Precision::kBF16) return cudaLaunchKernelEx(&config, fuse_weights_kernel<__nv_bfloat16>, params);
    return cudaLaunchKernelEx(&config, fuse_weights_kernel<float>, params);
}

}  // namespace convpool

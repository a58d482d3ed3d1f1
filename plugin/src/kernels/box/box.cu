// SPDX-License-Identifier: Apache-2.0
// Launches box means and their adjoint.
#include "kernels/box/box.cuh"

#include <algorithm>

namespace convpool::box {
namespace {

struct Tile {
    int rows, cols;
};

// Measured on an H200: with more columns, or rows beside a gate for each output, too few threads run at a time.
template <int kVector, Gate kGate> constexpr Tile kTile = kVector == 1 ? Tile{8, 1} : Tile{kGate == Gate::kOutput ? 2 : 4, 1};

using Kernel = void (*)(Params);

// The kernel of a call, and the outputs that an item of it makes.
template <class Element, int kVector, Gate kGate> Kernel kernel_of(const Params &p, bool spread, Tile &tile) {
    tile = {1, 1};
    const bool twos = p.kernel[0] == 1 && p.stride[0] == 1 && p.begin[0] == 0 && p.in_size[0] == p.out_size[0] &&
                      p.kernel[1] == 2 && p.kernel[2] == 2 && p.dilation[1] == 1 && p.dilation[2] == 1;
    if (spread && twos && p.stride[1] == 2 && p.stride[2] == 2 && p.begin[1] == 0 && p.begin[2] == 0) {
        tile = {2, 2};
        return spread_pairs_kernel<Element, kVector, kGate>;
    }
    if (spread) return spread_kernel<Element, kVector, kGate>;
    const bool pairs = twos && p.stride[1] == p.stride[2];
    constexpr Tile kOnes = kTile<kVector, kGate>, kTwos = {kVector == 1 ? 4 : 2, 1};
    if (pairs && p.stride[1] == 1) {
        tile = kOnes;
        return pairs_kernel<Element, kVector, kGate, 1, kOnes.rows, kOnes.cols>;
    }
    if (pairs && p.stride[1] == 2) {
        tile = kTwos;
        return pairs_kernel<Element, kVector, kGate, 2, kTwos.rows, kTwos.cols>;
    }
    return gather_kernel<Element, kVector, kGate>;
}

template <class Element, int kVector> Kernel kernel_of(const Params &p, Gate gate, bool spread, Tile &tile) {
    switch (gate) {
    case Gate::kSelf: return kernel_of<Element, kVector, Gate::kSelf>(p, spread, tile);
    case Gate::kInput: return kernel_of<Element, kVector, Gate::kInput>(p, spread, tile);
    case Gate::kOutput: return kernel_of<Element, kVector, Gate::kOutput>(p, spread, tile);
    default: return kernel_of<Element, kVector, Gate::kNone>(p, spread, tile);
    }
}

template <class Element> Kernel kernel_of(const Params &p, Gate gate, bool spread, bool vectors, Tile &tile) {
    if (vectors) return kernel_of<Element, 16 / sizeof(Element)>(p, gate, spread, tile);
    return kernel_of<Element, 1>(p, gate, spread, tile);
}

int32_t tiles(int32_t size, int tile) { return (size + tile - 1) / tile; }

void advance(const void *&pointer, int64_t bytes) { pointer = static_cast<const char *>(pointer) + bytes; }

}  // namespace

cudaError_t launch(Params p, int64_t outer, convpool_dtype dtype, Gate gate, bool spread, bool vectors, cudaStream_t stream) {
    Tile tile;
    const Kernel kernel = dtype == CONVPOOL_F16    ? kernel_of<__half>(p, gate, spread, vectors, tile)
                          : dtype == CONVPOOL_BF16 ? kernel_of<__nv_bfloat16>(p, gate, spread, vectors, tile)
                                                   : kernel_of<float>(p, gate, spread, vectors, tile);
    const int32_t sizes[] = {p.out_size[0], tiles(p.out_size[1], tile.rows), tiles(p.out_size[2], tile.cols)};
    p.div_inner = FastDiv(static_cast<uint32_t>(p.inner));
    for (int axis = 0; axis < 3; ++axis) {
        p.div_size[axis] = FastDiv(static_cast<uint32_t>(sizes[axis]));
        p.div_stride[axis] = FastDiv(static_cast<uint32_t>(p.stride[axis]));
    }
    const int64_t item_bytes = vectors ? 16 : dtype == CONVPOOL_F32 ? 4 : 2;
    auto elements = [&](const int32_t (&size)[3]) { return int64_t{1} * size[0] * size[1] * size[2] * p.inner; };
    const int64_t per_slice = int64_t{1} * sizes[0] * sizes[1] * sizes[2] * p.inner;
    const int64_t most = std::max<int64_t>(((int64_t{1} << 31) - kThreads) / per_slice, 1);  // slices whose items 31 bits count
    for (int64_t done = 0; done < outer; done += most) {
        const int64_t slices = std::min(most, outer - done);
        p.items = static_cast<uint32_t>(slices * per_slice);
        cudaLaunchConfig_t config{};
        config.gridDim = dim3((p.items + kThreads - 1) / kThreads);
        config.blockDim = dim3(kThreads);
        config.stream = stream;
        if (const cudaError_t error = cudaLaunchKernelEx(&config, kernel, p); error != cudaSuccess) return error;
        advance(p.in, slices * elements(p.in_size) * item_bytes);
        if (gate != Gate::kNone) advance(p.gate, slices * elements(gate == Gate::kOutput ? p.out_size : p.in_size) * item_bytes);
        p.out = static_cast<char *>(p.out) + slices * elements(p.out_size) * item_bytes;
    }
    return cudaSuccess;
}

}  // namespace convpool::box

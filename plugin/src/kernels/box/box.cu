// SPDX-License-Identifier: Apache-2.0
// Box means and their adjoint: loads and stores of a vector, 16 bytes or one element, per item and place of the window.

#include <algorithm>

#include "kernels/passes.h"
#include "kernels/ptx/numbers.cuh"
#include "kernels/tile/chunk.cuh"

namespace convpool::box {

constexpr int kThreads = 256;

template <class Element, int kVector> struct alignas(sizeof(Element) * kVector) Vector {
    Element e[kVector];
};

// A vector as it is in memory; zeros where there is none, whose load other loads then pass.
template <class Element, int kVector> struct Raw {
    using V = Vector<Element, kVector>;
    V v;

    CONVPOOL_DEVICE void load(const Params &p, bool there, int64_t at) {
        v = V{};
        if (there) v = static_cast<const V *>(p.in)[at];
    }
    CONVPOOL_DEVICE float get(int i) const { return to_float(v.e[i]); }
};

template <class Element, int kVector> CONVPOOL_DEVICE void write_mean(const Params &p, int64_t at, const float (&sums)[kVector]) {
    Vector<Element, kVector> v;
    UNROLLED_FOR (int i = 0; i < kVector; ++i) v.e[i] = from_float<Element>(mean_of(sums[i], p.mean));
    static_cast<Vector<Element, kVector> *>(p.out)[at] = v;
}

// Where an item of the generic kernels writes.
struct Place {
    int32_t at[3], inner;
    int64_t outer;
};

CONVPOOL_DEVICE Place place_of(const Params &p, uint32_t item) {
    Place place;
    uint32_t rest, digit;
    p.div_inner.divmod(item, rest, digit);
    place.inner = static_cast<int32_t>(digit);
    for (int axis = 2; axis >= 0; --axis) {
        p.div_size[axis].divmod(rest, rest, digit);
        place.at[axis] = static_cast<int32_t>(digit);
    }
    place.outer = rest;
    return place;
}

CONVPOOL_DEVICE int64_t offset(const int32_t (&size)[3], int64_t outer, int a, int b, int c) {
    return ((outer * size[0] + a) * size[1] + b) * size[2] + c;
}

// An item for each output vector: any window.
template <class Element, int kVector> __global__ void __launch_bounds__(kThreads) gather_kernel(const Params p) {
    const uint32_t item = blockIdx.x * kThreads + threadIdx.x;
    if (item >= p.items) return;
    const Place to = place_of(p, item);
    Raw<Element, kVector> raw;
    float sums[kVector] = {};
    for (int a = 0; a < p.kernel[0]; ++a) {
        const int x0 = to.at[0] * p.stride[0] + a * p.dilation[0] - p.begin[0];
        if (x0 < 0 || x0 >= p.in_size[0]) continue;
        for (int b = 0; b < p.kernel[1]; ++b) {
            const int x1 = to.at[1] * p.stride[1] + b * p.dilation[1] - p.begin[1];
            if (x1 < 0 || x1 >= p.in_size[1]) continue;
            for (int c = 0; c < p.kernel[2]; ++c) {
                const int x2 = to.at[2] * p.stride[2] + c * p.dilation[2] - p.begin[2];
                if (x2 < 0 || x2 >= p.in_size[2]) continue;
                raw.load(p, true, offset(p.in_size, to.outer, x0, x1, x2) * p.inner + to.inner);
                UNROLLED_FOR (int i = 0; i < kVector; ++i) sums[i] += raw.get(i);
            }
        }
    }
    write_mean<Element, kVector>(p, int64_t{item}, sums);
}

// The window along an axis whose place j holds the position t; false if there is none.
CONVPOOL_DEVICE bool window_at(const Params &p, int axis, int t, int j, int &window) {
    const int distance = t + p.begin[axis] - j * p.dilation[axis];
    if (distance < 0) return false;
    uint32_t quotient, rest;
    p.div_stride[axis].divmod(static_cast<uint32_t>(distance), quotient, rest);
    window = static_cast<int>(quotient);
    return rest == 0 && window < p.in_size[axis];
}

// The first place of an undilated window that may hold t; the others are a stride apart.
CONVPOOL_DEVICE int first_place(const Params &p, int axis, int t) {
    if (p.dilation[axis] != 1) return 0;
    uint32_t quotient, rest;
    p.div_stride[axis].divmod(static_cast<uint32_t>(t + p.begin[axis]), quotient, rest);
    return static_cast<int>(rest);
}
CONVPOOL_DEVICE int place_step(const Params &p, int axis) { return p.dilation[axis] == 1 ? p.stride[axis] : 1; }

// An item for each position of the adjoint's output. `in` holds a value for each window.
template <class Element, int kVector> __global__ void __launch_bounds__(kThreads) spread_kernel(const Params p) {
    const uint32_t item = blockIdx.x * kThreads + threadIdx.x;
    if (item >= p.items) return;
    const Place to = place_of(p, item);
    Raw<Element, kVector> raw;
    float sums[kVector] = {};
    int w0, w1, w2;
    for (int a = first_place(p, 0, to.at[0]); a < p.kernel[0]; a += place_step(p, 0)) {
        if (!window_at(p, 0, to.at[0], a, w0)) continue;
        for (int b = first_place(p, 1, to.at[1]); b < p.kernel[1]; b += place_step(p, 1)) {
            if (!window_at(p, 1, to.at[1], b, w1)) continue;
            for (int c = first_place(p, 2, to.at[2]); c < p.kernel[2]; c += place_step(p, 2)) {
                if (!window_at(p, 2, to.at[2], c, w2)) continue;
                raw.load(p, true, offset(p.in_size, to.outer, w0, w1, w2) * p.inner + to.inner);
                UNROLLED_FOR (int i = 0; i < kVector; ++i) sums[i] += raw.get(i);
            }
        }
    }
    write_mean<Element, kVector>(p, int64_t{item}, sums);
}

// Windows of 2x2 without dilation, of stride 1 or 2. An item makes kRows x kCols outputs; with a stride of 1, each row of the
// input is loaded and summed in pairs once for the two rows of outputs that it is part of. All loads are under way at once.
template <class Element, int kVector, int kStride, int kRows, int kCols>
__global__ void __launch_bounds__(kThreads) pairs_kernel(const Params p) {
    const uint32_t item = blockIdx.x * kThreads + threadIdx.x;
    if (item >= p.items) return;
    const Place tile = place_of(p, item);  // of sizes in tiles
    constexpr int kLoads = kStride == 1 ? kCols + 1 : 2 * kCols, kLines = kStride == 1 ? kRows + 1 : 2 * kRows;
    const int y0 = tile.at[1] * kRows, x0 = tile.at[2] * kCols;
    const int top = y0 * kStride - p.begin[1], left = x0 * kStride - p.begin[2];
    const int64_t slice = tile.outer * p.out_size[0] + tile.at[0];
    const int64_t corner = ((slice * p.in_size[1] + top) * p.in_size[2] + left) * p.inner + tile.inner;
    const int line = p.in_size[2] * p.inner;
    Raw<Element, kVector> raw[kLines][kLoads];
    UNROLLED_FOR (int r = 0; r < kLines; ++r) {
        const bool inside = top + r >= 0 && top + r < p.in_size[1];
        UNROLLED_FOR (int l = 0; l < kLoads; ++l)
            raw[r][l].load(p, inside && left + l >= 0 && left + l < p.in_size[2], corner + int64_t{r} * line + l * p.inner);
    }
    const int64_t out_corner = ((slice * p.out_size[1] + y0) * p.out_size[2] + x0) * p.inner + tile.inner;
    const int out_line = p.out_size[2] * p.inner;
    float before[kCols][kVector];
    UNROLLED_FOR (int r = 0; r < kLines; ++r) {
        const bool ends = kStride == 1 ? r > 0 : r % 2 == 1;  // a window
        const int out_r = kStride == 1 ? r - 1 : r / 2;
        UNROLLED_FOR (int c = 0; c < kCols; ++c) {
            float sums[kVector];
            UNROLLED_FOR (int i = 0; i < kVector; ++i) {
                const float pair = raw[r][c * kStride].get(i) + raw[r][c * kStride + 1].get(i);
                sums[i] = ends ? before[c][i] + pair : 0.f;
                before[c][i] = pair;
            }
            if (ends && y0 + out_r < p.out_size[1] && x0 + c < p.out_size[2])
                write_mean<Element, kVector>(p, out_corner + int64_t{out_r} * out_line + c * p.inner, sums);
        }
    }
}

// The adjoint for windows of 2x2, stride 2, without pads in front: an item writes the places of a window, or what lies behind all
// windows.
template <class Element, int kVector> __global__ void __launch_bounds__(kThreads) spread_pairs_kernel(const Params p) {
    const uint32_t item = blockIdx.x * kThreads + threadIdx.x;
    if (item >= p.items) return;
    const Place window = place_of(p, item);
    Raw<Element, kVector> raw;
    const int64_t slice = window.outer * p.out_size[0] + window.at[0];
    raw.load(p, window.at[1] < p.in_size[1] && window.at[2] < p.in_size[2],
             ((slice * p.in_size[1] + window.at[1]) * p.in_size[2] + window.at[2]) * p.inner + window.inner);
    float sums[kVector];
    UNROLLED_FOR (int i = 0; i < kVector; ++i) sums[i] = raw.get(i);
    UNROLLED_FOR (int place = 0; place < 4; ++place) {
        const int y = 2 * window.at[1] + place / 2, x = 2 * window.at[2] + place % 2;
        if (y < p.out_size[1] && x < p.out_size[2])
            write_mean<Element, kVector>(p, ((slice * p.out_size[1] + y) * p.out_size[2] + x) * p.inner + window.inner, sums);
    }
}

namespace {

struct Tile {
    int rows, cols;
};

using Kernel = void (*)(Params);

// The kernel of a call, and the outputs that an item of it makes.
template <class Element, int kVector> Kernel kernel_of(const Params &p, bool spread, Tile &tile) {
    tile = {1, 1};
    const bool twos = p.kernel[0] == 1 && p.stride[0] == 1 && p.begin[0] == 0 && p.in_size[0] == p.out_size[0] &&
                      p.kernel[1] == 2 && p.kernel[2] == 2 && p.dilation[1] == 1 && p.dilation[2] == 1;
    if (spread && twos && p.stride[1] == 2 && p.stride[2] == 2 && p.begin[1] == 0 && p.begin[2] == 0) {
        tile = {2, 2};
        return spread_pairs_kernel<Element, kVector>;
    }
    if (spread) return spread_kernel<Element, kVector>;
    const bool pairs = twos && p.stride[1] == p.stride[2];
    // Measured on an H200: with more columns too few threads run at a time.
    constexpr Tile kOnes = {kVector == 1 ? 8 : 4, 1}, kTwos = {kVector == 1 ? 4 : 2, 1};
    if (pairs && p.stride[1] == 1) {
        tile = kOnes;
        return pairs_kernel<Element, kVector, 1, kOnes.rows, kOnes.cols>;
    }
    if (pairs && p.stride[1] == 2) {
        tile = kTwos;
        return pairs_kernel<Element, kVector, 2, kTwos.rows, kTwos.cols>;
    }
    return gather_kernel<Element, kVector>;
}

int32_t tiles(int32_t size, int tile) { return (size + tile - 1) / tile; }

}  // namespace

cudaError_t launch(Params p, int64_t outer, convpool_dtype dtype, bool spread, bool vectors, cudaStream_t stream) {
    Tile tile;
    const Kernel kernel = with_element(dtype, [&](auto element) {
        using Element = decltype(element);
        return vectors ? kernel_of<Element, 16 / sizeof(Element)>(p, spread, tile) : kernel_of<Element, 1>(p, spread, tile);
    });
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
        const cudaError_t error = queue({dim3((p.items + kThreads - 1) / kThreads), kThreads, stream}, kernel, p);
        if (error != cudaSuccess) return error;
        p.in = static_cast<const char *>(p.in) + slices * elements(p.in_size) * item_bytes;
        p.out = static_cast<char *>(p.out) + slices * elements(p.out_size) * item_bytes;
    }
    return cudaSuccess;
}

}  // namespace convpool::box

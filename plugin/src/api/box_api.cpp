// SPDX-License-Identifier: Apache-2.0
// The C API of box means and their adjoint: checks, and the form in which the kernels take a problem.
#include <algorithm>
#include <cstdint>
#include <string>

#include "api/handle.h"
#include "convpool.h"
#include "core/problem.h"
#include "kernels/passes.h"

using namespace convpool;

namespace {

constexpr int kRank = CONVPOOL_MAX_RANK;
constexpr int64_t kMostElements = int64_t{1} << 31;
constexpr double kMostOfAll = 1099511627776.0;  // elements of a tensor: 2^40, as of a problem's

// A checked problem, of three axes: leading ones are added.
struct Checked {
    int64_t size[kRank] = {1, 1, 1}, means[kRank] = {1, 1, 1};
    int32_t kernel[kRank] = {1, 1, 1}, stride[kRank] = {1, 1, 1}, dilation[kRank] = {1, 1, 1}, begin[kRank] = {};
};

// Empty, or what is wrong.
std::string check_scalars(const convpool_box_problem &d) {
    if (d.struct_size != sizeof d) return mismatch("struct_size", d.struct_size, std::to_string(sizeof d));
    if (d.rank < 1 || d.rank > kRank) return mismatch("rank", d.rank, "1 to 3");
    if (d.dtype != CONVPOOL_F16 && d.dtype != CONVPOOL_BF16 && d.dtype != CONVPOOL_F32)
        return mismatch("dtype", d.dtype, "0 (F16), 1 (BF16) or 2 (F32)");
    if (d.layout != CONVPOOL_CHANNELS_FIRST && d.layout != CONVPOOL_CHANNELS_LAST) return mismatch("layout", d.layout, "0 or 1");
    if (d.n < 1 || d.n >= kMostElements) return mismatch("n", d.n, "1 or more, below 2^31");
    if (d.c < 1 || d.c >= kMostElements) return mismatch("c", d.c, "1 or more, below 2^31");
    if (d.sums != 0 && d.sums != 1) return mismatch("sums", d.sums, "0 or 1");
    for (int32_t value : d.reserved)
        if (value != 0) return mismatch("reserved", value, "0");
    return {};
}

std::string check_box(const convpool_box_problem &d, Checked &out) {
    if (std::string error = check_scalars(d); !error.empty()) return error;
    int64_t in_elements = d.c, out_elements = d.c, count = 1;
    for (int i = 0; i < d.rank; ++i) {
        const int axis = kRank - d.rank + i;
        const int32_t begin = d.pads[i], end = d.pads[d.rank + i];
        if (d.spatial[i] < 1 || d.spatial[i] >= kMostElements) return mismatch("spatial", d.spatial[i], "1 or more, below 2^31");
        for (auto [name, value] : {std::pair{"kernel", d.kernel[i]}, {"strides", d.strides[i]}, {"dilations", d.dilations[i]}})
            if (value < 1) return mismatch(name, value, "1 or more");
        for (int32_t pad : {begin, end})
            if (pad < 0) return mismatch("pads", pad, "0 or more");
        const int64_t padded = d.spatial[i] + begin + end, reach = int64_t{1} * d.dilations[i] * (d.kernel[i] - 1);
        if (padded >= kMostElements) return mismatch("padded size", padded, "below 2^31");
        if (padded <= reach) return mismatch("padded size", padded, "more than the window's reach, " + std::to_string(reach));
        out.size[axis] = d.spatial[i];
        out.means[axis] = (padded - reach - 1) / d.strides[i] + 1;
        out.kernel[axis] = d.kernel[i];
        out.stride[axis] = d.strides[i];
        out.dilation[axis] = d.dilations[i];
        out.begin[axis] = begin;
        count *= d.kernel[i];
        in_elements *= out.size[axis];
        out_elements *= out.means[axis];
        if (in_elements >= kMostElements || out_elements >= kMostElements)
            return mismatch("elements of a sample", in_elements, "below 2^31, as those of its means");
        if (count >= kMostElements) return mismatch("elements of the window", count, "below 2^31");
    }
    if (static_cast<double>(d.n) * static_cast<double>(std::max(in_elements, out_elements)) > kMostOfAll)
        return mismatch("n", d.n, "at most 2^40 elements in all samples");
    return {};
}

// Empty, or the pointer that is null or not aligned to its elements, with the status.
convpool_status check_pointers(const convpool_box_problem &d, const void *in, const void *gate, const void *out) {
    if (gate != nullptr) return fail(CONVPOOL_INVALID_ARGUMENT, "gate; got a pointer, expected null");
    convpool_status status = CONVPOOL_OK;
    for (auto [name, pointer] : {std::pair{"input", in}, {"output", out}})
        if (status == CONVPOOL_OK)
            status = check_pointer(name, pointer, static_cast<size_t>(kTypes[d.dtype].bytes), "its elements");
    return status;
}

// adjoint: `in` holds the windows' values, and `out` is as large as the box mean's input.
convpool_status run(const convpool_box_problem *d, const void *in, const void *gate, void *out, void *stream, bool adjoint) {
    if (d == nullptr) return fail(CONVPOOL_INVALID_ARGUMENT, "problem: the pointer is null");
    Checked checked;
    if (std::string error = check_box(*d, checked); !error.empty()) return fail(CONVPOOL_INVALID_ARGUMENT, error);
    if (convpool_status status = check_pointers(*d, in, gate, out); status != CONVPOOL_OK) return status;
    const bool last = d->layout == CONVPOOL_CHANNELS_LAST;
    const int per_vector = 16 / kTypes[d->dtype].bytes;
    const bool vectors = last && d->c % per_vector == 0 && aligned(in, 16) && aligned(out, 16);
    box::Params p{};
    p.in = in;
    p.out = out;
    p.inner = last ? static_cast<int32_t>(d->c) / (vectors ? per_vector : 1) : 1;
    bool all_ones = true;
    int64_t count = 1;
    for (int i = 0; i < kRank; ++i) {
        count *= checked.kernel[i];
        all_ones = all_ones && checked.stride[i] == 1;
    }
    // With strides of 1 the adjoint is a box mean itself, of pads that complete the window's reach.
    const bool spread = adjoint && !all_ones;
    for (int i = 0; i < kRank; ++i) {
        p.in_size[i] = static_cast<int32_t>(adjoint ? checked.means[i] : checked.size[i]);
        p.out_size[i] = static_cast<int32_t>(adjoint ? checked.size[i] : checked.means[i]);
        p.kernel[i] = checked.kernel[i];
        p.stride[i] = checked.stride[i];
        p.dilation[i] = checked.dilation[i];
        p.begin[i] = checked.begin[i];
        if (adjoint && !spread) p.begin[i] = checked.dilation[i] * (checked.kernel[i] - 1) - checked.begin[i];
    }
    if (d->sums != 0) count = 1;
    p.mean.count = static_cast<float>(count);
    p.mean.inverse_count = 1.f / static_cast<float>(count);
    p.mean.count_is_power_of_two = (count & (count - 1)) == 0;
    const int64_t outer = last ? d->n : d->n * d->c;
    const cudaError_t error =
        box::launch(p, outer, static_cast<convpool_dtype>(d->dtype), spread, vectors, static_cast<cudaStream_t>(stream));
    return error == cudaSuccess ? CONVPOOL_OK : cuda_failure(adjoint ? "box_mean_adjoint" : "box_mean", error);
}

}  // namespace

extern "C" {

convpool_status convpool_box_mean(const convpool_box_problem *problem, const void *x, const void *gate, void *z, void *stream) {
    return guarded([&] { return run(problem, x, gate, z, stream, false); });
}

convpool_status convpool_box_mean_adjoint(const convpool_box_problem *problem, const void *dz, const void *gate, void *dx,
                                          void *stream) {
    return guarded([&] { return run(problem, dz, gate, dx, stream, true); });
}

}  // extern "C"

// SPDX-License-Identifier: Apache-2.0
// The C API of what training runs beside the operator: checks, and the form in which the kernels take a problem.
#include <algorithm>
#include <tuple>
#include <utility>

#include "api/common.h"
#include "kernels/passes.h"

using namespace convpool;

namespace {

constexpr int64_t kMostElements = int64_t{1} << 31;
constexpr double kMostOfAll = 1099511627776.0;  // elements of a tensor: 2^40, as of a problem's
constexpr const char *kElements = "its elements";

convpool_status check_dtype(int32_t dtype) {
    if (dtype == CONVPOOL_F16 || dtype == CONVPOOL_BF16 || dtype == CONVPOOL_F32) return CONVPOOL_OK;
    return invalid("dtype", dtype, "0 (F16), 1 (BF16) or 2 (F32)");
}

size_t bytes_of(int32_t dtype) { return static_cast<size_t>(kTypes[dtype].bytes); }

convpool_status check_scalars(const convpool_box_problem &d) {
    if (d.struct_size != sizeof d) return invalid("struct_size", d.struct_size, std::to_string(sizeof d));
    if (d.rank < 1 || d.rank > kRank) return invalid("rank", d.rank, "1 to 3");
    if (const convpool_status status = check_dtype(d.dtype); status != CONVPOOL_OK) return status;
    if (d.layout != CONVPOOL_CHANNELS_FIRST && d.layout != CONVPOOL_CHANNELS_LAST) return invalid("layout", d.layout, "0 or 1");
    if (d.n < 1 || d.n >= kMostElements) return invalid("n", d.n, "1 or more, below 2^31");
    if (d.c < 1 || d.c >= kMostElements) return invalid("c", d.c, "1 or more, below 2^31");
    if (d.sums != 0 && d.sums != 1) return invalid("sums", d.sums, "0 or 1");
    for (int32_t value : d.reserved)
        if (value != 0) return invalid("reserved", value, "0");
    return CONVPOOL_OK;
}

// The problem checked, of three axes: leading ones are added. The sizes are those of the box mean, not of its adjoint.
convpool_status read_box(const convpool_box_problem &d, box::Params &p) {
    if (const convpool_status status = check_scalars(d); status != CONVPOOL_OK) return status;
    for (int i = 0; i < kRank; ++i) p.in_size[i] = p.out_size[i] = p.kernel[i] = p.stride[i] = p.dilation[i] = 1;
    int64_t in_elements = d.c, out_elements = d.c, count = 1;
    for (int i = 0; i < d.rank; ++i) {
        const int axis = kRank - d.rank + i;
        const int32_t begin = d.pads[i], end = d.pads[d.rank + i];
        if (d.spatial[i] < 1 || d.spatial[i] >= kMostElements) return invalid("spatial", d.spatial[i], "1 or more, below 2^31");
        for (auto [name, value] : {std::pair{"kernel", d.kernel[i]}, {"strides", d.strides[i]}, {"dilations", d.dilations[i]}})
            if (value < 1) return invalid(name, value, "1 or more");
        for (int32_t pad : {begin, end})
            if (pad < 0) return invalid("pads", pad, "0 or more");
        const int64_t padded = d.spatial[i] + begin + end, reach = int64_t{1} * d.dilations[i] * (d.kernel[i] - 1);
        if (padded >= kMostElements) return invalid("padded size", padded, "below 2^31");
        if (padded <= reach) return invalid("padded size", padded, "more than the window's reach, " + std::to_string(reach));
        p.in_size[axis] = static_cast<int32_t>(d.spatial[i]);
        p.out_size[axis] = static_cast<int32_t>((padded - reach - 1) / d.strides[i] + 1);
        p.kernel[axis] = d.kernel[i];
        p.stride[axis] = d.strides[i];
        p.dilation[axis] = d.dilations[i];
        p.begin[axis] = begin;
        count *= d.kernel[i];
        in_elements *= p.in_size[axis];
        out_elements *= p.out_size[axis];
        if (in_elements >= kMostElements || out_elements >= kMostElements)
            return invalid("elements of a sample", in_elements, "below 2^31, as those of its means");
        if (count >= kMostElements) return invalid("elements of the window", count, "below 2^31");
    }
    if (static_cast<double>(d.n) * static_cast<double>(std::max(in_elements, out_elements)) > kMostOfAll)
        return invalid("n", d.n, "at most 2^40 elements in all samples");
    if (d.sums != 0) count = 1;
    p.mean.count = static_cast<float>(count);
    p.mean.inverse_count = 1.f / static_cast<float>(count);
    p.mean.count_is_power_of_two = (count & (count - 1)) == 0;
    return CONVPOOL_OK;
}

// adjoint: `in` holds the windows' values, and `out` is as large as the box mean's input.
convpool_status run(const convpool_box_problem *d, const void *in, const void *gate, void *out, void *stream, bool adjoint) {
    if (d == nullptr) return fail(CONVPOOL_INVALID_ARGUMENT, "problem: the pointer is null");
    box::Params p{};
    if (const convpool_status status = read_box(*d, p); status != CONVPOOL_OK) return status;
    if (gate != nullptr) return fail(CONVPOOL_INVALID_ARGUMENT, "gate; got a pointer, expected null");
    const size_t bytes = bytes_of(d->dtype);
    if (const convpool_status status = check_pointers({{"input", in, bytes, kElements}, {"output", out, bytes, kElements}});
        status != CONVPOOL_OK)
        return status;
    const bool last = d->layout == CONVPOOL_CHANNELS_LAST;
    const int per_vector = 16 / kTypes[d->dtype].bytes;
    const bool vectors = last && d->c % per_vector == 0 && aligned(in, 16) && aligned(out, 16);
    p.in = in;
    p.out = out;
    p.inner = last ? static_cast<int32_t>(d->c) / (vectors ? per_vector : 1) : 1;
    // With strides of 1 the adjoint is a box mean itself, of pads that complete the window's reach.
    const bool spread = adjoint && std::any_of(std::begin(p.stride), std::end(p.stride), [](int32_t step) { return step != 1; });
    if (adjoint) std::swap(p.in_size, p.out_size);
    for (int i = 0; i < kRank && adjoint && !spread; ++i) p.begin[i] = p.dilation[i] * (p.kernel[i] - 1) - p.begin[i];
    return cuda_status(adjoint ? "box_mean_adjoint" : "box_mean",
                       box::launch(p, last ? d->n : d->n * d->c, static_cast<convpool_dtype>(d->dtype), spread, vectors,
                                   static_cast<cudaStream_t>(stream)));
}

constexpr int64_t kMost = (int64_t{1} << 31) - 64;  // elements and pixels that 31 bits count, with a step beyond

std::string wrong(const char *name, int64_t got, const std::string &expected) {
    return mismatch(std::string("weight gradient: ") + name, got, expected);
}

// Empty, or why no kernel runs the problem.
std::string refusal(const Problem &p) {
    if (p.rank > 2) return wrong("rank", p.rank, "1 or 2");
    if (p.x_dtype != p.w_dtype || (p.w_dtype != CONVPOOL_F16 && p.w_dtype != CONVPOOL_BF16))
        return std::string("weight gradient: types; got ") + kTypes[p.x_dtype].name + " and " + kTypes[p.w_dtype].name +
               ", expected F16 or BF16, the same of X and W";
    if (!p.x_channels_last || !p.y_channels_last) return "weight gradient: layout; got channels first, expected channels last";
    if (p.pool_size() != 1) return wrong("elements of the pooling window", p.pool_size(), "1");
    for (int k = 0; k < kRank; ++k)
        if (p.pooled[k] != p.in[k]) return wrong("pooled size", p.pooled[k], "X's, " + std::to_string(p.in[k]));
    if (p.group != 1) return wrong("group", p.group, "1");
    if (p.m % p.per_chunk() != 0) return wrong("m", p.m, "a multiple of 8");
    if (p.c * p.taps() > CONVPOOL_MAX_GRADIENT_FILTER)
        return wrong("elements of a filter", p.c * p.taps(), "at most " + std::to_string(CONVPOOL_MAX_GRADIENT_FILTER));
    if (p.n * p.in_pixels() * p.c > kMost) return wrong("elements of X", p.n * p.in_pixels() * p.c, "below 2^31 - 64");
    if (p.n * p.out_pixels() > kMost) return wrong("pixels of Y", p.n * p.out_pixels(), "below 2^31 - 64");
    if (p.m > weight_gradient::kChannels * 65535) return wrong("m", p.m, "at most 64 * 65535");
    return {};
}

convpool_status read_gradient(const convpool_problem *description, Problem &p) {
    if (const convpool_status status = read_problem(description, p); status != CONVPOOL_OK) return status;
    const std::string reason = refusal(p);
    return reason.empty() ? CONVPOOL_OK : fail(CONVPOOL_UNSUPPORTED, reason);
}

size_t bytes_of(const Problem &p) {
    const int64_t tiles = ceil_div(p.m, weight_gradient::kChannels), parts = weight_gradient::parts_of(p.n * p.out_pixels());
    return static_cast<size_t>(tiles * parts * weight_gradient::kMaxElements * weight_gradient::kChannels) * sizeof(float);
}

convpool_status check_tensors(const Problem &p, const void *dy, const void *x, const void *dw, const void *db,
                              const void *workspace, size_t workspace_bytes) {
    if (const auto status = check_pointers({{"dy", dy, 16}, {"x", x, 2}, {"dw", dw, 2}, {"workspace", workspace, 256}});
        status != CONVPOOL_OK)
        return status;
    if (!aligned(db, 2)) return fail(CONVPOOL_MISALIGNED, "db: not aligned to 2 bytes");
    if (db != nullptr && p.c * p.taps() == CONVPOOL_MAX_GRADIENT_FILTER)
        return fail(CONVPOOL_UNSUPPORTED, wrong("elements of a filter with a bias", p.c * p.taps(), "at most 31"));
    if (workspace_bytes >= bytes_of(p)) return CONVPOOL_OK;
    return fail(CONVPOOL_WORKSPACE_TOO_SMALL,
                "workspace_bytes; got " + std::to_string(workspace_bytes) + ", expected " + std::to_string(bytes_of(p)));
}

weight_gradient::Params params_of(const Problem &p) {
    weight_gradient::Params out{};
    out.m = static_cast<int32_t>(p.m), out.c = static_cast<int32_t>(p.c);
    out.h = static_cast<int32_t>(p.in[1]), out.w = static_cast<int32_t>(p.in[2]);
    out.kw = p.kernel[2];
    p.set_windows(out);
    out.elements = static_cast<int32_t>(p.c * p.taps());
    out.parts = weight_gradient::parts_of(p.n * p.out_pixels());
    out.pixels = static_cast<uint32_t>(p.n * p.out_pixels());
    out.out_w = static_cast<uint32_t>(p.out[2]);
    out.out_pixels = static_cast<uint32_t>(p.out_pixels());
    return out;
}

convpool_status check_spectral(const convpool_spectral_weight *weights, int32_t count, int32_t dtype, bool adjoint,
                               const void *sums) {
    if (const convpool_status status = check_dtype(dtype); status != CONVPOOL_OK) return status;
    if (weights == nullptr) return fail(CONVPOOL_INVALID_ARGUMENT, "weights: the pointer is null");
    if (count < 1) return invalid("count", count, "1 or more");
    const size_t bytes = bytes_of(dtype);
    for (int i = 0; i < count; ++i) {
        const convpool_spectral_weight &w = weights[i];
        for (auto [name, size] : {std::pair{"m", w.m}, {"c", w.c}, {"taps", w.taps}})
            if (size < 1) return invalid(name, size, "1 or more");
        if (w.reserved != 0) return invalid("reserved", w.reserved, "0");
        const double elements = static_cast<double>(w.m) * w.c * w.taps;
        if (elements >= static_cast<double>(kMostElements))
            return invalid("elements of a weight", w.m, "below 2^31 with c and taps");
        if (spectral::elements_of(w) % 4 != 0)
            return invalid("elements of a weight", spectral::elements_of(w), "a multiple of 4");
        convpool_status status = check_pointers({{"w", w.w, 16}, {"out", w.out, 16}, {"kept", w.kept, sizeof(float)}});
        if (status == CONVPOOL_OK && adjoint) status = check_pointers({{"dy", w.dy, 16}});
        else if (status == CONVPOOL_OK) status = check_pointers({{"last_u", w.last_u, bytes}, {"last_v", w.last_v, bytes}});
        if (status != CONVPOOL_OK) return status;
    }
    return adjoint ? check_pointers({{"sums", sums, sizeof(float)}}) : CONVPOOL_OK;
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

convpool_status convpool_weight_gradient_bytes(const convpool_problem *problem, size_t *bytes) {
    return guarded([&] {
        Problem p;
        if (const convpool_status status = read_gradient(problem, p); status != CONVPOOL_OK) return status;
        if (bytes == nullptr) return fail(CONVPOOL_INVALID_ARGUMENT, "bytes: the pointer is null");
        *bytes = bytes_of(p);
        return CONVPOOL_OK;
    });
}

convpool_status convpool_weight_gradient(const convpool_problem *problem, const void *dy, const void *x, void *dw, void *db,
                                         void *workspace, size_t workspace_bytes, void *stream) {
    return guarded([&] {
        Problem p;
        if (const convpool_status status = read_gradient(problem, p); status != CONVPOOL_OK) return status;
        if (const convpool_status status = check_tensors(p, dy, x, dw, db, workspace, workspace_bytes); status != CONVPOOL_OK)
            return status;
        Device device;
        if (const convpool_status status = read_device(device); status != CONVPOOL_OK) return status;
        if (code_architecture(device.cc) < 80)
            return fail(CONVPOOL_UNSUPPORTED,
                        wrong("compute capability", device.cc, "80 or more, in the library and of the device"));
        weight_gradient::Params params = params_of(p);
        params.dy = dy, params.x = x;
        params.dw = dw, params.db = db;
        params.sums = static_cast<float *>(workspace);
        const Precision precision = p.w_dtype == CONVPOOL_F16 ? Precision::kF16 : Precision::kBF16;
        return cuda_status("weight_gradient", weight_gradient::launch(params, precision, launches_overlap(device),
                                                                      static_cast<cudaStream_t>(stream)));
    });
}

convpool_status convpool_turn_weights(const void *w, void *out, int64_t m, int64_t c, int64_t taps, int32_t dtype, float factor,
                                      void *stream) {
    return guarded([&] {
        if (const convpool_status status = check_dtype(dtype); status != CONVPOOL_OK) return status;
        for (auto [name, size] : {std::tuple{"m", m}, {"c", c}, {"taps", taps}})
            if (size < 1 || size > 65535) return invalid(name, size, "1 to 65535");
        const size_t bytes = bytes_of(dtype);
        const auto status = check_pointers({{"w", w, bytes, kElements}, {"out", out, bytes, kElements}});
        if (status != CONVPOOL_OK) return status;
        return cuda_status("turn_weights", weight_gradient::turn(w, out, m, c, taps, static_cast<convpool_dtype>(dtype), factor,
                                                                 static_cast<cudaStream_t>(stream)));
    });
}

convpool_status convpool_spectral_norm(const convpool_spectral_weight *weights, int32_t count, int32_t dtype, int32_t u_first,
                                       float epsilon, void *stream) {
    return guarded([&] {
        if (const auto status = check_spectral(weights, count, dtype, false, nullptr); status != CONVPOOL_OK) return status;
        return cuda_status("spectral_norm", spectral::launch(weights, count, static_cast<convpool_dtype>(dtype), u_first != 0,
                                                             epsilon, static_cast<cudaStream_t>(stream)));
    });
}

convpool_status convpool_spectral_norm_adjoint(const convpool_spectral_weight *weights, int32_t count, int32_t dtype, void *sums,
                                               void *stream) {
    return guarded([&] {
        if (const auto status = check_spectral(weights, count, dtype, true, sums); status != CONVPOOL_OK) return status;
        return cuda_status("spectral_norm_adjoint",
                           spectral::launch_adjoint(weights, count, static_cast<convpool_dtype>(dtype),
                                                    static_cast<float *>(sums), static_cast<cudaStream_t>(stream)));
    });
}

}  // extern "C"

// SPDX-License-Identifier: Apache-2.0
#include "core/problem.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <tuple>

namespace convpool {

std::string mismatch(const std::string &what, int64_t got, const std::string &expected) {
    return what + "; got " + std::to_string(got) + ", expected " + expected;
}

namespace {

constexpr int64_t kMaxSize = int64_t{1} << 31;
constexpr int32_t kMaxUpsample = 4;

// The reason why a problem is refused; empty if it is not.
using Reason = std::string;

std::string entry(const char *name, int dimension) { return std::string(name) + "[" + std::to_string(dimension) + "]"; }

// floor((in + pads - dilation * (kernel - 1) - 1) / stride) + 1, or 0 if the window does not fit.
int64_t window_places(int64_t in, int64_t pads, int64_t kernel, int64_t dilation, int64_t stride) {
    const int64_t room = in + pads - dilation * (kernel - 1) - 1;
    return room < 0 ? 0 : room / stride + 1;
}

// "0 (F16), 1 (BF16) or 2 (F32)", of all types.
std::string all_types() {
    std::string text;
    for (size_t i = 0; i < std::size(kTypes); ++i)
        text += (i == 0 ? "" : i + 1 == std::size(kTypes) ? " or " : ", ") + std::to_string(i) + " (" + kTypes[i].name + ")";
    return text;
}

// Its size, and that what this version does not know is zero.
Reason wrong_struct(const convpool_problem *d) {
    if (d->struct_size < sizeof(convpool_problem) || d->struct_size > CONVPOOL_MAX_STRUCT_SIZE)
        return mismatch("struct_size", d->struct_size,
                        std::to_string(sizeof(convpool_problem)) + " or more, at most " +
                            std::to_string(CONVPOOL_MAX_STRUCT_SIZE));
    const unsigned char *bytes = reinterpret_cast<const unsigned char *>(d);
    for (size_t i = sizeof(convpool_problem); i < d->struct_size; ++i)
        if (bytes[i] != 0)
            return "byte " + std::to_string(i) + " is set, of a field that this version (" +
                   std::to_string(CONVPOOL_VERSION_MAJOR) + "." + std::to_string(CONVPOOL_VERSION_MINOR) +
                   ") does not know; expected 0";
    return {};
}

Reason wrong_types(const convpool_problem *d) {
    for (auto [name, dtype] : {std::pair{"x_dtype", d->x_dtype}, {"w_dtype", d->w_dtype}, {"y_dtype", d->y_dtype}})
        if (!is_type(dtype)) return mismatch(name, dtype, all_types());
    auto wrong = [](const char *what, int32_t got, const std::string &expected) {
        return std::string(what) + "; got " + kTypes[got].name + ", expected " + expected;
    };
    const std::string w = kTypes[d->w_dtype].name;
    if (is_float(d->w_dtype)) {
        if (d->x_dtype != d->w_dtype && d->x_dtype != CONVPOOL_F32)
            return wrong("x_dtype", d->x_dtype, w + ", which W has" + (d->w_dtype == CONVPOOL_F32 ? "" : ", or F32"));
        if (d->y_dtype != d->w_dtype) return wrong("y_dtype", d->y_dtype, w + ", which W has");
    } else {
        if (d->x_dtype != d->w_dtype) return wrong("x_dtype", d->x_dtype, w + ", which W has");
        if (!is_float(d->y_dtype)) return wrong("y_dtype", d->y_dtype, "F16, BF16 or F32 where W has " + w);
        for (auto [name, value] :
             {std::pair{"prologue_affine", d->prologue_affine}, {"prologue_activation", d->prologue_activation}})
            if (value != 0) return mismatch(name, value, "0 where W has " + w);
    }
    if (d->accumulation != CONVPOOL_ACCUMULATE_DEFAULT && d->accumulation != CONVPOOL_ACCUMULATE_PACKED)
        return mismatch("accumulation", d->accumulation, "0 (the types' default) or 1 (packed)");
    if (d->has_w_scale != 0 && is_float(d->w_dtype))
        return mismatch("has_w_scale", d->has_w_scale, "0 where W has " + w + ": scales are for 8-bit types");
    return {};
}

Reason wrong_options(const convpool_problem *d) {
    for (auto [name, layout] : {std::pair{"x_layout", d->x_layout}, std::pair{"y_layout", d->y_layout}})
        if (layout != CONVPOOL_CHANNELS_FIRST && layout != CONVPOOL_CHANNELS_LAST)
            return mismatch(name, layout, "0 (channels first) or 1 (channels last)");
    if (d->activation < CONVPOOL_ACT_NONE || d->activation > CONVPOOL_ACT_SILU)
        return mismatch("activation", d->activation, "0 to 6");
    if (d->activation == CONVPOOL_ACT_CLIP && !(d->alpha <= d->beta))
        return "clip bounds; got alpha " + std::to_string(d->alpha) + " and beta " + std::to_string(d->beta) +
               ", expected alpha <= beta";
    if (d->prologue_affine < 0 || d->prologue_affine > 3)
        return mismatch("prologue_affine", d->prologue_affine,
                        "0 (none), 1 (by channel), 2 (by image and channel) or 3 (normalized)");
    const bool normalized = d->prologue_affine == 3;
    if (normalized ? d->prologue_groups < 1 || d->c % d->prologue_groups != 0 : d->prologue_groups != 0)
        return mismatch("prologue_groups", d->prologue_groups, normalized ? "a divisor of c" : "0 where X is not normalized");
    if (!(d->prologue_epsilon >= 0.f) || !std::isfinite(d->prologue_epsilon) || (!normalized && d->prologue_epsilon != 0.f))
        return "prologue_epsilon; got " + std::to_string(d->prologue_epsilon) +
               (normalized ? ", expected a finite number of at least 0" : ", expected 0 where X is not normalized");
    if (d->prologue_activation != CONVPOOL_ACT_SILU &&
        (d->prologue_activation < CONVPOOL_ACT_NONE || d->prologue_activation > CONVPOOL_ACT_LEAKY_RELU))
        return mismatch("prologue_activation", d->prologue_activation, "0 (none), 1 (relu), 2 (leaky_relu) or 6 (silu)");
    // An infinity in the type would make NaN of zeros.
    const float largest = kTypes[d->w_dtype].largest;
    if (d->prologue_activation == CONVPOOL_ACT_LEAKY_RELU && !(std::fabs(d->prologue_alpha) <= largest)) {
        char numbers[64];
        std::snprintf(numbers, sizeof numbers, "got %g, expected at most %g in size", d->prologue_alpha, largest);
        return std::string("prologue_alpha: a number of the dtype; ") + numbers;
    }
    return {};
}

Reason wrong_channels(const convpool_problem *d) {
    for (auto [name, size] : {std::pair{"n", d->n}, std::pair{"c", d->c}, std::pair{"m", d->m}})
        if (size < 1 || size >= kMaxSize) return mismatch(name, size, "1 to 2^31 - 1");
    if (d->group < 1) return mismatch("group", d->group, "1 or more");
    if (d->c % d->group != 0) return mismatch("c", d->c, "a multiple of group " + std::to_string(d->group));
    if (d->m % d->group != 0) return mismatch("m", d->m, "a multiple of group " + std::to_string(d->group));
    return {};
}

// The fault of spatial dimension i, before anything is computed of it.
Reason wrong_axis(const convpool_problem *d, int i) {
    if (d->spatial[i] < 1 || d->spatial[i] >= kMaxSize) return mismatch(entry("spatial", i), d->spatial[i], "1 to 2^31 - 1");
    for (auto [name, value] : {std::pair{"pool_kernel", d->pool_kernel[i]},
                               {"pool_strides", d->pool_strides[i]},
                               {"pool_dilations", d->pool_dilations[i]},
                               {"kernel", d->kernel[i]},
                               {"strides", d->strides[i]},
                               {"dilations", d->dilations[i]}})
        if (value < 1 || value > 65535) return mismatch(entry(name, i), value, "1 to 65535");
    if (d->upsample[i] < 0 || d->upsample[i] > kMaxUpsample)
        return mismatch(entry("upsample", i), d->upsample[i], "0 or 1 (none) to " + std::to_string(kMaxUpsample));
    for (int side : {i, i + d->rank}) {
        for (auto [name, pads] : {std::pair{"pool_pads", d->pool_pads[side]}, {"pads", d->pads[side]}})
            if (pads < 0 || pads > 65535) return mismatch(entry(name, side), pads, "0 to 65535");
    }
    return {};
}

// True where X is upsampled along any dimension.
bool upsamples(const convpool_problem *d) {
    for (int i = 0; i < d->rank; ++i)
        if (d->upsample[i] > 1) return true;
    return false;
}

// A problem that upsamples has no pooling along dimension i.
Reason wrong_pooling(const convpool_problem *d, int i) {
    for (auto [name, got, expected] : {std::tuple{"pool_kernel", d->pool_kernel[i], 1},
                                       {"pool_strides", d->pool_strides[i], 1},
                                       {"pool_pads", std::max(d->pool_pads[i], d->pool_pads[i + d->rank]), 0}})
        if (got != expected)
            return mismatch(entry(name, i), got,
                            std::to_string(expected) + " where X is upsampled: a problem pools or upsamples");
    return {};
}

// Spatial dimension i of the description as dimension k of the problem.
Reason take_axis(const convpool_problem *d, int i, Problem &p, int k) {
    if (Reason reason = wrong_axis(d, i); !reason.empty()) return reason;
    if (Reason reason = upsamples(d) ? wrong_pooling(d, i) : Reason(); !reason.empty()) return reason;
    p.in[k] = d->spatial[i];
    p.pool_kernel[k] = d->pool_kernel[i];
    p.pool_strides[k] = d->pool_strides[i];
    p.pool_dilations[k] = d->pool_dilations[i];
    p.pool_pads_begin[k] = d->pool_pads[i];
    p.pool_pads_end[k] = d->pool_pads[i + d->rank];
    p.kernel[k] = d->kernel[i];
    p.strides[k] = d->strides[i];
    p.dilations[k] = d->dilations[i];
    p.pads_begin[k] = d->pads[i];
    p.pads_end[k] = d->pads[i + d->rank];
    p.upsample[k] = std::max(d->upsample[i], 1);
    const int64_t pool_pads = int64_t{p.pool_pads_begin[k]} + p.pool_pads_end[k];
    p.pooled[k] = upsamples(d) ? p.in[k] * p.upsample[k]
                               : window_places(p.in[k], pool_pads, p.pool_kernel[k], p.pool_dilations[k], p.pool_strides[k]);
    if (p.pooled[k] < 1)
        return mismatch(entry("spatial", i), d->spatial[i], "at least the pooling window of dimension " + std::to_string(i));
    const char *const convolved = upsamples(d) ? "upsampled size" : "pooled size";
    const int64_t pads = int64_t{p.pads_begin[k]} + p.pads_end[k];
    p.out[k] = window_places(p.pooled[k], pads, p.kernel[k], p.dilations[k], p.strides[k]);
    if (p.out[k] < 1) return mismatch(entry(convolved, i), p.pooled[k], "at least the kernel of dimension " + std::to_string(i));
    // Coordinates are 32-bit in generic, which runs whatever passes here.
    const int64_t padded = p.in[k] + pool_pads, padded_pooled = p.pooled[k] + pads;
    if (padded >= kMaxSize) return mismatch(entry("spatial", i) + " with its padding", padded, "less than 2^31");
    if (padded_pooled >= kMaxSize) return mismatch(entry(convolved, i) + " with its padding", padded_pooled, "less than 2^31");
    return {};
}

// Products of sizes in 64 bits: no tensor has more than 2^40 elements, far past any device's memory.
Reason wrong_products(const Problem &p) {
    if (p.taps() >= kMaxSize) return mismatch("taps of the kernel", p.taps(), "less than 2^31");
    constexpr double kMaxElements = 1099511627776.0;
    auto product = [](double a, const int64_t *sizes) { return a * sizes[0] * sizes[1] * sizes[2]; };
    const double filter = double(p.c) / p.group * p.kernel[0] * p.kernel[1] * p.kernel[2];
    const std::pair<const char *, double> tensors[] = {
        {"X", product(double(p.n) * p.c, p.in)},
        {p.upsamples() ? "Upsample(X)" : "AveragePool(X)", product(double(p.n) * p.c, p.pooled)},
        {"Y", product(double(p.n) * p.m, p.out)},
        {"W", p.m * filter}};
    for (auto [name, elements] : tensors)
        if (elements > kMaxElements) return std::string(name) + " has more than 2^40 elements";
    if (const double groups = double(p.n) * p.prologue_groups; groups >= kMaxSize)
        return mismatch("n * prologue_groups", static_cast<int64_t>(groups), "less than 2^31");
    // Products of e4m3 are multiples of 2^-18 below 2^18, so as many fit into 64 bits; of int8 more would.
    if (p.eight_bit() && filter * p.pool_size() > 134217728.0)
        return "products of an output's sum; got more than 2^27, expected at most as many, the exact sum of which fits 64 bits";
    return {};
}

}  // namespace

bool check_problem(const convpool_problem *d, Problem &out, std::string &error) {
    auto reject = [&](const Reason &why) {
        if (!why.empty()) error = "problem: " + why;
        return !why.empty();
    };
    if (d == nullptr) return !reject("the pointer is null");
    if (reject(wrong_struct(d))) return false;
    if (d->rank < 1 || d->rank > kRank) return !reject(mismatch("rank", d->rank, "1 to 3"));
    if (reject(wrong_types(d)) || reject(wrong_options(d)) || reject(wrong_channels(d))) return false;

    Problem p{};
    p.rank = d->rank;
    p.x_dtype = d->x_dtype, p.w_dtype = d->w_dtype, p.y_dtype = d->y_dtype;
    p.x_channels_last = d->x_layout == CONVPOOL_CHANNELS_LAST;
    p.y_channels_last = d->y_layout == CONVPOOL_CHANNELS_LAST;
    p.allow_tf32 = d->allow_tf32 != 0;
    p.allow_packed = d->accumulation == CONVPOOL_ACCUMULATE_PACKED && kTypes[d->w_dtype].bytes == 2;
    p.has_w_scale = d->has_w_scale != 0;
    p.has_bias = d->has_bias != 0;
    p.has_residual = d->has_residual != 0;
    p.n = d->n, p.c = d->c, p.m = d->m, p.group = d->group;
    p.activation = static_cast<Activation>(d->activation);
    p.alpha = d->alpha, p.beta = d->beta;
    p.prologue_affine = d->prologue_affine != 0;
    p.prologue_by_image = d->prologue_affine >= 2;
    p.prologue_activation = static_cast<Activation>(d->prologue_activation);
    p.prologue_alpha = d->prologue_alpha;
    p.prologue_groups = d->prologue_groups;
    p.prologue_epsilon = d->prologue_epsilon;
    for (int i = 0; i < kRank; ++i) {
        p.in[i] = p.pooled[i] = p.out[i] = 1;
        p.pool_kernel[i] = p.pool_strides[i] = p.pool_dilations[i] = 1;
        p.kernel[i] = p.strides[i] = p.dilations[i] = p.upsample[i] = 1;
    }
    for (int i = 0; i < d->rank; ++i)
        if (reject(take_axis(d, i, p, kRank - d->rank + i))) return false;
    if (reject(wrong_products(p))) return false;
    out = p;
    return true;
}

Shape2d Problem::shape() const {
    auto narrow = [](int64_t size) { return static_cast<int32_t>(size); };
    Shape2d s{};
    s.n = narrow(n), s.c = narrow(c), s.m = narrow(m);
    s.h = narrow(in[1]), s.w = narrow(in[2]);
    s.pooled_h = narrow(pooled[1]), s.pooled_w = narrow(pooled[2]);
    s.out_h = narrow(out[1]), s.out_w = narrow(out[2]);
    s.kh = kernel[1], s.kw = kernel[2];
    set_windows(s);
    s.x_channels_last = x_channels_last, s.y_channels_last = y_channels_last;
    return s;
}

}  // namespace convpool

#include "problem.h"

#include <cfloat>
#include <cmath>
#include <cstdio>
#include <cstring>

namespace convpool {
namespace {

std::string mismatch(const char *what, int64_t got, const std::string &expected) {
    return std::string(what) + "; got " + std::to_string(got) + ", expected " + expected;
}

std::string entry(const char *name, int dimension) { return std::string(name) + "[" + std::to_string(dimension) + "]"; }

// floor((in + pads - dilation * (kernel - 1) - 1) / stride) + 1, or 0 if the window does not fit.
int64_t window_places(int64_t in, int64_t pads, int64_t kernel, int64_t dilation, int64_t stride) {
    const int64_t room = in + pads - dilation * (kernel - 1) - 1;
    return room < 0 ? 0 : room / stride + 1;
}

// The largest finite number of a dtype.
float largest_number(int32_t dtype) { return dtype == CONVPOOL_F16 ? 65504.f : dtype == CONVPOOL_BF16 ? 0x1.FEp127f : FLT_MAX; }

constexpr int64_t kMaxSize = int64_t{1} << 31;

}  // namespace

bool check_problem(const convpool_problem *d, Problem &out, std::string &error) {
    auto reject = [&](const std::string &why) {
        error = "problem: " + why;
        return false;
    };
    if (d == nullptr) return reject("the pointer is null");
    if (d->struct_size < sizeof(convpool_problem))
        return reject(mismatch("struct_size", d->struct_size, std::to_string(sizeof(convpool_problem)) + " or more"));
    const unsigned char *bytes = reinterpret_cast<const unsigned char *>(d);
    for (size_t i = offsetof(convpool_problem, reserved); i < d->struct_size; ++i)
        if (bytes[i] != 0)
            return reject("byte " + std::to_string(i) + " is set, of a field that this version (" +
                          std::to_string(CONVPOOL_VERSION_MAJOR) + "." + std::to_string(CONVPOOL_VERSION_MINOR) +
                          ") does not know; expected 0");
    if (d->rank < 1 || d->rank > kRank) return reject(mismatch("rank", d->rank, "1 to 3"));
    if (d->dtype < CONVPOOL_F16 || d->dtype > CONVPOOL_F32)
        return reject(mismatch("dtype", d->dtype, "0 (F16), 1 (BF16) or 2 (F32)"));
    if (d->x_float != 0 && d->dtype == CONVPOOL_F32) return reject(mismatch("x_float", d->x_float, "0 with dtype F32"));
    for (auto [name, layout] : {std::pair{"x_layout", d->x_layout}, std::pair{"y_layout", d->y_layout}})
        if (layout != CONVPOOL_CHANNELS_FIRST && layout != CONVPOOL_CHANNELS_LAST)
            return reject(mismatch(name, layout, "0 (channels first) or 1 (channels last)"));
    if (d->activation < CONVPOOL_ACT_NONE || d->activation > CONVPOOL_ACT_CLIP)
        return reject(mismatch("activation", d->activation, "0 to 5"));
    if (d->activation == CONVPOOL_ACT_CLIP && !(d->alpha <= d->beta))
        return reject("clip bounds; got alpha " + std::to_string(d->alpha) + " and beta " + std::to_string(d->beta) +
                      ", expected alpha <= beta");
    if (d->prologue_activation < CONVPOOL_ACT_NONE || d->prologue_activation > CONVPOOL_ACT_LEAKY_RELU)
        return reject(mismatch("prologue_activation", d->prologue_activation, "0 (none), 1 (relu) or 2 (leaky_relu)"));
    // As an infinity in the dtype it would make NaN of zeros.
    const float largest = largest_number(d->dtype);
    if (d->prologue_activation == CONVPOOL_ACT_LEAKY_RELU && !(std::fabs(d->prologue_alpha) <= largest)) {
        char numbers[64];
        std::snprintf(numbers, sizeof numbers, "got %g, expected at most %g in size", d->prologue_alpha, largest);
        return reject(std::string("prologue_alpha: a number of the dtype; ") + numbers);
    }
    for (auto [name, size] : {std::pair{"n", d->n}, std::pair{"c", d->c}, std::pair{"m", d->m}})
        if (size < 1 || size >= kMaxSize) return reject(mismatch(name, size, "1 to 2^31 - 1"));
    if (d->group < 1) return reject(mismatch("group", d->group, "1 or more"));
    if (d->c % d->group != 0) return reject(mismatch("c", d->c, "a multiple of group " + std::to_string(d->group)));
    if (d->m % d->group != 0) return reject(mismatch("m", d->m, "a multiple of group " + std::to_string(d->group)));

    Problem p{};
    p.rank = d->rank;
    p.dtype = d->dtype;
    p.x_channels_last = d->x_layout == CONVPOOL_CHANNELS_LAST;
    p.y_channels_last = d->y_layout == CONVPOOL_CHANNELS_LAST;
    p.x_float = d->x_float != 0;
    p.allow_tf32 = d->allow_tf32 != 0;
    p.has_bias = d->has_bias != 0;
    p.has_residual = d->has_residual != 0;
    p.n = d->n;
    p.c = d->c;
    p.m = d->m;
    p.group = d->group;
    p.activation = static_cast<Activation>(d->activation);
    p.alpha = d->alpha;
    p.beta = d->beta;
    p.prologue_affine = d->prologue_affine != 0;
    p.prologue_activation = static_cast<Activation>(d->prologue_activation);
    p.prologue_alpha = d->prologue_alpha;
    for (int i = 0; i < kRank; ++i) {
        p.in[i] = p.pooled[i] = p.out[i] = 1;
        p.pool_kernel[i] = p.pool_strides[i] = p.pool_dilations[i] = 1;
        p.kernel[i] = p.strides[i] = p.dilations[i] = 1;
    }
    const int lead = kRank - d->rank;
    for (int i = 0; i < d->rank; ++i) {
        const int k = lead + i;
        if (d->spatial[i] < 1 || d->spatial[i] >= kMaxSize)
            return reject(mismatch(entry("spatial", i).c_str(), d->spatial[i], "1 to 2^31 - 1"));
        struct Positive {
            const char *name;
            int32_t value;
        };
        for (auto [name, value] : {Positive{"pool_kernel", d->pool_kernel[i]},
                                   {"pool_strides", d->pool_strides[i]},
                                   {"pool_dilations", d->pool_dilations[i]},
                                   {"kernel", d->kernel[i]},
                                   {"strides", d->strides[i]},
                                   {"dilations", d->dilations[i]}})
            if (value < 1 || value > 65535) return reject(mismatch(entry(name, i).c_str(), value, "1 to 65535"));
        for (int side : {i, i + d->rank}) {
            if (d->pool_pads[side] < 0 || d->pool_pads[side] > 65535)
                return reject(mismatch(entry("pool_pads", side).c_str(), d->pool_pads[side], "0 to 65535"));
            if (d->pads[side] < 0 || d->pads[side] > 65535)
                return reject(mismatch(entry("pads", side).c_str(), d->pads[side], "0 to 65535"));
        }
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
        p.pooled[k] = window_places(p.in[k], int64_t{p.pool_pads_begin[k]} + p.pool_pads_end[k], p.pool_kernel[k],
                                    p.pool_dilations[k], p.pool_strides[k]);
        if (p.pooled[k] < 1)
            return reject(mismatch(entry("spatial", i).c_str(), d->spatial[i],
                                   "at least the pooling window of dimension " + std::to_string(i)));
        p.out[k] =
            window_places(p.pooled[k], int64_t{p.pads_begin[k]} + p.pads_end[k], p.kernel[k], p.dilations[k], p.strides[k]);
        if (p.out[k] < 1)
            return reject(
                mismatch(entry("pooled size", i).c_str(), p.pooled[k], "at least the kernel of dimension " + std::to_string(i)));
        // Coordinates are 32-bit in generic, which runs whatever passes here.
        const int64_t padded = p.in[k] + p.pool_pads_begin[k] + p.pool_pads_end[k];
        const int64_t padded_pooled = p.pooled[k] + p.pads_begin[k] + p.pads_end[k];
        if (padded >= kMaxSize)
            return reject(mismatch((entry("spatial", i) + " with its padding").c_str(), padded, "less than 2^31"));
        if (padded_pooled >= kMaxSize)
            return reject(mismatch((entry("pooled size", i) + " with its padding").c_str(), padded_pooled, "less than 2^31"));
    }
    if (p.taps() >= kMaxSize) return reject(mismatch("taps of the kernel", p.taps(), "less than 2^31"));
    // Products of sizes in 64 bits: no tensor has more than 2^40 elements, far past any device's memory.
    constexpr double kMaxElements = 1099511627776.0;
    auto product = [](double a, const int64_t *sizes) { return a * sizes[0] * sizes[1] * sizes[2]; };
    const double elements[] = {product(double(p.n) * p.c, p.in), product(double(p.n) * p.c, p.pooled),
                               product(double(p.n) * p.m, p.out),
                               double(p.m) * p.c / p.group * p.kernel[0] * p.kernel[1] * p.kernel[2]};
    const char *names[] = {"X", "AveragePool(X)", "Y", "W"};
    for (int i = 0; i < 4; ++i)
        if (elements[i] > kMaxElements) return reject(std::string(names[i]) + " has more than 2^40 elements");
    out = p;
    return true;
}

}  // namespace convpool

// SPDX-License-Identifier: Apache-2.0
// The operators on the CPU: plain loops. First the elements of tensors in host memory, and the type that their sums are kept in.

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "kernel.h"

namespace convpool::onnxruntime {

using nodes::float_of;

template <typename Number> struct Plain {
    using Sum = Number;
    Number value;
    Sum read() const { return value; }
    void write(Sum sum) { value = sum; }
};

inline uint32_t bits_of_float(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

struct BFloat16 {
    using Sum = float;
    uint16_t bits;
    Sum read() const { return float_of(uint32_t{bits} << 16); }
    // To nearest, ties to even; a NaN stays one.
    void write(Sum sum) {
        const uint32_t all = bits_of_float(sum);
        bits = static_cast<uint16_t>(sum != sum ? (all >> 16) | 0x40 : (all + 0x7fff + ((all >> 16) & 1)) >> 16);
    }
};

struct Float16 {
    using Sum = float;
    uint16_t bits;
    // 5 exponent bits of bias 15, 10 of the fraction.  Multiplying by 2^112 moves the bias to a float's, subnormals included.
    Sum read() const {
        const uint32_t magnitude = bits & 0x7fffu, sign = uint32_t{bits & 0x8000u} << 16;
        const float value =
            magnitude >= 0x7c00 ? float_of(0x7f800000u | (magnitude & 0x3ff) << 13) : float_of(magnitude << 13) * 0x1p112f;
        return float_of(bits_of_float(value) | sign);
    }
    // To nearest, ties to even.
    void write(Sum sum) {
        const uint32_t all = bits_of_float(sum), sign = all >> 16 & 0x8000u, magnitude = all & 0x7fffffffu;
        uint32_t rounded;
        if (magnitude > 0x7f800000u) {  // NaN
            rounded = 0x7e00;
        } else if (magnitude >= 0x47800000u) {  // 65536 and more
            rounded = 0x7c00;
        } else if (magnitude < 0x38800000u) {  // below 2^-14: units of 2^-24, which adding 0.5 leaves in a float's last bits
            rounded = bits_of_float(float_of(magnitude) + 0.5f) - 0x3f000000u;
        } else {
            rounded = (magnitude - 0x38000000u + 0xfff + (magnitude >> 13 & 1)) >> 13;
        }
        bits = static_cast<uint16_t>(sign | rounded);
    }
};

namespace {

constexpr int kRank = CONVPOOL_MAX_RANK;
using Extent = std::array<int64_t, kRank>;

// A problem with its missing leading axes as axes of one element.
struct Shapes {
    explicit Shapes(const convpool_problem &problem, const Sizes &output, int first_axis) : p(problem) {
        const int missing = kRank - p.rank;
        for (int i = 0; i < p.rank; ++i) {
            const int at = missing + i;
            in[at] = p.spatial[i];
            copies[at] = std::max(p.upsample[i], 1);
            out[at] = output[first_axis + i];
            window[at] = p.pool_kernel[i], window_step[at] = p.pool_strides[i];
            window_begin[at] = -p.pool_pads[i];
            window_dilation[at] = p.pool_dilations[i];
            kernel[at] = p.kernel[i], step[at] = p.strides[i];
            begin[at] = -p.pads[i];
            dilation[at] = p.dilations[i];
            const int64_t reach = window_dilation[at] * (window[at] - 1) + 1;
            pooled[at] = upsamples() ? in[at] * copies[at]
                                     : (in[at] + p.pool_pads[i] + p.pool_pads[i + p.rank] - reach) / window_step[at] + 1;
        }
    }

    bool upsamples() const { return p.upsample[0] > 0; }

    const convpool_problem &p;
    Extent in = ones(), copies = ones(), pooled = ones(), out = ones(), window = ones(), window_step = ones(), window_begin{},
           window_dilation = ones(), kernel = ones(), step = ones(), begin{}, dilation = ones();

private:
    static Extent ones() { return {1, 1, 1}; }
};

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t elements(const Extent &e) { return e[0] * e[1] * e[2]; }

// The place of an element in a tensor of `channels` channels.
int64_t offset(int64_t n, int64_t c, int64_t at, int64_t channels, int64_t pixels, int32_t layout) {
    return layout == CONVPOOL_CHANNELS_LAST ? (n * pixels + at) * channels + c : (n * channels + c) * pixels + at;
}

// A sliding window: `out` places of `taps` elements over `in` elements along each axis.
struct Windows {
    const Extent &in, &out, &taps, &step, &begin, &dilation;
};

// Numbers from `begin` to before `end`.
struct Range {
    int64_t begin, end;
};

// The numbers below `count` whose place, `first` and `step` for each, is one of `size` elements.
Range inside(int64_t first, int64_t step, int64_t size, int64_t count) {
    return {first >= 0 ? 0 : ceil_div(-first, step), first >= size ? 0 : std::min(count, (size - 1 - first) / step + 1)};
}

// Calls `body(to, from, count)` for each row of places that has elements under tap `tap`: the sums' place of the first, its
// element, and the number of places.
template <typename Body> void for_each_row(const Windows &w, const Extent &tap, Body &&body) {
    Extent first;  // of the first place's element
    Range places[kRank];
    for (int i = 0; i < kRank; ++i) {
        first[i] = w.begin[i] + tap[i] * w.dilation[i];
        places[i] = inside(first[i], w.step[i], w.in[i], w.out[i]);
    }
    const auto [begin, end] = places[2];
    if (begin >= end) return;
    for (int64_t d = places[0].begin; d < places[0].end; ++d)
        for (int64_t h = places[1].begin; h < places[1].end; ++h) {
            const int64_t z = first[0] + d * w.step[0], y = first[1] + h * w.step[1];
            body((d * w.out[1] + h) * w.out[2] + begin, (z * w.in[1] + y) * w.in[2] + first[2] + begin * w.step[2], end - begin);
        }
}

// Adds the element under tap `tap` to each place's sum.
template <typename Sum> void add_tap(const Windows &w, const Extent &tap, const Sum *from, Sum *sums) {
    for_each_row(w, tap, [&](int64_t to, int64_t at, int64_t count) {
        for (int64_t q = 0; q < count; ++q) sums[to + q] += from[at + q * w.step[2]];
    });
}

// The element under tap `tap` of every place; 0 in the padding.
template <typename Sum> void gather_tap(const Windows &w, const Extent &tap, const Sum *from, Sum *plane) {
    std::fill_n(plane, elements(w.out), Sum{0});
    for_each_row(w, tap, [&](int64_t to, int64_t at, int64_t count) {
        for (int64_t q = 0; q < count; ++q) plane[to + q] = from[at + q * w.step[2]];
    });
}

constexpr int kPlanes = 4;    // that are multiplied at once
constexpr int kOutputs = 16;  // channels of Y that read a gathered plane

// A function compiled for several CPUs, of which the loader takes the machine's.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define CONVPOOL_FOR_EVERY_CPU __attribute__((target_clones("arch=skylake-avx512", "arch=haswell", "default")))
#else
#define CONVPOOL_FOR_EVERY_CPU
#endif

// sums += weights[0] * planes[0] + ..., planes being one behind the other.
#define CONVPOOL_MULTIPLY_PLANES(Sum)                                                                                 \
    CONVPOOL_FOR_EVERY_CPU void multiply_planes(const Sum *weights, const Sum *planes, int64_t count, Sum *sums) {    \
        static_assert(kPlanes == 4, "the terms below");                                                               \
        for (int64_t i = 0; i < count; ++i)                                                                           \
            sums[i] += weights[0] * planes[i] + weights[1] * planes[count + i] + weights[2] * planes[2 * count + i] + \
                       weights[3] * planes[3 * count + i];                                                            \
    }
CONVPOOL_MULTIPLY_PLANES(float)
CONVPOOL_MULTIPLY_PLANES(double)

// Calls `body` with each of some taps of a window along each axis.
template <typename Body> void for_each_tap(const std::array<Range, kRank> &taps, Body &&body) {
    for (int64_t d = taps[0].begin; d < taps[0].end; ++d)
        for (int64_t h = taps[1].begin; h < taps[1].end; ++h)
            for (int64_t w = taps[2].begin; w < taps[2].end; ++w) body(Extent{d, h, w});
}

// The taps that are over an element at any place.  A window may have 2^48 of them, nearly all over padding.
std::array<Range, kRank> taps_inside(const Windows &w) {
    std::array<Range, kRank> taps;
    for (int i = 0; i < kRank; ++i) {
        const int64_t span = (w.out[i] - 1) * w.step[i];  // from the first place to the last
        taps[i] = inside(w.begin[i] + span, w.dilation[i], w.in[i] + span, w.taps[i]);
    }
    return taps;
}

template <typename Sum> Sum activated(Sum value, int32_t activation, float alpha) {
    switch (activation) {
    case CONVPOOL_ACT_NONE: return value;
    case CONVPOOL_ACT_RELU: return value < 0 ? Sum{0} : value;
    case CONVPOOL_ACT_LEAKY_RELU: return value < 0 ? value * alpha : value;
    case CONVPOOL_ACT_TANH: return std::tanh(value);
    case CONVPOOL_ACT_SIGMOID: return 1 / (1 + std::exp(-value));
    case CONVPOOL_ACT_SILU: return value / (1 + std::exp(-value));
    }
    return std::numeric_limits<Sum>::quiet_NaN();  // an operator whose activation is not here shows that it is wrong
}

// One call.  The tasks allocate nothing, as they may not throw.  The output's sizes have been checked: no tensor has more than
// 2^40 elements, so that no product below leaves 64 bits.
template <typename Element> class Call {
    using Sum = typename Element::Sum;

public:
    Call(const Shapes &shapes, const convpool_tensors &tensors)
        : s_(shapes), p_(shapes.p), t_(tensors), x_(p_.n * p_.c * elements(s_.in)), pooled_(p_.n * p_.c * elements(s_.pooled)),
          sums_(p_.n * p_.m * elements(s_.out)), blocks_(ceil_div(p_.m / p_.group, kOutputs)),
          planes_(tasks() * kPlanes * elements(s_.out)), moments_(2 * p_.n * std::min<int64_t>(p_.prologue_groups, p_.c)) {}

    void run(const OrtApi &api, const OrtKernelContext *context) {
        const auto pool = [](void *call, size_t task) { static_cast<Call *>(call)->pool(static_cast<int64_t>(task)); };
        const auto convolve = [](void *call, size_t task) { static_cast<Call *>(call)->convolve(static_cast<int64_t>(task)); };
        const auto normalize = [](void *call, size_t task) { static_cast<Call *>(call)->normalize(static_cast<int64_t>(task)); };
        check(api, api.KernelContext_ParallelFor()(context, normalize, moments_.size() / 2, 0, this));
        check(api, api.KernelContext_ParallelFor()(context, pool, p_.n * p_.c, 0, this));
        check(api, api.KernelContext_ParallelFor()(context, convolve, tasks(), 0, this));
    }

private:
    static Sum read(const void *tensor, int64_t at) { return static_cast<const Element *>(tensor)[at].read(); }

    // Mean and 1 / standard deviation of a group of channels of one image.
    void normalize(int64_t task) {
        const int64_t n = task / p_.prologue_groups, channels = p_.c / p_.prologue_groups, pixels = elements(s_.in);
        const int64_t first = task % p_.prologue_groups * channels;
        const auto sum = [&](auto &&term) {
            Sum total{0};
            for (int64_t c = first; c < first + channels; ++c)
                for (int64_t at = 0; at < pixels; ++at) total += term(read(t_.x, offset(n, c, at, p_.c, pixels, p_.x_layout)));
            return total / static_cast<Sum>(channels * pixels);
        };
        const Sum mean = sum([](Sum x) { return x; }), variance = sum([&](Sum x) { return (x - mean) * (x - mean); });
        moments_[2 * task] = mean;
        moments_[2 * task + 1] = 1 / std::sqrt(variance + static_cast<Sum>(p_.prologue_epsilon));
    }

    // The prologue and the pooling or upsampling of one channel of one image.
    void pool(int64_t task) {
        const int64_t n = task / p_.c, c = task % p_.c, pixels = elements(s_.in), places = elements(s_.pooled);
        const int64_t place = p_.prologue_affine == 2 ? task : c;
        Sum scale = p_.prologue_affine ? read(t_.scale, place) : Sum{1}, mean{0};
        const Sum shift = p_.prologue_affine ? read(t_.shift, place) : Sum{0};
        if (p_.prologue_groups > 0) {
            const int64_t group = n * p_.prologue_groups + c / (p_.c / p_.prologue_groups);
            mean = moments_[2 * group], scale *= moments_[2 * group + 1];
        }
        Sum *const x = x_.data() + task * pixels, *const pooled = pooled_.data() + task * places;
        for (int64_t at = 0; at < pixels; ++at) {
            const Sum value = read(t_.x, offset(n, c, at, p_.c, pixels, p_.x_layout));
            x[at] =
                activated(p_.prologue_affine ? (value - mean) * scale + shift : value, p_.prologue_activation, p_.prologue_alpha);
        }
        if (s_.upsamples()) return upsample(x, pooled);
        const Windows windows{s_.in, s_.pooled, s_.window, s_.window_step, s_.window_begin, s_.window_dilation};
        for_each_tap(taps_inside(windows), [&](const Extent &tap) { add_tap(windows, tap, x, pooled); });
        for (int64_t at = 0; at < places; ++at) pooled[at] /= static_cast<Sum>(elements(s_.window));
    }

    // One channel of one image.
    void upsample(const Sum *x, Sum *upsampled) const {
        const auto &[copies_d, copies_h, copies_w] = s_.copies;
        for (int64_t d = 0; d < s_.pooled[0]; ++d)
            for (int64_t h = 0; h < s_.pooled[1]; ++h) {
                const Sum *const row = x + (d / copies_d * s_.in[1] + h / copies_h) * s_.in[2];
                for (int64_t w = 0; w < s_.pooled[2]; ++w) *upsampled++ = row[w / copies_w];
            }
    }

    int64_t tasks() const { return p_.n * p_.group * blocks_; }

    // kOutputs channels of Y, of one group and one image.
    void convolve(int64_t task) {
        const int64_t block = task % blocks_, group = task / blocks_ % p_.group, n = task / blocks_ / p_.group;
        const int64_t inputs = p_.c / p_.group, outputs = p_.m / p_.group;
        const int64_t begin = group * outputs + block * kOutputs, end = std::min((group + 1) * outputs, begin + kOutputs);
        const int64_t places = elements(s_.pooled), pixels = elements(s_.out), taps = elements(s_.kernel);
        const Windows windows{s_.pooled, s_.out, s_.kernel, s_.step, s_.begin, s_.dilation};
        Sum *const planes = planes_.data() + task * kPlanes * pixels;
        int64_t number = 0;  // of a tap; without channels W has none
        const int64_t any = inputs > 0 ? 1 : 0;
        for_each_tap({Range{0, any * s_.kernel[0]}, {0, s_.kernel[1]}, {0, s_.kernel[2]}}, [&](const Extent &tap) {
            for (int64_t c = 0; c < inputs; c += kPlanes) {
                const int64_t count = std::min<int64_t>(kPlanes, inputs - c);
                for (int64_t i = 0; i < count; ++i)
                    gather_tap(windows, tap, &pooled_[(n * p_.c + group * inputs + c + i) * places], planes + i * pixels);
                if (count < kPlanes) std::fill_n(planes + count * pixels, (kPlanes - count) * pixels, Sum{0});
                for (int64_t m = begin; m < end; ++m) {
                    Sum weights[kPlanes]{};
                    for (int64_t i = 0; i < count; ++i) weights[i] = read(t_.w, (m * taps + number) * inputs + c + i);
                    multiply_planes(weights, planes, pixels, &sums_[(n * p_.m + m) * pixels]);
                }
            }
            ++number;
        });
        for (int64_t m = begin; m < end; ++m) finish(n, m);
    }

    // One channel of Y of one image, of its sums.
    void finish(int64_t n, int64_t m) {
        const int64_t pixels = elements(s_.out);
        const Sum *const sums = &sums_[(n * p_.m + m) * pixels];
        const Sum bias = p_.has_bias ? read(t_.b, m) : Sum{0};
        for (int64_t at = 0; at < pixels; ++at) {
            const int64_t to = offset(n, m, at, p_.m, pixels, p_.y_layout);
            const Sum sum = sums[at] + bias + (p_.has_residual ? read(t_.residual, to) : Sum{0});
            static_cast<Element *>(t_.y)[to].write(activated(sum, p_.activation, p_.alpha));
        }
    }

    const Shapes &s_;
    const convpool_problem &p_;
    const convpool_tensors &t_;
    std::vector<Sum> x_, pooled_, sums_;
    int64_t blocks_;  // of kOutputs channels in a group
    std::vector<Sum> planes_, moments_;
};

}  // namespace

void CpuKernel::compute(OrtKernelContext *context) const {
    const Inputs inputs(api_, context, constants_);
    const Sizes output = node_.output_sizes(inputs.sizes());
    const convpool_problem problem = node_.problem(inputs.sizes(), CONVPOOL_F32, false);
    OrtValue *y = nullptr;
    check(api_, api_.KernelContext_GetOutput()(context, 0, output.data(), output.size(), &y));
    if (std::count(output.begin(), output.end(), 0) > 0) return;
    const convpool_tensors pointers = inputs.pointers(problem, y);
    const Shapes shapes(problem, output, problem.y_layout == CONVPOOL_CHANNELS_LAST ? 1 : 2);
    switch (element_type_) {
    case kFloatType: return Call<Plain<float>>(shapes, pointers).run(api_, context);
    case kDoubleType: return Call<Plain<double>>(shapes, pointers).run(api_, context);
    case kFloat16Type: return Call<Float16>(shapes, pointers).run(api_, context);
    case kBFloat16Type: return Call<BFloat16>(shapes, pointers).run(api_, context);
    }
    throw std::invalid_argument(node_.op().name + ": element type " + std::to_string(element_type_));
}

}  // namespace convpool::onnxruntime

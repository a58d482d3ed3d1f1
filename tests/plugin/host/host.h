// SPDX-License-Identifier: Apache-2.0
// Plays TensorRT to libconvpool.so: a version, a logger, and checks that say what was wrong and go on.
#pragma once

#include <convpool.h>

#include <cstdint>
#include <cstdio>
#include <functional>
#include <string>
#include <vector>

namespace host {

extern int checks, failures;
extern int32_t version_number;  // what getInferLibVersion returns
extern std::string logged;      // everything logged since it was last cleared

inline void check(bool passed, const std::string &what, const char *file, int line) {
    ++checks;
    if (passed) return;
    ++failures;
    std::printf("%s:%d: %s\n", file, line, what.c_str());
}

// What a library on the pretended CUDA runtime tells of it; null elsewhere.
extern int (*pretended_launches)();
extern int64_t (*pretended_bytes)();
extern void (*pretended_forget)();

// The call must fail, and the log must name `word`.
inline void refuses(bool failed, const std::string &word, const char *file, int line) {
    check(failed, "accepted, expected a refusal that names '" + word + "'", file, line);
    check(logged.find(word) != std::string::npos, "message; got '" + logged + "', expected one with '" + word + "'", file, line);
    logged.clear();
}

#define CHECK(condition) ::host::check((condition), #condition, __FILE__, __LINE__)
#define EQUAL(got, expected)                                                                                                     \
    ::host::check((got) == (expected), #got "; got " + std::to_string(got) + ", expected " + std::to_string(expected), __FILE__, \
                  __LINE__)
#define REFUSES(failed, word) ((logged.clear()), ::host::refuses((failed), (word), __FILE__, __LINE__))

// What a fused variant does around pooling and convolution; ConvAvgPool does none of it.  affine: 1 by channel, 2 by image too, 3
// normalized.
// before, after: convpool_activation.
struct Around {
    int32_t affine = 0, before = 0;
    float before_alpha = 0.f;
    int32_t residual = 0, after = 0;
    float after_alpha = 0.f;
    int32_t groups = 1;  // with affine 3, as the next
    float epsilon = 1e-5f;
};

// A layer's attributes, as the ONNX parser would pass them.
struct Attributes {
    std::vector<int32_t> pool_kernel{2, 2}, pool_strides{1, 1}, pool_pads{1, 1, 1, 1}, pool_dilations{1, 1};
    std::vector<int32_t> kernel{3, 3}, strides{2, 2}, pads{0, 0, 0, 0}, dilations{1, 1}, group{1};
    std::vector<int32_t> constant_weights{};  // none: the field is left out, as of the next
    std::vector<int32_t> accumulation{};      // convpool_accumulation
    std::vector<int32_t> upsample{};          // none: it pools, and has no such field; else it has none of the pooling's
    Around around{};

    const char *core() const { return upsample.empty() ? "ConvAvgPool" : "UpsampleConv"; }
    bool plain() const { return !around.affine && !around.before && !around.residual && !around.after; }
    std::string op_type() const;
    int parts_apart(const Attributes &other) const {
        const Around &there = other.around;
        return (upsample.empty() != other.upsample.empty()) + (around.affine != there.affine) + (around.before != there.before) +
               (around.residual != there.residual) + (around.after != there.after);
    }
    // X, W, B and what the operator has beside them: scale and shift, of as many channels, and R, as Y.
    int input_count() const { return 3 + 2 * (around.affine != 0) + around.residual; }
    template <typename Desc> std::vector<Desc> inputs(Desc x, Desc w, Desc b, Desc scale, Desc y) const {
        std::vector<Desc> all{x, w, b};
        if (around.affine) all.insert(all.end(), 2, scale);
        if (around.residual) all.push_back(y);
        return all;
    }
};

// The attributes with other surroundings.
Attributes with(const Around &around, Attributes a = {});
// The attributes with box means that may be summed in the 16-bit type.
Attributes packed(Attributes a = {});
// The attributes with an upsampling by 2 in the pooling's place, and a convolution that keeps the size.
Attributes upsampled(Attributes a = {});
// One layer of every operator, ConvAvgPool first.
std::vector<Attributes> every_operator();
// A handful that together have every part.
std::vector<Attributes> some_variants();

// The size that the operator gives, computed apart from the library: two windows, one after the other, or copies and a window.
inline int64_t out_size(const Attributes &a, int axis, int64_t size) {
    const int rank = static_cast<int>(a.kernel.size());
    auto places = [&](int64_t in, int pads, int kernel, int dilation, int stride) {
        int64_t count = 0;
        for (int64_t start = 0; start + int64_t{dilation} * (kernel - 1) < in + pads; start += stride) ++count;
        return count;
    };
    if (!a.upsample.empty())
        return places(size * a.upsample[axis], a.pads[axis] + a.pads[axis + rank], a.kernel[axis], a.dilations[axis],
                      a.strides[axis]);
    const int64_t pooled = places(size, a.pool_pads[axis] + a.pool_pads[axis + rank], a.pool_kernel[axis], a.pool_dilations[axis],
                                  a.pool_strides[axis]);
    return places(pooled, a.pads[axis] + a.pads[axis + rank], a.kernel[axis], a.dilations[axis], a.strides[axis]);
}

// The problem that the adapters should describe to the C API.
convpool_problem problem_of(const Attributes &a, int64_t n, int64_t c, int64_t m, std::vector<int64_t> spatial, int dtype,
                            int x_layout, int y_layout, bool bias);

// Opens a plugin library as TensorRT does, on device 0 of a pretended CUDA runtime if it has one; null, with a message, if
// it is none.
void *open_library(const char *path);

// Runs `body`, which says whether it came through, without any memory, then with one allocation, and so on until it does.
void starve(const std::function<bool()> &body);

// What `body` says of itself when there is no memory to be had.
bool without_memory(const std::function<bool()> &body);

void drive_v2(void *library, bool has_device);
void drive_v3(void *library, bool has_device);
// Whether the creators that they found still answer.
bool creators_answer_v2();
bool creators_answer_v3();

}  // namespace host

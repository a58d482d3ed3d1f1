// SPDX-License-Identifier: Apache-2.0
// Smoke test of the kernels, without Python: every tactic of this GPU on some small problems, through convpool.h.
//
//   convpool_smoke                          runs them; 0 if all are right, 77 without a GPU (1 where REQUIRE_GPU=1)
//   convpool_smoke --plan CC SHARED_BYTES   says what it would run on such a GPU, without one
//
// Tensors hold small integers, of which every sum is exact: outputs are compared bit for bit with the definition's.

#include <convpool.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

using Values = std::vector<double>;

// AveragePool(window) behind Conv(kernel, pads), as it is rewritten: pooling first.  Square windows, stride 1.
// Without a pooling, window 1, the map may be upsampled instead: each element of it is repeated `up` times on both axes.
struct Problem {
    const char *name;
    int n, c, m, height, width, kernel, window, pads;
    bool epilogue;  // bias, residual and ReLU
    bool prologue;  // scale, shift and ReLU
    int up = 1;

    // A pointwise convolution keeps the pooling's stride where it is; others take it over.
    bool pointwise() const { return kernel == 1; }
    int pool_stride() const { return pointwise() ? window : 1; }
    int conv_stride() const { return pointwise() ? 1 : window; }
    int pool_pad() const { return pads < window - 1 ? pads : window - 1; }
    int conv_pad() const { return pads - pool_pad(); }
    int pooled(int size) const { return (up * size + 2 * pool_pad() - window) / pool_stride() + 1; }
    int out(int size) const { return (pooled(size) + 2 * conv_pad() - kernel) / conv_stride() + 1; }
};

// x [N,C,H,W], w [M,kernel,kernel,C], residual [N,M,out,out], bias [M], scale and shift [C].
struct Tensors {
    Values x, w, residual, bias, scale, shift;
};

Values integers(size_t count, int most, int factor, std::mt19937 &random) {
    Values values(count);
    for (double &value : values) value = (int(random() % (2 * most + 1)) - most) * factor;
    return values;
}

// f(x), or x without a prologue.
Values prologue(const Problem &p, const Tensors &t) {
    Values x = t.x;
    const size_t image = size_t(p.height) * p.width;
    for (size_t i = 0; p.prologue && i < x.size(); ++i) {
        const size_t c = i / image % p.c;
        x[i] = std::max(0.0, t.scale[c] * x[i] + t.shift[c]);
    }
    return x;
}

// Means over windows, whose pads count as zeros, of the map or the upsampled map.
Values average_pool(const Problem &p, const Values &x) {
    const int rows = p.pooled(p.height), columns = p.pooled(p.width);
    Values means(size_t(p.n) * p.c * rows * columns);
    for (size_t at = 0; at < means.size(); ++at) {
        const int row = int(at / columns % rows), column = int(at % columns);
        const size_t image = at / (size_t(rows) * columns) * p.height * p.width;
        double sum = 0;
        for (int i = 0; i < p.window; ++i)
            for (int j = 0; j < p.window; ++j) {
                const int h = row * p.pool_stride() + i - p.pool_pad(), w = column * p.pool_stride() + j - p.pool_pad();
                if (h < 0 || h >= p.up * p.height || w < 0 || w >= p.up * p.width) continue;
                sum += x[image + size_t(h / p.up) * p.width + w / p.up];
            }
        means[at] = sum / (p.window * p.window);
    }
    return means;
}

// One element of Conv: of image n, output channel m, at (row, column).
double convolve(const Problem &p, const Values &pooled, const Values &weights, int n, int m, int row, int column) {
    const int height = p.pooled(p.height), width = p.pooled(p.width);
    double sum = 0;
    for (int i = 0; i < p.kernel; ++i)
        for (int j = 0; j < p.kernel; ++j) {
            const int h = row * p.conv_stride() + i - p.conv_pad(), w = column * p.conv_stride() + j - p.conv_pad();
            if (h < 0 || h >= height || w < 0 || w >= width) continue;
            const double *const tap = &weights[size_t((m * p.kernel + i) * p.kernel + j) * p.c];
            for (int c = 0; c < p.c; ++c) sum += tap[c] * pooled[(size_t(n * p.c + c) * height + h) * width + w];
        }
    return sum;
}

// Whole numbers of which box means are whole too, or, for tactics that fold the mean into the weights, those weights.
Tensors make_tensors(const Problem &p, bool filter_fused) {
    std::mt19937 random(1);
    const int size = p.window * p.window, x_factor = filter_fused ? 1 : size, w_factor = filter_fused ? size : 1;
    const size_t out = size_t(p.out(p.height)) * p.out(p.width);
    Tensors t;
    t.x = integers(size_t(p.n) * p.c * p.height * p.width, 2, x_factor, random);
    t.w = integers(size_t(p.m) * p.kernel * p.kernel * p.c, 2, w_factor, random);
    t.residual = integers(size_t(p.n) * p.m * out, 2, 1, random);
    t.bias = integers(p.m, 2, 1, random);
    t.scale = integers(p.c, 1, 1, random);
    t.shift = integers(p.c, 1, x_factor, random);
    return t;
}

// Y [N,M,out,out].
Values reference(const Problem &p, const Tensors &t) {
    const Values pooled = average_pool(p, prologue(p, t));
    const int rows = p.out(p.height), columns = p.out(p.width);
    Values y(size_t(p.n) * p.m * rows * columns);
    size_t at = 0;
    for (int n = 0; n < p.n; ++n)
        for (int m = 0; m < p.m; ++m)
            for (int row = 0; row < rows; ++row)
                for (int column = 0; column < columns; ++column, ++at) {
                    y[at] = convolve(p, pooled, t.w, n, m, row, column);
                    if (p.epilogue) y[at] = std::max(0.0, y[at] + t.bias[m] + t.residual[at]);
                }
    return y;
}

// [N,C,...] as [N,...,C].
Values channels_last(const Values &values, int n, int channels) {
    const size_t image = values.size() / n / channels;
    Values moved(values.size());
    for (size_t at = 0; at < values.size(); ++at) {
        const size_t pixel = at % image, c = at / image % channels, batch = at / image / channels;
        moved[(batch * image + pixel) * channels + c] = values[at];
    }
    return moved;
}

constexpr int kSkipped = 77;

// name, n, c, m, height, width, kernel, window, pads, bias and residual and ReLU, prologue.  The pads are the convolution's
// before pooling was moved in front of it; they go to the pooling.  Last, times that the map is upsampled.
const Problem kProblems[] = {
    {"3x3", 2, 40, 72, 9, 9, 3, 2, 1, true, false},
    {"3x3, many channels", 1, 520, 64, 8, 8, 3, 2, 1, true, false},
    {"3x3, long rows", 2, 40, 72, 10, 72, 3, 2, 1, true, false},
    {"3x3, prologue", 2, 72, 40, 19, 18, 3, 2, 1, false, true},
    {"3x3, no pooling", 2, 72, 40, 9, 12, 3, 1, 1, false, false},
    {"3x3, windows of 3x3", 2, 40, 72, 14, 12, 3, 3, 1, true, false},
    {"5x5", 2, 40, 72, 13, 12, 5, 2, 2, true, false},
    {"5x5, windows of 3x3", 2, 40, 72, 17, 16, 5, 3, 2, false, false},
    {"1x1", 2, 24, 24, 8, 8, 1, 2, 0, true, true},
    {"1x1, many channels", 1, 520, 72, 8, 8, 1, 2, 0, false, false},
    {"3 channels", 2, 3, 72, 17, 19, 3, 1, 1, true, false},
    {"3 channels, 5x5", 1, 3, 17, 19, 21, 5, 3, 2, false, false},
    {"3 channels, 1x1", 2, 3, 72, 17, 19, 1, 2, 0, true, true},
    {"3x3, upsampled", 2, 40, 72, 9, 9, 3, 1, 1, true, false, 2},
    {"3x3, upsampled, many channels", 1, 520, 64, 8, 8, 3, 1, 1, true, false, 2},
    {"3x3, upsampled, prologue", 2, 72, 40, 9, 10, 3, 1, 1, false, true, 2},
    {"5x5, upsampled 3 times", 2, 40, 72, 7, 6, 5, 1, 2, false, false, 3},
};

[[noreturn]] void fail(const std::string &what, const std::string &why) { throw std::runtime_error(what + ": " + why); }

void must(cudaError_t error, const char *what) {
    if (error != cudaSuccess) fail(what, cudaGetErrorString(error));
}

void must(convpool_status status, const char *what) {
    if (status != CONVPOOL_OK) fail(what, convpool_last_error());
}

// ---- what is run ----

convpool_problem described(const Problem &p, int32_t dtype, int32_t layout, bool tf32, bool packed) {
    convpool_problem d{};
    d.struct_size = sizeof d;
    d.rank = 2;
    d.x_dtype = d.w_dtype = d.y_dtype = dtype;
    d.x_layout = d.y_layout = layout;
    d.allow_tf32 = tf32;
    d.accumulation = packed ? CONVPOOL_ACCUMULATE_PACKED : CONVPOOL_ACCUMULATE_DEFAULT;
    d.n = p.n, d.c = p.c, d.m = p.m;
    d.spatial[0] = p.height, d.spatial[1] = p.width;
    for (int i = 0; i < 2; ++i) {
        d.pool_kernel[i] = p.window, d.kernel[i] = p.kernel;
        d.pool_strides[i] = p.pool_stride(), d.strides[i] = p.conv_stride();
        d.pool_dilations[i] = d.dilations[i] = 1;
        d.upsample[i] = p.up;
        d.pool_pads[i] = d.pool_pads[i + 2] = p.pool_pad();
        d.pads[i] = d.pads[i + 2] = p.conv_pad();
    }
    d.group = 1;
    d.has_bias = d.has_residual = p.epilogue;
    d.activation = p.epilogue ? CONVPOOL_ACT_RELU : CONVPOOL_ACT_NONE;
    d.prologue_affine = p.prologue;
    d.prologue_activation = p.prologue ? CONVPOOL_ACT_RELU : CONVPOOL_ACT_NONE;
    return d;
}

std::vector<convpool_tactic_info> all_tactics() {
    std::vector<convpool_tactic_info> tactics(convpool_tactics(nullptr, 0));
    tactics[0].struct_size = sizeof tactics[0];
    convpool_tactics(tactics.data(), int32_t(tactics.size()));
    return tactics;
}

// One run: a problem in one type and layout.
struct Run {
    const Problem *problem;
    int32_t dtype, layout;
    bool tf32, packed;

    convpool_problem describe() const { return described(*problem, dtype, layout, tf32, packed); }
    std::string text() const {
        static const char *const kTypes[] = {"fp16", "bf16", "fp32"};
        return std::string(problem->name) + ", " + kTypes[dtype] + (layout == CONVPOOL_CHANNELS_LAST ? ", NHWC" : ", NCHW");
    }
};

// The runs that a tactic supports on a device; cc 0: the current one.
std::vector<Run> runs_of(const convpool_tactic_info &tactic, int32_t cc, int32_t shared_bytes) {
    std::vector<Run> runs;
    for (const Problem &problem : kProblems)
        for (int32_t dtype : {CONVPOOL_F16, CONVPOOL_BF16, CONVPOOL_F32})
            for (int32_t layout : {CONVPOOL_CHANNELS_FIRST, CONVPOOL_CHANNELS_LAST}) {
                const Run run{&problem, dtype, layout, tactic.tf32 != 0, tactic.packed != 0};
                const convpool_problem p = run.describe();
                if (convpool_supports(&p, tactic.id, cc, shared_bytes) == CONVPOOL_OK) runs.push_back(run);
            }
    return runs;
}

// ---- tensors on the GPU ----

// The elements of a type that stand for whole numbers, and back.
template <class Element> void encode(const Values &values, unsigned char *bytes) {
    for (size_t i = 0; i < values.size(); ++i) {
        const Element element(static_cast<float>(values[i]));
        std::memcpy(bytes + i * sizeof element, &element, sizeof element);
    }
}
template <class Element> float decode(const unsigned char *bytes) {
    Element element;
    std::memcpy(&element, bytes, sizeof element);
    return static_cast<float>(element);
}

size_t bytes_of(int32_t dtype) { return dtype == CONVPOOL_F32 ? 4 : 2; }

std::vector<unsigned char> encode(const Values &values, int32_t dtype) {
    std::vector<unsigned char> bytes(values.size() * bytes_of(dtype));
    if (dtype == CONVPOOL_F32) encode<float>(values, bytes.data());
    else if (dtype == CONVPOOL_F16) encode<__half>(values, bytes.data());
    else encode<__nv_bfloat16>(values, bytes.data());
    return bytes;
}

float decode(const unsigned char *bytes, int32_t dtype) {
    return dtype == CONVPOOL_F32   ? decode<float>(bytes)
           : dtype == CONVPOOL_F16 ? decode<__half>(bytes)
                                   : decode<__nv_bfloat16>(bytes);
}

class DeviceBytes {
public:
    explicit DeviceBytes(size_t count) {
        if (count != 0) must(cudaMalloc(&data_, count), "cudaMalloc");
        must(cudaMemset(data_, 0xFF, count), "cudaMemset");  // NaN in every type
    }
    explicit DeviceBytes(const std::vector<unsigned char> &bytes) : DeviceBytes(bytes.size()) {
        must(cudaMemcpy(data_, bytes.data(), bytes.size(), cudaMemcpyHostToDevice), "cudaMemcpy");
    }
    ~DeviceBytes() { cudaFree(data_); }
    DeviceBytes(const DeviceBytes &) = delete;
    DeviceBytes &operator=(const DeviceBytes &) = delete;
    void *data() const { return data_; }

private:
    void *data_ = nullptr;
};

// "" if the tactic's output is the reference's, bit for bit, else where it is not.
std::string check(const convpool_tactic_info &tactic, const Run &run) {
    const Problem &p = *run.problem;
    const bool last = run.layout == CONVPOOL_CHANNELS_LAST;
    const bool filter_fused = std::strcmp(tactic.family, "filter_fused") == 0;
    const Tensors t = make_tensors(p, filter_fused);
    auto placed = [&](const Values &values, int channels) {
        return encode(last ? channels_last(values, p.n, channels) : values, run.dtype);
    };
    const DeviceBytes x(placed(t.x, p.c)), w(encode(t.w, run.dtype)), b(encode(t.bias, run.dtype));
    const DeviceBytes r(placed(t.residual, p.m)), scale(encode(t.scale, run.dtype));
    const DeviceBytes shift(encode(t.shift, run.dtype));
    const std::vector<unsigned char> expected = placed(reference(p, t), p.m);
    const DeviceBytes y(expected.size());

    const convpool_problem problem = run.describe();
    size_t workspace_bytes = 0;
    must(convpool_workspace_bytes(&problem, tactic.id, &workspace_bytes), "convpool_workspace_bytes");
    const DeviceBytes workspace(workspace_bytes);
    convpool_tensors tensors{};
    tensors.struct_size = sizeof tensors;
    tensors.x = x.data(), tensors.w = w.data(), tensors.b = b.data(), tensors.residual = r.data(), tensors.y = y.data();
    tensors.scale = scale.data(), tensors.shift = shift.data();
    tensors.workspace = workspace.data(), tensors.workspace_bytes = workspace_bytes;
    must(convpool_launch(&problem, tactic.id, &tensors, nullptr), "convpool_launch");
    std::vector<unsigned char> got(expected.size());
    must(cudaMemcpy(got.data(), y.data(), got.size(), cudaMemcpyDeviceToHost), "kernel");
    const size_t item = bytes_of(run.dtype);
    for (size_t i = 0; i < got.size(); i += item)
        if (!(decode(&got[i], run.dtype) == decode(&expected[i], run.dtype)))
            return "element " + std::to_string(i / item) + " of Y; got " + std::to_string(decode(&got[i], run.dtype)) +
                   ", expected " + std::to_string(decode(&expected[i], run.dtype));
    return "";
}

// ---- the two commands ----

// A GPU that every tactic runs on needs a problem for each: 1 if one is missing here.
int plan(int32_t cc, int32_t shared_bytes) {
    int missing = 0;
    for (const convpool_tactic_info &tactic : all_tactics()) {
        const size_t count = runs_of(tactic, cc, shared_bytes).size();
        std::printf("%s: %zu runs\n", tactic.name, count);
        missing += count == 0;
    }
    std::printf("%d tactics without a run\n", missing);
    return missing == 0 ? 0 : 1;
}

int run_all() {
    int32_t failed = 0, tried = 0;
    for (const convpool_tactic_info &tactic : all_tactics()) {
        const std::vector<Run> runs = runs_of(tactic, 0, 0);
        std::string wrong;
        for (size_t i = 0; i < runs.size() && wrong.empty(); ++i) {
            const std::string why = check(tactic, runs[i]);
            if (!why.empty()) wrong = runs[i].text() + ": " + why;
        }
        if (!wrong.empty()) std::printf("FAILED  %s: %s\n", tactic.name, wrong.c_str());
        else if (runs.empty()) std::printf("skipped %s\n",
                                           convpool_last_error());  // begins with the tactic's name
        else std::printf("ok      %s: %zu runs\n", tactic.name, runs.size());
        failed += !wrong.empty(), tried += !runs.empty();
    }
    std::printf("%d tactics, %d failed\n", tried, failed);
    return failed == 0 && tried > 0 ? 0 : 1;
}

}  // namespace

int main(int count, char **arguments) {
    try {
        if (count == 4 && std::strcmp(arguments[1], "--plan") == 0) return plan(std::atoi(arguments[2]), std::atoi(arguments[3]));
        if (count != 1) fail("arguments", "got others, expected none or --plan CC SHARED_BYTES");
        int devices = 0;
        const cudaError_t error = cudaGetDeviceCount(&devices);
        if (error != cudaSuccess || devices == 0) {
            std::printf("no GPU: %s\n", error != cudaSuccess ? cudaGetErrorString(error) : "none is visible");
            const char *const required = std::getenv("REQUIRE_GPU");
            return required != nullptr && std::strcmp(required, "1") == 0 ? 1 : kSkipped;
        }
        return run_all();
    } catch (const std::exception &error) {
        std::printf("FAILED  %s\n", error.what());
        return 1;
    }
}

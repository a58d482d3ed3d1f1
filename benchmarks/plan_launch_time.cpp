// SPDX-License-Identifier: Apache-2.0
// Host time of convpool_plan_launch, against launches of the same kernels by the driver.
//
//   g++ -O2 -std=c++17 -Iplugin/include -I/usr/local/cuda/include benchmarks/plan_launch_time.cpp -ldl -o plan_launch_time
//   ./plan_launch_time [--layer N,C,M,H,W] [--rounds 200] LIBRARY...
//
// Plans a half-precision layer of 3x3 convolution and 2x2 pooling, channels last, in each libconvpool.so.  One launch, captured
// into a graph, tells the kernels and their arguments.  Then, library after library and round after round, 50 launches of the
// plan and 50 such launches are queued on an idle stream; times are medians of the rounds, in microseconds of one launch of the
// plan.  One JSON object a library.  Needs a GPU; links no CUDA library.
#include "convpool.h"
#include "host_timing.h"

#include <cstdio>
#include <cstdlib>
#include <memory>

namespace {

using namespace host_timing;

// The functions of one libconvpool.so.
class Library {
public:
    explicit Library(const char *path) : library_(dlopen(path, RTLD_NOW | RTLD_LOCAL)) {
        if (library_ == nullptr) throw std::runtime_error(dlerror());
        if (function<decltype(&convpool_abi_version)>("convpool_abi_version")() != CONVPOOL_ABI_VERSION)
            throw std::runtime_error(std::string(path) + ": another version of the interface; expected " +
                                     std::to_string(CONVPOOL_ABI_VERSION));
        create = function<decltype(create)>("convpool_plan_create");
        launch = function<decltype(launch)>("convpool_plan_launch");
        info = function<decltype(info)>("convpool_plan_info");
        destroy = function<decltype(destroy)>("convpool_plan_destroy");
        last_error_ = function<decltype(last_error_)>("convpool_last_error");
    }

    void check(convpool_status status) const {
        if (status != CONVPOOL_OK) throw std::runtime_error(last_error_());
    }

    decltype(&convpool_plan_create) create;
    decltype(&convpool_plan_launch) launch;
    decltype(&convpool_plan_info) info;
    decltype(&convpool_plan_destroy) destroy;

private:
    template <typename Function> Function function(const char *name) const {
        void *const found = dlsym(library_, name);
        if (found == nullptr) throw std::runtime_error(std::string(name) + ": not in the library; expected a libconvpool.so");
        return reinterpret_cast<Function>(found);
    }

    void *library_;
    decltype(&convpool_last_error) last_error_;
};

// Conv of padding 1, then a pooling of stride 2: the pooled input is convolved with stride 2.
convpool_problem problem_of(const Shape &s) {
    convpool_problem p{};
    p.struct_size = sizeof p;
    p.rank = 2;
    p.x_dtype = p.w_dtype = p.y_dtype = CONVPOOL_F16;
    p.x_layout = p.y_layout = CONVPOOL_CHANNELS_LAST;
    p.n = s.n;
    p.c = s.c;
    p.m = s.m;
    p.group = 1;
    p.has_bias = 1;
    for (int i = 0; i < 2; ++i) {
        p.spatial[i] = i == 0 ? s.h : s.w;
        p.pool_kernel[i] = p.strides[i] = 2;
        p.pool_strides[i] = p.pool_dilations[i] = p.dilations[i] = 1;
        p.kernel[i] = 3;
    }
    for (int i = 0; i < 4; ++i) p.pool_pads[i] = 1;
    return p;
}

// A plan with its tensors.
class Planned {
public:
    Planned(const char *path, const Shape &s, CUstream stream) : path_(path), library_(path), stream_(stream) {
        const convpool_problem problem = problem_of(s);
        library_.check(library_.create(&problem, 0, SIZE_MAX, 0, &plan_));
        properties_.struct_size = sizeof properties_;
        library_.check(library_.info(plan_, &properties_));
        const size_t n = s.n, c = s.c, m = s.m, pixels = static_cast<size_t>(s.h) * s.w;
        tensors_.struct_size = sizeof tensors_;
        tensors_.x = memory(2 * n * c * pixels);
        tensors_.w = memory(2 * m * 9 * c);
        tensors_.b = memory(2 * m);
        tensors_.y = memory(2 * n * m * properties_.out_spatial[0] * properties_.out_spatial[1]);
        tensors_.workspace_bytes = properties_.workspace_bytes;
        tensors_.workspace = memory(tensors_.workspace_bytes);
        call();
        kernels = std::make_unique<Kernels>(stream, [&] { call(); });
    }
    Planned(const Planned &) = delete;
    ~Planned() { library_.destroy(plan_); }

    void call() { library_.check(library_.launch(plan_, &tensors_, stream_)); }

    void print(const Shape &s) const {
        std::printf("{\"library\": \"%s\", \"layer\": [%d, %d, %d, %d, %d], \"tactic\": \"%s\", ", path_, s.n, s.c, s.m, s.h, s.w,
                    properties_.name);
        print_times(*this, "plan_launch_us");
    }

    std::unique_ptr<Kernels> kernels;
    std::vector<double> call_us, bare_us;

private:
    static void *memory(size_t bytes) { return reinterpret_cast<void *>(allocate(bytes)); }

    const char *path_;
    Library library_;
    CUstream stream_;
    convpool_plan *plan_ = nullptr;
    convpool_plan_properties properties_{};
    convpool_tensors tensors_{};
};

}  // namespace

int main(int count, char **arguments) { return time_libraries<Planned>("plan_launch_time", count, arguments); }

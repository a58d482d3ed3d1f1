// SPDX-License-Identifier: Apache-2.0
// A GPU by the driver's library, which is looked up when asked for: the host program starts without one.
#pragma once

#include "interface.h"

#include <dlfcn.h>

#include <stdexcept>

struct CUstream_st;

namespace host {

class Gpu {
public:
    Gpu() : driver_(dlopen("libcuda.so.1", RTLD_NOW)) {
        if (driver_ == nullptr) throw std::runtime_error("no libcuda.so.1");
        int device = 0;
        void *context = nullptr;
        call<unsigned>("cuInit", 0u);
        call<int *, int>("cuDeviceGet", &device, 0);
        call<void **, int>("cuDevicePrimaryCtxRetain", &context, device);
        call<void *>("cuCtxSetCurrent", context);
        call<CUstream_st **, unsigned>("cuStreamCreate", &stream, 1u);
    }

    void *allocate(size_t bytes) {
        unsigned long long address = 0;
        call<unsigned long long *, size_t>("cuMemAlloc_v2", &address, bytes == 0 ? 1 : bytes);
        return reinterpret_cast<void *>(address);
    }
    void upload(void *to, const std::vector<uint16_t> &values) {
        synchronize();
        call<unsigned long long, const void *, size_t>("cuMemcpyHtoD_v2", address(to), values.data(), 2 * values.size());
        call<>("cuCtxSynchronize");  // the copy may still be on its way, and the stream does not wait for it
    }
    std::vector<uint16_t> download(const void *from, size_t count) {
        std::vector<uint16_t> values(count);
        synchronize();
        call<void *, unsigned long long, size_t>("cuMemcpyDtoH_v2", values.data(), address(from), 2 * count);
        return values;
    }
    void synchronize() { call<CUstream_st *>("cuStreamSynchronize", stream); }

    // What `body` queues on the stream, as a graph.
    template <typename Body> void *capture(Body &&body) {
        void *graph = nullptr, *executable = nullptr;
        call<CUstream_st *, int>("cuStreamBeginCapture_v2", stream, 0);  // strict: TensorRT's users may ask for it
        body();
        call<CUstream_st *, void **>("cuStreamEndCapture", stream, &graph);
        call<void **, void *, unsigned long long>("cuGraphInstantiateWithFlags", &executable, graph, 0ull);
        return executable;
    }
    void launch(void *graph) { call<void *, CUstream_st *>("cuGraphLaunch", graph, stream); }

    CUstream_st *stream = nullptr;

private:
    static unsigned long long address(const void *pointer) { return reinterpret_cast<unsigned long long>(pointer); }

    template <typename... Arguments> void call(const char *name, Arguments... arguments) {
        auto function = reinterpret_cast<int (*)(Arguments...)>(dlsym(driver_, name));
        const int error = function == nullptr ? -1 : function(arguments...);
        if (error != 0) throw std::runtime_error(std::string(name) + ": error " + std::to_string(error));
    }

    void *driver_;
};

// One execution context's plugin: told a batch size, it runs on its inputs, Y and a workspace; false if that failed.
struct Context {
    std::function<void(int64_t)> shape;
    std::function<bool(const void *const *, void *, void *)> run;
};

// Runs contexts that `make` makes with and without constant_weights, outside graphs and inside, in `granted` bytes of
// workspace, and compares bit for bit with convpool_launch of `tactic` of a problem.  Returns whether the context kept
// weights.
bool check_weight_cache(Gpu &gpu, const convpool_problem &largest, const std::function<Context(bool)> &make,
                        const std::function<int32_t(const convpool_problem &)> &tactic, size_t granted);

// A context that `make` makes of a layer whose batch is open, up to that of `largest`.
template <class T>
Context gpu_context(Gpu &gpu, const Attributes &a, const convpool_problem &largest, int32_t tactic,
                    Owner<T> (*make)(const Attributes &, const typename T::Dynamic *, const typename T::Dynamic &, int32_t)) {
    const int64_t c = largest.c, m = largest.m, h = largest.spatial[0], w = largest.spatial[1], k = a.kernel[0];
    const int64_t oh = out_size(a, 0, h), ow = out_size(a, 1, w);
    const auto type = T::DataType::kHALF;
    const auto linear = T::TensorFormat::kLINEAR;
    const auto format = largest.x_layout == CONVPOOL_CHANNELS_LAST ? T::TensorFormat::kHWC8 : linear;
    const auto described_out = dynamic<T>({1, m, oh, ow}, {largest.n, m, oh, ow}, type, format);
    const auto described =
        a.inputs(dynamic<T>({1, c, h, w}, {largest.n, c, h, w}, type, format), dynamic<T>({m, k, k, c}, type, linear),
                 dynamic<T>({m}, type, linear), dynamic<T>({c}, type, linear), described_out);
    struct Now {
        std::vector<typename T::Desc> in;
        typename T::Desc out;
    };
    auto now = std::make_shared<Now>();
    std::shared_ptr<typename T::Plugin> plugin = make(a, described.data(), described_out, tactic);
    Context context;
    context.shape = [=](int64_t n) {
        now->out = fixed<T>({n, m, oh, ow}, type, format);
        now->in = a.inputs(fixed<T>({n, c, h, w}, type, format), fixed<T>({m, k, k, c}, type, linear),
                           fixed<T>({m}, type, linear), fixed<T>({c}, type, linear), now->out);
        CHECK(T::shape_change(*plugin, now->in.data(), a.input_count(), now->out));
    };
    context.run = [=, stream = gpu.stream](const void *const *inputs, void *output, void *workspace) {
        return T::enqueue(*plugin, now->in.data(), now->out, inputs, &output, workspace, stream);
    };
    return context;
}

bool run_v2(void *library, Gpu &gpu);
bool run_v3(void *library, Gpu &gpu);

}  // namespace host

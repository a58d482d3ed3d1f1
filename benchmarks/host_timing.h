// SPDX-License-Identifier: Apache-2.0
// What the programs that measure host times share: CUDA's driver by name, launches of bare kernels, medians and options.
#pragma once

#include <cuda.h>
#include <dlfcn.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace host_timing {

inline void *driver_function(const char *name) {
    static void *const library = dlopen("libcuda.so.1", RTLD_NOW);
    void *const function = library == nullptr ? nullptr : dlsym(library, name);
    if (function == nullptr) throw std::runtime_error(std::string("libcuda.so.1: no ") + name + "; expected an NVIDIA driver");
    return function;
}

#define QUOTED(name) #name
#define NAME(name) QUOTED(name)
// A call of the driver; cuda.h's macros give the function's version.
#define DRIVER(function, ...)                                                                               \
    do {                                                                                                    \
        static const auto pointer = reinterpret_cast<decltype(&function)>(driver_function(NAME(function))); \
        if (const CUresult error = pointer(__VA_ARGS__); error != CUDA_SUCCESS)                             \
            throw std::runtime_error(NAME(function) ": error " + std::to_string(error));                    \
    } while (false)

// A stream of the first device, whose primary context is current.
inline CUstream open_device() {
    CUdevice device = 0;
    CUcontext context = nullptr;
    CUstream stream = nullptr;
    DRIVER(cuInit, 0);
    DRIVER(cuDeviceGet, &device, 0);
    DRIVER(cuDevicePrimaryCtxRetain, &context, device);
    DRIVER(cuCtxSetCurrent, context);
    DRIVER(cuStreamCreate, &stream, CU_STREAM_NON_BLOCKING);
    return stream;
}

inline CUdeviceptr allocate(size_t bytes) {
    CUdeviceptr memory = 0;
    DRIVER(cuMemAlloc, &memory, std::max<size_t>(bytes, 1));
    DRIVER(cuMemsetD8, memory, 0, std::max<size_t>(bytes, 1));
    return memory;
}

// The kernels that a body launches into the stream, with their arguments, which the graph keeps.
class Kernels {
public:
    template <typename Body> Kernels(CUstream stream, Body &&body) : stream_(stream) {
        DRIVER(cuStreamBeginCapture, stream, CU_STREAM_CAPTURE_MODE_RELAXED);
        body();
        CUgraph graph = nullptr;
        DRIVER(cuStreamEndCapture, stream, &graph);
        size_t count = 0;
        DRIVER(cuGraphGetNodes, graph, nullptr, &count);
        std::vector<CUgraphNode> nodes(count);
        DRIVER(cuGraphGetNodes, graph, nodes.data(), &count);
        for (CUgraphNode node : nodes) {
            Kernel kernel{};
            DRIVER(cuGraphKernelNodeGetParams, node, &kernel.params);
            CUlaunchAttributeValue cluster{};
            DRIVER(cuGraphKernelNodeGetAttribute, node, CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, &cluster);
            kernel.attributes[0].id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
            kernel.attributes[0].value.programmaticStreamSerializationAllowed = 1;
            kernel.attributes[1].id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
            kernel.attributes[1].value = cluster;
            kernel.attribute_count = cluster.clusterDim.x > 0 ? 2 : 1;
            kernels_.push_back(kernel);
        }
    }

    void launch() {
        for (Kernel &kernel : kernels_) {
            const CUDA_KERNEL_NODE_PARAMS &p = kernel.params;
            const CUlaunchConfig config{p.gridDimX,  p.gridDimY,       p.gridDimZ, p.blockDimX,       p.blockDimY,
                                        p.blockDimZ, p.sharedMemBytes, stream_,    kernel.attributes, kernel.attribute_count};
            const CUfunction function = p.func != nullptr ? p.func : reinterpret_cast<CUfunction>(p.kern);
            DRIVER(cuLaunchKernelEx, &config, function, p.kernelParams, p.extra);
        }
    }
    size_t count() const { return kernels_.size(); }

private:
    struct Kernel {
        CUDA_KERNEL_NODE_PARAMS params;
        CUlaunchAttribute attributes[2];
        unsigned attribute_count;
    };
    CUstream stream_;
    std::vector<Kernel> kernels_;
};

// Microseconds of one call, of 50 into an idle stream; the stream has run dry after it.
template <typename Body> double time_calls(CUstream stream, Body &&body) {
    constexpr int kCalls = 50;  // a queue takes about a thousand launches before it makes the host wait
    DRIVER(cuStreamSynchronize, stream);
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < kCalls; ++i) body();
    const std::chrono::duration<double, std::micro> elapsed = std::chrono::steady_clock::now() - start;
    DRIVER(cuStreamSynchronize, stream);
    return elapsed.count() / kCalls;
}

inline double median(std::vector<double> values) {
    std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
    return values[values.size() / 2];
}

// ---- the command line: [--layer N,C,M,H,W] [--rounds R] LIBRARY... ----

struct Shape {
    int32_t n = 64, c = 64, m = 64, h = 64, w = 64;
};

struct Options {
    Shape shape;
    int rounds = 200;
    std::vector<const char *> libraries;
};

inline Options options(const std::string &program, int count, char **arguments) {
    Options given;
    Shape &shape = given.shape;
    for (int i = 1; i < count; ++i) {
        const std::string option = arguments[i];
        if (option == "--layer" && i + 1 < count) {
            if (std::sscanf(arguments[++i], "%d,%d,%d,%d,%d", &shape.n, &shape.c, &shape.m, &shape.h, &shape.w) != 5)
                throw std::runtime_error(std::string("--layer; got ") + arguments[i] + ", expected N,C,M,H,W");
        } else if (option == "--rounds" && i + 1 < count) {
            given.rounds = std::max(1, std::atoi(arguments[++i]));
        } else {
            given.libraries.push_back(arguments[i]);
        }
    }
    if (given.libraries.empty()) throw std::runtime_error("usage: " + program + " [--layer N,C,M,H,W] [--rounds R] LIBRARY...");
    return given;
}

// Times libraries in turn, round after round: each its own call(), then its bare kernels.  The first ten rounds warm up.
template <typename Libraries> void time_in_turn(CUstream stream, int rounds, const Libraries &libraries) {
    for (int round = -10; round < rounds; ++round)
        for (const auto &library : libraries) {
            const double call = time_calls(stream, [&] { library->call(); });
            const double bare = time_calls(stream, [&] { library->kernels->launch(); });
            if (round < 0) continue;
            library->call_us.push_back(call);
            library->bare_us.push_back(bare);
        }
}

// The end of a library's JSON object; `call` names its own time.
template <typename Library> void print_times(const Library &library, const char *call) {
    const double own = median(library.call_us), bare = median(library.bare_us);
    std::printf("\"kernels\": %zu, \"%s\": %.2f, \"bare_us\": %.2f, \"more_us\": %.2f}\n", library.kernels->count(), call, own,
                bare, own - bare);
}

// A program that times one call of each library named, made by Timed(path, shape, stream): its exit status.
template <typename Timed> int time_libraries(const char *program, int count, char **arguments) {
    try {
        const auto [shape, rounds, paths] = options(program, count, arguments);
        const CUstream stream = open_device();
        std::vector<std::unique_ptr<Timed>> libraries;
        for (const char *path : paths) libraries.push_back(std::make_unique<Timed>(path, shape, stream));
        time_in_turn(stream, rounds, libraries);
        for (const auto &library : libraries) library->print(shape);
        return 0;
    } catch (const std::exception &error) {
        std::fprintf(stderr, "%s: %s\n", program, error.what());
        return 1;
    }
}

}  // namespace host_timing

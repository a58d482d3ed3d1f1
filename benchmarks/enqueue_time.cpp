// SPDX-License-Identifier: Apache-2.0
// Host time of the plugin's enqueue through TensorRT 8.6's interface, against launches of the same kernels by the driver.
//
//   g++ -O2 -std=c++17 -rdynamic -Iplugin/tensorrt -I/usr/local/cuda/include benchmarks/enqueue_time.cpp -ldl -o enqueue_time
//   ./enqueue_time [--layer N,C,M,H,W] [--rounds 200] LIBRARY...
//
// Plays TensorRT to each library of plugins: makes a half-precision layer of 3x3 convolution and 2x2 pooling with
// constant weights, builds, saves and loads it, and attaches it to a context.  One enqueue, captured into a graph, tells
// the kernels and their arguments.  Then, library after library and round after round, 50 enqueues and 50 such launches
// are queued on an idle stream; times are medians of the rounds, in microseconds of one enqueue.  One JSON object a
// library.  Needs a GPU; links no CUDA library.
#define CONVPOOL_TENSORRT_SDK_MAJOR 0
#include "declared/v2.h"
#include "host_timing.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

extern "C" __attribute__((visibility("default"))) int32_t getInferLibVersion() { return 8600; }
extern "C" __attribute__((visibility("default"))) void *getLogger() { return nullptr; }  // messages go to stderr

namespace {

using namespace convpool::tensorrt;
using namespace host_timing;

struct Destroy {
    void operator()(v2::IPluginV2 *plugin) const { plugin->destroy(); }
};
using Plugin = std::unique_ptr<v2::IPluginV2DynamicExt, Destroy>;
Plugin own(v2::IPluginV2 *plugin) {
    if (plugin == nullptr) throw std::runtime_error("the library made no plugin; its message stands above");
    return Plugin(static_cast<v2::IPluginV2DynamicExt *>(plugin));
}

v2::PluginTensorDesc tensor(std::vector<int32_t> sizes, v2::TensorFormat format) {
    v2::PluginTensorDesc desc{{static_cast<int32_t>(sizes.size()), {}}, v2::DataType::kHALF, format, 1.f};
    std::copy(sizes.begin(), sizes.end(), desc.dims.d);
    return desc;
}

// One execution context's plugin with its tensors.
class Layer {
public:
    Layer(const char *library, const Shape &s, CUstream stream) : stream_(stream) {
        const auto linear = v2::TensorFormat::kLINEAR, hwc8 = v2::TensorFormat::kHWC8;
        in_ = {tensor({s.n, s.c, s.h, s.w}, hwc8), tensor({s.m, 3, 3, s.c}, linear), tensor({s.m}, linear)};
        out_ = tensor({s.n, s.m, s.h / 2, s.w / 2}, hwc8);
        v2::IPluginCreator &creator = find_creator(library);
        Plugin built = make(creator);
        std::vector<v2::DynamicPluginTensorDesc> profile;
        for (const v2::PluginTensorDesc &desc : in_) profile.push_back({desc, desc.dims, desc.dims});
        const v2::DynamicPluginTensorDesc out{out_, out_.dims, out_.dims};
        built->configurePlugin(profile.data(), 3, &out, 1);
        workspace_ = allocate(built->getWorkspaceSize(in_.data(), 3, &out_, 1));
        std::vector<char> bytes(built->getSerializationSize());
        built->serialize(bytes.data());
        plugin_ = own(own(creator.deserializePlugin("layer", bytes.data(), bytes.size()))->clone());
        plugin_->attachToContext(nullptr, nullptr, nullptr);
        plugin_->configurePlugin(profile.data(), 3, &out, 1);  // as TensorRT tells a context its shape
        for (const v2::PluginTensorDesc &desc : in_) inputs_.push_back(reinterpret_cast<void *>(allocate(bytes_of(desc))));
        output_ = reinterpret_cast<void *>(allocate(bytes_of(out_)));
    }

    void enqueue() {
        if (plugin_->enqueue(in_.data(), &out_, inputs_.data(), &output_, reinterpret_cast<void *>(workspace_), stream_) != 0)
            throw std::runtime_error("enqueue failed; its message stands above");
    }

private:
    static size_t bytes_of(const v2::PluginTensorDesc &desc) {
        size_t bytes = 2;
        for (int i = 0; i < desc.dims.nbDims; ++i) bytes *= static_cast<size_t>(desc.dims.d[i]);
        return bytes;
    }

    static v2::IPluginCreator &find_creator(const char *path) {
        void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
        if (library == nullptr) throw std::runtime_error(dlerror());
        auto get = reinterpret_cast<v2::IPluginCreator *const *(*)(int32_t &)>(dlsym(library, "getPluginCreators"));
        int32_t count = 0;
        v2::IPluginCreator *const *all = get == nullptr ? nullptr : get(count);
        for (int32_t i = 0; i < count; ++i)
            if (std::strcmp(all[i]->getPluginName(), "ConvAvgPool") == 0) return *all[i];
        throw std::runtime_error(std::string(path) + ": no ConvAvgPool; expected a plugin library");
    }

    // Conv of padding 1, then a pooling of stride 2: the pooled input is convolved with stride 2.
    static Plugin make(v2::IPluginCreator &creator) {
        const std::vector<int32_t> one{1, 1}, two{2, 2}, three{3, 3}, pads{1, 1, 1, 1}, none{0, 0, 0, 0}, yes{1};
        std::vector<v2::PluginField> fields;
        auto add = [&](const char *name, const std::vector<int32_t> &values) {
            fields.push_back({name, values.data(), v2::PluginFieldType::kINT32, static_cast<int32_t>(values.size())});
        };
        add("pool_kernel_shape", two);
        add("pool_strides", one);
        add("pool_pads", pads);
        add("kernel_shape", three);
        add("strides", two);
        add("pads", none);
        add("constant_weights", yes);
        const v2::PluginFieldCollection collection{static_cast<int32_t>(fields.size()), fields.data()};
        return own(creator.createPlugin("layer", &collection));
    }

    CUstream stream_;
    std::vector<v2::PluginTensorDesc> in_;
    v2::PluginTensorDesc out_{};
    Plugin plugin_;
    CUdeviceptr workspace_ = 0;
    std::vector<const void *> inputs_;
    void *output_ = nullptr;
};

struct Library {
    Library(const char *library_path, const Shape &shape, CUstream stream)
        : path(library_path), layer(library_path, shape, stream) {
        call();  // the first enqueue transforms the weights, which later ones find
        kernels = std::make_unique<Kernels>(stream, [&] { call(); });
    }
    void call() { layer.enqueue(); }
    void print(const Shape &s) const {
        std::printf("{\"library\": \"%s\", \"layer\": [%d, %d, %d, %d, %d], ", path, s.n, s.c, s.m, s.h, s.w);
        print_times(*this, "enqueue_us");
    }

    const char *path;
    Layer layer;
    std::unique_ptr<Kernels> kernels;
    std::vector<double> call_us, bare_us;
};

}  // namespace

int main(int count, char **arguments) { return time_libraries<Library>("enqueue_time", count, arguments); }

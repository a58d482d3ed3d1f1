// SPDX-License-Identifier: Apache-2.0
#include "host.h"

#include <dlfcn.h>

#include <cstring>

namespace host {

int checks = 0, failures = 0;
int32_t version_number = 0;
std::string logged;
int (*pretended_launches)() = nullptr;
int64_t (*pretended_bytes)() = nullptr;
void (*pretended_forget)() = nullptr;

namespace {

// TensorRT 8 to 10, and 11, whose logger has four slots before.
struct PlainLogger {
    virtual void log(int32_t, const char *message) noexcept { logged.append(message).append("\n"); }
    virtual ~PlainLogger() = default;
} plain_logger;

struct VersionedLogger {
    struct Info {
        const char *kind;
        int32_t major, minor;
    };
    virtual int32_t getAPILanguage() const noexcept { return 0; }
    virtual Info getInterfaceInfo() const noexcept { return {"ILogger", 1, 0}; }
    virtual ~VersionedLogger() = default;
    virtual void log(int32_t, const char *message) noexcept { logged.append("11: ").append(message).append("\n"); }
} versioned_logger;

struct Finder {
    virtual void *findLogger() { return nullptr; }
    virtual ~Finder() = default;
};

}  // namespace

void *open_library(const char *path) {
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) return std::printf("%s\n", dlerror()), nullptr;
    if (auto set_device = reinterpret_cast<void (*)(int, uint64_t)>(dlsym(library, "pretended_set_device"))) {
        set_device(0, 1);
        pretended_launches = reinterpret_cast<int (*)()>(dlsym(library, "pretended_launches"));
        pretended_bytes = reinterpret_cast<int64_t (*)()>(dlsym(library, "pretended_bytes"));
        pretended_forget = reinterpret_cast<void (*)()>(dlsym(library, "pretended_forget"));
    }
    auto set_finder = reinterpret_cast<void (*)(void *)>(dlsym(library, "setLoggerFinder"));
    if (set_finder == nullptr) return std::printf("%s: no setLoggerFinder\n", path), nullptr;
    {
        Finder finder;  // gone after the call, as TensorRT's own
        set_finder(&finder);
    }
    set_finder(nullptr);
    return library;
}

Attributes with(const Around &around, Attributes a) {
    a.around = around;
    return a;
}

Attributes packed(Attributes a) {
    a.accumulation = {CONVPOOL_ACCUMULATE_PACKED};
    return a;
}

Attributes upsampled(Attributes a) {
    a.upsample = {2, 2};
    a.strides = {1, 1};
    a.pads = {1, 1, 1, 1};
    return a;
}

std::string Attributes::op_type() const {
    static const char *const names[] = {"", "Relu", "LeakyRelu", "Tanh", "Sigmoid", "", "Silu"};
    static const char *const affines[] = {"", "Affine", "Modulated", "Normalized"};
    return std::string(affines[around.affine]) + names[around.before] + core() + (around.residual ? "Add" : "") +
           names[around.after];
}

std::vector<Attributes> every_operator() {
    std::vector<Attributes> all;
    for (const Attributes &core : {Attributes{}, upsampled()})
        for (int affine : {0, 1, 2, 3})
            for (int before : {CONVPOOL_ACT_NONE, CONVPOOL_ACT_RELU, CONVPOOL_ACT_LEAKY_RELU, CONVPOOL_ACT_SILU})
                for (int residual : {0, 1})
                    for (int after = 0; after <= CONVPOOL_ACT_SILU; ++after) {
                        if (after == CONVPOOL_ACT_CLIP) continue;
                        const float slopes[] = {before == 2 ? 0.25f : 0.f, after == 2 ? 0.1f : 0.f};
                        all.push_back(with({affine, before, slopes[0], residual, after, slopes[1]}, core));
                    }
    return all;
}

std::vector<Attributes> some_variants() {
    return {with({1, 1, 0.f, 0, 0, 0.f}),
            with({0, 2, 0.2f, 1, 0, 0.f}),
            with({0, 0, 0.f, 1, 1, 0.f}),
            with({1, 0, 0.f, 0, 2, 0.125f}),
            with({1, 2, 0.5f, 1, 2, 1e-3f}),
            with({0, 0, 0.f, 0, 3, 0.f}),
            upsampled(),
            with({1, 1, 0.f, 1, 2, 0.25f}, upsampled()),
            with({3, 6, 0.f, 1, 0, 0.f}),
            with({0, 1, 0.f, 1, 4, 0.f})};
}

convpool_problem problem_of(const Attributes &a, int64_t n, int64_t c, int64_t m, std::vector<int64_t> spatial, int dtype,
                            int x_layout, int y_layout, bool bias) {
    convpool_problem p{};
    p.struct_size = sizeof p;
    p.rank = static_cast<int32_t>(a.kernel.size());
    p.x_dtype = p.w_dtype = p.y_dtype = dtype;
    p.x_layout = x_layout;
    p.y_layout = y_layout;
    p.n = n;
    p.c = c;
    p.m = m;
    p.group = a.group[0];
    p.accumulation = a.accumulation.empty() ? CONVPOOL_ACCUMULATE_DEFAULT : a.accumulation[0];
    p.has_bias = bias;
    p.prologue_affine = a.around.affine;
    p.prologue_groups = a.around.affine == 3 ? a.around.groups : 0;
    p.prologue_epsilon = a.around.affine == 3 ? a.around.epsilon : 0.f;
    p.prologue_activation = a.around.before;
    p.prologue_alpha = a.around.before_alpha;
    p.has_residual = a.around.residual;
    p.activation = a.around.after;
    p.alpha = a.around.after_alpha;
    for (int i = 0; i < p.rank; ++i) {
        p.spatial[i] = spatial[i];
        const bool pools = a.upsample.empty();
        p.upsample[i] = pools ? 0 : a.upsample[i];
        p.pool_kernel[i] = pools ? a.pool_kernel[i] : 1;
        p.pool_strides[i] = pools ? a.pool_strides[i] : 1;
        p.pool_dilations[i] = pools ? a.pool_dilations[i] : 1;
        p.kernel[i] = a.kernel[i];
        p.strides[i] = a.strides[i];
        p.dilations[i] = a.dilations[i];
    }
    for (int i = 0; i < 2 * p.rank; ++i) {
        p.pool_pads[i] = a.upsample.empty() ? a.pool_pads[i] : 0;
        p.pads[i] = a.pads[i];
    }
    return p;
}

}  // namespace host

extern "C" __attribute__((visibility("default"))) int32_t getInferLibVersion() { return host::version_number; }
extern "C" __attribute__((visibility("default"))) void *getLogger() {
    return host::version_number >= 110000 ? static_cast<void *>(&host::versioned_logger)
                                          : static_cast<void *>(&host::plain_logger);
}

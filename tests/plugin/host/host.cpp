// convpool_plugin_host LIBRARY DEVICE: drives both adapters of a plugin library through their whole life.
// DEVICE: 1 if the library sees a device (its own or a pretended one), 0 if there is none; gpu: runs layers on a GPU.
#include "host.h"
#include "gpu.h"

#include <dlfcn.h>

#include <cstdlib>
#include <cstring>
#include <new>

namespace {
long allocations_left = -1;  // of the library too; -1: as many as there are
}

void *operator new(size_t size) {
    void *memory = allocations_left == 0 ? nullptr : std::malloc(size == 0 ? 1 : size);
    if (memory == nullptr) throw std::bad_alloc();
    if (allocations_left > 0) --allocations_left;
    return memory;
}
void operator delete(void *memory) noexcept { std::free(memory); }
void operator delete(void *memory, size_t) noexcept { std::free(memory); }

namespace host {

int checks = 0, failures = 0;
int32_t version_number = 0;
std::string logged;
int (*pretended_launches)() = nullptr;
int64_t (*pretended_bytes)() = nullptr;

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

// After the library's own static objects: engines may live as long, and TensorRT's registry does.
void at_exit() {
    if (creators_answer_v2() && creators_answer_v3()) return;
    std::printf("creators are gone before the process is\n");
    std::_Exit(1);
}

}  // namespace

void starve(const std::function<bool()> &body) {
    logged.clear();
    logged.reserve(1 << 16);
    bool passed = false;
    for (long count = 0; !passed && count < 1000; ++count) {
        logged.clear();
        allocations_left = count;
        passed = body();
        allocations_left = -1;
    }
    CHECK(passed);
}

Attributes with(const Around &around, Attributes a) {
    a.around = around;
    return a;
}

std::string Attributes::op_type() const {
    static const char *const names[] = {"", "Relu", "LeakyRelu"};
    return std::string(around.affine ? "Affine" : "") + names[around.before] + "ConvAvgPool" + (around.residual ? "Add" : "") +
           names[around.after];
}

std::vector<Attributes> every_operator() {
    std::vector<Attributes> all;
    for (int i = 0; i < 36; ++i) {
        const int before = i / 2 % 3, after = i / 12;
        all.push_back(with({i % 2, before, before == 2 ? 0.25f : 0.f, i / 6 % 2, after, after == 2 ? 0.1f : 0.f}));
    }
    return all;
}

std::vector<Attributes> some_variants() {
    return {with({1, 1, 0.f, 0, 0, 0.f}), with({0, 2, 0.2f, 1, 0, 0.f}), with({0, 0, 0.f, 1, 1, 0.f}),
            with({1, 0, 0.f, 0, 2, 0.125f}), with({1, 2, 0.5f, 1, 2, 1e-3f})};
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
    p.has_bias = bias;
    p.prologue_affine = a.around.affine;
    p.prologue_activation = a.around.before;
    p.prologue_alpha = a.around.before_alpha;
    p.has_residual = a.around.residual;
    p.activation = a.around.after;
    p.alpha = a.around.after_alpha;
    for (int i = 0; i < p.rank; ++i) {
        p.spatial[i] = spatial[i];
        p.pool_kernel[i] = a.pool_kernel[i];
        p.pool_strides[i] = a.pool_strides[i];
        p.pool_dilations[i] = a.pool_dilations[i];
        p.kernel[i] = a.kernel[i];
        p.strides[i] = a.strides[i];
        p.dilations[i] = a.dilations[i];
    }
    for (int i = 0; i < 2 * p.rank; ++i) {
        p.pool_pads[i] = a.pool_pads[i];
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

int main(int count, char **arguments) {
    using namespace host;
    if (count != 3) return std::printf("usage: convpool_plugin_host LIBRARY 0|1|gpu\n"), 2;
    std::atexit(at_exit);
    void *library = dlopen(arguments[1], RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) return std::printf("%s\n", dlerror()), 2;
    const bool has_device = std::strcmp(arguments[2], "1") == 0;
    if (auto set_device = reinterpret_cast<void (*)(int, uint64_t)>(dlsym(library, "pretended_set_device"))) {
        set_device(0, 1);
        pretended_launches = reinterpret_cast<int (*)()>(dlsym(library, "pretended_launches"));
        pretended_bytes = reinterpret_cast<int64_t (*)()>(dlsym(library, "pretended_bytes"));
    }
    auto set_finder = reinterpret_cast<void (*)(void *)>(dlsym(library, "setLoggerFinder"));
    CHECK(set_finder != nullptr);
    if (set_finder == nullptr) return 1;
    {
        Finder finder;  // gone after the call, as TensorRT's own
        set_finder(&finder);
    }
    set_finder(nullptr);
    if (std::strcmp(arguments[2], "gpu") == 0) {
        try {
            Gpu gpu;
            CHECK(run_v3(library, gpu));  // some tactic keeps weights
            CHECK(run_v2(library, gpu));
        } catch (const std::exception &error) {
            check(false, error.what(), __FILE__, __LINE__);
        }
    } else {
        drive_v3(library, has_device);
        drive_v2(library, has_device);
    }
    std::printf("%d checks, %d failed\n", checks, failures);
    return failures == 0 ? 0 : 1;
}

// SPDX-License-Identifier: Apache-2.0
// convpool_plugin_host LIBRARY DEVICE: drives both adapters of a plugin library through their whole life.
// DEVICE: 1 if the library sees a device (its own or a pretended one), 0 if there is none; gpu: runs layers on a GPU.
#include "gpu.h"

#include <cstdio>
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

bool without_memory(const std::function<bool()> &body) {
    allocations_left = 0;
    const bool passed = body();
    allocations_left = -1;
    return passed;
}

namespace {

// After the library's own static objects: engines may live as long, and TensorRT's registry does.
void at_exit() {
    if (creators_answer_v2() && creators_answer_v3()) return;
    std::printf("creators are gone before the process is\n");
    std::_Exit(1);
}

}  // namespace
}  // namespace host

int main(int count, char **arguments) {
    using namespace host;
    if (count != 3) return std::printf("usage: convpool_plugin_host LIBRARY 0|1|gpu\n"), 2;
    std::atexit(at_exit);
    void *library = open_library(arguments[1]);
    if (library == nullptr) return 2;
    const bool has_device = std::strcmp(arguments[2], "1") == 0;
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

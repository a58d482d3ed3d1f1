// SPDX-License-Identifier: Apache-2.0
#include "core/device.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <vector>

#if !defined(CONVPOOL_ARCHITECTURES) || !defined(CONVPOOL_HAS_SM90A)
#error "the build defines CONVPOOL_ARCHITECTURES and CONVPOOL_HAS_SM90A"
#endif

namespace convpool {

cudaError_t current_device(Device &device) {
    int number = 0, major = 0, minor = 0;
    cudaError_t error = cudaGetDevice(&number);
    auto attribute = [&](int &value, cudaDeviceAttr name) {
        if (error == cudaSuccess) error = cudaDeviceGetAttribute(&value, name, number);
    };
    attribute(major, cudaDevAttrComputeCapabilityMajor);
    attribute(minor, cudaDevAttrComputeCapabilityMinor);
    attribute(device.multiprocessors, cudaDevAttrMultiProcessorCount);
    attribute(device.shared_per_block, cudaDevAttrMaxSharedMemoryPerBlockOptin);
    attribute(device.shared_per_multiprocessor, cudaDevAttrMaxSharedMemoryPerMultiprocessor);
    device.cc = major * 10 + minor;
    return error;
}

int code_architecture(int cc) {
    static const std::vector<int> built = [] {  // asked for every tactic that is planned
        std::vector<int> numbers;
        for (const char *text = CONVPOOL_ARCHITECTURES; text != nullptr; text = std::strchr(text, ',')) {
            text += *text == ',';
            numbers.push_back(std::atoi(text));
        }
        return numbers;
    }();
    int own = 0;
    for (int number : built)
        if (number / 10 == cc / 10 && number <= cc) own = std::max(own, number);
    return own != 0 ? own : built.back() <= cc ? built.back() : 0;
}

bool built_for_sm90a() { return CONVPOOL_HAS_SM90A; }

}  // namespace convpool

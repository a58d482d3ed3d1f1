// SPDX-License-Identifier: Apache-2.0
// The device that a plan is made for, and the code that it runs.
#pragma once

#include <cuda_runtime_api.h>

namespace convpool {

struct Device {
    int cc = 0, multiprocessors = 0, shared_per_block = 0, shared_per_multiprocessor = 0;
};

cudaError_t current_device(Device &device);

// The architecture of the code that a device of this compute capability runs, except for tactics named sm90a: compiled for
// its major version, else PTX of the last architecture built for. 0: none.
int code_architecture(int cc);

// Whether the library holds code for Hopper's own instructions.
bool built_for_sm90a();

}  // namespace convpool

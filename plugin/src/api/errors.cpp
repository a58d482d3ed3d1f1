// SPDX-License-Identifier: Apache-2.0
#include "api/errors.h"

namespace convpool {

std::string &last_error() {
    static thread_local std::string message;
    return message;
}

convpool_status fail(convpool_status status, const std::string &message) {
    last_error() = message;
    return status;
}

convpool_status cuda_failure(const char *what, cudaError_t error) {
    return fail(CONVPOOL_CUDA_ERROR, std::string(what) + ": " + cudaGetErrorName(error) + ", " + cudaGetErrorString(error));
}

}  // namespace convpool

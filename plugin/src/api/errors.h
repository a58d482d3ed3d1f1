// SPDX-License-Identifier: Apache-2.0
// Failures of the C API: a status, and a message that the thread keeps.
#pragma once

#include <cuda_runtime_api.h>

#include <exception>
#include <string>

#include "convpool.h"

namespace convpool {

// What convpool_last_error returns.
std::string &last_error();

convpool_status fail(convpool_status status, const std::string &message);
convpool_status cuda_failure(const char *what, cudaError_t error);

// Every entry point that does more than return a constant runs in here: nothing throws out of the library.
template <class Body> convpool_status guarded(Body body) noexcept {
    try {
        last_error().clear();
        return body();
    } catch (const std::exception &e) {
        try {
            return fail(CONVPOOL_INVALID_ARGUMENT, std::string("internal error: ") + e.what());
        } catch (...) {
            return CONVPOOL_INVALID_ARGUMENT;
        }
    } catch (...) {
        return CONVPOOL_INVALID_ARGUMENT;
    }
}

}  // namespace convpool

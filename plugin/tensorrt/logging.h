// SPDX-License-Identifier: Apache-2.0
// The process's TensorRT: its version and its logger, and the guard around every callback.
#pragma once

#include <cstdint>
#include <exception>
#include <utility>

namespace convpool::tensorrt {

// Remembers the TensorRT that the finder belongs to.
void set_logger_finder(void *finder) noexcept;

// major * 10000 + minor * 100 + patch of the TensorRT that loaded this library; 0 if none can be found.
int32_t runtime_version() noexcept;
// The result of that TensorRT's getInferLibVersion: as above from 10 on, major * 1000 + minor * 100 + patch before.
int32_t runtime_version_number() noexcept;

// Writes "convpool: <where>: <what>" to TensorRT's logger; to stderr if there is none, or none whose layout is known.
void log_error(const char *where, const char *what) noexcept;
void log_warning(const char *where, const char *what) noexcept;

// Runs a callback's body; nothing may be thrown into TensorRT, so an exception becomes `failure` and a logged message.
template <typename Result, typename Body> Result guarded(const char *where, Result failure, Body &&body) noexcept {
    try {
        return std::forward<Body>(body)();
    } catch (const std::exception &error) {
        log_error(where, error.what());
    } catch (...) {
        log_error(where, "unknown exception");
    }
    return failure;
}

}  // namespace convpool::tensorrt

// SPDX-License-Identifier: Apache-2.0
#include "logging.h"

#include <dlfcn.h>

#include <atomic>
#include <cstdio>
#include <new>
#include <string>

namespace convpool::tensorrt {

enum class Severity : int32_t { kINTERNAL_ERROR = 0, kERROR = 1, kWARNING = 2, kINFO = 3, kVERBOSE = 4 };

// The two loggers are named outside the anonymous namespace: a compiler that knows all classes derived from a local one,
// none, makes calls of its pure functions direct, and they end the process.

// TensorRT 8 to 10: the first slot.
class Logger {
public:
    virtual void log(Severity severity, const char *message) noexcept = 0;
    virtual ~Logger() = default;
};

// TensorRT 11: a versioned interface, whose own four slots come first.
class VersionedLogger {
public:
    struct Info {
        const char *kind;
        int32_t major, minor;
    };
    virtual int32_t getAPILanguage() const noexcept = 0;
    virtual Info getInterfaceInfo() const noexcept = 0;
    virtual ~VersionedLogger() noexcept = default;
    virtual void log(Severity severity, const char *message) noexcept = 0;
};

namespace {

// Facts about the process's TensorRT.  How long the finder lives is not said, so nothing of it is kept: the library
// that it came from has a function for its logger, which is null before the first builder or runtime.
struct Runtime {
    int32_t (*version)() = nullptr;
    void *(*logger)() = nullptr;
};

// Both functions of one library, read together: a process may hold two TensorRTs.  Never freed, as a thread may still
// read the one before; there are as many as libraries that registered.
std::atomic<const Runtime *> current_runtime{nullptr};

template <typename Function> void look_up(void *library, const char *name, Function &function) {
    function = reinterpret_cast<Function>(dlsym(library, name));
}

void remember(void *library) {
    Runtime found;
    look_up(library, "getInferLibVersion", found.version);
    look_up(library, "getLogger", found.logger);
    const Runtime *known = current_runtime.load();
    if (found.version == nullptr || (known != nullptr && known->version == found.version)) return;
    if (const Runtime *kept = new (std::nothrow) Runtime(found)) current_runtime.store(kept);
}

const Runtime *runtime() {
    if (current_runtime.load() == nullptr) remember(RTLD_DEFAULT);
    return current_runtime.load();
}

int32_t readable_version(int32_t number) { return number >= 10000 ? number : number / 1000 * 10000 + number % 1000; }

// Where log() stands in the logger of a TensorRT; unknown loggers are not called.  TensorRT-RTX 1.x counts from 10000,
// below the first TensorRT that loads plugins, and its logger's layout is written nowhere.
enum class LoggerKind { kUnknown, kPlain, kVersioned };
LoggerKind logger_kind(int32_t version) {
    return version >= 110000 ? LoggerKind::kVersioned : version >= 80600 ? LoggerKind::kPlain : LoggerKind::kUnknown;
}

void write(Severity severity, const char *message) {
    const Runtime *from = runtime();
    const LoggerKind kind = from == nullptr ? LoggerKind::kUnknown : logger_kind(readable_version(from->version()));
    void *logger = kind == LoggerKind::kUnknown || from->logger == nullptr ? nullptr : from->logger();
    if (logger == nullptr) std::fprintf(stderr, "%s\n", message);
    else if (kind == LoggerKind::kVersioned) static_cast<VersionedLogger *>(logger)->log(severity, message);
    else static_cast<Logger *>(logger)->log(severity, message);
}

void log(Severity severity, const char *where, const char *what) noexcept {
    try {
        write(severity, (std::string("convpool: ") + where + ": " + what).c_str());
    } catch (...) {  // a logger that throws, or no memory for the text: nothing is left to tell it to
    }
}

}  // namespace

void set_logger_finder(void *finder) noexcept {
    // The library is found by its finder's virtual functions: Python loads TensorRT without making its symbols global, so
    // a plain look-up would miss it.  It stays open, as the functions kept are its own.
    Dl_info info{};
    if (finder != nullptr && dladdr(*static_cast<void **>(finder), &info) != 0 && info.dli_fname != nullptr)
        if (void *library = dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD)) remember(library);
}

int32_t runtime_version_number() noexcept {
    const Runtime *from = runtime();
    return from == nullptr ? 0 : from->version();
}

int32_t runtime_version() noexcept { return readable_version(runtime_version_number()); }

void log_error(const char *where, const char *what) noexcept { log(Severity::kERROR, where, what); }
void log_warning(const char *where, const char *what) noexcept { log(Severity::kWARNING, where, what); }

}  // namespace convpool::tensorrt

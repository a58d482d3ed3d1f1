#include "logging.h"

#include <dlfcn.h>

#include <atomic>
#include <cstdio>
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

using VersionFunction = int32_t (*)();
using LoggerFunction = void *(*)();

// How long the finder lives is not said, so nothing of it is kept: the library that it came from has a function for its
// logger, which is null before the first builder or runtime.
std::atomic<VersionFunction> version_function{nullptr};
std::atomic<LoggerFunction> logger_function{nullptr};

template <typename Function> Function look_up(void *library, const char *name) {
    return reinterpret_cast<Function>(dlsym(library, name));
}

void remember(void *library) {
    if (VersionFunction function = look_up<VersionFunction>(library, "getInferLibVersion")) {
        version_function = function;
        logger_function = look_up<LoggerFunction>(library, "getLogger");
    }
}

void write(const char *message) {
    const int32_t version = runtime_version();  // first: it may find the library
    const LoggerFunction find = logger_function;
    void *logger = find == nullptr || version == 0 ? nullptr : find();
    if (logger == nullptr) std::fprintf(stderr, "%s\n", message);
    else if (version >= 110000) static_cast<VersionedLogger *>(logger)->log(Severity::kERROR, message);
    else static_cast<Logger *>(logger)->log(Severity::kERROR, message);
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
    if (version_function.load() == nullptr) remember(RTLD_DEFAULT);
    const VersionFunction function = version_function;
    return function == nullptr ? 0 : function();
}

int32_t runtime_version() noexcept {
    const int32_t number = runtime_version_number();
    return number >= 10000 ? number : number / 1000 * 10000 + number % 1000;
}

void log_error(const char *where, const char *what) noexcept {
    try {
        write((std::string("convpool: ") + where + ": " + what).c_str());
    } catch (...) {  // a logger that throws, or no memory for the text: nothing is left to tell it to
    }
}

}  // namespace convpool::tensorrt

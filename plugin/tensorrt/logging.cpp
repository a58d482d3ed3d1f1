#include "logging.h"

#include <dlfcn.h>

#include <atomic>
#include <cstdio>

namespace convpool::tensorrt {
namespace {

enum class Severity : int32_t { kINTERNAL_ERROR = 0, kERROR = 1, kWARNING = 2, kINFO = 3, kVERBOSE = 4 };

// TensorRT 8 to 10: the first slot.
class Logger {
  public:
    virtual void log(Severity severity, const char *message) noexcept = 0;
    virtual ~Logger() = default;
};
class LoggerFinder {
  public:
    virtual Logger *findLogger() = 0;
    virtual ~LoggerFinder() = default;
};

// TensorRT 11: versioned interfaces, whose own four slots come first.
class Versioned {
  public:
    struct Info { const char *kind; int32_t major, minor; };
    virtual int32_t getAPILanguage() const noexcept = 0;
    virtual Info getInterfaceInfo() const noexcept = 0;
    virtual ~Versioned() noexcept = default;
};
class VersionedLogger : public Versioned {
  public:
    virtual void log(Severity severity, const char *message) noexcept = 0;
};
class VersionedLoggerFinder : public Versioned {
  public:
    virtual VersionedLogger *findLogger() = 0;
};

std::atomic<void *> logger_finder{nullptr};
std::atomic<int32_t> version_number{0};

using VersionFunction = int32_t (*)();

// The library that an object's virtual functions lie in, opened again; Python loads TensorRT without making its symbols
// global, so a plain look-up would miss it.
VersionFunction version_function(void *object) {
    Dl_info info{};
    if (object != nullptr && dladdr(*static_cast<void **>(object), &info) != 0 && info.dli_fname != nullptr)
        if (void *library = dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD)) {
            void *symbol = dlsym(library, "getInferLibVersion");
            dlclose(library);  // the count of the look-up only: the library stays
            if (symbol != nullptr) return reinterpret_cast<VersionFunction>(symbol);
        }
    return reinterpret_cast<VersionFunction>(dlsym(RTLD_DEFAULT, "getInferLibVersion"));
}

void write(const char *message) {
    void *finder = logger_finder.load();
    const int32_t version = runtime_version();
    if (finder != nullptr && version >= 110000) {
        if (VersionedLogger *logger = static_cast<VersionedLoggerFinder *>(finder)->findLogger())
            return logger->log(Severity::kERROR, message);
    } else if (finder != nullptr && version > 0) {  // of an unknown version: which slot is unknown too
        if (Logger *logger = static_cast<LoggerFinder *>(finder)->findLogger())
            return logger->log(Severity::kERROR, message);
    }
    std::fprintf(stderr, "%s\n", message);
}

}  // namespace

void set_logger_finder(void *finder) noexcept {
    logger_finder = finder;
    version_number = 0;
    if (VersionFunction function = version_function(finder)) version_number = function();
}

int32_t runtime_version_number() noexcept {
    if (version_number == 0)
        if (VersionFunction function = version_function(nullptr)) version_number = function();
    return version_number;
}

int32_t runtime_version() noexcept {
    const int32_t number = runtime_version_number();
    return number >= 10000 ? number : number / 1000 * 10000 + number % 1000;
}

void log_error(const std::string &message) noexcept {
    try {
        write(("convpool: " + message).c_str());
    } catch (...) {  // a logger that throws, or no memory for the text: nothing is left to tell it to
    }
}

}  // namespace convpool::tensorrt

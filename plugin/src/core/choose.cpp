// SPDX-License-Identifier: Apache-2.0
// The choice of a tactic: a measured row of tuned.def or of CONVPOOL_TUNED, else the cost rule.
#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <utility>

#include "core/plan.h"
#include "kernels/passes.h"

namespace convpool {
namespace {

constexpr int kTacticField = 2, kResidualField = 7, kRankField = 13, kHeadFields = 14, kAxisFields = 11;
using TunedRow = std::array<int32_t, kHeadFields + kRank * kAxisFields>;  // in the order of tuned.def; zeros past the rank

constexpr TunedRow kCompiledIn[] = {
#define CONVPOOL_TUNED(...) {{__VA_ARGS__}},
#include "tuned.def"
#undef CONVPOOL_TUNED
    {{}}};  // no device has compute capability 0

struct File {
    std::vector<TunedRow> rows;
    std::string error;
    bool off = false;  // neither the file nor the rows compiled in
};

constexpr const char *kName = "CONVPOOL_TUNED";
constexpr uintmax_t kMaxFileBytes = 16 << 20;  // of some 100,000 rows

// Numbers between "CONVPOOL_TUNED(" and ")", then nothing but a comment; false if the line is anything else.
bool parse_row(const char *text, TunedRow &row) {
    if (std::strncmp(text, kName, std::strlen(kName)) != 0 || text[std::strlen(kName)] != '(') return false;
    text += std::strlen(kName) + 1;
    row = {};
    size_t count = 0;
    for (;; ++text) {
        char *end = nullptr;
        errno = 0;
        const long long value = std::strtoll(text, &end, 10);
        if (end == text || errno != 0 || value < 0 || value > INT32_MAX || count == row.size()) return false;
        row[count++] = static_cast<int32_t>(value);
        text = end + std::strspn(end, " \t");
        if (*text != ',') break;
    }
    if (*text++ != ')') return false;
    text += std::strspn(text, " \t\r");
    const int32_t rank = row[kRankField];
    return (*text == '\0' || std::strncmp(text, "//", 2) == 0) && rank >= 1 && rank <= kRank &&
           count == static_cast<size_t>(kHeadFields + rank * kAxisFields);
}

File read_file(const char *path) {
    File file;
    if (path == nullptr || *path == '\0') return file;
    if (std::strcmp(path, "off") == 0) {
        file.off = true;
        return file;
    }
    auto fail = [&](const std::string &what) {
        file.rows.clear();
        file.error = std::string(kName) + ": " + path + what + "; the file is not used, write it with convpool tune";
        return file;
    };
    std::error_code error;
    const std::filesystem::file_status status = std::filesystem::status(path, error);
    if (std::filesystem::exists(status) && !std::filesystem::is_regular_file(status))
        return fail(" is no regular file; got a directory, a pipe or a device, expected a file of rows");
    const uintmax_t bytes = std::filesystem::file_size(path, error);
    if (!error && bytes > kMaxFileBytes)
        return fail(" is too large; got " + std::to_string(bytes) + " bytes, expected at most " + std::to_string(kMaxFileBytes));
    std::ifstream stream(path);
    if (!stream) return fail(std::string(" cannot be opened; got ") + std::strerror(errno) + ", expected a file of rows");
    std::string line;
    for (int number = 1; std::getline(stream, line); ++number) {
        if (line.find('\0') != std::string::npos)
            return fail(": line " + std::to_string(number) + " is no text; got a zero byte, expected a row");
        const size_t start = line.find_first_not_of(" \t\r");
        if (start == std::string::npos || line.compare(start, 2, "//") == 0) continue;
        TunedRow row;
        if (!parse_row(line.c_str() + start, row)) {
            std::string got = line.substr(start, 60);  // printed to terminals, which obey control characters
            std::replace_if(got.begin(), got.end(), [](char c) { return c < ' ' || c > '~'; }, '?');
            return fail(": line " + std::to_string(number) + " is no row; got " + got + ", expected " + kName + "(" +
                        std::to_string(kHeadFields) + " numbers and " + std::to_string(kAxisFields) + " for every dimension)");
        }
        if (find_tactic(row[kTacticField]) == nullptr) {
            if (file.error.empty())
                file.error = std::string(kName) + ": " + path + ": line " + std::to_string(number) + " names no tactic; got id " +
                             std::to_string(row[kTacticField]) +
                             ", expected one that convpool_tactics lists; rows of unknown tactics are left out";
            continue;
        }
        file.rows.push_back(row);
    }
    if (stream.bad()) return fail(" cannot be read; got an error while reading, expected a file of rows");
    return file;
}

const File &file() {
    static const File read = read_file(std::getenv(kName));
    return read;
}

// The row of a problem, with 0 for the tactic. Sizes past 32 bits make no row: they are -1, which no file holds.
TunedRow key_of(const Problem &p, const Device &device) {
    const int32_t prologue = p.prologue_form() == PrologueForm::kGeneral ? 3 : p.prologue_affine ? 1 : p.has_prologue() ? 2 : 0;
    auto narrow = [](int64_t value) { return value > INT32_MAX ? -1 : static_cast<int32_t>(value); };
    const bool less_exact = (p.w_dtype == CONVPOOL_F32 && p.allow_tf32) || p.allow_packed;
    TunedRow row{};
    auto out = row.begin();
    for (int64_t value :
         std::initializer_list<int64_t>{device.cc, device.multiprocessors, 0, p.w_dtype, less_exact, p.x_channels_last,
                                        p.y_channels_last, p.has_residual, prologue, p.group, p.n, p.c, p.m, p.rank})
        *out++ = narrow(value);
    for (int i = kRank - p.rank; i < kRank; ++i) {
        // A window of 0, which no pooling has, stands for an upsampling.
        const int32_t window = p.upsamples() ? 0 : p.pool_kernel[i], step = p.upsamples() ? p.upsample[i] : p.pool_strides[i];
        for (int32_t value : {narrow(p.in[i]), window, step, p.pool_pads_begin[i], p.pool_pads_end[i], p.pool_dilations[i],
                              p.kernel[i], p.strides[i], p.pads_begin[i], p.pads_end[i], p.dilations[i]})
            *out++ = value;
    }
    return row;
}

}  // namespace

int32_t tuned_tactic(const Problem &problem, const Device &device) {
    const File &given = file();
    if (given.off) return 0;
    TunedRow key = key_of(problem, device);
    auto same = [&](TunedRow row) {
        row[kTacticField] = 0;
        return row == key;
    };
    auto find = [&]() -> int32_t {
        // If a key stands twice in a file, the later row counts.
        const auto own = std::find_if(given.rows.rbegin(), given.rows.rend(), same);
        if (own != given.rows.rend()) return (*own)[kTacticField];
        const auto found = std::find_if(std::begin(kCompiledIn), std::end(kCompiledIn), same);
        return found == std::end(kCompiledIn) ? 0 : (*found)[kTacticField];
    };
    const int32_t exact = find();
    if (exact != 0 || !problem.has_residual) return exact;
    key[kResidualField] = 0;  // every tactic reads a residual as it stores, so the fastest stays the fastest
    return find();
}

const std::string &tuned_error() { return file().error; }

Choice choose(const Problem &problem, const Device &device, size_t max_workspace_bytes, uint32_t aligned_tensors,
              std::string &reason) {
    auto usable = [&](const Tactic &tactic) {
        std::unique_ptr<Plan> plan = make_plan(problem, tactic, device, reason);
        const bool fits =
            plan != nullptr && plan->workspace.total() <= max_workspace_bytes && (plan->vector_tensors & ~aligned_tensors) == 0;
        return fits ? std::move(plan) : nullptr;
    };
    if (const Tactic *tuned = find_tactic(tuned_tactic(problem, device)); tuned != nullptr)
        if (auto plan = usable(*tuned)) return {std::move(plan), true};
    std::unique_ptr<Plan> best;
    double best_us = 0;
    std::string refused;  // why the first tactic, generic, does not run
    for (const Tactic &tactic : tactics()) {
        auto plan = usable(tactic);
        if (&tactic == &tactics().front()) refused = reason;
        if (plan == nullptr) continue;
        const double us = plan->expected_us();
        if (best != nullptr && us >= best_us) continue;
        best = std::move(plan);
        best_us = us;
    }
    if (best == nullptr && refused.empty())  // what normalizes X takes memory for all tactics
        refused = mismatch("workspace", static_cast<int64_t>(max_workspace_bytes), std::to_string(statistics::bytes(problem)));
    reason = refused;
    return {std::move(best), false};
}

}  // namespace convpool

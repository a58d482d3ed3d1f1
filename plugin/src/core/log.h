// SPDX-License-Identifier: Apache-2.0
// What the library tells of its choices: CONVPOOL_LOG=1 and ranges for profilers.
#pragma once

#include <cstdint>

#include "core/plan.h"

namespace convpool {

// With CONVPOOL_LOG=1 in the environment: one line on stderr for a problem and its tactic, the first time.
void log_plan(const Plan &plan, int32_t chosen_by);

// An NVTX range around a launch. Without a profiler it costs a comparison; without NVTX's header at build time, nothing.
class ProfilerRange {
public:
    explicit ProfilerRange(const char *name);
    ~ProfilerRange();
    ProfilerRange(const ProfilerRange &) = delete;
};

}  // namespace convpool

// SPDX-License-Identifier: Apache-2.0
// Tactics by measurement, asked before the cost rule: the rows of tuned.def and of the file that CONVPOOL_TUNED names.
#pragma once

#include <cstdint>
#include <string>

#include "core/tactic.h"

namespace convpool {

// The tactic measured fastest for exactly this problem on such a device, else for the same without its residual; 0 if there
// is no row.
int32_t tuned_tactic(const Problem &problem, const Device &device);

// Why the file that CONVPOOL_TUNED names, or a row of it, is not used; empty if it is, or if there is none.
const std::string &tuned_error();

}  // namespace convpool

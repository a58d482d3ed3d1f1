// SPDX-License-Identifier: Apache-2.0
// The convolutions whose windows TMA walks over in im2col mode.
#pragma once

#include <string>

#include "core/plan.h"

namespace convpool::implicit_gemm_tma {

// Where the windows of a convolution start and end. Empty, or the reason why TMA cannot walk over them: for a tensor of rank 4,
// the driver has 8 bits for every corner and offset.
std::string find_box(const Shape2d &shape, const Tactic &tactic, Im2colBox &box);

}  // namespace convpool::implicit_gemm_tma

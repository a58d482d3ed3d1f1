// SPDX-License-Identifier: Apache-2.0
// The element types: what the library knows of each, by its number.
#pragma once

#include <cfloat>
#include <cstdint>
#include <iterator>

#include "convpool.h"

namespace convpool {

struct ElementType {
    const char *name;
    int32_t bytes;
    float largest;  // finite number, of a type that prologue, sums and results may have; 0: of X and W only, summed exactly
};
// Types in the order of convpool_dtype. To add one is to add a line here, and what generic reads of it.
inline constexpr ElementType kTypes[] = {
    {"F16", 2, 65504.f}, {"BF16", 2, 0x1.FEp127f}, {"F32", 4, FLT_MAX}, {"I8", 1, 0}, {"F8E4M3", 1, 0},
};

constexpr bool is_type(int32_t dtype) { return dtype >= 0 && dtype < static_cast<int32_t>(std::size(kTypes)); }
constexpr bool is_float(int32_t dtype) { return kTypes[dtype].largest > 0; }

}  // namespace convpool

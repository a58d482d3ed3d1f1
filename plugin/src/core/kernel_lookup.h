// SPDX-License-Identifier: Apache-2.0
// From a row to its kernel, which lies in the file of the row's precision.
#pragma once

#include <cstddef>

#include "core/rows.h"

namespace convpool {

// lookup.operator()<precision>() is called for the row's; of precisions without rows it is never instantiated.
template <const auto &kRows, class Lookup> const void *kernel_of_row(size_t row, Lookup lookup) {
    const void *found = nullptr;
    auto consider = [&]<Precision kPrecision>() {
        if constexpr (has_precision(kRows, kPrecision))
            if (kRows[row].precision == kPrecision) found = lookup.template operator()<kPrecision>();
    };
    consider.template operator()<Precision::kF16>();
    consider.template operator()<Precision::kBF16>();
    consider.template operator()<Precision::kTF32>();
    consider.template operator()<Precision::kTF32x3>();
    return found;
}

}  // namespace convpool

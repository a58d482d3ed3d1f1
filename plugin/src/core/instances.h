// SPDX-License-Identifier: Apache-2.0
// The kernels of a family's rows of one precision. Rows of the same tile share an instantiation.
#pragma once

#include <cstddef>
#include <iterator>
#include <utility>

#include "core/params.h"

namespace convpool {

// The base of a family's Instances: `kernel<row>(variant)` of those gives the kernel of a row of the table.
template <const auto &kTable> struct RowsOf {
    static constexpr size_t kCount = std::size(kTable);
    template <size_t kRow> static constexpr Precision precision() { return kTable[kRow].precision; }
};

template <class Instances, Precision kPrecision, size_t kRow>
void consider_instance(size_t row, bool variant, const void *&found) {
    if constexpr (Instances::template precision<kRow>() == kPrecision)
        if (row == kRow) found = Instances::template kernel<kRow>(variant);
}

template <class Instances, Precision kPrecision, size_t... kRow>
const void *find_instance(size_t row, bool variant, std::index_sequence<kRow...>) {
    const void *found = nullptr;
    (consider_instance<Instances, kPrecision, kRow>(row, variant, found), ...);
    return found;
}

// Null if the row is of another precision. `variant` is the family's: whether the kernel applies a prologue.
template <class Instances, Precision kPrecision> const void *find_instance(size_t row, bool variant) {
    return find_instance<Instances, kPrecision>(row, variant, std::make_index_sequence<Instances::kCount>{});
}

}  // namespace convpool

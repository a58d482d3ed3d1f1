// SPDX-License-Identifier: Apache-2.0
// What all families' tables of rows have in common, on the host and in the files that CMake makes of instance.cu.in.
#pragma once

#include <cstddef>

#include "core/params.h"

namespace convpool {

// A step of a thread block's main loop.
struct Step {
    double issue_us = 0;    // of a block that has a multiprocessor's tensor cores for itself; 0: not fitted yet
    double latency_us = 0;  // no shorter than this, however little there is to do
};

// A tile in tiles of 128x128.
constexpr double tile_share(int block_m, int block_n) { return block_m * block_n / 16384.0; }

template <class Row, size_t kCount> constexpr bool all_rows(const Row (&rows)[kCount], bool (*holds)(const Row &)) {
    for (const Row &row : rows)
        if (!holds(row)) return false;
    return true;
}

template <class Row, size_t kCount> constexpr bool ids_rise(const Row (&rows)[kCount]) {
    for (size_t i = 0; i < kCount; ++i)
        if (rows[i].id <= (i == 0 ? 0 : rows[i - 1].id)) return false;
    return true;
}

template <class Row, size_t kCount> constexpr bool has_precision(const Row (&rows)[kCount], Precision precision) {
    for (const Row &row : rows)
        if (row.precision == precision) return true;
    return false;
}

}  // namespace convpool

// SPDX-License-Identifier: Apache-2.0
// The common part of all families' tables of rows, on the host and in the files that CMake makes of instance.cu.in.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <utility>

#include "core/params.h"

namespace convpool {

// A step of a thread block's main loop.
struct Step {
    double issue_us = 0;    // of a block that has a multiprocessor's tensor cores for itself; 0: not fitted yet
    double latency_us = 0;  // no shorter than this, however little there is to do
};

// A tile in tiles of 128x128.
constexpr double tile_share(int block_m, int block_n) { return block_m * block_n / 16384.0; }

// A row of the families whose rows differ in precision, tile and split alone.
template <class Tile> struct TileRow {
    int32_t id;  // never reused
    Precision precision;
    Tile tile;
    int32_t split;  // thread blocks of a cluster that share a tile's channels
};

// A line of a family's table: a tile and split, and the ids of its rows in each precision; 0: there is no such row.
template <class Tile> struct TileLine {
    Tile tile;
    int32_t split;
    int32_t ids[kPrecisions];

    constexpr TileRow<Tile> row(size_t kind) const { return {ids[kind], static_cast<Precision>(kind), tile, split}; }
};

// The rows of a table: `row(kind)` of each line for each of its ids.
template <const auto &kLines> constexpr auto rows_of() {
    constexpr size_t kCount = [] {
        size_t count = 0;
        for (const auto &line : kLines)
            for (int32_t id : line.ids) count += id != 0;
        return count;
    }();
    std::array<decltype(kLines[0].row(0)), kCount> rows{};
    size_t next = 0;
    for (const auto &line : kLines)
        for (size_t kind = 0; kind < std::size(line.ids); ++kind)
            if (line.ids[kind] != 0) rows[next++] = line.row(kind);
    return rows;
}

template <class Rows, class Holds> constexpr bool all_rows(const Rows &rows, Holds holds) {
    for (const auto &row : rows)
        if (!holds(row)) return false;
    return true;
}

template <class Rows> constexpr bool ids_differ(const Rows &rows) {
    for (const auto &row : rows) {
        size_t same = 0;
        for (const auto &other : rows) same += other.id == row.id;
        if (row.id <= 0 || same != 1) return false;
    }
    return true;
}

template <class Rows> constexpr bool has_precision(const Rows &rows, Precision precision) {
    for (const auto &row : rows)
        if (row.precision == precision) return true;
    return false;
}

// Finds a row's kernel, which lies in the file of the row's precision.

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

// The kernels of a family's rows of one precision. Rows of the same tile share an instantiation.

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

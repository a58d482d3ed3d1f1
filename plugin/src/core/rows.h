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

    constexpr bool is_fitted() const { return tile.is_fitted(); }
};

// A line of a family's table: a tile and split, and the ids of its rows in each precision; 0: there is no such row.
template <class Tile> struct TileLine {
    Tile tile;
    int32_t split;
    int32_t ids[kPrecisions];

    constexpr TileRow<Tile> row(size_t kind) const { return {ids[kind], static_cast<Precision>(kind), tile, split}; }
};

template <class Rows> constexpr bool are_fitted(const Rows &rows) {
    for (const auto &row : rows)
        if (!row.is_fitted()) return false;
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

// The rows of a table: `row(kind)` of each line for each of its ids.
template <const auto &kLines> constexpr auto rows_of() {
    constexpr size_t kCount = [] {
        size_t count = 0;
        for (const auto &line : kLines)
            for (int32_t id : line.ids) count += id != 0;
        return count;
    }();
    constexpr auto kRows = [] {
        std::array<decltype(kLines[0].row(0)), kCount> rows{};
        size_t next = 0;
        for (const auto &line : kLines)
            for (size_t kind = 0; kind < std::size(line.ids); ++kind)
                if (line.ids[kind] != 0) rows[next++] = line.row(kind);
        return rows;
    }();
    static_assert(ids_differ(kRows));
    static_assert(are_fitted(kRows), "a row's tile has a fitted cost");
    return kRows;
}

template <class Rows> constexpr bool has_precision(const Rows &rows, Precision precision) {
    for (const auto &row : rows)
        if (row.precision == precision) return true;
    return false;
}

// The kernel of a row of this precision: the family's `Instances`, by a file that CMake makes of families/instance.cu.in.
// `variant` is the family's: whether the kernel applies a prologue, which, or how X is padded.
template <const auto &kRows, Precision kPrecision> const void *kernel_of_precision(size_t row, int variant);

template <const auto &kRows> const void *kernel_of_row(size_t row, int variant = 0) {
    const void *found = nullptr;
    auto consider = [&]<Precision kPrecision>() {
        if constexpr (has_precision(kRows, kPrecision))
            if (kRows[row].precision == kPrecision) found = kernel_of_precision<kRows, kPrecision>(row, variant);
    };
    consider.template operator()<Precision::kF16>();
    consider.template operator()<Precision::kBF16>();
    consider.template operator()<Precision::kTF32>();
    consider.template operator()<Precision::kTF32x3>();
    return found;
}

// Null if the row is of another precision. `kernel<row>(variant)` of Instances gives the kernel of a row of the table; rows of
// the same tile share an instantiation.
template <class Instances, const auto &kRows, Precision kPrecision> const void *find_instance(size_t row, int variant) {
    const void *found = nullptr;
    auto consider = [&]<size_t kRow>() {
        if constexpr (kRows[kRow].precision == kPrecision)
            if (row == kRow) found = Instances::template kernel<kRow>(variant);
    };
    [&]<size_t... kRow>(std::index_sequence<kRow...>) {
        (consider.template operator()<kRow>(), ...);
    }(std::make_index_sequence<std::size(kRows)>());
    return found;
}

}  // namespace convpool

// SPDX-License-Identifier: Apache-2.0
// Stores rows of fp32 sums from a warp's shared memory to Y, as chunks of channels, runs of pixels, or single elements.
#pragma once

#include <type_traits>

#include "kernels/epilogue/finish.cuh"
#include "kernels/ptx/memory.cuh"
#include "kernels/tile/tile.cuh"

namespace convpool {

// finish(i, index, residual) for a lane's kTimes chunks of Y that begin where place_of(i) says. Of the residual four are loaded at a
// time, since each load waits for memory. Without one, the loop is free of what that takes: there are too few warps to hide an
// instruction's latency.
template <class Element, int kTimes, class PlaceOf, class Finish>
CONVPOOL_DEVICE void store_chunks(const void *residual, PlaceOf place_of, Finish finish) {
    if (residual == nullptr) {
#pragma unroll 1
        for (int i = 0; i < kTimes; ++i) {
            const OutputPixel place = place_of(i);
            if (place.valid) finish(i, place.base, static_cast<const uint4 *>(nullptr));
        }
        return;
    }
    constexpr int kAtOnce = kTimes < 4 ? kTimes : 4;
    static_assert(kTimes % kAtOnce == 0, "whole groups");
    uint4 words[kAtOnce] = {};  // the residual of the present four
#pragma unroll 1
    for (int i = 0; i < kTimes; ++i) {
        if (i % kAtOnce == 0) {
            UNROLLED_FOR (int j = 0; j < kAtOnce; ++j) {
                const OutputPixel place = place_of(i + j);
                if (!place.valid) continue;
                words[j] = *reinterpret_cast<const uint4 *>(static_cast<const Element *>(residual) + place.base);
            }
        }
        const OutputPixel place = place_of(i);
        if (!place.valid) continue;
        uint4 word = words[0];  // registers have no addresses
        UNROLLED_FOR (int j = 1; j < kAtOnce; ++j) word = i % kAtOnce == j ? words[j] : word;
        finish(i, place.base, &word);
    }
}

// Sums, bias, residual, activation: a lane's kTimes parts of kValues pixels of one channel, kTogether at a time, so that what one part
// waits for is hidden by the instructions of others. part_of(i, channel, v) gives a part's place and channel, and its sums to v.
template <class Config, int kTimes, int kValues, class PartOf>
CONVPOOL_DEVICE void store_parts(const Epilogue &e, const OutputView &view, PartOf part_of) {
    using Element = typename Traits<Config::kPrecision>::Element;
    using Word = std::conditional_t<kValues == 1, Element, Quad<Element>>;
    static_assert(kValues == 1 || kValues == kRunPixels, "an element, or a run");
    constexpr int kTogether = kRegistersLeft<Config> && kTimes % 4 == 0 ? 4 : 1;
    const Element *const bias = static_cast<const Element *>(e.bias), *const residual = static_cast<const Element *>(e.residual);
#pragma unroll 1
    for (int first = 0; first < kTimes; first += kTogether) {
        OutputPixel places[kTogether];
        float v[kTogether * kValues], addend[kTogether] = {};
        UNROLLED_FOR (int i = 0; i < kTogether; ++i) {
            int channel;
            places[i] = part_of(first + i, channel, v + i * kValues);
            if (bias != nullptr) addend[i] = to_float(bias[min(channel, view.m - 1)]);
        }
        UNROLLED_FOR (int i = 0; i < kTogether; ++i)
            UNROLLED_FOR (int j = 0; j < kValues; ++j) v[i * kValues + j] += addend[i];
        if (residual != nullptr) {
            Word words[kTogether] = {};
            UNROLLED_FOR (int i = 0; i < kTogether; ++i)
                if (places[i].valid) words[i] = *reinterpret_cast<const Word *>(residual + places[i].base);
            UNROLLED_FOR (int i = 0; i < kTogether; ++i) {
                float addends[4];
                if constexpr (kValues == 1) addends[0] = to_float(words[i]);
                else unpack_quad(words[i], addends, Element{});
                UNROLLED_FOR (int j = 0; j < kValues; ++j) v[i * kValues + j] += addends[j];
            }
        }
        activate_all(v, e);
        UNROLLED_FOR (int i = 0; i < kTogether; ++i) {
            Word *const to = reinterpret_cast<Word *>(static_cast<Element *>(view.y) + places[i].base);
            if constexpr (kValues == 1) {
                if (places[i].valid) *to = from_float<Element>(v[i]);
            } else {
                const float run[4] = {v[4 * i], v[4 * i + 1], v[4 * i + 2], v[4 * i + 3]};
                if (places[i].valid) *to = pack_quad(run, Element{});
            }
        }
    }
}

// Sums, bias, residual, ReLU or LeakyReLU, a lane's kTimes chunks of one column, kTogether at a time: without a branch, so that
// what one chunk waits for is hidden by the instructions of others.
template <class Config, int kTimes, int kTogether, bool kResidual, bool kRectify, class PlaceOf, class SourceOf>
CONVPOOL_DEVICE void store_sums(const Epilogue &e, const OutputView &view, int channel, PlaceOf place_of, SourceOf source_of) {
    constexpr Precision P = Config::kPrecision;
    using Element = typename Traits<P>::Element;
    constexpr int kPerChunk = Config::kPerChunk;
    static_assert(kTimes % kTogether == 0, "whole groups");
    float bias[kPerChunk] = {};  // of the lane's column, the same for all its chunks
    if (e.bias != nullptr && channel < view.m)
        unpack_chunk<P>(*reinterpret_cast<const uint4 *>(static_cast<const Element *>(e.bias) + channel), bias);
#pragma unroll 1
    for (int first = 0; first < kTimes; first += kTogether) {
        OutputPixel places[kTogether];
        uint4 residual[kTogether] = {};
        UNROLLED_FOR (int i = 0; i < kTogether; ++i) {
            places[i] = place_of(first + i);
            if (kResidual && places[i].valid)
                residual[i] = *reinterpret_cast<const uint4 *>(static_cast<const Element *>(e.residual) + places[i].base);
        }
        UNROLLED_FOR (int i = 0; i < kTogether; ++i) {
            float v[kPerChunk], addend[kPerChunk];
            load_sums(source_of(first + i), v);
            unpack_chunk<P>(residual[i], addend);
            UNROLLED_FOR (int j = 0; j < kPerChunk; ++j) v[j] = kResidual ? v[j] + bias[j] + addend[j] : v[j] + bias[j];
            if constexpr (kRectify) rectify(v, e);
            store_global_if(places[i].valid, static_cast<Element *>(view.y) + places[i].base, pack_chunk<kStored<P>>(v));
        }
    }
}

using Yes = std::true_type;
using No = std::false_type;

// Stores kRows pixels x kColumns channels of fp32 sums that lie at `source`, kColumns + 8 floats a pixel. A warp does this
// together. Three ways, by what Y's memory allows: chunks of channels, runs of pixels of a channel, single elements.
template <class Config, int kRows, int kColumns, class PixelOf>
CONVPOOL_DEVICE void store_rows(uint32_t source, const Epilogue &e, const OutputView &view, int first_row, int channel0, int lane,
                                PixelOf pixel_of) {
    constexpr Precision P = Config::kPrecision;
    constexpr int kPerChunk = Config::kPerChunk, kAcross = kColumns / kPerChunk, kPitch = kColumns + 8;
    // Where in Y the part at this pixel and channel of the rows is, and whether it exists.
    auto place_of = [&](bool inside, int row, int column) {
        const OutputPixel pixel = pixel_of(first_row + row);
        return OutputPixel{pixel.base + (channel0 + column), inside && pixel.valid && channel0 + column < view.m};
    };
    auto source_of = [&](int row, int column) { return source + (row * kPitch + column) * 4; };
    if (view.vectors) {
        constexpr int kTimes = (kRows * kAcross + 31) / 32;
        auto row = [&](int i) { return (i * 32 + lane) / kAcross; };
        auto column = [&](int i) { return (i * 32 + lane) % kAcross * kPerChunk; };
        constexpr bool kWhole = kRows * kAcross % 32 == 0;
        auto part_of = [&](int i) { return place_of(kWhole || row(i) < kRows, row(i), column(i)); };
        auto part_source = [&](int i) { return source_of(row(i), column(i)); };
        // The most frequent epilogues have loops without branches, where every lane keeps to one column of chunks.
        if constexpr (32 % kAcross == 0 && kWhole) {
            constexpr int kTogether = !kRegistersLeft<Config> ? 1 : kTimes < 4 ? kTimes : 4;
            auto store = [&](auto with_residual, auto and_rectify) {
                store_sums<Config, kTimes, kTogether, decltype(with_residual)::value, decltype(and_rectify)::value>(
                    e, view, channel0 + column(0), part_of, part_source);
            };
            if (e.residual == nullptr && e.activation == Activation::kNone) return store(No{}, No{});
            if constexpr (kRegistersLeft<Config>) {
                if (e.residual == nullptr && rectifies(e)) return store(No{}, Yes{});
                if (e.residual != nullptr && e.activation == Activation::kNone) return store(Yes{}, No{});
                if (e.residual != nullptr && rectifies(e)) return store(Yes{}, Yes{});
            }
        }
        store_chunks<typename Traits<P>::Element, kTimes>(e.residual, part_of, [&](int i, int64_t index, const uint4 *residual) {
            finish_chunk<P>(part_source(i), e, residual, view, index, channel0 + column(i));
        });
    } else if (view.step != 1) {  // neighbours store neighbouring runs, or pixels, of a channel: a lane the same ones of several
        auto store = [&](auto runs) {
            constexpr int kValues = decltype(runs)::value ? kRunPixels : 1, kAlong = kRows / kValues;
            const int along = lane % kAlong;
            const OutputPixel pixel = pixel_of(first_row + along * kValues);
            store_parts<Config, (kAlong * kColumns + 31) / 32, kValues>(e, view, [&](int i, int &channel, float *v) {
                const int column = i * (32 / kAlong) + lane / kAlong;
                channel = channel0 + column;
                const uint32_t at = source_of(along * kValues, min(column, kColumns - 1));
                if constexpr (kValues == 1) *v = load_shared_float(at);
                else load_run(at, kPitch * 4, along, v);
                return OutputPixel{pixel.base + channel * view.step, pixel.valid && column < kColumns && channel < view.m};
            });
        };
        view.runs ? store(Yes{}) : store(No{});
    } else {
        static_assert(kRows * kColumns % 32 == 0, "no lane is left over");
        store_parts<Config, kRows * kColumns / 32, 1>(e, view, [&](int i, int &channel, float *v) {
            const int row = (i * 32 + lane) / kColumns, column = (i * 32 + lane) % kColumns;
            channel = channel0 + column;
            *v = load_shared_float(source_of(row, column));
            return place_of(true, row, column);
        });
    }
}

// A warp passes its accumulators through shared memory, 16 pixels at a time, and stores whole chunks from there in a
// rolled loop. Stored straight from the fragments, the code for them all would not fit into the instruction cache, which
// costs a small layer more than its arithmetic does.

// Writes part kPart of a warp's accumulators, 16 pixels x Staging::kColumns channels, to its staging memory: `target` is the
// place of the lane's first pair of channels, row lane / 4.
template <class Config, int kPart, int kMostColumns>
CONVPOOL_DEVICE void stage_part(const Accumulators<Config> &acc, uint32_t target) {
    using Stage = Staging<Config, kMostColumns>;
    constexpr int kAcross = Stage::kColumns / 8, kParts = Config::kFragmentsN / kAcross;
    constexpr int mi = kPart / kParts, first = kPart % kParts * kAcross;
    UNROLLED_FOR (int i = 0; i < kAcross; ++i) {
        const float (&f)[4] = acc[mi][first + i];
        store_shared_pair(target + i * 32, f[0], f[1]);
        store_shared_pair(target + i * 32 + 8 * Stage::kPitch * 4, f[2], f[3]);
    }
}

// staging: Staging<Config, kMostColumns>::kBytes of shared memory that no warp reads any more. pixel_of(row of the block's tile)
// gives an OutputPixel; channel0 is the warp's first channel.
template <class Config, int kMostColumns = 64, class PixelOf>
CONVPOOL_DEVICE void store_tile(const Accumulators<Config> &acc, uint32_t staging, const Epilogue &e, const OutputView &view,
                                int first_row, int channel0, int lane, PixelOf pixel_of) {
    using Stage = Staging<Config, kMostColumns>;
    const uint32_t mine = staging + (threadIdx.x >> 5) * Stage::kWarpBytes;
    const uint32_t target = mine + ((lane >> 2) * Stage::kPitch + 2 * (lane & 3)) * 4;
    constexpr int kColumns = Stage::kColumns, kAcross = Config::kWarpN / kColumns;
    constexpr int kParts = Config::kFragmentsM * kAcross;
    static_assert(kParts <= 8, "a branch per part");
// Registers have no addresses: the index into acc is a constant in every branch.
#define CONVPOOL_STAGE_PART(i)  \
    if constexpr (kParts > (i)) \
        if (part == (i)) stage_part<Config, i, kMostColumns>(acc, target)
#pragma unroll 1
    for (int part = 0; part < kParts; ++part) {
        __syncwarp();  // the part before has been read
        CONVPOOL_STAGE_PART(0);
        CONVPOOL_STAGE_PART(1);
        CONVPOOL_STAGE_PART(2);
        CONVPOOL_STAGE_PART(3);
        CONVPOOL_STAGE_PART(4);
        CONVPOOL_STAGE_PART(5);
        CONVPOOL_STAGE_PART(6);
        CONVPOOL_STAGE_PART(7);
        __syncwarp();  // this part is complete
        store_rows<Config, 16, kColumns>(mine, e, view, first_row + part / kAcross * 16, channel0 + part % kAcross * kColumns,
                                         lane, pixel_of);
    }
#undef CONVPOOL_STAGE_PART
}

}  // namespace convpool

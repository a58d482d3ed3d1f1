// What a warp does with operands in shared memory and with the accumulators that result.
//
// A warp's accumulator fragment (mi, ni) is 16 pixels x 8 channels; lane 4g+t holds pixels g and g+8, channels 2t, 2t+1.
#pragma once

#include "../tile_config.h"
#include "common.cuh"

namespace convpool {

template <class Config> using Accumulators = float[Config::kFragmentsM][Config::kFragmentsN][4];

template <class Config> CONVPOOL_DEVICE void clear(Accumulators<Config> &acc) {
#pragma unroll
    for (int mi = 0; mi < Config::kFragmentsM; ++mi)
#pragma unroll
        for (int ni = 0; ni < Config::kFragmentsN; ++ni)
#pragma unroll
            for (int i = 0; i < 4; ++i) acc[mi][ni][i] = 0.f;
}

// Bytes from the start of a slice to a chunk of a row. Eight rows of one chunk, which an ldmatrix reads, lie in eight
// different bank groups, and so do two rows of all chunks. The pattern is the 64-byte swizzle of wgmma, too. Chunk c + 2 is
// chunk c with bit 5 turned.
CONVPOOL_DEVICE uint32_t chunk_in_row(int row, int chunk) { return row * 64 + ((chunk ^ (row >> 1 & 3)) << 4); }

// A lane's ldmatrix row of the weights: lanes 0-7 channels 0-7 of chunk 0, 8-15 the same of chunk 1, 16-31 channels 8-15
// likewise.
template <class Config> CONVPOOL_DEVICE uint32_t weight_lane_offset(int warp_n, int lane) {
    return chunk_in_row(warp_n * Config::kWarpN + (lane & 7) + ((lane >> 4) << 3), lane >> 3 & 1);
}

// The same of pixels that lie as rows of a slice: lanes 0-15 their row of chunk 0, 16-31 of chunk 1.
CONVPOOL_DEVICE uint32_t pixel_lane_offset(int first_row, int lane) { return chunk_in_row(first_row + (lane & 15), lane >> 4); }

// Where pixels come from: kMeans, P of direct_fused, in planes of a chunk; kRows, rows of a slice as they are in memory,
// fp32 not yet rounded to TF32.
enum class Pixels { kMeans, kRows };

template <Pixels kPixels> CONVPOOL_DEVICE uint32_t pixel_address(uint32_t row, uint32_t offset, uint32_t two_planes, int k) {
    return kPixels == Pixels::kRows ? (row ^ (k * 32)) + offset : row + offset + k * two_planes;
}

// acc += pixels x weights over one slice. pixel_rows[mi]: this lane's ldmatrix row (pixel lane % 16, chunk lane / 16).
// two_planes: bytes from a chunk of means to the one after the next.
template <class Config, Pixels kPixels>
CONVPOOL_DEVICE void multiply_slice(Accumulators<Config> &acc, const uint32_t (&pixel_rows)[Config::kFragmentsM],
                                    uint32_t pixel_offset, uint32_t two_planes, uint32_t weight_row) {
    constexpr Precision kPrecision = Config::kPrecision;
#pragma unroll
    for (int k = 0; k < Config::kChunks / 2; ++k) {
        uint32_t a[Config::kFragmentsM][4], b[Config::kFragmentsN / 2][4];
#pragma unroll
        for (int mi = 0; mi < Config::kFragmentsM; ++mi)
            load_matrix(a[mi], pixel_address<kPixels>(pixel_rows[mi], pixel_offset, two_planes, k));
#pragma unroll
        for (int nj = 0; nj < Config::kFragmentsN / 2; ++nj)
            load_matrix(b[nj], (weight_row ^ (k * 32)) + nj * 16 * Config::kRowBytes);
        if constexpr (kPrecision == Precision::kTF32) {
#pragma unroll
            for (int nj = 0; nj < Config::kFragmentsN / 2; ++nj)
#pragma unroll
                for (int i = 0; i < 4; ++i) b[nj][i] = round_to_tf32(b[nj][i]);
            if constexpr (kPixels == Pixels::kRows) {
#pragma unroll
                for (int mi = 0; mi < Config::kFragmentsM; ++mi)
#pragma unroll
                    for (int i = 0; i < 4; ++i) a[mi][i] = round_to_tf32(a[mi][i]);
            }
        }
#pragma unroll
        for (int ni = 0; ni < Config::kFragmentsN; ++ni)
#pragma unroll
            for (int mi = 0; mi < Config::kFragmentsM; ++mi)
                mma<kPrecision>(acc[mi][ni], a[mi], b[ni / 2][(ni & 1) * 2], b[ni / 2][(ni & 1) * 2 + 1]);
    }
}

// The same at full fp32 precision. The tensor cores truncate as they accumulate, an error that grows with the length of
// the sum, so each slice starts from zero and is added to acc by a rounded addition.
template <class Config, Pixels kPixels>
CONVPOOL_DEVICE void multiply_slice_tf32x3(Accumulators<Config> &acc, const uint32_t (&pixel_rows)[Config::kFragmentsM],
                                           uint32_t pixel_offset, uint32_t two_planes, uint32_t weight_row) {
    constexpr int kSteps = Config::kChunks / 2;
    uint32_t a_big[kSteps][Config::kFragmentsM][4], a_small[kSteps][Config::kFragmentsM][4];
#pragma unroll
    for (int k = 0; k < kSteps; ++k)
#pragma unroll
        for (int mi = 0; mi < Config::kFragmentsM; ++mi) {
            uint32_t a[4];
            load_matrix(a, pixel_address<kPixels>(pixel_rows[mi], pixel_offset, two_planes, k));
#pragma unroll
            for (int i = 0; i < 4; ++i) split_tf32(a[i], a_big[k][mi][i], a_small[k][mi][i]);
        }
#pragma unroll
    for (int nj = 0; nj < Config::kFragmentsN / 2; ++nj) {
        uint32_t b_big[kSteps][4], b_small[kSteps][4];
#pragma unroll
        for (int k = 0; k < kSteps; ++k) {
            uint32_t b[4];
            load_matrix(b, (weight_row ^ (k * 32)) + nj * 16 * Config::kRowBytes);
#pragma unroll
            for (int i = 0; i < 4; ++i) split_tf32(b[i], b_big[k][i], b_small[k][i]);
        }
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int mi = 0; mi < Config::kFragmentsM; ++mi) {
                float part[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
                for (int k = 0; k < kSteps; ++k) {
                    mma_tf32(part, a_small[k][mi], b_big[k][2 * half], b_big[k][2 * half + 1]);
                    mma_tf32(part, a_big[k][mi], b_small[k][2 * half], b_small[k][2 * half + 1]);
                }
#pragma unroll
                for (int k = 0; k < kSteps; ++k) mma_tf32(part, a_big[k][mi], b_big[k][2 * half], b_big[k][2 * half + 1]);
#pragma unroll
                for (int i = 0; i < 4; ++i) acc[mi][nj * 2 + half][i] += part[i];
            }
    }
}

template <class Config, Pixels kPixels>
CONVPOOL_DEVICE void multiply(Accumulators<Config> &acc, const uint32_t (&pixel_rows)[Config::kFragmentsM], uint32_t pixel_offset,
                              uint32_t two_planes, uint32_t weight_row) {
    if constexpr (Config::kPrecision == Precision::kTF32x3)
        multiply_slice_tf32x3<Config, kPixels>(acc, pixel_rows, pixel_offset, two_planes, weight_row);
    else multiply_slice<Config, kPixels>(acc, pixel_rows, pixel_offset, two_planes, weight_row);
}

// ---- epilogue -----------------------------------------------------------------------------------------------------
// A warp passes its accumulators through shared memory, 16 pixels at a time, and stores whole chunks from there in a
// rolled loop. Stored straight from the fragments, the code for them all would not fit into the instruction cache, which
// costs a small layer more than its arithmetic does.

// One output pixel: channel m of it is element base + m * step of Y. Or one part of it, at element base.
struct OutputPixel {
    int64_t base;
    bool valid;
};

struct OutputView {
    void *y;
    int64_t step;  // between channels
    int32_t m;
    bool vectors;       // Y, residual and bias are whole aligned chunks of channels
    bool runs = false;  // channels first: Y and residual are whole aligned runs of kRunPixels
};

template <class Config> struct Staging {
    static constexpr int kColumns = Config::kWarpN < 64 ? Config::kWarpN : 64;  // channels at a time
    static constexpr int kPitch = kColumns + 8;                                 // floats: a warp's 8-byte stores meet in no bank
    static constexpr int kWarpBytes = 16 * kPitch * 4;
    static constexpr int kBytes = Config::kWarps * kWarpBytes;
};

CONVPOOL_DEVICE void store_shared_pair(uint32_t address, float x, float y) {
    asm volatile("st.shared.v2.f32 [%0], {%1,%2};" ::"r"(address), "f"(x), "f"(y) : "memory");
}
CONVPOOL_DEVICE float load_shared_float(uint32_t address) {
    float v;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(address) : "memory");
    return v;
}

template <Precision P>
constexpr Precision kStored = P == Precision::kTF32 ? Precision::kTF32x3 : P;  // fp32 in memory is not rounded to TF32

template <int kCount> CONVPOOL_DEVICE void load_sums(uint32_t source, float (&v)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
        const uint4 part = load_shared(source + i * 4);
        v[i] = __uint_as_float(part.x);
        v[i + 1] = __uint_as_float(part.y);
        v[i + 2] = __uint_as_float(part.z);
        v[i + 3] = __uint_as_float(part.w);
    }
}

// Bias, residual, activation of one chunk of channels of one pixel, from fp32 sums at `source`.
template <Precision P>
CONVPOOL_DEVICE void finish_chunk(uint32_t source, const Epilogue &e, const uint4 *residual, const OutputView &view,
                                  int64_t index, int channel) {
    using Element = typename Traits<P>::Element;
    constexpr int kPerChunk = Traits<P>::kPerChunk;
    float v[kPerChunk], addend[kPerChunk];
    uint4 bias{};
    if (e.bias != nullptr) bias = *reinterpret_cast<const uint4 *>(static_cast<const Element *>(e.bias) + channel);
    load_sums(source, v);
    if (e.bias != nullptr) {
        unpack_chunk<P>(bias, addend);
#pragma unroll
        for (int i = 0; i < kPerChunk; ++i) v[i] += addend[i];
    }
    if (residual != nullptr) {
        unpack_chunk<P>(*residual, addend);
#pragma unroll
        for (int i = 0; i < kPerChunk; ++i) v[i] += addend[i];
    }
    activate_all(v, e);
    *reinterpret_cast<uint4 *>(static_cast<Element *>(view.y) + index) = pack_chunk<kStored<P>>(v);
}

template <Precision P>
CONVPOOL_DEVICE void finish_element(float v, const Epilogue &e, const OutputView &view, int64_t index, int channel) {
    using Element = typename Traits<P>::Element;
    if (e.bias != nullptr) v += to_float(static_cast<const Element *>(e.bias)[channel]);
    if (e.residual != nullptr) v += to_float(static_cast<const Element *>(e.residual)[index]);
    static_cast<Element *>(view.y)[index] = from_float<Element>(activate(v, e));
}

// The same of kRunPixels pixels of one channel, whose sums lie `pitch` bytes apart.
template <Precision P>
CONVPOOL_DEVICE void finish_run(uint32_t source, uint32_t pitch, int run, const Epilogue &e,
                                const Quad<typename Traits<P>::Element> *residual, const OutputView &view, int64_t index,
                                int channel) {
    using Element = typename Traits<P>::Element;
    static_assert(kRunPixels == 4, "a quad");
    const float bias = e.bias != nullptr ? to_float(static_cast<const Element *>(e.bias)[channel]) : 0.f;
    // Four runs of a channel, of rows that start in one bank, each begin with another of their rows, so that they meet in none.
    float v[4], addend[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = load_shared_float(source + ((i + run) & 3) * pitch);
    auto exchange = [&](bool wanted, int i, int j) {
        const float first = wanted ? v[j] : v[i];
        v[j] = wanted ? v[i] : v[j];
        v[i] = first;
    };
    exchange(run & 2, 0, 2);
    exchange(run & 2, 1, 3);
    exchange(run & 1, 0, 3);
    exchange(run & 1, 1, 3);
    exchange(run & 1, 2, 3);
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] += bias;
    if (residual != nullptr) {
        unpack_quad(*residual, addend, Element{});
#pragma unroll
        for (int i = 0; i < 4; ++i) v[i] += addend[i];
    }
    activate_all(v, e);
    *reinterpret_cast<Quad<Element> *>(static_cast<Element *>(view.y) + index) = pack_quad(v, Element{});
}

// finish(i, index, residual) for a lane's kTimes parts of Y, of the size of a Word, that begin where place_of(i) says. Of the
// residual four are loaded at a time, since each load waits for memory. Without one, the loop is free of what that takes: there
// are too few warps to hide an instruction's latency.
template <class Element, class Word, int kTimes, class PlaceOf, class Finish>
CONVPOOL_DEVICE void store_words(const void *residual, PlaceOf place_of, Finish finish) {
    if (residual == nullptr) {
#pragma unroll 1
        for (int i = 0; i < kTimes; ++i) {
            const OutputPixel place = place_of(i);
            if (place.valid) finish(i, place.base, static_cast<const Word *>(nullptr));
        }
        return;
    }
    constexpr int kAtOnce = kTimes < 4 ? kTimes : 4;
    static_assert(kTimes % kAtOnce == 0, "whole groups");
    Word words[kAtOnce] = {};
#pragma unroll 1
    for (int i = 0; i < kTimes; ++i) {
        if (i % kAtOnce == 0) {
#pragma unroll
            for (int j = 0; j < kAtOnce; ++j) {
                const OutputPixel place = place_of(i + j);
                if (!place.valid) continue;
                words[j] = *reinterpret_cast<const Word *>(static_cast<const Element *>(residual) + place.base);
            }
        }
        const OutputPixel place = place_of(i);
        if (!place.valid) continue;
        Word word = words[0];  // registers have no addresses
#pragma unroll
        for (int j = 1; j < kAtOnce; ++j) word = i % kAtOnce == j ? words[j] : word;
        finish(i, place.base, &word);
    }
}

// Whether a thread that holds the accumulators of a warp's tile has registers for several chunks beside them.
template <class Config>
constexpr bool kRegistersLeft =
    Config::kFragmentsM * Config::kFragmentsN * 4 <= (Config::kWarps * Config::kMinBlocks <= 8 ? 64 : 32);

// An if might become a branch.
CONVPOOL_DEVICE void store_global_if(bool wanted, void *to, const uint4 &v) {
    asm volatile(
        "{\n.reg .pred wanted;\nsetp.ne.u32 wanted, %5, 0;\n@wanted st.global.v4.b32 [%0], {%1, %2, %3, %4};\n}" ::"l"(to),
        "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(static_cast<uint32_t>(wanted))
        : "memory");
}

// Sums, bias, residual, ReLU or LeakyReLU, a lane's kTimes chunks of one column, kTogether at a time: without a branch, so that
// what one chunk waits for is hidden by the instructions of others.
template <class Config, int kTimes, int kTogether, bool kResidual, bool kRectify, class PlaceOf, class SourceOf>
CONVPOOL_DEVICE void store_sums(const Epilogue &e, const OutputView &view, int channel, PlaceOf place_of, SourceOf source_of) {
    constexpr Precision P = Config::kPrecision;
    using Element = typename Traits<P>::Element;
    constexpr int kPerChunk = Config::kPerChunk;
    static_assert(kTimes % kTogether == 0, "whole groups");
    float bias[kPerChunk] = {};
    if (e.bias != nullptr && channel < view.m)
        unpack_chunk<P>(*reinterpret_cast<const uint4 *>(static_cast<const Element *>(e.bias) + channel), bias);
#pragma unroll 1
    for (int first = 0; first < kTimes; first += kTogether) {
        OutputPixel places[kTogether];
        uint4 residual[kTogether] = {};
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
            places[i] = place_of(first + i);
            if (kResidual && places[i].valid)
                residual[i] = *reinterpret_cast<const uint4 *>(static_cast<const Element *>(e.residual) + places[i].base);
        }
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
            float v[kPerChunk], addend[kPerChunk];
            load_sums(source_of(first + i), v);
            unpack_chunk<P>(residual[i], addend);
#pragma unroll
            for (int j = 0; j < kPerChunk; ++j) v[j] = kResidual ? v[j] + bias[j] + addend[j] : v[j] + bias[j];
            if constexpr (kRectify) rectify(v, e);
            store_global_if(places[i].valid, static_cast<Element *>(view.y) + places[i].base, pack_chunk<kStored<P>>(v));
        }
    }
}

// Stores kRows pixels x kColumns channels of fp32 sums that lie at `source`, kColumns + 8 floats a pixel.
template <class Config, int kRows, int kColumns, class PixelOf>
CONVPOOL_DEVICE void store_rows(uint32_t source, const Epilogue &e, const OutputView &view, int first_row, int channel0, int lane,
                                PixelOf pixel_of) {
    constexpr Precision P = Config::kPrecision;
    using Element = typename Traits<P>::Element;
    constexpr int kPerChunk = Config::kPerChunk, kAcross = kColumns / kPerChunk;
    constexpr int kPitch = kColumns + 8;
    auto place_of = [&](bool inside, int row, int column, int64_t step) {
        const OutputPixel pixel = pixel_of(first_row + row);
        const int channel = channel0 + column;
        return OutputPixel{pixel.base + channel * step, inside && pixel.valid && channel < view.m};
    };
    auto source_of = [&](int row, int column) { return source + (row * kPitch + column) * 4; };
    if (view.vectors) {
        constexpr int kTimes = (kRows * kAcross + 31) / 32;
        auto row = [&](int i) { return (i * 32 + lane) / kAcross; };
        auto column = [&](int i) { return (i * 32 + lane) % kAcross * kPerChunk; };
        constexpr bool kWhole = kRows * kAcross % 32 == 0;
        auto part_of = [&](int i) { return place_of(kWhole || row(i) < kRows, row(i), column(i), 1); };
        auto part_source = [&](int i) { return source_of(row(i), column(i)); };
        if constexpr (32 % kAcross == 0 && kWhole) {
            constexpr int kTogether = !kRegistersLeft<Config> ? 1 : kTimes < 4 ? kTimes : 4;
            auto store = [&](auto with_residual, auto and_rectify) {
                store_sums<Config, kTimes, kTogether, decltype(with_residual)::value, decltype(and_rectify)::value>(
                    e, view, channel0 + column(0), part_of, part_source);
            };
            using Yes = std::true_type;
            using No = std::false_type;
            if (e.residual == nullptr && e.activation == Activation::kNone) return store(No{}, No{});
            if constexpr (kRegistersLeft<Config>) {
                if (e.residual == nullptr && rectifies(e)) return store(No{}, Yes{});
                if (e.residual != nullptr && e.activation == Activation::kNone) return store(Yes{}, No{});
                if (e.residual != nullptr && rectifies(e)) return store(Yes{}, Yes{});
            }
        }
        store_words<Element, uint4, kTimes>(e.residual, part_of, [&](int i, int64_t index, const uint4 *residual) {
            finish_chunk<P>(part_source(i), e, residual, view, index, channel0 + column(i));
        });
    } else if (view.runs) {  // neighbours store neighbouring runs of a channel
        constexpr int kRuns = kRows / kRunPixels;
        auto run = [&](int i) { return (i * 32 + lane) % kRuns; };
        auto column = [&](int i) { return (i * 32 + lane) / kRuns; };
        store_words<Element, Quad<Element>, (kRuns * kColumns + 31) / 32>(
            e.residual, [&](int i) { return place_of(column(i) < kColumns, run(i) * kRunPixels, column(i), view.step); },
            [&](int i, int64_t index, const Quad<Element> *residual) {
                finish_run<P>(source_of(run(i) * kRunPixels, column(i)), kPitch * 4, run(i), e, residual, view, index,
                              channel0 + column(i));
            });
    } else {
#pragma unroll 1
        for (int i = lane; i < kRows * kColumns; i += 32) {
            // Lanes run along Y's memory: channels, or pixels.
            const int row = view.step == 1 ? i / kColumns : i % kRows;
            const int column = view.step == 1 ? i % kColumns : i / kRows;
            const OutputPixel pixel = pixel_of(first_row + row);
            if (pixel.valid && channel0 + column < view.m)
                finish_element<P>(load_shared_float(source + (row * kPitch + column) * 4), e, view,
                                  pixel.base + (channel0 + column) * view.step, channel0 + column);
        }
    }
}

template <class Config, int kPart> CONVPOOL_DEVICE void stage_part(const Accumulators<Config> &acc, uint32_t target) {
    constexpr int kAcross = Staging<Config>::kColumns / 8, kParts = Config::kFragmentsN / kAcross;
    constexpr int mi = kPart / kParts, first = kPart % kParts * kAcross;
#pragma unroll
    for (int i = 0; i < kAcross; ++i) {
        const float (&f)[4] = acc[mi][first + i];
        store_shared_pair(target + i * 32, f[0], f[1]);
        store_shared_pair(target + i * 32 + 8 * Staging<Config>::kPitch * 4, f[2], f[3]);
    }
}

// staging: Staging<Config>::kBytes of shared memory that no warp reads any more. pixel_of(row of the block's tile) gives
// an OutputPixel; channel0 is the warp's first channel.
template <class Config, class PixelOf>
CONVPOOL_DEVICE void store_tile(const Accumulators<Config> &acc, uint32_t staging, const Epilogue &e, const OutputView &view,
                                int first_row, int channel0, int lane, PixelOf pixel_of) {
    const uint32_t mine = staging + (threadIdx.x >> 5) * Staging<Config>::kWarpBytes;
    const uint32_t target = mine + ((lane >> 2) * Staging<Config>::kPitch + 2 * (lane & 3)) * 4;
    constexpr int kColumns = Staging<Config>::kColumns, kAcross = Config::kWarpN / kColumns;
    constexpr int kParts = Config::kFragmentsM * kAcross;
    static_assert(kParts <= 4, "a branch per part");
#pragma unroll 1
    for (int part = 0; part < kParts; ++part) {
        __syncwarp();
        // Registers have no addresses: the index into acc is a constant in every branch.
        if constexpr (kParts > 0)
            if (part == 0) stage_part<Config, 0>(acc, target);
        if constexpr (kParts > 1)
            if (part == 1) stage_part<Config, 1>(acc, target);
        if constexpr (kParts > 2)
            if (part == 2) stage_part<Config, 2>(acc, target);
        if constexpr (kParts > 3)
            if (part == 3) stage_part<Config, 3>(acc, target);
        __syncwarp();
        store_rows<Config, 16, kColumns>(mine, e, view, first_row + part / kAcross * 16, channel0 + part % kAcross * kColumns,
                                         lane, pixel_of);
    }
}

// ---- a cluster's blocks each hold a part of a tile's sum ----

CONVPOOL_DEVICE void cluster_barrier() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

CONVPOOL_DEVICE float4 load_remote(uint32_t address, int block) {
    float4 v{0.f, 0.f, 0.f, 0.f};
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    uint32_t remote;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(block));
    asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(remote)
                 : "memory");
#endif
    return v;
}

template <class Config> constexpr int kSplitBytes = Config::kBlockM * Config::kWarpsN * (Config::kWarpN + 8) * 4;

// Each block writes its accumulators to its shared memory (kSplitBytes, from the start), as [warp][pixel][channel]. Block r
// then adds up, in the order of the blocks, and stores every split-th group of 4 pixels of a warp from r on: the result
// does not depend on timing. Everything this block had in shared memory is lost.
template <class Config, class PixelOf>
CONVPOOL_DEVICE void store_split(const Accumulators<Config> &acc, uint32_t shared, int split, int rank, const Epilogue &e,
                                 const OutputView &view, int first_row, int channel0, int lane, PixelOf pixel_of) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    constexpr int kPitch = Config::kWarpN + 8, kRows = 4, kAcross = Config::kWarpN / 4;
    const uint32_t mine = shared + (threadIdx.x >> 5) * Config::kWarpM * kPitch * 4;
    const uint32_t target = mine + ((lane >> 2) * kPitch + 2 * (lane & 3)) * 4;
#pragma unroll
    for (int mi = 0; mi < Config::kFragmentsM; ++mi)
#pragma unroll
        for (int ni = 0; ni < Config::kFragmentsN; ++ni) {
            const uint32_t at = target + (mi * 16 * kPitch + ni * 8) * 4;
            store_shared_pair(at, acc[mi][ni][0], acc[mi][ni][1]);
            store_shared_pair(at + 8 * kPitch * 4, acc[mi][ni][2], acc[mi][ni][3]);
        }
    cluster_barrier();
#pragma unroll 1
    for (int row = rank * kRows; row < Config::kWarpM; row += split * kRows) {
#pragma unroll 1
        for (int i = lane; i < kRows * kAcross; i += 32) {
            const uint32_t at = mine + ((row + i / kAcross) * kPitch + i % kAcross * 4) * 4;
            float4 sum{0.f, 0.f, 0.f, 0.f};
#pragma unroll 4
            for (int q = 0; q < split; ++q) {
                const float4 part = load_remote(at, q);
                sum.x += part.x;
                sum.y += part.y;
                sum.z += part.z;
                sum.w += part.w;
            }
            // No other block reads these pixels, so the sum may take its own part's place.
            store_shared(at, {__float_as_uint(sum.x), __float_as_uint(sum.y), __float_as_uint(sum.z), __float_as_uint(sum.w)});
        }
        __syncwarp();
        store_rows<Config, kRows, Config::kWarpN>(mine + row * kPitch * 4, e, view, first_row + row, channel0, lane, pixel_of);
    }
    cluster_barrier();  // no block leaves while another reads its memory
#endif
}

}  // namespace convpool

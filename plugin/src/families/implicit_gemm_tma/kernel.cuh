// SPDX-License-Identifier: Apache-2.0
// Implicit GEMM on Hopper, fed by TMA: the products of implicit_gemm_cpasync over stages that one thread fills.
//
// A stage is 128 bytes of channels of one tap. TMA's im2col mode copies those of kBlockM consecutive output pixels, whatever
// rows and images these lie in; it knows padding, strides and dilation, and writes zeros outside the tensor and past its
// channels. A box of the weights is the same of kBlockN channels of Y. Both arrive in wgmma's 128-byte swizzle, and fp32 that
// is multiplied as TF32 rounded to it. A tap's channels fill whole stages, so the last of them is zeros in part.
//
//     kWarps      wait until a stage is full, multiply, and hand back the stage before, whose products are done
//     a thread    of a warp besides, or of a warpgroup, waits until a stage is empty, and copies
//
// With an activation in front (16-bit types), which leaves zeros as they are, warps take their rows of pixels through registers.
//
// A tile of a convolution behind an upsampling (gemm/phases.h) is of one phase: its pixels are places in X where windows start, its
// taps the phase's, and its sums go to every scale-th row and column of Y. The tiles of all phases and channels of the same places
// are neighbours, so that X comes from the L2 but once.
#pragma once

#include <type_traits>

#include "families/implicit_gemm_tma/differences.cuh"
#include "kernels/mma/gemm_sums.cuh"
#include "kernels/mma/multiply_slice.cuh"
#include "kernels/prologue/prologue.cuh"
#include "kernels/ptx/tma.cuh"
#include "kernels/tile/phase.cuh"

namespace convpool {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// A tile of one phase of an upsampled convolution.
template <class Config> struct PhaseTile : GemmTile<Config> {
    const TilePhase phase;

    CONVPOOL_DEVICE PhaseTile(const ImplicitGemmTmaParams &p, uint32_t block)
        : GemmTile<Config>(p.gemm, block), phase(p.phases, this->first_channel / Config::kBlockN) {
        this->first_channel = phase.channel_tile * Config::kBlockN;
    }
};
template <class Config> struct PlainTile : GemmTile<Config> {
    CONVPOOL_DEVICE PlainTile(const ImplicitGemmTmaParams &p, uint32_t block) : GemmTile<Config>(p.gemm, block) {}
};

// kStaged: the channels of a tile's sums that go to Y at a time through memory of their own, where a block takes several tiles.
template <class Config, bool kActivates, bool kPhases, int kStaged> struct ImplicitGemmTma {
    using Stage = GemmStage<Config>;
    static constexpr int kStages = Config::kStages, kChannels = Stage::kChunks * Config::kPerChunk;
    static constexpr int kGroups = Config::kWarps / 4;
    static constexpr int kCopyThreads = im2col_copy_threads(Config::kPrecision, Config::kBlockM, Config::kBlockN);
    static_assert(kStages >= 3, "a stage under way, two being multiplied");
    static_assert(Stage::kPixelBytes % 1024 == 0 && Stage::kBytes % 1024 == 0, "the swizzle is one of addresses");

    // Sums go to Y by copies: in boxes behind the ring, where else they pass through.
    static constexpr bool kCopies = kStaged > 0 && copies_boxes(Config::kPrecision);
    static constexpr int kBoxBytes = 16 * 128, kBoxesOffset = (kPushedOffset<Config> + 1023) / 1024 * 1024;

    const ImplicitGemmTmaParams &p;
    const uint32_t shared;
    const std::conditional_t<kPhases, PhaseTile<Config>, PlainTile<Config>> tile;
    const int first_step, steps;

    CONVPOOL_DEVICE ImplicitGemmTma(const ImplicitGemmTmaParams &params, uint32_t memory, uint32_t block)
        : p(params), shared(memory), tile(params, block), first_step(tile.steps_of(all_steps(), p.gemm).x),
          steps(tile.steps_of(all_steps(), p.gemm).y) {}

    // The steps of all blocks that share the tile's sum.
    CONVPOOL_DEVICE int all_steps() const {
        if constexpr (kPhases) return tile.phase.taps() * static_cast<int>(p.div_tap_steps.divisor);
        else return p.steps;
    }

    // A number that all lanes have, so that the compiler knows, and does not compute it again in every step.
    CONVPOOL_DEVICE static uint32_t of_the_warp(uint32_t number) { return __shfl_sync(0xffffffffu, number, 0); }
    CONVPOOL_DEVICE uint32_t stage_at(int i) const { return shared + i * Stage::kBytes; }
    CONVPOOL_DEVICE uint32_t full(int i) const { return shared + kStages * Stage::kBytes + i * 8; }
    CONVPOOL_DEVICE uint32_t empty(int i) const { return full(kStages + i); }

    // The copy of one step of this block: 128 bytes of channels of one tap.
    struct Slice {
        int tap, channel;
    };
    CONVPOOL_DEVICE Slice slice_of(int step) const {
        uint32_t tap, slice;
        p.div_tap_steps.divmod(first_step + step, tap, slice);
        return {static_cast<int>(tap), static_cast<int>(slice) * kChannels};
    }
    // A tap's number among those of W.
    CONVPOOL_DEVICE int weight_tap(int tap) const {
        if constexpr (kPhases) return tile.phase.weight_tap(tile.phase.place_of(tap), p.gemm.shape.kw);
        else return tap;
    }
    // The distance from the window's start to the pixel that a tap sees.
    CONVPOOL_DEVICE int2 distance_of(int tap) const {
        if constexpr (kPhases) {
            const int2 place = tile.phase.place_of(tap);
            return {place.x + tile.phase.shift_y, place.y + tile.phase.shift_x};
        } else {
            uint32_t a, b;
            p.gemm.div_kw.divmod(tap, a, b);
            return {static_cast<int>(a) * p.gemm.shape.dilation_h, static_cast<int>(b) * p.gemm.shape.dilation_w};
        }
    }
    // The rows of W that a step copies: whole boxes, none of which is all outside of W.
    CONVPOOL_DEVICE int weight_rows() const {
        const int left = p.gemm.shape.m - tile.first_channel;
        return min(Config::kBlockN, (left + p.w_rows - 1) / p.w_rows * p.w_rows);
    }
    // kWhole: a box has all of the tile's channels. Rows that are not copied stay as they are: their sums are those of no channel.
    template <bool kWhole> CONVPOOL_DEVICE void copy_weights(int step, int stage, int rows) const {
        const Slice slice = slice_of(step);
        const int tap = weight_tap(slice.tap);
        const uint32_t target = stage_at(stage) + Stage::kPixelBytes;
        barrier_expect(full(stage), kWhole ? Stage::kBytes : Stage::kPixelBytes + rows * Stage::kRowBytes);  // the pixels', too
        if constexpr (kWhole) copy_box(target, &p.w_map, full(stage), slice.channel, tile.first_channel, tap);
        else
            for (int row = 0; row < rows; row += p.w_rows)
                copy_box(target + row * Stage::kRowBytes, &p.w_map, full(stage), slice.channel, tile.first_channel + row, tap);
    }

    // The thread that copies. A column of the im2col map begins at the tile's first pixel; TMA goes on from there. first: the tile
    // is the block's first.
    template <bool kWhole> CONVPOOL_DEVICE void copy(Ring<kStages> &ring, bool first) const {
        const ImplicitGemmParams &g = p.gemm;
        const Shape2d &s = g.shape;
        const int early = g.early_weights && first ? min(kStages, steps) : 0, rows = kWhole ? Config::kBlockN : weight_rows();
#pragma unroll 1
        for (int step = 0; step < early; ++step) copy_weights<kWhole>(step, step, rows);
        if (!kPhases && g.early_weights) {  // the others on their way to the L2, a part by each pixel tile
            const int pixel_tiles = gridDim.x / (g.split * g.m_tiles);
#pragma unroll 1
            for (int step = early + tile.pixel_tile; step < steps; step += pixel_tiles) {
                const Slice slice = slice_of(step);
                for (int row = 0; row < rows; row += kWhole ? Config::kBlockN : p.w_rows)
                    prefetch_box(&p.w_map, slice.channel, tile.first_channel + row, weight_tap(slice.tap));
            }
        }
        wait_for_previous_kernel();
        let_next_kernel_start();
        // X may be what the kernel before has written.
        uint32_t n, rest, oy, ox;
        g.div_out_hw.divmod(tile.first_pixel, n, rest);
        g.div_out_w.divmod(rest, oy, ox);
        const int y = static_cast<int>(oy) * s.stride_h - s.pad_h, x = static_cast<int>(ox) * s.stride_w - s.pad_w;
#pragma unroll 1
        for (int step = 0; step < steps; ++step) {
            barrier_wait(empty(ring.buffer), ring.parity ^ 1);
            if (step >= early) copy_weights<kWhole>(step, ring.buffer, rows);
            const Slice slice = slice_of(step);
            const int2 distance = distance_of(slice.tap);
            copy_column(stage_at(ring.buffer), &p.x_map, full(ring.buffer), slice.channel, x, y, n, distance.y, distance.x);
            ring.next();
        }
    }

    // Where the pixel of Y of each of the tile's rows is kept, behind the ring and what sums pass through.
    CONVPOOL_DEVICE uint32_t place_of(int row) const {
        return shared + kPushedOffset<Config> + (kStaged == 0 ? 0 : Staging<Config, kStaged>::kBytes) + row * 4;
    }
    // The warp's rows: worked out while the first copies are under way, not as the sums go to Y.
    CONVPOOL_DEVICE void place_rows() const {
        if constexpr (kPhases) {
            if (pushes<Config> && p.gemm.split > 1) return;  // others push to that memory
            if (kCopies && p.y_parts > 0) return;
            const int lane = threadIdx.x & 31, row = (threadIdx.x >> 5) * 16 + lane;
            __syncwarp();  // the tile before has been stored
            if (lane < 16) store_shared_word(place_of(row), tile.phase.place_in_y(p.gemm, tile.first_pixel + row));
            __syncwarp();
        }
    }

    // The warp's sums to Y by TMA: a lane finishes its own fragments, and boxes of 16 pixels and 128 bytes of channels, in the 128-byte
    // swizzle, are copied while the warp is at its next tile. TMA leaves out what is outside of Y.
    template <bool kRectify> CONVPOOL_DEVICE void copy_sums(const float (&sums)[Config::kFragmentsN][4]) const {
        using Element = typename Traits<Config::kPrecision>::Element;
        using Pair = PairOf<Element>;
        using Word = typename Pair::Word;
        constexpr int kBytes = Config::kElementBytes, kAcross = 16 / kBytes;  // fragments of a box
        constexpr int kMost = Staging<Config, kStaged>::kWarpBytes / kBoxBytes, kAll = Config::kFragmentsN / kAcross;
        constexpr int kBoxes = kMost < kAll ? kMost : kAll;  // at a time
        static_assert(kAll % kBoxes == 0 && kBoxesOffset + Config::kWarps * kBoxes * kBoxBytes <=
                                                kPushedOffset<Config> + Staging<Config, kStaged>::kBytes);
        const Epilogue &e = p.gemm.epilogue;
        const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
        const uint32_t memory = shared + kBoxesOffset + warp * (kBoxes * kBoxBytes);
        const uint32_t target = memory + (lane >> 2) * 128 + 2 * (lane & 3) * kBytes;
        UNROLLED_FOR (int first = 0; first < Config::kFragmentsN; first += kBoxes * kAcross) {
            const int channel = tile.first_channel + first * 8;
            constexpr int kWords = (kBoxes * kAcross + 7) / 8;
            Word bias[kWords] = {};  // pair 32 j + lane
            if (e.bias != nullptr) {
                UNROLLED_FOR (int j = 0; j < kWords; ++j)
                    if (const int at = channel + 64 * j + 2 * lane; at < p.gemm.shape.m)
                        bias[j] = *reinterpret_cast<const Word *>(static_cast<const Element *>(e.bias) + at);
            }
            bulk_wait_read();
            __syncwarp();  // copies have read what was here
            UNROLLED_FOR (int i = 0; i < kBoxes * kAcross; ++i) {
                const float (&f)[4] = sums[first + i];
                const Word word = __shfl_sync(0xffffffffu, bias[i / 8], i % 8 * 4 + (lane & 3));
                const float x = to_float(reinterpret_cast<const Pair &>(word).first);
                const float y = to_float(reinterpret_cast<const Pair &>(word).second);
                float v[4] = {f[0] + x, f[1] + y, f[2] + x, f[3] + y};
                if constexpr (kRectify) rectify(v, e);
                const uint32_t at = ((target + i % kAcross * 8 * kBytes) ^ ((lane >> 2) << 4)) + i / kAcross * kBoxBytes;
                store_shared_elements(at, v[0], v[1], Element{});
                store_shared_elements(at + 8 * 128, v[2], v[3], Element{});
            }
            publish_shared();
            __syncwarp();  // all lanes' are there
            if (lane < kBoxes * p.y_parts) {
                const int box = lane % kBoxes, rows = lane / kBoxes * (16 / p.y_parts);  // the part's first of the box
                uint32_t row, column;
                p.gemm.div_out_w.divmod(tile.first_pixel + warp * 16 + rows, row, column);
                store_box(&p.y_map, memory + box * kBoxBytes + rows * 128, channel + box * kAcross * 8, tile.phase.column, column,
                          tile.phase.row, row);
            }
            bulk_commit();
        }
    }

    // The tile's sums to Y. held: the stage that the last products read; hands_back: this thread does it, for the next tile.
    CONVPOOL_DEVICE void store(const Accumulators<Config> &acc, int held, bool hands_back) const {
        if constexpr (kPhases) {
            const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
            const OutputView view = tile.phase.view(p.gemm);
            auto output_of = [&](int row) { return tile.phase.output_at(p.gemm, load_shared_word(place_of(row))); };
            if constexpr (pushes<Config>)
                if (p.gemm.split > 1)
                    return pushed_sums<Config>(p.gemm, shared, tile.rank)
                        .store(acc[0], warp, p.gemm.epilogue, view, tile.first_channel, [&](int row) {
                            return tile.phase.output_at(p.gemm, tile.phase.place_in_y(p.gemm, tile.first_pixel + row));
                        });
            if constexpr (kStaged > 0) {
                if (hands_back) barrier_arrive(empty(held));
            } else {
                barrier_of_first<Config::kThreads>();
            }
            if constexpr (kCopies)
                if (p.y_parts > 0) return rectifies(p.gemm.epilogue) ? copy_sums<true>(acc[0]) : copy_sums<false>(acc[0]);
            constexpr int kColumns = kStaged == 0 || kStaged > 64 ? 64 : kStaged;
            store_tile<Config, kColumns>(acc, kStaged == 0 ? shared : shared + kPushedOffset<Config>, p.gemm.epilogue, view,
                                         warp * 16, tile.first_channel, lane, output_of);
        } else {
            barrier_of_first<Config::kThreads>();  // the ring's place is free for the accumulators
            store_gemm_tile<Config>(acc, shared, p.gemm, tile);
        }
    }

    // Warps that multiply pixels as they lie in the stage.
    CONVPOOL_DEVICE void multiply(Ring<kStages> &ring) const {
        const uint32_t rows = of_the_warp(threadIdx.x / 128) * 64 * Stage::kRowBytes;
        const bool elected = threadIdx.x % 128 == 0;
        place_rows();
        GemmSums<Config> sums;
        // Hazard: a stage is handed back one step later, when the products that read it are done.
        int held = -1;  // the stage that products still under way read
#pragma unroll 1
        for (int step = 0; step < steps; ++step) {
            barrier_wait(full(ring.buffer), ring.parity);
            const uint32_t at = stage_at(ring.buffer);
            sums.multiply(step, at + rows, at + Stage::kPixelBytes);
            if (held >= 0 && elected) barrier_arrive(empty(held));
            held = ring.buffer;
            ring.next();
        }
        sums.finish();
        store(sums.acc, held, elected);
    }

    // Warps that take their rows of pixels through registers, where they activate them.
    CONVPOOL_DEVICE void multiply_activated(Ring<kStages> &ring) const {
        constexpr int kParts = Stage::kChunks / 2;  // of a stage: what one product takes
        const PackedPrologue<Config::kPrecision> f(p.prologue);
        const int lane = threadIdx.x & 31, row = threadIdx.x / 32 * 16 + (lane & 15);
        place_rows();
        GemmSums<Config> sums;
        int held = -1;
        uint32_t even[kParts][4], odd[kParts][4];  // pixels of a step, while products under way read those of the one before
        auto multiply_step = [&](uint32_t (&pixels)[kParts][4]) {
            barrier_wait(full(ring.buffer), ring.parity);
            const uint32_t at = stage_at(ring.buffer);
            UNROLLED_FOR (int k = 0; k < kParts; ++k) {
                load_matrix(pixels[k], at + row * Stage::kRowBytes + (((2 * k + (lane >> 4)) ^ (row & 7)) << 4));
                const uint4 v = f(uint4{pixels[k][0], pixels[k][1], pixels[k][2], pixels[k][3]});
                pixels[k][0] = v.x, pixels[k][1] = v.y, pixels[k][2] = v.z, pixels[k][3] = v.w;
            }
            wgmma_wait<0>();  // the step before: its stage is free, and so are its registers
            if (held >= 0 && lane == 0) barrier_arrive(empty(held));
            sums.multiply(pixels, at + Stage::kPixelBytes);
            held = ring.buffer;
            ring.next();
        };
#pragma unroll 1
        for (int step = 0; step < steps; step += 2) {
            multiply_step(even);
            if (step + 1 < steps) multiply_step(odd);
        }
        sums.finish();
        store(sums.acc, held, lane == 0);
    }

    CONVPOOL_DEVICE void copy(Ring<kStages> &ring, bool first = true) const {
        p.w_rows == Config::kBlockN ? copy<true>(ring, first) : copy<false>(ring, first);
    }

    // Before the block's first tile: barriers, and the exchange of a cluster.
    CONVPOOL_DEVICE void prepare() const {
        if (threadIdx.x == Config::kThreads) {
            prefetch_map(&p.x_map);
            prefetch_map(&p.w_map);
            if (kCopies && p.y_parts > 0) prefetch_map(&p.y_map);
            for (int i = 0; i < kStages; ++i) {
                barrier_init(full(i), 1);
                barrier_init(empty(i), kActivates ? Config::kWarps : kGroups);
            }
            publish_barriers();
            if constexpr (pushes<Config>)
                if (p.gemm.split > 1) pushed_sums<Config>(p.gemm, shared, tile.rank).init();
        }
        __syncthreads();
        if constexpr (pushes<Config>)
            if (p.gemm.split > 1) pushed_sums<Config>(p.gemm, shared, tile.rank).arrive();
    }
};

// Blocks take one tile, or several one after the other: the next one's copies begin while the sums of the one before go to Y.
template <class Config, bool kActivates, bool kPhases, int kStaged>
CONVPOOL_DEVICE void run_implicit_gemm_tma(const ImplicitGemmTmaParams &p, uint32_t memory) {
    using Gemm = ImplicitGemmTma<Config, kActivates, kPhases, kStaged>;
    memory = Gemm::of_the_warp(memory);
    const Gemm gemm(p, memory, blockIdx.x);
    gemm.prepare();
    Ring<Gemm::kStages> ring;
    // setmaxnreg moves registers from the warpgroup that copies to those that hold three sums.
    if (threadIdx.x < Config::kThreads) {
        if constexpr (Gemm::kCopyThreads == 128) take_registers<232>();
        wait_for_previous_kernel();
        let_next_kernel_start();
        auto multiply = [&](const Gemm &of) {
            if constexpr (kActivates) of.multiply_activated(ring);
            else of.multiply(ring);
        };
        if constexpr (kStaged > 0) {
#pragma unroll 1
            for (int block = blockIdx.x; block < p.blocks; block += gridDim.x) multiply(Gemm(p, memory, block));
            if constexpr (Gemm::kCopies) bulk_wait_read();  // the memory is the block's until then
        } else {
            multiply(gemm);
        }
    } else {
        if constexpr (Gemm::kCopyThreads == 128) give_registers<40>();
        if (threadIdx.x != Config::kThreads) return;
        if constexpr (kStaged > 0) {
#pragma unroll 1
            for (int block = blockIdx.x; block < p.blocks; block += gridDim.x)
                Gemm(p, memory, block).copy(ring, block == static_cast<int>(blockIdx.x));
        } else {
            gemm.copy(ring);
        }
    }
}

#endif

template <class Config, bool kActivates, bool kPhases, int kStaged>
__global__ void __launch_bounds__(Config::kThreads + im2col_copy_threads(Config::kPrecision, Config::kBlockM, Config::kBlockN),
                                  Config::kMinBlocks)
    implicit_gemm_tma_kernel(const __grid_constant__ ImplicitGemmTmaParams params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) unsigned char memory[];
    run_implicit_gemm_tma<Config, kActivates, kPhases, kStaged>(params, shared_address(memory));
#endif
}

}  // namespace convpool

namespace convpool::implicit_gemm_tma {

struct Instances {
    template <size_t kRow> static const void *kernel(int activates) {
        constexpr Tile t = kRows[kRow].tile;
        constexpr Precision kPrecision = kRows[kRow].precision;
        constexpr bool kPhases = kRows[kRow].operand == gemm::Operand::kPhasesOfW;
        constexpr int kStaged = kPhases ? t.staged_channels : 0;
        if constexpr (t.differences) {
            return reinterpret_cast<const void *>(&implicit_gemm_tma_differences_kernel<kPrecision>);
        } else {
            using Config = TileConfigOf<kRows, kRow>;
            if constexpr (can_activate(kPrecision, t.block_m, t.block_n, t.min_blocks))
                if (activates) return reinterpret_cast<const void *>(&implicit_gemm_tma_kernel<Config, true, kPhases, kStaged>);
            return reinterpret_cast<const void *>(&implicit_gemm_tma_kernel<Config, false, kPhases, kStaged>);
        }
    }
};

}  // namespace convpool::implicit_gemm_tma

// SPDX-License-Identifier: Apache-2.0
// implicit_gemm_tma: implicit GEMM on Hopper's tensor cores (wgmma), fed by TMA in im2col mode.
#include <numeric>

#include "families/implicit_gemm_tma/im2col_box.h"
#include "families/implicit_gemm_tma/rows.h"
#include "gemm/plan.h"

namespace convpool::implicit_gemm_tma {
namespace {

constexpr double kExposedShare = 0.65;  // of X, as it is read from memory, that products do not hide
constexpr double kStoredUs = 1.5;       // a tile of many channels of a phase whose sums threads store

// True where sums are finished on the fragments in registers.
bool finishes(const Problem &p) {
    return p.activation == Activation::kNone || p.activation == Activation::kRelu || p.activation == Activation::kLeakyRelu;
}

gemm::KernelTraits traits_of(const Row &row) {
    const Tile &t = row.tile;
    return {.row_chunks = 8,
            .copy_threads = t.differences ? 128 : im2col_copy_threads(row.precision, t.block_m, t.block_n),
            .barrier_bytes = t.stages * 2 * 8,
            .stores_runs = true,
            .phases = row.operand == gemm::Operand::kPhasesOfW,
            .persistent = row.operand == gemm::Operand::kPhasesOfW && row.split == 1 && t.staged_channels > 0};
}

class ImplicitGemmTmaPlan : public gemm::GemmPlan {
public:
    ImplicitGemmTmaPlan(const Problem &p, const Tactic &t, const Device &d, const Row &row, const gemm::Operands &operands,
                        const Im2colBox &box, const void *kernel)
        : GemmPlan(p, t, d, row, operands, traits_of(row), kernel), box_(box),
          tap_steps_(static_cast<int32_t>(ceil_div(operands.shape.c, channels()))) {}

    double expected_us() const override {
        const Shape2d &s = operands_.shape;
        const Tile &tile = row_.tile;
        const double products = row_.precision == Precision::kTF32x3 ? 0.97 + 0.82 * tile_share(tile.block_m, tile.block_n)
                                : row_.precision == Precision::kTF32 && (tile.differences || !problem.upsamples()) ? 1.07
                                                                                                                   : 1.0;
        Step step{tile.step.issue_us * products, tile.step.latency_us * products};
        if (tile.phase_step_us > 0 && problem.upsamples()) step = {tile.phase_step_us * products, 0};
        if (operands_.prologue_in_kernel) {  // through registers, while the tensor cores wait
            const double slower = tile.block_m == 64 ? 1.09 : 1.25;
            step = {slower * step.issue_us, slower * step.latency_us};
        }
        const int64_t taps = int64_t{s.kh} * s.kw;                                                 // of all phases
        const int64_t steps = ceil_div(taps * tap_steps_, row_.split * operands_.phases.count());  // whole ones of every tap
        if (tile.staged_channels > 64 && y_parts() == 0) step.issue_us += kStoredUs / static_cast<double>(steps);
        const double us = passes_and_rounds_us(steps, step);
        return operands_.box_pass ? us : us + kExposedShare * x_bytes(problem) / kBytesPerUs;
    }

protected:
    cudaError_t launch_gemm(ImplicitGemmParams &g, const convpool_tensors &t, cudaStream_t stream) const override {
        ImplicitGemmTmaParams d{};
        d.gemm = g;
        d.prologue = prologue_of(problem, t);
        d.w_rows = static_cast<int32_t>(w_rows());
        d.steps = row_.tile.differences ? tap_steps_ : g.shape.kh * g.shape.kw * tap_steps_;
        d.div_tap_steps = FastDiv(static_cast<uint32_t>(tap_steps_));
        d.phases = PhaseTiles(operands_.phases, g.m_tiles);
        d.blocks = static_cast<int32_t>(blocks());
        cudaError_t error = x_map_.get(g.x, &d.x_map, [&](CUtensorMap *map) { return encode_x(g.x, map); });
        if (error == cudaSuccess) error = w_map_.get(g.w, &d.w_map, [&](CUtensorMap *map) { return encode_w(g.w, map); });
        if (row_.tile.differences && error == cudaSuccess)
            error = y_map_.get(g.y, &d.y_map, [&](CUtensorMap *map) { return encode_rows_of_y(g.y, map); });
        d.y_parts = g.y_vectors && !row_.tile.differences ? y_parts() : 0;
        if (d.y_parts > 0 &&
            y_map_.get(g.y, &d.y_map, [&](CUtensorMap *map) { return encode_y(g.y, d.y_parts, map); }) != cudaSuccess)
            d.y_parts = 0;  // strides that no map has
        return error == cudaSuccess ? launch_kernel(&d, stream) : error;
    }

private:
    uint32_t channels() const { return 8 * static_cast<uint32_t>(problem.per_chunk()); }  // of a stage
    uint64_t pixel_bytes() const { return static_cast<uint64_t>(operands_.shape.c) * problem.element_bytes(); }

    // X [n,h,w,c]: columns of a tile's output pixels.
    cudaError_t encode_x(const void *x, CUtensorMap *map) const {
        const Shape2d &s = operands_.shape;
        const uint64_t w = static_cast<uint64_t>(s.w), h = static_cast<uint64_t>(s.h), pixel = pixel_bytes();
        const uint64_t sizes[] = {static_cast<uint64_t>(s.c), w, h, static_cast<uint64_t>(s.n)};
        const uint64_t strides[] = {pixel, w * pixel, h * w * pixel};
        const uint32_t pixels[] = {channels(), 10, 17, 1};  // a tile's places and their neighbours
        if (row_.tile.differences) return encode_tensor_map(map, row_.precision, 4, x, sizes, strides, pixels, 128, true);
        return encode_im2col_map(map, row_.precision, x, sizes, strides, box_, channels(),
                                 static_cast<uint32_t>(row_.tile.block_m));
    }

    // Channels of Y in a box of W. TMA fills what is outside of W slower than it copies, so boxes end where W does, unless they get
    // small. A box of 128 has both taps of differences.
    uint32_t w_rows() const {
        const uint32_t m = static_cast<uint32_t>(ceil_div(operands_.shape.m, 8)) * 8;
        const uint32_t most = static_cast<uint32_t>(row_.tile.block_n), part = std::gcd(m, most);
        return m < most ? m : part < 32 || row_.tile.differences ? most : part;
    }

    // W [taps,m,c], a view.
    cudaError_t encode_w(const void *w, CUtensorMap *map) const {
        const Shape2d &s = operands_.shape;
        const uint64_t taps = static_cast<uint64_t>(s.kh) * s.kw, pixel = pixel_bytes();
        const uint64_t sizes[] = {static_cast<uint64_t>(s.c), static_cast<uint64_t>(s.m), taps};
        const uint64_t strides[] = {taps * pixel, pixel};
        const uint32_t box[] = {channels(), w_rows(), 1, w_rows() == 128 ? 2u : 1u};
        if (row_.tile.differences) {  // [rows of taps,columns of taps,m,c]
            const uint64_t apart[] = {sizes[0], sizes[1], static_cast<uint64_t>(s.kw), static_cast<uint64_t>(s.kh)};
            const uint64_t steps[] = {strides[0], strides[1], static_cast<uint64_t>(s.kw) * pixel};
            return encode_tensor_map(map, row_.precision, 4, w, apart, steps, box, 128, true);
        }
        return encode_tensor_map(map, row_.precision, 3, w, sizes, strides, box, 128, true);
    }

    // The parts in which 16 places of a phase, from a multiple of 16 on, are copied to Y: each of one row, or of whole rows. 0: the sums
    // are stored, also where blocks take one tile, with no next one behind which copies are hidden.
    int32_t y_parts() const {
        const Phases &f = operands_.phases;
        if (!traits_.persistent || blocks() <= int64_t{device.multiprocessors} * row_.tile.min_blocks ||
            !copies_boxes(row_.precision) || !problem.y_channels_last || problem.m % problem.per_chunk() != 0 ||
            problem.has_residual || !finishes(problem) || f.out_h % f.rows.scale != 0 || f.out_w % f.columns.scale != 0)
            return 0;
        const int32_t w = f.grid_w();
        return w % 16 == 0 || 16 % w == 0 ? 1 : w % 8 == 0 ? 2 : w % 4 == 0 ? 4 : 0;
    }

    // Y [n * places' rows, row's phase, column, column's phase, m].
    cudaError_t encode_y(void *y, int32_t parts, CUtensorMap *map) const {
        const Phases &f = operands_.phases;
        const uint64_t rows = static_cast<uint64_t>(f.rows.scale), columns = static_cast<uint64_t>(f.columns.scale);
        const uint64_t w = static_cast<uint64_t>(f.grid_w()), m = static_cast<uint64_t>(problem.m);
        const uint64_t pixel = m * static_cast<uint64_t>(problem.element_bytes()), line = w * columns * pixel;
        const uint64_t sizes[] = {m, columns, w, rows, static_cast<uint64_t>(problem.n) * static_cast<uint64_t>(f.grid_h())};
        const uint64_t strides[] = {pixel, columns * pixel, line, rows * line};
        const uint32_t places = static_cast<uint32_t>(16 / parts), across = std::min(places, static_cast<uint32_t>(w));
        const uint32_t box[] = {static_cast<uint32_t>(128 / problem.element_bytes()), 1, across, 1, places / across};
        return encode_tensor_map(map, row_.precision, 5, y, sizes, strides, box, 128, false);
    }

    // Y [n, h, w, m], of which a box is 16 pixels of a row.
    cudaError_t encode_rows_of_y(void *y, CUtensorMap *map) const {
        const uint64_t h = static_cast<uint64_t>(problem.out[1]), w = static_cast<uint64_t>(problem.out[2]);
        const uint64_t pixel = static_cast<uint64_t>(problem.m * problem.element_bytes());
        const uint64_t sizes[] = {static_cast<uint64_t>(problem.m), w, h, static_cast<uint64_t>(problem.n), 1};
        const uint64_t strides[] = {pixel, w * pixel, h * w * pixel, static_cast<uint64_t>(problem.n) * h * w * pixel};
        const uint32_t box[] = {channels(), 16, 1, 1, 1};
        return encode_tensor_map(map, row_.precision, 5, y, sizes, strides, box, 128, false);
    }

    Im2colBox box_;
    int32_t tap_steps_;
    mutable TensorMaps<1> x_map_, w_map_, y_map_;
};

// The reason why a kernel of differences does not run a problem.
std::string differences_reason(const Problem &p, const Tactic &t) {
    for (auto [name, value, expected] : {std::tuple{"upsampling of rows", int64_t{p.upsample[1]}, 2},
                                         {"upsampling of columns", p.upsample[2], 2},
                                         {"rows of the kernel", p.kernel[1], 3},
                                         {"columns of the kernel", p.kernel[2], 3},
                                         {"leading pads of rows, modulo 2", p.pads_begin[1] % 2, 1},
                                         {"leading pads of columns, modulo 2", p.pads_begin[2] % 2, 1},
                                         {"output channels, modulo 8", p.m % 8, 0},
                                         {"channels of Y last", p.y_channels_last, 1},
                                         {"residual", p.has_residual, 0},
                                         {"none, ReLU or LeakyReLU as activation", finishes(p), 1}})
        if (value != expected) return refusal(t, name, value, std::to_string(expected), "use another upsample tactic");
    return {};
}

class ImplicitGemmTma : public Family {
public:
    std::vector<Tactic> tactics() const override { return gemm::tactics_of(*this, kRows, true, "_im2col"); }

    std::unique_ptr<Plan> plan(const Problem &p, const Tactic &t, const Device &d, std::string &reason) const override {
        const Row &row = kRows[t.row];
        const Tile &tile = row.tile;
        const gemm::Form form{row.operand, gemm::wgmma_format(row.precision),
                              !tile.differences && can_activate(row.precision, tile.block_m, tile.block_n, tile.min_blocks),
                              tile.differences};
        reason = gemm_reason(p, t, d, row, form, traits_of(row));
        if (!reason.empty()) return nullptr;
        const gemm::Operands operands = gemm::operands_of(p, form);
        Im2colBox box;
        reason = tile.differences ? differences_reason(p, t) : find_box(operands.shape, t, box);
        if (!reason.empty()) return nullptr;
        const void *function = kernel_of_row<kRows>(t.row, operands.prologue_in_kernel);
        return std::make_unique<ImplicitGemmTmaPlan>(p, t, d, row, operands, box, function);
    }
};

}  // namespace

CONVPOOL_DEFINE_FAMILY(ImplicitGemmTma)

}  // namespace convpool::implicit_gemm_tma

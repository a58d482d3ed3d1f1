// From a checked problem and a tactic to launches.
#include "run.h"

#include <atomic>
#include <cstdint>
#include <string>

#include "driver.h"
#include "launch.h"

namespace convpool {
namespace {

// Of a problem's arrays; float32 stands for all that is computed on it.
Precision storage_precision(const Problem &p) {
    return p.dtype == CONVPOOL_F16 ? Precision::kF16 : p.dtype == CONVPOOL_BF16 ? Precision::kBF16 : Precision::kTF32x3;
}

}  // namespace

// Two threads may both do it, to the same effect.
cudaError_t load_kernels(const Problem &p, const Tactic &tactic, const Device &device) {
    // Without a prologue, with one in a pass, in the kernel; by row: the last context it was done in.
    static std::atomic<uint64_t> loaded[3][256];
    const bool prologue = prologue_in_kernel(p, tactic);
    const int kind = p.has_prologue() + prologue;
    const int row = static_cast<int>(&tactic - &tactic_at(0));
    const bool remembered = row < 256 && tactic.family != Family::kGeneric;  // which has a kernel for each type
    const uint64_t context = remembered ? current_context() : 0;
    if (context != 0 && loaded[kind][row].load(std::memory_order_acquire) == context) return cudaSuccess;
    // Loading the kernel is no stream operation, but a capture in strict mode on another thread would object to it.
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    cudaError_t error = cudaThreadExchangeStreamCaptureMode(&mode);
    if (error != cudaSuccess) return error;
    if (tactic.family == Family::kGeneric) {
        error = load_generic(storage_precision(p));
    } else {
        error =
            cudaFuncSetAttribute(tactic.kernel(prologue), cudaFuncAttributeMaxDynamicSharedMemorySize, device.shared_per_block);
        if (error == cudaSuccess && (tactic.direct_gemm() || tactic.filter_fused()))
            error = load_passes(static_cast<Precision>(tactic.precision), p.has_prologue());
    }
    cudaThreadExchangeStreamCaptureMode(&mode);
    if (error == cudaSuccess && context != 0) loaded[kind][row].store(context, std::memory_order_release);
    return error;
}

namespace {

cudaError_t launch_kernel(const Problem &p, const Tactic &tactic, const Device &device, unsigned grid, size_t shared_bytes,
                          void *params, cudaStream_t stream) {
    cudaError_t error = load_kernels(p, tactic, device);
    if (error != cudaSuccess) return error;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(grid);
    config.blockDim = dim3(tactic.threads());
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    cudaLaunchAttribute attributes[2]{};
    config.attrs = attributes;
    if (tactic.split > 1) {
        attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
        attributes[config.numAttrs++].val.clusterDim = {static_cast<unsigned>(tactic.split), 1, 1};
    }
    if (code_architecture(device.cc) >= 90) {  // the kernels wait for the one before them themselves: wait_for_previous_kernel()
        attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
    }
    void *arguments[] = {params};
    return cudaLaunchKernelExC(&config, tactic.kernel(prologue_in_kernel(p, tactic)), arguments);
}

Prologue prologue_of(const Problem &p, const convpool_tensors &t) {
    return {p.prologue_affine ? t.scale : nullptr, p.prologue_affine ? t.shift : nullptr, p.prologue_activation,
            p.prologue_alpha};
}

Epilogue epilogue_of(const Problem &p, const convpool_tensors &t) {
    return {p.has_bias ? t.b : nullptr, p.has_residual ? t.residual : nullptr, p.activation, p.alpha, p.beta};
}

// Rows of channels of Y, the residual (which has Y's layout) and the bias are whole aligned chunks.
bool y_vectors(const Problem &p, const convpool_tensors &t) {
    return p.y_channels_last && p.m % p.per_chunk() == 0 && aligned(t.y, 16) && (!p.has_residual || aligned(t.residual, 16)) &&
           (!p.has_bias || aligned(t.b, 16));
}

// Channels of Y and of the residual, channels first, are whole aligned runs of pixels.
bool y_runs(const Problem &p, const convpool_tensors &t) {
    const int bytes = kRunPixels * p.element_bytes();
    return !p.y_channels_last && p.out_pixels() % kRunPixels == 0 && aligned(t.y, bytes) &&
           (!p.has_residual || aligned(t.residual, bytes));
}

// For kernels that read X and W where they are.
template <class Params> void set_arrays(Params &params, const Problem &p, const convpool_tensors &t) {
    params.x = t.x;
    params.w = t.w;
    params.y = t.y;
    params.prologue = prologue_of(p, t);
    params.epilogue = epilogue_of(p, t);
}

cudaError_t run_generic(const Problem &p, const convpool_tensors &t, cudaStream_t stream) {
    GenericParams g{};
    set_arrays(g, p, t);
    g.outputs = p.n * p.m * p.out_pixels();
    g.c_per_group = static_cast<int32_t>(p.c / p.group);
    g.m_per_group = static_cast<int32_t>(p.m / p.group);
    g.c = static_cast<int32_t>(p.c);
    g.m = static_cast<int32_t>(p.m);
    for (int i = 0; i < kRank; ++i) {
        g.in[i] = static_cast<int32_t>(p.in[i]);
        g.pooled[i] = static_cast<int32_t>(p.pooled[i]);
        g.out[i] = static_cast<int32_t>(p.out[i]);
        g.pool_kernel[i] = p.pool_kernel[i];
        g.pool_strides[i] = p.pool_strides[i];
        g.pool_pads[i] = p.pool_pads_begin[i];
        g.pool_dilations[i] = p.pool_dilations[i];
        g.kernel[i] = p.kernel[i];
        g.strides[i] = p.strides[i];
        g.pads[i] = p.pads_begin[i];
        g.dilations[i] = p.dilations[i];
    }
    g.x_channels_last = p.x_channels_last;
    g.y_channels_last = p.y_channels_last;
    g.x_float = p.x_float;
    g.count = static_cast<float>(p.pool_size());
    return launch_generic(g, storage_precision(p), stream);
}

cudaError_t run_direct_fused(const Problem &p, const Tactic &tactic, const Device &device, const convpool_tensors &t,
                             cudaStream_t stream) {
    DirectFusedPlan plan;
    std::string reason;
    if (!plan_direct_fused(p, tactic, device, plan, reason)) return cudaErrorInvalidValue;  // supports() has said so
    DirectFusedParams &d = plan.params;
    set_arrays(d, p, t);
    d.x_chunked = p.x_rows_chunked() && aligned(t.x, 16);
    d.w_chunked = p.w_rows_chunked() && aligned(t.w, 16);
    d.y_vectors = y_vectors(p, t);
    d.y_runs = y_runs(p, t) && p.out[2] % kRunPixels == 0 && 1 << d.tile_w_log2 >= kRunPixels;  // none leaves a tile's row
    return launch_kernel(p, tactic, device, plan.grid, plan.shared_bytes, &d, stream);
}

// TMA copies 16 bytes at least, from addresses that are multiples of it; scale and shift are read as such.
bool tma_aligned(const Problem &p, const convpool_tensors &t) {
    return aligned(t.x, 16) && aligned(t.w, 16) && y_vectors(p, t) &&
           (!p.prologue_affine || (aligned(t.scale, 16) && aligned(t.shift, 16)));
}

cudaError_t run_direct_tma(const Problem &p, const Tactic &tactic, const Device &device, const convpool_tensors &t,
                           cudaStream_t stream) {
    DirectTmaPlan plan;
    std::string reason;
    if (!plan_direct_tma(p, tactic, device, plan, reason)) return cudaErrorInvalidValue;  // supports() has said so
    DirectTmaParams &d = plan.params;
    d.y = t.y;
    d.prologue = prologue_of(p, t);
    d.epilogue = epilogue_of(p, t);
    const Precision precision = static_cast<Precision>(tactic.precision);
    const uint64_t c = static_cast<uint64_t>(p.c), h = static_cast<uint64_t>(p.in[1]), w = static_cast<uint64_t>(p.in[2]);
    const uint64_t pixel = c * p.element_bytes();
    const uint32_t slice = static_cast<uint32_t>(4 * p.per_chunk());
    for (int odd = 0; odd < 2; ++odd) {
        const uint64_t sizes[] = {c, (w + 1 - odd) / 2, h, static_cast<uint64_t>(p.n)};
        const uint64_t strides[] = {2 * pixel, w * pixel, h * w * pixel};
        const uint32_t box[] = {slice, static_cast<uint32_t>(plan.shared.raw_columns),
                                static_cast<uint32_t>(plan.shared.raw_rows), 1};
        const cudaError_t error = encode_tensor_map(&d.x_map[odd], precision, 4, static_cast<const char *>(t.x) + odd * pixel,
                                                    sizes, strides, box, 0, false);
        if (error != cudaSuccess) return error;
    }
    const uint64_t sizes[] = {c, static_cast<uint64_t>(p.m), static_cast<uint64_t>(p.taps())};
    const uint64_t strides[] = {pixel * p.taps(), pixel};
    const uint32_t box[] = {slice, static_cast<uint32_t>(tactic.block_n), static_cast<uint32_t>(tactic.stage_taps)};
    const cudaError_t error = encode_tensor_map(&d.w_map, precision, 3, t.w, sizes, strides, box, 64, true);
    if (error != cudaSuccess) return error;
    return launch_kernel(p, tactic, device, plan.grid, plan.shared.bytes, &d, stream);
}

cudaError_t run_pointwise(const Problem &p, const Tactic &tactic, const Device &device, const convpool_tensors &t,
                          cudaStream_t stream) {
    PointwisePlan plan;
    std::string reason;
    if (!plan_pointwise(p, tactic, device, plan, reason)) return cudaErrorInvalidValue;  // supports() has said so
    PointwiseParams &d = plan.params;
    set_arrays(d, p, t);
    d.y_vectors = y_vectors(p, t);
    return launch_kernel(p, tactic, device, plan.grid, plan.shared_bytes, &d, stream);
}

cudaError_t run_few_channels(const Problem &p, const Tactic &tactic, const Device &device, const convpool_tensors &t,
                             cudaStream_t stream) {
    FewChannelsPlan plan;
    std::string reason;
    if (!plan_few_channels(p, tactic, device, plan, reason)) return cudaErrorInvalidValue;  // supports() has said so
    FewChannelsParams &d = plan.params;
    set_arrays(d, p, t);
    d.y_vectors = y_vectors(p, t);
    d.y_runs = y_runs(p, t);
    return launch_kernel(p, tactic, device, plan.grid, plan.shared_bytes, &d, stream);
}

// The implicit GEMM by TMA, of g's arrays.
cudaError_t run_im2col(const Problem &p, const Tactic &tactic, const Device &device, const ImplicitGemmParams &g,
                       const Prologue &prologue, unsigned grid, cudaStream_t stream) {
    const Shape2d &s = g.shape;
    Im2colGemmParams d{};
    d.gemm = g;
    d.prologue = prologue;
    Im2colBox box;
    std::string reason;
    if (!plan_im2col(s, tactic.name(), box, reason)) return cudaErrorInvalidValue;  // supports() has said so
    const Precision precision = static_cast<Precision>(tactic.precision);
    const int channels = 8 * p.per_chunk();  // of a stage
    const uint64_t c = static_cast<uint64_t>(s.c), w = static_cast<uint64_t>(s.w), h = static_cast<uint64_t>(s.h);
    const uint64_t pixel = c * p.element_bytes(), taps = static_cast<uint64_t>(s.kh) * s.kw;
    const uint64_t x_sizes[] = {c, w, h, static_cast<uint64_t>(s.n)}, x_strides[] = {pixel, w * pixel, h * w * pixel};
    cudaError_t error = encode_im2col_map(&d.x_map, precision, g.x, x_sizes, x_strides, box, static_cast<uint32_t>(channels),
                                          static_cast<uint32_t>(tactic.block_m));
    if (error != cudaSuccess) return error;
    const uint64_t w_sizes[] = {c, static_cast<uint64_t>(s.m), taps}, w_strides[] = {taps * pixel, pixel};
    const uint32_t w_box[] = {static_cast<uint32_t>(channels), static_cast<uint32_t>(tactic.block_n), 1};
    error = encode_tensor_map(&d.w_map, precision, 3, g.w, w_sizes, w_strides, w_box, 128, true);
    if (error != cudaSuccess) return error;
    const int tap_steps = (s.c + channels - 1) / channels;
    d.steps = static_cast<int32_t>(taps) * tap_steps;
    d.div_tap_steps = FastDiv(tap_steps);
    return launch_kernel(p, tactic, device, grid, implicit_gemm_shared_bytes(tactic), &d, stream);
}

// A tactic of the portable direct_fused for pointers that the Hopper one cannot take: it needs no workspace and no alignment.
const Tactic *portable_direct_fused(const Problem &p, const Tactic &like, const Device &device) {
    for (int i = 0; i < tactic_count(); ++i) {
        const Tactic &t = tactic_at(i);
        if (t.family == Family::kDirectFused && t.precision == like.precision && reject_reason(p, t, device).empty()) return &t;
    }
    return nullptr;
}

cudaError_t run_implicit_gemm(const Problem &p, const Tactic &tactic, const Device &device, const convpool_tensors &t,
                              cudaStream_t stream) {
    const WorkspaceLayout layout = workspace_layout(p, tactic);
    const Shape2d shape = gemm_shape(p, tactic);
    const Precision precision = static_cast<Precision>(tactic.precision);
    char *const workspace = static_cast<char *>(t.workspace);
    const void *x = t.x, *w = t.w;
    cudaError_t error = load_kernels(p, tactic, device);  // the passes' too, before the first of them
    if (error != cudaSuccess) return error;
    if (layout.weight_pass) {
        void *const prepared = t.prepared != nullptr ? t.prepared : workspace;
        w = prepared;
        if ((t.flags & CONVPOOL_WEIGHTS_PREPARED) == 0) {
            WeightParams params = weight_params(p, tactic);
            params.w = t.w;
            params.out = prepared;
            error = launch_fuse_weights(params, precision, stream);
            if (error != cudaSuccess) return error;
        }
    }
    if (layout.box_pass) {
        BoxMeanParams b{};
        b.x = t.x;
        b.out = workspace + (t.prepared != nullptr ? 0 : layout.weights_bytes);
        x = b.out;
        b.prologue = prologue_of(p, t);
        b.box = tactic.direct_gemm() ? box_of(p) : BoxMean{1, 1, 1, 1, 1, 1, 0, 0, 1.f, 1.f, 1};
        b.n = shape.n;
        b.c = static_cast<int32_t>(p.c);
        b.h = static_cast<int32_t>(p.in[1]);
        b.w = static_cast<int32_t>(p.in[2]);
        b.out_h = shape.h;
        b.out_w = shape.w;
        b.format = tactic.number_format();
        b.chunks = static_cast<int32_t>(pass_chunks(p, tactic));
        b.x_channels_last = p.x_channels_last;
        b.x_chunked = p.x_rows_chunked() && aligned(t.x, 16) && int64_t{b.chunks} * p.per_chunk() == p.c;
        b.div_chunks = FastDiv(b.chunks);
        b.div_out_w = FastDiv(b.out_w);
        b.div_out_h = FastDiv(b.out_h);
        error = launch_box_mean(b, precision, code_architecture(device.cc) >= 90, stream);
        if (error != cudaSuccess) return error;
    }
    ImplicitGemmParams g{};
    g.x = x;
    g.w = w;
    g.y = t.y;
    g.epilogue = epilogue_of(p, t);
    g.shape = shape;
    g.y_vectors = y_vectors(p, t);
    g.y_runs = y_runs(p, t);
    g.pixels = static_cast<int32_t>(p.n * p.out_pixels());
    const int slice = 4 * p.per_chunk();
    g.slices = (shape.c + slice - 1) / slice;
    g.m_tiles = (shape.m + tactic.block_n - 1) / tactic.block_n;
    g.div_out_w = FastDiv(shape.out_w);
    g.div_out_hw = FastDiv(static_cast<uint32_t>(p.out_pixels()));
    g.div_m_tiles = FastDiv(g.m_tiles);
    g.split = tactic.split;
    g.div_split = FastDiv(tactic.split);
    g.round_pixels = tactic.number_format() == NumberFormat::kTF32 && !layout.box_pass;
    g.early_weights = layout.box_pass;  // which starts after whatever came before has ended, the weights' pass included
    const int tap_chunks = shape.c / p.per_chunk();
    g.chunks = shape.kh * shape.kw * tap_chunks;
    g.div_tap_chunks = FastDiv(tap_chunks);
    g.div_kw = FastDiv(shape.kw);
    const int64_t tiles = (int64_t{g.pixels} + tactic.block_m - 1) / tactic.block_m * g.m_tiles;
    const unsigned grid = static_cast<unsigned>(tiles * tactic.split);
    if (tactic.im2col()) return run_im2col(p, tactic, device, g, prologue_of(p, t), grid, stream);
    return launch_kernel(p, tactic, device, grid, implicit_gemm_shared_bytes(tactic), &g, stream);
}

}  // namespace

cudaError_t run_tactic(const Problem &p, const Tactic &tactic, const Device &device, const convpool_tensors &t,
                       cudaStream_t stream) {
    if (tactic.family == Family::kGeneric) return run_generic(p, t, stream);
    if (tactic.few_channels()) return run_few_channels(p, tactic, device, t, stream);
    if (tactic.direct_tma() && tma_aligned(p, t)) return run_direct_tma(p, tactic, device, t, stream);
    if (tactic.pointwise() && aligned(t.x, 16) && aligned(t.w, 16) &&
        (!p.prologue_affine || (aligned(t.scale, 16) && aligned(t.shift, 16))))
        return run_pointwise(p, tactic, device, t, stream);
    if (tactic.direct_tma() || tactic.pointwise()) {
        const Tactic *portable = portable_direct_fused(p, tactic, device);
        return portable == nullptr ? run_generic(p, t, stream) : run_direct_fused(p, *portable, device, t, stream);
    }
    return tactic.direct_fused() ? run_direct_fused(p, tactic, device, t, stream)
                                 : run_implicit_gemm(p, tactic, device, t, stream);
}

}  // namespace convpool

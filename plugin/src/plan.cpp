// From a checked problem and a tactic to launches.
#include "plan.h"

#include <atomic>
#include <cstddef>
#include <cstring>

#include "driver.h"
#include "kernels/generic_exact.h"
#include "launch.h"

namespace convpool {

const void *PointerRule::pointer(const convpool_tensors &tensors) const {
    const void *value = nullptr;
    std::memcpy(&value, reinterpret_cast<const char *>(&tensors) + offset, sizeof value);
    return value;
}

std::array<PointerRule, kPointers> pointer_rules(const Problem &p) {
    const int bytes = p.element_bytes(), y_bytes = p.y_element_bytes();
    return {{{"x", kX, offsetof(convpool_tensors, x), true, p.x_element_bytes()},
             {"w", kW, offsetof(convpool_tensors, w), true, bytes},
             {"b", kB, offsetof(convpool_tensors, b), p.has_bias, y_bytes},
             {"residual", kResidual, offsetof(convpool_tensors, residual), p.has_residual, y_bytes},
             {"y", kY, offsetof(convpool_tensors, y), true, y_bytes},
             {"scale", kScale, offsetof(convpool_tensors, scale), p.prologue_affine, bytes},
             {"shift", kShift, offsetof(convpool_tensors, shift), p.prologue_affine, bytes},
             {"w_scale", kWScale, offsetof(convpool_tensors, w_scale), p.has_w_scale, 4}}};
}

uint32_t vector_aligned(const Problem &problem, const convpool_tensors &tensors) {
    uint32_t set = kNoTensors;
    for (const PointerRule &rule : pointer_rules(problem))
        if (!rule.read || aligned(rule.pointer(tensors), 16)) set |= rule.tensor;
    return set;
}

Plan::Plan(const Problem &p, const Tactic &t, const Device &d)
    : problem(p), tactic(t), device(d), workspace(workspace_layout(p, t)), pointers(pointer_rules(p)) {}

namespace {

// Of a problem's arrays; float32 stands for all that is computed on it.
Precision storage_precision(const Problem &p) {
    return p.w_dtype == CONVPOOL_F16 ? Precision::kF16 : p.w_dtype == CONVPOOL_BF16 ? Precision::kBF16 : Precision::kTF32x3;
}

// Loading a kernel is no stream operation, but a capture in strict mode on another thread would object to it.
template <class Body> cudaError_t outside_captures(Body body) {
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    cudaError_t error = cudaThreadExchangeStreamCaptureMode(&mode);
    if (error != cudaSuccess) return error;
    error = body();
    cudaThreadExchangeStreamCaptureMode(&mode);
    return error;
}

// One kernel of a tactic and how it is launched.
struct Kernel {
    const void *function = nullptr;
    unsigned grid = 0, threads = 0, cluster = 1;
    size_t shared_bytes = 0;
    bool overlap = false;  // may start before the kernel before it ends, and waits for it: wait_for_previous_kernel()

    Kernel(const Tactic &tactic, const Device &device, bool prologue, unsigned blocks, size_t shared)
        : function(tactic.kernel(prologue)), grid(blocks), threads(static_cast<unsigned>(tactic.threads())),
          cluster(static_cast<unsigned>(tactic.split)), shared_bytes(shared), overlap(code_architecture(device.cc) >= 90) {}

    cudaError_t load(const Device &device) const {
        return outside_captures(
            [&] { return cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, device.shared_per_block); });
    }

    cudaError_t launch(void *params, cudaStream_t stream) const {
        cudaLaunchConfig_t config{};
        config.gridDim = dim3(grid);
        config.blockDim = dim3(threads);
        config.dynamicSmemBytes = shared_bytes;
        config.stream = stream;
        cudaLaunchAttribute attributes[2]{};
        config.attrs = attributes;
        if (cluster > 1) {
            attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
            attributes[config.numAttrs++].val.clusterDim = {cluster, 1, 1};
        }
        if (overlap) {
            attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
            attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
        }
        void *arguments[] = {params};
        return cudaLaunchKernelExC(&config, function, arguments);
    }
};

// The tensor maps of the launch before, by address: they take the driver longer than the rest of a launch. A thread that
// finds another one at them encodes its own.
template <int kCount> class TensorMaps {
public:
    template <class Encode> cudaError_t get(const void *address, CUtensorMap *maps, Encode encode) {
        if (!busy_.test_and_set(std::memory_order_acquire)) {
            const bool kept = address_ == address;
            if (kept) std::memcpy(maps, maps_, sizeof maps_);
            busy_.clear(std::memory_order_release);
            if (kept) return cudaSuccess;
        }
        const cudaError_t error = encode(maps);
        if (error == cudaSuccess && !busy_.test_and_set(std::memory_order_acquire)) {
            address_ = address;
            std::memcpy(maps_, maps, sizeof maps_);
            busy_.clear(std::memory_order_release);
        }
        return error;
    }

private:
    std::atomic_flag busy_ = ATOMIC_FLAG_INIT;
    const void *address_ = nullptr;
    CUtensorMap maps_[kCount];
};

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

uint32_t affine_tensors(const Problem &p) { return p.prologue_affine ? kScale | kShift : kNoTensors; }

// ---- generic --------------------------------------------------------------------------------------------------------

class GenericPlan : public Plan {
public:
    GenericPlan(const Problem &p, const Tactic &t, const Device &d) : Plan(p, t, d) {
        g_.outputs = p.n * p.m * p.out_pixels();
        g_.c_per_group = static_cast<int32_t>(p.c / p.group);
        g_.m_per_group = static_cast<int32_t>(p.m / p.group);
        g_.c = static_cast<int32_t>(p.c);
        g_.m = static_cast<int32_t>(p.m);
        for (int i = 0; i < kRank; ++i) {
            g_.in[i] = static_cast<int32_t>(p.in[i]);
            g_.pooled[i] = static_cast<int32_t>(p.pooled[i]);
            g_.out[i] = static_cast<int32_t>(p.out[i]);
            g_.pool_kernel[i] = p.pool_kernel[i];
            g_.pool_strides[i] = p.pool_strides[i];
            g_.pool_pads[i] = p.pool_pads_begin[i];
            g_.pool_dilations[i] = p.pool_dilations[i];
            g_.kernel[i] = p.kernel[i];
            g_.strides[i] = p.strides[i];
            g_.pads[i] = p.pads_begin[i];
            g_.dilations[i] = p.dilations[i];
        }
        g_.x_channels_last = p.x_channels_last;
        g_.y_channels_last = p.y_channels_last;
        g_.x_float = p.x_float();
        g_.count = static_cast<float>(p.pool_size());
    }

    cudaError_t load() const override {
        return outside_captures(
            [&] { return problem.eight_bit() ? load_generic_exact(problem.w_dtype) : load_generic(storage_precision(problem)); });
    }

    cudaError_t launch(const convpool_tensors &t, cudaStream_t stream) const override {
        GenericParams g = g_;
        set_arrays(g, problem, t);
        if (!problem.eight_bit()) return launch_generic(g, storage_precision(problem), stream);
        return launch_generic_exact({g, problem.has_w_scale ? t.w_scale : nullptr, problem.y_dtype}, problem.w_dtype, stream);
    }

private:
    GenericParams g_{};
};

// ---- one kernel that reads X and W where they are -------------------------------------------------------------------

class DirectFusedRun : public Plan {
public:
    DirectFusedRun(const Problem &p, const Tactic &t, const Device &d, const DirectFusedPlan &plan)
        : Plan(p, t, d), params_(plan.params),
          kernel_(t, d, prologue_in_kernel(p, t), static_cast<unsigned>(plan.grid), static_cast<size_t>(plan.shared_bytes)) {}

    cudaError_t load() const override { return kernel_.load(device); }

    cudaError_t launch(const convpool_tensors &t, cudaStream_t stream) const override {
        DirectFusedParams d = params_;
        set_arrays(d, problem, t);
        d.x_chunked = problem.x_rows_chunked() && aligned(t.x, 16);
        d.w_chunked = problem.w_rows_chunked() && aligned(t.w, 16);
        d.y_vectors = y_vectors(problem, t);
        // A run that lies in one row of a tile leaves none.
        d.y_runs = y_runs(problem, t) && problem.out[2] % kRunPixels == 0 && 1 << d.tile_w_log2 >= kRunPixels;
        return kernel_.launch(&d, stream);
    }

private:
    DirectFusedParams params_;
    Kernel kernel_;
};

class PointwiseRun : public Plan {
public:
    PointwiseRun(const Problem &p, const Tactic &t, const Device &d, const PointwisePlan &plan)
        : Plan(p, t, d), params_(plan.params),
          kernel_(t, d, prologue_in_kernel(p, t), static_cast<unsigned>(plan.grid), static_cast<size_t>(plan.shared_bytes)) {
        vectors = kX | kW | affine_tensors(p);
    }

    cudaError_t load() const override { return kernel_.load(device); }

    cudaError_t launch(const convpool_tensors &t, cudaStream_t stream) const override {
        PointwiseParams d = params_;
        set_arrays(d, problem, t);
        d.y_vectors = y_vectors(problem, t);
        return kernel_.launch(&d, stream);
    }

private:
    PointwiseParams params_;
    Kernel kernel_;
};

class FewChannelsRun : public Plan {
public:
    FewChannelsRun(const Problem &p, const Tactic &t, const Device &d, const FewChannelsPlan &plan)
        : Plan(p, t, d), params_(plan.params),
          kernel_(t, d, prologue_in_kernel(p, t), static_cast<unsigned>(plan.grid), static_cast<size_t>(plan.shared_bytes)) {}

    cudaError_t load() const override { return kernel_.load(device); }

    cudaError_t launch(const convpool_tensors &t, cudaStream_t stream) const override {
        FewChannelsParams d = params_;
        set_arrays(d, problem, t);
        d.y_vectors = y_vectors(problem, t);
        d.y_runs = y_runs(problem, t);
        return kernel_.launch(&d, stream);
    }

private:
    FewChannelsParams params_;
    Kernel kernel_;
};

class DirectTmaRun : public Plan {
public:
    DirectTmaRun(const Problem &p, const Tactic &t, const Device &d, const DirectTmaPlan &plan)
        : Plan(p, t, d), params_(plan.params), shared_(plan.shared),
          kernel_(t, d, prologue_in_kernel(p, t), static_cast<unsigned>(plan.grid), static_cast<size_t>(plan.shared.bytes)) {
        // TMA copies 16 bytes at least, from addresses that are multiples of it; Y is written in chunks of it.
        vectors = kX | kW | kY | affine_tensors(p) | (p.has_bias ? kB : kNoTensors) | (p.has_residual ? kResidual : kNoTensors);
    }

    cudaError_t load() const override { return kernel_.load(device); }

    cudaError_t launch(const convpool_tensors &t, cudaStream_t stream) const override {
        DirectTmaParams d = params_;
        d.y = t.y;
        d.prologue = prologue_of(problem, t);
        d.epilogue = epilogue_of(problem, t);
        cudaError_t error = x_maps_.get(t.x, d.x_map, [&](CUtensorMap *maps) { return encode_x(t.x, maps); });
        if (error == cudaSuccess) error = w_map_.get(t.w, &d.w_map, [&](CUtensorMap *map) { return encode_w(t.w, map); });
        return error == cudaSuccess ? kernel_.launch(&d, stream) : error;
    }

private:
    uint64_t pixel_bytes() const { return static_cast<uint64_t>(problem.c) * problem.element_bytes(); }
    uint32_t slice() const { return static_cast<uint32_t>(4 * problem.per_chunk()); }
    Precision precision() const { return static_cast<Precision>(tactic.precision); }

    cudaError_t encode_x(const void *x, CUtensorMap *maps) const {
        const Problem &p = problem;
        const uint64_t h = static_cast<uint64_t>(p.in[1]), w = static_cast<uint64_t>(p.in[2]), pixel = pixel_bytes();
        for (int odd = 0; odd < 2; ++odd) {
            const uint64_t sizes[] = {static_cast<uint64_t>(p.c), (w + 1 - odd) / 2, h, static_cast<uint64_t>(p.n)};
            const uint64_t strides[] = {2 * pixel, w * pixel, h * w * pixel};
            const uint32_t box[] = {slice(), static_cast<uint32_t>(shared_.raw_columns), static_cast<uint32_t>(shared_.raw_rows),
                                    1};
            const cudaError_t error = encode_tensor_map(&maps[odd], precision(), 4, static_cast<const char *>(x) + odd * pixel,
                                                        sizes, strides, box, 0, false);
            if (error != cudaSuccess) return error;
        }
        return cudaSuccess;
    }

    cudaError_t encode_w(const void *w, CUtensorMap *map) const {
        const Problem &p = problem;
        const uint64_t taps = static_cast<uint64_t>(p.taps());
        const uint64_t sizes[] = {static_cast<uint64_t>(p.c), static_cast<uint64_t>(p.m), taps};
        const uint64_t strides[] = {pixel_bytes() * taps, pixel_bytes()};
        const uint32_t box[] = {slice(), static_cast<uint32_t>(tactic.block_n), static_cast<uint32_t>(tactic.stage_taps)};
        return encode_tensor_map(map, precision(), 3, w, sizes, strides, box, 64, true);
    }

    DirectTmaParams params_;
    DirectTmaShared shared_;
    Kernel kernel_;
    mutable TensorMaps<2> x_maps_;
    mutable TensorMaps<1> w_map_;
};

// ---- implicit GEMM, after passes over X and W -----------------------------------------------------------------------

unsigned gemm_grid(const Problem &p, const Tactic &t) {
    const int64_t pixels = p.n * p.out_pixels();
    return static_cast<unsigned>((pixels + t.block_m - 1) / t.block_m * ((p.m + t.block_n - 1) / t.block_n) * t.split);
}

class ImplicitGemmRun : public Plan {
public:
    ImplicitGemmRun(const Problem &p, const Tactic &t, const Device &d)
        : Plan(p, t, d), weights_(weight_params(p, t)), box_(box_params(p, t)), gemm_(gemm_params(p, t)),
          kernel_(t, d, prologue_in_kernel(p, t), gemm_grid(p, t), static_cast<size_t>(implicit_gemm_shared_bytes(t))) {
        vectors = (workspace.box_pass ? kNoTensors : kX) | (workspace.weight_pass ? kNoTensors : kW);
        gemm_.round_pixels = t.number_format() == NumberFormat::kTF32 && !workspace.box_pass;
        gemm_.early_weights = workspace.box_pass;  // which starts after all before it has ended, the weights' pass included
    }

    cudaError_t load() const override {
        const cudaError_t error = kernel_.load(device);
        if (error != cudaSuccess) return error;
        return outside_captures([&] { return load_passes(precision(), problem.has_prologue()); });
    }

    cudaError_t launch(const convpool_tensors &t, cudaStream_t stream) const override {
        char *const memory = static_cast<char *>(t.workspace);
        ImplicitGemmParams g = gemm_;
        g.x = t.x;
        g.w = t.w;
        if (workspace.weight_pass) {
            void *const prepared = t.prepared != nullptr ? t.prepared : memory;
            g.w = prepared;
            if ((t.flags & CONVPOOL_WEIGHTS_PREPARED) == 0) {
                WeightParams weights = weights_;
                weights.w = t.w;
                weights.out = prepared;
                const cudaError_t error = launch_fuse_weights(weights, precision(), stream);
                if (error != cudaSuccess) return error;
            }
        }
        if (workspace.box_pass) {
            BoxMeanParams b = box_;
            b.x = t.x;
            b.out = memory + (t.prepared != nullptr ? 0 : workspace.weights_bytes);
            g.x = b.out;
            b.prologue = prologue_of(problem, t);
            b.x_chunked = b.x_chunked && aligned(t.x, 16);
            const cudaError_t error = launch_box_mean(b, precision(), kernel_.overlap, stream);
            if (error != cudaSuccess) return error;
        }
        g.y = t.y;
        g.epilogue = epilogue_of(problem, t);
        g.y_vectors = y_vectors(problem, t);
        g.y_runs = y_runs(problem, t);
        return launch_gemm(g, t, stream);
    }

protected:
    virtual cudaError_t launch_gemm(ImplicitGemmParams &g, const convpool_tensors &, cudaStream_t stream) const {
        return kernel_.launch(&g, stream);
    }
    Precision precision() const { return static_cast<Precision>(tactic.precision); }
    const Kernel &kernel() const { return kernel_; }
    const Shape2d &shape() const { return gemm_.shape; }

private:
    static BoxMeanParams box_params(const Problem &p, const Tactic &t) {
        const Shape2d s = gemm_shape(p, t);
        BoxMeanParams b{};
        b.box = t.direct_gemm() ? box_of(p) : BoxMean{1, 1, 1, 1, 1, 1, 0, 0, 1.f, 1.f, 1};
        b.n = s.n;
        b.c = static_cast<int32_t>(p.c);
        b.h = static_cast<int32_t>(p.in[1]);
        b.w = static_cast<int32_t>(p.in[2]);
        b.out_h = s.h;
        b.out_w = s.w;
        b.format = t.number_format();
        b.chunks = static_cast<int32_t>(pass_chunks(p, t));
        b.x_channels_last = p.x_channels_last;
        b.x_chunked = p.x_rows_chunked() && int64_t{b.chunks} * p.per_chunk() == p.c;
        b.div_chunks = FastDiv(b.chunks);
        b.div_out_w = FastDiv(b.out_w);
        b.div_out_h = FastDiv(b.out_h);
        return b;
    }

    static ImplicitGemmParams gemm_params(const Problem &p, const Tactic &t) {
        ImplicitGemmParams g{};
        g.shape = gemm_shape(p, t);
        g.pixels = static_cast<int32_t>(p.n * p.out_pixels());
        const int slice = 4 * p.per_chunk();
        g.slices = (g.shape.c + slice - 1) / slice;
        g.m_tiles = (g.shape.m + t.block_n - 1) / t.block_n;
        g.div_out_w = FastDiv(g.shape.out_w);
        g.div_out_hw = FastDiv(static_cast<uint32_t>(p.out_pixels()));
        g.div_m_tiles = FastDiv(g.m_tiles);
        g.split = t.split;
        g.div_split = FastDiv(t.split);
        const int tap_chunks = g.shape.c / p.per_chunk();
        g.chunks = g.shape.kh * g.shape.kw * tap_chunks;
        g.div_tap_chunks = FastDiv(tap_chunks);
        g.div_kw = FastDiv(g.shape.kw);
        return g;
    }

    WeightParams weights_;
    BoxMeanParams box_;
    ImplicitGemmParams gemm_;
    Kernel kernel_;
};

class Im2colGemmRun : public ImplicitGemmRun {
public:
    Im2colGemmRun(const Problem &p, const Tactic &t, const Device &d, const Im2colBox &box)
        : ImplicitGemmRun(p, t, d), box_(box) {}

protected:
    cudaError_t launch_gemm(ImplicitGemmParams &g, const convpool_tensors &t, cudaStream_t stream) const override {
        Im2colGemmParams d{};
        d.gemm = g;
        d.prologue = prologue_of(problem, t);
        cudaError_t error = x_map_.get(g.x, &d.x_map, [&](CUtensorMap *map) { return encode_x(g.x, map); });
        if (error == cudaSuccess) error = w_map_.get(g.w, &d.w_map, [&](CUtensorMap *map) { return encode_w(g.w, map); });
        if (error != cudaSuccess) return error;
        const int tap_steps = (shape().c + channels() - 1) / channels();
        d.steps = shape().kh * shape().kw * tap_steps;
        d.div_tap_steps = FastDiv(tap_steps);
        return kernel().launch(&d, stream);
    }

private:
    int channels() const { return 8 * problem.per_chunk(); }  // of a stage
    uint64_t pixel_bytes() const { return static_cast<uint64_t>(shape().c) * problem.element_bytes(); }

    cudaError_t encode_x(const void *x, CUtensorMap *map) const {
        const Shape2d &s = shape();
        const uint64_t w = static_cast<uint64_t>(s.w), h = static_cast<uint64_t>(s.h), pixel = pixel_bytes();
        const uint64_t sizes[] = {static_cast<uint64_t>(s.c), w, h, static_cast<uint64_t>(s.n)};
        const uint64_t strides[] = {pixel, w * pixel, h * w * pixel};
        return encode_im2col_map(map, precision(), x, sizes, strides, box_, static_cast<uint32_t>(channels()),
                                 static_cast<uint32_t>(tactic.block_m));
    }

    cudaError_t encode_w(const void *w, CUtensorMap *map) const {
        const Shape2d &s = shape();
        const uint64_t taps = static_cast<uint64_t>(s.kh) * s.kw, pixel = pixel_bytes();
        const uint64_t sizes[] = {static_cast<uint64_t>(s.c), static_cast<uint64_t>(s.m), taps};
        const uint64_t strides[] = {taps * pixel, pixel};
        const uint32_t box[] = {static_cast<uint32_t>(channels()), static_cast<uint32_t>(tactic.block_n), 1};
        return encode_tensor_map(map, precision(), 3, w, sizes, strides, box, 128, true);
    }

    Im2colBox box_;
    mutable TensorMaps<1> x_map_, w_map_;
};

// ---- by family ------------------------------------------------------------------------------------------------------

std::unique_ptr<Plan> plan_family(const Problem &p, const Tactic &t, const Device &d, std::string &reason) {
    if (t.family == Family::kGeneric) return std::make_unique<GenericPlan>(p, t, d);
    if (t.few_channels()) {
        FewChannelsPlan plan;
        if (!plan_few_channels(p, t, d, plan, reason)) return nullptr;
        return std::make_unique<FewChannelsRun>(p, t, d, plan);
    }
    if (t.direct_tma()) {
        DirectTmaPlan plan;
        if (!plan_direct_tma(p, t, d, plan, reason)) return nullptr;
        return std::make_unique<DirectTmaRun>(p, t, d, plan);
    }
    if (t.pointwise()) {
        PointwisePlan plan;
        if (!plan_pointwise(p, t, d, plan, reason)) return nullptr;
        return std::make_unique<PointwiseRun>(p, t, d, plan);
    }
    if (t.direct_fused()) {
        DirectFusedPlan plan;
        if (!plan_direct_fused(p, t, d, plan, reason)) return nullptr;
        return std::make_unique<DirectFusedRun>(p, t, d, plan);
    }
    if (!t.im2col()) return std::make_unique<ImplicitGemmRun>(p, t, d);
    Im2colBox box;
    if (!plan_im2col(gemm_shape(p, t), t.name(), box, reason)) return nullptr;
    return std::make_unique<Im2colGemmRun>(p, t, d, box);
}

}  // namespace

std::unique_ptr<Plan> make_plan(const Problem &p, const Tactic &t, const Device &d, std::string &reason) {
    reason = reject_reason(p, t, d);
    if (!reason.empty()) return nullptr;
    std::unique_ptr<Plan> plan = plan_family(p, t, d, reason);
    if (plan != nullptr) plan->expected_us = expected_us(p, t, d);
    return plan;
}

}  // namespace convpool

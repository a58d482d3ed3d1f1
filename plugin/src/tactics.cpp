#include "tactics.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <initializer_list>
#include <numeric>
#include <vector>

#include "launch.h"

namespace convpool {
namespace {

constexpr int CONVPOOL_PRECISION_ANY = -1, CONVPOOL_PRECISION_F16 = 0, CONVPOOL_PRECISION_BF16 = 1, CONVPOOL_PRECISION_TF32 = 2,
              CONVPOOL_PRECISION_TF32X3 = 3;
constexpr Family CONVPOOL_FAMILY_generic = Family::kGeneric, CONVPOOL_FAMILY_direct_gemm = Family::kDirectGemm,
                 CONVPOOL_FAMILY_direct_fused = Family::kDirectFused, CONVPOOL_FAMILY_direct_gemm_sm90 = Family::kDirectGemmSm90,
                 CONVPOOL_FAMILY_direct_gemm_im2col = Family::kDirectGemmIm2col,
                 CONVPOOL_FAMILY_pointwise_sm90 = Family::kPointwiseSm90, CONVPOOL_FAMILY_few_channels = Family::kFewChannels,
                 CONVPOOL_FAMILY_filter_fused = Family::kFilterFused,
                 CONVPOOL_FAMILY_filter_fused_sm90 = Family::kFilterFusedSm90,
                 CONVPOOL_FAMILY_filter_fused_im2col = Family::kFilterFusedIm2col;

constexpr Tactic kTactics[] = {
#define CONVPOOL_ROW(family, precision, ...) {CONVPOOL_FAMILY_##family, CONVPOOL_PRECISION_##precision, __VA_ARGS__},
#define CONVPOOL_TMA_ROW(precision, id, subtiles, block_n, kernel, stage_taps, stages, raw_stages, mean_stages, mean_warps, \
                         mean_groups)                                                                                       \
    {Family::kDirectTma,                                                                                                    \
     CONVPOOL_PRECISION_##precision,                                                                                        \
     id,                                                                                                                    \
     subtiles * 64,                                                                                                         \
     block_n,                                                                                                               \
     0,                                                                                                                     \
     0,                                                                                                                     \
     stages,                                                                                                                \
     1,                                                                                                                     \
     1,                                                                                                                     \
     kernel,                                                                                                                \
     stage_taps,                                                                                                            \
     raw_stages,                                                                                                            \
     mean_stages,                                                                                                           \
     mean_warps},
#include "tactics.def"
#undef CONVPOOL_ROW
#undef CONVPOOL_TMA_ROW
};
constexpr int kCount = sizeof(kTactics) / sizeof(kTactics[0]);

constexpr bool ids_are_unique() {
    for (int i = 0; i < kCount; ++i) {
        if (kTactics[i].id == 0) return false;
        for (int j = 0; j < i; ++j)
            if (kTactics[i].id == kTactics[j].id) return false;
    }
    return true;
}
static_assert(ids_are_unique(), "tactic ids are distinct and not 0");

constexpr int kChunks = 4;  // TileConfig::kChunks

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
// The product, rounded up to 256 bytes; 2^62 where it is more, of problems that reject_reason refuses.
size_t bytes_of(std::initializer_list<int32_t> sizes) {
    size_t bytes = 1;
    for (const int32_t size : sizes) bytes = bytes > (size_t{1} << 62) / size ? size_t{1} << 62 : bytes * size;
    return (bytes + 255) / 256 * 256;
}

std::string got(const Tactic &t, const std::string &what, const std::string &value, const std::string &expected,
                const std::string &next) {
    return std::string(t.name()) + ": " + what + "; got " + value + ", expected " + expected + "; " + next;
}

const char *kUseGeneric = "use the tactic generic";

// Conv of dilation d over a pooling of stride s and dilation e reads X at a*d*s + u*e: steps of the fused kernel.
struct FusedKernel {
    int64_t size, dilation, tap_step, reach;  // reach: pixels from the first to the last
};

FusedKernel fused_kernel(const Problem &p, int i) {
    const int64_t step = int64_t{p.dilations[i]} * p.pool_strides[i];
    int64_t dilation = 1;
    if (p.kernel[i] > 1 && p.pool_kernel[i] > 1) dilation = std::gcd(step, int64_t{p.pool_dilations[i]});
    else if (p.kernel[i] > 1) dilation = step;
    else if (p.pool_kernel[i] > 1) dilation = p.pool_dilations[i];
    const int64_t reach = (p.kernel[i] - 1) * step + int64_t{p.pool_kernel[i] - 1} * p.pool_dilations[i];
    return {reach / dilation + 1, dilation, step, reach};
}

// Of what reject_reason has not refused, the value itself.
int32_t narrow(int64_t value) { return static_cast<int32_t>(std::min<int64_t>(value, INT32_MAX)); }

}  // namespace

int tactic_count() { return kCount; }
const Tactic &tactic_at(int index) { return kTactics[index]; }

const Tactic *find_tactic(int id) {
    for (const Tactic &t : kTactics)
        if (t.id == id) return &t;
    return nullptr;
}

const char *Tactic::family_name() const {
    if (direct_gemm()) return "direct_gemm";
    if (filter_fused()) return "filter_fused";
    return family == Family::kGeneric ? "generic" : "direct_fused";
}

int Tactic::min_cc() const {
    if (family == Family::kGeneric) return 75;
    if (split > 1 || sm90()) return 90;
    if (few_channels()) return 80;
    return precision == static_cast<int32_t>(Precision::kF16) ? 75 : 80;
}

const char *Tactic::name() const {
    static const std::deque<std::string> names = [] {
        std::deque<std::string> all;
        const char *precisions[] = {"f16", "bf16", "tf32", "tf32x3"};
        for (const Tactic &t : kTactics) {
            std::string name = std::string("conv_avgpool_") + t.family_name();
            if (t.family != Family::kGeneric) {
                const bool row = t.sm90() && !t.direct_tma();  // of 128 bytes, else of 64
                const int slice = (row && !t.reads_halves() ? 2 : 1) * kChunks * (t.precision <= 1 ? 8 : 4);
                const int k = t.few_channels() ? 16 * t.stages : slice;
                name += "_sm" + std::to_string(t.min_cc()) + (t.sm90() ? "a_" : "_") + precisions[t.precision] + "_m" +
                        std::to_string(t.block_m) + "n" + std::to_string(t.block_n) + "k" + std::to_string(k);
                name += t.few_channels() ? "_few" : "_s" + std::to_string(t.stages);
                if (t.split > 1) name += "_split" + std::to_string(t.split);
                if (t.im2col()) name += "_im2col";
                if (t.pointwise()) name += "_1x1";
                if (t.direct_tma()) name += "_tma" + std::to_string(t.kernel_size) + "x" + std::to_string(t.kernel_size);
            }
            all.push_back(name);
        }
        return all;
    }();
    return names[this - kTactics].c_str();
}

const void *Tactic::kernel(bool prologue) const {
    if (family == Family::kGeneric) return nullptr;
    using Lookup = const void *(*)(int);
    static constexpr Lookup fused[] = {direct_fused_kernel_f16, direct_fused_kernel_bf16, direct_fused_kernel_tf32,
                                       direct_fused_kernel_tf32x3};
    static constexpr Lookup gemm[] = {implicit_gemm_kernel_f16, implicit_gemm_kernel_bf16, implicit_gemm_kernel_tf32,
                                      implicit_gemm_kernel_tf32x3};
    static constexpr Lookup gemm_sm90[] = {implicit_gemm_sm90_kernel_f16, implicit_gemm_sm90_kernel_bf16,
                                           implicit_gemm_sm90_kernel_tf32, implicit_gemm_sm90_kernel_tf32x3};
    static constexpr Lookup few[] = {few_channels_kernel_f16, few_channels_kernel_bf16};
    using LookupWithPrologue = const void *(*)(int, bool);
    static constexpr LookupWithPrologue tma[] = {direct_tma_kernel_f16, direct_tma_kernel_bf16, direct_tma_kernel_tf32};
    static constexpr LookupWithPrologue gemm_im2col[] = {implicit_gemm_im2col_kernel_f16, implicit_gemm_im2col_kernel_bf16,
                                                         [](int row, bool) { return implicit_gemm_im2col_kernel_tf32(row); },
                                                         [](int row, bool) { return implicit_gemm_im2col_kernel_tf32x3(row); }};
    static constexpr LookupWithPrologue pointwise_sm90[] = {pointwise_sm90_kernel_f16, pointwise_sm90_kernel_bf16};
    if (direct_tma()) return tma[precision](id, prologue);
    if (pointwise()) return pointwise_sm90[precision](id, prologue);
    if (few_channels()) return few[precision](id);
    if (im2col()) return gemm_im2col[precision](id, prologue);
    if (sm90()) return gemm_sm90[precision](id);
    return (family == Family::kDirectFused ? fused : gemm)[precision](id);
}

int code_architecture(int cc) {
    static const std::vector<int> built = [] {  // asked for every tactic of every launch's choice
        std::vector<int> numbers;
        for (const char *text = CONVPOOL_ARCHITECTURES; text != nullptr; text = std::strchr(text, ',')) {
            text += *text == ',';
            numbers.push_back(std::atoi(text));
        }
        return numbers;
    }();
    int own = 0;
    for (int number : built)
        if (number / 10 == cc / 10 && number <= cc) own = std::max(own, number);
    return own != 0 ? own : built.back() <= cc ? built.back() : 0;
}

// ---- legality -----------------------------------------------------------------------------------------------------

std::string reject_reason(const Problem &p, const Tactic &t, const Device &device) {
    if (device.cc < t.min_cc())
        return got(t, "compute capability", std::to_string(device.cc), std::to_string(t.min_cc()) + " or more", kUseGeneric);
    if (t.family == Family::kGeneric) return {};
    // Code of an older architecture has empty kernels where it lacks the instructions.
    const int code = code_architecture(device.cc);
    if (code != 0 && code < t.min_cc())
        return got(t, "architecture of the code that such a device runs", std::to_string(code),
                   std::to_string(t.min_cc()) + " or more", "build the library for it, or use another tactic");
    if (t.sm90() && (device.cc != 90 || !CONVPOOL_HAS_SM90A))
        return got(t, "compute capability", std::to_string(device.cc) + (CONVPOOL_HAS_SM90A ? "" : ", built without 90"),
                   "90, and a library built for it", "use a tactic without sm90a");
    const Precision precision = static_cast<Precision>(t.precision);
    const int dtype = precision == Precision::kF16 ? CONVPOOL_F16 : precision == Precision::kBF16 ? CONVPOOL_BF16 : CONVPOOL_F32;
    if (p.w_dtype != dtype)
        return got(t, "dtype", dtype_name(p.w_dtype), dtype_name(dtype),
                   p.eight_bit() ? kUseGeneric : "use a tactic of that type");
    if (p.x_float() && !t.few_channels())
        return got(t, "type of X", "F32", dtype_name(dtype), "use a few_channels tactic or generic");
    if (precision == Precision::kTF32 && !p.allow_tf32)
        return got(t, "allow_tf32", "0", "1", "use a tf32x3 tactic for full precision");
    if (p.rank > 2) return got(t, "rank", std::to_string(p.rank), "1 or 2", kUseGeneric);
    if (p.group != 1) return got(t, "group", std::to_string(p.group), "1", kUseGeneric);
    // Coordinates and products of them are 32-bit in the kernels.
    constexpr int64_t kMax = int64_t{1} << 30;
    struct Limit {
        const char *name;
        int64_t value;
    };
    for (auto [name, value] : {Limit{"n * output pixels", p.n * p.out_pixels()},
                               {"output channels", p.m},
                               {"input channels", p.c},
                               {"elements of an input image", p.in_pixels() * p.c},
                               {"pooling window", p.pool_size()},
                               {"elements of a filter", p.taps() * p.c},
                               {"pooled size", std::max(p.pooled[1], p.pooled[2])}})
        if (value > kMax) return got(t, name, std::to_string(value), "at most 2^30", kUseGeneric);
    if (t.direct_tma()) {
        DirectTmaPlan plan;
        std::string reason;
        plan_direct_tma(p, t, device, plan, reason);
        return reason;
    }
    if (t.pointwise()) {
        PointwisePlan plan;
        std::string reason;
        plan_pointwise(p, t, device, plan, reason);
        return reason;
    }
    if (t.few_channels()) {
        FewChannelsPlan plan;
        std::string reason;
        plan_few_channels(p, t, device, plan, reason);
        return reason;
    }
    if (t.direct_fused()) {
        DirectFusedPlan plan;
        std::string reason;
        if (!plan_direct_fused(p, t, device, plan, reason)) return reason;
        return {};
    }
    if (t.filter_fused()) {
        for (int i = 1; i < kRank; ++i) {
            const int64_t seen = (p.out[i] - 1) * p.strides[i] * p.pool_strides[i] + fused_kernel(p, i).reach;
            const int64_t pad = int64_t{p.pads_begin[i]} * p.pool_strides[i] + p.pool_pads_begin[i];
            if (std::max(seen, pad) >= kMax)  // a row that is none counts as -2^30
                return got(t, "pixels that Y sees along dimension " + std::to_string(i - (kRank - p.rank)),
                           std::to_string(std::max(seen, pad)), "less than 2^30", "use direct_gemm or generic");
        }
        const int64_t taps = fused_kernel(p, 1).size * fused_kernel(p, 2).size;
        if (taps > kMax)
            return got(t, "taps of the fused filter", std::to_string(taps), "at most 2^30", "use direct_gemm or generic");
    }
    const WorkspaceLayout layout = workspace_layout(p, t);
    const int64_t chunks = pass_chunks(p, t), channels = chunks * p.per_chunk() * (t.reads_halves() ? 2 : 1);
    const int64_t passes = t.direct_gemm() ? p.n * p.pooled[1] * p.pooled[2] : p.n * p.in_pixels();
    if (layout.box_pass && passes * chunks > (int64_t{1} << 31) - 1)
        return got(t, "16-byte chunks of the tensor to convolve", std::to_string(passes * chunks), "less than 2^31",
                   "use direct_fused or generic");
    const Shape2d gemm = gemm_shape(p, t);
    for (auto [name, value] : {Limit{"elements of an image to convolve, channels padded", int64_t{gemm.h} * gemm.w * channels},
                               {"elements of a filter, channels padded", int64_t{gemm.kh} * gemm.kw * channels}})
        if (value > kMax) return got(t, name, std::to_string(value), "at most 2^30", "use direct_fused or generic");
    // Padding lets a filter reach further than an image, while the kernel adds 32-bit distances to 64-bit places.
    const int64_t span =
        ((int64_t{gemm.kh} - 1) * gemm.dilation_h * gemm.w + (int64_t{gemm.kw} - 1) * gemm.dilation_w + 1) * channels;
    if (t.sm90() && span > kMax)
        return got(t, "elements between a filter's first and last tap", std::to_string(span), "at most 2^30",
                   "use a tactic without sm90a");
    if (t.im2col()) {
        Im2colBox box;
        std::string reason;
        if (!plan_im2col(gemm, t.name(), box, reason)) return reason;
    }
    if (layout.weight_pass && p.m > 65535)
        return got(t, "output channels", std::to_string(p.m), "at most 65535", "use direct_fused or generic");
    if (implicit_gemm_shared_bytes(t) > device.shared_per_block)
        return got(t, "shared memory of a block", std::to_string(device.shared_per_block) + " bytes",
                   std::to_string(implicit_gemm_shared_bytes(t)), "use a tactic with smaller tiles");
    if (t.filter_fused()) {
        for (int i = 1; i < kRank; ++i) {
            // Zeros that Conv pads around the pooled tensor must be what box means over a padded X are there: zero.
            const int64_t window = int64_t{p.pool_dilations[i]} * (p.pool_kernel[i] - 1);
            const int64_t last = (p.out[i] - 1) * p.strides[i] - p.pads_begin[i] + int64_t{p.kernel[i] - 1} * p.dilations[i];
            const std::string side = " pads of dimension " + std::to_string(i - (kRank - p.rank));
            if (p.pads_begin[i] > 0 && p.pool_pads_begin[i] + p.pool_strides[i] <= window)
                return got(t, "leading" + side, std::to_string(p.pads_begin[i]), "0, or pooling pads that reach past X",
                           "use direct_fused or direct_gemm");
            if (last >= p.pooled[i] && p.pooled[i] * p.pool_strides[i] - p.pool_pads_begin[i] < p.in[i])
                return got(t, "trailing" + side, std::to_string(p.pads_end[i]), "0, or pooling pads that reach past X",
                           "use direct_fused or direct_gemm");
        }
        if (int64_t{gemm.kh} * gemm.kw * chunks * 16 > kMax)
            return got(t, "bytes of a fused filter", std::to_string(int64_t{gemm.kh} * gemm.kw * chunks * 16), "at most 2^30",
                       "use direct_fused or direct_gemm");
    }
    return {};
}

// ---- implicit GEMM ------------------------------------------------------------------------------------------------

BoxMean box_of(const Problem &p) {
    const int64_t size = p.pool_size();
    return {p.pool_kernel[1],         p.pool_kernel[2],
            p.pool_strides[1],        p.pool_strides[2],
            p.pool_dilations[1],      p.pool_dilations[2],
            p.pool_pads_begin[1],     p.pool_pads_begin[2],
            static_cast<float>(size), 1.f / static_cast<float>(size),
            (size & (size - 1)) == 0};
}

namespace {

bool pools(const Problem &p) {
    for (int i = 0; i < kRank; ++i)
        if (p.pool_kernel[i] != 1 || p.pool_strides[i] != 1 || p.pool_pads_begin[i] != 0 || p.pool_pads_end[i] != 0) return true;
    return false;
}

}  // namespace

int64_t pass_chunks(const Problem &p, const Tactic &t) {
    const int whole = t.reads_halves() ? kHalfChannels : p.per_chunk();
    return ceil_div(p.c, whole) * whole / p.per_chunk();
}

Shape2d gemm_shape(const Problem &p, const Tactic &t) {
    Shape2d s{};
    s.n = static_cast<int32_t>(p.n);
    s.c = narrow(pass_chunks(p, t) * p.per_chunk() * (t.reads_halves() ? 2 : 1));
    s.m = static_cast<int32_t>(p.m);
    s.out_h = static_cast<int32_t>(p.out[1]);
    s.out_w = static_cast<int32_t>(p.out[2]);
    s.x_channels_last = 1;
    s.y_channels_last = p.y_channels_last;
    if (t.direct_gemm()) {
        s.h = static_cast<int32_t>(p.pooled[1]);
        s.w = static_cast<int32_t>(p.pooled[2]);
        s.kh = p.kernel[1];
        s.kw = p.kernel[2];
        s.stride_h = p.strides[1];
        s.stride_w = p.strides[2];
        s.dilation_h = p.dilations[1];
        s.dilation_w = p.dilations[2];
        s.pad_h = p.pads_begin[1];
        s.pad_w = p.pads_begin[2];
    } else {
        const FusedKernel h = fused_kernel(p, 1), w = fused_kernel(p, 2);
        s.h = static_cast<int32_t>(p.in[1]);
        s.w = static_cast<int32_t>(p.in[2]);
        s.kh = narrow(h.size);
        s.kw = narrow(w.size);
        s.dilation_h = narrow(h.dilation);
        s.dilation_w = narrow(w.dilation);
        s.stride_h = narrow(int64_t{p.strides[1]} * p.pool_strides[1]);
        s.stride_w = narrow(int64_t{p.strides[2]} * p.pool_strides[2]);
        s.pad_h = narrow(int64_t{p.pads_begin[1]} * p.pool_strides[1] + p.pool_pads_begin[1]);
        s.pad_w = narrow(int64_t{p.pads_begin[2]} * p.pool_strides[2] + p.pool_pads_begin[2]);
    }
    return s;
}

WorkspaceLayout workspace_layout(const Problem &p, const Tactic &t) {
    WorkspaceLayout layout{};
    if (!t.direct_gemm() && !t.filter_fused()) return layout;
    const bool direct = t.direct_gemm();
    const Shape2d s = gemm_shape(p, t);
    const bool converted = t.number_format() != NumberFormat::kAsIs;
    layout.weight_pass = converted || !p.w_rows_chunked() || (!direct && p.pool_size() > 1);
    // In the kernel, where the zeros around X stay zero; with a pooling, where direct_fused competes, that was not measured.
    const bool activates =
        t.im2col() && !converted && im2col_activates(t.block_m, t.block_n, t.min_blocks) && !p.prologue_affine && !pools(p);
    layout.box_pass = (converted && direct) || !p.x_rows_chunked() || (direct && pools(p)) || (p.has_prologue() && !activates);
    if (layout.weight_pass) layout.weights_bytes = bytes_of({s.m, s.kh, s.kw, s.c, p.element_bytes()});
    if (layout.box_pass) layout.x_bytes = bytes_of({s.n, s.h, s.w, s.c, p.element_bytes()});
    layout.total = layout.weights_bytes + layout.x_bytes;
    return layout;
}

bool prologue_in_kernel(const Problem &p, const Tactic &t) { return p.has_prologue() && !workspace_layout(p, t).box_pass; }

int implicit_gemm_shared_bytes(const Tactic &t) {
    const int barriers = t.im2col() ? t.stages * 2 * 8 : 0;
    const int ring = t.stages * (t.block_m + t.block_n) * (t.sm90() ? 8 : kChunks) * 16 + barriers;
    const int exchange = t.block_m * t.warps_n * (t.block_n / t.warps_n + 8) * 4;  // of accumulators in a cluster
    return t.split > 1 ? std::max(ring, exchange) : ring;
}

WeightParams weight_params(const Problem &p, const Tactic &t) {
    const Shape2d s = gemm_shape(p, t);
    WeightParams w{};
    w.m = s.m;
    w.c = static_cast<int32_t>(p.c);
    w.kh = p.kernel[1];
    w.kw = p.kernel[2];
    w.fused_h = s.kh;
    w.fused_w = s.kw;
    w.format = t.number_format();
    w.chunks = static_cast<int32_t>(pass_chunks(p, t));
    if (t.filter_fused()) {
        const FusedKernel h = fused_kernel(p, 1), v = fused_kernel(p, 2);
        w.box = box_of(p);
        w.tap_step_h = narrow(h.tap_step);
        w.tap_step_w = narrow(v.tap_step);
        w.fused_dilation_h = narrow(h.dilation);
        w.fused_dilation_w = narrow(v.dilation);
    } else {
        w.box = {1, 1, 1, 1, 1, 1, 0, 0, 1.f, 1.f, 1};
        w.tap_step_h = w.tap_step_w = w.fused_dilation_h = w.fused_dilation_w = 1;
    }
    return w;
}

}  // namespace convpool

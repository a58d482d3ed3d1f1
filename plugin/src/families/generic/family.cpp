// SPDX-License-Identifier: Apache-2.0
// generic: the definition of the operator, one thread per output; any rank, stride, dilation and group.
#include <algorithm>

#include "core/cost.h"
#include "core/launch.h"
#include "families/generic/params.h"

namespace convpool::generic {
namespace {

// The precision of a problem's arrays; float32 stands for all that is computed on it.
Precision storage_precision(const Problem &p) {
    return p.w_dtype == CONVPOOL_F16 ? Precision::kF16 : p.w_dtype == CONVPOOL_BF16 ? Precision::kBF16 : Precision::kTF32x3;
}

GenericParams params_of(const Problem &p) {
    GenericParams g{};
    g.outputs = p.n * p.m * p.out_pixels();
    g.c_per_group = static_cast<int32_t>(p.c / p.group), g.m_per_group = static_cast<int32_t>(p.m / p.group);
    g.c = static_cast<int32_t>(p.c), g.m = static_cast<int32_t>(p.m);
    for (int i = 0; i < kRank; ++i) {
        g.in[i] = static_cast<int32_t>(p.in[i]);
        g.pooled[i] = static_cast<int32_t>(p.pooled[i]), g.out[i] = static_cast<int32_t>(p.out[i]);
        g.pool_kernel[i] = p.pool_kernel[i], g.pool_strides[i] = p.pool_strides[i];
        g.pool_pads[i] = p.pool_pads_begin[i], g.pool_dilations[i] = p.pool_dilations[i];
        g.kernel[i] = p.kernel[i], g.strides[i] = p.strides[i];
        g.pads[i] = p.pads_begin[i], g.dilations[i] = p.dilations[i];
        g.div_upsample[i] = FastDiv(static_cast<uint32_t>(p.upsample[i]));
    }
    g.x_channels_last = p.x_channels_last, g.y_channels_last = p.y_channels_last;
    g.x_float = p.x_float();
    g.count = static_cast<float>(p.pool_size());
    return g;
}

class GenericPlan : public Plan {
public:
    GenericPlan(const Problem &p, const Tactic &t, const Device &d) : Plan(p, t, d), params_(params_of(p)) {}

    // A thread waits for each product of its chain in turn, however few threads there are: on an H200 1x1 layers of 128 to 2048
    // channels at batch 1 take 0.64 to 0.69 us a channel, and full GPUs 5e3 to 7e3 operations a multiprocessor and microsecond.
    // A window of 56x56 takes it 0.14 us an element.
    double expected_us() const override {
        const Problem &p = problem;
        const double chain = double(p.taps()) * (double(p.c) / p.group);
        const double operations = 2.0 * p.n * p.m * p.out_pixels() * chain * (p.pool_size() + 1);
        return 3 + (0.65 + 0.14 * double(std::max<int64_t>(p.pool_size() - 4, 0))) * chain +
               operations / (device.multiprocessors * 6e3);
    }

    cudaError_t load() const override {
        return outside_captures(
            [&] { return problem.eight_bit() ? load_generic_exact(problem.w_dtype) : load_generic(storage_precision(problem)); });
    }

    cudaError_t launch(const convpool_tensors &t, cudaStream_t stream) const override {
        GenericParams g = params_;
        set_arrays(g, problem, t);
        if (!problem.eight_bit()) return launch_generic(g, storage_precision(problem), stream);
        return launch_generic_exact({g, problem.has_w_scale ? t.w_scale : nullptr, problem.y_dtype}, problem.w_dtype, stream);
    }

private:
    GenericParams params_;
};

class Generic : public Family {
public:
    std::vector<Tactic> tactics() const override {
        return {{1, this, 0, "conv_avgpool_generic", "generic", kAnyPrecision, 1, 75, false}};
    }
    std::unique_ptr<Plan> plan(const Problem &p, const Tactic &t, const Device &d, std::string &reason) const override {
        reason.clear();
        return std::make_unique<GenericPlan>(p, t, d);
    }
};

}  // namespace

CONVPOOL_DEFINE_FAMILY(Generic)

}  // namespace convpool::generic

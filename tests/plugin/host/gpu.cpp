// SPDX-License-Identifier: Apache-2.0
#include "gpu.h"

#include <algorithm>
#include <random>

namespace host {
namespace {

std::vector<uint16_t> random_halves(size_t count, unsigned seed) {
    static const uint16_t values[] = {0xBC00, 0xB800, 0x0000, 0x3800, 0x3C00};  // -1, -1/2, 0, 1/2, 1
    std::mt19937 random(seed);
    std::vector<uint16_t> result(count);
    for (uint16_t &value : result) value = values[random() % 5];
    return result;
}

}  // namespace

bool check_weight_cache(Gpu &gpu, const convpool_problem &largest, const std::function<Context(bool)> &make,
                        const std::function<int32_t(const convpool_problem &)> &tactic, size_t granted) {
    auto with_batch = [&](int64_t n) {
        convpool_problem p = largest;
        p.n = n;
        return p;
    };
    const int64_t n = largest.n, half = n / 2;
    int64_t out[CONVPOOL_MAX_RANK] = {};
    CHECK(convpool_output_shape(&largest, out) == CONVPOOL_OK);
    const size_t image = size_t(largest.m * out[0] * out[1]);
    const size_t w_count = size_t(largest.m * largest.c * largest.kernel[0] * largest.kernel[1]);
    const auto w1 = random_halves(w_count, 1), w2 = random_halves(w_count, 2), b = random_halves(largest.m, 3);
    const auto x = random_halves(size_t(n * largest.c * largest.spatial[0] * largest.spatial[1]), 4);
    const std::vector<uint16_t> poison(n * image, 0x7E00);  // NaN
    size_t weights = 0;
    CHECK(convpool_prepared_bytes(&largest, tactic(largest), &weights) == CONVPOOL_OK);
    const bool keeps = weights > 0;

    void *dx = gpu.allocate(2 * x.size()), *dw = gpu.allocate(2 * w_count), *other = gpu.allocate(2 * w_count);
    void *db = gpu.allocate(2 * b.size()), *dy = gpu.allocate(2 * poison.size());
    // What follows the granted bytes belongs to others: it must stay as it is.
    const std::vector<uint16_t> guard(1 << 21, 0x5AA5);
    char *const workspace = static_cast<char *>(gpu.allocate(granted + 2 * guard.size()));
    void *const reference_workspace = gpu.allocate(granted);
    gpu.upload(workspace + granted, guard);
    gpu.upload(dx, x);
    gpu.upload(db, b);
    gpu.upload(other, w2);
    const auto scale = random_halves(largest.c, 5), shift = random_halves(largest.c, 6), r = random_halves(poison.size(), 7);
    void *dscale = gpu.allocate(2 * scale.size()), *dshift = gpu.allocate(2 * shift.size()), *dr = gpu.allocate(2 * r.size());
    gpu.upload(dscale, scale);
    gpu.upload(dshift, shift);
    gpu.upload(dr, r);
    auto result = [&](int64_t batch) { return gpu.download(dy, batch * image); };
    auto reference = [&](const std::vector<uint16_t> &w, int64_t batch) {
        const convpool_problem p = with_batch(batch);
        convpool_tensors t{};
        t.struct_size = sizeof t;
        t.scale = dscale, t.shift = dshift, t.residual = dr;
        t.x = dx, t.w = dw, t.b = db, t.y = dy, t.workspace = reference_workspace, t.workspace_bytes = granted;
        gpu.upload(dw, w);
        gpu.upload(dy, poison);
        const bool ran = convpool_launch(&p, tactic(p), &t, gpu.stream) == CONVPOOL_OK;
        check(ran, convpool_last_error(), __FILE__, __LINE__);
        return result(batch);
    };
    const auto y1 = reference(w1, n), y2 = reference(w2, n), y1_half = reference(w1, half), y2_half = reference(w2, half);
    CHECK(y1 != y2);

    for (const bool constant : {false, true}) {
        const std::string where =
            std::string(constant ? "constant" : "open") + " weights, tactic " + std::to_string(tactic(largest)) + ": ";
        auto same = [&](const std::vector<uint16_t> &got, const std::vector<uint16_t> &wanted, const char *what) {
            check(got == wanted, where + what + " differs" + (logged.empty() ? "" : "; " + logged), __FILE__, __LINE__);
        };
        auto queue = [&](Context &context, void *w) {
            std::vector<const void *> inputs{dx, w, db};
            if (largest.prologue_affine) inputs.insert(inputs.end(), {dscale, dshift});
            if (largest.has_residual) inputs.push_back(dr);
            CHECK(context.run(inputs.data(), dy, workspace));
        };
        auto run = [&](Context &context, int64_t batch, void *w) {
            gpu.upload(dy, poison);
            queue(context, w);
            return result(batch);
        };
        auto replay = [&](void *graph) {
            gpu.upload(dy, poison);
            gpu.launch(graph);
            return result(n);
        };
        logged.clear();
        gpu.upload(dw, w1);
        Context captured = make(constant);  // the first of all that runs this kernel
        captured.shape(n);
        void *const first = gpu.capture([&] { queue(captured, dw); });
        same(replay(first), y1, "a graph captured before any run");

        Context context = make(constant);
        context.shape(n);
        same(run(context, n, dw), y1, "the first run");
        same(run(context, n, dw), y1, "the second run");
        gpu.upload(dw, w2);  // what constant_weights says does not happen: shows whether the weights were kept
        same(run(context, n, dw), constant && keeps ? y1 : y2, "a run on changed weights");
        same(run(context, n, other), y2, "a run on weights elsewhere");
        gpu.upload(dw, w1);
        same(run(context, n, dw), y1, "a run on the first weights again");
        context.shape(half);
        same(run(context, half, dw), y1_half, "another shape");
        for (int64_t batch = n / 4; batch > 0; batch /= 2) {
            const auto wanted = reference(w1, batch);
            context.shape(batch);
            same(run(context, batch, dw), wanted, "a small batch");
        }
        context.shape(n);
        same(run(context, n, dw), y1, "the first shape again");

        same(run(captured, n, dw), y1, "a run after a graph");
        void *const second = gpu.capture([&] { queue(captured, dw); });
        same(replay(second), y1, "a graph captured after a run");
        captured.shape(half);
        same(run(captured, half, dw), y1_half, "another shape after a graph");
        same(run(captured, half, other), y2_half, "weights elsewhere after a graph");
        same(replay(second), y1, "the second graph after another shape");
        same(replay(first), y1, "the first graph after another shape");
        captured.shape(n);
        same(run(captured, n, dw), y1, "the first shape after graphs");
    }
    CHECK(gpu.download(workspace + granted, guard.size()) == guard);
    return keeps;
}

}  // namespace host

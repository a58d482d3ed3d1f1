// SPDX-License-Identifier: Apache-2.0
// IPluginV2DynamicExt: what it has beside the common checks, which is what an engine stores.
#include "v2.h"

#include "checks.h"
#include "gpu.h"

#include <dlfcn.h>

#include <atomic>
#include <cstddef>
#include <thread>
#include <tuple>

namespace host {
namespace {

using v2::DataType;
using v2::TensorFormat;

void own_identity() {
    Owner<V2> plugin = make<V2>({});
    V2::Creator &creator = creator_of<V2>({});
    EQUAL(plugin->getTensorRTVersion(), (3 << 24) | version_number);
    EQUAL(creator.getTensorRTVersion(), version_number);
    CHECK(std::strcmp(plugin->getPluginVersion(), "1") == 0);
    EQUAL(plugin->getNbOutputs(), 1);
    EQUAL(plugin->initialize(), 0);
    plugin->terminate();
    plugin->setPluginNamespace("elsewhere");
    CHECK(std::strcmp(V2::clone(*plugin)->getPluginNamespace(), "elsewhere") == 0);
    plugin->setPluginNamespace(nullptr);
    CHECK(std::strcmp(plugin->getPluginNamespace(), "") == 0);
    const DataType half = DataType::kHALF;
    REFUSES((plugin->getOutputDataType(1, &half, 1), true), "output; got 1");
    Builder<V2> builder;
    REFUSES(plugin->getOutputDimensions(1, nullptr, 2, builder).nbDims < 0, "output; got 1");
}

// A creator's namespace may be set while another thread makes plugins of it.
void namespaces() {
    V2::Creator &creator = creator_of<V2>({});
    std::atomic<bool> done{false};
    std::thread setter([&] {
        for (int i = 0; !done; ++i) creator.setPluginNamespace(i % 2 == 0 ? "one" : "");
    });
    for (int i = 0; i < 200; ++i) {
        const std::string name = make<V2>({})->getPluginNamespace();
        CHECK(name.empty() || name == "one");
    }
    done = true;
    setter.join();
    creator.setPluginNamespace("");
}

// Where a Grant stands in the bytes: number of inputs, device, workspace, largest problem; then the checksum.
size_t grant_at(const std::vector<char> &saved) { return saved.size() - 4 - 24 - sizeof(convpool_problem); }
size_t problem_at(const std::vector<char> &saved) { return grant_at(saved) + 24; }

// A byte that is damaged is seen by the checksum.  With the checksum made right too, it is refused or taken, never a crash.
void damaged(const Attributes &a, bool has_device) {
    const Layer<V2> layer(a, DataType::kHALF, CONVPOOL_F16, TensorFormat::kHWC8, true);
    V2::Creator &creator = creator_of<V2>(a);
    Owner<V2> plugin = make<V2>(a);
    if (has_device) CHECK(layer.configure(*plugin));
    const std::vector<char> saved = V2::saved(*plugin);
    CHECK(V2::summed(saved) == saved);
    for (size_t length = 0; length < saved.size(); ++length)
        REFUSES(creator.deserializePlugin("layer", saved.data(), length) == nullptr, "serialised layer");
    REFUSES(creator.deserializePlugin("layer", nullptr, saved.size()) == nullptr, "serialised layer");
    std::vector<char> longer = saved;
    longer.push_back(0);
    REFUSES(V2::load(creator, longer) == nullptr, "checksum");
    REFUSES(V2::load(creator, V2::summed(longer)) == nullptr, "expected 4; the engine is from another");
    const void *inputs[6] = {};
    for (size_t i = 0; i < saved.size(); ++i) {
        std::vector<char> bad = saved;
        bad[i] = static_cast<char>(bad[i] ^ 0xff);
        REFUSES(V2::load(creator, bad) == nullptr, i < 4 ? "another version, build it anew" : "checksum");
        logged.clear();
        Owner<V2> made = V2::load(creator, V2::summed(bad));
        CHECK(made != nullptr || !logged.empty());
        const bool counts = i < 4 || (i >= grant_at(saved) && i < grant_at(saved) + 4) ||
                            (has_device && i >= problem_at(saved) && i < problem_at(saved) + 8);
        CHECK(!counts || made == nullptr);  // magic, inputs, struct_size and rank
        if (made == nullptr) continue;
        made->attachToContext(nullptr, nullptr, nullptr);
        CHECK(!layer.run(*made, inputs, nullptr));
    }
    auto refuse = [&](size_t at, auto value, const char *words) {
        std::vector<char> bad = saved;
        std::memcpy(&bad[at], &value, sizeof value);
        REFUSES(V2::load(creator, V2::summed(bad)) == nullptr, words);
    };
    if (!has_device) return refuse(grant_at(saved) + 16, int64_t{1} << 40, "of a plugin that was never configured");
    refuse(grant_at(saved) + 16, int64_t{1} << 40, "workspace; got 1099511627776 bytes, expected 0 to ");
    refuse(grant_at(saved) + 16, int64_t{-1}, "workspace; got -1 bytes");
    refuse(grant_at(saved) + 4, int32_t{0}, "compute capability; got 0");
    refuse(problem_at(saved) + offsetof(convpool_problem, kernel), int32_t{7}, "not one of this operator");
    refuse(problem_at(saved) + offsetof(convpool_problem, n), int64_t{1} << 50, "serialised layer: ");
}

// A builder may try another format between two profiles: what the shapes of both may use is the lesser of its answers, but for what
// normalizing a shape takes.
void profiles_and_formats() {
    const auto f16 = DataType::kHALF;
    const auto linear = TensorFormat::kLINEAR, hwc8 = TensorFormat::kHWC8;
    Attributes a;
    V2::Desc tensors[5], y;
    auto configure = [&](V2::Plugin &plugin, int32_t n, int32_t m, int32_t size, TensorFormat format) {
        const auto out = dynamic<V2>({n, m, size / 2, size / 2}, f16, format);
        const auto in = a.inputs(dynamic<V2>({n, 64, size, size}, f16, format), dynamic<V2>({m, 3, 3, 64}, f16, linear),
                                 dynamic<V2>({m}, f16, linear), dynamic<V2>({64}, f16, linear), out);
        const int32_t count = a.input_count();
        CHECK(V2::configure(plugin, in.data(), count, out));
        for (int32_t i = 0; i < count; ++i) tensors[i] = in[i].desc;
        y = out.desc;
        int64_t stored = 0;
        const std::vector<char> saved = V2::saved(plugin);
        std::memcpy(&stored, &saved[problem_at(saved) - 8], 8);
        return std::pair{static_cast<int64_t>(plugin.getWorkspaceSize(tensors, count, &y, 1)), stored};
    };
    Owner<V2> plugin = make<V2>(a);
    const auto [small, kept] = configure(*plugin, 4, 128, 16, linear);
    CHECK(small > 0 && kept == small);
    for (bool cloned : {false, true}) {
        if (cloned) plugin = V2::clone(*plugin);
        const auto [other, stored] = configure(*plugin, 64, 128, 36, hwc8);
        CHECK(other > 0 && stored == other);
        const auto [large, least] = configure(*plugin, 64, 128, 36, linear);
        CHECK(large > small && least == small);
    }
    a = with({3, 0, 0.f, 0, 0, 0.f});
    plugin = make<V2>(a);
    for (int32_t n : {1, 1024}) configure(*plugin, n, 8, 4, linear);
    if (pretended_launches == nullptr) return;
    const std::vector<const void *> inputs(5, some_pointer());
    void *const place = some_pointer();
    CHECK(V2::enqueue(*V2::attach(*plugin), tensors, y, inputs.data(), &place, place, nullptr));
}

// A plugin that comes out of an engine asks for no less than its builder did, whose number its runs count on: here the
// smallest shape wants more than the largest.
void loaded_workspace() {
    Attributes a;
    a.kernel = {1, 1};
    a.strides = {1, 1};
    const auto f16 = DataType::kHALF;
    const auto linear = TensorFormat::kLINEAR, hwc8 = TensorFormat::kHWC8;
    const V2::Dynamic in[] = {dynamic<V2>({1, 8, 6, 6}, {64, 8, 64, 64}, f16, hwc8), dynamic<V2>({256, 1, 1, 8}, f16, linear),
                              dynamic<V2>({256}, f16, linear)};
    const auto out = dynamic<V2>({1, 256, 7, 7}, {64, 256, 65, 65}, f16, hwc8);
    Owner<V2> plugin = make<V2>(a);
    CHECK(V2::configure(*plugin, in, 3, out));
    auto asked = [&](const V2::Plugin &of, int32_t n, int32_t size) {
        const V2::Desc tensors[] = {fixed<V2>({n, 8, size, size}, f16, hwc8), in[1].desc, in[2].desc};
        const V2::Desc y = fixed<V2>({n, 256, size + 1, size + 1}, f16, hwc8);
        return of.getWorkspaceSize(tensors, 3, &y, 1);
    };
    const std::vector<char> saved = V2::saved(*plugin);
    int64_t granted = 0;
    std::memcpy(&granted, &saved[problem_at(saved) - 8], 8);
    Owner<V2> loaded = V2::load(creator_of<V2>(a), saved);
    CHECK(loaded != nullptr);
    for (auto [n, size] : {std::tuple{64, 64}, {1, 6}, {8, 32}}) CHECK(asked(*loaded, n, size) >= static_cast<size_t>(granted));
    EQUAL(asked(*loaded, 64, 64), asked(*plugin, 64, 64));
}

void check_built(V2::Plugin &plugin, const Layer<V2> &layer) {
    auto chosen = [](const convpool_problem &problem, size_t limit) {
        int32_t tactic = 0;
        size_t bytes = 0;
        CHECK(convpool_default_tactic(&problem, 90, 132, 232448, limit, &tactic) == CONVPOOL_OK);
        CHECK(convpool_workspace_bytes(&problem, tactic, &bytes) == CONVPOOL_OK);
        return bytes;
    };
    const size_t most = std::max(chosen(layer.problem(64, 64), SIZE_MAX), chosen(layer.problem(1, 16), SIZE_MAX));
    EQUAL(layer.workspace(plugin), most);
    const std::vector<char> saved = V2::saved(plugin);
    const convpool_problem largest = layer.problem(64, 64);
    CHECK(std::memcmp(&saved[problem_at(saved)], &largest, sizeof largest) == 0);
    if (pretended_launches == nullptr) return;
    fallbacks<V2>(*V2::attach(plugin), layer, chosen(layer.problem(4, 16), most));
}

// One context of a saved and loaded layer, with the tactic that the cost rule picks.
Owner<V2> context_of(const Attributes &a, const V2::Dynamic *in, const V2::Dynamic &out, int32_t) {
    Owner<V2> built = make<V2>(a);
    CHECK(V2::configure(*built, in, a.input_count(), out));
    return V2::attach(*V2::load(creator_of<V2>(a), V2::saved(*built)));
}

}  // namespace

bool creators_answer_v2() { return creators_answer<V2>(); }

bool run_v2(void *library, Gpu &gpu) {
    version_number = 8600;
    if (!find_creators<V2>(library)) return false;
    bool kept = false, restricted = false, sums_packed = false;
    std::set<int32_t> packed_ids;
    for (const convpool_tactic_info &info : all_tactics())
        if (info.packed) packed_ids.insert(info.id);
    for (const Attributes &of : {Attributes{}, packed(), some_variants().back()})
        for (int32_t kernel : {1, 3})
            for (int64_t channels : {32, 64, 256})
                for (int64_t size : {8, 16}) {
                    Attributes a = of;  // Conv, then a pooling of 2x2, as the operator says it
                    a.pool_pads = {0, 0, 0, 0};
                    a.kernel = {kernel, kernel};
                    a.pads = std::vector<int32_t>(4, kernel / 2);
                    if (!of.accumulation.empty()) std::swap(a.pads, a.pool_pads);  // as the kernels that sum so take them
                    const convpool_problem largest = problem_of(a, 64, channels, 2 * channels, {size, size}, CONVPOOL_F16,
                                                                CONVPOOL_CHANNELS_LAST, CONVPOOL_CHANNELS_LAST, true);
                    auto wanted = [&](int64_t n, size_t limit, int32_t &tactic) {
                        convpool_problem problem = largest;
                        problem.n = n;
                        size_t bytes = 0;
                        CHECK(convpool_default_tactic(&problem, 0, 0, 0, limit, &tactic) == CONVPOOL_OK);
                        CHECK(convpool_workspace_bytes(&problem, tactic, &bytes) == CONVPOOL_OK);
                        sums_packed = sums_packed || packed_ids.count(tactic) > 0;
                        return bytes;
                    };
                    int32_t id = 0;
                    const size_t granted = std::max(wanted(1, SIZE_MAX, id), wanted(largest.n, SIZE_MAX, id));
                    for (int64_t n = 1; n < largest.n; n *= 2) restricted = wanted(n, SIZE_MAX, id) > granted || restricted;
                    auto chosen = [&](const convpool_problem &problem) { return wanted(problem.n, granted, id), id; };
                    auto context = [&](bool constant) {
                        a.constant_weights = {constant};
                        return gpu_context<V2>(gpu, a, largest, 0, context_of);
                    };
                    kept = check_weight_cache(gpu, largest, context, chosen, granted) || kept;
                }
    CHECK(sums_packed);
    CHECK(restricted);  // some batch alone would have taken more workspace than there is
    return kept;
}

void drive_v2(void *library, bool has_device) {
    auto get = reinterpret_cast<v2::IPluginCreator *const *(*)(int32_t &)>(dlsym(library, "getPluginCreators"));
    CHECK(get != nullptr);
    if (get == nullptr) return;
    for (int32_t version : {8503, 10701, 100001, 101600, 110400}) {  // other Dims, or no such interface
        version_number = version;
        int32_t count = -1;
        logged.clear();
        get(count);
        EQUAL(count, 0);
        // To stderr where the logger's layout is unknown: before 8.6, and TensorRT-RTX 1.x.
        EQUAL(logged.find("TensorRT version") != std::string::npos, version >= 100000);
    }
    for (int32_t version : {8600, 8601, 9300}) {
        version_number = version;
        if (!find_creators<V2>(library)) return;
        own_identity();
        namespaces();
        check_all<V2>(has_device);
        lives<V2>(has_device, check_built);
        for (const Attributes &a : {Attributes{}, some_variants().back()}) damaged(a, has_device);
        if (!has_device) continue;
        profiles_and_formats();
        loaded_workspace();
    }
}

}  // namespace host

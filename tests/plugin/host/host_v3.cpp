// SPDX-License-Identifier: Apache-2.0
// IPluginV3: what it has beside the common checks, which is its parts and its tactics.
#include "v3.h"

#include "checks.h"
#include "gpu.h"

namespace host {
namespace {

using v3::DataType;
using v3::TensorFormat;

bool is_kind(v3::IVersionedInterface &object, const char *kind) {
    const v3::InterfaceInfo info = object.getInterfaceInfo();
    return std::strcmp(info.kind, kind) == 0 && info.major == 1 && info.minor == 0;
}

void own_identity() {
    Owner<V3> plugin = make<V3>({});
    Parts parts(*plugin);
    CHECK(is_kind(*plugin, "PLUGIN"));
    CHECK(is_kind(*parts.core, "PLUGIN_V3ONE_CORE"));
    CHECK(is_kind(*parts.build, "PLUGIN_V3ONE_BUILD"));
    CHECK(is_kind(*parts.runtime, "PLUGIN_V3ONE_RUNTIME"));
    CHECK(is_kind(creator_of<V3>({}), "PLUGIN CREATOR_V3ONE"));
    CHECK(plugin->getCapabilityInterface(static_cast<v3::PluginCapabilityType>(9)) == nullptr);
    CHECK(std::strcmp(parts.core->getPluginVersion(), "1") == 0);
    CHECK(std::strcmp(parts.core->getPluginNamespace(), "") == 0);
    EQUAL(parts.build->getNbOutputs(), 1);
    DataType types[2], half = DataType::kHALF;
    REFUSES(parts.build->getOutputDataTypes(types, 2, &half, 1) != 0, "outputs; got 2");
}

// No two operators, slopes or ways to sum share a timing cache's entries; nor do two builds of the library.
void timing_ids() {
    std::vector<Attributes> all = every_operator();
    all.push_back(packed());
    all.push_back(with({0, 2, 0.26f, 0, 0, 0.f}));
    all.push_back(with({0, 2, 0.2600001f, 0, 0, 0.f}));
    std::set<std::string> ids;
    for (const Attributes &a : all) {
        Owner<V3> plugin = make<V3>(a);
        const std::string id = Parts(*plugin).build->getTimingCacheID();
        ids.insert(id);
        CHECK(id == Parts(*plugin).build->getMetadataString());
        CHECK(id.find("; " + a.op_type() + "; ") != std::string::npos && id.find("kernel_shape 3 3") != std::string::npos);
        const size_t build = id.find(", build ") + 8,
                     after = id.find(" for " + std::string(convpool_architectures()) + ", CUDA ");
        EQUAL(id.find_first_not_of("0123456789abcdef", build), after);
        EQUAL(after - build, 12u);
    }
    EQUAL(ids.size(), all.size());
}

// Engines of before the attribute accumulation have no such field: they sum as they did.
void engines_without_accumulation() {
    Owner<V3> plugin = make<V3>({}), other = make<V3>(packed());
    const V3::Saved saved = V3::saved(*plugin);
    std::vector<V3::Field> older(saved->fields, saved->fields + saved->nbFields);
    older.erase(std::remove_if(older.begin(), older.end(), [](auto &f) { return std::strcmp(f.name, "accumulation") == 0; }),
                older.end());
    EQUAL(older.size() + 1, size_t(saved->nbFields));
    const V3::Collection collection{static_cast<int32_t>(older.size()), older.data()};
    Owner<V3> loaded = V3::load(creator_of<V3>({}), &collection);
    CHECK(loaded != nullptr && V3::text(*loaded) == V3::text(*plugin) && V3::text(*loaded) != V3::text(*other));
}

// The name of TensorRT-RTX's logger functions is that of TensorRT's, but their places are not known.
void logger_of_rtx() {
    for (int32_t version : {10701, 10000, 101600, 110400}) {
        version_number = version;
        logged.clear();
        CHECK(creator_of<V3>({}).createPlugin("layer", nullptr, v3::TensorRTPhase::kBUILD) == nullptr);
        EQUAL(logged.empty(), version < 20000);
        EQUAL(logged.find("11: convpool: ") == 0, version >= 110000);
    }
}

// A builder times what an execution context runs: weights that never change are transformed once by either, into memory
// that goes with it.
void constant_weights(V3::Plugin &plugin, const Layer<V3> &layer, bool constant) {
    const std::vector<const void *> inputs(6, some_pointer());
    const int64_t before = pretended_bytes();
    for (bool attached : {false, true}) {
        Owner<V3> own = attached ? V3::attach(plugin) : V3::clone(plugin);
        int launches[3];
        for (int &count : launches) {
            const int earlier = pretended_launches();
            CHECK(layer.run(*own, inputs.data(), some_pointer(), some_pointer()));
            count = pretended_launches() - earlier;
        }
        EQUAL(launches[1], launches[0] - constant);
        EQUAL(launches[2], launches[0] - constant);
        EQUAL(pretended_bytes() > before, constant);
    }
    EQUAL(pretended_bytes(), before);
}

void check_tactic(V3::Plugin &plugin, const Layer<V3> &layer, int32_t id) {
    const convpool_problem largest = layer.problem(64, 64), now = layer.problem(4, 16);
    size_t bytes = 0, bytes_now = 0, prepared = 0;
    CHECK(convpool_workspace_bytes(&largest, id, &bytes) == CONVPOOL_OK);
    Owner<V3> own = V3::clone(plugin);
    EQUAL(Parts(*own).runtime->setTactic(id), 0);
    EQUAL(layer.workspace(*own), bytes);
    for (int32_t unknown : {-12345, 99999}) REFUSES(Parts(*own).runtime->setTactic(unknown) != 0, "tactic; got ");
    EQUAL(layer.workspace(*own), bytes);  // as before
    if (pretended_launches == nullptr || convpool_supports(&now, id, 90, 232448) != CONVPOOL_OK) return;
    CHECK(convpool_workspace_bytes(&now, id, &bytes_now) == CONVPOOL_OK);
    CHECK(convpool_prepared_bytes(&now, id, &prepared) == CONVPOOL_OK);
    fallbacks<V3>(*V3::attach(*own), layer, bytes_now);
    for (bool constant : {false, true}) {
        Layer<V3> one = layer;
        one.a.constant_weights = {constant};
        Owner<V3> made = make<V3>(one.a);
        EQUAL(Parts(*made).runtime->setTactic(id), 0);
        if (prepared > 0) constant_weights(*made, one, constant);
    }
}

void check_built(V3::Plugin &plugin, const Layer<V3> &layer) {
    Parts parts(plugin);
    const int32_t count = parts.build->getNbTactics();
    std::vector<int32_t> tactics(count);
    EQUAL(parts.build->getValidTactics(tactics.data(), count), 0);
    const std::set<int32_t> unique(tactics.begin(), tactics.end());
    CHECK(count > (layer.a.plain() ? 1 : 0));
    EQUAL(unique.size(), tactics.size());
    EQUAL(unique.count(0), 0u);
    REFUSES(parts.build->getValidTactics(tactics.data(), count + 1) != 0, "tactics; got room for");
    const convpool_problem largest = layer.problem(64, 64), least = layer.problem(1, 16);
    size_t most = 0;
    bool sums_packed = false;
    for (const convpool_tactic_info &info : all_tactics()) {
        sums_packed = sums_packed || (info.packed && unique.count(info.id) > 0);
        const bool expected = convpool_supports(&largest, info.id, 90, 232448) == CONVPOOL_OK &&
                              convpool_supports(&least, info.id, 90, 232448) == CONVPOOL_OK;
        EQUAL(unique.count(info.id), expected ? 1u : 0u);
        if (!expected) continue;
        size_t bytes = 0;
        CHECK(convpool_workspace_bytes(&largest, info.id, &bytes) == CONVPOOL_OK);
        most = std::max(most, bytes);
        check_tactic(plugin, layer, info.id);
    }
    EQUAL(sums_packed, !layer.a.accumulation.empty() && layer.dtype != CONVPOOL_F32);
    EQUAL(layer.workspace(plugin), most);
    EQUAL(parts.runtime->setTactic(tactics.front()), 0);
}

// enqueue for a shape that onShapeChange has not told: planned anew, and refused if it is none.
void untold_shapes(bool has_device) {
    const Layer<V3> layer({}, DataType::kHALF, CONVPOOL_F16, TensorFormat::kHWC8, true);
    Owner<V3> plugin = make<V3>({});
    const std::vector<const void *> inputs(6, some_pointer());
    void *y = some_pointer();
    auto enqueue = [&](const Layer<V3> &l) {
        return V3::enqueue(*plugin, l.now.data(), l.result, inputs.data(), &y, y, nullptr);
    };
    REFUSES(!enqueue(layer), "inputs; got 0");
    REFUSES(Parts(*plugin).build->getNbTactics() != 0 || !logged.empty(), "before configurePlugin");
    if (!has_device) return;
    CHECK(layer.run(*plugin, inputs.data(), y, y));
    Layer<V3> other = layer;
    other.now[0].dims.d[0] = 2;
    REFUSES(!enqueue(other), "Y: shape; got [4, 128, 8, 8], expected [2, 128, 8, 8]");
    other.result.dims.d[0] = 2;
    if (pretended_launches == nullptr) return;
    for (int64_t n = 2; n < 40; ++n) {  // more shapes than are kept
        other.now[0].dims.d[0] = other.result.dims.d[0] = n;
        for (int i = 0; i < 2; ++i) CHECK(enqueue(other));
    }
    CHECK(enqueue(layer));
}

// One context of a layer with the tactic set.
Owner<V3> context_of(const Attributes &a, const V3::Dynamic *, const V3::Dynamic &, int32_t tactic) {
    Owner<V3> loaded = V3::load(creator_of<V3>(a), Fields<V3>(a).get());
    EQUAL(Parts(*loaded).runtime->setTactic(tactic), 0);
    return V3::attach(*loaded);
}

}  // namespace

bool creators_answer_v3() { return creators_answer<V3>(); }

bool run_v3(void *library, Gpu &gpu) {
    version_number = 101600;
    if (!find_creators<V3>(library)) return false;
    bool kept = false, sums_packed = false;
    const Attributes plain{};
    struct Case {
        Attributes attributes;
        int64_t channels;
    };  // of 60 channels, weights and box means both need memory
    for (const Case &one :
         {Case{plain, 64}, {plain, 60}, {packed(), 64}, {some_variants().front(), 64}, {some_variants().back(), 64}}) {
        Attributes a = one.attributes;
        const auto layout = one.channels % 8 == 0 ? CONVPOOL_CHANNELS_LAST : CONVPOOL_CHANNELS_FIRST;
        const convpool_problem largest = problem_of(a, 4, one.channels, 128, {16, 24}, CONVPOOL_F16, layout, layout, true);
        for (const convpool_tactic_info &info : all_tactics()) {
            if (convpool_supports(&largest, info.id, 0, 0) != CONVPOOL_OK) continue;
            sums_packed = sums_packed || info.packed;
            auto context = [&](bool constant) {
                a.constant_weights = {constant};
                return gpu_context<V3>(gpu, a, largest, info.id, context_of);
            };
            size_t bytes = 0;
            CHECK(convpool_workspace_bytes(&largest, info.id, &bytes) == CONVPOOL_OK);
            kept = check_weight_cache(gpu, largest, context, [&](const convpool_problem &) { return info.id; }, bytes) || kept;
        }
    }
    CHECK(sums_packed);
    return kept;
}

void drive_v3(void *library, bool has_device) {
    for (int32_t version : {100001, 101600, 110400}) {
        version_number = version;
        if (!find_creators<V3>(library)) return;
        own_identity();
        timing_ids();
        engines_without_accumulation();
        check_all<V3>(has_device);
        lives<V3>(has_device, check_built);
        untold_shapes(has_device);
        logger_of_rtx();
    }
}

}  // namespace host

// IPluginV3 through its whole life, with right and wrong input.
#include "declared/v3.h"

#include "gpu.h"
#include "host.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <set>

namespace host {
namespace {

using namespace convpool::tensorrt;
using v3::DataType;
using v3::PluginFieldType;
using v3::TensorFormat;

struct Expr : v3::IDimensionExpr {
    struct Impl : v3::VDimensionExpr {
        int64_t value = 0;
        bool constant = true;
        bool isConstant() const override { return constant; }
        int64_t getConstantValue() const override { return value; }
    } impl;
    explicit Expr(int64_t value, bool constant = true) {
        impl.value = value;
        impl.constant = constant;
        impl_ = &impl;
    }
};

struct Builder : v3::IExprBuilder {
    struct Impl : v3::VExprBuilder {
        std::vector<std::unique_ptr<Expr>> made;
        const Expr *keep(int64_t value) { return made.emplace_back(new Expr(value)).get(); }
        const v3::IDimensionExpr *constant(int64_t value) override { return keep(value); }
        const v3::IDimensionExpr *operation(v3::DimensionOperation op, const v3::IDimensionExpr &a,
                                            const v3::IDimensionExpr &b) override {
            const int64_t x = static_cast<const Expr &>(a).impl.value, y = static_cast<const Expr &>(b).impl.value;
            CHECK(op == v3::DimensionOperation::kSUM || op == v3::DimensionOperation::kFLOOR_DIV);
            return keep(op == v3::DimensionOperation::kSUM ? x + y : x / y);
        }
    } impl;
    Builder() { impl_ = &impl; }
};

struct Fields {
    std::vector<v3::PluginField> list;
    v3::PluginFieldCollection collection{};
    void add(const char *name, const std::vector<int32_t> &values) {
        list.push_back({name, values.data(), PluginFieldType::kINT32, static_cast<int32_t>(values.size())});
    }
    explicit Fields(const Attributes &a, const std::string &without = "") {
        add("pool_kernel_shape", a.pool_kernel);
        add("pool_strides", a.pool_strides);
        add("pool_pads", a.pool_pads);
        add("pool_dilations", a.pool_dilations);
        add("kernel_shape", a.kernel);
        add("strides", a.strides);
        add("pads", a.pads);
        add("dilations", a.dilations);
        add("group", a.group);
        if (!a.constant_weights.empty()) add("constant_weights", a.constant_weights);
        auto add_one = [&](const char *name, const void *value, PluginFieldType type) {
            if (!a.plain()) list.push_back({name, value, type, 1});
        };
        add_one("prologue_affine", &a.around.affine, PluginFieldType::kINT32);
        add_one("prologue_activation", &a.around.before, PluginFieldType::kINT32);
        add_one("prologue_alpha", &a.around.before_alpha, PluginFieldType::kFLOAT32);
        add_one("residual", &a.around.residual, PluginFieldType::kINT32);
        add_one("activation", &a.around.after, PluginFieldType::kINT32);
        add_one("alpha", &a.around.after_alpha, PluginFieldType::kFLOAT32);
        list.erase(std::remove_if(list.begin(), list.end(), [&](auto &f) { return without == f.name; }), list.end());
        collection = {static_cast<int32_t>(list.size()), list.data()};
    }
};

v3::Dims dims(const std::vector<int64_t> &sizes) {
    v3::Dims d{static_cast<int32_t>(sizes.size()), {}};
    std::copy(sizes.begin(), sizes.end(), d.d);
    return d;
}

v3::DynamicPluginTensorDesc dynamic(const std::vector<int64_t> &least, const std::vector<int64_t> &most, DataType type,
                                    TensorFormat format) {
    v3::DynamicPluginTensorDesc t{};
    std::vector<int64_t> open = most;
    for (size_t i = 0; i < open.size(); ++i)
        if (least[i] != most[i]) open[i] = -1;
    t.desc = {dims(open), type, format, 1.f};
    t.min = dims(least);
    t.max = t.opt = dims(most);
    return t;
}

v3::PluginTensorDesc fixed(const std::vector<int64_t> &sizes, DataType type, TensorFormat format) {
    return {dims(sizes), type, format, 1.f};
}

struct Parts {
    v3::IPluginV3OneCore *core;
    v3::IPluginV3OneBuild *build;
    v3::IPluginV3OneRuntime *runtime;
    explicit Parts(v3::IPluginV3 *p)
        : core(static_cast<v3::IPluginV3OneCore *>(p->getCapabilityInterface(v3::PluginCapabilityType::kCORE))),
          build(static_cast<v3::IPluginV3OneBuild *>(p->getCapabilityInterface(v3::PluginCapabilityType::kBUILD))),
          runtime(static_cast<v3::IPluginV3OneRuntime *>(p->getCapabilityInterface(v3::PluginCapabilityType::kRUNTIME))) {}
};

using Owner = std::unique_ptr<v3::IPluginV3>;

std::map<std::string, v3::IPluginCreatorV3One *> creators;
v3::IPluginCreatorV3One *creator = nullptr;  // ConvAvgPool's

bool find_creators(void *library) {
    auto get = reinterpret_cast<v3::IPluginCreatorInterface *const *(*)(int32_t &)>(dlsym(library, "getCreators"));
    CHECK(get != nullptr);
    if (get == nullptr) return false;
    int32_t count = 0;
    v3::IPluginCreatorInterface *const *list = get(count);
    EQUAL(count, 36);
    creators.clear();
    for (int32_t i = 0; i < count; ++i) {
        auto *one = static_cast<v3::IPluginCreatorV3One *>(list[i]);
        creators[one->getPluginName()] = one;
    }
    EQUAL(creators.size(), 36u);
    for (const Attributes &a : every_operator())
        check(creators.count(a.op_type()) == 1, "no creator of " + a.op_type(), __FILE__, __LINE__);
    creator = creators["ConvAvgPool"];
    return failures == 0;
}

Owner make(const Attributes &a, v3::TensorRTPhase phase = v3::TensorRTPhase::kBUILD) {
    Fields fields(a);
    return Owner(creators.at(a.op_type())->createPlugin("layer", &fields.collection, phase));
}

bool is_kind(v3::IVersionedInterface *object, const char *kind) {
    const v3::InterfaceInfo info = object->getInterfaceInfo();
    return std::strcmp(info.kind, kind) == 0 && info.major == 1 && info.minor == 0;
}

void identity(const Attributes &a) {
    Owner plugin = make(a);
    CHECK(plugin != nullptr);
    v3::IPluginCreatorV3One *const creator = creators.at(a.op_type());
    Parts parts(plugin.get());
    CHECK(is_kind(plugin.get(), "PLUGIN"));
    CHECK(is_kind(parts.core, "PLUGIN_V3ONE_CORE"));
    CHECK(is_kind(parts.build, "PLUGIN_V3ONE_BUILD"));
    CHECK(is_kind(parts.runtime, "PLUGIN_V3ONE_RUNTIME"));
    CHECK(is_kind(creator, "PLUGIN CREATOR_V3ONE"));
    CHECK(plugin->getCapabilityInterface(static_cast<v3::PluginCapabilityType>(9)) == nullptr);
    CHECK(parts.core->getPluginName() == a.op_type());
    CHECK(std::strcmp(parts.core->getPluginVersion(), "1") == 0);
    CHECK(std::strcmp(parts.core->getPluginNamespace(), "") == 0);
    EQUAL(parts.build->getNbOutputs(), 1);
    CHECK(std::strcmp(creator->getPluginVersion(), "1") == 0);
    CHECK(std::strcmp(creator->getPluginNamespace(), "") == 0);
    const v3::PluginFieldCollection *known = creator->getFieldNames();
    EQUAL(known->nbFields, a.plain() ? 11 : 17);
    for (int32_t i = 0; i < known->nbFields; ++i) {
        const bool real = std::string(known->fields[i].name).find("alpha") != std::string::npos;
        CHECK(known->fields[i].type == (real ? PluginFieldType::kFLOAT32 : PluginFieldType::kINT32));
    }
    Owner loaded(creator->createPlugin("layer", parts.runtime->getFieldsToSerialize(), v3::TensorRTPhase::kRUNTIME));
    CHECK(loaded != nullptr);
    CHECK(std::strcmp(Parts(loaded.get()).core->getPluginName(), parts.core->getPluginName()) == 0);
    CHECK(std::strcmp(Parts(loaded.get()).build->getTimingCacheID(), parts.build->getTimingCacheID()) == 0);
    Owner copy(plugin->clone());
    CHECK(std::strcmp(Parts(copy.get()).core->getPluginName(), parts.core->getPluginName()) == 0);
    starve([&] { return Owner(plugin->clone()) != nullptr; });
    starve([&] {
        const v3::PluginFieldCollection *fields = parts.runtime->getFieldsToSerialize();
        return Owner(creator->createPlugin("layer", fields, v3::TensorRTPhase::kRUNTIME)) != nullptr;
    });
}

// No two operators, and no two slopes, share a timing cache's entries.
void timing_ids() {
    std::vector<Attributes> all = every_operator();
    all.push_back(with({0, 2, 0.26f, 0, 0, 0.f}));
    all.push_back(with({0, 2, 0.2600001f, 0, 0, 0.f}));
    std::set<std::string> ids;
    for (const Attributes &a : all) {
        Owner plugin = make(a);
        ids.insert(Parts(plugin.get()).build->getTimingCacheID());
        CHECK(std::strcmp(Parts(plugin.get()).build->getMetadataString(), Parts(plugin.get()).build->getTimingCacheID()) == 0);
    }
    EQUAL(ids.size(), all.size());
}

// A fused variant whose attributes or number of inputs say something else than its name.
void contradictions(const Attributes &right) {
    const std::string name = right.op_type();
    auto refuse = [&](const char *attribute, const void *value, const std::string &words) {
        Fields fields(right);
        for (v3::PluginField &field : fields.list)
            if (std::strcmp(field.name, attribute) == 0) field.data = value;
        for (v3::TensorRTPhase phase : {v3::TensorRTPhase::kBUILD, v3::TensorRTPhase::kRUNTIME})
            REFUSES(creators.at(name)->createPlugin("layer", &fields.collection, phase) == nullptr, words);
    };
    const Around &around = right.around;
    struct Case {
        const char *attribute;
        int32_t right, most;
    };
    for (const Case &c : {Case{"prologue_affine", around.affine, 1},
                          {"prologue_activation", around.before, 2},
                          {"residual", around.residual, 1},
                          {"activation", around.after, 2}}) {
        for (int32_t wrong = 0; wrong <= c.most; ++wrong)
            if (wrong != c.right)
                refuse(c.attribute, &wrong,
                       name + ": " + c.attribute + "; got " + std::to_string(wrong) + ", expected " + std::to_string(c.right) +
                           " by the operator's name");
        const int32_t past = c.most + 1;
        refuse(c.attribute, &past, std::string(c.attribute) + "[0]; got " + std::to_string(past));
    }
    const float slope = 0.5f;
    if (around.before != 2) refuse("prologue_alpha", &slope, name + ": prologue_alpha; got 0.5, expected 0");
    if (around.after != 2) refuse("alpha", &slope, name + ": alpha; got 0.5, expected 0");
    for (const char *attribute :
         {"prologue_affine", "prologue_activation", "prologue_alpha", "residual", "activation", "alpha"}) {
        Fields fields(right, attribute);
        REFUSES(creators.at(name)->createPlugin("layer", &fields.collection, v3::TensorRTPhase::kBUILD) == nullptr,
                std::string(attribute) + "; got no such attribute");
    }
    Fields fields(right);
    fields.list.back().type = PluginFieldType::kINT32;
    REFUSES(creators.at(name)->createPlugin("layer", &fields.collection, v3::TensorRTPhase::kBUILD) == nullptr,
            "alpha: type of the field; got 5, expected float");

    Owner plugin = make(right);
    const std::vector<DataType> types(8, DataType::kHALF);
    DataType output{};
    for (int32_t count = 0; count <= 8; ++count) {
        auto call = [&] { return Parts(plugin.get()).build->getOutputDataTypes(&output, 1, types.data(), count); };
        if (count == right.input_count()) EQUAL(call(), 0);
        else
            REFUSES(call() != 0, name + ": inputs; got " + std::to_string(count) + ", expected " +
                                     std::to_string(right.input_count()) + ": X, W, B");
    }
}

void shapes() {
    Attributes three{{1, 2, 3}, {1, 1, 2},          {0, 1, 1, 0, 1, 1}, {1, 2, 1}, {3, 1, 2},
                     {2, 3, 1}, {1, 0, 0, 1, 0, 0}, {2, 1, 1},          {1}};
    Attributes one{{2}, {1}, {1, 0}, {1}, {4}, {2}, {0, 1}, {1}, {1}};
    Attributes transition{{2, 2}, {2, 2}, {0, 0, 0, 0}, {1, 1}, {1, 1}, {1, 1}, {0, 0, 0, 0}, {1, 1}, {1}};
    for (const Attributes &a : {Attributes{}, three, one, transition}) {
        const int rank = static_cast<int>(a.kernel.size());
        Owner plugin = make(a);
        Parts parts(plugin.get());
        for (int64_t size = 9; size < 20; ++size) {
            std::vector<std::unique_ptr<Expr>> values;
            auto expr = [&](int64_t value, bool constant = true) { return values.emplace_back(new Expr(value, constant)).get(); };
            v3::DimsExprs inputs[2] = {{rank + 2, {}}, {rank + 2, {}}}, output{};
            inputs[0].d[0] = expr(5, false);
            inputs[0].d[1] = expr(16);
            inputs[1].d[0] = expr(24);
            inputs[1].d[rank + 1] = expr(16);
            for (int i = 0; i < rank; ++i) {
                inputs[0].d[2 + i] = expr(size + i, false);
                inputs[1].d[1 + i] = expr(a.kernel[i]);
            }
            Builder builder;
            EQUAL(parts.build->getOutputShapes(inputs, 2, nullptr, 0, &output, 1, builder), 0);
            EQUAL(output.nbDims, rank + 2);
            EQUAL(static_cast<const Expr *>(output.d[0])->impl.value, 5);
            EQUAL(static_cast<const Expr *>(output.d[1])->impl.value, 24);
            for (int i = 0; i < rank; ++i)
                EQUAL(static_cast<const Expr *>(output.d[2 + i])->impl.value, out_size(a, i, size + i));
        }
    }
    Owner plugin = make({});
    Parts parts(plugin.get());
    Builder builder;
    Expr e1(1), e16(16), e5(5), e3(3);
    v3::DimsExprs output{}, right[2] = {{4, {&e1, &e16, &e16, &e16}}, {4, {&e16, &e3, &e3, &e16}}};
    auto shape = [&](v3::DimsExprs x, v3::DimsExprs w, int count) {
        v3::DimsExprs inputs[4] = {x, w, {}, {}};
        return parts.build->getOutputShapes(inputs, count, nullptr, 0, &output, 1, builder) != 0;
    };
    REFUSES(shape(right[0], {4, {&e16, &e3, &e5, &e16}}, 2), "W: dimension 2");
    REFUSES(shape(right[0], {3, {&e16, &e3, &e16}}, 2), "W: number of dimensions");
    REFUSES(shape({3, {&e1, &e16, &e16}}, right[1], 2), "X: number of dimensions");
    REFUSES(shape(right[0], right[1], 1), "inputs; got 1");
    Attributes wide;
    wide.pool_kernel = wide.pool_dilations = {65535, 65535};
    parts = Parts((plugin = make(wide)).get());
    REFUSES(shape(right[0], right[1], 2), "window; got 4294770691 elements, expected at most 2^31 - 1");
    parts = Parts((plugin = make({})).get());
    REFUSES(shape(right[0], right[1], 4), "inputs; got 4");
}

void formats() {
    Owner plugin = make({});
    Parts parts(plugin.get());
    struct Case {
        DataType type;
        TensorFormat x, y;
        int64_t c, m;
        bool expected;
    };
    const auto linear = TensorFormat::kLINEAR, hwc8 = TensorFormat::kHWC8, hwc = TensorFormat::kHWC;
    const auto f32 = DataType::kFLOAT, f16 = DataType::kHALF, bf16 = DataType::kBF16;
    for (const Case &c : {Case{f32, linear, linear, 3, 5, true},
                          {f16, linear, linear, 3, 5, true},
                          {bf16, linear, linear, 3, 5, true},
                          {f16, hwc8, hwc8, 16, 24, true},
                          {bf16, hwc8, linear, 16, 3, true},
                          {f16, linear, hwc8, 3, 24, true},
                          {f16, hwc8, hwc8, 12, 24, false},
                          {f16, hwc8, hwc8, 16, 20, false},
                          {f32, hwc, hwc, 3, 5, true},
                          {f32, hwc8, hwc8, 16, 16, false},
                          {f16, hwc, hwc, 16, 16, false},
                          {f16, TensorFormat::kCHW2, linear, 16, 16, false},
                          {f16, linear, TensorFormat::kCHW16, 16, 16, false},
                          {DataType::kINT8, linear, linear, 16, 16, false},
                          {DataType::kINT32, linear, linear, 16, 16, false}}) {
        v3::DynamicPluginTensorDesc all[4] = {
            dynamic({1, c.c, 8, 8}, {4, c.c, 64, 64}, c.type, c.x), dynamic({c.m, 3, 3, c.c}, {c.m, 3, 3, c.c}, c.type, linear),
            dynamic({c.m}, {c.m}, c.type, linear), dynamic({1, c.m, 4, 4}, {4, c.m, 32, 32}, c.type, c.y)};
        bool supported = true;
        for (int position = 0; position < 4 && supported; ++position)
            supported = parts.build->supportsFormatCombination(position, all, 3, 1);
        EQUAL(supported, c.expected);
        if (!c.expected) continue;
        for (int position : {1, 2}) {  // weights of another type or format
            v3::DynamicPluginTensorDesc wrong = all[position];
            std::swap(all[position], wrong);
            all[position].desc.type = c.type == f32 ? f16 : f32;
            // W of halves goes with an image of floats.
            EQUAL(parts.build->supportsFormatCombination(position, all, 3, 1), position == 1 && c.type == f32);
            all[position] = wrong;
            all[position].desc.format = hwc8;
            EQUAL(parts.build->supportsFormatCombination(position, all, 3, 1), false);
            all[position] = wrong;
        }
    }
    DataType output{}, inputs[3] = {f16, f16, f16};
    EQUAL(parts.build->getOutputDataTypes(&output, 1, inputs, 3), 0);
    CHECK(output == f16);
    inputs[0] = DataType::kINT8;
    REFUSES(parts.build->getOutputDataTypes(&output, 1, inputs, 3) != 0, "X: type; got int8");
    inputs[0] = f16;
    inputs[2] = DataType::kINT64;
    REFUSES(parts.build->getOutputDataTypes(&output, 1, inputs, 3) != 0, "B: type; got int64");
    REFUSES(parts.build->getOutputDataTypes(&output, 2, inputs, 2) != 0, "outputs; got 2");
}

// configurePlugin to enqueue, for one layer, type, format and presence of a bias.
void life(const Attributes &a, DataType type, int dtype, TensorFormat format, bool bias, bool has_device) {
    const int64_t c = 64, m = 128;
    const int inputs = bias ? a.input_count() : 2;
    const int layout = format == TensorFormat::kLINEAR ? CONVPOOL_CHANNELS_FIRST : CONVPOOL_CHANNELS_LAST;
    const auto linear = TensorFormat::kLINEAR;
    Owner plugin = make(a);
    Parts parts(plugin.get());
    const v3::DynamicPluginTensorDesc out = dynamic({1, m, 8, 8}, {64, m, 32, 32}, type, format);
    const auto described =
        a.inputs(dynamic({1, c, 16, 16}, {64, c, 64, 64}, type, format), dynamic({m, 3, 3, c}, {m, 3, 3, c}, type, linear),
                 dynamic({m}, {m}, type, linear), dynamic({c}, {c}, type, linear), out);
    const v3::DynamicPluginTensorDesc *const in = described.data();
    EQUAL(parts.build->configurePlugin(in, inputs, &out, 1), 0);
    const std::string id = parts.build->getTimingCacheID();
    CHECK(id.find("; " + a.op_type() + "; ") != std::string::npos && id.find("kernel_shape 3 3") != std::string::npos);
    const int32_t count = parts.build->getNbTactics();
    if (!has_device) {
        REFUSES(parts.build->getNbTactics() == 0, "getNbTactics");
        return;
    }
    std::vector<int32_t> tactics(count);
    EQUAL(parts.build->getValidTactics(tactics.data(), count), 0);
    const std::set<int32_t> unique(tactics.begin(), tactics.end());
    CHECK(count > (a.plain() ? 1 : 0));
    EQUAL(unique.size(), tactics.size());
    EQUAL(unique.count(0), 0u);
    REFUSES(parts.build->getValidTactics(tactics.data(), count + 1) != 0, "tactics; got room for");

    const convpool_problem largest = problem_of(a, 64, c, m, {64, 64}, dtype, layout, layout, bias);
    const convpool_problem least = problem_of(a, 1, c, m, {16, 16}, dtype, layout, layout, bias);
    std::vector<convpool_tactic_info> infos(convpool_tactics(nullptr, 0));
    infos[0].struct_size = sizeof infos[0];
    convpool_tactics(infos.data(), static_cast<int32_t>(infos.size()));
    size_t most = 0;
    for (const convpool_tactic_info &info : infos) {
        const bool expected = convpool_supports(&largest, info.id, 90, 232448) == CONVPOOL_OK &&
                              convpool_supports(&least, info.id, 90, 232448) == CONVPOOL_OK;
        EQUAL(unique.count(info.id), expected ? 1u : 0u);
        if (!expected) continue;
        size_t bytes = 0;
        CHECK(convpool_workspace_bytes(&largest, info.id, &bytes) == CONVPOOL_OK);
        most = std::max(most, bytes);
        Owner own(plugin->clone());
        Parts chosen(own.get());
        EQUAL(chosen.runtime->setTactic(info.id), 0);
        EQUAL(chosen.build->getWorkspaceSize(in, inputs, &out, 1), bytes);
    }
    EQUAL(parts.build->getWorkspaceSize(in, inputs, &out, 1), most);

    // Serialise, make anew for running, attach to two contexts, and drop what they came from.
    const v3::PluginFieldCollection *saved = parts.runtime->getFieldsToSerialize();
    Owner loaded(creators.at(a.op_type())->createPlugin("layer", saved, v3::TensorRTPhase::kRUNTIME));
    CHECK(loaded != nullptr);
    plugin.reset();
    CHECK(id == Parts(loaded.get()).build->getTimingCacheID());
    EQUAL(Parts(loaded.get()).runtime->setTactic(tactics.front()), 0);
    Owner first(Parts(loaded.get()).runtime->attachToContext(nullptr));
    Owner second(Parts(loaded.get()).runtime->attachToContext(nullptr));
    CHECK(first != nullptr && second != nullptr && first != second);
    loaded.reset();
    v3::PluginTensorDesc result = fixed({4, m, 8, 8}, type, format);
    auto now = a.inputs(fixed({4, c, 16, 16}, type, format), fixed({m, 3, 3, c}, type, linear), fixed({m}, type, linear),
                        fixed({c}, type, linear), result);
    const void *pointers[6] = {};
    void *outputs[1] = {nullptr};
    Parts running(second.get());
    logged.clear();
    running.runtime->onShapeChange(now.data(), inputs, &result, 1);  // loads kernels: fails where the device is pretended
    REFUSES(running.runtime->enqueue(now.data(), &result, pointers, outputs, nullptr, nullptr) != 0, "x is null");
    now[0].dims.d[0] = 0;
    result.dims.d[0] = 0;
    if (a.around.residual) now.back() = result;
    EQUAL(running.runtime->onShapeChange(now.data(), inputs, &result, 1), 0);
    EQUAL(running.runtime->enqueue(now.data(), &result, pointers, outputs, nullptr, nullptr), 0);
}

void wrong_layers() {
    auto refuse = [&](const Fields &fields, const char *word) {
        for (v3::TensorRTPhase phase : {v3::TensorRTPhase::kBUILD, v3::TensorRTPhase::kRUNTIME})
            REFUSES(creator->createPlugin("layer", &fields.collection, phase) == nullptr, word);
    };
    auto with = [](auto change) {
        Attributes a;
        change(a);
        return a;
    };
    refuse(Fields({}, "kernel_shape"), "kernel_shape");
    refuse(Fields({}, "pool_kernel_shape"), "pool_kernel_shape; got no such attribute");
    struct Case {
        Attributes a;
        const char *word;
    };
    for (const Case &c : {Case{with([](Attributes &a) { a.pads = {1}; }), "pads; got 1 values, expected 4"},
                          {with([](Attributes &a) { a.pool_strides = {1, 1, 1}; }), "pool_strides; got 3 values, expected 2"},
                          {with([](Attributes &a) { a.strides = {2, 0}; }), "strides[1]; got 0"},
                          {with([](Attributes &a) { a.dilations = {-1, 1}; }), "dilations[0]; got -1"},
                          {with([](Attributes &a) { a.pool_pads = {0, 0, -2, 0}; }), "pool_pads[2]; got -2"},
                          {with([](Attributes &a) { a.kernel = {70000, 1}; }), "kernel_shape[0]; got 70000"},
                          {with([](Attributes &a) { a.kernel = {}; }), "kernel_shape; got 0 values"},
                          {with([](Attributes &a) { a.kernel = {1, 1, 1, 1}; }), "kernel_shape; got 4 values"},
                          {with([](Attributes &a) { a.group = {0}; }), "group[0]; got 0"},
                          {with([](Attributes &a) { a.group = {1, 1}; }), "group; got 2 values"}})
        refuse(Fields(c.a), c.word);
    Attributes a;
    Fields fields(a);
    for (v3::PluginField &field : fields.list)
        if (std::strcmp(field.name, "pads") == 0) field.type = PluginFieldType::kFLOAT32;
    refuse(fields, "pads: type of the field");
    fields.list[0].name = nullptr;
    refuse(fields, "name of field 0");
    Fields dangling(a);
    dangling.list[2].data = nullptr;
    refuse(dangling, "without data");
    Fields negative(a);
    negative.list[2].length = -1;
    refuse(negative, "pool_pads");
    REFUSES(creator->createPlugin("layer", nullptr, v3::TensorRTPhase::kBUILD) == nullptr, "fields; got null");
    v3::PluginFieldCollection broken{3, nullptr};
    REFUSES(creator->createPlugin("layer", &broken, v3::TensorRTPhase::kBUILD) == nullptr, "fields");
    Attributes bare;  // what ONNX leaves out has ONNX's defaults
    Fields few(bare, "dilations");
    Owner made(creator->createPlugin("layer", &few.collection, v3::TensorRTPhase::kBUILD));
    CHECK(made != nullptr);
}

// The own inputs of fused variants: their shapes, and the residual's type and format, which are the output's.
void wrong_variant_inputs(bool has_device) {
    const auto f16 = DataType::kHALF, f32 = DataType::kFLOAT;
    const auto linear = TensorFormat::kLINEAR, hwc8 = TensorFormat::kHWC8;
    const Attributes a = with({1, 1, 0.f, 1, 0, 0.f});
    Owner plugin = make(a);
    Parts parts(plugin.get());

    // X, W, B, scale, shift, R, Y, as long as each is supported.
    auto formats = [&](DataType type, TensorFormat x, TensorFormat r, TensorFormat y) {
        const v3::DynamicPluginTensorDesc map = dynamic({1, 8, 4, 4}, {4, 8, 32, 32}, type, r),
                                          one = dynamic({16}, {16}, type, linear);
        std::vector<v3::DynamicPluginTensorDesc> all{dynamic({1, 16, 8, 8}, {4, 16, 64, 64}, type, x),
                                                     dynamic({8, 3, 3, 16}, {8, 3, 3, 16}, type, linear),
                                                     dynamic({8}, {8}, type, linear),
                                                     one,
                                                     one,
                                                     map,
                                                     map};
        all[6].desc.format = y;
        return all;
    };
    auto supported = [&](const std::vector<v3::DynamicPluginTensorDesc> &all, const Parts &of) {
        int position = 0;
        while (position < 7 && of.build->supportsFormatCombination(position, all.data(), 6, 1)) ++position;
        return position;  // the first that is refused
    };
    for (TensorFormat x : {linear, hwc8})
        for (TensorFormat r : {linear, hwc8})
            for (TensorFormat y : {linear, hwc8}) EQUAL(supported(formats(f16, x, r, y), parts), r == y ? 7 : 6);
    EQUAL(supported(formats(f32, TensorFormat::kHWC, linear, TensorFormat::kHWC), parts), 6);
    EQUAL(supported(formats(f32, linear, TensorFormat::kHWC, TensorFormat::kHWC), parts), 7);
    EQUAL(supported(formats(f16, linear, TensorFormat::kCHW16, TensorFormat::kCHW16), parts), 5);
    for (int position : {3, 4, 5, 6}) {
        auto all = formats(f16, hwc8, hwc8, hwc8);
        all[position].desc.type = f32;
        EQUAL(supported(all, parts), position);
        all = formats(f16, hwc8, linear, linear);
        all[position].desc.format = hwc8;
        EQUAL(supported(all, parts), position == 5 ? 6 : position);  // R may; Y then differs from it
    }

    // A slope that half does not have keeps the layer in float.
    Owner steep = make(with({1, 2, 1e5f, 1, 0, 0.f}));
    Parts in_float(steep.get());
    for (DataType type : {f16, DataType::kBF16, f32})
        EQUAL(supported(formats(type, linear, linear, linear), in_float), type == f16 ? 0 : 7);

    auto configure = [&](std::vector<int64_t> scale, std::vector<int64_t> shift, DataType shift_type, TensorFormat r) {
        v3::DynamicPluginTensorDesc in[6] = {dynamic({2, 16, 8, 8}, {2, 16, 8, 8}, f16, linear),
                                             dynamic({8, 3, 3, 16}, {8, 3, 3, 16}, f16, linear),
                                             dynamic({8}, {8}, f16, linear),
                                             dynamic(scale, scale, f16, linear),
                                             dynamic(shift, shift, shift_type, linear),
                                             dynamic({2, 8, 4, 4}, {2, 8, 4, 4}, f16, r)};
        const v3::DynamicPluginTensorDesc out = dynamic({2, 8, 4, 4}, {2, 8, 4, 4}, f16, linear);
        return parts.build->configurePlugin(in, 6, &out, 1);
    };
    EQUAL(configure({16}, {16}, f16, linear), 0);
    REFUSES(configure({8}, {16}, f16, linear) != 0, "scale: shape; got [8], expected [16]");
    REFUSES(configure({1, 16}, {16}, f16, linear) != 0, "scale: shape; got [1, 16], expected [16]");
    REFUSES(configure({16}, {1}, f16, linear) != 0, "shift: shape; got [1], expected [16]");
    REFUSES(configure({16}, {16}, f32, linear) != 0, "shift: type; got float, expected that of W, half");
    REFUSES(configure({16}, {16}, f16, hwc8) != 0, "R: format; got 2, expected that of Y, 0");

    // R of another shape: where it is a constant when the network is made, else in the run.
    Expr n(2, false), e1(1), e3(3), e4(4), e8(8), e16(16);
    auto shape = [&](v3::DimsExprs r) {
        v3::DimsExprs inputs[6] = {
            {4, {&n, &e16, &e8, &e8}}, {4, {&e8, &e3, &e3, &e16}}, {1, {&e8}}, {1, {&e16}}, {1, {&e16}}, r};
        v3::DimsExprs output{};
        Builder builder;
        return parts.build->getOutputShapes(inputs, 6, nullptr, 0, &output, 1, builder);
    };
    EQUAL(shape({4, {&n, &e8, &e4, &e4}}), 0);
    REFUSES(shape({4, {&n, &e8, &e1, &e4}}) != 0, "R: shape; got [-1, 8, 1, 4], expected that of Y, [-1, 8, 4, 4]");
    REFUSES(shape({4, {&n, &e1, &e4, &e4}}) != 0, "R: shape; got [-1, 1, 4, 4]");
    REFUSES(shape({3, {&e8, &e4, &e4}}) != 0, "R: shape; got [8, 4, 4]");
    const v3::PluginTensorDesc vector = fixed({16}, f16, linear), y = fixed({2, 8, 4, 4}, f16, linear);
    v3::PluginTensorDesc now[6] = {
        fixed({2, 16, 8, 8}, f16, linear), fixed({8, 3, 3, 16}, f16, linear), fixed({8}, f16, linear), vector, vector,
        fixed({1, 8, 4, 4}, f16, linear)};
    const void *inputs[6] = {};
    void *outputs[1] = {nullptr};
    const char *const words = "R: shape; got [1, 8, 4, 4], expected that of Y, [2, 8, 4, 4]";
    REFUSES(parts.runtime->onShapeChange(now, 6, &y, 1) != 0, words);
    REFUSES(parts.runtime->enqueue(now, &y, inputs, outputs, nullptr, nullptr) != 0, words);
    now[5] = y;
    if (!has_device) return;
    EQUAL(parts.runtime->onShapeChange(now, 6, &y, 1), 0);
    REFUSES(parts.runtime->enqueue(now, &y, inputs, outputs, nullptr, nullptr) != 0, "x is null");
}

void wrong_shapes(bool has_device) {
    Attributes a;
    a.group = {2};
    Owner plugin = make(a);
    Parts parts(plugin.get());
    const auto f16 = DataType::kHALF;
    const auto linear = TensorFormat::kLINEAR;
    auto configure = [&](std::vector<int64_t> x, std::vector<int64_t> w, std::vector<int64_t> b, DataType w_type,
                         TensorFormat x_format) {
        v3::DynamicPluginTensorDesc in[3] = {dynamic(x, x, f16, x_format), dynamic(w, w, w_type, linear),
                                             dynamic(b, b, f16, linear)};
        v3::DynamicPluginTensorDesc out = dynamic({2, 8, 4, 4}, {2, 8, 4, 4}, f16, linear);
        return parts.build->configurePlugin(in, 3, &out, 1);
    };
    EQUAL(configure({2, 16, 8, 8}, {8, 3, 3, 8}, {8}, f16, linear), 0);
    REFUSES(configure({2, 15, 8, 8}, {8, 3, 3, 8}, {8}, f16, linear) != 0, "X: channels; got 15");
    REFUSES(configure({2, 16, 8, 8}, {8, 5, 3, 8}, {8}, f16, linear) != 0, "W: dimension 1");
    REFUSES(configure({2, 16, 8, 8}, {7, 3, 3, 8}, {7}, f16, linear) != 0, "W: dimension 0");
    REFUSES(configure({2, 16, 8, 8}, {8, 3, 3, 8}, {9}, f16, linear) != 0, "B: shape");
    REFUSES(configure({2, 16, 8, 8}, {8, 3, 3, 8}, {8}, DataType::kFLOAT, linear) != 0, "W: type; got float");
    REFUSES(configure({2, 16, 8, 8}, {8, 3, 3, 8}, {8}, f16, TensorFormat::kCHW32) != 0, "X: format");
    REFUSES(configure({2, 16, 8}, {8, 3, 3, 8}, {8}, f16, linear) != 0, "X: number of dimensions");
    REFUSES(configure({2, 16, 1, 8}, {8, 3, 3, 8}, {8}, f16, linear) != 0, "at least the kernel");
    if (has_device) {
        Owner fresh = make(a);
        REFUSES(Parts(fresh.get()).build->getNbTactics() != 0 || !logged.empty(), "before configurePlugin");
    }
    Owner fresh = make(a);
    v3::PluginTensorDesc in[2] = {fixed({2, 16, 8, 8}, f16, linear), fixed({8, 3, 3, 8}, f16, linear)};
    v3::PluginTensorDesc out = fixed({2, 8, 4, 4}, f16, linear);
    const void *inputs[2] = {nullptr, nullptr};
    void *outputs[1] = {nullptr};
    REFUSES(Parts(fresh.get()).runtime->enqueue(in, &out, inputs, outputs, nullptr, nullptr) != 0, "enqueue");
}

// One context of a layer with the tactic set.
Context context_of(Gpu &gpu, const Attributes &a, const convpool_problem &largest, int32_t tactic) {
    const int64_t c = largest.c, m = largest.m, h = largest.spatial[0], w = largest.spatial[1], k = a.kernel[0];
    const int64_t oh = out_size(a, 0, h), ow = out_size(a, 1, w);
    Owner loaded = make(a, v3::TensorRTPhase::kRUNTIME);
    EQUAL(Parts(loaded.get()).runtime->setTactic(tactic), 0);
    std::shared_ptr<v3::IPluginV3> plugin(Parts(loaded.get()).runtime->attachToContext(nullptr));
    struct Now {
        std::vector<v3::PluginTensorDesc> in;
        v3::PluginTensorDesc out;
    };
    auto now = std::make_shared<Now>();
    const auto format = largest.x_layout == CONVPOOL_CHANNELS_LAST ? TensorFormat::kHWC8 : TensorFormat::kLINEAR;
    Context context;
    context.shape = [=](int64_t n) {
        const auto type = DataType::kHALF;
        now->out = fixed({n, m, oh, ow}, type, format);
        now->in = a.inputs(fixed({n, c, h, w}, type, format), fixed({m, k, k, c}, type, TensorFormat::kLINEAR),
                           fixed({m}, type, TensorFormat::kLINEAR), fixed({c}, type, TensorFormat::kLINEAR), now->out);
        EQUAL(Parts(plugin.get()).runtime->onShapeChange(now->in.data(), a.input_count(), &now->out, 1), 0);
    };
    context.run = [=, stream = gpu.stream](const void *const *inputs, void *output, void *workspace) {
        return Parts(plugin.get()).runtime->enqueue(now->in.data(), &now->out, inputs, &output, workspace, stream) == 0;
    };
    return context;
}

}  // namespace

bool creators_answer_v3() {
    return std::all_of(creators.begin(), creators.end(), [](auto &item) { return item.first == item.second->getPluginName(); });
}

bool run_v3(void *library, Gpu &gpu) {
    version_number = 101600;
    if (!find_creators(library)) return false;
    std::vector<convpool_tactic_info> infos(convpool_tactics(nullptr, 0));
    infos[0].struct_size = sizeof infos[0];
    convpool_tactics(infos.data(), static_cast<int32_t>(infos.size()));
    bool kept = false;
    const Attributes plain{};
    struct Case {
        Attributes attributes;
        int64_t channels;
    };  // of 60 channels, weights and box means both need memory
    for (const Case &one : {Case{plain, 64}, {plain, 60}, {some_variants().front(), 64}, {some_variants().back(), 64}}) {
        Attributes a = one.attributes;
        const auto layout = one.channels % 8 == 0 ? CONVPOOL_CHANNELS_LAST : CONVPOOL_CHANNELS_FIRST;
        const convpool_problem largest = problem_of(a, 4, one.channels, 128, {16, 24}, CONVPOOL_F16, layout, layout, true);
        for (const convpool_tactic_info &info : infos) {
            if (convpool_supports(&largest, info.id, 0, 0) != CONVPOOL_OK) continue;
            auto context = [&](bool constant) {
                a.constant_weights = {constant};
                return context_of(gpu, a, largest, info.id);
            };
            size_t bytes = 0;
            CHECK(convpool_workspace_bytes(&largest, info.id, &bytes) == CONVPOOL_OK);
            const bool keeps =
                check_weight_cache(gpu, largest, context, [&](const convpool_problem &) { return info.id; }, bytes);
            kept = kept || keeps;
        }
    }
    return kept;
}

void drive_v3(void *library, bool has_device) {
    for (int32_t version : {100001, 101600, 110400}) {
        version_number = version;
        if (!find_creators(library)) return;
        for (const Attributes &a : every_operator()) {
            identity(a);
            if (!a.plain()) contradictions(a);
        }
        timing_ids();
        shapes();
        formats();
        for (bool bias : {true, false}) {
            life({}, DataType::kHALF, CONVPOOL_F16, TensorFormat::kHWC8, bias, has_device);
            life({}, DataType::kHALF, CONVPOOL_F16, TensorFormat::kLINEAR, bias, has_device);
            life({}, DataType::kBF16, CONVPOOL_BF16, TensorFormat::kHWC8, bias, has_device);
            life({}, DataType::kFLOAT, CONVPOOL_F32, TensorFormat::kLINEAR, bias, has_device);
            life({}, DataType::kFLOAT, CONVPOOL_F32, TensorFormat::kHWC, bias, has_device);
        }
        for (const Attributes &a : some_variants()) {
            life(a, DataType::kHALF, CONVPOOL_F16, TensorFormat::kHWC8, true, has_device);
            life(a, DataType::kFLOAT, CONVPOOL_F32, TensorFormat::kLINEAR, true, has_device);
        }
        wrong_layers();
        wrong_shapes(has_device);
        wrong_variant_inputs(has_device);
    }
}

}  // namespace host

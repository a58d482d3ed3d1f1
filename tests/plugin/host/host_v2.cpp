// IPluginV2DynamicExt through its whole life, with right and wrong input.
#include "declared/v2.h"

#include "gpu.h"
#include "host.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <map>
#include <memory>
#include <tuple>

namespace host {
namespace {

using namespace convpool::tensorrt;
using v2::DataType;
using v2::TensorFormat;

struct Expr : v2::IDimensionExpr {
    struct Impl : v2::VDimensionExpr {
        int32_t value = 0;
        bool constant = true;
        bool isConstant() const override { return constant; }
        int32_t getConstantValue() const override { return value; }
    } impl;
    explicit Expr(int32_t value, bool constant = true) {
        impl.value = value;
        impl.constant = constant;
        impl_ = &impl;
    }
};

struct Builder : v2::IExprBuilder {
    struct Impl : v2::VExprBuilder {
        std::vector<std::unique_ptr<Expr>> made;
        const Expr *keep(int32_t value) { return made.emplace_back(new Expr(value)).get(); }
        const v2::IDimensionExpr *constant(int32_t value) override { return keep(value); }
        const v2::IDimensionExpr *operation(v2::DimensionOperation op, const v2::IDimensionExpr &a,
                                            const v2::IDimensionExpr &b) override {
            const int32_t x = static_cast<const Expr &>(a).impl.value, y = static_cast<const Expr &>(b).impl.value;
            CHECK(op == v2::DimensionOperation::kSUM || op == v2::DimensionOperation::kFLOOR_DIV);
            return keep(op == v2::DimensionOperation::kSUM ? x + y : x / y);
        }
    } impl;
    Builder() { impl_ = &impl; }
};

struct Destroy {
    void operator()(v2::IPluginV2 *plugin) const { plugin->destroy(); }
};
using Owner = std::unique_ptr<v2::IPluginV2DynamicExt, Destroy>;

std::map<std::string, v2::IPluginCreator *> creators;
v2::IPluginCreator *creator = nullptr;  // ConvAvgPool's

using GetCreators = v2::IPluginCreator *const *(*)(int32_t &);

bool find_creators(GetCreators get) {
    int32_t count = 0;
    v2::IPluginCreator *const *list = get(count);
    EQUAL(count, 36);
    creators.clear();
    for (int32_t i = 0; i < count; ++i) creators[list[i]->getPluginName()] = list[i];
    EQUAL(creators.size(), 36u);
    for (const Attributes &a : every_operator())
        check(creators.count(a.op_type()) == 1, "no creator of " + a.op_type(), __FILE__, __LINE__);
    creator = creators["ConvAvgPool"];
    return failures == 0;
}

Owner own(v2::IPluginV2 *plugin) { return Owner(static_cast<v2::IPluginV2DynamicExt *>(plugin)); }

// What `by`'s creator makes of the attributes.
Owner make_by(const std::string &by, const Attributes &a) {
    std::vector<v2::PluginField> list;
    auto add = [&](const char *name, const std::vector<int32_t> &values) {
        list.push_back({name, values.data(), v2::PluginFieldType::kINT32, static_cast<int32_t>(values.size())});
    };
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
    auto add_one = [&](const char *name, const void *value, v2::PluginFieldType type) {
        if (!a.plain()) list.push_back({name, value, type, 1});
    };
    add_one("prologue_affine", &a.around.affine, v2::PluginFieldType::kINT32);
    add_one("prologue_activation", &a.around.before, v2::PluginFieldType::kINT32);
    add_one("prologue_alpha", &a.around.before_alpha, v2::PluginFieldType::kFLOAT32);
    add_one("residual", &a.around.residual, v2::PluginFieldType::kINT32);
    add_one("activation", &a.around.after, v2::PluginFieldType::kINT32);
    add_one("alpha", &a.around.after_alpha, v2::PluginFieldType::kFLOAT32);
    v2::PluginFieldCollection fields{static_cast<int32_t>(list.size()), list.data()};
    return own(creators.at(by)->createPlugin("layer", &fields));
}

Owner make(const Attributes &a) { return make_by(a.op_type(), a); }

std::vector<char> bytes_of(const v2::IPluginV2 &plugin) {
    std::vector<char> bytes(plugin.getSerializationSize() + 8, '#');
    plugin.serialize(bytes.data());
    CHECK(std::all_of(bytes.end() - 8, bytes.end(), [](char c) { return c == '#'; }));  // not a byte past its size
    bytes.resize(bytes.size() - 8);
    return bytes;
}

v2::PluginTensorDesc fixed(const std::vector<int32_t> &sizes, DataType type, TensorFormat format) {
    v2::PluginTensorDesc t{{static_cast<int32_t>(sizes.size()), {}}, type, format, 1.f};
    std::copy(sizes.begin(), sizes.end(), t.dims.d);
    return t;
}

v2::DynamicPluginTensorDesc dynamic(std::vector<int32_t> least, const std::vector<int32_t> &most, DataType type,
                                    TensorFormat format) {
    v2::DynamicPluginTensorDesc t{fixed(most, type, format), fixed(least, type, format).dims, fixed(most, type, format).dims};
    for (size_t i = 0; i < most.size(); ++i)
        if (least[i] != most[i]) t.desc.dims.d[i] = -1;
    return t;
}

void identity(const Attributes &a) {
    Owner plugin = make(a);
    CHECK(plugin != nullptr);
    v2::IPluginCreator *const creator = creators.at(a.op_type());
    starve([&] { return own(creator->createPlugin("layer", nullptr)) == nullptr && !logged.empty(); });
    EQUAL(plugin->getTensorRTVersion(), (3 << 24) | version_number);
    EQUAL(creator->getTensorRTVersion(), version_number);
    CHECK(std::strcmp(creator->getPluginVersion(), "1") == 0);
    CHECK(std::strcmp(creator->getPluginNamespace(), "") == 0);
    EQUAL(creator->getFieldNames()->nbFields, a.plain() ? 11 : 17);
    CHECK(plugin->getPluginType() == a.op_type());
    CHECK(std::strcmp(plugin->getPluginVersion(), "1") == 0);
    EQUAL(plugin->getNbOutputs(), 1);
    EQUAL(plugin->initialize(), 0);
    plugin->setPluginNamespace("elsewhere");
    Owner copy = own(plugin->clone());
    CHECK(std::strcmp(copy->getPluginNamespace(), "elsewhere") == 0);
    CHECK(copy->getPluginType() == a.op_type());
    plugin->setPluginNamespace(nullptr);
    CHECK(std::strcmp(plugin->getPluginNamespace(), "") == 0);
    plugin->terminate();

    // An engine finds the creator by the name, and what it saved is taken by no other.
    const std::vector<char> saved = bytes_of(*plugin);
    for (const Attributes &other : every_operator()) {
        Owner loaded = own(creators.at(other.op_type())->deserializePlugin("layer", saved.data(), saved.size()));
        CHECK((loaded != nullptr) == (other.op_type() == a.op_type()));
        CHECK(loaded == nullptr || (bytes_of(*loaded) == saved && loaded->getPluginType() == a.op_type()));
    }
    if (a.plain()) return;
    for (const Attributes &other : every_operator())
        if (!other.plain() && other.op_type() != a.op_type())
            REFUSES(make_by(a.op_type(), other) == nullptr, " by the operator's name");
    REFUSES(make_by(a.op_type(), {}) == nullptr, "prologue_affine; got no such attribute");
    const std::vector<DataType> types(8, DataType::kHALF);
    for (int32_t count = 0; count <= 8; ++count) {
        logged.clear();
        plugin->getOutputDataType(0, types.data(), count);
        const std::string refusal = a.op_type() + ": inputs; got " + std::to_string(count);
        EQUAL(logged.find(refusal) == std::string::npos, count == a.input_count());
    }
}

// Engines of an earlier format, without a checksum: to be built anew.
void old_engines() {
    Owner plugin = make({});
    for (char format : {'3', '5'}) {
        std::vector<char> saved = bytes_of(*plugin);
        saved[3] = format;
        REFUSES(own(creator->deserializePlugin("layer", saved.data(), saved.size())) == nullptr,
                "another version, build it anew");
    }
}

// The own inputs of fused variants: their shapes, and the residual's format, which is the output's.
void wrong_variant_inputs(bool has_device) {
    const auto f16 = DataType::kHALF, f32 = DataType::kFLOAT;
    const auto linear = TensorFormat::kLINEAR, hwc8 = TensorFormat::kHWC8;
    const Attributes a = with({1, 0, 0.f, 1, 2, 0.1f});
    Owner plugin = make(a);
    for (TensorFormat x : {linear, hwc8})
        for (TensorFormat r : {linear, hwc8})
            for (TensorFormat y : {linear, hwc8}) {
                auto all = a.inputs(fixed({2, 16, 8, 8}, f16, x), fixed({8, 3, 3, 16}, f16, linear), fixed({8}, f16, linear),
                                    fixed({16}, f16, linear), fixed({2, 8, 4, 4}, f16, r));
                all.push_back(fixed({2, 8, 4, 4}, f16, y));
                for (int position = 0; position <= 6; ++position)
                    EQUAL(plugin->supportsFormatCombination(position, all.data(), 6, 1), position < 6 || r == y);
                all[3].format = hwc8;
                EQUAL(plugin->supportsFormatCombination(3, all.data(), 6, 1), false);
            }
    // X of floats beside halves: an image, whose filters have 64 elements at most.
    Owner image = make(Attributes{});
    for (auto [channels, x_type, w_type, format, refused] : {std::tuple{7, f32, f16, linear, 4},
                                                             {7, f32, f16, TensorFormat::kHWC, 4},
                                                             {8, f32, f16, linear, 1},
                                                             {7, f16, f32, linear, 1},
                                                             {7, f32, DataType::kINT8, linear, 1}}) {
        v2::PluginTensorDesc all[] = {fixed({2, channels, 8, 8}, x_type, format), fixed({8, 3, 3, channels}, w_type, linear),
                                      fixed({8}, w_type, linear), fixed({2, 8, 4, 4}, w_type, hwc8)};
        int position = 0;
        while (position < 4 && image->supportsFormatCombination(position, all, 3, 1)) ++position;
        EQUAL(position, refused);
        all[3].type = x_type;
        EQUAL(refused == 4 && image->supportsFormatCombination(3, all, 3, 1), false);
    }
    // A slope that half does not have keeps the layer in float.
    Owner steep = make(with({0, 2, 1e5f, 0, 0, 0.f}));
    for (DataType type : {f16, DataType::kFLOAT}) {
        const v2::PluginTensorDesc x = fixed({2, 16, 8, 8}, type, linear);
        EQUAL(steep->supportsFormatCombination(0, &x, 3, 1), type != f16);
    }
    Expr e1(1), e2(2), e3(3), e4(4), e8(8), e16(16);
    auto shape = [&](v2::DimsExprs r) {
        v2::DimsExprs inputs[6] = {
            {4, {&e2, &e16, &e8, &e8}}, {4, {&e8, &e3, &e3, &e16}}, {1, {&e8}}, {1, {&e16}}, {1, {&e16}}, r};
        Builder builder;
        return plugin->getOutputDimensions(0, inputs, 6, builder).nbDims;
    };
    EQUAL(shape({4, {&e2, &e8, &e4, &e4}}), 4);
    REFUSES(shape({4, {&e2, &e8, &e1, &e1}}) < 0, "R: shape; got [2, 8, 1, 1], expected that of Y, [2, 8, 4, 4]");
    if (!has_device) return;
    auto configure = [&](int32_t scale, int32_t shift) {
        auto vector = [&](int32_t size) { return dynamic({size}, {size}, f16, linear); };
        const auto y = dynamic({2, 8, 4, 4}, {2, 8, 4, 4}, f16, linear);
        auto in = a.inputs(dynamic({2, 16, 8, 8}, {2, 16, 8, 8}, f16, linear), dynamic({8, 3, 3, 16}, {8, 3, 3, 16}, f16, linear),
                           vector(8), vector(scale), y);
        in[4] = vector(shift);
        logged.clear();
        plugin->configurePlugin(in.data(), 6, &y, 1);
        return logged.empty();
    };
    CHECK(configure(16, 16));
    REFUSES(!configure(15, 16), "scale: shape; got [15], expected [16]");
    REFUSES(!configure(16, 8), "shift: shape; got [8], expected [16]");
    const v2::PluginTensorDesc y = fixed({2, 8, 4, 4}, f16, linear);
    auto now = a.inputs(fixed({2, 16, 8, 8}, f16, linear), fixed({8, 3, 3, 16}, f16, linear), fixed({8}, f16, linear),
                        fixed({16}, f16, linear), fixed({2, 8, 4, 1}, f16, linear));
    const void *inputs[6] = {};
    void *outputs[1] = {nullptr};
    REFUSES(plugin->enqueue(now.data(), &y, inputs, outputs, nullptr, nullptr) != 0,
            "R: shape; got [2, 8, 4, 1], expected that of Y, [2, 8, 4, 4]");
    now.back() = y;
    REFUSES(plugin->enqueue(now.data(), &y, inputs, outputs, nullptr, nullptr) != 0, "x is null");
}

void shapes() {
    const Attributes a;
    Owner plugin = make(a);
    for (int32_t size = 2; size < 20; ++size) {
        Expr n(7, false), c(16), m(24), k(3), h(size, false), w(size + 3, false);
        v2::DimsExprs inputs[2] = {{4, {&n, &c, &h, &w}}, {4, {&m, &k, &k, &c}}};
        Builder builder;
        const v2::DimsExprs output = plugin->getOutputDimensions(0, inputs, 2, builder);
        EQUAL(output.nbDims, 4);
        EQUAL(static_cast<const Expr *>(output.d[0])->impl.value, 7);
        EQUAL(static_cast<const Expr *>(output.d[1])->impl.value, 24);
        EQUAL(static_cast<const Expr *>(output.d[2])->impl.value, out_size(a, 0, size));
        EQUAL(static_cast<const Expr *>(output.d[3])->impl.value, out_size(a, 1, size + 3));
    }
    Expr e(16), five(5), k(3);
    Builder builder;
    auto shape = [&](int32_t index, v2::DimsExprs x, v2::DimsExprs w, int32_t count) {
        v2::DimsExprs inputs[4] = {x, w, {}, {}};
        return plugin->getOutputDimensions(index, inputs, count, builder).nbDims < 0;
    };
    const v2::DimsExprs x{4, {&e, &e, &e, &e}}, w{4, {&e, &k, &k, &e}};
    REFUSES(shape(0, x, {4, {&e, &k, &five, &e}}, 2), "W: dimension 2");
    REFUSES(shape(0, x, {2, {&e, &e}}, 2), "W: number of dimensions");
    REFUSES(shape(0, {3, {&e, &e, &e}}, w, 2), "X: number of dimensions");
    REFUSES(shape(0, x, w, 1), "inputs; got 1");
    Attributes wide;
    wide.pool_kernel = wide.pool_dilations = {65535, 65535};
    plugin = make(wide);
    REFUSES(shape(0, x, w, 2), "window; got 4294770691 elements, expected at most 2^31 - 1");
    plugin = make({});
    REFUSES(shape(1, x, w, 2), "output; got 1");
    const DataType types[3] = {DataType::kHALF, DataType::kHALF, DataType::kHALF};
    CHECK(plugin->getOutputDataType(0, types, 3) == DataType::kHALF);
    const DataType wrong[2] = {DataType::kINT8, DataType::kHALF};
    REFUSES((plugin->getOutputDataType(0, wrong, 2), true), "X: type; got int8");
}

// With the checksum of what the bytes are now: CRC-32 as zlib's.
std::vector<char> summed(std::vector<char> bytes) {
    uint32_t crc = ~0u;
    for (size_t i = 0; i < bytes.size() - 4; ++i) {
        crc ^= static_cast<unsigned char>(bytes[i]);
        for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (crc & 1 ? 0xEDB88320u : 0u);
    }
    crc = ~crc;
    std::memcpy(&bytes[bytes.size() - 4], &crc, 4);
    return bytes;
}

// Where a Grant stands in the bytes: number of inputs, device, workspace, largest problem; then the checksum.
size_t grant_at(const std::vector<char> &saved) { return saved.size() - 4 - 24 - sizeof(convpool_problem); }
size_t problem_at(const std::vector<char> &saved) { return grant_at(saved) + 24; }

// A byte that is damaged is seen by the checksum.  With the checksum made right too, a grant is refused or taken, never a
// crash.  tensors: inputs and output.
void damaged_grant(const Attributes &a, const std::vector<char> &saved, const std::vector<v2::PluginTensorDesc> &tensors) {
    v2::IPluginCreator *const creator = creators.at(a.op_type());
    auto load = [&](const std::vector<char> &bytes) {
        return own(creator->deserializePlugin("layer", bytes.data(), bytes.size()));
    };
    CHECK(summed(saved) == saved);
    for (size_t i = 0; i < saved.size(); ++i) {
        std::vector<char> bad = saved;
        bad[i] = static_cast<char>(bad[i] ^ 0xff);
        REFUSES(load(bad) == nullptr, i < 4 ? "another version" : "checksum");
        if (i < grant_at(saved)) continue;
        logged.clear();
        Owner made = load(summed(bad));
        CHECK(made != nullptr || !logged.empty());
        const size_t at_problem = i - problem_at(saved);
        const bool counts = i < grant_at(saved) + 4 || at_problem < 8;  // inputs; struct_size and rank
        CHECK(!counts || made == nullptr);
        if (made == nullptr) continue;
        made->attachToContext(nullptr, nullptr, nullptr);
        const void *inputs[6] = {};
        void *outputs[1] = {nullptr};
        CHECK(made->enqueue(tensors.data(), &tensors.back(), inputs, outputs, nullptr, nullptr) != 0);
    }
    auto changed = [&](size_t at, auto value) {
        std::vector<char> bad = saved;
        std::memcpy(&bad[at], &value, sizeof value);
        return summed(bad);
    };
    REFUSES(load(changed(grant_at(saved) + 16, int64_t{1} << 40)) == nullptr,
            "workspace; got 1099511627776 bytes, expected 0 to ");
    REFUSES(load(changed(grant_at(saved) + 16, int64_t{-1})) == nullptr, "workspace; got -1 bytes");
    REFUSES(load(changed(grant_at(saved) + 4, int32_t{0})) == nullptr, "compute capability; got 0");
    REFUSES(load(changed(problem_at(saved) + offsetof(convpool_problem, kernel), int32_t{7})) == nullptr,
            "not one of this operator");
    REFUSES(load(changed(problem_at(saved) + offsetof(convpool_problem, n), int64_t{1} << 50)) == nullptr, "serialised layer: ");
}

// A builder may try another format between two profiles: what the shapes of both may use is the lesser of its answers.
void profiles_and_formats() {
    const auto f16 = DataType::kHALF;
    const auto linear = TensorFormat::kLINEAR, hwc8 = TensorFormat::kHWC8;
    struct Answer {
        int64_t asked, stored;
    };
    auto configure = [&](v2::IPluginV2DynamicExt &plugin, int32_t n, int32_t size, TensorFormat format) {
        const auto in = {dynamic({n, 64, size, size}, {n, 64, size, size}, f16, format),
                         dynamic({128, 3, 3, 64}, {128, 3, 3, 64}, f16, linear), dynamic({128}, {128}, f16, linear)};
        const auto out = dynamic({n, 128, size / 2, size / 2}, {n, 128, size / 2, size / 2}, f16, format);
        plugin.configurePlugin(in.begin(), 3, &out, 1);
        std::vector<v2::PluginTensorDesc> tensors;
        for (const auto &tensor : in) tensors.push_back(tensor.desc);
        Answer answer{static_cast<int64_t>(plugin.getWorkspaceSize(tensors.data(), 3, &out.desc, 1)), 0};
        const std::vector<char> saved = bytes_of(plugin);
        std::memcpy(&answer.stored, &saved[problem_at(saved) - 8], 8);
        return answer;
    };
    Owner plugin = make({});
    const Answer small = configure(*plugin, 4, 16, linear);
    CHECK(small.asked > 0 && small.stored == small.asked);
    for (bool cloned : {false, true}) {
        if (cloned) plugin = own(plugin->clone());
        const Answer other = configure(*plugin, 64, 32, hwc8);
        CHECK(other.asked > 0 && other.stored == other.asked);
        const Answer large = configure(*plugin, 64, 32, linear);
        CHECK(large.asked > small.asked);
        EQUAL(large.stored, small.asked);
    }
}

void life(const Attributes &a, DataType type, int dtype, TensorFormat format, bool bias, bool has_device) {
    const int32_t c = 64, m = 128;
    const int inputs = bias ? a.input_count() : 2;
    const int layout = format == TensorFormat::kLINEAR ? CONVPOOL_CHANNELS_FIRST : CONVPOOL_CHANNELS_LAST;
    const auto linear = TensorFormat::kLINEAR;
    Owner plugin = make(a);
    const v2::PluginTensorDesc w = fixed({m, 3, 3, c}, type, linear), b = fixed({m}, type, linear),
                               vector = fixed({c}, type, linear);
    auto tensors = a.inputs(fixed({64, c, 64, 64}, type, format), w, b, vector, fixed({64, m, 32, 32}, type, format));
    tensors.resize(inputs);
    tensors.push_back(fixed({64, m, 32, 32}, type, format));
    for (int position = 0; position <= inputs; ++position)
        EQUAL(plugin->supportsFormatCombination(position, tensors.data(), inputs, 1), true);
    const v2::PluginTensorDesc odd = fixed({1, 12, 8, 8}, DataType::kHALF, TensorFormat::kHWC8);
    EQUAL(plugin->supportsFormatCombination(0, &odd, inputs, 1), false);

    const v2::DynamicPluginTensorDesc out = dynamic({1, m, 8, 8}, {64, m, 32, 32}, type, format);
    const auto described =
        a.inputs(dynamic({1, c, 16, 16}, {64, c, 64, 64}, type, format), dynamic({m, 3, 3, c}, {m, 3, 3, c}, type, linear),
                 dynamic({m}, {m}, type, linear), dynamic({c}, {c}, type, linear), out);
    const v2::DynamicPluginTensorDesc *const in = described.data();
    logged.clear();
    plugin->configurePlugin(in, inputs, &out, 1);
    if (!has_device) {
        REFUSES((plugin->configurePlugin(in, inputs, &out, 1), true), "configurePlugin");
        return;
    }
    CHECK(logged.empty());
    const convpool_problem largest = problem_of(a, 64, c, m, {64, 64}, dtype, layout, layout, bias);
    int32_t tactic = 0;
    size_t bytes = 0;
    CHECK(convpool_default_tactic(&largest, 90, 132, 232448, SIZE_MAX, &tactic) == CONVPOOL_OK);
    CHECK(convpool_workspace_bytes(&largest, tactic, &bytes) == CONVPOOL_OK);
    const convpool_problem least = problem_of(a, 1, c, m, {16, 16}, dtype, layout, layout, bias);
    size_t least_bytes = 0;
    CHECK(convpool_default_tactic(&least, 90, 132, 232448, SIZE_MAX, &tactic) == CONVPOOL_OK);
    CHECK(convpool_workspace_bytes(&least, tactic, &least_bytes) == CONVPOOL_OK);
    EQUAL(plugin->getWorkspaceSize(tensors.data(), inputs, &tensors[inputs], 1), std::max(bytes, least_bytes));

    const std::vector<char> saved = bytes_of(*plugin);
    Owner loaded = own(creators.at(a.op_type())->deserializePlugin("layer", saved.data(), saved.size()));
    CHECK(loaded != nullptr);
    CHECK(bytes_of(*loaded) == saved);
    plugin.reset();
    damaged_grant(a, saved, tensors);
    v2::IPluginCreator *const creator = creators.at(a.op_type());
    starve([&] { return own(creator->deserializePlugin("layer", saved.data(), saved.size())) != nullptr; });
    starve([&] { return own(loaded->clone()) != nullptr; });
    Owner context = own(loaded->clone());
    CHECK(bytes_of(*context) == saved);
    context->attachToContext(nullptr, nullptr, nullptr);
    loaded.reset();
    EQUAL(context->initialize(), 0);
    const void *pointers[6] = {};
    void *outputs[1] = {nullptr};
    const v2::PluginTensorDesc result = fixed({4, m, 8, 8}, type, format);
    auto now = a.inputs(fixed({4, c, 16, 16}, type, format), w, b, vector, result);
    REFUSES(context->enqueue(now.data(), &result, pointers, outputs, nullptr, nullptr) != 0, "x is null");
    now[0].dims.d[1] = 32;
    REFUSES(context->enqueue(now.data(), &result, pointers, outputs, nullptr, nullptr) != 0, "X: channels; got 32");
    context->detachFromContext();
}

void damaged(const Attributes &a) {
    Owner plugin = make(a);
    v2::IPluginCreator *const creator = creators.at(a.op_type());
    const std::vector<char> saved = bytes_of(*plugin);
    for (size_t length = 0; length < saved.size(); ++length)
        REFUSES(creator->deserializePlugin("layer", saved.data(), length) == nullptr, "serialised layer");
    std::vector<char> longer = saved;
    longer.push_back(0);
    REFUSES(creator->deserializePlugin("layer", longer.data(), longer.size()) == nullptr, "checksum");
    longer = summed(longer);
    REFUSES(creator->deserializePlugin("layer", longer.data(), longer.size()) == nullptr,
            "expected 4; the engine is from another");
    REFUSES(creator->deserializePlugin("layer", nullptr, saved.size()) == nullptr, "serialised layer");
    for (size_t i = 4; i < grant_at(saved); ++i) {  // any attribute may be another one: refused or taken, never a crash
        std::vector<char> bad = saved;
        bad[i] = static_cast<char>(bad[i] ^ 0xff);
        bad = summed(bad);
        logged.clear();
        CHECK(own(creator->deserializePlugin("layer", bad.data(), bad.size())) != nullptr || !logged.empty());
    }
}

void wrong_layers() {
    Attributes zero;
    zero.strides = {2, 0};
    REFUSES(make(zero) == nullptr, "strides[1]; got 0");
    REFUSES(creator->createPlugin("layer", nullptr) == nullptr, "fields; got null");
    Owner fresh = make({});
    v2::PluginTensorDesc in[2] = {fixed({2, 16, 8, 8}, DataType::kHALF, TensorFormat::kLINEAR),
                                  fixed({8, 3, 3, 16}, DataType::kHALF, TensorFormat::kLINEAR)};
    const void *inputs[2] = {nullptr, nullptr};
    void *outputs[1] = {nullptr};
    REFUSES(fresh->enqueue(in, in, inputs, outputs, nullptr, nullptr) != 0, "before configurePlugin");
}

// One context of a saved and loaded layer, with the tactic that the cost rule picks.
Context context_of(Gpu &gpu, const Attributes &a, const convpool_problem &largest) {
    const int32_t n = int32_t(largest.n), c = int32_t(largest.c), m = int32_t(largest.m);
    const int32_t h = int32_t(largest.spatial[0]), w = int32_t(largest.spatial[1]), k = a.kernel[0];
    const auto type = DataType::kHALF;
    const auto linear = TensorFormat::kLINEAR, hwc8 = TensorFormat::kHWC8;
    const int32_t oh = int32_t(out_size(a, 0, h)), ow = int32_t(out_size(a, 1, w));
    using Tensors = std::vector<v2::DynamicPluginTensorDesc>;
    auto describe = [=](int32_t batch, Tensors &in, v2::DynamicPluginTensorDesc &out) {
        out = dynamic({1, m, oh, ow}, {n, m, oh, ow}, type, hwc8);
        out.desc.dims.d[0] = batch;
        in = a.inputs(dynamic({1, c, h, w}, {n, c, h, w}, type, hwc8), dynamic({m, k, k, c}, {m, k, k, c}, type, linear),
                      dynamic({m}, {m}, type, linear), dynamic({c}, {c}, type, linear), out);
        in[0].desc.dims.d[0] = batch;
    };
    const int32_t count = a.input_count();
    Tensors in;
    v2::DynamicPluginTensorDesc out;
    Owner built = make(a);
    describe(-1, in, out);
    built->configurePlugin(in.data(), count, &out, 1);
    const std::vector<char> saved = bytes_of(*built);
    Owner loaded = own(creators.at(a.op_type())->deserializePlugin("layer", saved.data(), saved.size()));
    std::shared_ptr<v2::IPluginV2DynamicExt> plugin(loaded->clone(), Destroy());
    plugin->attachToContext(nullptr, nullptr, nullptr);
    auto batch = std::make_shared<int32_t>(n);
    Context context;
    context.shape = [=](int64_t size) {
        Tensors now;
        v2::DynamicPluginTensorDesc result;
        *batch = int32_t(size);
        describe(*batch, now, result);
        for (auto &tensor : now) tensor.min = tensor.max = tensor.desc.dims;  // as TensorRT 8.6 tells an execution context
        result.min = result.max = result.desc.dims;
        plugin->configurePlugin(now.data(), count, &result, 1);
    };
    context.run = [=, stream = gpu.stream](const void *const *inputs, void *output, void *workspace) {
        Tensors now;
        v2::DynamicPluginTensorDesc result;
        describe(*batch, now, result);
        std::vector<v2::PluginTensorDesc> tensors;
        for (const auto &tensor : now) tensors.push_back(tensor.desc);
        return plugin->enqueue(tensors.data(), &result.desc, inputs, &output, workspace, stream) == 0;
    };
    return context;
}

}  // namespace

bool creators_answer_v2() {
    return std::all_of(creators.begin(), creators.end(), [](auto &item) { return item.first == item.second->getPluginName(); });
}

bool run_v2(void *library, Gpu &gpu) {
    version_number = 8600;
    if (!find_creators(reinterpret_cast<GetCreators>(dlsym(library, "getPluginCreators")))) return false;
    bool kept = false, restricted = false;
    for (const Around &around : {Around{}, some_variants().back().around})
        for (int32_t kernel : {1, 3})
            for (int64_t channels : {32, 64, 256})
                for (int64_t size : {8, 16}) {
                    Attributes a = with(around);  // Conv, then a pooling of 2x2, as the operator says it
                    a.pool_pads = {0, 0, 0, 0};
                    a.kernel = {kernel, kernel};
                    a.pads = std::vector<int32_t>(4, kernel / 2);
                    const convpool_problem largest = problem_of(a, 64, channels, 2 * channels, {size, size}, CONVPOOL_F16,
                                                                CONVPOOL_CHANNELS_LAST, CONVPOOL_CHANNELS_LAST, true);
                    auto wanted = [&](int64_t n, size_t limit, int32_t &tactic) {
                        convpool_problem problem = largest;
                        problem.n = n;
                        size_t bytes = 0;
                        CHECK(convpool_default_tactic(&problem, 0, 0, 0, limit, &tactic) == CONVPOOL_OK);
                        CHECK(convpool_workspace_bytes(&problem, tactic, &bytes) == CONVPOOL_OK);
                        return bytes;
                    };
                    int32_t id = 0;
                    const size_t granted = std::max(wanted(1, SIZE_MAX, id), wanted(largest.n, SIZE_MAX, id));
                    for (int64_t n = 1; n < largest.n; n *= 2) restricted = wanted(n, SIZE_MAX, id) > granted || restricted;
                    auto chosen = [&](const convpool_problem &problem) { return wanted(problem.n, granted, id), id; };
                    auto context = [&](bool constant) {
                        a.constant_weights = {constant};
                        return context_of(gpu, a, largest);
                    };
                    kept = check_weight_cache(gpu, largest, context, chosen, granted) || kept;
                }
    CHECK(restricted);  // some batch alone would have taken more workspace than there is
    return kept;
}

void drive_v2(void *library, bool has_device) {
    auto get = reinterpret_cast<GetCreators>(dlsym(library, "getPluginCreators"));
    CHECK(get != nullptr);
    if (get == nullptr) return;
    for (int32_t version : {8503, 10701, 100001, 101600, 110400}) {  // other Dims, or no such interface
        version_number = version;
        int32_t count = -1;
        logged.clear();
        get(count);
        EQUAL(count, 0);
        // To stderr where the logger's layout is unknown: before 8.6, and TensorRT-RTX 1.x.
        EQUAL(logged.find("TensorRT version") != std::string::npos, version > 80600);
    }
    for (int32_t version : {8600, 8601, 9300}) {
        version_number = version;
        if (!find_creators(get)) return;
        for (const Attributes &a : every_operator()) identity(a);
        old_engines();
        shapes();
        for (bool bias : {true, false}) {
            life({}, DataType::kHALF, CONVPOOL_F16, TensorFormat::kHWC8, bias, has_device);
            life({}, DataType::kHALF, CONVPOOL_F16, TensorFormat::kLINEAR, bias, has_device);
            life({}, DataType::kFLOAT, CONVPOOL_F32, TensorFormat::kLINEAR, bias, has_device);
        }
        for (const Attributes &a : some_variants()) {
            life(a, DataType::kHALF, CONVPOOL_F16, TensorFormat::kHWC8, true, has_device);
            life(a, DataType::kFLOAT, CONVPOOL_F32, TensorFormat::kLINEAR, true, has_device);
        }
        if (has_device) profiles_and_formats();
        damaged({});
        damaged(some_variants().back());
        wrong_layers();
        wrong_variant_inputs(has_device);
    }
}

}  // namespace host

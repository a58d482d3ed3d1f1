// SPDX-License-Identifier: Apache-2.0
// What must hold of a plugin through either interface: right and wrong attributes, shapes, formats and runs.
#pragma once

#include "interface.h"

#include <limits>
#include <set>

namespace host {

// By the name of its operator in every way; and what one operator's plugin saves is loaded by no other.
template <class T> void identity(const Attributes &a) {
    Owner<T> plugin = make<T>(a);
    CHECK(plugin != nullptr);
    typename T::Creator &creator = creator_of<T>(a);
    CHECK(std::strcmp(creator.getPluginVersion(), "1") == 0);
    CHECK(std::strcmp(creator.getPluginNamespace(), "") == 0);
    const typename T::Collection *known = creator.getFieldNames();
    EQUAL(known->nbFields, (a.upsample.empty() ? 13 : 10) + (a.plain() ? 0 : 6) + (a.around.affine == 3 ? 2 : 0));
    for (int32_t i = 0; i < known->nbFields; ++i) {
        const std::string field = known->fields[i].name;
        const bool real = field.find("alpha") != std::string::npos || field == "epsilon";
        CHECK(known->fields[i].type == (real ? T::FieldType::kFLOAT32 : T::FieldType::kINT32));
    }
    CHECK(T::name(*plugin) == a.op_type());
    const typename T::Saved saved = T::saved(*plugin);
    Owner<T> loaded = T::load(creator, saved);
    CHECK(loaded != nullptr && T::name(*loaded) == a.op_type() && T::text(*loaded) == T::text(*plugin));
    CHECK(T::name(*T::clone(*plugin)) == a.op_type());
    static const std::vector<Attributes> all = every_operator();
    for (const Attributes &other : all)  // a check that forgets a part takes an operator that differs in that one
        if (a.parts_apart(other) == 1) REFUSES(T::load(creator_of<T>(other), saved) == nullptr, "got ");
}

// Without memory at any place: nothing is made, and nothing else happens.
template <class T> void short_of_memory(const Attributes &a) {
    Owner<T> plugin = make<T>(a);
    typename T::Creator &creator = creator_of<T>(a);
    const typename T::Saved saved = T::saved(*plugin);
    starve([&] { return T::clone(*plugin) != nullptr; });
    starve([&] { return T::load(creator, saved) != nullptr; });
    starve([&] { return T::create(creator, nullptr) == nullptr && !logged.empty(); });
}

template <class T> void refuse_fields(const std::string &op_type, Fields<T> fields, const std::string &words) {
    REFUSES(T::create(*creators<T>.at(op_type), fields.get()) == nullptr, words);
}

// A fused variant whose attributes or number of inputs say something else than its name.
template <class T> void contradictions(const Attributes &right) {
    const std::string name = right.op_type();
    auto refuse = [&](const char *attribute, const void *value, const std::string &words) {
        Fields<T> fields(right);
        fields[attribute].data = value;
        refuse_fields<T>(name, fields, words);
    };
    const Around &around = right.around;
    struct Case {
        const char *attribute;
        int32_t right, most;
    };
    for (const Case &c : {Case{"prologue_affine", around.affine, 3},
                          {"prologue_activation", around.before, CONVPOOL_ACT_SILU},
                          {"residual", around.residual, 1},
                          {"activation", around.after, CONVPOOL_ACT_SILU}}) {
        for (int32_t wrong = 0; wrong <= c.most; ++wrong)
            if (wrong != c.right)
                refuse(c.attribute, &wrong,
                       name + ": " + c.attribute + "; got " + std::to_string(wrong) + ", expected " + std::to_string(c.right) +
                           " by the operator's name");
        const int32_t past = c.most + 1;
        refuse(c.attribute, &past, std::string(c.attribute) + "[0]; got " + std::to_string(past));
    }
    const float slope = 0.5f, nan = std::numeric_limits<float>::quiet_NaN();
    if (around.before != 2) refuse("prologue_alpha", &slope, name + ": prologue_alpha; got 0.5, expected 0");
    if (around.after != 2) refuse("alpha", &slope, name + ": alpha; got 0.5, expected 0");
    for (const char *attribute : {"prologue_alpha", "alpha"}) refuse(attribute, &nan, std::string(attribute) + "; got nan");
    for (const char *attribute : {"prologue_affine", "prologue_activation", "prologue_alpha", "residual", "activation", "alpha"})
        refuse_fields<T>(name, Fields<T>(right, attribute), std::string(attribute) + "; got no such attribute");
    for (const char *attribute : {"norm_groups", "epsilon"})
        if (around.affine == 3)
            refuse_fields<T>(name, Fields<T>(right, attribute), std::string(attribute) + "; got no such attribute");
    Fields<T> fields(right);
    fields["alpha"].type = T::FieldType::kINT32;
    refuse_fields<T>(name, fields, "alpha: type of the field; got 5, expected float");
    refuse_fields<T>(right.core(), Fields<T>(right), std::string(right.core()) + ": fields; got 'prologue_affine'");

    Owner<T> plugin = make<T>(right);
    const std::vector<typename T::DataType> types(8, T::DataType::kHALF);
    typename T::DataType output{};
    for (int32_t count = 0; count <= 8; ++count) {
        logged.clear();
        EQUAL(T::output_type(*plugin, types.data(), count, output), count == right.input_count());
        const std::string words =
            name + ": inputs; got " + std::to_string(count) + ", expected " + std::to_string(right.input_count()) + ": X, W, B";
        EQUAL(logged.find(words) == std::string::npos, count == right.input_count());
    }
}

template <class T> void wrong_fields() {
    auto refuse = [](Fields<T> fields, const std::string &words) { refuse_fields<T>("ConvAvgPool", fields, words); };
    auto with = [](auto change) {
        Attributes a;
        change(a);
        return a;
    };
    refuse(Fields<T>({}, "kernel_shape"), "kernel_shape; got no such attribute");
    refuse(Fields<T>({}, "pool_kernel_shape"), "pool_kernel_shape; got no such attribute");
    struct Case {
        Attributes a;
        const char *words;
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
                          {with([](Attributes &a) { a.accumulation = {2}; }), "accumulation[0]; got 2, expected 0 to 1"},
                          {with([](Attributes &a) { a.accumulation = {-1}; }), "accumulation[0]; got -1, expected 0 to 1"},
                          {with([](Attributes &a) { a.accumulation = {0, 1}; }), "accumulation; got 2 values, expected 1"},
                          {with([](Attributes &a) { a.group = {1, 1}; }), "group; got 2 values"}})
        refuse(Fields<T>(c.a), c.words);
    for (const Case &c : {Case{with([](Attributes &a) { a.upsample = {2, 5}; }), "upsample[1]; got 5, expected 1 to 4"},
                          {with([](Attributes &a) { a.upsample = {0, 1}; }), "upsample[0]; got 0, expected 1 to 4"},
                          {with([](Attributes &a) { a.upsample = {2}; }), "upsample; got 1 values, expected 2"}})
        refuse_fields<T>("UpsampleConv", Fields<T>(c.a), c.words);
    refuse_fields<T>("UpsampleConv", Fields<T>(upsampled(), "upsample"), "upsample; got no such attribute");
    refuse_fields<T>("UpsampleConv", Fields<T>({}), "UpsampleConv: fields; got 'pool_kernel_shape'");
    refuse(Fields<T>(upsampled()), "ConvAvgPool: fields; got 'upsample'");
    const Attributes a;
    auto change = [&](const char *name, auto edit) {
        Fields<T> fields(a);
        edit(fields[name]);
        return fields;
    };
    refuse(change("pads", [](auto &field) { field.type = T::FieldType::kFLOAT32; }), "pads: type of the field");
    refuse(change("pool_kernel_shape", [](auto &field) { field.name = nullptr; }), "name of field 0");
    refuse(change("pool_pads", [](auto &field) { field.data = nullptr; }), "pool_pads: field; got length 4 without data");
    refuse(change("pool_pads", [](auto &field) { field.length = -1; }), "pool_pads: field; got length -1");
    refuse(change("pool_strides", [](auto &field) { field.name = "pool_stride"; }), "fields; got 'pool_stride'");
    refuse(change("pool_strides", [](auto &field) { field.name = "strides"; }), "strides: field; got it twice");
    // Its length is judged before a value is read: there is one, and then the end of a heap block.
    const auto one = std::make_unique<int32_t>(1);
    refuse(change("strides", [&](auto &field) { field.data = one.get(), field.length = INT32_MAX; }),
           "strides; got 2147483647 values");
    for (int32_t format : {0, 1, 2}) {
        Fields<T> fields(a);
        const std::vector<int32_t> value{format};
        fields.add("format", value);
        if (format == 1) CHECK(T::create(creator_of<T>(a), fields.get()) != nullptr);
        else refuse(fields, "format of the engine's fields; got " + std::to_string(format) + ", expected 1; the engine is from");
    }
    typename T::Collection broken{3, nullptr}, negative{-1, nullptr};
    for (const typename T::Collection *given : {static_cast<typename T::Collection *>(nullptr), &broken, &negative})
        REFUSES(T::create(creator_of<T>(a), given) == nullptr, "fields; got ");
    CHECK(T::create(creator_of<T>(a), Fields<T>(a, "dilations").get()) != nullptr);  // ONNX's default
}

template <class T> void shapes() {
    Attributes three{{1, 2, 3}, {1, 1, 2},          {0, 1, 1, 0, 1, 1}, {1, 2, 1}, {3, 1, 2},
                     {2, 3, 1}, {1, 0, 0, 1, 0, 0}, {2, 1, 1},          {1}};
    Attributes one{{2}, {1}, {1, 0}, {1}, {4}, {2}, {0, 1}, {1}, {1}};
    Attributes transition{{2, 2}, {2, 2}, {0, 0, 0, 0}, {1, 1}, {1, 1}, {1, 1}, {0, 0, 0, 0}, {1, 1}, {1}};
    auto value = [](const typename T::IExpr *expr) { return static_cast<const Expr<T> *>(expr)->impl.value; };
    Attributes copies = three, row = one;
    copies.upsample = {3, 1, 4};
    row.upsample = {2};
    for (const Attributes &a : {Attributes{}, three, one, transition, upsampled(), copies, row}) {
        const int rank = static_cast<int>(a.kernel.size());
        Owner<T> plugin = make<T>(a);
        for (int64_t size = 9; size < 20; ++size) {
            std::vector<std::unique_ptr<Expr<T>>> values;
            auto expr = [&](int64_t number, bool constant = true) {
                return values.emplace_back(new Expr<T>(number, constant)).get();
            };
            typename T::DimsExprs inputs[2] = {{rank + 2, {}}, {rank + 2, {}}}, output{};
            inputs[0].d[0] = expr(5, false);
            inputs[0].d[1] = inputs[1].d[rank + 1] = expr(16);
            inputs[1].d[0] = expr(24);
            for (int i = 0; i < rank; ++i) {
                inputs[0].d[2 + i] = expr(size + i, size % 2 == 0);
                inputs[1].d[1 + i] = expr(a.kernel[i]);
            }
            Builder<T> builder;
            CHECK(T::output_shape(*plugin, inputs, 2, output, builder));
            EQUAL(output.nbDims, rank + 2);
            EQUAL(value(output.d[0]), 5);
            EQUAL(value(output.d[1]), 24);
            for (int i = 0; i < rank; ++i) EQUAL(value(output.d[2 + i]), out_size(a, i, size + i));
        }
    }
}

template <class T> void wrong_output_shapes() {
    Builder<T> builder;
    Expr<T> e1(1), e2(2), e16(16), e5(5), e3(3), open(-1, false);
    const typename T::DimsExprs x{4, {&e1, &e16, &e16, &e16}}, w{4, {&e16, &e3, &e3, &e16}};
    auto refuse = [&](const Attributes &a, typename T::DimsExprs of_x, typename T::DimsExprs of_w, int count, const char *words) {
        Owner<T> plugin = make<T>(a);
        typename T::DimsExprs inputs[4] = {of_x, of_w, {}, {}}, output{};
        REFUSES(!T::output_shape(*plugin, inputs, count, output, builder), words);
    };
    refuse({}, x, {4, {&e16, &e3, &e5, &e16}}, 2, "W: dimension 2");
    refuse({}, x, {3, {&e16, &e3, &e16}}, 2, "W: number of dimensions");
    refuse({}, {3, {&e1, &e16, &e16}}, w, 2, "X: number of dimensions");
    refuse({}, {1 << 20, {&e1, &e16, &e16}}, w, 2, "X: number of dimensions");
    refuse({}, x, w, 1, "inputs; got 1");
    refuse({}, x, w, 4, "inputs; got 4");
    Attributes wide;
    wide.pool_kernel = wide.pool_dilations = {65535, 65535};
    refuse(wide, x, w, 2, "window; got 4294770691 elements, expected at most 2^31 - 1");
    // Sizes that are known when the network is made: pooled to 3x1 with the pads, and 5 columns under a window of 7.
    const typename T::DimsExprs low{4, {&open, &e16, &open, &e1}};
    refuse({}, low, w, 2, "kernel_shape[1]: elements under the window; got 2 and 0 pads, expected at least 3");
    Attributes large;
    large.pool_kernel = {2, 7};
    large.pool_pads = {0, 1, 0, 2};
    refuse(large, {4, {&open, &e16, &open, &e2}}, w, 2,
           "pool_kernel_shape[1]: elements under the window; got 2 and 3 pads, expected at");
}

template <class T> void formats() {
    Owner<T> plugin = make<T>({});
    using Type = typename T::DataType;
    using Format = typename T::TensorFormat;
    struct Case {
        Type type;
        Format x, y;
        int64_t c, m;
        bool expected;
    };
    const auto linear = Format::kLINEAR, hwc8 = Format::kHWC8, hwc = Format::kHWC;
    const auto f32 = Type::kFLOAT, f16 = Type::kHALF, bf16 = static_cast<Type>(7);
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
                          {f16, Format::kCHW2, linear, 16, 16, false},
                          {f16, linear, Format::kCHW16, 16, 16, false},
                          {Type::kINT8, linear, linear, 16, 16, false},
                          {Type::kINT32, linear, linear, 16, 16, false}}) {
        std::vector<typename T::Dynamic> all{dynamic<T>({1, c.c, 8, 8}, {4, c.c, 64, 64}, c.type, c.x),
                                             dynamic<T>({c.m, 3, 3, c.c}, c.type, linear), dynamic<T>({c.m}, c.type, linear),
                                             dynamic<T>({1, c.m, 4, 4}, {4, c.m, 32, 32}, c.type, c.y)};
        bool supported = true;
        for (int position = 0; position < 4 && supported; ++position) supported = T::supports(*plugin, position, all);
        EQUAL(supported, c.expected);
        if (!c.expected) continue;
        for (int position : {1, 2}) {  // weights of another type or format
            const typename T::Dynamic right = all[position];
            all[position].desc.type = c.type == f32 ? f16 : f32;
            // W of halves goes with an image of floats.
            EQUAL(T::supports(*plugin, position, all), position == 1 && c.type == f32);
            all[position] = right;
            all[position].desc.format = hwc8;
            EQUAL(T::supports(*plugin, position, all), false);
            all[position] = right;
        }
        for (int position : {-1, 4}) REFUSES(!T::supports(*plugin, position, all), "position; got ");
    }
    Type output{}, inputs[3] = {f16, f16, f16};
    CHECK(T::output_type(*plugin, inputs, 3, output) && output == f16);
    inputs[0] = Type::kINT8;
    REFUSES(!T::output_type(*plugin, inputs, 3, output), "X: type; got int8");
    inputs[0] = f16;
    inputs[2] = static_cast<Type>(8);
    REFUSES(!T::output_type(*plugin, inputs, 3, output), "B: type; got int64");
}

// Types and formats of an operator with every input: the residual's are the output's.
template <class T> void variant_formats() {
    using Type = typename T::DataType;
    using Format = typename T::TensorFormat;
    const auto f16 = Type::kHALF, f32 = Type::kFLOAT;
    const auto linear = Format::kLINEAR, hwc8 = Format::kHWC8;
    // X, W, B, scale, shift, R, Y.
    auto tensors = [&](Type type, Format x, Format r, Format y) {
        const auto one = dynamic<T>({16}, type, linear), map = dynamic<T>({1, 8, 4, 4}, {4, 8, 32, 32}, type, r);
        std::vector<typename T::Dynamic> all{dynamic<T>({1, 16, 8, 8}, {4, 16, 64, 64}, type, x),
                                             dynamic<T>({8, 3, 3, 16}, type, linear),
                                             dynamic<T>({8}, type, linear),
                                             one,
                                             one,
                                             map,
                                             map};
        all[6].desc.format = y;
        return all;
    };
    Owner<T> plugin = make<T>(with({1, 1, 0.f, 1, 0, 0.f}));
    auto refused = [&](const std::vector<typename T::Dynamic> &all, typename T::Plugin &of) {
        int position = 0;
        while (position < static_cast<int>(all.size()) && T::supports(of, position, all)) ++position;
        return position;  // the first that is refused
    };
    for (Format x : {linear, hwc8})
        for (Format r : {linear, hwc8})
            for (Format y : {linear, hwc8}) EQUAL(refused(tensors(f16, x, r, y), *plugin), r == y ? 7 : 6);
    EQUAL(refused(tensors(f32, Format::kHWC, linear, Format::kHWC), *plugin), 6);
    EQUAL(refused(tensors(f32, linear, Format::kHWC, Format::kHWC), *plugin), 7);
    EQUAL(refused(tensors(f16, linear, Format::kCHW16, Format::kCHW16), *plugin), 5);
    for (int position : {3, 4, 5, 6}) {
        auto all = tensors(f16, hwc8, hwc8, hwc8);
        all[position].desc.type = f32;
        EQUAL(refused(all, *plugin), position);
        all = tensors(f16, hwc8, linear, linear);
        all[position].desc.format = hwc8;
        EQUAL(refused(all, *plugin), position == 5 ? 6 : position);  // R may; Y then differs from it
    }
    // A slope that half does not have keeps the layer in float.
    Owner<T> steep = make<T>(with({1, 2, 1e5f, 1, 0, 0.f}));
    for (Type type : {f16, static_cast<Type>(7), f32})
        EQUAL(refused(tensors(type, linear, linear, linear), *steep), type == f16 ? 0 : 7);
    // X of floats beside halves: an image, whose filters have 64 elements at most.
    Owner<T> image = make<T>({});
    struct Case {
        int64_t channels;
        Type x, w;
        Format format;
        int refused;
    };
    for (const Case &c : {Case{7, f32, f16, linear, 4},
                          {7, f32, f16, Format::kHWC, 4},
                          {8, f32, f16, linear, 1},
                          {7, f16, f32, linear, 1},
                          {7, f32, Type::kINT8, linear, 1},
                          {std::numeric_limits<typename T::Number>::max() / 2, f32, f16, linear, 1}}) {  // times 9: no wrap
        std::vector<typename T::Dynamic> all{dynamic<T>({2, c.channels, 8, 8}, c.x, c.format),
                                             dynamic<T>({8, 3, 3, c.channels}, c.w, linear), dynamic<T>({8}, c.w, linear),
                                             dynamic<T>({2, 8, 4, 4}, c.w, hwc8)};
        EQUAL(refused(all, *image), c.refused);
        if (c.x == f32 && c.w == f16) EQUAL(refused(all, *make<T>(upsampled())), 1);
    }
}

// Shapes and types that do not belong together, at configurePlugin.
template <class T> void wrong_descriptions(bool has_device) {
    using Type = typename T::DataType;
    const auto f16 = Type::kHALF, f32 = Type::kFLOAT;
    const auto linear = T::TensorFormat::kLINEAR, hwc8 = T::TensorFormat::kHWC8;
    Attributes grouped;
    grouped.group = {2};
    Owner<T> plugin = make<T>(grouped);
    auto configure = [&](std::vector<int64_t> x, std::vector<int64_t> w, std::vector<int64_t> b, Type w_type = Type::kHALF,
                         typename T::TensorFormat x_format = T::TensorFormat::kLINEAR) {
        typename T::Dynamic in[3] = {dynamic<T>(x, f16, x_format), dynamic<T>(w, w_type, linear), dynamic<T>(b, f16, linear)};
        return T::configure(*plugin, in, 3, dynamic<T>({2, 8, 4, 4}, f16, linear));
    };
    if (has_device || !T::kNeedsDevice) CHECK(configure({2, 16, 8, 8}, {8, 3, 3, 8}, {8}));
    REFUSES(!configure({2, 15, 8, 8}, {8, 3, 3, 8}, {8}), "X: channels; got 15");
    REFUSES(!configure({2, 16, 8, 8}, {8, 5, 3, 8}, {8}), "W: dimension 1");
    REFUSES(!configure({2, 16, 8, 8}, {7, 3, 3, 8}, {7}), "W: dimension 0");
    REFUSES(!configure({2, 16, 8, 8}, {8, 3, 3, 8}, {9}), "B: shape");
    REFUSES(!configure({2, 16, 8, 8}, {8, 3, 3, 8}, {8}, f32), "W: type; got float");
    REFUSES(!configure({2, 16, 8, 8}, {8, 3, 3, 8}, {8}, f16, T::TensorFormat::kCHW32), "X: format");
    REFUSES(!configure({2, 16, 8}, {8, 3, 3, 8}, {8}), "X: number of dimensions");
    REFUSES(!configure({2, 16, 1, 8}, {8, 3, 3, 8}, {8}), "at least the kernel");
    REFUSES(!configure({2, 16, -1, 8}, {8, 3, 3, 8}, {8}), "X: dimension 2; got -1");
    if (sizeof(typename T::Number) == 8) {  // twice as many channels wrap to 16
        const auto wrapping = static_cast<int64_t>((uint64_t{1} << 63) + 8);
        REFUSES(!configure({2, 16, 8, 8}, {8, 3, 3, wrapping}, {8}), "W: dimension 3; got -9223372036854775800");
        REFUSES(!configure({2, 16, 8, 8}, {8, 3, 3, (int64_t{1} << 62) + 8}, {8}), "W: dimension 3; got 4611686018427387912");
    }
    // As many inputs as no operator has are refused before one is read.
    typename T::Dynamic two[2] = {dynamic<T>({2, 16, 8, 8}, f16, linear), dynamic<T>({8, 3, 3, 8}, f16, linear)};
    for (int32_t count : {-1, 0, 1, 1000, INT32_MAX})
        REFUSES(!T::configure(*plugin, two, count, dynamic<T>({2, 8, 4, 4}, f16, linear)), "ConvAvgPool: inputs; got ");

    const Attributes a = with({1, 0, 0.f, 1, 2, 0.1f});
    plugin = make<T>(a);
    auto variant = [&](std::vector<int64_t> scale, std::vector<int64_t> shift, Type shift_type = Type::kHALF,
                       typename T::TensorFormat r = T::TensorFormat::kLINEAR) {
        const typename T::Dynamic in[6] = {dynamic<T>({2, 16, 8, 8}, f16, linear), dynamic<T>({8, 3, 3, 16}, f16, linear),
                                           dynamic<T>({8}, f16, linear),           dynamic<T>(scale, f16, linear),
                                           dynamic<T>(shift, shift_type, linear),  dynamic<T>({2, 8, 4, 4}, f16, r)};
        return T::configure(*plugin, in, 6, dynamic<T>({2, 8, 4, 4}, f16, linear));
    };
    if (has_device || !T::kNeedsDevice) CHECK(variant({16}, {16}));
    REFUSES(!variant({8}, {16}), "scale: shape; got [8], expected [16]");
    REFUSES(!variant({1, 16}, {16}), "scale: shape; got [1, 16], expected [16]");
    REFUSES(!variant({16}, {1}), "shift: shape; got [1], expected [16]");
    REFUSES(!variant({16}, {16}, f32), "shift: type; got float, expected that of W, half");
    REFUSES(!variant({16}, {16}, f16, hwc8), "R: format; got 2, expected that of Y, 0");
    // R of another shape, where it is known when the network is made.
    Expr<T> n(2, false), e1(1), e3(3), e4(4), e8(8), e16(16);
    auto shape = [&](typename T::DimsExprs r) {
        typename T::DimsExprs inputs[6] = {
            {4, {&n, &e16, &e8, &e8}}, {4, {&e8, &e3, &e3, &e16}}, {1, {&e8}}, {1, {&e16}}, {1, {&e16}}, r};
        typename T::DimsExprs output{};
        Builder<T> builder;
        return T::output_shape(*plugin, inputs, 6, output, builder);
    };
    CHECK(shape({4, {&n, &e8, &e4, &e4}}));
    REFUSES(!shape({4, {&n, &e8, &e1, &e4}}), "R: shape; got [-1, 8, 1, 4], expected that of Y, [-1, 8, 4, 4]");
    REFUSES(!shape({4, {&n, &e1, &e4, &e4}}), "R: shape; got [-1, 1, 4, 4]");
    REFUSES(!shape({3, {&e8, &e4, &e4}}), "R: shape; got [8, 4, 4]");
}

// Residual and output of another shape than the operator gives, in a run; and descriptors with absurd numbers of dimensions.
template <class T> void wrong_runs(bool has_device) {
    const Layer<T> layer(some_variants().back(), T::DataType::kHALF, CONVPOOL_F16, T::TensorFormat::kLINEAR, true);
    Owner<T> plugin = make<T>(layer.a);
    const void *inputs[6] = {};
    REFUSES(!layer.run(*plugin, inputs, nullptr), T::kNeedsDevice ? "before configurePlugin"
                                                  : has_device    ? "x is null"
                                                                  : "device");
    if (!has_device) return;
    CHECK(layer.configure(*plugin));
    auto refuse = [&](auto change, const char *words) {
        Layer<T> wrong = layer;
        change(wrong);
        REFUSES(!wrong.run(*plugin, inputs, nullptr), words);
    };
    Owner<T> context = T::attach(*plugin);
    auto refuse_shapes = [&](auto change, const char *words) {  // also as a context is told of them, before a run
        refuse(change, words);
        Layer<T> wrong = layer;
        change(wrong);
        REFUSES(!T::shape_change(*context, wrong.now.data(), wrong.inputs, wrong.result), words);
    };
    refuse([](Layer<T> &) {}, "x is null");
    refuse_shapes([](Layer<T> &l) { l.now.back().dims.d[0] = 1; },
                  "R: shape; got [1, 128, 8, 8], expected that of Y, [4, 128, 8, 8]");
    refuse_shapes([](Layer<T> &l) { l.now.back().dims.nbDims = l.result.dims.nbDims = 1 << 20; }, "R: shape");
    refuse_shapes([](Layer<T> &l) { l.result.dims.d[3] = 4; }, "R: shape");
    refuse_shapes([](Layer<T> &l) { l.now.back().dims.d[3] = l.result.dims.d[3] = 4; },
                  "Y: shape; got [4, 128, 8, 4], expected [4, 128, 8, 8]");
    refuse([](Layer<T> &l) { l.now[0].dims.nbDims = 1 << 20; }, "X: number of dimensions; got 1048576");
    refuse([](Layer<T> &l) { l.now[0].dims.d[1] = 32; }, "X: channels; got 32");
    for (int of : {0, 1}) {  // an empty batch has its shapes too
        Layer<T> empty = layer;
        empty.now[0].dims.d[0] = empty.now.back().dims.d[0] = 0, empty.result.dims.d[0] = of;
        EQUAL(empty.run(*plugin, inputs, nullptr), of == 0);
        EQUAL(T::shape_change(*context, empty.now.data(), empty.inputs, empty.result), of == 0);
    }
}

// The life of one layer: formats, shapes, what check_built makes of the built plugin, save, load, attach and run.
template <class T>
void life(const Layer<T> &layer, bool has_device, void (*check_built)(typename T::Plugin &, const Layer<T> &)) {
    Owner<T> plugin = make<T>(layer.a);
    std::vector<typename T::Dynamic> all = layer.in;
    all.push_back(layer.out);
    for (int position = 0; position <= layer.inputs; ++position) EQUAL(T::supports(*plugin, position, all), true);
    CHECK(layer.configure(*plugin) == (has_device || !T::kNeedsDevice));
    if (!has_device) return;
    check_built(*plugin, layer);
    Owner<T> loaded = T::load(creator_of<T>(layer.a), T::saved(*plugin));
    CHECK(loaded != nullptr);
    plugin.reset();
    Owner<T> first = T::attach(*loaded), second = T::attach(*loaded);
    CHECK(first != nullptr && second != nullptr && first != second);
    loaded.reset();
    const void *pointers[6] = {};
    REFUSES(!layer.run(*second, pointers, nullptr), "x is null");
}

inline std::vector<convpool_tactic_info> all_tactics() {
    std::vector<convpool_tactic_info> infos(convpool_tactics(nullptr, 0));
    infos[0].struct_size = sizeof infos[0];
    convpool_tactics(infos.data(), static_cast<int32_t>(infos.size()));
    return infos;
}

// A place for tensors that nothing reads: the pretended device runs no kernel.
inline void *some_pointer(size_t offset = 0) { return reinterpret_cast<void *>((size_t{1} << 20) + offset); }

// A tactic that cannot run on these pointers, or without workspace, gives way to another one, which is said once.
template <class T> void fallbacks(typename T::Plugin &plugin, const Layer<T> &layer, size_t workspace_bytes) {
    const std::vector<const void *> inputs(6, some_pointer());
    auto runs = [&](const Layer<T> &of, void *workspace, int expected) {
        logged.clear();
        for (int i = 0; i < 3; ++i) CHECK(of.run(plugin, inputs.data(), some_pointer(), workspace));
        int told = 0;
        for (size_t at = 0; (at = logged.find(" runs in its place", at)) != std::string::npos; ++at) ++told;
        EQUAL(told, expected);
    };
    runs(layer, some_pointer(), 0);
    // Planned, so nothing is left to allocate.
    pretended_forget();  // leaves room for as many launches
    const auto again = [&] { return layer.run(plugin, inputs.data(), some_pointer(), some_pointer()); };
    CHECK(without_memory(again));
    if (workspace_bytes == 0 || layer.a.around.affine == 3) return;  // what normalizes X takes memory for all tactics
    runs(layer, nullptr, 1);
    CHECK(logged.find("layer: X [4, 64, 16, 16]: ") != std::string::npos);
    CHECK(logged.find("workspace; got 0 bytes, expected ") != std::string::npos);
    Layer<T> other = layer;
    for (auto *tensor : {&other.now.front(), &other.result}) tensor->dims.d[0] = 5;
    if (layer.a.around.residual) other.now.back() = other.result;
    runs(other, nullptr, 1);
    runs(other, nullptr, 0);
    runs(layer, nullptr, 0);
}

// Every type, format and operator once.
template <class T> void lives(bool has_device, void (*check_built)(typename T::Plugin &, const Layer<T> &)) {
    using Type = typename T::DataType;
    using Format = typename T::TensorFormat;
    auto one = [&](const Attributes &a, Type type, int dtype, Format format, bool bias) {
        life<T>(Layer<T>(a, type, dtype, format, bias), has_device, check_built);
    };
    for (bool bias : {true, false}) {
        one({}, Type::kHALF, CONVPOOL_F16, Format::kHWC8, bias);
        one({}, Type::kHALF, CONVPOOL_F16, Format::kLINEAR, bias);
        one({}, static_cast<Type>(7), CONVPOOL_BF16, Format::kHWC8, bias);
        one({}, Type::kFLOAT, CONVPOOL_F32, Format::kLINEAR, bias);
        one({}, Type::kFLOAT, CONVPOOL_F32, Format::kHWC, bias);
    }
    one(packed(), Type::kHALF, CONVPOOL_F16, Format::kHWC8, true);
    one(packed(), static_cast<Type>(7), CONVPOOL_BF16, Format::kHWC8, false);
    one(packed(), Type::kFLOAT, CONVPOOL_F32, Format::kLINEAR, true);
    for (const Attributes &a : some_variants()) {
        one(a, Type::kHALF, CONVPOOL_F16, Format::kHWC8, true);
        one(a, Type::kFLOAT, CONVPOOL_F32, Format::kLINEAR, true);
    }
}

// All of the above.
template <class T> void check_all(bool has_device) {
    for (const Attributes &a : some_variants()) short_of_memory<T>(a);
    short_of_memory<T>({});
    identity<T>(packed());
    for (const Attributes &a : every_operator()) {
        identity<T>(a);
        if (!a.plain()) contradictions<T>(a);
    }
    wrong_fields<T>();
    shapes<T>();
    wrong_output_shapes<T>();
    formats<T>();
    variant_formats<T>();
    wrong_descriptions<T>(has_device);
    wrong_runs<T>(has_device);
}

}  // namespace host

// SPDX-License-Identifier: Apache-2.0
// Both interfaces of TensorRT's plugins, driven alike.  A class of traits T, V2 or V3, names one interface's types and
// says how its plugins are asked, saved, loaded, attached and run.
#pragma once

#include "host.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>

namespace host {

// The types that both interfaces have under one name.
#define INTERFACE_TYPES(space)                       \
    using DataType = space::DataType;                \
    using TensorFormat = space::TensorFormat;        \
    using FieldType = space::PluginFieldType;        \
    using Field = space::PluginField;                \
    using Collection = space::PluginFieldCollection; \
    using Operation = space::DimensionOperation;     \
    using Dims = space::Dims;                        \
    using Desc = space::PluginTensorDesc;            \
    using Dynamic = space::DynamicPluginTensorDesc;  \
    using DimsExprs = space::DimsExprs;              \
    using IExpr = space::IDimensionExpr;             \
    using VExpr = space::VDimensionExpr;             \
    using IBuilder = space::IExprBuilder;            \
    using VBuilder = space::VExprBuilder

template <class T> struct Expr : T::IExpr {
    struct Impl : T::VExpr {
        typename T::Number value = 0;
        bool constant = true;
        bool isConstant() const override { return constant; }
        typename T::Number getConstantValue() const override { return value; }
    } impl;
    explicit Expr(int64_t value, bool constant = true) {
        impl.value = static_cast<typename T::Number>(value);
        impl.constant = constant;
        this->impl_ = &impl;
    }
};

template <class T> struct Builder : T::IBuilder {
    struct Impl : T::VBuilder {
        std::vector<std::unique_ptr<Expr<T>>> made;
        const Expr<T> *keep(int64_t value) { return made.emplace_back(new Expr<T>(value)).get(); }
        const typename T::IExpr *constant(typename T::Number value) override { return keep(value); }
        const typename T::IExpr *operation(typename T::Operation op, const typename T::IExpr &a,
                                           const typename T::IExpr &b) override {
            const int64_t x = static_cast<const Expr<T> &>(a).impl.value, y = static_cast<const Expr<T> &>(b).impl.value;
            CHECK(op == T::Operation::kSUM || op == T::Operation::kPROD || op == T::Operation::kFLOOR_DIV);
            return keep(op == T::Operation::kSUM ? x + y : op == T::Operation::kPROD ? x * y : x / y);
        }
    } impl;
    Builder() { this->impl_ = &impl; }
};

// A layer's attributes as plugin fields.
template <class T> struct Fields {
    std::vector<typename T::Field> list;
    typename T::Collection collection{};

    explicit Fields(const Attributes &a, const std::string &without = "") {
        if (a.upsample.empty()) {
            add("pool_kernel_shape", a.pool_kernel);
            add("pool_strides", a.pool_strides);
            add("pool_pads", a.pool_pads);
            add("pool_dilations", a.pool_dilations);
        } else {
            add("upsample", a.upsample);
        }
        add("kernel_shape", a.kernel);
        add("strides", a.strides);
        add("pads", a.pads);
        add("dilations", a.dilations);
        add("group", a.group);
        if (!a.constant_weights.empty()) add("constant_weights", a.constant_weights);
        if (!a.accumulation.empty()) add("accumulation", a.accumulation);
        if (!a.plain()) {
            const auto integer = T::FieldType::kINT32, real = T::FieldType::kFLOAT32;
            list.push_back({"prologue_affine", &a.around.affine, integer, 1});
            list.push_back({"prologue_activation", &a.around.before, integer, 1});
            list.push_back({"prologue_alpha", &a.around.before_alpha, real, 1});
            list.push_back({"residual", &a.around.residual, integer, 1});
            list.push_back({"activation", &a.around.after, integer, 1});
            list.push_back({"alpha", &a.around.after_alpha, real, 1});
            if (a.around.affine == 3) {
                list.push_back({"norm_groups", &a.around.groups, integer, 1});
                list.push_back({"epsilon", &a.around.epsilon, real, 1});
            }
        }
        list.erase(std::remove_if(list.begin(), list.end(), [&](auto &f) { return without == f.name; }), list.end());
    }
    void add(const char *name, const std::vector<int32_t> &values) {
        list.push_back({name, values.data(), T::FieldType::kINT32, static_cast<int32_t>(values.size())});
    }
    typename T::Field &operator[](const std::string &name) {
        return *std::find_if(list.begin(), list.end(), [&](auto &field) { return field.name == name; });
    }
    const typename T::Collection *get() {
        collection = {static_cast<int32_t>(list.size()), list.data()};
        return &collection;
    }
};

template <class T> using Owner = std::unique_ptr<typename T::Plugin, typename T::Destroy>;

template <class T> std::map<std::string, typename T::Creator *> creators;

template <class T> typename T::Creator &creator_of(const Attributes &a) { return *creators<T>.at(a.op_type()); }

// Of a library that lists one creator for each operator.
template <class T> bool find_creators(void *library) {
    creators<T>.clear();
    for (typename T::Creator *one : T::list(library)) creators<T>[one->getPluginName()] = one;
    EQUAL(creators<T>.size(), every_operator().size());
    for (const Attributes &a : every_operator())
        check(creators<T>.count(a.op_type()) == 1, "no creator of " + a.op_type(), __FILE__, __LINE__);
    return failures == 0;
}

template <class T> bool creators_answer() {
    return std::all_of(creators<T>.begin(), creators<T>.end(),
                       [](auto &item) { return item.first == item.second->getPluginName(); });
}

template <class T> Owner<T> make(const Attributes &a) { return T::create(creator_of<T>(a), Fields<T>(a).get()); }

template <class T> typename T::Dims dims(const std::vector<int64_t> &sizes) {
    typename T::Dims d{static_cast<int32_t>(sizes.size()), {}};
    std::copy(sizes.begin(), sizes.end(), d.d);
    return d;
}

template <class T>
typename T::Desc fixed(const std::vector<int64_t> &sizes, typename T::DataType type, typename T::TensorFormat format) {
    return {dims<T>(sizes), type, format, 1.f};
}

// Sizes that differ between `least` and `most` are open.
template <class T>
typename T::Dynamic dynamic(const std::vector<int64_t> &least, const std::vector<int64_t> &most, typename T::DataType type,
                            typename T::TensorFormat format) {
    typename T::Dynamic t{};
    std::vector<int64_t> open = most;
    for (size_t i = 0; i < open.size(); ++i)
        if (least[i] != most[i]) open[i] = -1;
    t.desc = fixed<T>(open, type, format);
    t.min = dims<T>(least);
    t.max = dims<T>(most);
    T::set_typical(t);
    return t;
}
template <class T>
typename T::Dynamic dynamic(const std::vector<int64_t> &sizes, typename T::DataType type, typename T::TensorFormat format) {
    return dynamic<T>(sizes, sizes, type, format);
}

// Convolution of 64 to 128 channels by 3x3 weights, described to the builder for batches of 1 to 64 and images of 16x16 to
// 64x64, and to a run for a batch of 4 of 16x16.
template <class T> struct Layer {
    Attributes a;
    int inputs, dtype, layout;
    std::vector<typename T::Dynamic> in;
    typename T::Dynamic out;
    std::vector<typename T::Desc> largest_in, now;
    typename T::Desc largest_out, result;

    Layer(const Attributes &attributes, typename T::DataType type, int convpool_type, typename T::TensorFormat format, bool bias)
        : a(attributes), inputs(bias ? a.input_count() : 2), dtype(convpool_type),
          layout(format == T::TensorFormat::kLINEAR ? CONVPOOL_CHANNELS_FIRST : CONVPOOL_CHANNELS_LAST) {
        const auto linear = T::TensorFormat::kLINEAR;
        auto out_at = [&](int64_t n, int64_t size) {
            return std::vector<int64_t>{n, 128, out_size(a, 0, size), out_size(a, 1, size)};
        };
        out = dynamic<T>(out_at(1, 16), out_at(64, 64), type, format);
        in = a.inputs(dynamic<T>({1, 64, 16, 16}, {64, 64, 64, 64}, type, format), dynamic<T>({128, 3, 3, 64}, type, linear),
                      dynamic<T>({128}, type, linear), dynamic<T>({64}, type, linear), out);
        in.resize(inputs);
        auto of_batch = [&](int64_t n, int64_t size, typename T::Desc &y) {
            y = fixed<T>(out_at(n, size), type, format);
            auto x = a.inputs(fixed<T>({n, 64, size, size}, type, format), fixed<T>({128, 3, 3, 64}, type, linear),
                              fixed<T>({128}, type, linear), fixed<T>({64}, type, linear), y);
            x.resize(inputs);
            return x;
        };
        largest_in = of_batch(64, 64, largest_out);
        now = of_batch(4, 16, result);
    }

    convpool_problem problem(int64_t n, int64_t size) const {
        return problem_of(a, n, 64, 128, {size, size}, dtype, layout, layout, inputs > 2);
    }
    bool configure(typename T::Plugin &plugin) const { return T::configure(plugin, in.data(), inputs, out); }
    size_t workspace(typename T::Plugin &plugin) const { return T::workspace(plugin, *this); }
    bool run(typename T::Plugin &plugin, const void *const *pointers, void *y, void *workspace = nullptr) const {
        return T::run(plugin, now.data(), inputs, result, pointers, &y, workspace, nullptr);
    }
};

}  // namespace host

// SPDX-License-Identifier: Apache-2.0
// What the plugin creators of both interfaces share.  Api names the types of one TensorRT version's interface.
#pragma once

#include "plugin_core.h"

#include <vector>

namespace convpool::tensorrt {

inline constexpr char kVersion[] = "1";
inline constexpr char kNamespace[] = "";

template <typename Api> typename Api::FieldType field_type(const Attribute &attribute) {
    return attribute.real ? Api::FieldType::kFLOAT32 : Api::FieldType::kINT32;
}

// An operator's attributes as the fields that a creator lists; TensorRT's ONNX parser hands on no others.
template <typename Api> class FieldNames {
public:
    explicit FieldNames(const Operator &op) {
        for (const Attribute &attribute : op.attributes())
            fields_.push_back({attribute.name, nullptr, field_type<Api>(attribute), 1});
        fields_.push_back({kChannelsLastField, nullptr, Api::FieldType::kINT32, 1});
        collection_ = {static_cast<int32_t>(fields_.size()), fields_.data()};
    }
    FieldNames(const FieldNames &) = delete;  // the collection points to its own fields
    const typename Api::FieldCollection *collection() const { return &collection_; }

private:
    std::vector<typename Api::Field> fields_;
    typename Api::FieldCollection collection_{};
};

// The plugin that a creator's fields describe.
template <typename Api> PluginCore core_of(const Operator &op, const typename Api::FieldCollection *given) {
    if (given == nullptr || given->nbFields < 0 || (given->nbFields > 0 && given->fields == nullptr))
        refuse("fields", given == nullptr || given->nbFields >= 0 ? "null" : std::to_string(given->nbFields), "a collection");
    std::vector<Field> fields;
    for (int32_t i = 0; i < given->nbFields; ++i) {
        const typename Api::Field &field = given->fields[i];
        fields.push_back({field.name, field.data, static_cast<int32_t>(field.type), field.length});
    }
    return PluginCore(op, fields.data(), static_cast<int32_t>(fields.size()));
}

// One creator of each operator; they stay to the very end of the process, as TensorRT's registry does.
template <typename Creator, typename Interface> const std::vector<Interface *> &all_creators() {
    static auto &creators = *new std::vector<Creator>(operators().begin(), operators().end());
    static const auto &pointers = *[] {
        auto *all = new std::vector<Interface *>;
        for (Creator &creator : creators) all->push_back(&creator);
        return all;
    }();
    return pointers;
}

}  // namespace convpool::tensorrt

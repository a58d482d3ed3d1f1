// SPDX-License-Identifier: Apache-2.0
// IPluginV3 as traits: TensorRT 10 and 11.
#pragma once

#include "declared/v3.h"

#include "interface.h"

#include <dlfcn.h>

namespace host {

namespace v3 = convpool::tensorrt::v3;

struct Parts {
    v3::IPluginV3OneCore *core;
    v3::IPluginV3OneBuild *build;
    v3::IPluginV3OneRuntime *runtime;
    explicit Parts(v3::IPluginV3 &p)
        : core(static_cast<v3::IPluginV3OneCore *>(p.getCapabilityInterface(v3::PluginCapabilityType::kCORE))),
          build(static_cast<v3::IPluginV3OneBuild *>(p.getCapabilityInterface(v3::PluginCapabilityType::kBUILD))),
          runtime(static_cast<v3::IPluginV3OneRuntime *>(p.getCapabilityInterface(v3::PluginCapabilityType::kRUNTIME))) {}
};

struct V3 {
    INTERFACE_TYPES(v3);
    using Number = int64_t;
    using Plugin = v3::IPluginV3;
    using Creator = v3::IPluginCreatorV3One;
    using Saved = const Collection *;
    using Destroy = std::default_delete<Plugin>;
    using Owner = std::unique_ptr<Plugin>;
    static constexpr bool kNeedsDevice = false;  // to be configured

    static std::vector<Creator *> list(void *library) {
        int32_t count = 0;
        auto *all = reinterpret_cast<v3::IPluginCreatorInterface *const *(*)(int32_t &)>(dlsym(library, "getCreators"))(count);
        std::vector<Creator *> creators;
        for (int32_t i = 0; i < count; ++i) creators.push_back(static_cast<Creator *>(all[i]));
        return creators;
    }
    // The phases differ in nothing.
    static Owner create(Creator &creator, const Collection *fields) {
        Owner built(creator.createPlugin("layer", fields, v3::TensorRTPhase::kBUILD)), run(load(creator, fields));
        if ((built == nullptr) != (run == nullptr)) CHECK(!"one phase only makes a plugin of the fields");
        return built;
    }
    static Saved saved(Plugin &plugin) { return Parts(plugin).runtime->getFieldsToSerialize(); }
    static Owner load(Creator &creator, const Collection *fields) {
        return Owner(creator.createPlugin("layer", fields, v3::TensorRTPhase::kRUNTIME));
    }
    static std::string name(Plugin &plugin) { return Parts(plugin).core->getPluginName(); }
    static std::string text(Plugin &plugin) { return Parts(plugin).build->getTimingCacheID(); }
    static Owner clone(Plugin &plugin) { return Owner(plugin.clone()); }
    static Owner attach(Plugin &plugin) { return Owner(Parts(plugin).runtime->attachToContext(nullptr)); }
    static void set_typical(Dynamic &tensor) { tensor.opt = tensor.max; }
    static bool output_shape(Plugin &plugin, const DimsExprs *inputs, int count, DimsExprs &output, IBuilder &builder) {
        return Parts(plugin).build->getOutputShapes(inputs, count, nullptr, 0, &output, 1, builder) == 0;
    }
    static bool output_type(Plugin &plugin, const DataType *inputs, int count, DataType &output) {
        return Parts(plugin).build->getOutputDataTypes(&output, 1, inputs, count) == 0;
    }
    static bool supports(Plugin &plugin, int position, const std::vector<Dynamic> &all) {
        return Parts(plugin).build->supportsFormatCombination(position, all.data(), static_cast<int32_t>(all.size()) - 1, 1);
    }
    static bool configure(Plugin &plugin, const Dynamic *in, int count, const Dynamic &out) {
        return Parts(plugin).build->configurePlugin(in, count, &out, 1) == 0;
    }
    static size_t workspace(Plugin &plugin, const Layer<V3> &layer) {
        return Parts(plugin).build->getWorkspaceSize(layer.in.data(), layer.inputs, &layer.out, 1);
    }
    static bool shape_change(Plugin &plugin, const Desc *in, int count, const Desc &out) {
        return Parts(plugin).runtime->onShapeChange(in, count, &out, 1) == 0;
    }
    static bool enqueue(Plugin &plugin, const Desc *in, const Desc &out, const void *const *inputs, void *const *outputs,
                        void *workspace, CUstream_st *stream) {
        return Parts(plugin).runtime->enqueue(in, &out, inputs, outputs, workspace, stream) == 0;
    }
    static bool run(Plugin &plugin, const Desc *in, int count, const Desc &out, const void *const *inputs, void *const *outputs,
                    void *workspace, CUstream_st *stream) {
        return shape_change(plugin, in, count, out) && enqueue(plugin, in, out, inputs, outputs, workspace, stream);
    }
};

}  // namespace host

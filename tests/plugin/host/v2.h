// SPDX-License-Identifier: Apache-2.0
// IPluginV2DynamicExt as traits: TensorRT 8.6 and 9.
#pragma once

#include "declared/v2.h"

#include "interface.h"

#include <dlfcn.h>

namespace host {

namespace v2 = convpool::tensorrt::v2;

struct V2 {
    INTERFACE_TYPES(v2);
    using Number = int32_t;
    using Plugin = v2::IPluginV2DynamicExt;
    using Creator = v2::IPluginCreator;
    using Saved = std::vector<char>;
    struct Destroy {
        void operator()(v2::IPluginV2 *plugin) const { plugin->destroy(); }
    };
    using Owner = std::unique_ptr<Plugin, Destroy>;
    static constexpr bool kNeedsDevice = true;  // to be configured

    static Owner own(v2::IPluginV2 *plugin) { return Owner(static_cast<Plugin *>(plugin)); }
    static std::vector<Creator *> list(void *library) {
        int32_t count = 0;
        Creator *const *all = reinterpret_cast<Creator *const *(*)(int32_t &)>(dlsym(library, "getPluginCreators"))(count);
        return {all, all + count};
    }
    static Owner create(Creator &creator, const Collection *fields) { return own(creator.createPlugin("layer", fields)); }
    static Saved saved(const Plugin &plugin) {
        std::vector<char> bytes(plugin.getSerializationSize() + 8, '#');
        plugin.serialize(bytes.data());
        CHECK(std::all_of(bytes.end() - 8, bytes.end(), [](char c) { return c == '#'; }));  // not a byte past its size
        bytes.resize(bytes.size() - 8);
        return bytes;
    }
    static Owner load(Creator &creator, const Saved &saved) {
        return own(creator.deserializePlugin("layer", saved.data(), saved.size()));
    }
    // With the checksum of what the bytes are now: CRC-32 as zlib's.
    static Saved summed(Saved bytes) {
        uint32_t crc = ~0u;
        for (size_t i = 0; i < bytes.size() - 4; ++i) {
            crc ^= static_cast<unsigned char>(bytes[i]);
            for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (crc & 1 ? 0xEDB88320u : 0u);
        }
        crc = ~crc;
        std::memcpy(&bytes[bytes.size() - 4], &crc, 4);
        return bytes;
    }
    static std::string name(const Plugin &plugin) { return plugin.getPluginType(); }
    static std::string text(const Plugin &plugin) { return {saved(plugin).data(), saved(plugin).size()}; }
    static Owner clone(const Plugin &plugin) { return own(plugin.clone()); }
    static Owner attach(const Plugin &plugin) {
        Owner context = clone(plugin);
        context->attachToContext(nullptr, nullptr, nullptr);
        return context;
    }
    static void set_typical(Dynamic &) {}
    static bool output_shape(Plugin &plugin, const DimsExprs *inputs, int count, DimsExprs &output, IBuilder &builder) {
        output = plugin.getOutputDimensions(0, inputs, count, builder);
        return output.nbDims >= 0;
    }
    static bool output_type(const Plugin &plugin, const DataType *inputs, int count, DataType &output) {
        logged.clear();
        output = plugin.getOutputDataType(0, inputs, count);
        return logged.empty();
    }
    static bool supports(Plugin &plugin, int position, const std::vector<Dynamic> &all) {
        std::vector<Desc> tensors;
        for (const Dynamic &tensor : all) tensors.push_back(tensor.desc);
        return plugin.supportsFormatCombination(position, tensors.data(), static_cast<int32_t>(all.size()) - 1, 1);
    }
    static bool configure(Plugin &plugin, const Dynamic *in, int count, const Dynamic &out) {
        logged.clear();
        plugin.configurePlugin(in, count, &out, 1);
        return logged.empty();
    }
    static size_t workspace(const Plugin &plugin, const Layer<V2> &layer) {
        return plugin.getWorkspaceSize(layer.largest_in.data(), layer.inputs, &layer.largest_out, 1);
    }
    // As TensorRT 8.6 tells an execution context.
    static bool shape_change(Plugin &plugin, const Desc *in, int count, const Desc &out) {
        std::vector<Dynamic> now;
        for (int i = 0; i < count; ++i) now.push_back({in[i], in[i].dims, in[i].dims});
        return configure(plugin, now.data(), count, {out, out.dims, out.dims});
    }
    static bool enqueue(Plugin &plugin, const Desc *in, const Desc &out, const void *const *inputs, void *const *outputs,
                        void *workspace, CUstream_st *stream) {
        return plugin.enqueue(in, &out, inputs, outputs, workspace, stream) == 0;
    }
    static bool run(Plugin &plugin, const Desc *in, int, const Desc &out, const void *const *inputs, void *const *outputs,
                    void *workspace, CUstream_st *stream) {
        return enqueue(plugin, in, out, inputs, outputs, workspace, stream);
    }
};

}  // namespace host

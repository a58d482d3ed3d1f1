// SPDX-License-Identifier: Apache-2.0
// IPluginV3 of TensorRT 10 and 11: the SDK's headers where CONVPOOL_TENSORRT_SDK_MAJOR says that they are there and new
// enough, else the project's own declarations of the same binary interface.  check_declarations.cpp compares the two.
//
// The Itanium C++ ABI counts: the order of the virtual functions, the destructor's two slots included, and the
// layout of the structs.  Never reorder.
#pragma once

#include <cstddef>
#include <cstdint>

#if CONVPOOL_TENSORRT_SDK_MAJOR >= 10
#include <NvInferRuntime.h>
namespace convpool::tensorrt {
namespace v3 = nvinfer1;
}
#endif

#if CONVPOOL_TENSORRT_SDK_MAJOR < 10 || defined(CONVPOOL_DECLARE_ALL)
struct CUstream_st;

#if CONVPOOL_TENSORRT_SDK_MAJOR >= 10
namespace convpool::tensorrt::own_v3 {
#else
namespace convpool::tensorrt::v3 {
#endif

using Size = int64_t;
#include "shared.h"

enum class APILanguage : int32_t { kCPP = 0, kPYTHON = 1 };
enum class PluginCapabilityType : int32_t { kCORE = 0, kBUILD = 1, kRUNTIME = 2 };
enum class TensorRTPhase : int32_t { kBUILD = 0, kRUNTIME = 1 };

struct InterfaceInfo {
    char const *kind;
    int32_t major;
    int32_t minor;
};

struct DynamicPluginTensorDesc {
    PluginTensorDesc desc;
    Dims min;
    Dims max;
    Dims opt;
};

class IVersionedInterface {
public:
    virtual APILanguage getAPILanguage() const noexcept { return APILanguage::kCPP; }
    virtual InterfaceInfo getInterfaceInfo() const noexcept = 0;
    virtual ~IVersionedInterface() noexcept = default;
};

class IPluginResourceContext;  // passed through, never called

class IPluginCapability : public IVersionedInterface {};
class IPluginCreatorInterface : public IVersionedInterface {};

class IPluginV3 : public IVersionedInterface {
public:
    InterfaceInfo getInterfaceInfo() const noexcept override { return {"PLUGIN", 1, 0}; }
    virtual IPluginCapability *getCapabilityInterface(PluginCapabilityType type) noexcept = 0;
    virtual IPluginV3 *clone() noexcept = 0;
};

class IPluginV3OneCore : public IPluginCapability {
public:
    InterfaceInfo getInterfaceInfo() const noexcept override { return {"PLUGIN_V3ONE_CORE", 1, 0}; }
    virtual char const *getPluginName() const noexcept = 0;
    virtual char const *getPluginVersion() const noexcept = 0;
    virtual char const *getPluginNamespace() const noexcept = 0;
};

class IPluginV3OneBuild : public IPluginCapability {
public:
    InterfaceInfo getInterfaceInfo() const noexcept override { return {"PLUGIN_V3ONE_BUILD", 1, 0}; }
    virtual int32_t configurePlugin(DynamicPluginTensorDesc const *in, int32_t nbInputs, DynamicPluginTensorDesc const *out,
                                    int32_t nbOutputs) noexcept = 0;
    virtual int32_t getOutputDataTypes(DataType *outputTypes, int32_t nbOutputs, DataType const *inputTypes,
                                       int32_t nbInputs) const noexcept = 0;
    virtual int32_t getOutputShapes(DimsExprs const *inputs, int32_t nbInputs, DimsExprs const *shapeInputs,
                                    int32_t nbShapeInputs, DimsExprs *outputs, int32_t nbOutputs,
                                    IExprBuilder &exprBuilder) noexcept = 0;
    virtual bool supportsFormatCombination(int32_t pos, DynamicPluginTensorDesc const *inOut, int32_t nbInputs,
                                           int32_t nbOutputs) noexcept = 0;
    virtual int32_t getNbOutputs() const noexcept = 0;
    virtual size_t getWorkspaceSize(DynamicPluginTensorDesc const *, int32_t, DynamicPluginTensorDesc const *,
                                    int32_t) const noexcept {
        return 0;
    }
    virtual int32_t getValidTactics(int32_t *, int32_t) noexcept { return 0; }
    virtual int32_t getNbTactics() noexcept { return 0; }
    virtual char const *getTimingCacheID() noexcept { return nullptr; }
    virtual int32_t getFormatCombinationLimit() noexcept { return 100; }
    virtual char const *getMetadataString() noexcept { return nullptr; }
};

class IPluginV3OneRuntime : public IPluginCapability {
public:
    InterfaceInfo getInterfaceInfo() const noexcept override { return {"PLUGIN_V3ONE_RUNTIME", 1, 0}; }
    virtual int32_t setTactic(int32_t) noexcept { return 0; }
    virtual int32_t onShapeChange(PluginTensorDesc const *in, int32_t nbInputs, PluginTensorDesc const *out,
                                  int32_t nbOutputs) noexcept = 0;
    virtual int32_t enqueue(PluginTensorDesc const *inputDesc, PluginTensorDesc const *outputDesc, void const *const *inputs,
                            void *const *outputs, void *workspace, CUstream_st *stream) noexcept = 0;
    virtual IPluginV3 *attachToContext(IPluginResourceContext *context) noexcept = 0;
    virtual PluginFieldCollection const *getFieldsToSerialize() noexcept = 0;
};

class IPluginCreatorV3One : public IPluginCreatorInterface {
public:
    InterfaceInfo getInterfaceInfo() const noexcept override { return {"PLUGIN CREATOR_V3ONE", 1, 0}; }
    virtual IPluginV3 *createPlugin(char const *name, PluginFieldCollection const *fields, TensorRTPhase phase) noexcept = 0;
    virtual PluginFieldCollection const *getFieldNames() noexcept = 0;
    virtual char const *getPluginName() const noexcept = 0;
    virtual char const *getPluginVersion() const noexcept = 0;
    virtual char const *getPluginNamespace() const noexcept = 0;
};

}  // namespace
#endif

// SPDX-License-Identifier: Apache-2.0
// IPluginV2DynamicExt of TensorRT 8.6 and 9: the SDK's headers where CONVPOOL_TENSORRT_SDK_MAJOR says that they are there
// and of such a version, else the project's own declarations of the same binary interface.  See v3.h.
//
// Own namespace: the names are those of v3.h, the layouts are not (32-bit Dims).
#pragma once

#include <cstddef>
#include <cstdint>

#if CONVPOOL_TENSORRT_SDK_MAJOR == 8 || CONVPOOL_TENSORRT_SDK_MAJOR == 9
#include <NvInferRuntime.h>
#define CONVPOOL_SDK_HAS_V2 1
namespace convpool::tensorrt {
namespace v2 = nvinfer1;
}
#endif

#if !defined(CONVPOOL_SDK_HAS_V2) || defined(CONVPOOL_DECLARE_ALL)
struct CUstream_st;
struct cudnnContext;
struct cublasContext;

#ifdef CONVPOOL_SDK_HAS_V2
namespace convpool::tensorrt::own_v2 {
#else
namespace convpool::tensorrt::v2 {
#endif

using Size = int32_t;
#include "shared.h"

struct DynamicPluginTensorDesc {
    PluginTensorDesc desc;
    Dims min;
    Dims max;
};

class IGpuAllocator;  // passed through, never called

// The functions that only implicit-batch networks called keep their slots; nothing calls them.
class IPluginV2 {
public:
    virtual int32_t getTensorRTVersion() const noexcept = 0;
    virtual char const *getPluginType() const noexcept = 0;
    virtual char const *getPluginVersion() const noexcept = 0;
    virtual int32_t getNbOutputs() const noexcept = 0;
    virtual Dims getOutputDimensions(int32_t, Dims const *, int32_t) noexcept = 0;
    virtual bool supportsFormat(DataType, TensorFormat) const noexcept = 0;
    virtual void configureWithFormat(Dims const *, int32_t, Dims const *, int32_t, DataType, TensorFormat, int32_t) noexcept = 0;
    virtual int32_t initialize() noexcept = 0;
    virtual void terminate() noexcept = 0;
    virtual size_t getWorkspaceSize(int32_t) const noexcept = 0;
    virtual int32_t enqueue(int32_t, void const *const *, void *const *, void *, CUstream_st *) noexcept = 0;
    virtual size_t getSerializationSize() const noexcept = 0;
    virtual void serialize(void *buffer) const noexcept = 0;
    virtual void destroy() noexcept = 0;
    virtual IPluginV2 *clone() const noexcept = 0;
    virtual void setPluginNamespace(char const *name) noexcept = 0;
    virtual char const *getPluginNamespace() const noexcept = 0;
    virtual ~IPluginV2() noexcept = default;
};

class IPluginV2Ext : public IPluginV2 {
public:
    virtual DataType getOutputDataType(int32_t index, DataType const *inputTypes, int32_t nbInputs) const noexcept = 0;
    virtual bool isOutputBroadcastAcrossBatch(int32_t, bool const *, int32_t) const noexcept = 0;
    virtual bool canBroadcastInputAcrossBatch(int32_t) const noexcept = 0;
    virtual void configurePlugin(Dims const *, int32_t, Dims const *, int32_t, DataType const *, DataType const *, bool const *,
                                 bool const *, TensorFormat, int32_t) noexcept = 0;
    virtual void attachToContext(cudnnContext *, cublasContext *, IGpuAllocator *) noexcept {}
    virtual void detachFromContext() noexcept {}
};

class IPluginV2DynamicExt : public IPluginV2Ext {
public:
    IPluginV2DynamicExt *clone() const noexcept override = 0;
    virtual DimsExprs getOutputDimensions(int32_t outputIndex, DimsExprs const *inputs, int32_t nbInputs,
                                          IExprBuilder &exprBuilder) noexcept = 0;
    virtual bool supportsFormatCombination(int32_t pos, PluginTensorDesc const *inOut, int32_t nbInputs,
                                           int32_t nbOutputs) noexcept = 0;
    virtual void configurePlugin(DynamicPluginTensorDesc const *in, int32_t nbInputs, DynamicPluginTensorDesc const *out,
                                 int32_t nbOutputs) noexcept = 0;
    virtual size_t getWorkspaceSize(PluginTensorDesc const *inputs, int32_t nbInputs, PluginTensorDesc const *outputs,
                                    int32_t nbOutputs) const noexcept = 0;
    virtual int32_t enqueue(PluginTensorDesc const *inputDesc, PluginTensorDesc const *outputDesc, void const *const *inputs,
                            void *const *outputs, void *workspace, CUstream_st *stream) noexcept = 0;

private:
    Dims getOutputDimensions(int32_t, Dims const *, int32_t) noexcept final { return Dims{-1, {}}; }
    bool supportsFormat(DataType, TensorFormat) const noexcept final { return false; }
    void configureWithFormat(Dims const *, int32_t, Dims const *, int32_t, DataType, TensorFormat, int32_t) noexcept final {}
    size_t getWorkspaceSize(int32_t) const noexcept final { return 0; }
    int32_t enqueue(int32_t, void const *const *, void *const *, void *, CUstream_st *) noexcept final { return 1; }
    bool isOutputBroadcastAcrossBatch(int32_t, bool const *, int32_t) const noexcept final { return false; }
    bool canBroadcastInputAcrossBatch(int32_t) const noexcept final { return true; }
    void configurePlugin(Dims const *, int32_t, Dims const *, int32_t, DataType const *, DataType const *, bool const *,
                         bool const *, TensorFormat, int32_t) noexcept final {}
};

class IPluginCreator {
public:
    virtual int32_t getTensorRTVersion() const noexcept = 0;
    virtual char const *getPluginName() const noexcept = 0;
    virtual char const *getPluginVersion() const noexcept = 0;
    virtual PluginFieldCollection const *getFieldNames() noexcept = 0;
    virtual IPluginV2 *createPlugin(char const *name, PluginFieldCollection const *fields) noexcept = 0;
    virtual IPluginV2 *deserializePlugin(char const *name, void const *data, size_t length) noexcept = 0;
    virtual void setPluginNamespace(char const *name) noexcept = 0;
    virtual char const *getPluginNamespace() const noexcept = 0;
    virtual ~IPluginCreator() noexcept = default;
};

}  // namespace
#endif

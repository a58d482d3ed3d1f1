// SPDX-License-Identifier: Apache-2.0
// The part of onnxruntime's versioned C API that the custom operators use: the project's own declarations of the same binary
// interface.  A table of version N begins with the table of every earlier version, so these places hold from 1.18 on.
//
// Enumerations are int32_t here.  check_declarations.cpp compares all of it with onnxruntime_c_api.h.
#pragma once

#include <cstddef>
#include <cstdint>

namespace convpool::onnxruntime {

inline constexpr uint32_t kApiVersion = 18;

enum ElementType : int32_t { kUndefinedType = 0, kFloatType = 1, kFloat16Type = 10, kDoubleType = 11, kBFloat16Type = 16 };
enum ErrorCode : int32_t { kFail = 1, kInvalidArgument = 2 };
enum AttributeType : int32_t { kIntAttribute = 1, kIntsAttribute = 2, kFloatAttribute = 3, kFloatsAttribute = 4 };
enum Characteristic : int32_t { kRequired = 0, kOptional = 1, kVariadic = 2 };
enum MemoryType : int32_t { kDefaultMemory = 0 };
enum LoggingLevel : int32_t { kWarning = 2 };

struct OrtAllocator;
struct OrtCustomOpDomain;
struct OrtKernelContext;
struct OrtKernelInfo;
struct OrtLogger;
struct OrtMemoryInfo;
struct OrtOpAttr;
struct OrtSessionOptions;
struct OrtShapeInferContext;
struct OrtStatus;
struct OrtTensorTypeAndShapeInfo;
struct OrtTypeInfo;
struct OrtValue;
struct OrtCustomOp;

// F(place in the table, name, result, parameters)
#define CONVPOOL_ORT_FUNCTIONS(F)                                                                                              \
    F(0, CreateStatus, OrtStatus *, (int32_t code, const char *message))                                                       \
    F(2, GetErrorMessage, const char *, (const OrtStatus *status))                                                             \
    F(26, CreateCustomOpDomain, OrtStatus *, (const char *name, OrtCustomOpDomain **domain))                                   \
    F(27, CustomOpDomain_Add, OrtStatus *, (OrtCustomOpDomain * domain, const OrtCustomOp *op))                                \
    F(28, AddCustomOpDomain, OrtStatus *, (OrtSessionOptions * options, OrtCustomOpDomain * domain))                           \
    F(51, GetTensorMutableData, OrtStatus *, (OrtValue * value, void **data))                                                  \
    F(55, CastTypeInfoToTensorInfo, OrtStatus *, (const OrtTypeInfo *type, const OrtTensorTypeAndShapeInfo **info))            \
    F(57, CreateTensorTypeAndShapeInfo, OrtStatus *, (OrtTensorTypeAndShapeInfo * *info))                                      \
    F(58, SetTensorElementType, OrtStatus *, (OrtTensorTypeAndShapeInfo * info, int32_t type))                                 \
    F(59, SetDimensions, OrtStatus *, (OrtTensorTypeAndShapeInfo * info, const int64_t *sizes, size_t count))                  \
    F(60, GetTensorElementType, OrtStatus *, (const OrtTensorTypeAndShapeInfo *info, int32_t *type))                           \
    F(61, GetDimensionsCount, OrtStatus *, (const OrtTensorTypeAndShapeInfo *info, size_t *count))                             \
    F(62, GetDimensions, OrtStatus *, (const OrtTensorTypeAndShapeInfo *info, int64_t *sizes, size_t count))                   \
    F(63, GetSymbolicDimensions, OrtStatus *, (const OrtTensorTypeAndShapeInfo *info, const char **names, size_t count))       \
    F(65, GetTensorTypeAndShape, OrtStatus *, (const OrtValue *value, OrtTensorTypeAndShapeInfo **info))                       \
    F(72, MemoryInfoGetId, OrtStatus *, (const OrtMemoryInfo *info, int *id))                                                  \
    F(75, AllocatorAlloc, OrtStatus *, (OrtAllocator * allocator, size_t bytes, void **memory))                                \
    F(76, AllocatorFree, OrtStatus *, (OrtAllocator * allocator, void *memory))                                                \
    F(85, KernelInfoGetAttribute_float, OrtStatus *, (const OrtKernelInfo *info, const char *name, float *value))              \
    F(86, KernelInfoGetAttribute_int64, OrtStatus *, (const OrtKernelInfo *info, const char *name, int64_t *value))            \
    F(87, KernelInfoGetAttribute_string, OrtStatus *, (const OrtKernelInfo *info, const char *name, char *text, size_t *size)) \
    F(88, KernelContext_GetInputCount, OrtStatus *, (const OrtKernelContext *context, size_t *count))                          \
    F(90, KernelContext_GetInput, OrtStatus *, (const OrtKernelContext *context, size_t index, const OrtValue **value))        \
    F(91, KernelContext_GetOutput, OrtStatus *,                                                                                \
      (OrtKernelContext * context, size_t index, const int64_t *sizes, size_t count, OrtValue **value))                        \
    F(93, ReleaseStatus, void, (OrtStatus * status))                                                                           \
    F(98, ReleaseTypeInfo, void, (OrtTypeInfo * type))                                                                         \
    F(99, ReleaseTensorTypeAndShapeInfo, void, (OrtTensorTypeAndShapeInfo * info))                                             \
    F(130, AddSessionConfigEntry, OrtStatus *, (OrtSessionOptions * options, const char *key, const char *value))              \
    F(132, ReleaseAllocator, void, (OrtAllocator * allocator))                                                                 \
    F(162, KernelInfoGetAttributeArray_float, OrtStatus *,                                                                     \
      (const OrtKernelInfo *info, const char *name, float *values, size_t *count))                                             \
    F(163, KernelInfoGetAttributeArray_int64, OrtStatus *,                                                                     \
      (const OrtKernelInfo *info, const char *name, int64_t *values, size_t *count))                                           \
    F(193, KernelContext_GetGPUComputeStream, OrtStatus *, (const OrtKernelContext *context, void **stream))                   \
    F(194, GetTensorMemoryInfo, OrtStatus *, (const OrtValue *value, const OrtMemoryInfo **info))                              \
    F(230, KernelInfo_GetInputCount, OrtStatus *, (const OrtKernelInfo *info, size_t *count))                                  \
    F(234, KernelInfo_GetInputTypeInfo, OrtStatus *, (const OrtKernelInfo *info, size_t index, OrtTypeInfo **type))            \
    F(238, GetSessionConfigEntry, OrtStatus *, (const OrtSessionOptions *options, const char *key, char *value, size_t *size)) \
    F(244, KernelInfo_GetNodeName, OrtStatus *, (const OrtKernelInfo *info, char *text, size_t *size))                         \
    F(245, KernelInfo_GetLogger, OrtStatus *, (const OrtKernelInfo *info, const OrtLogger **logger))                           \
    F(247, Logger_LogMessage, OrtStatus *,                                                                                     \
      (const OrtLogger *logger, int32_t level, const char *message, const char *file, int line, const char *function))         \
    F(249, KernelInfoGetConstantInput_tensor, OrtStatus *,                                                                     \
      (const OrtKernelInfo *info, size_t index, int *is_constant, const OrtValue **value))                                     \
    F(253, KernelContext_GetAllocator, OrtStatus *,                                                                            \
      (const OrtKernelContext *context, const OrtMemoryInfo *info, OrtAllocator **allocator))                                  \
    F(265, KernelContext_GetResource, OrtStatus *, (const OrtKernelContext *context, int version, int id, void **resource))    \
    F(267, ShapeInferContext_GetInputCount, OrtStatus *, (const OrtShapeInferContext *context, size_t *count))                 \
    F(268, ShapeInferContext_GetInputTypeShape, OrtStatus *,                                                                   \
      (const OrtShapeInferContext *context, size_t index, OrtTensorTypeAndShapeInfo **info))                                   \
    F(269, ShapeInferContext_GetAttribute, OrtStatus *,                                                                        \
      (const OrtShapeInferContext *context, const char *name, const OrtOpAttr **attribute))                                    \
    F(270, ShapeInferContext_SetOutputTypeShape, OrtStatus *,                                                                  \
      (const OrtShapeInferContext *context, size_t index, const OrtTensorTypeAndShapeInfo *info))                              \
    F(271, SetSymbolicDimensions, OrtStatus *, (OrtTensorTypeAndShapeInfo * info, const char **names, size_t count))           \
    F(272, ReadOpAttr, OrtStatus *, (const OrtOpAttr *attribute, int32_t type, void *data, size_t bytes, size_t *needed))      \
    F(274, KernelContext_ParallelFor, OrtStatus *,                                                                             \
      (const OrtKernelContext *context, void (*task)(void *, size_t), size_t tasks, size_t batches, void *user))               \
    F(277, KernelContext_GetScratchBuffer, OrtStatus *,                                                                        \
      (const OrtKernelContext *context, const OrtMemoryInfo *info, size_t bytes, void **memory))                               \
    F(278, KernelInfoGetAllocator, OrtStatus *, (const OrtKernelInfo *info, int32_t memory_type, OrtAllocator **allocator))

inline constexpr size_t kFunctions = 280;  // of version 18

struct OrtApi {
    void (*table[kFunctions])();

#define CONVPOOL_ORT_METHOD(place, name, result, parameters) \
    auto name() const { return reinterpret_cast<result(*) parameters>(table[place]); }
    CONVPOOL_ORT_FUNCTIONS(CONVPOOL_ORT_METHOD)
#undef CONVPOOL_ORT_METHOD
};

struct OrtApiBase {
    const OrtApi *(*GetApi)(uint32_t version);
    const char *(*GetVersionString)();
};

// One operator for one element type and one provider, as onnxruntime asks about it: F(name, result, parameters) of its functions.
#define CONVPOOL_ORT_CUSTOM_OP(F)                                                                                        \
    F(CreateKernel, void *, (const OrtCustomOp *op, const OrtApi *api, const OrtKernelInfo *info))                       \
    F(GetName, const char *, (const OrtCustomOp *op))                                                                    \
    F(GetExecutionProviderType, const char *, (const OrtCustomOp *op))                                                   \
    F(GetInputType, int32_t, (const OrtCustomOp *op, size_t index))                                                      \
    F(GetInputTypeCount, size_t, (const OrtCustomOp *op))                                                                \
    F(GetOutputType, int32_t, (const OrtCustomOp *op, size_t index))                                                     \
    F(GetOutputTypeCount, size_t, (const OrtCustomOp *op))                                                               \
    F(KernelCompute, void, (void *kernel, OrtKernelContext *context))                                                    \
    F(KernelDestroy, void, (void *kernel))                                                                               \
    F(GetInputCharacteristic, int32_t, (const OrtCustomOp *op, size_t index))                                            \
    F(GetOutputCharacteristic, int32_t, (const OrtCustomOp *op, size_t index))                                           \
    F(GetInputMemoryType, int32_t, (const OrtCustomOp *op, size_t index))                                                \
    F(GetVariadicInputMinArity, int, (const OrtCustomOp *op))                                                            \
    F(GetVariadicInputHomogeneity, int, (const OrtCustomOp *op))                                                         \
    F(GetVariadicOutputMinArity, int, (const OrtCustomOp *op))                                                           \
    F(GetVariadicOutputHomogeneity, int, (const OrtCustomOp *op))                                                        \
    F(CreateKernelV2, OrtStatus *, (const OrtCustomOp *op, const OrtApi *api, const OrtKernelInfo *info, void **kernel)) \
    F(KernelComputeV2, OrtStatus *, (void *kernel, OrtKernelContext *context))                                           \
    F(InferOutputShapeFn, OrtStatus *, (const OrtCustomOp *op, OrtShapeInferContext *context))                           \
    F(GetStartVersion, int, (const OrtCustomOp *op))                                                                     \
    F(GetEndVersion, int, (const OrtCustomOp *op))                                                                       \
    F(GetMayInplace, size_t, (int **inputs, int **outputs))                                                              \
    F(ReleaseMayInplace, void, (int *inputs, int *outputs))                                                              \
    F(GetAliasMap, size_t, (int **inputs, int **outputs))                                                                \
    F(ReleaseAliasMap, void, (int *inputs, int *outputs))

struct OrtCustomOp {
    uint32_t version;
#define CONVPOOL_ORT_MEMBER(name, result, parameters) result(*name) parameters;
    CONVPOOL_ORT_CUSTOM_OP(CONVPOOL_ORT_MEMBER)
#undef CONVPOOL_ORT_MEMBER
};

// KernelContext_GetResource: what the CUDA provider's stream tells of its options.
inline constexpr int kCudaResourceVersion = 3, kUseTf32 = 10011;

}  // namespace convpool::onnxruntime

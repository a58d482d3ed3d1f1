// SPDX-License-Identifier: Apache-2.0
// The project's own declarations against onnxruntime_c_api.h, of version 18 or later: places, parameters and numbers.  It
// compiles or it does not.
#include "declared/c_api.h"

#include <onnxruntime_c_api.h>

#include <cstddef>
#include <type_traits>

namespace own = convpool::onnxruntime;

namespace {

// A type as the binary interface sees it: what a pointer points to does not matter, an enumeration is an int32_t.
template <typename T>
using Plain =
    std::conditional_t<std::is_pointer_v<T>, void *,
                       std::conditional_t<std::is_enum_v<T>, int32_t, std::conditional_t<std::is_same_v<T, int>, int32_t, T>>>;

template <typename> struct Signature;
template <typename R, typename... P> struct Signature<R (*)(P...)> {
    using type = Plain<R>(Plain<P>...);
};
template <typename R, typename... P> struct Signature<R (*)(P...) noexcept> : Signature<R (*)(P...)> {};
template <typename A, typename B>
constexpr bool kAlike = std::is_same_v<typename Signature<A>::type, typename Signature<B>::type>;

static_assert(sizeof(ONNXTensorElementDataType) == sizeof(int32_t) && sizeof(OrtMemType) == sizeof(int32_t));

#define SAME_FUNCTION(place, name, result, parameters)                                      \
    static_assert(offsetof(::OrtApi, name) == place * sizeof(void *), #name ": its place"); \
    static_assert(place < own::kFunctions, #name ": in a later table");                     \
    static_assert(kAlike<decltype(::OrtApi::name), result(*) parameters>, #name ": its parameters");
using own::OrtAllocator, own::OrtCustomOp, own::OrtCustomOpDomain, own::OrtKernelContext, own::OrtKernelInfo, own::OrtLogger,
    own::OrtMemoryInfo, own::OrtOpAttr, own::OrtSessionOptions, own::OrtShapeInferContext, own::OrtStatus,
    own::OrtTensorTypeAndShapeInfo, own::OrtTypeInfo, own::OrtValue;
CONVPOOL_ORT_FUNCTIONS(SAME_FUNCTION)

#define SAME_MEMBER(name, result, parameters)                                                                \
    static_assert(offsetof(::OrtCustomOp, name) == offsetof(own::OrtCustomOp, name), "OrtCustomOp::" #name); \
    static_assert(kAlike<decltype(::OrtCustomOp::name), decltype(own::OrtCustomOp::name)>, "OrtCustomOp::" #name);
CONVPOOL_ORT_CUSTOM_OP(SAME_MEMBER)

static_assert(offsetof(::OrtApiBase, GetApi) == offsetof(own::OrtApiBase, GetApi));
static_assert(offsetof(::OrtApiBase, GetVersionString) == offsetof(own::OrtApiBase, GetVersionString));
static_assert(ORT_API_VERSION >= own::kApiVersion);

static_assert(own::kFloatType == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT &&
              own::kFloat16Type == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16 &&
              own::kDoubleType == ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE &&
              own::kBFloat16Type == ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16);
static_assert(own::kFail == ORT_FAIL && own::kInvalidArgument == ORT_INVALID_ARGUMENT);
static_assert(own::kIntAttribute == ORT_OP_ATTR_INT && own::kIntsAttribute == ORT_OP_ATTR_INTS &&
              own::kFloatAttribute == ORT_OP_ATTR_FLOAT && own::kFloatsAttribute == ORT_OP_ATTR_FLOATS);
static_assert(own::kRequired == INPUT_OUTPUT_REQUIRED && own::kOptional == INPUT_OUTPUT_OPTIONAL &&
              own::kVariadic == INPUT_OUTPUT_VARIADIC);
static_assert(own::kDefaultMemory == OrtMemTypeDefault && own::kWarning == ORT_LOGGING_LEVEL_WARNING);

}  // namespace

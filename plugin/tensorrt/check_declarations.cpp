// SPDX-License-Identifier: Apache-2.0
// The project's own declarations against an SDK's headers: layouts and numbers at compile time, vtable slots when the
// program is run (which the build does).  Prints every difference and fails if there is one.
#include "declared/v2.h"
#include "declared/v3.h"

#include <NvInferRuntime.h>

#include <cstddef>
#include <cstdio>
#include <cstring>
#include <type_traits>

#if CONVPOOL_TENSORRT_SDK_MAJOR >= 10
namespace own = convpool::tensorrt::own_v3;
#else
namespace own = convpool::tensorrt::own_v2;
#endif
namespace sdk = nvinfer1;

// macro(type, name) of each of up to 20 names.
#define ONCE(...) __VA_ARGS__
#define MORE(...) ONCE(ONCE(ONCE(ONCE(__VA_ARGS__))))
#define EACH(macro, type, ...) MORE(MORE(MORE(MORE(NEXT(macro, type, __VA_ARGS__)))))
#define NEXT(macro, type, name, ...) \
    macro(type, name);               \
    __VA_OPT__(AGAIN EMPTY()()(macro, type, __VA_ARGS__))
#define EMPTY()
#define AGAIN() NEXT
#define SAME_SIZE(space, type) static_assert(sizeof(space::type) == sizeof(sdk::type), #type)
#define SAME_OFFSET(type, member) static_assert(offsetof(own::type, member) == offsetof(sdk::type, member), #type "::" #member)
#define SAME_NUMBER(type, name) \
    static_assert(static_cast<int>(own::type::name) == static_cast<int>(sdk::type::name), #type "::" #name)
#define SAME_SIZES(...) EACH(SAME_SIZE, own, __VA_ARGS__)
#define SAME_OFFSETS(type, ...) EACH(SAME_OFFSET, type, __VA_ARGS__)
#define SAME_NUMBERS(type, ...) EACH(SAME_NUMBER, type, __VA_ARGS__)

SAME_SIZES(Dims, PluginTensorDesc, DynamicPluginTensorDesc, PluginFieldCollection, DimsExprs, IDimensionExpr, IExprBuilder);
SAME_OFFSETS(Dims, nbDims, d);
SAME_OFFSETS(PluginTensorDesc, type, format, scale);
SAME_OFFSETS(DynamicPluginTensorDesc, min, max);
SAME_OFFSETS(PluginFieldCollection, fields);
SAME_OFFSETS(DimsExprs, d);
static_assert(sizeof(own::PluginField) == sizeof(sdk::PluginField), "PluginField");  // no standard layout in every SDK
SAME_NUMBERS(DataType, kFLOAT, kHALF, kINT8, kINT32);
SAME_NUMBERS(TensorFormat, kLINEAR, kCHW2, kHWC8, kCHW16, kCHW32, kDHWC8, kHWC);
SAME_NUMBERS(PluginFieldType, kFLOAT32, kINT32);
SAME_NUMBERS(DimensionOperation, kSUM, kPROD, kFLOOR_DIV);
#if CONVPOOL_TENSORRT_SDK_MAJOR >= 10
SAME_SIZES(InterfaceInfo);
SAME_OFFSETS(DynamicPluginTensorDesc, opt);
SAME_OFFSETS(InterfaceInfo, kind, major, minor);
SAME_NUMBERS(APILanguage, kCPP, kPYTHON);
SAME_NUMBERS(DataType, kBF16);
SAME_NUMBERS(PluginFieldType, kINT64);
SAME_NUMBERS(PluginCapabilityType, kCORE, kBUILD, kRUNTIME);
SAME_NUMBERS(TensorRTPhase, kBUILD, kRUNTIME);
#endif

namespace {

// The expressions are called, never overridden, so nothing else holds their types to the SDK's.
template <typename Own, typename Sdk> constexpr bool same_result(Own own_function, Sdk sdk_function) {
    (void)own_function, (void)sdk_function;
    return false;
}
template <typename R, typename OwnClass, typename SdkClass, typename... OwnArguments, typename... SdkArguments>
constexpr bool same_result(R (OwnClass::*)(OwnArguments...), R (SdkClass::*)(SdkArguments...)) {
    return sizeof...(OwnArguments) == sizeof...(SdkArguments);
}
template <typename R, typename OwnClass, typename SdkClass>
constexpr bool same_result(R (OwnClass::*)() const, R (SdkClass::*)() const) {
    return true;
}
// A pointer to an expression, which each namespace spells with its own type.
template <typename OwnClass, typename SdkClass, typename... OwnArguments, typename... SdkArguments>
constexpr bool same_result(own::IDimensionExpr const *(OwnClass::*)(OwnArguments...),
                           sdk::IDimensionExpr const *(SdkClass::*)(SdkArguments...)) {
    return sizeof...(OwnArguments) == sizeof...(SdkArguments);
}
#define SAME_RESULTS(type, ...) EACH(SAME_RESULT, type, __VA_ARGS__)
#define SAME_RESULT(type, method) \
    static_assert(same_result(&own::type::method, &sdk::apiv::type::method), "result of " #type "::" #method)
SAME_RESULTS(VDimensionExpr, isConstant, getConstantValue);
SAME_RESULTS(VExprBuilder, constant, operation);
// constant()'s parameter: as wide as what getConstantValue gives.
template <typename Class, typename R, typename A> A argument_of(R (Class::*)(A));
static_assert(std::is_same_v<decltype(argument_of(&own::VExprBuilder::constant)),
                             decltype(argument_of(&sdk::apiv::VExprBuilder::constant))>,
              "argument of VExprBuilder::constant");

int checks = 0, differences = 0;

// In the Itanium ABI a pointer to a virtual member function holds 1 + 8 * slot.
template <typename Function> long slot(Function function) {
    std::ptrdiff_t word = 0;
    std::memcpy(&word, &function, sizeof word);
    return word & 1 ? static_cast<long>(word / 8) : -1;
}

void compare(const char *name, long own_slot, long sdk_slot) {
    ++checks;
    if (own_slot == sdk_slot && own_slot >= 0) return;
    ++differences;
    std::printf("%s: slot; got %ld, expected the SDK's %ld\n", name, own_slot, sdk_slot);
}

#define SLOTS(type, ...) EACH(SLOT, type, __VA_ARGS__)
#define SLOT(type, method) compare(#type "::" #method, slot(&own::type::method), slot(&sdk::type::method))

// Overloaded names: found by their parameters, which each namespace spells with its own types.
template <typename R, typename C, typename... A> constexpr auto pick(R (C::*function)(A...) noexcept) { return function; }
template <typename R, typename C, typename... A> constexpr auto pick_const(R (C::*function)(A...) const noexcept) {
    return function;
}

#define OVERLOAD(pick, result, type, method, ...)                               \
    do {                                                                        \
        long a, b;                                                              \
        {                                                                       \
            using namespace own;                                                \
            a = slot(pick<result, own::type, __VA_ARGS__>(&own::type::method)); \
        }                                                                       \
        {                                                                       \
            using namespace sdk;                                                \
            b = slot(pick<result, sdk::type, __VA_ARGS__>(&sdk::type::method)); \
        }                                                                       \
        compare(#type "::" #method "(" #__VA_ARGS__ ")", a, b);                 \
    } while (false)

#if CONVPOOL_TENSORRT_SDK_MAJOR >= 10
// Compares what interfaces say of themselves.  The functions are no pure ones of their class, and read no member: they are called
// without an object of it.
template <typename Own, typename Sdk> void compare_info(const char *name) {
    alignas(Own) unsigned char own_memory[sizeof(Own)]{};
    alignas(Sdk) unsigned char sdk_memory[sizeof(Sdk)]{};
    const Own &own_object = *reinterpret_cast<const Own *>(own_memory);
    const Sdk &sdk_object = *reinterpret_cast<const Sdk *>(sdk_memory);
    const own::InterfaceInfo a = own_object.Own::getInterfaceInfo();
    const sdk::InterfaceInfo b = sdk_object.Sdk::getInterfaceInfo();
    ++checks;
    const bool same_language =
        static_cast<int>(own_object.Own::getAPILanguage()) == static_cast<int>(sdk_object.Sdk::getAPILanguage());
    if (std::strcmp(a.kind, b.kind) == 0 && a.major == b.major && a.minor == b.minor && same_language) return;
    ++differences;
    std::printf("%s: interface; got %s %d.%d, expected the SDK's %s %d.%d\n", name, a.kind, a.major, a.minor, b.kind, b.major,
                b.minor);
}

void check_infos() {
    compare_info<own::IPluginV3, sdk::IPluginV3>("IPluginV3");
    compare_info<own::IPluginV3OneCore, sdk::IPluginV3OneCore>("IPluginV3OneCore");
    compare_info<own::IPluginV3OneBuild, sdk::IPluginV3OneBuild>("IPluginV3OneBuild");
    compare_info<own::IPluginV3OneRuntime, sdk::IPluginV3OneRuntime>("IPluginV3OneRuntime");
    compare_info<own::IPluginCreatorV3One, sdk::IPluginCreatorV3One>("IPluginCreatorV3One");
}

void check_slots() {
    SLOTS(IPluginV3, getAPILanguage, getInterfaceInfo, getCapabilityInterface, clone);
    SLOTS(IPluginV3OneCore, getPluginName, getPluginVersion, getPluginNamespace);
    SLOTS(IPluginV3OneBuild, configurePlugin, getOutputDataTypes, getOutputShapes, supportsFormatCombination, getNbOutputs,
          getWorkspaceSize, getValidTactics, getNbTactics, getTimingCacheID, getFormatCombinationLimit, getMetadataString);
    SLOTS(IPluginV3OneRuntime, setTactic, onShapeChange, enqueue, attachToContext, getFieldsToSerialize);
    SLOTS(IPluginCreatorV3One, createPlugin, getFieldNames, getPluginName, getPluginVersion, getPluginNamespace);
}
#else
void check_infos() {}  // from 10 on

void check_slots() {
    SLOTS(IPluginV2, getTensorRTVersion, getPluginType, getPluginVersion, getNbOutputs, getOutputDimensions, supportsFormat,
          configureWithFormat, initialize, terminate, getWorkspaceSize, enqueue, getSerializationSize, serialize, destroy, clone,
          setPluginNamespace, getPluginNamespace);
    SLOTS(IPluginV2Ext, getOutputDataType, isOutputBroadcastAcrossBatch, canBroadcastInputAcrossBatch, configurePlugin,
          attachToContext, detachFromContext);
    OVERLOAD(pick, DimsExprs, IPluginV2DynamicExt, getOutputDimensions, int32_t, DimsExprs const *, int32_t, IExprBuilder &);
    SLOTS(IPluginV2DynamicExt, supportsFormatCombination);
    OVERLOAD(pick, void, IPluginV2DynamicExt, configurePlugin, DynamicPluginTensorDesc const *, int32_t,
             DynamicPluginTensorDesc const *, int32_t);
    OVERLOAD(pick_const, size_t, IPluginV2DynamicExt, getWorkspaceSize, PluginTensorDesc const *, int32_t,
             PluginTensorDesc const *, int32_t);
    OVERLOAD(pick, int32_t, IPluginV2DynamicExt, enqueue, PluginTensorDesc const *, PluginTensorDesc const *, void const *const *,
             void *const *, void *, CUstream_st *);
    SLOTS(IPluginCreator, getTensorRTVersion, getPluginName, getPluginVersion, getFieldNames, createPlugin, deserializePlugin,
          setPluginNamespace, getPluginNamespace);
}
#endif

void check_expressions_and_logger() {
    compare("VExprBuilder::constant", slot(&own::VExprBuilder::constant), slot(&sdk::apiv::VExprBuilder::constant));
    compare("VExprBuilder::operation", slot(&own::VExprBuilder::operation), slot(&sdk::apiv::VExprBuilder::operation));
    compare("VDimensionExpr::isConstant", slot(&own::VDimensionExpr::isConstant), slot(&sdk::apiv::VDimensionExpr::isConstant));
    compare("VDimensionExpr::getConstantValue", slot(&own::VDimensionExpr::getConstantValue),
            slot(&sdk::apiv::VDimensionExpr::getConstantValue));
    const long logger_slot = CONVPOOL_TENSORRT_SDK_MAJOR >= 11 ? 4 : 0;  // as logging.cpp has it
    compare("ILogger::log", logger_slot, slot(&sdk::ILogger::log));
    compare("ILoggerFinder::findLogger", logger_slot, slot(&sdk::ILoggerFinder::findLogger));
}

}  // namespace

int main() {
    check_slots();
    check_infos();
    check_expressions_and_logger();
    std::printf("TensorRT %d: %d declarations compared, %d differ\n", CONVPOOL_TENSORRT_SDK_MAJOR, checks, differences);
    return differences == 0 ? 0 : 1;
}

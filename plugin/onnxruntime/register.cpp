// SPDX-License-Identifier: Apache-2.0
// RegisterCustomOps: ai.convpool's operators for onnxruntime's CUDA and CPU providers, one for each element type.
//
// onnxruntime calls it when the library is registered with session options.  From then on it runs the operators' nodes by these
// kernels alone and not by the model's functions, so there has to be one for every provider that a session falls back to.
#include "kernel.h"

#include <deque>
#include <map>

namespace convpool::onnxruntime {
namespace {

constexpr char kDomain[] = "ai.convpool";

constexpr int32_t kTypes[] = {kFloat16Type, kBFloat16Type, kFloatType, kDoubleType};

// The struct that onnxruntime knows, and behind it what it does not.
struct CustomOp : OrtCustomOp {
    const nodes::Operator *definition;
    int32_t element_type;
    const OrtApi *api;
    int32_t bias_characteristic;  // of a bias that may be absent
};

const CustomOp &own(const OrtCustomOp *op) { return *static_cast<const CustomOp *>(op); }

// A name for a size that is unknown.  onnxruntime takes sizes of one name for equal, and ones without a name for known.
std::string unknown_size() {
    static std::atomic<uint64_t> count{0};
    return "convpool_size_" + std::to_string(count++);
}

// `op` may be of another element type than the node: onnxruntime asks one for all.
void infer(const CustomOp &op, const OrtShapeInferContext *context) {
    const OrtApi &api = *op.api;
    const Node node(api, *op.definition, context);
    size_t count = 0;
    check(api, api.ShapeInferContext_GetInputCount()(context, &count));
    std::vector<Sizes> inputs;
    OrtTensorTypeAndShapeInfo *x = nullptr, *made = nullptr;
    for (size_t i = count; i-- > 0;) {
        check(api, api.ShapeInferContext_GetInputTypeShape()(context, i, &x));  // the context's own
        inputs.insert(inputs.begin(), sizes_of(api, x));
    }
    const Sizes y = node.output_sizes(inputs);
    std::vector<const char *> x_names(inputs[nodes::kInputX].size()), y_names;
    check(api, api.GetSymbolicDimensions()(x, x_names.data(), x_names.size()));
    std::vector<std::string> names(y.size());
    for (size_t i = 0; i < y.size(); ++i)
        if (y[i] < 0) names[i] = i == Node::kBatch && *x_names[i] != '\0' ? x_names[i] : unknown_size();
    for (const std::string &name : names) y_names.push_back(name.c_str());

    check(api, api.CreateTensorTypeAndShapeInfo()(&made));
    const ShapeInfoOwner owner(api, made);
    int32_t type = 0;
    check(api, api.GetTensorElementType()(x, &type));
    check(api, api.SetTensorElementType()(made, type));
    check(api, api.SetDimensions()(made, y.data(), y.size()));
    check(api, api.SetSymbolicDimensions()(made, y_names.data(), y_names.size()));
    check(api, api.ShapeInferContext_SetOutputTypeShape()(context, 0, made));
}

// The answers that operators of both providers share.
CustomOp describe(const OrtApi &api, const nodes::Operator &definition, int32_t element_type, int32_t bias_characteristic) {
    CustomOp op{};
    op.definition = &definition;
    op.element_type = element_type;
    op.api = &api;
    op.bias_characteristic = bias_characteristic;
    op.version = kApiVersion;
    op.GetName = [](const OrtCustomOp *self) { return own(self).definition->name.c_str(); };
    op.GetInputType = [](const OrtCustomOp *self, size_t) { return own(self).element_type; };
    op.GetInputTypeCount = [](const OrtCustomOp *self) { return own(self).definition->inputs.size(); };
    op.GetOutputType = [](const OrtCustomOp *self, size_t) { return own(self).element_type; };
    op.GetOutputTypeCount = [](const OrtCustomOp *) -> size_t { return 1; };
    op.GetInputCharacteristic = [](const OrtCustomOp *self, size_t index) -> int32_t {
        return own(self).definition->plain() && index == nodes::kInputB ? own(self).bias_characteristic : kRequired;
    };
    op.GetOutputCharacteristic = [](const OrtCustomOp *, size_t) -> int32_t { return kRequired; };
    op.GetInputMemoryType = [](const OrtCustomOp *, size_t) -> int32_t { return kDefaultMemory; };
    op.GetVariadicInputMinArity = [](const OrtCustomOp *) { return 0; };
    op.GetVariadicOutputMinArity = [](const OrtCustomOp *) { return 1; };
    op.GetVariadicInputHomogeneity = op.GetVariadicOutputHomogeneity = [](const OrtCustomOp *) { return 1; };
    op.GetStartVersion = [](const OrtCustomOp *) { return 1; };
    op.GetEndVersion = [](const OrtCustomOp *) { return INT32_MAX; };
    op.GetMayInplace = op.GetAliasMap = [](int **, int **) -> size_t { return 0; };
    op.ReleaseMayInplace = op.ReleaseAliasMap = [](int *, int *) {};
    op.InferOutputShapeFn = [](const OrtCustomOp *self, OrtShapeInferContext *context) {
        return guarded(*own(self).api, [&] { infer(own(self), context); });
    };
    return op;
}

// The operator as a class of kernels runs it.
template <typename AnyKernel> CustomOp run_by(CustomOp op) {
    op.KernelDestroy = [](void *kernel) { delete static_cast<AnyKernel *>(kernel); };
    op.KernelComputeV2 = [](void *kernel, OrtKernelContext *context) {
        auto &own_kernel = *static_cast<AnyKernel *>(kernel);
        return guarded(own_kernel.api(), [&] { own_kernel.compute(context); });
    };
    op.CreateKernelV2 = [](const OrtCustomOp *self, const OrtApi *api, const OrtKernelInfo *info, void **kernel) {
        return guarded(*api,
                       [&] { *kernel = new AnyKernel(*own(self).api, *own(self).definition, own(self).element_type, info); });
    };
    op.GetExecutionProviderType = [](const OrtCustomOp *) { return AnyKernel::kProvider; };
    return op;
}

// Before 1.24 onnxruntime reads the type of an optional input that has an empty name, ConvAvgPool(X, W, ""), from a null pointer.
// Looks first whether a variadic input is there, and refuses the model.
int32_t bias_characteristic_of(const OrtApiBase &base) {
    int major = 0, minor = 0;
    std::sscanf(base.GetVersionString(), "%d.%d", &major, &minor);
    return major > 1 || minor >= 24 ? kOptional : kVariadic;
}

// The domain with its operators, which session options point to: one for each onnxruntime in the process, to its very end.
OrtCustomOpDomain *domain_of(const OrtApi &api, int32_t bias_characteristic) {
    static std::mutex mutex;
    static auto &domains = *new std::map<const OrtApi *, std::pair<OrtCustomOpDomain *, std::deque<CustomOp>>>;
    const std::lock_guard<std::mutex> lock(mutex);
    auto &[domain, ops] = domains[&api];
    if (domain != nullptr) return domain;
    ops.clear();  // of an attempt that failed
    OrtCustomOpDomain *made = nullptr;
    check(api, api.CreateCustomOpDomain()(kDomain, &made));
    for (const nodes::Operator &definition : nodes::operators())
        for (const int32_t type : kTypes) {
            const CustomOp op = describe(api, definition, type, bias_characteristic);
            if (dtype_of(type) >= 0) ops.push_back(run_by<Kernel>(op));
            ops.push_back(run_by<CpuKernel>(op));
        }
    for (const CustomOp &op : ops) check(api, api.CustomOpDomain_Add()(made, &op));
    return domain = made;
}

// onnxruntime refuses a session of options that have a domain twice, so the options bear a mark.  Its value names them, as a
// session's copy of them has the mark without the domain; its key the domain, as another copy of this library is to be refused.
void add_domain(const OrtApi &api, OrtSessionOptions *options, OrtCustomOpDomain *domain) {
    const auto number = [](const void *pointer) { return std::to_string(reinterpret_cast<uintptr_t>(pointer)); };
    const std::string key = "convpool.operators." + number(domain), value = number(options);
    char found[32];
    size_t size = sizeof found;
    if (succeeded(api, api.GetSessionConfigEntry()(options, key.c_str(), found, &size)) && value == found) return;
    check(api, api.AddCustomOpDomain()(options, domain));
    check(api, api.AddSessionConfigEntry()(options, key.c_str(), value.c_str()));
}

OrtStatus *too_old(const OrtApiBase &base) {
    const std::string message = std::string("convpool: onnxruntime's version; got ") + base.GetVersionString() + ", expected 1." +
                                std::to_string(kApiVersion) + " or later";
    for (uint32_t version = kApiVersion; --version > 0;)
        if (const OrtApi *api = base.GetApi(version)) return api->CreateStatus()(kFail, message.c_str());
    return nullptr;
}

}  // namespace
}  // namespace convpool::onnxruntime

extern "C" __attribute__((visibility("default"))) convpool::onnxruntime::OrtStatus *
RegisterCustomOps(convpool::onnxruntime::OrtSessionOptions *options, const convpool::onnxruntime::OrtApiBase *base) {
    using namespace convpool::onnxruntime;
    const OrtApi *const api = base->GetApi(kApiVersion);
    if (api == nullptr) return too_old(*base);
    return guarded(*api, [&] {
        if (convpool_abi_version() != CONVPOOL_ABI_VERSION)
            throw std::runtime_error("libconvpool_ort.so: ABI of libconvpool.so beside it; got " +
                                     std::to_string(convpool_abi_version()) + ", expected " +
                                     std::to_string(CONVPOOL_ABI_VERSION));
        add_domain(*api, options, domain_of(*api, bias_characteristic_of(*base)));
    });
}

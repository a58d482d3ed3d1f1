// SPDX-License-Identifier: Apache-2.0
// Hostile attributes, shapes, sizes and inputs to the operators of onnxruntime's library, on both providers, of which each node
// is refused with a message or gives all of its output.
//
//   convpool_fuzz_onnxruntime SEED ROUNDS
//
// The program plays onnxruntime, on a machine with little memory and the pretended CUDA runtime; the sanitizers look on.  A
// failure prints the seed of its round, which alone repeats it: convpool_fuzz_onnxruntime SEED 1.
#include "declared/c_api.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <new>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

extern "C" void pretended_set_device(int device, uint64_t context);
extern "C" int pretended_launches(void);
extern "C" void pretended_forget(void);

// The memory of the machine.
constexpr size_t kMostBytes = size_t{1} << 20;
__attribute__((noinline)) void *operator new(size_t bytes) {
    void *const memory = bytes > kMostBytes ? nullptr : std::malloc(bytes + (bytes == 0));
    return memory != nullptr ? memory : throw std::bad_alloc();
}
__attribute__((noinline)) void operator delete(void *memory) noexcept { std::free(memory); }
__attribute__((noinline)) void operator delete(void *memory, size_t) noexcept { std::free(memory); }

namespace convpool::onnxruntime {

using Sizes = std::vector<int64_t>;
struct OrtStatus {
    std::string message;
};
struct OrtTensorTypeAndShapeInfo {
    int32_t type = 0;
    Sizes sizes;
    std::vector<std::string> names;
};
using Info = OrtTensorTypeAndShapeInfo;
struct OrtTypeInfo {
    Info tensor;
};
struct OrtValue {
    Info info;
    std::vector<unsigned char> bytes;
};
struct OrtOpAttr {
    enum Kind { kInt, kInts, kFloat, kText, kFloats } kind;
    Sizes numbers;
    float real = 0;
    std::vector<float> reals{};
};
struct OrtMemoryInfo {};
struct OrtAllocator {};
struct OrtLogger {};
struct OrtCustomOpDomain {
    std::vector<const OrtCustomOp *> ops;
};
struct OrtSessionOptions {
    std::vector<OrtCustomOpDomain *> domains;
    std::map<std::string, std::string> entries;
};
// A node, as all of its callbacks see it.
struct Played {
    std::map<std::string, OrtOpAttr> attributes;
    std::vector<std::unique_ptr<Info>> declared;    // null: no type is known
    std::vector<std::unique_ptr<OrtValue>> inputs;  // null: the name is empty
    std::vector<bool> constant;
    Info inferred;
    OrtValue output;
    int use_tf32 = -1;  // -1: the provider does not tell
};
struct OrtKernelInfo {
    Played &of;
};
struct OrtKernelContext {
    Played &of;
};
struct OrtShapeInferContext {
    Played &of;
};

}  // namespace convpool::onnxruntime

extern "C" convpool::onnxruntime::OrtStatus *RegisterCustomOps(convpool::onnxruntime::OrtSessionOptions *,
                                                               const convpool::onnxruntime::OrtApiBase *);

namespace convpool::onnxruntime {
namespace played {

OrtMemoryInfo memory_info;
OrtAllocator allocator;
OrtLogger logger;
int owned = 0;  // objects that the library has to release

OrtStatus *fail(const char *message) { return ++owned, new OrtStatus{message}; }
OrtStatus *unless(bool right, const char *message) { return right ? nullptr : fail(message); }

// More than 2^62 are as many.
double elements(const Sizes &sizes) {
    double count = 1;
    for (int64_t size : sizes) count *= static_cast<double>(size);
    return count;
}
size_t bytes_of(int32_t type) { return type == kDoubleType ? 8 : type == kFloatType ? 4 : 2; }

// Of 1s.
void fill(OrtValue &value) {
    const size_t bytes = bytes_of(value.info.type), count = static_cast<size_t>(elements(value.info.sizes));
    static const std::map<int32_t, uint64_t> ones{
        {kFloatType, 0x3f800000}, {kFloat16Type, 0x3c00}, {kBFloat16Type, 0x3f80}, {kDoubleType, 0x3ff0000000000000}};
    value.bytes.resize(count * bytes);
    for (size_t i = 0; i < count; ++i) std::memcpy(&value.bytes[i * bytes], &ones.at(value.info.type), bytes);
}

const OrtOpAttr *find(const Played &node, const char *name) {
    const auto found = node.attributes.find(name);
    return found == node.attributes.end() ? nullptr : &found->second;
}
OrtStatus *number(const OrtKernelInfo *info, const char *name, OrtOpAttr::Kind kind, const OrtOpAttr *&found) {
    found = find(info->of, name);
    return unless(found != nullptr && found->kind == kind, "no such attribute");
}
template <class Value> OrtStatus *list(const std::vector<Value> &values, Value *out, size_t *count) {
    const size_t room = *count;
    *count = values.size();
    if (out == nullptr) return nullptr;
    if (room < values.size()) return fail("the buffer is too small");
    std::copy(values.begin(), values.end(), out);
    return nullptr;
}
OrtStatus *text(const std::string &value, char *out, size_t *size) {
    return list(std::vector<char>(value.c_str(), value.c_str() + value.size() + 1), out, size);
}

OrtStatus *CreateStatus(int32_t, const char *message) { return fail(message); }
const char *GetErrorMessage(const OrtStatus *status) { return status->message.c_str(); }
void ReleaseStatus(OrtStatus *status) { owned -= status != nullptr, delete status; }

OrtStatus *CreateCustomOpDomain(const char *, OrtCustomOpDomain **domain) { return *domain = new OrtCustomOpDomain, nullptr; }
OrtStatus *CustomOpDomain_Add(OrtCustomOpDomain *domain, const OrtCustomOp *op) { return domain->ops.push_back(op), nullptr; }
OrtStatus *AddCustomOpDomain(OrtSessionOptions *options, OrtCustomOpDomain *domain) {
    return options->domains.push_back(domain), nullptr;
}
OrtStatus *AddSessionConfigEntry(OrtSessionOptions *options, const char *key, const char *value) {
    return options->entries[key] = value, nullptr;
}
OrtStatus *GetSessionConfigEntry(const OrtSessionOptions *options, const char *key, char *value, size_t *size) {
    const auto found = options->entries.find(key);
    return found == options->entries.end() ? fail("no such entry") : text(found->second, value, size);
}

OrtStatus *CreateTensorTypeAndShapeInfo(Info **info) { return ++owned, *info = new Info, nullptr; }
void ReleaseTensorTypeAndShapeInfo(Info *info) { --owned, delete info; }
OrtStatus *SetTensorElementType(Info *info, int32_t type) { return info->type = type, nullptr; }
OrtStatus *SetDimensions(Info *info, const int64_t *sizes, size_t count) {
    return info->sizes.assign(sizes, sizes + count), nullptr;
}
OrtStatus *SetSymbolicDimensions(Info *info, const char **names, size_t count) {
    return info->names.assign(names, names + count), nullptr;
}
OrtStatus *GetTensorElementType(const Info *info, int32_t *type) { return *type = info->type, nullptr; }
OrtStatus *GetDimensionsCount(const Info *info, size_t *count) { return *count = info->sizes.size(), nullptr; }
OrtStatus *GetDimensions(const Info *info, int64_t *sizes, size_t count) {
    return std::copy_n(info->sizes.begin(), std::min(count, info->sizes.size()), sizes), nullptr;
}
OrtStatus *GetSymbolicDimensions(const Info *info, const char **names, size_t count) {
    for (size_t i = 0; i < std::min(count, info->sizes.size()); ++i)
        names[i] = i < info->names.size() ? info->names[i].c_str() : "";
    return nullptr;
}
OrtStatus *GetTensorTypeAndShape(const OrtValue *value, Info **info) { return ++owned, *info = new Info(value->info), nullptr; }
OrtStatus *GetTensorMutableData(OrtValue *value, void **data) { return *data = value->bytes.data(), nullptr; }
OrtStatus *GetTensorMemoryInfo(const OrtValue *, const OrtMemoryInfo **info) { return *info = &memory_info, nullptr; }
OrtStatus *MemoryInfoGetId(const OrtMemoryInfo *, int *id) { return *id = 0, nullptr; }
OrtStatus *CastTypeInfoToTensorInfo(const OrtTypeInfo *type, const Info **info) { return *info = &type->tensor, nullptr; }
void ReleaseTypeInfo(OrtTypeInfo *type) { --owned, delete type; }

OrtStatus *AllocatorAlloc(OrtAllocator *, size_t bytes, void **memory) {
    *memory = bytes > kMostBytes ? nullptr : std::malloc(bytes);
    return owned += *memory != nullptr, unless(*memory != nullptr, "out of memory");
}
OrtStatus *AllocatorFree(OrtAllocator *, void *memory) { return --owned, std::free(memory), nullptr; }
void ReleaseAllocator(OrtAllocator *) { --owned; }

OrtStatus *KernelInfoGetAttribute_float(const OrtKernelInfo *info, const char *name, float *value) {
    const OrtOpAttr *found;
    OrtStatus *const status = number(info, name, OrtOpAttr::kFloat, found);
    return status == nullptr ? (*value = found->real, nullptr) : status;
}
OrtStatus *KernelInfoGetAttribute_int64(const OrtKernelInfo *info, const char *name, int64_t *value) {
    const OrtOpAttr *found;
    OrtStatus *const status = number(info, name, OrtOpAttr::kInt, found);
    return status == nullptr ? (*value = found->numbers[0], nullptr) : status;
}
OrtStatus *KernelInfoGetAttribute_string(const OrtKernelInfo *info, const char *name, char *out, size_t *size) {
    const OrtOpAttr *found;
    OrtStatus *const status = number(info, name, OrtOpAttr::kText, found);
    return status == nullptr ? text("x", out, size) : status;
}
// Of an attribute that is no list it gives one without values.
OrtStatus *KernelInfoGetAttributeArray_int64(const OrtKernelInfo *info, const char *name, int64_t *values, size_t *count) {
    const OrtOpAttr *const found = find(info->of, name);
    if (found == nullptr) return fail("no such attribute");
    return list(found->kind == OrtOpAttr::kInts ? found->numbers : Sizes{}, values, count);
}
OrtStatus *KernelInfoGetAttributeArray_float(const OrtKernelInfo *info, const char *name, float *values, size_t *count) {
    const OrtOpAttr *const found = find(info->of, name);
    if (found == nullptr) return fail("no such attribute");
    return list(found->kind == OrtOpAttr::kFloats ? found->reals : std::vector<float>{}, values, count);
}
OrtStatus *KernelInfo_GetInputCount(const OrtKernelInfo *info, size_t *count) {
    return *count = info->of.declared.size(), nullptr;
}
OrtStatus *KernelInfo_GetInputTypeInfo(const OrtKernelInfo *info, size_t index, OrtTypeInfo **type) {
    if (info->of.declared.at(index) == nullptr) return fail("no type");
    return ++owned, *type = new OrtTypeInfo{*info->of.declared[index]}, nullptr;
}
OrtStatus *KernelInfo_GetNodeName(const OrtKernelInfo *, char *out, size_t *size) { return text("n", out, size); }
OrtStatus *KernelInfo_GetLogger(const OrtKernelInfo *, const OrtLogger **out) { return *out = &logger, nullptr; }
OrtStatus *Logger_LogMessage(const OrtLogger *, int32_t, const char *, const char *, int, const char *) { return nullptr; }
OrtStatus *KernelInfoGetConstantInput_tensor(const OrtKernelInfo *info, size_t index, int *constant, const OrtValue **value) {
    *constant = info->of.constant.at(index);
    *value = *constant != 0 ? info->of.inputs.at(index).get() : nullptr;
    return nullptr;
}
OrtStatus *KernelInfoGetAllocator(const OrtKernelInfo *, int32_t, OrtAllocator **out) {
    return ++owned, *out = &allocator, nullptr;
}

OrtStatus *KernelContext_GetInputCount(const OrtKernelContext *context, size_t *count) {
    return *count = context->of.inputs.size(), nullptr;
}
OrtStatus *KernelContext_GetInput(const OrtKernelContext *context, size_t index, const OrtValue **value) {
    return *value = context->of.inputs.at(index).get(), nullptr;
}
OrtStatus *KernelContext_GetOutput(OrtKernelContext *context, size_t, const int64_t *sizes, size_t count, OrtValue **value) {
    OrtValue &output = context->of.output;
    output.info.sizes.assign(sizes, sizes + count);
    const double bytes = elements(output.info.sizes) * static_cast<double>(bytes_of(output.info.type));
    if (!(bytes <= kMostBytes)) return fail("out of memory");
    output.bytes.assign(static_cast<size_t>(bytes), 0xff);
    return *value = &output, nullptr;
}
OrtStatus *KernelContext_GetGPUComputeStream(const OrtKernelContext *, void **stream) { return *stream = nullptr, nullptr; }
OrtStatus *KernelContext_GetAllocator(const OrtKernelContext *, const OrtMemoryInfo *, OrtAllocator **out) {
    return ++owned, *out = &allocator, nullptr;
}
OrtStatus *KernelContext_GetResource(const OrtKernelContext *context, int, int, void **resource) {
    *resource = context->of.use_tf32 == 1 ? reinterpret_cast<void *>(1) : nullptr;
    return unless(context->of.use_tf32 >= 0, "no such resource");
}
OrtStatus *KernelContext_ParallelFor(const OrtKernelContext *, void (*task)(void *, size_t), size_t tasks, size_t, void *user) {
    for (size_t i = 0; i < tasks; ++i) task(user, i);
    return nullptr;
}
OrtStatus *KernelContext_GetScratchBuffer(const OrtKernelContext *, const OrtMemoryInfo *, size_t bytes, void **memory) {
    return AllocatorAlloc(&allocator, bytes, memory);
}

OrtStatus *ShapeInferContext_GetInputCount(const OrtShapeInferContext *context, size_t *count) {
    return *count = context->of.declared.size(), nullptr;
}
OrtStatus *ShapeInferContext_GetInputTypeShape(const OrtShapeInferContext *context, size_t index, Info **info) {
    return *info = context->of.declared.at(index).get(), unless(*info != nullptr, "no type");
}
OrtStatus *ShapeInferContext_GetAttribute(const OrtShapeInferContext *context, const char *name, const OrtOpAttr **attribute) {
    return *attribute = find(context->of, name), unless(*attribute != nullptr, "no such attribute");
}
OrtStatus *ShapeInferContext_SetOutputTypeShape(const OrtShapeInferContext *context, size_t, const Info *info) {
    return context->of.inferred = *info, nullptr;
}
OrtStatus *ReadOpAttr(const OrtOpAttr *attribute, int32_t type, void *data, size_t bytes, size_t *needed) {
    const std::map<int32_t, OrtOpAttr::Kind> kinds{{kIntAttribute, OrtOpAttr::kInt},
                                                   {kIntsAttribute, OrtOpAttr::kInts},
                                                   {kFloatAttribute, OrtOpAttr::kFloat},
                                                   {kFloatsAttribute, OrtOpAttr::kFloats}};
    if (attribute->kind != kinds.at(type)) return fail("another type");
    const std::vector<float> reals = type == kFloatAttribute ? std::vector<float>{attribute->real} : attribute->reals;
    const bool real = type == kFloatAttribute || type == kFloatsAttribute;
    *needed = real ? reals.size() * sizeof(float) : attribute->numbers.size() * sizeof(int64_t);
    if (bytes < *needed) return fail("the buffer is too small");
    const void *const from = real ? static_cast<const void *>(reals.data()) : attribute->numbers.data();
    if (*needed > 0) std::memcpy(data, from, *needed);
    return nullptr;
}

const OrtApi *api(uint32_t) {
    static const OrtApi made = [] {
        OrtApi all{};
#define PLAYED(place, name, result, parameters) \
    all.table[place] = reinterpret_cast<void (*)()>(static_cast<result(*) parameters>(name));
        CONVPOOL_ORT_FUNCTIONS(PLAYED)
        return all;
    }();
    return &made;
}

}  // namespace played

namespace {

void expect(bool right, const std::string &what) {
    if (!right) throw std::runtime_error(what);
}

// Whether a callback passed; one that did not says why.
bool passed(OrtStatus *status, const char *callback) {
    if (status == nullptr) return true;
    const std::string message = status->message;
    played::ReleaseStatus(status);
    expect(!message.empty(), std::string(callback) + ": refused without a message");
    return false;
}

class Fuzzer {
public:
    explicit Fuzzer(unsigned seed) : random_(seed) {}
    // Whether the node ran.
    bool round(const std::vector<const OrtCustomOp *> &ops);

private:
    int below(int bound) { return static_cast<int>(random_() % static_cast<unsigned>(bound)); }
    bool one_in(int count) { return below(count) == 0; }
    int64_t number();
    void set(const char *name, Sizes values) { node_.attributes[name] = {OrtOpAttr::kInts, std::move(values)}; }
    void set(const std::string &name, int64_t value) { node_.attributes[name] = {OrtOpAttr::kInt, {value}}; }
    void windows();
    void say_name(const std::string &op);
    void sizes(const OrtCustomOp &op);
    void change_attributes();
    void change_sizes();
    void make_inputs();
    void infer(const OrtCustomOp &op);
    bool compute(const OrtCustomOp &op);

    std::mt19937_64 random_;
    Played node_;
    std::vector<Sizes> shapes_;
    int rank_ = 1;
    bool upsamples_ = false;
    bool wraps_ = false;  // AveragePool(X) has a multiple of 2^64 elements, which 64 bits take for 0
    int64_t group_ = 1;
    std::vector<std::string> alone_;  // attributes of one value
};

int64_t Fuzzer::number() {
    static const int64_t kNumbers[] = {0,         1,         -1,       2,         3,         15,       16,
                                       17,        255,       65534,    65535,     65536,     1 << 20,  1 << 30,
                                       INT32_MAX, INT32_MIN, 1L << 32, INT64_MAX, INT64_MIN, 1L << 40, 1L << 62};
    return one_in(8) ? static_cast<int64_t>(random_()) : kNumbers[below(sizeof kNumbers / sizeof *kNumbers)];
}

// Attributes of the pooling or upsampling and of the convolution; one value in twenty is anything up to the most that is legal.
void Fuzzer::windows() {
    const bool wild = one_in(3);
    const auto values = [&](int count, int least, int most) {
        Sizes all(count);
        for (int64_t &value : all) {
            value = least + below(most - least + 1);
            if (wild && one_in(5)) value = one_in(2) ? std::max<int64_t>(65535 - below(3), least) : least + below(3000);
        }
        return all;
    };
    if (upsamples_) {
        const Sizes copies = values(rank_, 1, 4);
        OrtOpAttr scales{OrtOpAttr::kFloats, {}, 0, {1, 1}};
        for (int64_t count : copies) scales.reals.push_back(static_cast<float>(count));
        set("upsample", copies);
        if (one_in(2)) node_.attributes["scales"] = scales;
    }
    for (const std::string of : {"pool_", ""}) {
        if (upsamples_ && of == "pool_") continue;
        if (wraps_) {
            const int64_t wide = 65535 * (of == "pool_"), step = of == "pool_" ? 1 : 65535;
            set((of + "kernel_shape").c_str(), {1, 1, 1}), set((of + "dilations").c_str(), {1, 1, 1});
            set((of + "strides").c_str(), Sizes(3, step)), set((of + "pads").c_str(), Sizes(6, wide));
            continue;
        }
        set((of + "kernel_shape").c_str(), values(rank_, 1, 3));
        set((of + "strides").c_str(), values(rank_, 1, 2));
        set((of + "dilations").c_str(), values(rank_, 1, 2));
        set((of + "pads").c_str(), values(2 * rank_, 0, 2));
    }
}

// The attributes of a variant say what its name says.
void Fuzzer::say_name(const std::string &op) {
    const std::string core = upsamples_ ? "UpsampleConv" : "ConvAvgPool";
    const size_t middle = op.find(core);
    const std::string before = op.substr(0, middle), behind = op.substr(middle + core.size());
    const auto ends = [](const std::string &all, const std::string &end) {
        return all.size() >= end.size() && all.compare(all.size() - end.size(), end.size(), end) == 0;
    };
    const auto activation = [&](const std::string &name) {
        return ends(name, "LeakyRelu") ? 2
               : ends(name, "Relu")    ? 1
               : ends(name, "Tanh")    ? 3
               : ends(name, "Sigmoid") ? 4
               : ends(name, "Silu")    ? 6
                                       : 0;
    };
    if (before.empty() && behind.empty()) return;
    const bool normalized = before.find("Normalized") == 0;
    set("prologue_affine", before.find("Affine") == 0 ? 1 : before.find("Modulated") == 0 ? 2 : normalized ? 3 : 0);
    if (normalized) set("norm_groups", int64_t{1}), node_.attributes["epsilon"] = {OrtOpAttr::kFloat, {}, 1e-5f};
    set("prologue_activation", activation(before));
    set("residual", static_cast<int64_t>(behind.find("Add") == 0));
    set("activation", activation(behind));
    node_.attributes["prologue_alpha"] = {OrtOpAttr::kFloat, {}, activation(before) == 2 ? 0.25f : 0.f};
    node_.attributes["alpha"] = {OrtOpAttr::kFloat, {}, activation(behind) == 2 ? 0.5f : 0.f};
}

// Of all inputs, right ones.
void Fuzzer::sizes(const OrtCustomOp &op) {
    const int layouts = one_in(2) ? 0 : below(4);
    group_ = !wraps_ && one_in(3) ? 1 + below(3) : 1;
    if (layouts > 0 || one_in(2)) set("channels_last", layouts);
    if (group_ > 1 || one_in(2)) set("group", group_);
    for (const char *name : {"allow_tf32", "constant_weights", "accumulation"})
        if (one_in(3)) set(name, below(2));
    const int64_t n = wraps_ ? 1 : one_in(12) ? 0 : 1 + below(2);
    const int64_t c = wraps_ ? 8192 : group_ * (one_in(12) ? 0 : 1 + below(5));
    const int64_t m = wraps_ ? 1 : group_ * (one_in(12) ? 0 : 1 + below(18));
    Sizes x, w = node_.attributes["kernel_shape"].numbers, y;
    for (int i = 0; i < rank_; ++i) {
        int64_t size = wraps_ ? 2 : one_in(16) ? below(4) : 5 + below(rank_ == 1 ? 60 : 5);
        x.push_back(size);
        if (upsamples_) size *= node_.attributes["upsample"].numbers[i];
        for (const std::string of : {"pool_", ""}) {
            if (upsamples_ && of == "pool_") continue;
            const auto at = [&](const char *name, int j) { return node_.attributes[of + name].numbers[j]; };
            const int64_t free = size + at("pads", i) + at("pads", i + rank_) - at("dilations", i) * (at("kernel_shape", i) - 1);
            if (free < 1) size = 0;  // refused
            else size = (free - 1) / at("strides", i) + 1;
        }
        y.push_back(size);
    }
    const auto tensor = [&](Sizes spatial, int64_t channels, bool last) {
        spatial.insert(spatial.begin(), n);
        return spatial.insert(last ? spatial.end() : spatial.begin() + 1, channels), spatial;
    };
    w.insert(w.begin(), m), w.push_back(c / group_);
    const auto scales = node_.attributes.find("prologue_affine");
    const bool by_image = scales != node_.attributes.end() && scales->second.numbers == Sizes{2};
    const Sizes scale = by_image ? tensor(Sizes(rank_, 1), c, false) : Sizes{c};
    shapes_ = {tensor(x, c, layouts == 1 || layouts == 3), w, {m}, scale, scale};
    const size_t count = op.GetInputTypeCount(&op);
    shapes_.resize(count > 4 ? 5 : 3);
    if (count % 2 == 0) shapes_.push_back(tensor(y, m, layouts == 1 || layouts == 2));
    if (count == 3 && one_in(2)) shapes_.pop_back();
}

void Fuzzer::change_attributes() {
    for (int change = one_in(2) ? 0 : 1 + below(3); change > 0; --change) {
        auto attribute = std::next(node_.attributes.begin(), below(static_cast<int>(node_.attributes.size())));
        OrtOpAttr &of = attribute->second;
        switch (below(5)) {
        case 0: of.kind = static_cast<OrtOpAttr::Kind>(below(5)), of.numbers.resize(1 + below(4), 1); break;
        case 1: of.numbers.resize(of.kind == OrtOpAttr::kInts ? below(80) : 1, 1); break;
        case 2:
            of.reals.resize(below(9), static_cast<float>(below(5)));
            of.real = static_cast<float>(number()) * (one_in(2) ? 1e38f : 1.f) / static_cast<float>(below(2));
            break;
        case 3:
            if (node_.attributes.size() > 1) node_.attributes.erase(attribute);
            break;
        default:
            if (!of.numbers.empty()) of.numbers[below(static_cast<int>(of.numbers.size()))] = number();
        }
    }
    if (one_in(16)) set("x_perm", {0, 1, 2, 3});
}

void Fuzzer::change_sizes() {
    for (int change = one_in(2) ? 0 : 1 + below(2); change > 0 && !shapes_.empty(); --change) {
        Sizes &of = shapes_[below(static_cast<int>(shapes_.size()))];
        switch (below(6)) {
        case 0: of.push_back(1 + below(3)); break;
        case 1: of.resize(below(static_cast<int>(of.size()) + 1)); break;
        case 2: shapes_.pop_back(); break;
        case 3: shapes_.push_back(of); break;
        default:
            if (!of.empty()) of[below(static_cast<int>(of.size()))] = std::max<int64_t>(number(), 0);
        }
    }
}

// Tensors that there may be: sizes beyond the memory have one of 0 among them.  What is declared is known, open or nothing.
void Fuzzer::make_inputs() {
    const int32_t type = node_.output.info.type;
    const int known = below(4);
    for (Sizes &sizes : shapes_) {
        if (played::elements(sizes) > (wraps_ ? 65536 : 4096)) sizes[below(static_cast<int>(sizes.size()))] = 0;
        auto declared = std::make_unique<Info>();
        declared->type = type, declared->sizes = sizes;
        for (int64_t &size : declared->sizes) {
            if (known == 1 && one_in(2)) size = -1;
            if (known == 3 && one_in(6)) size = number();
        }
        if (known == 2 && one_in(4)) declared->sizes.clear();
        if (one_in(2)) declared->names.assign(declared->sizes.size(), "N");
        node_.declared.push_back(one_in(40) ? nullptr : std::move(declared));
        node_.inputs.push_back(one_in(60) ? nullptr : std::make_unique<OrtValue>());
        node_.constant.push_back(one_in(2));
        if (node_.inputs.back() == nullptr) continue;
        node_.inputs.back()->info.type = type, node_.inputs.back()->info.sizes = sizes;
        played::fill(*node_.inputs.back());
    }
}

void Fuzzer::infer(const OrtCustomOp &op) {
    OrtShapeInferContext context{node_};
    if (!passed(op.InferOutputShapeFn(&op, &context), "InferOutputShapeFn")) return;
    const Info &y = node_.inferred;
    expect(y.sizes.size() == y.names.size() && y.sizes.size() >= 3, "InferOutputShapeFn: a shape without its names");
    for (size_t i = 0; i < y.sizes.size(); ++i)
        expect((y.sizes[i] >= 0) == y.names[i].empty(), "InferOutputShapeFn: a size that is neither known nor named");
}

bool Fuzzer::compute(const OrtCustomOp &op) {
    void *kernel = nullptr;
    const OrtKernelInfo info{node_};
    OrtKernelContext context{node_};
    if (!passed(op.CreateKernelV2(&op, played::api(0), &info, &kernel), "CreateKernelV2")) return false;
    const bool on_cpu = std::string(op.GetExecutionProviderType(&op)) == "CPUExecutionProvider";
    bool ran = false;
    for (int run = 0; run < 2; ++run) {
        ran = passed(op.KernelComputeV2(kernel, &context), "KernelComputeV2");
        const std::vector<unsigned char> &y = node_.output.bytes;
        const size_t bytes = played::bytes_of(node_.output.info.type);
        static const std::string poison(8, '\xff');
        for (size_t at = 0; ran && on_cpu && at < y.size(); at += bytes)
            expect(std::memcmp(&y[at], poison.data(), bytes) != 0, "KernelComputeV2: an element of Y that it does not write");
    }
    op.KernelDestroy(kernel);
    return ran;
}

bool Fuzzer::round(const std::vector<const OrtCustomOp *> &ops) {
    const OrtCustomOp &op = *ops[below(static_cast<int>(ops.size()))];
    node_.output.info.type = op.GetInputType(&op, 0);
    node_.use_tf32 = below(3) - 1;
    upsamples_ = std::string(op.GetName(&op)).find("UpsampleConv") != std::string::npos;
    wraps_ = !upsamples_ && one_in(256);
    rank_ = wraps_ ? 3 : 1 + below(3);
    windows();
    say_name(op.GetName(&op));
    sizes(op);
    change_attributes();
    change_sizes();
    make_inputs();
    infer(op);
    const bool ran = compute(op);
    expect(played::owned == 0, std::to_string(played::owned) + " objects of onnxruntime are left");
    return ran;
}

}  // namespace
}  // namespace convpool::onnxruntime

int main(int count, char **arguments) {
    using namespace convpool::onnxruntime;
    if (count != 3) return std::printf("usage: convpool_fuzz_onnxruntime SEED ROUNDS\n"), 2;
    const unsigned first = unsigned(std::strtoul(arguments[1], nullptr, 10)), rounds = unsigned(std::atoi(arguments[2]));
    pretended_set_device(0, 1);
    const OrtApiBase base{played::api, [] { return "1.24.0"; }};
    OrtSessionOptions options;
    for (int again = 0; again < 2; ++again)
        if (RegisterCustomOps(&options, &base) != nullptr) return std::printf("RegisterCustomOps: refused\n"), 1;
    if (options.domains.size() != 1) return std::printf("RegisterCustomOps: a domain twice\n"), 1;
    unsigned ran = 0;
    long launches = 0;
    for (unsigned seed = first; seed != first + rounds; ++seed) try {
            ran += Fuzzer(seed).round(options.domains[0]->ops);
            launches += pretended_launches();
            pretended_forget();
        } catch (const std::exception &error) {
            return std::printf("seed %u: %s\n", seed, error.what()), 1;
        }
    std::printf("%u rounds from seed %u, %u nodes ran, %ld kernel launches\n", rounds, first, ran, launches);
    return ran == 0 || launches == 0;
}

// IPluginV2DynamicExt: TensorRT 8.6 and 9.
#include "declared/v2.h"

#include "logging.h"
#include "plugin_core.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace convpool::tensorrt {
namespace {

struct Api {
    using DimsExprs = v2::DimsExprs;
    using Expr = v2::IDimensionExpr;
    using Builder = v2::IExprBuilder;
    static constexpr auto kSum = v2::DimensionOperation::kSUM;
    static constexpr auto kFloorDiv = v2::DimensionOperation::kFLOOR_DIV;
};

constexpr int32_t kFailure = -1;

v2::PluginFieldType field_type(const Attribute &attribute) {
    return attribute.real ? v2::PluginFieldType::kFLOAT32 : v2::PluginFieldType::kINT32;
}

// TensorRT's number of a plugin of this interface: the runtime's own version below, the interface above.
int32_t dynamic_version() noexcept { return (3 << 24) | (runtime_version_number() & 0xFFFFFF); }

Tensor tensor(const v2::PluginTensorDesc &desc, const v2::Dims &dims) {
    Tensor t{static_cast<int32_t>(desc.type), static_cast<int32_t>(desc.format), dims.nbDims, {}};
    std::copy(std::begin(dims.d), std::end(dims.d), t.d);
    return t;
}

// The sizes that `sizes` picks.
std::vector<Tensor> tensors(const v2::DynamicPluginTensorDesc *in, int32_t inputs, const v2::DynamicPluginTensorDesc *out,
                            const v2::Dims v2::DynamicPluginTensorDesc::*sizes) {
    std::vector<Tensor> all;
    for (int32_t i = 0; i < inputs; ++i) all.push_back(tensor(in[i].desc, in[i].*sizes));
    all.push_back(tensor(out[0].desc, out[0].*sizes));
    return all;
}

std::vector<Tensor> tensors(const v2::PluginTensorDesc *in, int32_t inputs, const v2::PluginTensorDesc *out, int32_t outputs) {
    std::vector<Tensor> all;
    all.reserve(static_cast<size_t>(inputs + outputs));  // in every run
    for (int32_t i = 0; i < inputs; ++i) all.push_back(tensor(in[i], in[i].dims));
    for (int32_t i = 0; i < outputs; ++i) all.push_back(tensor(out[i], out[i].dims));
    return all;
}

void expect_one_output(int32_t outputs) {
    if (outputs != 1) throw std::invalid_argument("outputs; got " + std::to_string(outputs) + ", expected 1");
}

// What enqueue must know of the build: TensorRT passes it a pointer to workspace, not its size.  It asked
// getWorkspaceSize at the largest shapes of a profile, after configurePlugin had named its smallest and largest ones;
// `bytes` is the least that this layer answers for the profiles it was configured for.  Belongs to the serialised form.
struct Grant {
    int32_t inputs = 0;
    Device device{};
    int64_t bytes = 0;
    convpool_problem largest{};
};

static_assert(sizeof(Grant) == 24 + sizeof(convpool_problem), "no padding: it is written as it stands");

// A problem without its sizes: what stays the same from profile to profile.
convpool_problem sizeless(convpool_problem problem) {
    problem.n = 0;
    std::fill(std::begin(problem.spatial), std::end(problem.spatial), 0);
    return problem;
}

bool same(const convpool_problem &a, const convpool_problem &b) { return std::memcmp(&a, &b, sizeof a) == 0; }

constexpr char kMagic[4] = {'C', 'P', 'A', '3'};

class Writer {
public:
    template <typename T> void put(const T &value) {
        const char *bytes = reinterpret_cast<const char *>(&value);
        bytes_.insert(bytes_.end(), bytes, bytes + sizeof value);
    }
    const std::vector<char> &bytes() const { return bytes_; }

private:
    std::vector<char> bytes_;
};

class Reader {
public:
    Reader(const void *data, size_t length) : data_(static_cast<const char *>(data)), left_(length) {}
    template <typename T> T get() {
        if (data_ == nullptr || left_ < sizeof(T))
            throw std::invalid_argument("serialised layer; got " + std::to_string(left_) + " bytes, expected " +
                                        std::to_string(sizeof(T)) + " or more; the engine is damaged");
        T value;
        std::memcpy(&value, data_, sizeof value);
        data_ += sizeof value;
        left_ -= sizeof value;
        return value;
    }
    void finish() const {
        if (left_ != 0)
            throw std::invalid_argument("serialised layer; got " + std::to_string(left_) +
                                        " bytes too many; the engine is from another version, build it anew");
    }

private:
    const char *data_;
    size_t left_;
};

std::vector<char> to_bytes(const PluginCore &core, const Grant &grant) {
    Writer writer;
    for (char letter : kMagic) writer.put(letter);
    for (const std::vector<int32_t> &values : core.values()) {
        writer.put(static_cast<int32_t>(values.size()));
        for (int32_t value : values) writer.put(value);
    }
    writer.put(grant);
    return writer.bytes();
}

// What an operator's creator is handed is of that operator, so its name is not written.
PluginCore core_from(const Operator &op, Reader &reader) {
    for (char letter : kMagic)
        if (reader.get<char>() != letter)
            throw std::invalid_argument("serialised layer: no such data; the engine is from another version, build it anew");
    std::vector<std::vector<int32_t>> values(op.attributes().size());
    std::vector<Field> fields;
    for (size_t a = 0; a < values.size(); ++a) {
        const int32_t count = reader.get<int32_t>();
        if (count < 0 || count > 2 * CONVPOOL_MAX_RANK)
            throw std::invalid_argument("serialised layer: values; got " + std::to_string(count) + ", expected 0 to 6");
        for (int32_t i = 0; i < count; ++i) values[a].push_back(reader.get<int32_t>());
        const Attribute &attribute = op.attributes()[a];
        fields.push_back({attribute.name, values[a].data(), static_cast<int32_t>(field_type(attribute)), count});
    }
    return PluginCore(op, fields.data(), static_cast<int32_t>(fields.size()));
}

// What a damaged engine could make enqueue or the C API read past its end: the number of inputs, the problem's size.
void check_grant(const PluginCore &core, const Grant &grant) {
    if (grant.inputs == 0) return;
    core.check_input_count(grant.inputs);
    if (grant.bytes < 0 || grant.largest.struct_size != sizeof(convpool_problem) || grant.largest.rank != core.rank())
        throw std::invalid_argument("serialised layer: no such problem; the engine is damaged");
}

class Plugin final : public v2::IPluginV2DynamicExt {
public:
    Plugin(PluginCore core, Grant grant, std::string name_space)
        : core_(std::move(core)), grant_(grant), namespace_(std::move(name_space)) {
        if (grant.inputs != 0) grants_.push_back(grant);
    }

    int32_t getTensorRTVersion() const noexcept override { return dynamic_version(); }
    const char *getPluginType() const noexcept override { return core_.op().name.c_str(); }
    const char *getPluginVersion() const noexcept override { return kVersion; }
    int32_t getNbOutputs() const noexcept override { return 1; }
    int32_t initialize() noexcept override { return 0; }
    void terminate() noexcept override {}
    void destroy() noexcept override { delete this; }
    Plugin *clone() const noexcept override {
        return guarded<Plugin *>("clone", nullptr, [&] {
            Plugin *copy = new Plugin(core_, grant_, namespace_);
            copy->answer_ = answer_;
            copy->grants_ = grants_;
            return copy;
        });
    }
    void setPluginNamespace(const char *name) noexcept override {
        guarded("setPluginNamespace", 0, [&] { return namespace_ = name == nullptr ? "" : name, 0; });
    }
    const char *getPluginNamespace() const noexcept override { return namespace_.c_str(); }

    size_t getSerializationSize() const noexcept override {
        return guarded<size_t>("getSerializationSize", 0, [&] { return to_bytes(core_, grant_).size(); });
    }
    void serialize(void *buffer) const noexcept override {
        guarded("serialize", 0, [&] {
            const std::vector<char> bytes = to_bytes(core_, grant_);
            std::memcpy(buffer, bytes.data(), bytes.size());
            return 0;
        });
    }

    v2::DataType getOutputDataType(int32_t index, const v2::DataType *inputs, int32_t count) const noexcept override {
        return guarded("getOutputDataType", v2::DataType::kFLOAT, [&] {
            if (index != 0) throw std::invalid_argument("output; got " + std::to_string(index) + ", expected 0");
            core_.check_input_count(count);
            for (int32_t i = 0; i < count; ++i) core_.check_type(i, static_cast<int32_t>(inputs[i]));
            return inputs[kX];
        });
    }

    v2::DimsExprs getOutputDimensions(int32_t index, const v2::DimsExprs *inputs, int32_t count,
                                      v2::IExprBuilder &builder) noexcept override {
        v2::DimsExprs failure{};
        failure.nbDims = -1;
        return guarded("getOutputDimensions", failure, [&] {
            if (index != 0) throw std::invalid_argument("output; got " + std::to_string(index) + ", expected 0");
            v2::DimsExprs output{};
            output_shape<Api>(core_, inputs, count, output, builder);
            return output;
        });
    }

    bool supportsFormatCombination(int32_t position, const v2::PluginTensorDesc *in_out, int32_t inputs,
                                   int32_t outputs) noexcept override {
        return guarded("supportsFormatCombination", false, [&] {
            expect_one_output(outputs);
            core_.check_input_count(inputs);
            std::vector<Tensor> all;
            for (int32_t i = 0; i <= std::min(position, inputs); ++i) all.push_back(tensor(in_out[i], in_out[i].dims));
            return core_.supports(position, all.data(), inputs);
        });
    }

    void configurePlugin(const v2::DynamicPluginTensorDesc *in, int32_t inputs, const v2::DynamicPluginTensorDesc *out,
                         int32_t outputs) noexcept override {
        guarded("configurePlugin", 0, [&] {
            expect_one_output(outputs);
            const convpool_problem least =
                core_.problem(tensors(in, inputs, out, &v2::DynamicPluginTensorDesc::min).data(), inputs);
            const convpool_problem largest =
                core_.problem(tensors(in, inputs, out, &v2::DynamicPluginTensorDesc::max).data(), inputs);
            if (convpool_output_shape(&largest, nullptr) != CONVPOOL_OK) throw std::invalid_argument(convpool_last_error());
            // An execution context says the shape at hand, as smallest and largest too: nothing about workspace.
            if (attached_) {
                make_ready(largest);
                return 0;
            }
            Grant grant;
            grant.inputs = inputs;
            grant.device = grant_.inputs == 0 ? current_device() : grant_.device;  // the builder's, once it has spoken
            size_t answer = workspace_bytes(largest, 0, grant.device);
            if (convpool_output_shape(&least, nullptr) == CONVPOOL_OK && least.n > 0)  // small ones may want more
                answer = std::max(answer, workspace_bytes(least, 0, grant.device));
            grant.bytes = static_cast<int64_t>(answer);
            grant.largest = largest;
            auto known = std::find_if(grants_.begin(), grants_.end(), [&](const Grant &earlier) {
                return earlier.inputs == inputs && same(sizeless(largest), sizeless(earlier.largest));
            });
            if (known == grants_.end()) known = grants_.insert(known, grant);
            known->bytes = std::min(known->bytes, grant.bytes);  // another profile, or again
            known->largest.n = std::max(known->largest.n, largest.n);
            for (int i = 0; i < largest.rank; ++i)
                known->largest.spatial[i] = std::max(known->largest.spatial[i], largest.spatial[i]);
            answer_ = answer;
            grant_ = *known;
            chosen_ = {};
            return 0;
        });
    }

    // Called on every execution context's own clone, before anything runs.
    void attachToContext(cudnnContext *, cublasContext *, v2::IGpuAllocator *) noexcept override {
        guarded("attachToContext", 0, [&] {
            attached_ = true;
            if (grant_.inputs != 0) make_ready(grant_.largest);
            return 0;
        });
    }
    void detachFromContext() noexcept override {
        attached_ = false;
        cache_.release();
    }

    size_t getWorkspaceSize(const v2::PluginTensorDesc *in, int32_t inputs, const v2::PluginTensorDesc *out,
                            int32_t outputs) const noexcept override {
        return guarded<size_t>("getWorkspaceSize", 0, [&] {
            expect_one_output(outputs);
            const Device device = grant_.inputs == 0 ? current_device() : grant_.device;
            const convpool_problem problem = core_.problem(tensors(in, inputs, out, outputs).data(), inputs);
            return std::max(answer_, workspace_bytes(problem, 0, device));
        });
    }

    int32_t enqueue(const v2::PluginTensorDesc *in, const v2::PluginTensorDesc *out, const void *const *inputs,
                    void *const *outputs, void *workspace, CUstream_st *stream) noexcept override {
        return guarded("enqueue", kFailure, [&] {
            if (grant_.inputs == 0) throw std::logic_error("called before configurePlugin");
            const std::vector<Tensor> all = tensors(in, grant_.inputs, out, 1);
            const convpool_problem problem = core_.problem(all.data(), grant_.inputs);
            core_.check_residual(all.data(), grant_.inputs);
            if (problem.n == 0) return 0;  // an empty batch
            if (!same(problem, chosen_.problem))
                chosen_ = {problem, default_tactic(problem, granted_bytes(problem), current_device()), granted_bytes(problem)};
            launch(problem, chosen_.tactic, inputs, outputs[0], workspace, chosen_.granted, cache_, stream);
            return 0;
        });
    }

private:
    // 0 where the shape lies outside every profile that was configured.
    size_t granted_bytes(const convpool_problem &problem) const {
        const convpool_problem &largest = grant_.largest;
        bool inside = problem.n <= largest.n && problem.c == largest.c && grant_.bytes > 0;
        for (int i = 0; i < problem.rank; ++i) inside = inside && problem.spatial[i] <= largest.spatial[i];
        return inside ? static_cast<size_t>(grant_.bytes) : 0;
    }

    // Memory for the weights of the tactic that this problem will run with, and its kernel, so that the first enqueue may
    // lie in a graph capture.
    void make_ready(const convpool_problem &problem) {
        if (problem.n < 1) return;
        const int32_t tactic = default_tactic(problem, granted_bytes(problem), current_device());
        if (core_.value(kConstantWeights) != 0) cache_.reserve(problem, tactic);
        if (convpool_prepare(&problem, tactic) != CONVPOOL_OK) throw std::runtime_error(convpool_last_error());
    }

    // The last problem's tactic: weighing all of them takes longer than a small layer runs.  Each execution context has
    // a clone of its own, so nothing else touches this during enqueue.
    struct Chosen {
        convpool_problem problem{};
        int32_t tactic = 0;
        size_t granted = 0;
    };

    PluginCore core_;
    Grant grant_;
    std::vector<Grant> grants_;  // one for each set of types and formats, which a builder may try in turn
    size_t answer_ = 0;          // to getWorkspaceSize, at least, since the last configurePlugin of a builder
    std::string namespace_;
    Chosen chosen_;
    bool attached_ = false;
    WeightCache cache_;
};

class Creator final : public v2::IPluginCreator {
public:
    explicit Creator(const Operator &op) : op_(op) {
        for (const Attribute &attribute : op.attributes()) fields_.push_back({attribute.name, nullptr, field_type(attribute), 1});
        collection_ = {static_cast<int32_t>(fields_.size()), fields_.data()};
    }
    Creator(const Creator &) = delete;  // the collection points to its own fields

    int32_t getTensorRTVersion() const noexcept override { return runtime_version_number(); }
    const char *getPluginName() const noexcept override { return op_.name.c_str(); }
    const char *getPluginVersion() const noexcept override { return kVersion; }
    const v2::PluginFieldCollection *getFieldNames() noexcept override { return &collection_; }

    v2::IPluginV2 *createPlugin(const char *, const v2::PluginFieldCollection *given) noexcept override {
        return guarded<v2::IPluginV2 *>("createPlugin", nullptr, [&] {
            if (given == nullptr || (given->nbFields > 0 && given->fields == nullptr))
                throw std::invalid_argument("fields; got null, expected a collection");
            std::vector<Field> fields;
            for (int32_t i = 0; i < given->nbFields; ++i) {
                const v2::PluginField &field = given->fields[i];
                fields.push_back({field.name, field.data, static_cast<int32_t>(field.type), field.length});
            }
            return new Plugin(PluginCore(op_, fields.data(), static_cast<int32_t>(fields.size())), Grant{}, namespace_);
        });
    }

    v2::IPluginV2 *deserializePlugin(const char *, const void *data, size_t length) noexcept override {
        return guarded<v2::IPluginV2 *>("deserializePlugin", nullptr, [&] {
            Reader reader(data, length);
            PluginCore core = core_from(op_, reader);
            const Grant grant = reader.get<Grant>();
            reader.finish();
            check_grant(core, grant);
            return new Plugin(std::move(core), grant, namespace_);
        });
    }

    void setPluginNamespace(const char *name) noexcept override {
        guarded("setPluginNamespace", 0, [&] { return namespace_ = name == nullptr ? "" : name, 0; });
    }
    const char *getPluginNamespace() const noexcept override { return namespace_.c_str(); }

private:
    const Operator &op_;
    std::string namespace_ = kNamespace;
    std::vector<v2::PluginField> fields_;
    v2::PluginFieldCollection collection_{};
};

}  // namespace
}  // namespace convpool::tensorrt

// Only for the versions whose Dims are those of declared/v2.h: another one would read and write past them.
extern "C" __attribute__((visibility("default"))) convpool::tensorrt::v2::IPluginCreator *const *
getPluginCreators(int32_t &count) {
    using namespace convpool::tensorrt;
    count = 0;
    return guarded<v2::IPluginCreator *const *>("getPluginCreators", nullptr, [&] {
        static auto &creators = *new std::vector<Creator>(operators().begin(), operators().end());  // to the very end
        static const auto &all = *[] {
            auto *pointers = new std::vector<v2::IPluginCreator *>;
            for (Creator &creator : creators) pointers->push_back(&creator);
            return pointers;
        }();
        const int32_t version = runtime_version();
        if (version < 80600 || version >= 100000)
            throw std::runtime_error("TensorRT version; got " + std::to_string(version) + ", expected 8.6 or 9; use getCreators");
        count = static_cast<int32_t>(all.size());
        return all.data();
    });
}

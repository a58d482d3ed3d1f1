// IPluginV3: TensorRT 10 and 11.
#include "declared/v3.h"

#include "logging.h"
#include "plugin_core.h"

#include <algorithm>
#include <memory>
#include <stdexcept>

namespace convpool::tensorrt {
namespace {

struct Api {
    using DimsExprs = v3::DimsExprs;
    using Expr = v3::IDimensionExpr;
    using Builder = v3::IExprBuilder;
    static constexpr auto kSum = v3::DimensionOperation::kSUM;
    static constexpr auto kFloorDiv = v3::DimensionOperation::kFLOOR_DIV;
};

constexpr int32_t kFailure = -1;

v3::PluginFieldType field_type(const Attribute &attribute) {
    return attribute.real ? v3::PluginFieldType::kFLOAT32 : v3::PluginFieldType::kINT32;
}

Tensor tensor(const v3::PluginTensorDesc &desc, const v3::Dims &dims) {
    Tensor t{static_cast<int32_t>(desc.type), static_cast<int32_t>(desc.format), dims.nbDims, {}};
    std::copy(std::begin(dims.d), std::end(dims.d), t.d);
    return t;
}

// Inputs, then outputs, with the sizes that `sizes` picks.
std::vector<Tensor> tensors(const v3::DynamicPluginTensorDesc *in, int32_t inputs, const v3::DynamicPluginTensorDesc *out,
                            int32_t outputs, const v3::Dims v3::DynamicPluginTensorDesc::*sizes) {
    std::vector<Tensor> all;
    for (int32_t i = 0; i < inputs; ++i) all.push_back(tensor(in[i].desc, in[i].*sizes));
    for (int32_t i = 0; i < outputs; ++i) all.push_back(tensor(out[i].desc, out[i].*sizes));
    return all;
}

std::vector<Tensor> tensors(const v3::PluginTensorDesc *in, int32_t inputs, const v3::PluginTensorDesc *out, int32_t outputs) {
    std::vector<Tensor> all;
    all.reserve(static_cast<size_t>(inputs + outputs));  // in every run
    for (int32_t i = 0; i < inputs; ++i) all.push_back(tensor(in[i], in[i].dims));
    for (int32_t i = 0; i < outputs; ++i) all.push_back(tensor(out[i], out[i].dims));
    return all;
}

void expect_one_output(int32_t outputs) {
    if (outputs != 1) throw std::invalid_argument("outputs; got " + std::to_string(outputs) + ", expected 1");
}

class Plugin final : public v3::IPluginV3,
                     public v3::IPluginV3OneCore,
                     public v3::IPluginV3OneBuild,
                     public v3::IPluginV3OneRuntime {
public:
    explicit Plugin(PluginCore core) : core_(std::move(core)) { point_fields(); }
    Plugin(const Plugin &other)
        : v3::IPluginV3(), v3::IPluginV3OneCore(), v3::IPluginV3OneBuild(), v3::IPluginV3OneRuntime(), core_(other.core_),
          problems_(other.problems_), inputs_(other.inputs_), tactic_(other.tactic_) {
        point_fields();
    }
    Plugin &operator=(const Plugin &) = delete;

    v3::IPluginCapability *getCapabilityInterface(v3::PluginCapabilityType type) noexcept override {
        switch (type) {
        case v3::PluginCapabilityType::kCORE: return static_cast<v3::IPluginV3OneCore *>(this);
        case v3::PluginCapabilityType::kBUILD: return static_cast<v3::IPluginV3OneBuild *>(this);
        case v3::PluginCapabilityType::kRUNTIME: return static_cast<v3::IPluginV3OneRuntime *>(this);
        }
        return nullptr;
    }
    Plugin *clone() noexcept override {
        return guarded<Plugin *>("clone", nullptr, [&] { return new Plugin(*this); });
    }

    const char *getPluginName() const noexcept override { return core_.op().name.c_str(); }
    const char *getPluginVersion() const noexcept override { return kVersion; }
    const char *getPluginNamespace() const noexcept override { return kNamespace; }

    int32_t getNbOutputs() const noexcept override { return 1; }

    int32_t getOutputDataTypes(v3::DataType *types, int32_t outputs, const v3::DataType *inputs,
                               int32_t input_count) const noexcept override {
        return guarded("getOutputDataTypes", kFailure, [&] {
            expect_one_output(outputs);
            core_.check_input_count(input_count);
            for (int32_t i = 0; i < input_count; ++i) core_.check_type(i, static_cast<int32_t>(inputs[i]));
            types[0] = inputs[kX];
            return 0;
        });
    }

    int32_t getOutputShapes(const v3::DimsExprs *inputs, int32_t input_count, const v3::DimsExprs *, int32_t,
                            v3::DimsExprs *outputs, int32_t output_count, v3::IExprBuilder &builder) noexcept override {
        return guarded("getOutputShapes", kFailure, [&] {
            expect_one_output(output_count);
            output_shape<Api>(core_, inputs, input_count, outputs[0], builder);
            return 0;
        });
    }

    bool supportsFormatCombination(int32_t position, const v3::DynamicPluginTensorDesc *in_out, int32_t inputs,
                                   int32_t outputs) noexcept override {
        return guarded("supportsFormatCombination", false, [&] {
            expect_one_output(outputs);
            core_.check_input_count(inputs);
            std::vector<Tensor> all;
            for (int32_t i = 0; i <= std::min(position, inputs); ++i) all.push_back(tensor(in_out[i].desc, in_out[i].desc.dims));
            return core_.supports(position, all.data(), inputs);
        });
    }

    int32_t configurePlugin(const v3::DynamicPluginTensorDesc *in, int32_t inputs, const v3::DynamicPluginTensorDesc *out,
                            int32_t outputs) noexcept override {
        return guarded("configurePlugin", kFailure, [&] {
            expect_one_output(outputs);
            inputs_ = inputs;
            problems_ = problems(in, inputs, out, outputs);
            for (const convpool_problem &problem : problems_)
                if (convpool_output_shape(&problem, nullptr) != CONVPOOL_OK) throw std::invalid_argument(convpool_last_error());
            return 0;
        });
    }

    // A tactic that TensorRT has set needs its own workspace; before, the largest of those that it may set.
    size_t getWorkspaceSize(const v3::DynamicPluginTensorDesc *in, int32_t inputs, const v3::DynamicPluginTensorDesc *out,
                            int32_t outputs) const noexcept override {
        return guarded<size_t>("getWorkspaceSize", 0, [&] {
            expect_one_output(outputs);
            const convpool_problem largest =
                core_.problem(tensors(in, inputs, out, outputs, &v3::DynamicPluginTensorDesc::max).data(), inputs);
            const Device device = current_device();
            if (tactic_ != 0) return workspace_bytes(largest, tactic_, device);
            size_t bytes = 0;
            for (int32_t id : core_.tactics(problems(in, inputs, out, outputs), device))
                bytes = std::max(bytes, workspace_bytes(largest, id, device));
            return bytes;
        });
    }

    int32_t getNbTactics() noexcept override {
        return guarded("getNbTactics", 0, [&] { return static_cast<int32_t>(tactics().size()); });
    }

    int32_t getValidTactics(int32_t *ids, int32_t count) noexcept override {
        return guarded("getValidTactics", kFailure, [&] {
            const std::vector<int32_t> valid = tactics();
            if (count != static_cast<int32_t>(valid.size()))
                throw std::invalid_argument("tactics; got room for " + std::to_string(count) + ", expected " +
                                            std::to_string(valid.size()));
            std::copy(valid.begin(), valid.end(), ids);
            return 0;
        });
    }

    const char *getTimingCacheID() noexcept override { return core_.identity().c_str(); }
    int32_t getFormatCombinationLimit() noexcept override { return 100; }
    const char *getMetadataString() noexcept override { return core_.identity().c_str(); }

    int32_t setTactic(int32_t tactic) noexcept override {
        tactic_ = tactic;
        return 0;
    }

    // Loads the kernel, so that the first enqueue may lie in a graph capture.
    int32_t onShapeChange(const v3::PluginTensorDesc *in, int32_t inputs, const v3::PluginTensorDesc *out,
                          int32_t outputs) noexcept override {
        return guarded("onShapeChange", kFailure, [&] {
            expect_one_output(outputs);
            inputs_ = inputs;
            const std::vector<Tensor> all = tensors(in, inputs, out, outputs);
            const convpool_problem problem = core_.problem(all.data(), inputs);
            core_.check_residual(all.data(), inputs);
            if (problem.n == 0) return 0;
            if (convpool_output_shape(&problem, nullptr) != CONVPOOL_OK) throw std::invalid_argument(convpool_last_error());
            if (tactic_ != 0) {
                const convpool_status status = convpool_prepare(&problem, tactic_);
                if (status != CONVPOOL_OK && status != CONVPOOL_UNSUPPORTED)  // the launch then falls back
                    throw std::runtime_error(convpool_last_error());
                if (attached_ && core_.value(kConstantWeights) != 0) cache_.reserve(problem, tactic_);
            }
            return 0;
        });
    }

    int32_t enqueue(const v3::PluginTensorDesc *in, const v3::PluginTensorDesc *out, const void *const *inputs,
                    void *const *outputs, void *workspace, CUstream_st *stream) noexcept override {
        return guarded("enqueue", kFailure, [&] {
            const std::vector<Tensor> all = tensors(in, inputs_, out, 1);
            const convpool_problem problem = core_.problem(all.data(), inputs_);
            core_.check_residual(all.data(), inputs_);
            if (problem.n == 0) return 0;  // an empty batch
            // TensorRT gives what getWorkspaceSize asked for at the largest shape, which this shape's need never passes;
            // without a tactic nothing is certain, and the default one does without.
            const size_t bytes = tactic_ == 0 ? 0 : workspace_bytes(problem, tactic_, current_device());
            launch(problem, tactic_, inputs, outputs[0], workspace, bytes, cache_, stream);
            return 0;
        });
    }

    // Only what belongs to an execution context keeps weights: a builder's runs may be on anything.
    v3::IPluginV3 *attachToContext(v3::IPluginResourceContext *) noexcept override {
        Plugin *attached = clone();
        if (attached != nullptr) attached->attached_ = true;
        return attached;
    }
    const v3::PluginFieldCollection *getFieldsToSerialize() noexcept override { return &collection_; }

private:
    std::vector<convpool_problem> problems(const v3::DynamicPluginTensorDesc *in, int32_t inputs,
                                           const v3::DynamicPluginTensorDesc *out, int32_t outputs) const {
        using Desc = v3::DynamicPluginTensorDesc;
        std::vector<convpool_problem> all;
        for (auto sizes : {&Desc::min, &Desc::opt, &Desc::max}) {
            all.push_back(core_.problem(tensors(in, inputs, out, outputs, sizes).data(), inputs));
            if (all.back().n == 0) all.pop_back();  // an empty batch launches nothing
        }
        return all;
    }

    std::vector<int32_t> tactics() const {
        if (problems_.empty()) throw std::logic_error("asked for tactics before configurePlugin");
        return core_.tactics(problems_, current_device());
    }

    void point_fields() {
        const std::vector<Attribute> &attributes = core_.op().attributes();
        for (size_t a = 0; a < attributes.size(); ++a)
            fields_.push_back({attributes[a].name, core_.values()[a].data(), field_type(attributes[a]),
                               static_cast<int32_t>(core_.values()[a].size())});
        collection_ = {static_cast<int32_t>(fields_.size()), fields_.data()};
    }

    PluginCore core_;
    std::vector<convpool_problem> problems_;  // smallest, typical, largest, of the last configurePlugin
    int32_t inputs_ = 0;                      // how many, of the last configurePlugin or onShapeChange
    int32_t tactic_ = 0;
    bool attached_ = false;
    WeightCache cache_;
    std::vector<v3::PluginField> fields_;
    v3::PluginFieldCollection collection_{};
};

class Creator final : public v3::IPluginCreatorV3One {
public:
    explicit Creator(const Operator &op) : op_(op) {
        for (const Attribute &attribute : op.attributes()) fields_.push_back({attribute.name, nullptr, field_type(attribute), 1});
        collection_ = {static_cast<int32_t>(fields_.size()), fields_.data()};
    }
    Creator(const Creator &) = delete;  // the collection points to its own fields

    v3::IPluginV3 *createPlugin(const char *, const v3::PluginFieldCollection *given, v3::TensorRTPhase) noexcept override {
        return guarded<v3::IPluginV3 *>("createPlugin", nullptr, [&] {
            if (given == nullptr || (given->nbFields > 0 && given->fields == nullptr))
                throw std::invalid_argument("fields; got null, expected a collection");
            std::vector<Field> fields;
            for (int32_t i = 0; i < given->nbFields; ++i) {
                const v3::PluginField &field = given->fields[i];
                fields.push_back({field.name, field.data, static_cast<int32_t>(field.type), field.length});
            }
            return new Plugin(PluginCore(op_, fields.data(), static_cast<int32_t>(fields.size())));
        });
    }
    const v3::PluginFieldCollection *getFieldNames() noexcept override { return &collection_; }
    const char *getPluginName() const noexcept override { return op_.name.c_str(); }
    const char *getPluginVersion() const noexcept override { return kVersion; }
    const char *getPluginNamespace() const noexcept override { return kNamespace; }

private:
    const Operator &op_;
    std::vector<v3::PluginField> fields_;
    v3::PluginFieldCollection collection_{};
};

}  // namespace
}  // namespace convpool::tensorrt

extern "C" __attribute__((visibility("default"))) convpool::tensorrt::v3::IPluginCreatorInterface *const *
getCreators(int32_t &count) {
    using namespace convpool::tensorrt;
    count = 0;
    return guarded<v3::IPluginCreatorInterface *const *>("getCreators", nullptr, [&] {
        static auto &creators = *new std::vector<Creator>(operators().begin(), operators().end());  // to the very end
        static const auto &all = *[] {
            auto *pointers = new std::vector<v3::IPluginCreatorInterface *>;
            for (Creator &creator : creators) pointers->push_back(&creator);
            return pointers;
        }();
        count = static_cast<int32_t>(all.size());
        return all.data();
    });
}

extern "C" __attribute__((visibility("default"))) void setLoggerFinder(void *finder) {
    convpool::tensorrt::set_logger_finder(finder);
}

// SPDX-License-Identifier: Apache-2.0
// IPluginV3: TensorRT 10 and 11.
#include "declared/v3.h"

#include "adapters.h"
#include "launcher.h"
#include "logging.h"

namespace convpool::tensorrt {
namespace {

CONVPOOL_TENSORRT_API(v3)

constexpr int32_t kFailure = -1;

class Plugin final : public v3::IPluginV3,
                     public v3::IPluginV3OneCore,
                     public v3::IPluginV3OneBuild,
                     public v3::IPluginV3OneRuntime {
public:
    Plugin(PluginCore core, std::string layer) : core_(std::move(core)), launcher_(std::move(layer)) { point_fields(); }
    // A copy has its own launcher: weights and runs stay with the context that made them.
    Plugin(const Plugin &other)
        : v3::IPluginV3(), v3::IPluginV3OneCore(), v3::IPluginV3OneBuild(), v3::IPluginV3OneRuntime(), core_(other.core_),
          problems_(other.problems_), in_count_(other.in_count_), tactic_(other.tactic_), launcher_(other.launcher_.layer()) {
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
            types[0] = inputs[kInputX];
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
            return supports_format(core_, position, in_out, inputs, outputs,
                                   [](const v3::DynamicPluginTensorDesc &desc) { return tensor_of(desc.desc, desc.desc.dims); });
        });
    }

    int32_t configurePlugin(const v3::DynamicPluginTensorDesc *in, int32_t inputs, const v3::DynamicPluginTensorDesc *out,
                            int32_t outputs) noexcept override {
        return guarded("configurePlugin", kFailure, [&] {
            std::vector<convpool_problem> described = profile_problems(in, inputs, out, outputs);
            for (const convpool_problem &problem : described)
                if (convpool_output_shape(&problem, nullptr) != CONVPOOL_OK) throw std::invalid_argument(convpool_last_error());
            problems_ = std::move(described);
            in_count_ = inputs;
            return 0;
        });
    }

    // A tactic that TensorRT has set needs its own workspace; before, the largest of those that it may set.
    size_t getWorkspaceSize(const v3::DynamicPluginTensorDesc *in, int32_t inputs, const v3::DynamicPluginTensorDesc *out,
                            int32_t outputs) const noexcept override {
        return guarded<size_t>("getWorkspaceSize", 0, [&] {
            const convpool_problem largest =
                core_.problem(tensors_of(core_, in, inputs, out, outputs, &v3::DynamicPluginTensorDesc::max));
            const DeviceSize device = device_size();
            if (tactic_ != 0) return workspace_bytes(largest, tactic_, device);
            size_t bytes = 0;
            for (int32_t id : tactics_for(profile_problems(in, inputs, out, outputs), device))
                bytes = std::max(bytes, workspace_bytes(largest, id, device));
            return bytes;
        });
    }

    int32_t getNbTactics() noexcept override {
        return guarded("getNbTactics", 0, [&] { return static_cast<int32_t>(valid_tactics().size()); });
    }

    int32_t getValidTactics(int32_t *ids, int32_t count) noexcept override {
        return guarded("getValidTactics", kFailure, [&] {
            const std::vector<int32_t> valid = valid_tactics();
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
        return guarded("setTactic", kFailure, [&] {
            if (tactic != 0 && !has_tactic(tactic))
                refuse("tactic", std::to_string(tactic),
                       "0 or one of this library; the engine or timing cache is from another version, build it anew");
            if (tactic != tactic_) launcher_.forget();
            tactic_ = tactic;
            return 0;
        });
    }

    int32_t onShapeChange(const v3::PluginTensorDesc *in, int32_t inputs, const v3::PluginTensorDesc *out,
                          int32_t outputs) noexcept override {
        return guarded("onShapeChange", kFailure, [&] {
            const Tensors tensors = tensors_of(core_, in, inputs, out, outputs);
            in_count_ = inputs;
            if (launcher_.find(tensors) == nullptr) new_run(tensors);
            return 0;
        });
    }

    int32_t enqueue(const v3::PluginTensorDesc *in, const v3::PluginTensorDesc *out, const void *const *inputs,
                    void *const *outputs, void *workspace, CUstream_st *stream) noexcept override {
        return guarded("enqueue", kFailure, [&] {
            const Tensors tensors = tensors_of(core_, in, in_count_, out, 1);
            Run *run = launcher_.find(tensors);  // none of an old tactic, or where more shapes than it keeps take turns
            launcher_.launch(run != nullptr ? *run : new_run(tensors), inputs, outputs[0], workspace, stream);
            return 0;
        });
    }

    v3::IPluginV3 *attachToContext(v3::IPluginResourceContext *) noexcept override { return clone(); }
    const v3::PluginFieldCollection *getFieldsToSerialize() noexcept override { return &collection_; }

private:
    // TensorRT gives what getWorkspaceSize asked for at the largest shape, which no smaller shape's need passes.  With tactic 0
    // nothing is counted on: 0 bytes, or what normalizes X, which every tactic needs.  The builder's runs keep weights as an
    // execution context's do, so that what it times is what will run; its outputs do not count.
    Run &new_run(const Tensors &tensors) {
        const convpool_problem problem = core_.problem(tensors);
        core_.check_run(tensors, problem);
        Request request{tactic_, core_.op().normalizes() && problem.n > 0 ? least_workspace_bytes(problem) : 0};
        if (tactic_ != 0 && problem.n > 0 && can_run(problem, tactic_, device_size()))  // else another runs in its place
            request.workspace_bytes = workspace_bytes(problem, tactic_, device_size());
        return launcher_.plan_run(tensors, problem, request, core_.constant_weights());
    }

    std::vector<convpool_problem> profile_problems(const v3::DynamicPluginTensorDesc *in, int32_t inputs,
                                                   const v3::DynamicPluginTensorDesc *out, int32_t outputs) const {
        using Desc = v3::DynamicPluginTensorDesc;
        std::vector<convpool_problem> all;
        for (auto sizes : {&Desc::min, &Desc::opt, &Desc::max}) {
            all.push_back(core_.problem(tensors_of(core_, in, inputs, out, outputs, sizes)));
            if (all.back().n == 0) all.pop_back();  // an empty batch launches nothing
        }
        return all;
    }

    std::vector<int32_t> valid_tactics() const {
        if (problems_.empty()) throw std::logic_error("asked for tactics before configurePlugin");
        return tactics_for(problems_, device_size());
    }

    void point_fields() {
        const std::vector<Attribute> &attributes = core_.op().attributes();
        for (size_t a = 0; a < attributes.size(); ++a)
            fields_.push_back({attributes[a].name, core_.values()[a].data(), field_type<Api>(attributes[a]),
                               static_cast<int32_t>(core_.values()[a].size())});
        fields_.push_back({kFormatField, &kFieldFormat, v3::PluginFieldType::kINT32, 1});
        collection_ = {static_cast<int32_t>(fields_.size()), fields_.data()};
    }

    PluginCore core_;
    std::vector<convpool_problem> problems_;  // smallest, typical, largest, of the last configurePlugin
    int32_t in_count_ = 0;                    // of inputs, at the last configurePlugin or onShapeChange
    int32_t tactic_ = 0;
    Launcher launcher_;
    std::vector<v3::PluginField> fields_;
    v3::PluginFieldCollection collection_{};
};

class Creator final : public v3::IPluginCreatorV3One {
public:
    explicit Creator(const Operator &op) : op_(op), names_(op) {}

    v3::IPluginV3 *createPlugin(const char *layer, const v3::PluginFieldCollection *fields, v3::TensorRTPhase) noexcept override {
        return guarded<v3::IPluginV3 *>("createPlugin", nullptr,
                                        [&] { return new Plugin(core_of<Api>(op_, fields), layer == nullptr ? "" : layer); });
    }
    const v3::PluginFieldCollection *getFieldNames() noexcept override { return names_.collection(); }
    const char *getPluginName() const noexcept override { return op_.name.c_str(); }
    const char *getPluginVersion() const noexcept override { return kVersion; }
    const char *getPluginNamespace() const noexcept override { return kNamespace; }

private:
    const Operator &op_;
    FieldNames<Api> names_;
};

}  // namespace
}  // namespace convpool::tensorrt

extern "C" __attribute__((visibility("default"))) convpool::tensorrt::v3::IPluginCreatorInterface *const *
getCreators(int32_t &count) {
    using namespace convpool::tensorrt;
    count = 0;
    return guarded<v3::IPluginCreatorInterface *const *>("getCreators", nullptr, [&] {
        const auto &all = all_creators<Creator, v3::IPluginCreatorInterface>();
        count = static_cast<int32_t>(all.size());
        return all.data();
    });
}

extern "C" __attribute__((visibility("default"))) void setLoggerFinder(void *finder) {
    convpool::tensorrt::set_logger_finder(finder);
}

// SPDX-License-Identifier: Apache-2.0
// IPluginV2DynamicExt: TensorRT 8.6 and 9.
#include "declared/v2.h"

#include "adapters.h"
#include "logging.h"
#include "serialize.h"

#include <atomic>
#include <mutex>
#include <set>

namespace convpool::tensorrt {
namespace {

CONVPOOL_TENSORRT_API(v2)

constexpr int32_t kFailure = -1;

// TensorRT's number of a plugin of this interface: the runtime's own version below, the interface above.
int32_t dynamic_version() noexcept { return (3 << 24) | (runtime_version_number() & 0xFFFFFF); }

// A problem without its sizes: what stays the same from profile to profile.
convpool_problem sizeless(convpool_problem problem) {
    problem.n = 0;
    std::fill(std::begin(problem.spatial), std::end(problem.spatial), 0);
    return problem;
}

bool same(const convpool_problem &a, const convpool_problem &b) { return std::memcmp(&a, &b, sizeof a) == 0; }

// The smallest that holds both.
convpool_problem covering(convpool_problem a, const convpool_problem &b) {
    a.n = std::max(a.n, b.n);
    for (int i = 0; i < a.rank; ++i) a.spatial[i] = std::max(a.spatial[i], b.spatial[i]);
    return a;
}

// A plugin's or creator's namespace: set by one thread while others read it.  The text that was read stays.
class Namespace {
public:
    explicit Namespace(const char *text) : text_(interned(text)) {}
    Namespace(const Namespace &other) : text_(other.get()) {}
    void set(const char *text) { text_.store(interned(text)); }
    const char *get() const { return text_.load(); }

private:
    static const char *interned(const char *text) {
        static std::mutex &mutex = *new std::mutex;
        static std::set<std::string> &all = *new std::set<std::string>;
        const std::lock_guard<std::mutex> lock(mutex);
        return all.insert(text == nullptr ? "" : text).first->c_str();
    }
    std::atomic<const char *> text_;
};

// A builder calls configurePlugin for each profile, getWorkspaceSize, then serialize. An execution context calls attachToContext, then for
// each new shape configurePlugin, and enqueue. `answer_` is what the builder was told last; `grant_.bytes`, the least that it was told
// of all, is stored, and enqueue counts on it.
class Plugin final : public v2::IPluginV2DynamicExt {
public:
    Plugin(PluginCore core, const Grant &grant, const Namespace &name_space, std::string layer)
        : core_(std::move(core)), grant_(grant), namespace_(name_space), launcher_(std::move(layer)) {
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
            Plugin *copy = new Plugin(core_, grant_, namespace_, launcher_.layer());
            copy->answer_ = answer_;
            copy->grants_ = grants_;
            return copy;
        });
    }
    void setPluginNamespace(const char *name) noexcept override {
        guarded("setPluginNamespace", 0, [&] { return namespace_.set(name), 0; });
    }
    const char *getPluginNamespace() const noexcept override { return namespace_.get(); }

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
            return inputs[kInputX];
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
            return supports_format(core_, position, in_out, inputs, outputs,
                                   [](const v2::PluginTensorDesc &desc) { return tensor_of(desc, desc.dims); });
        });
    }

    void configurePlugin(const v2::DynamicPluginTensorDesc *in, int32_t inputs, const v2::DynamicPluginTensorDesc *out,
                         int32_t outputs) noexcept override {
        guarded("configurePlugin", 0, [&] {
            const Tensors largest = tensors_of(core_, in, inputs, out, outputs, &v2::DynamicPluginTensorDesc::max);
            if (attached_) {  // the shape at hand, as smallest and largest too: nothing about workspace
                if (launcher_.find(largest) == nullptr) new_run(largest);
                return 0;
            }
            const convpool_problem problem = core_.problem(largest);
            if (convpool_output_shape(&problem, nullptr) != CONVPOOL_OK) throw std::invalid_argument(convpool_last_error());
            widen(core_.problem(tensors_of(core_, in, inputs, out, outputs, &v2::DynamicPluginTensorDesc::min)), problem, inputs);
            return 0;
        });
    }

    // Called on every execution context's own clone, before anything runs.
    void attachToContext(cudnnContext *, cublasContext *, v2::IGpuAllocator *) noexcept override {
        guarded("attachToContext", 0, [&] {
            attached_ = true;
            const convpool_problem &largest = grant_.largest;
            if (grant_.inputs == 0 || largest.n < 1) return 0;
            launcher_.load(largest, {0, granted_bytes(largest)}, core_.constant_weights());
            return 0;
        });
    }
    void detachFromContext() noexcept override {
        attached_ = false;
        launcher_.cache().release();
    }

    size_t getWorkspaceSize(const v2::PluginTensorDesc *in, int32_t inputs, const v2::PluginTensorDesc *out,
                            int32_t outputs) const noexcept override {
        return guarded<size_t>("getWorkspaceSize", 0, [&] {
            const convpool_problem problem = core_.problem(tensors_of(core_, in, inputs, out, outputs));
            const DeviceSize device = grant_.inputs == 0 ? device_size() : grant_.device;
            // Never less than what enqueue counts on, whoever asks: the builder, or a loaded engine.
            return std::max({answer_, static_cast<size_t>(grant_.bytes), workspace_bytes(problem, 0, device)});
        });
    }

    int32_t enqueue(const v2::PluginTensorDesc *in, const v2::PluginTensorDesc *out, const void *const *inputs,
                    void *const *outputs, void *workspace, CUstream_st *stream) noexcept override {
        return guarded("enqueue", kFailure, [&] {
            if (grant_.inputs == 0) throw std::logic_error("called before configurePlugin");
            const Tensors tensors = tensors_of(core_, in, grant_.inputs, out, 1);
            Run *run = launcher_.find(tensors);
            launcher_.launch(run != nullptr ? *run : new_run(tensors), inputs, outputs[0], workspace, stream);
            return 0;
        });
    }

private:
    // 0 where the shape lies outside every profile that was configured. Each of them was told of what normalizes its shapes.
    size_t granted_bytes(const convpool_problem &problem) const {
        const convpool_problem &largest = grant_.largest;
        bool inside = problem.n > 0 && problem.n <= largest.n && problem.c == largest.c && grant_.bytes > 0;
        for (int i = 0; i < problem.rank; ++i) inside = inside && problem.spatial[i] <= largest.spatial[i];
        return inside ? std::max(static_cast<size_t>(grant_.bytes), least_workspace_bytes(problem)) : 0;
    }

    // Takes a profile of a builder into account.
    void widen(const convpool_problem &least, const convpool_problem &largest, int32_t inputs) {
        Grant grant;
        grant.inputs = inputs;
        grant.device = grant_.inputs == 0 ? device_size() : grant_.device;  // the builder's, once it has spoken
        size_t answer = workspace_bytes(largest, 0, grant.device);
        if (convpool_output_shape(&least, nullptr) == CONVPOOL_OK && least.n > 0)  // small ones may want more
            answer = std::max(answer, workspace_bytes(least, 0, grant.device));
        grant.bytes = static_cast<int64_t>(answer);
        grant.largest = largest;
        auto known = std::find_if(grants_.begin(), grants_.end(), [&](const Grant &earlier) {
            return earlier.inputs == inputs && same(sizeless(largest), sizeless(earlier.largest));
        });
        if (known == grants_.end()) known = grants_.insert(known, grant);
        const convpool_problem wider = covering(known->largest, largest);  // another profile, or again
        if (convpool_output_shape(&wider, nullptr) == CONVPOOL_OK) known->largest = wider;
        // No tactic uses more at the largest shape: from_bytes counts on it.
        const auto most = static_cast<int64_t>(most_workspace_bytes(known->largest, grant.device));
        known->bytes = std::min({known->bytes, grant.bytes, most});
        answer_ = answer;
        grant_ = *known;
        launcher_.forget();
    }

    Run &new_run(const Tensors &tensors) {
        const convpool_problem problem = core_.problem(tensors);
        core_.check_run(tensors, problem);
        return launcher_.plan_run(tensors, problem, {0, granted_bytes(problem)}, core_.constant_weights());
    }

    PluginCore core_;
    Grant grant_;
    std::vector<Grant> grants_;  // one for each set of types and formats, which a builder may try in turn
    size_t answer_ = 0;          // to getWorkspaceSize, at least, since the last configurePlugin of a builder
    Namespace namespace_;
    Launcher launcher_;
    bool attached_ = false;
};

class Creator final : public v2::IPluginCreator {
public:
    explicit Creator(const Operator &op) : op_(op), names_(op) {}

    int32_t getTensorRTVersion() const noexcept override { return runtime_version_number(); }
    const char *getPluginName() const noexcept override { return op_.name.c_str(); }
    const char *getPluginVersion() const noexcept override { return kVersion; }
    const v2::PluginFieldCollection *getFieldNames() noexcept override { return names_.collection(); }

    v2::IPluginV2 *createPlugin(const char *layer, const v2::PluginFieldCollection *fields) noexcept override {
        return guarded<v2::IPluginV2 *>("createPlugin", nullptr, [&] {
            return new Plugin(core_of<Api>(op_, fields), Grant{}, namespace_, layer == nullptr ? "" : layer);
        });
    }

    v2::IPluginV2 *deserializePlugin(const char *layer, const void *data, size_t length) noexcept override {
        return guarded<v2::IPluginV2 *>("deserializePlugin", nullptr, [&] {
            auto [core, grant] = from_bytes(op_, data, length);
            return new Plugin(std::move(core), grant, namespace_, layer == nullptr ? "" : layer);
        });
    }

    void setPluginNamespace(const char *name) noexcept override {
        guarded("setPluginNamespace", 0, [&] { return namespace_.set(name), 0; });
    }
    const char *getPluginNamespace() const noexcept override { return namespace_.get(); }

private:
    const Operator &op_;
    FieldNames<Api> names_;
    Namespace namespace_{kNamespace};
};

}  // namespace
}  // namespace convpool::tensorrt

// Only for the versions whose Dims are those of declared/v2.h: another one would read and write past them.
extern "C" __attribute__((visibility("default"))) convpool::tensorrt::v2::IPluginCreator *const *
getPluginCreators(int32_t &count) {
    using namespace convpool::tensorrt;
    count = 0;
    return guarded<v2::IPluginCreator *const *>("getPluginCreators", nullptr, [&] {
        const auto &all = all_creators<Creator, v2::IPluginCreator>();  // before the check: they stay, whoever asks
        const int32_t version = runtime_version();
        if (version < 80600 || version >= 100000)
            throw std::runtime_error("TensorRT version; got " + std::to_string(version) + ", expected 8.6 or 9; use getCreators");
        count = static_cast<int32_t>(all.size());
        return all.data();
    });
}

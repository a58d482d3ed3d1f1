// SPDX-License-Identifier: Apache-2.0
// Hostile fields, descriptors, shapes, calls out of order and engines' bytes to the plugins of both interfaces, of which each
// is taken or refused with a message.
//
//   convpool_fuzz_plugin LIBRARY SEED ROUNDS
//
// LIBRARY stands on the pretended CUDA runtime, and the sanitizers look on.  A failure prints the seed of its round, which
// alone repeats it: convpool_fuzz_plugin LIBRARY SEED 1.
#include "v2.h"
#include "v3.h"

#include <climits>
#include <cstdlib>
#include <random>
#include <stdexcept>

namespace {

using namespace host;

// The call failed, so it must have said why; one that passed may have warned.
bool told(bool passed, const char *call) {
    if (!passed && logged.empty()) throw std::runtime_error(std::string(call) + ": refused without a message");
    logged.clear();
    return passed;
}

class Random {
public:
    explicit Random(unsigned seed) : engine_(seed) {}
    int below(int bound) { return static_cast<int>(engine_() % static_cast<unsigned>(bound)); }
    bool one_in(int count) { return below(count) == 0; }
    template <class Value> Value of(std::initializer_list<Value> values) {
        return values.begin()[below(static_cast<int>(values.size()))];
    }
    // Small, at a limit, or anything.
    int64_t number() {
        if (one_in(2)) return below(20) - 2;
        if (one_in(2))
            return (of<int64_t>({INT32_MAX, INT32_MIN, INT64_MAX, INT64_MIN, int64_t{1} << 62, 65535, 65536}) / (1 + below(3)));
        return static_cast<int64_t>(engine_() << 32 | engine_());
    }
    char byte() { return static_cast<char>(engine_()); }

private:
    std::mt19937_64 engine_;
};

// Mostly a legal layer.
Attributes attributes(Random &random) {
    const std::vector<Attributes> all = every_operator();
    Attributes a = all[random.below(static_cast<int>(all.size()))];
    const int rank = random.one_in(3) ? 1 + random.below(3) : 2;
    auto values = [&](int count, int least, int most) {
        std::vector<int32_t> all(count);
        for (int32_t &value : all) value = least + random.below(most - least + 1);
        return all;
    };
    a.pool_kernel = values(rank, 1, 3), a.pool_strides = values(rank, 1, 2), a.pool_dilations = values(rank, 1, 2);
    a.kernel = values(rank, 1, 3), a.strides = values(rank, 1, 2), a.dilations = values(rank, 1, 2);
    a.pool_pads = values(2 * rank, 0, 2), a.pads = values(2 * rank, 0, 2);
    if (!a.upsample.empty()) a.upsample = values(rank, 1, 4);
    a.group = {random.one_in(4) ? 2 : 1};
    if (random.one_in(2)) a.constant_weights = {random.below(2)};
    if (random.one_in(2)) a.accumulation = {random.below(2)};
    return a;
}

template <class T> class Fuzzer {
public:
    explicit Fuzzer(unsigned seed) : random_(seed) {}

    void round() {
        const Attributes a = attributes(random_);
        Owner<T> plugin = make_hostile(a);
        if (plugin == nullptr) {
            plugin = make<T>(a);
            if (!told(plugin != nullptr, "createPlugin")) return;
        }
        for (int call = 0; call < 8; ++call) ask(*plugin, a);
        const typename T::Saved saved = T::saved(*plugin);
        Owner<T> loaded = load(creator_of<T>(a), saved);
        if (loaded == nullptr) return;
        Owner<T> context = T::attach(*loaded);
        if (!told(context != nullptr, "attach")) return;
        for (int call = 0; call < 8; ++call) ask(*context, a);
    }

private:
    using Type = typename T::DataType;
    using Format = typename T::TensorFormat;

    // Fields of the attributes, one in two of them changed.
    Owner<T> make_hostile(const Attributes &a) {
        Fields<T> fields(a, random_.one_in(8) ? "strides" : "");
        std::vector<std::vector<int64_t>> memory;
        memory.reserve(4);
        for (int change = random_.below(3); change > 0; --change) {
            typename T::Field &field = fields.list[random_.below(static_cast<int>(fields.list.size()))];
            // No legal length is more than 6, and no legal type wider than 64 bits.
            auto give_data = [&](int length) {
                memory.emplace_back(std::clamp(length, 1, 6));
                for (int64_t &value : memory.back()) value = random_.number();
                field.data = memory.back().data(), field.length = length;
            };
            switch (random_.below(5)) {
            case 0:
                field.name = random_.of<const char *>({nullptr, "", "pads", "format", "strides", "pool_stride", "alpha"});
                break;
            case 1:
                give_data(field.length);
                field.type = static_cast<typename T::FieldType>(random_.below(14) - 2);
                break;
            case 2: give_data(static_cast<int>(random_.number())); break;
            case 3: field.data = nullptr; break;
            default: fields.list.push_back(field);
            }
        }
        const typename T::Collection *given = fields.get();
        typename T::Collection broken{random_.of({-1, 0, INT32_MIN, 5}), nullptr};
        if (random_.one_in(20)) given = random_.one_in(2) ? &broken : nullptr;
        Owner<T> plugin = T::create(creator_of<T>(a), given);
        told(plugin != nullptr, "createPlugin");
        return plugin;
    }

    // A layer's tensors, most of them right; at most three of their numbers changed.
    struct Tensors {
        std::vector<typename T::Dynamic> in;
        typename T::Dynamic out;
    };
    Tensors tensors(const Attributes &a) {
        const Type type = random_.of({Type::kHALF, Type::kFLOAT, static_cast<Type>(7)});
        const Format linear = Format::kLINEAR, format = random_.of({linear, type == Type::kFLOAT ? Format::kHWC : Format::kHWC8});
        const int64_t c = random_.of<int64_t>({8, 16, 64, 6}), m = random_.of<int64_t>({8, 32, 6});
        const int64_t n = random_.of<int64_t>({0, 1, 4}), most = n + random_.below(3);
        std::vector<int64_t> x{n, c}, w{m}, y{n, m};
        for (size_t i = 0; i < a.kernel.size(); ++i) {
            x.push_back(5 + random_.below(30));
            w.push_back(a.kernel[i]);
            y.push_back(out_size(a, static_cast<int>(i), x.back()));
        }
        w.push_back(c / a.group[0]);
        auto upto = [&](std::vector<int64_t> sizes) { return sizes[0] = most, sizes; };
        std::vector<int64_t> scale{c};
        if (a.around.affine == 2) scale = {n, c}, scale.resize(x.size(), 1);
        Tensors all;
        all.out = dynamic<T>(y, upto(y), type, format);
        all.in = a.inputs(dynamic<T>(x, upto(x), type, format), dynamic<T>(w, type, linear), dynamic<T>({m}, type, linear),
                          dynamic<T>(scale, a.around.affine == 2 ? upto(scale) : scale, type, linear), all.out);
        for (typename T::Dynamic *tensor : pointers(all)) tensor->desc.dims = random_.one_in(2) ? tensor->min : tensor->max;
        for (int change = random_.one_in(2) ? 0 : 1 + random_.below(3); change > 0; --change) {
            const auto every = pointers(all);
            typename T::Dynamic &tensor = *every[random_.below(static_cast<int>(every.size()))];
            typename T::Dims &dims = *random_.of({&tensor.min, &tensor.max, &tensor.desc.dims});
            switch (random_.below(4)) {
            case 0: dims.nbDims = static_cast<int32_t>(random_.number()); break;
            case 1: tensor.desc.type = static_cast<Type>(random_.below(12) - 1); break;
            case 2: tensor.desc.format = static_cast<Format>(random_.below(12) - 1); break;
            default: dims.d[random_.below(8)] = static_cast<typename T::Number>(random_.number());
            }
        }
        return all;
    }
    static std::vector<typename T::Dynamic *> pointers(Tensors &all) {
        std::vector<typename T::Dynamic *> every{&all.out};
        for (typename T::Dynamic &tensor : all.in) every.push_back(&tensor);
        return every;
    }

    // How many inputs there are said to be: as many as there are, 2, or a number that no operator has.
    int count(const Attributes &a) {
        return random_.one_in(8) ? random_.of({0, 1, 7, -1, INT_MAX, 1000}) : random_.one_in(4) ? 2 : a.input_count();
    }

    void ask(typename T::Plugin &plugin, const Attributes &a) {
        Tensors all = tensors(a);
        const int inputs = count(a);
        logged.clear();
        switch (random_.below(7)) {
        case 0: ask_shape(plugin, all, inputs); break;
        case 1: {
            std::vector<Type> types;
            for (const typename T::Dynamic &tensor : all.in) types.push_back(tensor.desc.type);
            Type output{};
            told(T::output_type(plugin, types.data(), inputs, output), "output type");
            break;
        }
        case 2: {  // an unsupported combination is an answer, without a message
            std::vector<typename T::Dynamic> of = all.in;
            of.push_back(all.out);
            T::supports(plugin, static_cast<int>(random_.number()) % 9, of);
            break;
        }
        case 3: told(T::configure(plugin, all.in.data(), inputs, all.out), "configurePlugin"); break;
        case 4: own_calls(plugin, all, inputs); break;
        default: run(plugin, all, inputs);
        }
    }

    void ask_shape(typename T::Plugin &plugin, const Tensors &all, int inputs) {
        std::vector<std::unique_ptr<Expr<T>>> values;
        std::vector<typename T::DimsExprs> shapes;
        for (const typename T::Dynamic &tensor : all.in) {
            typename T::DimsExprs shape{tensor.desc.dims.nbDims, {}};
            for (int i = 0; i < 8; ++i)
                shape.d[i] = values.emplace_back(new Expr<T>(tensor.desc.dims.d[i], !random_.one_in(3))).get();
            shapes.push_back(shape);
        }
        typename T::DimsExprs output{};
        QuietBuilder builder;
        told(T::output_shape(plugin, shapes.data(), inputs, output, builder), "output shape");
    }
    // Its numbers may overflow: only the plugin's own arithmetic is looked at.
    struct QuietBuilder : T::IBuilder {
        struct Impl : T::VBuilder {
            std::vector<std::unique_ptr<Expr<T>>> made;
            const typename T::IExpr *constant(typename T::Number value) override {
                return made.emplace_back(new Expr<T>(value)).get();
            }
            const typename T::IExpr *operation(typename T::Operation, const typename T::IExpr &,
                                               const typename T::IExpr &) override {
                return made.emplace_back(new Expr<T>(0, false)).get();
            }
        } impl;
        QuietBuilder() { this->impl_ = &impl; }
    };

    void run(typename T::Plugin &plugin, const Tensors &all, int inputs) {
        std::vector<typename T::Desc> now;
        for (const typename T::Dynamic &tensor : all.in) now.push_back(tensor.desc);
        std::vector<const void *> data(6);
        for (const void *&pointer : data)
            pointer = random_.one_in(12)
                          ? nullptr
                          : reinterpret_cast<const void *>((size_t{1} << 20) + (random_.one_in(6) ? random_.below(20) : 0));
        void *y = reinterpret_cast<void *>(size_t{1} << 21);
        void *workspace = random_.one_in(3) ? nullptr : reinterpret_cast<void *>(size_t{1} << 22);
        const int read = static_cast<int>(now.size());
        if (inputs < 0 || inputs > read) inputs = read;  // the host itself reads so many
        if (!told(T::shape_change(plugin, now.data(), inputs, all.out.desc), "shape change") && random_.one_in(2)) return;
        for (int i = 0; i < 2; ++i)
            told(T::enqueue(plugin, now.data(), all.out.desc, data.data(), &y, workspace, nullptr), "enqueue");
    }

    void own_calls(typename T::Plugin &plugin, const Tensors &all, int inputs);
    Owner<T> load(typename T::Creator &creator, const typename T::Saved &saved);

    Random random_;
};

template <> void Fuzzer<V2>::own_calls(V2::Plugin &plugin, const Tensors &all, int inputs) {
    std::vector<V2::Desc> in;
    for (const V2::Dynamic &tensor : all.in) in.push_back(tensor.desc);
    const size_t bytes = plugin.getWorkspaceSize(in.data(), inputs, &all.out.desc, random_.one_in(8) ? 2 : 1);
    if (bytes > size_t{1} << 50) throw std::runtime_error("getWorkspaceSize: " + std::to_string(bytes) + " bytes");
    plugin.setPluginNamespace(random_.of<const char *>({nullptr, "", "a"}));
}

// Mostly with a byte changed, the checksum made right or not.
template <> Owner<V2> Fuzzer<V2>::load(V2::Creator &creator, const std::vector<char> &saved) {
    std::vector<char> bytes = saved;
    for (int change = random_.below(4); change > 0; --change)
        bytes[random_.below(static_cast<int>(bytes.size()))] ^= random_.byte();
    if (random_.one_in(10)) bytes.resize(random_.below(static_cast<int>(bytes.size()) + 8));
    if (!random_.one_in(4) && bytes.size() > 4) bytes = V2::summed(bytes);
    Owner<V2> loaded = V2::load(creator, bytes);
    return told(loaded != nullptr, "deserializePlugin") ? std::move(loaded) : nullptr;
}

template <> void Fuzzer<V3>::own_calls(V3::Plugin &plugin, const Tensors &all, int inputs) {
    Parts parts(plugin);
    std::vector<int32_t> ids(static_cast<size_t>(std::max(parts.build->getNbTactics(), 0)));
    logged.clear();
    const int32_t room = static_cast<int32_t>(ids.size());
    told(parts.build->getValidTactics(ids.data(), random_.one_in(8) ? room + 1 + random_.below(3) : room) == 0,
         "getValidTactics");
    const int32_t id = random_.one_in(4) || ids.empty() ? static_cast<int32_t>(random_.number()) : ids[random_.below(room)];
    told(parts.runtime->setTactic(id) == 0, "setTactic");
    const size_t bytes = parts.build->getWorkspaceSize(all.in.data(), inputs, &all.out, random_.one_in(8) ? 0 : 1);
    if (bytes > size_t{1} << 50) throw std::runtime_error("getWorkspaceSize: " + std::to_string(bytes) + " bytes");
    Owner<V3> copy = V3::clone(plugin);
    if (!told(copy != nullptr, "clone")) return;
    run(*copy, all, inputs);
}

template <> Owner<V3> Fuzzer<V3>::load(V3::Creator &creator, const V3::Saved &saved) {
    Owner<V3> loaded = V3::load(creator, saved);
    if (loaded == nullptr) throw std::runtime_error("createPlugin: refused what getFieldsToSerialize gave");
    return loaded;
}

template <class T> void rounds(void *library, int32_t version, unsigned first, int count) {
    version_number = version;
    if (!find_creators<T>(library)) throw std::runtime_error("the library lacks creators");
    for (int i = 0; i < count; ++i) {
        const unsigned seed = first + static_cast<unsigned>(i);
        try {
            Fuzzer<T>(seed).round();
        } catch (const std::exception &error) {
            throw std::runtime_error("seed " + std::to_string(seed) + ", TensorRT " + std::to_string(version) + ": " +
                                     error.what());
        }
    }
}

}  // namespace

int main(int count, char **arguments) {
    if (count != 4) return std::printf("usage: convpool_fuzz_plugin LIBRARY SEED ROUNDS\n"), 2;
    const unsigned seed = static_cast<unsigned>(std::strtoul(arguments[2], nullptr, 10));
    const int rounds_of_each = std::atoi(arguments[3]);
    try {
        void *library = open_library(arguments[1]);
        if (library == nullptr || pretended_launches == nullptr)
            throw std::runtime_error(std::string(arguments[1]) + ": no plugin library on the pretended CUDA runtime");
        rounds<V2>(library, 8601, seed, rounds_of_each);
        rounds<V3>(library, 101600, seed, rounds_of_each);
        if (pretended_bytes() != 0)
            throw std::runtime_error(std::to_string(pretended_bytes()) + " bytes of device memory are left");
    } catch (const std::exception &error) {
        std::printf("%s\n", error.what());
        return 1;
    }
    if (failures != 0) return 1;
    if (pretended_launches() == 0) return std::printf("no run came through; expected most of them\n"), 1;
    std::printf("%d rounds of each interface from seed %u, %d kernel launches\n", rounds_of_each, seed, pretended_launches());
    return 0;
}

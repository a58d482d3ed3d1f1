// SPDX-License-Identifier: Apache-2.0
// Prints which accumulation onnxruntime's operators ask of the C API, for nodes with that attribute and without; one line a node.
#include "onnxruntime/node.h"

#include <cstdio>
#include <map>
#include <string>

namespace {

using namespace convpool;

// A 2-D node, as far as its operator asks.
class Attributes final : public onnxruntime::AttributeSource {
public:
    Attributes(const nodes::Operator &op, const std::map<std::string, int64_t> &more) : scalars_(more) {
        scalars_["prologue_affine"] = op.affine;
        scalars_["prologue_activation"] = op.prologue;
        scalars_["residual"] = op.residual;
        scalars_["activation"] = op.epilogue;
    }
    bool number(const char *name, int64_t &value) const override {
        const auto found = scalars_.find(name);
        if (found == scalars_.end()) return false;
        value = found->second;
        return true;
    }
    bool numbers(const char *name, std::vector<int64_t> &values) const override {
        const std::string wanted = name;
        values = {2, 2};
        return wanted == "kernel_shape" || wanted == "pool_kernel_shape" || wanted == "upsample";
    }
    bool real(const char *name, float &value) const override {
        const std::string wanted = name;
        value = 0;
        return wanted == "alpha" || wanted == "prologue_alpha";
    }
    bool reals(const char *, std::vector<float> &) const override { return false; }
    bool has(const char *name) const override { return scalars_.count(name) > 0; }

private:
    std::map<std::string, int64_t> scalars_;
};

}  // namespace

int main() {
    const onnxruntime::Sizes x{1, 8, 9, 9}, w{16, 2, 2, 8};
    for (const nodes::Operator &op : nodes::operators())
        for (const std::map<std::string, int64_t> &given :
             {std::map<std::string, int64_t>{}, {{"accumulation", 0}}, {{"accumulation", 1}}}) {
            const onnxruntime::Node node(op, Attributes(op, given));
            std::printf("%s", op.name.c_str());
            for (int32_t dtype : {CONVPOOL_F16, CONVPOOL_BF16, CONVPOOL_F32})
                std::printf(" %d", node.problem({x, w}, dtype, false).accumulation);
            std::printf("\n");
        }
}

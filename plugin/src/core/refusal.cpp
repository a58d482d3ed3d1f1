// SPDX-License-Identifier: Apache-2.0
#include "core/refusal.h"

#include <algorithm>

namespace convpool {

std::string problem_reason(const Problem &p, const Tactic &t, bool takes_float_x) {
    const Precision precision = static_cast<Precision>(t.precision);
    const int dtype = precision == Precision::kF16 ? CONVPOOL_F16 : precision == Precision::kBF16 ? CONVPOOL_BF16 : CONVPOOL_F32;
    if (p.w_dtype != dtype)
        return refusal(t, "dtype", kTypes[p.w_dtype].name, kTypes[dtype].name,
                       p.eight_bit() ? kUseGeneric : "use a tactic of that type");
    if (p.x_float() && !takes_float_x)
        return refusal(t, "type of X", "F32", kTypes[dtype].name, "use a few_channels tactic or generic");
    if (precision == Precision::kTF32 && !p.allow_tf32)
        return refusal(t, "allow_tf32", "0", "1", "use a tf32x3 tactic for full precision");
    if (t.packed && !p.allow_packed)
        return refusal(t, "accumulation", "0 (the default)", "1 (packed)", "use a tactic that is not packed");
    if (p.rank > 2) return refusal(t, "rank", p.rank, "1 or 2", kUseGeneric);
    if (p.group != 1) return refusal(t, "group", p.group, "1", kUseGeneric);
    for (auto [name, value] : {Count{"n * output pixels", p.n * p.out_pixels()},
                               {"output channels", p.m},
                               {"input channels", p.c},
                               {"elements of an input image", p.in_pixels() * p.c},
                               {"pooling window", p.pool_size()},
                               {"elements of a filter", p.taps() * p.c},
                               {"pooled size", std::max(p.pooled[1], p.pooled[2])}})
        if (value > kMaxCount) return refusal(t, name, value, kAtMostMaxCount, kUseGeneric);
    return {};
}

}  // namespace convpool

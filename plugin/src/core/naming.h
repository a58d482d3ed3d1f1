// SPDX-License-Identifier: Apache-2.0
// Names of tactics: conv_avgpool_<family>_sm<capability>_<precision>_m<pixels>n<channels>k<channels of X>...
#pragma once

#include <cstdint>
#include <string>

#include "core/params.h"

namespace convpool {

inline bool is_16_bit(Precision precision) { return precision == Precision::kF16 || precision == Precision::kBF16; }

// The least compute capability of kernels that multiply by mma.sync.
inline int32_t mma_min_cc(Precision precision, int32_t split) { return split > 1 ? 90 : precision == Precision::kF16 ? 75 : 80; }

inline std::string tile_name(const char *family_name, int32_t min_cc, bool sm90a, Precision precision, int block_m, int block_n,
                             int block_k) {
    const char *precisions[] = {"f16", "bf16", "tf32", "tf32x3"};
    return std::string("conv_avgpool_") + family_name + "_sm" + std::to_string(min_cc) + (sm90a ? "a_" : "_") +
           precisions[static_cast<int>(precision)] + "_m" + std::to_string(block_m) + "n" + std::to_string(block_n) + "k" +
           std::to_string(block_k);
}
inline std::string stages_name(int stages, int split) {
    return "_s" + std::to_string(stages) + (split > 1 ? "_split" + std::to_string(split) : "");
}

}  // namespace convpool

// The pointwise_sm90 rows of tactics.def in this precision.
#include "../launch.h"
#include "families/pointwise/kernel.cuh"

#define CONVPOOL_ROW_pointwise_sm90_F16(id, block_m, block_n, warps_m, warps_n, stages, min_blocks, split)  \
    case id: {                                                                                              \
        using Config = TileConfig<Precision::kF16, block_m, block_n, warps_m, warps_n, stages, min_blocks>; \
        return prologue ? reinterpret_cast<const void *>(&pointwise_kernel<Config, true>)                   \
                        : reinterpret_cast<const void *>(&pointwise_kernel<Config, false>);                 \
    }
#include "../row_filter.h"

namespace convpool {

const void *pointwise_sm90_kernel_f16(int id, bool prologue) {
    switch (id) {
#include "../tactics.def"
    default: return nullptr;
    }
}

}  // namespace convpool

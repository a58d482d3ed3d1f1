// The few_channels rows of tactics.def in this precision.
#include "../launch.h"
#include "families/few_channels/kernel.cuh"

#define CONVPOOL_ROW_few_channels_BF16(id, block_m, block_n, warps_m, warps_n, stages, min_blocks, split) \
    case id:                                                                                              \
        return reinterpret_cast<const void *>(                                                            \
            &few_channels_kernel<FewChannelsConfig<Precision::kBF16, block_m, block_n, warps_m, warps_n, stages, min_blocks>>);
#include "../row_filter.h"

namespace convpool {

const void *few_channels_kernel_bf16(int id) {
    switch (id) {
#include "../tactics.def"
    default: return nullptr;
    }
}

}  // namespace convpool

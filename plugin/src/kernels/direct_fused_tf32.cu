// The direct_fused rows of tactics.def in this precision.
#include "../launch.h"
#include "families/direct_fused/kernel.cuh"

#define CONVPOOL_ROW_direct_fused_TF32(id, block_m, block_n, warps_m, warps_n, stages, min_blocks, split) \
    case id:                                                                                              \
        return reinterpret_cast<const void *>(                                                            \
            &direct_fused_kernel<TileConfig<Precision::kTF32, block_m, block_n, warps_m, warps_n, stages, min_blocks>>);
#include "../row_filter.h"

namespace convpool {

const void *direct_fused_kernel_tf32(int id) {
    switch (id) {
#include "../tactics.def"
    default: return nullptr;
    }
}

}  // namespace convpool

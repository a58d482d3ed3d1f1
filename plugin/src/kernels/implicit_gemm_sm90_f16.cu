// The implicit GEMMs of the direct_gemm_sm90 and filter_fused_sm90 rows of tactics.def in this precision.
#include "../launch.h"
#include "families/implicit_gemm_cpasync/kernel.cuh"

#define CONVPOOL_CASE(id, block_m, block_n, warps_m, warps_n, stages, min_blocks, split) \
    case id:                                                                             \
        return reinterpret_cast<const void *>(                                           \
            &implicit_gemm_cpasync_kernel<TileConfig<Precision::kF16, block_m, block_n, warps_m, warps_n, stages, min_blocks>>);
#define CONVPOOL_ROW_direct_gemm_sm90_F16 CONVPOOL_CASE
#define CONVPOOL_ROW_filter_fused_sm90_F16 CONVPOOL_CASE
#include "../row_filter.h"

namespace convpool {

const void *implicit_gemm_sm90_kernel_f16(int id) {
    switch (id) {
#include "../tactics.def"
    default: return nullptr;
    }
}

}  // namespace convpool

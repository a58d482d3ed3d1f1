// The implicit GEMMs of the direct_gemm_sm90 rows of tactics.def in this precision.
#include "../launch.h"
#include "families/implicit_gemm_cpasync/kernel.cuh"

#define CONVPOOL_CASE(id, block_m, block_n, warps_m, warps_n, stages, min_blocks, split) \
    case id:                                                                             \
        return reinterpret_cast<const void *>(                                           \
            &implicit_gemm_cpasync_kernel<                                               \
                TileConfig<Precision::kTF32x3, block_m, block_n, warps_m, warps_n, stages, min_blocks>>);
#define CONVPOOL_ROW_direct_gemm_sm90_TF32X3 CONVPOOL_CASE
#include "../row_filter.h"

namespace convpool {

const void *implicit_gemm_sm90_kernel_tf32x3(int id) {
    switch (id) {
#include "../tactics.def"
    default: return nullptr;
    }
}

}  // namespace convpool

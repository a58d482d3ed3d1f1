// The implicit GEMMs of the direct_gemm and filter_fused rows of tactics.def in this precision.
#include "../launch.h"
#include "families/implicit_gemm/kernel.cuh"

#define CONVPOOL_CASE(id, block_m, block_n, warps_m, warps_n, stages, min_blocks, split) \
    case id:                                                                             \
        return reinterpret_cast<const void *>(                                           \
            &implicit_gemm_kernel<TileConfig<Precision::kBF16, block_m, block_n, warps_m, warps_n, stages, min_blocks>>);
#define CONVPOOL_ROW_direct_gemm_BF16 CONVPOOL_CASE
#define CONVPOOL_ROW_filter_fused_BF16 CONVPOOL_CASE
#include "../row_filter.h"

namespace convpool {

const void *implicit_gemm_kernel_bf16(int id) {
    switch (id) {
#include "../tactics.def"
    default: return nullptr;
    }
}

}  // namespace convpool

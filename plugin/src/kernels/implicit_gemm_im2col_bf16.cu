// The implicit GEMMs of the direct_gemm_im2col and filter_fused_im2col rows of tactics.def in this precision.
#include "../launch.h"
#include "families/implicit_gemm_tma/kernel.cuh"

#define CONVPOOL_KERNEL(activates, block_m, block_n, warps_m, warps_n, stages, min_blocks)                              \
    reinterpret_cast<const void *>(                                                                                     \
        &implicit_gemm_tma_kernel<TileConfig<Precision::kBF16, block_m, block_n, warps_m, warps_n, stages, min_blocks>, \
                                  activates>)
#define CONVPOOL_CASE(id, block_m, block_n, warps_m, warps_n, stages, min_blocks, split)                                       \
    case id:                                                                                                                   \
        if (im2col_activates(block_m, block_n, min_blocks) && activates)                                                       \
            return CONVPOOL_KERNEL(im2col_activates(block_m, block_n, min_blocks), block_m, block_n, warps_m, warps_n, stages, \
                                   min_blocks);                                                                                \
        return CONVPOOL_KERNEL(false, block_m, block_n, warps_m, warps_n, stages, min_blocks);
#define CONVPOOL_ROW_direct_gemm_im2col_BF16 CONVPOOL_CASE
#define CONVPOOL_ROW_filter_fused_im2col_BF16 CONVPOOL_CASE
#include "../row_filter.h"

namespace convpool {

const void *implicit_gemm_im2col_kernel_bf16(int id, bool activates) {
    switch (id) {
#include "../tactics.def"
    default: return nullptr;
    }
}

}  // namespace convpool

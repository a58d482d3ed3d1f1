// The implicit GEMMs of the direct_gemm_im2col rows of tactics.def in this precision.
#include "../launch.h"
#include "families/implicit_gemm_tma/kernel.cuh"

#define CONVPOOL_CASE(id, block_m, block_n, warps_m, warps_n, stages, min_blocks, split)                                      \
    case id:                                                                                                                  \
        return reinterpret_cast<const void *>(                                                                                \
            &implicit_gemm_tma_kernel<TileConfig<Precision::kTF32x3, block_m, block_n, warps_m, warps_n, stages, min_blocks>, \
                                      false>);
#define CONVPOOL_ROW_direct_gemm_im2col_TF32X3 CONVPOOL_CASE
#include "../row_filter.h"

namespace convpool {

const void *implicit_gemm_im2col_kernel_tf32x3(int id) {
    switch (id) {
#include "../tactics.def"
    default: return nullptr;
    }
}

}  // namespace convpool

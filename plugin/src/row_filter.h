// Lets a file take the rows of tactics.def of one family and precision: define CONVPOOL_ROW_<family>_<precision>(id,
// block_m, block_n, warps_m, warps_n, stages, min_blocks, split) for those, include this, then tactics.def. Rows of
// which no macro was defined vanish.
#pragma once

#define CONVPOOL_TMA_ROW(...)
#define CONVPOOL_ROW(family, precision, ...) CONVPOOL_ROW_##family##_##precision(__VA_ARGS__)

#define CONVPOOL_ROW_generic_ANY(...)
#ifndef CONVPOOL_ROW_direct_gemm_F16
#define CONVPOOL_ROW_direct_gemm_F16(...)
#endif
#ifndef CONVPOOL_ROW_direct_gemm_BF16
#define CONVPOOL_ROW_direct_gemm_BF16(...)
#endif
#ifndef CONVPOOL_ROW_direct_gemm_TF32
#define CONVPOOL_ROW_direct_gemm_TF32(...)
#endif
#ifndef CONVPOOL_ROW_direct_gemm_TF32X3
#define CONVPOOL_ROW_direct_gemm_TF32X3(...)
#endif
#ifndef CONVPOOL_ROW_direct_fused_F16
#define CONVPOOL_ROW_direct_fused_F16(...)
#endif
#ifndef CONVPOOL_ROW_direct_fused_BF16
#define CONVPOOL_ROW_direct_fused_BF16(...)
#endif
#ifndef CONVPOOL_ROW_direct_fused_TF32
#define CONVPOOL_ROW_direct_fused_TF32(...)
#endif
#ifndef CONVPOOL_ROW_direct_fused_TF32X3
#define CONVPOOL_ROW_direct_fused_TF32X3(...)
#endif
#ifndef CONVPOOL_ROW_few_channels_F16
#define CONVPOOL_ROW_few_channels_F16(...)
#endif
#ifndef CONVPOOL_ROW_few_channels_BF16
#define CONVPOOL_ROW_few_channels_BF16(...)
#endif
#ifndef CONVPOOL_ROW_filter_fused_F16
#define CONVPOOL_ROW_filter_fused_F16(...)
#endif
#ifndef CONVPOOL_ROW_filter_fused_BF16
#define CONVPOOL_ROW_filter_fused_BF16(...)
#endif
#ifndef CONVPOOL_ROW_filter_fused_TF32
#define CONVPOOL_ROW_filter_fused_TF32(...)
#endif
#ifndef CONVPOOL_ROW_filter_fused_TF32X3
#define CONVPOOL_ROW_filter_fused_TF32X3(...)
#endif
#ifndef CONVPOOL_ROW_direct_gemm_sm90_F16
#define CONVPOOL_ROW_direct_gemm_sm90_F16(...)
#endif
#ifndef CONVPOOL_ROW_direct_gemm_sm90_BF16
#define CONVPOOL_ROW_direct_gemm_sm90_BF16(...)
#endif
#ifndef CONVPOOL_ROW_direct_gemm_sm90_TF32
#define CONVPOOL_ROW_direct_gemm_sm90_TF32(...)
#endif
#ifndef CONVPOOL_ROW_direct_gemm_sm90_TF32X3
#define CONVPOOL_ROW_direct_gemm_sm90_TF32X3(...)
#endif
#ifndef CONVPOOL_ROW_filter_fused_sm90_F16
#define CONVPOOL_ROW_filter_fused_sm90_F16(...)
#endif
#ifndef CONVPOOL_ROW_filter_fused_sm90_TF32
#define CONVPOOL_ROW_filter_fused_sm90_TF32(...)
#endif
#ifndef CONVPOOL_ROW_filter_fused_sm90_BF16
#define CONVPOOL_ROW_filter_fused_sm90_BF16(...)
#endif
#ifndef CONVPOOL_ROW_direct_gemm_im2col_F16
#define CONVPOOL_ROW_direct_gemm_im2col_F16(...)
#endif
#ifndef CONVPOOL_ROW_direct_gemm_im2col_BF16
#define CONVPOOL_ROW_direct_gemm_im2col_BF16(...)
#endif
#ifndef CONVPOOL_ROW_direct_gemm_im2col_TF32
#define CONVPOOL_ROW_direct_gemm_im2col_TF32(...)
#endif
#ifndef CONVPOOL_ROW_direct_gemm_im2col_TF32X3
#define CONVPOOL_ROW_direct_gemm_im2col_TF32X3(...)
#endif
#ifndef CONVPOOL_ROW_filter_fused_im2col_F16
#define CONVPOOL_ROW_filter_fused_im2col_F16(...)
#endif
#ifndef CONVPOOL_ROW_filter_fused_im2col_BF16
#define CONVPOOL_ROW_filter_fused_im2col_BF16(...)
#endif
#ifndef CONVPOOL_ROW_filter_fused_im2col_TF32
#define CONVPOOL_ROW_filter_fused_im2col_TF32(...)
#endif
#ifndef CONVPOOL_ROW_pointwise_sm90_F16
#define CONVPOOL_ROW_pointwise_sm90_F16(...)
#endif
#ifndef CONVPOOL_ROW_pointwise_sm90_BF16
#define CONVPOOL_ROW_pointwise_sm90_BF16(...)
#endif

/* SPDX-License-Identifier: Apache-2.0 */
/* convpool.h: convolution of box means, and of upsampled maps, on NVIDIA GPUs, C API of libconvpool.so.
 *
 *     Y = act(w_scale[m] * Conv(AveragePool(f(X), count_include_pad=1), W) + B + R),  f(x) = pre(scale[c] * x + shift[c])
 *     Y = act(w_scale[m] * Conv(Upsample(f(X)), W) + B + R)
 *
 * X [N,C,spatial...] or [N,spatial...,C], scale and shift [C] or [N,C], W [M,kernel...,C/group] (channels last), w_scale and B [M], Y
 * and R [N,M,out...] or [N,out...,M]. AveragePool takes pool_*, Conv takes kernel, strides, pads, dilations and group; both
 * pad with zeros: AveragePool's stand around f(X), and Conv's around the pooled tensor.
 *
 * Upsample repeats every pixel upsample[i] times along dimension i (nearest), 1 to 4 times; 0 means 1. Conv's zeros stand around
 * the upsampled tensor, which is never in memory. Tactics but generic sum weights of a pixel's copies before they multiply, so that
 * an infinity in X beside a zero weight need not make NaN; tactics named differences make NaN of infinities. A problem that
 * upsamples has no pooling: its window is 1 along every dimension, of stride 1, without pads; else it is CONVPOOL_INVALID_ARGUMENT.
 *
 * Types. W is of w_dtype, X of x_dtype, and Y, B and R are of y_dtype.
 * - F16, BF16 and F32: scale and shift are of w_dtype, as are Y, B and R (y_dtype = w_dtype). X is of w_dtype too, or F32
 *   beside a 16-bit W: then it is rounded to w_dtype as it is read. Tactics other than generic take such an X with a filter of
 *   at most CONVPOOL_MAX_FLOAT_FILTER elements. There is no w_scale. Sums are kept in fp32. The product and sum of f are
 *   rounded once, to fp32 or to w_dtype; where the 16-bit types take the latter, f(x) and the slope of LEAKY_RELU are rounded to
 *   w_dtype too. Full fp32 on tensor cores (tactics named tf32x3) makes NaN of an infinity in X or W; generic does not.
 * - I8 and F8E4M3 (no infinities; S.1111.111 is NaN): X and W are of the same type, and y_dtype is F16, BF16 or F32. There is
 *   no prologue. w_scale, of floats, is optional. The sum over a pooling window, taps and channels is exact; it is divided by
 *   the window's size, scaled, and added to B and R in fp64, and the result is rounded to fp32 before the activation. The sum has
 *   at most 2^27 products. Only generic runs these types yet.
 *
 * No tensor has more than 2^40 elements; no size, padding included, and no product of `kernel` reaches 2^31.
 *
 * Rank 1 to 3. Arrays below hold `rank` leading entries, slowest dimension first; pads hold the `rank` leading pads, then
 * the `rank` trailing ones, as in ONNX. Unused entries are ignored.
 *
 * A tactic is one kernel configuration. Its id is never 0 and never reused. `convpool_supports` says whether a tactic can
 * run a problem on the current CUDA device and, if not, why; `convpool_default_tactic` picks one: the fastest where the
 * library has a measurement of this very problem, or of it without its residual, on such a device, else by a cost rule.
 *
 * The environment variable CONVPOOL_TUNED, read once, names a file of such measurements (convpool tune writes it),
 * which count before those compiled in; "off" leaves the choice to the cost rule. The file is a regular one of at most 16 MiB. If it
 * cannot be used, choosing succeeds as if there were none, and convpool_last_error then says why; it tells so too of a row whose
 * tactic this library does not have, which is left out.
 *
 * CONVPOOL_LOG=1 in the environment prints one line to stderr for every problem that is planned: the tactic, how it was
 * chosen, and its expected time. In a profiler, NVTX ranges around the launches carry the tactic's name.
 *
 * Every function may be called from several threads at once. None throws, allocates device memory or synchronises;
 * `convpool_launch` may be captured into a CUDA graph. Functions that read the current device say so; the others need no
 * GPU. On failure they return a code, and `convpool_last_error` gives the message of the calling thread.
 */
#ifndef CONVPOOL_H_
#define CONVPOOL_H_

#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#define CONVPOOL_API
#else
#define CONVPOOL_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* The version of everything here; pyproject.toml takes the Python package's from these lines. */
#define CONVPOOL_VERSION_MAJOR 0
#define CONVPOOL_VERSION_MINOR 2
#define CONVPOOL_VERSION_PATCH 0
#define CONVPOOL_MAX_RANK 3

/* Version of what stands below. A caller compiled for one version works with no other: it compares the macro with
 * convpool_abi_version() before it calls anything else. */
#define CONVPOOL_ABI_VERSION 2

typedef enum {
    CONVPOOL_OK = 0,
    CONVPOOL_INVALID_ARGUMENT = 1, /* a null pointer, an unknown enum, a shape that is no ConvAvgPool */
    CONVPOOL_UNSUPPORTED = 2,      /* a legal problem that this tactic or device does not run */
    CONVPOOL_WORKSPACE_TOO_SMALL = 3,
    CONVPOOL_MISALIGNED = 4, /* a pointer that is not aligned to its element, a workspace not to 256 bytes; a tensor not to
                                16 bytes where the tactic asked for reads or writes it in vectors */
    CONVPOOL_CUDA_ERROR = 5
} convpool_status;

typedef enum { CONVPOOL_F16 = 0, CONVPOOL_BF16 = 1, CONVPOOL_F32 = 2, CONVPOOL_I8 = 3, CONVPOOL_F8E4M3 = 4 } convpool_dtype;

/* How sums are formed. */
typedef enum {
    CONVPOOL_ACCUMULATE_DEFAULT = 0, /* in fp32, a box mean rounded once; of 8-bit types exactly */
    /* Box means of F16 and BF16 may be summed in that type, of X / 4, so that no sum passes its range. Others: as by default. */
    CONVPOOL_ACCUMULATE_PACKED = 1
} convpool_accumulation;

typedef enum { CONVPOOL_CHANNELS_FIRST = 0, CONVPOOL_CHANNELS_LAST = 1 } convpool_layout;

typedef enum {
    CONVPOOL_ACT_NONE = 0,
    CONVPOOL_ACT_RELU = 1,
    CONVPOOL_ACT_LEAKY_RELU = 2, /* y < 0 ? alpha * y : y */
    CONVPOOL_ACT_TANH = 3,
    CONVPOOL_ACT_SIGMOID = 4,
    CONVPOOL_ACT_CLIP = 5, /* min(max(y, alpha), beta) */
    CONVPOOL_ACT_SILU = 6  /* y / (1 + exp(-y)) */
} convpool_activation;

/* struct_size is sizeof the struct that the caller was compiled with, at most CONVPOOL_MAX_STRUCT_SIZE. A longer one from a
 * newer caller is taken only if the part this library does not know is zero; fields added later mean, when zero, what this
 * version does. */
#define CONVPOOL_MAX_STRUCT_SIZE 4096

typedef struct {
    uint32_t struct_size;
    int32_t rank;
    int32_t x_dtype;      /* convpool_dtype, as are the next two */
    int32_t w_dtype;      /* of W, scale and shift */
    int32_t y_dtype;      /* of Y, B and R */
    int32_t accumulation; /* convpool_accumulation */
    int32_t has_w_scale;  /* 8-bit types only: the sum is multiplied by w_scale[m] */
    int32_t x_layout;     /* convpool_layout */
    int32_t y_layout;     /* of Y and of the residual */
    int32_t allow_tf32;   /* F32 only: products of operands rounded to TF32 (10 mantissa bits) */
    int64_t n, c, m;
    int64_t spatial[CONVPOOL_MAX_RANK]; /* of X */
    int32_t pool_kernel[CONVPOOL_MAX_RANK];
    int32_t pool_strides[CONVPOOL_MAX_RANK];
    int32_t pool_pads[2 * CONVPOOL_MAX_RANK];
    int32_t pool_dilations[CONVPOOL_MAX_RANK];
    int32_t kernel[CONVPOOL_MAX_RANK];
    int32_t strides[CONVPOOL_MAX_RANK];
    int32_t pads[2 * CONVPOOL_MAX_RANK];
    int32_t dilations[CONVPOOL_MAX_RANK];
    int32_t group;
    int32_t has_bias;
    int32_t has_residual;
    int32_t activation; /* convpool_activation */
    float alpha, beta;
    int32_t prologue_affine;     /* f scales and shifts X: 1 by channel, scale[c]; 2 by image and channel, scale[n][c]; 3 by
                                    channel, after groups of channels of an image were given mean 0 and variance 1 */
    int32_t prologue_activation; /* pre: ACT_NONE, ACT_RELU, ACT_LEAKY_RELU or ACT_SILU */
    float prologue_alpha;        /* pre's slope of LEAKY_RELU; not beyond w_dtype's largest number */
    int32_t upsample[CONVPOOL_MAX_RANK];
    int32_t prologue_groups; /* of channels, where prologue_affine is 3, times n below 2^31; else 0 */
    float prologue_epsilon;  /* added to the variance of a group, where prologue_affine is 3; else 0 */
} convpool_problem;

#define CONVPOOL_MAX_FLOAT_FILTER 64 /* C/group times the product of `kernel` */

/* Device pointers. b, residual, scale, shift and w_scale are read only if the problem has them. Y overlaps no input. */
typedef struct {
    uint32_t struct_size;
    uint32_t flags; /* CONVPOOL_WEIGHTS_PREPARED or 0 */
    const void *x, *w, *b, *residual;
    void *y;
    void *workspace;
    size_t workspace_bytes;
    const void *scale, *shift;
    void *prepared; /* null, or device memory (256-byte aligned) that takes the transformed weights in the workspace's place */
    size_t prepared_bytes;
    const float *w_scale;
} convpool_tensors;

/* W is what it was in an earlier launch of the same tactic and problem; `prepared`, or without it the workspace's first
 * convpool_prepared_bytes(), still holds, untouched, what that launch left there, which is not computed again. Both may be read
 * while the kernel queued before this launch still runs. */
#define CONVPOOL_WEIGHTS_PREPARED 1u

typedef struct {
    uint32_t struct_size;
    int32_t id;
    const char *name;   /* e.g. conv_avgpool_direct_fused_sm80_f16_m128n128k32_s3 */
    const char *family; /* the method: direct_gemm, direct_fused, filter_fused, upsample or generic */
    int32_t dtype;      /* convpool_dtype of W, or -1 for every type */
    int32_t tf32;       /* 1: needs allow_tf32 */
    int32_t min_cc;     /* least compute capability, major*10+minor */
    int32_t split_k;    /* thread blocks of one cluster that share an output tile's channels; 1: none */
    int32_t packed;     /* 1: needs CONVPOOL_ACCUMULATE_PACKED */
    int32_t roundings; /* of an operand of the products, a box mean or a fused weight, to the type that is multiplied: each of its
                           terms has so many relative errors of half a unit in the last place; 0: operands stay in fp32 */
} convpool_tactic_info;

/* CONVPOOL_ABI_VERSION of the library. */
CONVPOOL_API int32_t convpool_abi_version(void);
/* "0.2.0"; static storage. */
CONVPOOL_API const char *convpool_version(void);
/* The GPU architectures compiled in, e.g. "75,80,90,100,120"; static storage. */
CONVPOOL_API const char *convpool_architectures(void);
/* CUDA runtime version compiled in, as 1000*major + 10*minor. */
CONVPOOL_API int32_t convpool_cuda_version(void);
/* The calling thread's last message, "" if none; valid until its next call. */
CONVPOOL_API const char *convpool_last_error(void);
CONVPOOL_API const char *convpool_status_name(convpool_status status);

/* Number of tactics; infos may be null, else receives up to `capacity` entries (set struct_size in the first). 0 after a
 * failure, of which convpool_last_error tells. */
CONVPOOL_API int32_t convpool_tactics(convpool_tactic_info *infos, int32_t capacity);

/* Checks the problem without a GPU and gives Y's spatial sizes (rank entries; out_spatial may be null). */
CONVPOOL_API convpool_status convpool_output_shape(const convpool_problem *problem, int64_t *out_spatial);

/* Compute capability (major*10+minor), multiprocessors and shared memory of the current device. */
CONVPOOL_API convpool_status convpool_device(int32_t *cc, int32_t *multiprocessors, int32_t *shared_bytes);

/* CONVPOOL_OK if the tactic runs the problem on a device of compute capability `cc` with `shared_bytes` of shared memory
 * a block; cc 0 means the current device. Otherwise CONVPOOL_UNSUPPORTED, and convpool_last_error holds the reason. */
CONVPOOL_API convpool_status convpool_supports(const convpool_problem *problem, int32_t tactic, int32_t cc, int32_t shared_bytes);

/* Bytes of device workspace (256-byte aligned) that a launch needs; 0 for direct_fused and generic that normalize nothing. It depends on
 * problem and tactic only, on no device. CONVPOOL_UNSUPPORTED, with the reason, where no device runs the problem by the tactic.
 * convpool_prepared_bytes: its first part, which transformed weights take; a launch with `prepared` of at least that size needs
 * so much less workspace. */
CONVPOOL_API convpool_status convpool_workspace_bytes(const convpool_problem *problem, int32_t tactic, size_t *bytes);
CONVPOOL_API convpool_status convpool_prepared_bytes(const convpool_problem *problem, int32_t tactic, size_t *bytes);

/* The tactic measured or expected to be fastest; cc, multiprocessors, shared_bytes 0: those of the current device.
 * max_workspace_bytes bounds its workspace. Generic runs every legal problem on every device that any tactic runs on, where
 * the bound leaves room for what normalizes X;
 * CONVPOOL_UNSUPPORTED on others. */
CONVPOOL_API convpool_status convpool_default_tactic(const convpool_problem *problem, int32_t cc, int32_t multiprocessors,
                                                     int32_t shared_bytes, size_t max_workspace_bytes, int32_t *tactic);

/* Loads the tactic's kernels, those of its passes included, so that a later launch loads nothing. Optional. */
CONVPOOL_API convpool_status convpool_prepare(const convpool_problem *problem, int32_t tactic);

/* Runs the problem on `stream` (a cudaStream_t; null: the default stream) of the current device. tactic 0: the default
 * one within workspace_bytes that takes the tensors' alignment. Every call works the problem out anew; where calls repeat, keep a
 * plan. */
CONVPOOL_API convpool_status convpool_launch(const convpool_problem *problem, int32_t tactic, const convpool_tensors *tensors,
                                             void *stream);

/* A plan is a problem worked out for one tactic on one device: all that does not depend on pointers, kernels loaded.
 * Launching it costs little more than launching the bare kernels. It belongs to the device that was current when it was
 * made. Several threads may launch it at once. It keeps no device memory. */
typedef struct convpool_plan convpool_plan;

/* Pointers are aligned to their elements only. Without the flag, all pointers of a launch that the tactic reads or writes in
 * vectors are multiples of 16 bytes; convpool_plan_info says which. */
#define CONVPOOL_PLAN_UNALIGNED 1u

typedef enum {
    CONVPOOL_CHOSEN_BY_NAME = 0,        /* the caller named the tactic */
    CONVPOOL_CHOSEN_BY_MEASUREMENT = 1, /* measured fastest for this problem on such a device */
    CONVPOOL_CHOSEN_BY_RULE = 2         /* expected to be fastest by the cost rule */
} convpool_chosen_by;

/* Alignments are in bytes; 0 where the problem has no such tensor. */
typedef struct {
    uint32_t struct_size;
    int32_t tactic;
    const char *name;       /* of the tactic; static storage */
    int32_t chosen_by;      /* convpool_chosen_by */
    int32_t device;         /* the ordinal that cudaGetDevice gave */
    double expected_us;     /* by the cost rule, whose constants were fitted on an H200 */
    size_t workspace_bytes; /* that a launch needs; with `prepared`, prepared_bytes less */
    size_t prepared_bytes;  /* of the transformed weights */
    int32_t x_alignment, w_alignment, b_alignment, residual_alignment, y_alignment, scale_alignment, shift_alignment,
        w_scale_alignment;
    int64_t out_spatial[CONVPOOL_MAX_RANK]; /* of Y; zero past the rank */
} convpool_plan_properties;

/* A plan for the current device that needs at most max_workspace_bytes of workspace. tactic 0 chooses: the fastest that the
 * bound and the flags leave. A named tactic is planned, or refused with the reason: CONVPOOL_UNSUPPORTED,
 * CONVPOOL_WORKSPACE_TOO_SMALL, or CONVPOOL_MISALIGNED where it needs aligned pointers and the flags promise none. flags: 0 or
 * CONVPOOL_PLAN_UNALIGNED. *out is null after a failure; else convpool_plan_destroy frees it. */
CONVPOOL_API convpool_status convpool_plan_create(const convpool_problem *problem, int32_t tactic, size_t max_workspace_bytes,
                                                  uint32_t flags, convpool_plan **out);

/* Runs the plan on `stream` (a cudaStream_t; null: the default stream). The plan's device must be current. */
CONVPOOL_API convpool_status convpool_plan_launch(convpool_plan *plan, const convpool_tensors *tensors, void *stream);

/* Set struct_size first. */
CONVPOOL_API convpool_status convpool_plan_info(const convpool_plan *plan, convpool_plan_properties *properties);

/* Frees the plan, once no call uses it; its kernels may still run. Null is ignored. */
CONVPOOL_API void convpool_plan_destroy(convpool_plan *plan);

/* A box mean as an operator of its own, Z = AveragePool(X, count_include_pad=1), and its adjoint, dX = AveragePool'(dZ), with which
 * gradients go back through it. Types F16, BF16 and F32, one for both tensors; sums are kept in fp32 and rounded once. Both have one
 * layout. A sample of X or Z has fewer than 2^31 elements. */
typedef struct {
    uint32_t struct_size;
    int32_t rank;
    int32_t dtype;  /* convpool_dtype */
    int32_t layout; /* convpool_layout */
    int64_t n, c;
    int64_t spatial[CONVPOOL_MAX_RANK]; /* of X */
    int32_t kernel[CONVPOOL_MAX_RANK];
    int32_t strides[CONVPOOL_MAX_RANK];
    int32_t pads[2 * CONVPOOL_MAX_RANK];
    int32_t dilations[CONVPOOL_MAX_RANK];
    int32_t sums;        /* 1: sums over windows in place of means; the adjoint then repeats values */
    int32_t reserved[4]; /* zero */
} convpool_box_problem;

/* Device pointers. gate: null; there are no gates any more. The output does not overlap the input. Both run on `stream` (a
 * cudaStream_t; null: the default stream) of the current device, in vectors where channels come last, their rows are whole
 * multiples of 16 bytes, and so are both pointers. */
CONVPOOL_API convpool_status convpool_box_mean(const convpool_box_problem *problem, const void *x, const void *gate, void *z,
                                               void *stream);
CONVPOOL_API convpool_status convpool_box_mean_adjoint(const convpool_box_problem *problem, const void *dz, const void *gate,
                                                       void *dx, void *stream);

/* The gradients at weights and bias of a convolution of few channels, such as an image's:
 *
 *     dW[m,k,c] = sum over samples and outputs o of dY[n,o,m] * X[n, o * strides + k * dilations - pads, c]
 *     dB[m]     = sum over samples and outputs o of dY[n,o,m]
 *
 * The problem is that of the convolution: a pooling window of 1, one group, rank 1 or 2, F16 or BF16, the channels of X and Y last,
 * at most CONVPOOL_MAX_GRADIENT_FILTER elements of a filter (C times the product of `kernel`), M a multiple of 8. Others are
 * CONVPOOL_UNSUPPORTED, and so are devices of a compute capability below 8.0. Whether there are bias, residual and activations does
 * not matter. Sums are kept in fp32, formed in an order that the problem alone decides, and rounded once. */
#define CONVPOOL_MAX_GRADIENT_FILTER 32

/* Bytes of device workspace (256-byte aligned) that a launch needs. Needs no GPU. */
CONVPOOL_API convpool_status convpool_weight_gradient_bytes(const convpool_problem *problem, size_t *bytes);

/* Device pointers: dy is as Y, x as X, dw as W, db as B, or null where it is not wanted; with it a filter has one element less than
 * the most. dy is aligned to 16 bytes. dw and db overlap no input. Runs on `stream` (a cudaStream_t; null: the default stream) of
 * the current device. */
CONVPOOL_API convpool_status convpool_weight_gradient(const convpool_problem *problem, const void *dy, const void *x, void *dw,
                                                      void *db, void *workspace, size_t workspace_bytes, void *stream);

/* The weights of a transposed convolution as those of a plain one, and back: out[c,taps-1-k,m] = factor * w[m,k,c]. m, c and taps
 * are at most 65535; dtype is F16, BF16 or F32. Device pointers that do not overlap; stream as above. */
CONVPOOL_API convpool_status convpool_turn_weights(const void *w, void *out, int64_t m, int64_t c, int64_t taps, int32_t dtype,
                                                   float factor, void *stream);

/* Spectral normalization (Miyato et al., ICLR 2018) of weights W [m, taps, c] in memory, as PyTorch does it in training with one step
 * of the power iteration. With W as a matrix of m rows, and normalize(x) = x / max(|x|, epsilon):
 *
 *     u_first:  u = normalize(W v), v = normalize(W^T u)    else: v = normalize(W^T u), u = normalize(W v)
 *     out = W / sigma,  sigma = u^T W v
 *
 * All are of one dtype, F16, BF16 or F32; sums are in fp32. */
typedef struct {
    const void *w;         /* aligned to 16 bytes, as dy and out are; m * taps * c is a multiple of 4 */
    const void *dy;        /* of the adjoint: the gradient at `out`, in W's order */
    void *last_u, *last_v; /* [m] and [c, taps], the vectors of the step before: replaced by u and v; the adjoint reads none */
    void *out;             /* as W; of the adjoint: the gradient at W, u and v being constants */
    void *kept;            /* m + taps * c + 1 floats, which the adjoint reads */
    int32_t m, c, taps;    /* m * taps * c is below 2^31 */
    int32_t reserved;      /* zero */
} convpool_spectral_weight;

/* `weights` is host memory, read before the call returns; all else are device pointers that do not overlap. sums: workspace of the
 * adjoint, a float for each 8192 elements of each weight and for a rest. Both run on `stream` (a cudaStream_t; null: the default
 * stream) of the current device. */
CONVPOOL_API convpool_status convpool_spectral_norm(const convpool_spectral_weight *weights, int32_t count, int32_t dtype,
                                                    int32_t u_first, float epsilon, void *stream);
CONVPOOL_API convpool_status convpool_spectral_norm_adjoint(const convpool_spectral_weight *weights, int32_t count, int32_t dtype,
                                                            void *sums, void *stream);

#ifdef __cplusplus
}
#endif

#endif /* CONVPOOL_H_ */

// The direct_fused tactics by TMA of tactics.def in this precision.
#include "../launch.h"
#include "families/direct_tma/kernel.cuh"

#define CONVPOOL_ROW(...)
#define CONVPOOL_TMA_ROW(precision, ...) CONVPOOL_TMA_##precision(__VA_ARGS__)
#define CONVPOOL_TMA_F16(...)
#define CONVPOOL_TMA_BF16(...)
#define CONVPOOL_TMA_TF32(id, ...) \
    case id: return direct_tma_kernel_of<DirectTmaConfig<Precision::kTF32, __VA_ARGS__>>(prologue);

namespace convpool {

const void *direct_tma_kernel_tf32(int id, bool prologue) {
    switch (id) {
#include "../tactics.def"
    default: return nullptr;
    }
}

}  // namespace convpool

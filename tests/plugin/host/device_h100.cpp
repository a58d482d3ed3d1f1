// An H100 as convpool_device would describe it.
#include <convpool.h>

extern "C" convpool_status __wrap_convpool_device(int32_t *cc, int32_t *multiprocessors, int32_t *shared_bytes) {
    if (cc != nullptr) *cc = 90;
    if (multiprocessors != nullptr) *multiprocessors = 132;
    if (shared_bytes != nullptr) *shared_bytes = 232448;
    return CONVPOOL_OK;
}

// What the pretended CUDA runtime has seen.
#pragma once

#include <cstdint>

extern "C" {
__attribute__((visibility("default"))) int64_t pretended_launches();
__attribute__((visibility("default"))) int64_t pretended_bytes();  // of device memory that is taken
}

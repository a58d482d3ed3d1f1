// SPDX-License-Identifier: Apache-2.0
// The mean of a pooling window from its sum.
#pragma once

#include "core/params.h"
#include "kernels/ptx/device.cuh"

namespace convpool {

// sum / count to within a rounding of fp32, so that a sum that is a multiple of count gives an integer.
CONVPOOL_DEVICE float mean_of(float sum, const BoxMean &box) {
    float q = sum * box.inverse_count;
    if (!box.count_is_power_of_two) {
        float fixed = fmaf(fmaf(-q, box.count, sum), box.inverse_count, q);
        q = isfinite(q) ? fixed : q;
    }
    return q;
}

}  // namespace convpool

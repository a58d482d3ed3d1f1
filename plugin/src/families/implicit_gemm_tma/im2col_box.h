// SPDX-License-Identifier: Apache-2.0
// The convolutions whose windows TMA walks over in im2col mode.
#pragma once

#include <string>

#include "core/launch.h"

namespace convpool::implicit_gemm_tma {

// Where the windows of a convolution start and end. Empty, or the reason why TMA cannot walk over them: for a tensor of rank 4,
// the driver has 8 bits for every corner and offset.
inline std::string find_box(const Shape2d &s, const Tactic &tactic, Im2colBox &box) {
    struct Axis {
        int64_t size, out, kernel, stride, dilation, pad;
    };
    const Axis axes[] = {{s.w, s.out_w, s.kw, s.stride_w, s.dilation_w, s.pad_w},
                         {s.h, s.out_h, s.kh, s.stride_h, s.dilation_h, s.pad_h}};
    for (int i = 0; i < 2; ++i) {
        const auto &[size, out, kernel, stride, dilation, pad] = axes[i];
        const int64_t step = out > 1 ? stride : 1, last = (out - 1) * stride - pad;  // where the last window starts
        struct Limit {
            const char *name;
            int64_t value, least, most;
        };
        for (auto [name, value, least, most] : {Limit{"stride", step, 1, 8},
                                                {"pixels from a window's first tap to its last", (kernel - 1) * dilation, 0, 255},
                                                {"padding before the first pixel", pad, 0, 128},
                                                {"last window's start from the last pixel on", last + 1 - size, -128, 127}})
            if (value < least || value > most)
                return refusal(tactic, std::string(name) + (i == 0 ? ", in width" : ", in height"), value,
                               std::to_string(least) + " to " + std::to_string(most), "use a tactic without im2col");
        box.lower[i] = static_cast<int32_t>(-pad);
        box.upper[i] = static_cast<int32_t>(last + 1 - size);
        box.strides[i] = static_cast<uint32_t>(step);
    }
    return {};
}

}  // namespace convpool::implicit_gemm_tma

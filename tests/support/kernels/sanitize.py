# SPDX-License-Identifier: Apache-2.0
"""Runs every tactic that this GPU has on a few small cases, for compute-sanitizer to watch (sanitize.sh).

    python -m tests.support.kernels.sanitize [PART PARTS]

Given PART and PARTS, it runs every PARTS-th tactic from number PART on.
"""

import sys

import pycuda.autoinit

from convpool.cuda import tactics
from tests.support.kernels import conv_cases, tactic_checks

SMALL = [
    conv_cases.rewritten(2, 40, 72, (9, 9), 3, 2, pads=1, bias=True, residual=True, activation="relu"),
    conv_cases.rewritten(1, 3, 17, (19, 21), 5, 3, pads=2),
    conv_cases.rewritten(1, 264, 24, (16, 16), 3, 2, pads=1, bias=True),
    conv_cases.rewritten(2, 24, 24, (8, 8), 1, 2),
    conv_cases.rewritten(2, 3, 72, (17, 19), 3, 1, pads=1, bias=True, activation="relu"),
    conv_cases.rewritten(2, 3, 72, (17, 19), 2, 2, pads=1, residual=True),
    dict(n=2, c=72, m=40, spatial=(9, 12), kernel_shape=3, pool_kernel_shape=1, pads=1, prologue_activation="relu"),
    *(
        conv_cases.rewritten(2, 40, 72, (19, 18), kernel, 2, pads=kernel // 2, prologue_affine=True, prologue_activation="relu")
        for kernel in (1, 3)
    ),
    dict(n=3, c=72, m=96, spatial=(9, 11), kernel_shape=3, pool_kernel_shape=1, pads=1, upsample=2, bias=True, residual=True),
    # Copied to Y where that has the channels last, and more tiles than multiprocessors: for even and for odd ids of tactics.
    *(
        dict(n=75, c=8, m=72, spatial=(5, columns), kernel_shape=3, pool_kernel_shape=1, pads=1, upsample=2, bias=True)
        for columns in (12, 16)
    ),
    dict(n=2, c=136, m=24, spatial=(5, 6), kernel_shape=2, pool_kernel_shape=1, upsample=(3, 2), prologue_activation="relu"),
]

if __name__ == "__main__":
    tactic_checks.CASES[:] = SMALL
    major, minor = pycuda.autoinit.device.compute_capability()
    part, parts = map(int, sys.argv[1:] or (0, 1))
    runs = 0
    for tactic in tactics()[part::parts]:
        if 10 * major + minor < tactic.min_cc:
            continue
        for index in range(len(SMALL)):
            for dtype in [tactic.dtype] if tactic.dtype else tactic_checks.NUMPY_TYPES:
                layout = "NCHW" if "_nchw" in tactic.name or (index + tactic.id) % 2 == 0 else "NHWC"
                runs += tactic_checks.check(index, tactic, dtype, layout, tactic_checks.INTEGER)
                runs += dtype != "float32" and tactic_checks.check_float_image(index, tactic, dtype, layout)
    print(f"{runs} checked runs")
    sys.exit(0 if runs > 100 / parts else 1)

# SPDX-License-Identifier: Apache-2.0
"""Builds every form of a layer with TensorRT-RTX, whose builder needs no GPU; prints the engines' sizes as JSON.

A program of its own, since a failed build may end it.
"""

import json
import sys

import numpy as np
import tensorrt_rtx_bindings as trt

from benchmarks.layers.rows import LAYOUTS, Row
from benchmarks.layers.tensorrt_worker import build, fuse
from tests.support.rtx import for_ampere_and_later

TYPES = {"fp16": np.float16, "tf32": np.float32, "fp32": np.float32}


class Builder(trt.Builder):
    """A builder that does not ask for this machine's GPU."""

    def create_builder_config(self):
        config = super().create_builder_config()
        for_ampere_and_later(config)
        return config


def main() -> None:
    trt.Builder = Builder
    sizes = {}
    for row in (Row(2, 16, 24, 8, 10), Row(2, 16, 24, 9, 9, kernel=1, pad=0)):
        w = np.random.default_rng(0).standard_normal((row.m, row.c, row.kernel, row.kernel))
        for precision, dtype in TYPES.items():
            for layout in LAYOUTS if row.kernel > 1 else LAYOUTS[:1]:
                for form in ("naive", "fused", "direct"):
                    used = np.ascontiguousarray((fuse(w, row) if form == "fused" else w).astype(dtype))
                    plan = build(trt, row, form, precision, layout, used, 3)
                    sizes[f"{row.kernel} {precision} {layout} {form}"] = len(plan)
    json.dump(sizes, sys.stdout)


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""What of a model goes to the plugin, by precision, TensorRT's version and the GPU."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from convpool.cuda import current_device
from convpool.errors import ConvpoolError
from convpool.tensorrt.build_options import BuildOptions
from convpool.tensorrt.package import parser_major, tensorrt_module
from convpool.tensorrt.profiles import typical_shapes

STEM_MIN_CC = 80
"""Least compute capability, 10 * major + minor, of the plugin's kernel for few channels."""
PLAIN_CONV_CC = 90
"""The compute capability for which the plugin's kernels for plain convolutions are made."""
OFFLOAD_BEFORE = 10
"""The first major version of TensorRT that keeps all convolutions without a pooling.

Its own kernels differ from those of 8.6, and nothing was measured against them.
"""


def default_lowering(precision: str, plugin: bool) -> str:
    """The lowering where none is asked for: "convavgpool" with the plugin, "auto" without it, "fused" in "tf32".

    TensorRT 8.6 keeps float tensors channels first between its own layers and the plugin's.  In TF32, fused convolutions of
    3x3 pairs are as fast as the plugin then, or faster: docs/tensorrt.md.  1x1 pairs have no fused form that saves anything,
    so they stay as they are.
    """
    if not plugin:
        return "auto"
    return "fused" if precision == "tf32" else "convavgpool"


def offloaded_convs(options: BuildOptions, trt: ModuleType | None = None) -> dict[str, bool]:
    """Which convolutions without a pooling the plugin runs: `stem` and `plain_conv` of `convpool.optimize`.

    The options must allow a kind.  The plugin then runs it in half precision with TensorRT 8.6 or 9 only:

    - stem on GPUs from compute capability 8.0 on, and where the GPU is unknown;
    - plain_conv on GPUs of compute capability 9.0.  libconvpool.so is asked which GPU there is.
    """
    none = {"stem": False, "plain_conv": False}
    if not options.plugin or not options.in_half_precision:
        return none
    if parser_major(trt or options.trt or tensorrt_module()) >= OFFLOAD_BEFORE:
        return none
    try:
        cc = current_device()["cc"]
    except ConvpoolError:  # no GPU, or no libconvpool.so to ask
        return {"stem": options.stem, "plain_conv": False}
    return {"stem": options.stem and cc >= STEM_MIN_CC, "plain_conv": options.plain_conv and cc == PLAIN_CONV_CC}


def optimize_keywords(options: BuildOptions, trt: ModuleType) -> dict[str, Any]:
    """The arguments of `convpool.optimize` that decide what of the model goes to the plugin."""
    return {"target": "tensorrt", "input_shapes": typical_shapes(options.profile_list), **offloaded_convs(options, trt)}

# SPDX-License-Identifier: Apache-2.0
"""The nodes that go to the plugin, by precision, TensorRT's version and the GPU."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from types import ModuleType
from typing import Any

from convpool.cuda import current_device
from convpool.errors import ConvpoolError
from convpool.ir.model import LoadedModel
from convpool.ir.protos import all_nodes, is_op
from convpool.options import PASS_OF_SWITCH
from convpool.tensorrt import prepare
from convpool.tensorrt.build_options import HALF_PRECISIONS, BuildOptions, Profile
from convpool.tensorrt.package import parser_major, tensorrt_module

STEM_MIN_CC = 80
"""Least compute capability, 10 * major + minor, of the plugin's kernel for few channels."""
PLAIN_CONV_CC = 90
"""The compute capability for which the plugin's kernels for plain convolutions are made."""
OFFLOADING = (*HALF_PRECISIONS, "tf32")
"""Precisions in which the plugin also runs convolutions without a pooling."""
OFFLOAD_BEFORE = 10
"""The first major version of TensorRT that keeps all convolutions without a pooling.

Its own kernels differ from those of 8.6, and nothing was measured against them.
"""


def default_lowering(model: LoadedModel, options: BuildOptions, trt: ModuleType | None = None) -> str:
    """The lowering where none is asked for: "convavgpool" with the plugin, "auto" without it.

    In "tf32" with the plugin it is "fused", unless the plugin runs at least half of the convolutions.  TensorRT 8.6 keeps
    float tensors channels first around convolutions of its own.  Between those, fused convolutions of 3x3 pairs are as fast as
    the plugin, or faster: docs/decisions/016.  1x1 pairs have no fused form that saves anything, so they stay as they are.
    """
    if not options.plugin:
        return "auto"
    if options.precision != "tf32":
        return "convavgpool"
    trt = trt or options.trt or tensorrt_module()
    if not offloaded_convs(options, trt)["plain_conv"]:
        return "fused"
    made = prepare.lowered(model, "convavgpool", **optimize_keywords(options, trt))
    nodes = list(all_nodes(made.graph))
    left = sum(is_op(node, "Conv", "ConvTranspose") for node in nodes)
    return "convavgpool" if left <= sum(map(prepare.is_plugin_node, nodes)) else "fused"


def offloaded_convs(options: BuildOptions, trt: ModuleType | None = None) -> dict[str, bool]:
    """Which convolutions without a pooling the plugin runs: `stem` and `plain_conv` of `convpool.optimize`.

    The options must allow a kind.  The plugin then runs it in half precision and TF32 with TensorRT 8.6 or 9 only:

    - plain_conv on GPUs of compute capability 9.0, and in half precision norm_conv beside it.  libconvpool.so is asked which GPU
      there is.
    - stem in half precision on GPUs from compute capability 8.0 on, and where the GPU is unknown; in TF32 beside plain_conv.
    """
    none = {"stem": False, "plain_conv": False}
    if not options.plugin or options.precision not in OFFLOADING:
        return none
    if parser_major(trt or options.trt or tensorrt_module()) >= OFFLOAD_BEFORE:
        return none
    try:
        cc = current_device()["cc"]
    except ConvpoolError:  # no GPU, or no libconvpool.so to ask
        return {"stem": options.stem and options.in_half_precision, "plain_conv": False}
    plain = options.plain_conv and cc == PLAIN_CONV_CC
    return {"stem": options.stem and (cc >= STEM_MIN_CC if options.in_half_precision else plain), "plain_conv": plain}


def optimize_keywords(options: BuildOptions, trt: ModuleType) -> dict[str, Any]:
    """The arguments of `convpool.optimize` that decide what of the model goes to the plugin."""
    taken = offloaded_convs(options, trt)
    offloaded = {
        verb: [PASS_OF_SWITCH[name] for name, value in taken.items() if value == wanted]
        for verb, wanted in (("enable", True), ("disable", False))
    }
    if taken["plain_conv"] and not options.in_half_precision:
        offloaded["disable"].append("norm_conv")  # in TF32 nothing was measured
    return {"target": "tensorrt", "input_shapes": typical_shapes(options.profile_list), **offloaded}


def typical_shapes(profiles: Sequence[Profile]) -> dict[str, list[int]]:
    """The first profile's typical shapes.  Unusable ones are left out here; `builder.add_profiles` refuses them."""
    first = next(iter(profiles), {})
    shapes = {name: list(three[1]) for name, three in first.items() if len(three) == 3}
    whole = {name: shape for name, shape in shapes.items() if all(isinstance(d, Integral) and d >= 1 for d in shape)}
    return {name: [int(d) for d in shape] for name, shape in whole.items()}

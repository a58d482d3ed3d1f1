# SPDX-License-Identifier: Apache-2.0
"""TensorRT's network of a model: parsed, with its last layers kept in float32."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from onnx import ModelProto

from convpool.errors import ModelError
from convpool.tensorrt import prepare
from convpool.tensorrt.package import is_weakly_typed, logger

MAX_HEAD_MACS = 2**28
"""Most multiply-adds of a matrix product that stays in float32 in half precision: a classifier's, not VGG's first."""


@dataclass(frozen=True)
class ParsedNetwork:
    """A network and its parser.  The network's weights are the parser's, so the parser has to outlive the network."""

    network: Any
    parser: Any


def parse(trt: ModuleType, builder: Any, model: ModelProto) -> ParsedNetwork:
    """The network of a model.  Raises ModelError with TensorRT's own messages."""
    log = logger(trt)
    network = builder.create_network(_network_flags(trt))
    parser = trt.OnnxParser(network, log)
    if not parser.parse(prepare.serialized(model)):
        errors = "; ".join(parser.get_error(i).desc() for i in range(parser.num_errors))
        raise ModelError(f"TensorRT {trt.__version__} cannot read the model; got {log.explain(errors)}")
    return ParsedNetwork(network, parser)


def _network_flags(trt: ModuleType) -> int:
    flags = trt.NetworkDefinitionCreationFlag
    if is_weakly_typed(trt):
        return 1 << int(flags.EXPLICIT_BATCH)
    return 1 << int(flags.STRONGLY_TYPED) if hasattr(flags, "STRONGLY_TYPED") else 0


def keep_heads_in_float(trt: ModuleType, network: Any, config: Any) -> None:
    """Compute sums over whole maps, and small matrix products of vectors, in float32.

    They take next to no time.  TensorRT 8.6 sometimes adds them up in half precision, and most of an engine's error comes
    from there then.
    """
    kinds = (trt.LayerType.REDUCE, trt.LayerType.MATRIX_MULTIPLY)
    for layer in (network.get_layer(index) for index in range(network.num_layers)):
        if layer.type not in kinds or layer.get_output(0).dtype not in (trt.float32, trt.float16):
            continue
        product = layer.type == trt.LayerType.MATRIX_MULTIPLY
        output, *inputs = (
            _shape(tensor) for tensor in (layer.get_output(0), *(layer.get_input(i) for i in range(2 if product else 1)))
        )
        if output is None or None in inputs or any(dim != 1 for dim in output[2:]):
            continue
        # Each of a product's three sizes stands in two of the three shapes; an open one, -1, counts as 1.
        sizes = [size for shape in (output, *inputs) for size in shape or ()]
        if product and math.isqrt(abs(math.prod(sizes))) > MAX_HEAD_MACS:
            continue
        layer.precision = trt.float32
        config.set_flag(trt.BuilderFlag.PREFER_PRECISION_CONSTRAINTS)


def _shape(tensor: Any) -> tuple[int, ...] | None:
    """Sizes, -1 where they are open; None where even the rank is."""
    try:
        return tuple(tensor.shape)
    except ValueError:
        return None

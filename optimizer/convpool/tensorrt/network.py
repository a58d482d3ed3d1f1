# SPDX-License-Identifier: Apache-2.0
"""TensorRT's network of a model: parsed, with its last layers kept in float32; and the shapes that its open inputs may have."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from types import ModuleType
from typing import Any

from onnx import ModelProto

from convpool.errors import ModelError, OptionError
from convpool.tensorrt import prepare
from convpool.tensorrt.build_options import Profile
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
        given = (layer.get_input(i) for i in range(2 if product else 1))
        output, *inputs = map(_shape, (layer.get_output(0), *given))
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


def typical_shapes(profiles: Sequence[Profile]) -> dict[str, list[int]]:
    """The first profile's typical shapes.  Unusable ones are left out here; `add_profiles` refuses them."""
    first = next(iter(profiles), {})
    shapes = {name: list(three[1]) for name, three in first.items() if len(three) == 3}
    whole = {name: shape for name, shape in shapes.items() if all(isinstance(d, Integral) and d >= 1 for d in shape)}
    return {name: [int(d) for d in shape] for name, shape in whole.items()}


def add_profiles(builder: Any, config: Any, network: Any, profiles: Sequence[Profile]) -> None:
    """Give the config a profile of the network's open inputs for each one given.

    Profiles may name inputs that are not open: their shapes are checked too, since a shape that an input cannot have is a
    mistake.  Raises OptionError.
    """
    inputs = {network.get_input(i).name: tuple(network.get_input(i).shape) for i in range(network.num_inputs)}
    open_inputs = [name for name, shape in inputs.items() if -1 in shape]
    for profile in profiles:
        for name, shapes in profile.items():
            if name not in inputs:
                raise OptionError(f"profile: no input '{name}'; expected {', '.join(inputs)}")
            _check_shapes(name, inputs[name], shapes)
    if open_inputs and not profiles:
        raise OptionError(
            f"profile: input '{open_inputs[0]}' has the open shape {list(inputs[open_inputs[0]])}; "
            "give its smallest, typical and largest shape"
        )
    for profile in profiles if open_inputs else []:
        made = builder.create_optimization_profile()
        for name in open_inputs:
            if name not in profile:
                raise OptionError(f"profile: no shapes for input '{name}', which is open: {list(inputs[name])}")
            made.set_shape(name, *(tuple(map(int, shape)) for shape in profile[name]))
        config.add_optimization_profile(made)


def _check_shapes(name: str, dims: tuple[int, ...], shapes: Sequence[Sequence[int]]) -> None:
    if len(shapes) != 3:
        raise OptionError(f"profile: input '{name}'; got {len(shapes)} shapes, expected its smallest, typical and largest")
    for shape in shapes:
        if len(shape) != len(dims) or any(d not in (-1, s) or s < 0 for d, s in zip(dims, shape, strict=True)):
            raise OptionError(f"profile: input '{name}'; got {list(shape)}, expected {list(dims)} with -1 replaced")
    if not all(low <= middle <= high for low, middle, high in zip(*shapes, strict=True)):
        raise OptionError(
            f"profile: input '{name}'; got {' / '.join(str(list(shape)) for shape in shapes)}, expected "
            "smallest <= typical <= largest"
        )

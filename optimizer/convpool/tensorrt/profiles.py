# SPDX-License-Identifier: Apache-2.0
"""Optimization profiles: the shapes that an engine with open inputs is built for."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any

from convpool.errors import OptionError
from convpool.tensorrt.build_options import Profile


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

# SPDX-License-Identifier: Apache-2.0
"""What the arguments of `convpool.optimize` and `convpool.verify` may be."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

from convpool.errors import OptionError


def check_arguments(**given: Any) -> None:
    """Raise OptionError for an argument of another type, or a number out of its range, named as `optimize` names it."""
    for name, value in given.items():
        fits, expected = _ARGUMENTS[name]
        optional = name not in ("check", "seed", "exclude", "enable", "disable", "autotune")
        if not (optional and value is None or fits(value)):
            raise OptionError(f"{name}: got {value!r}, expected {expected}")


def _is_count(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 0


def _is_tolerance(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and float(value) >= 0  # which NaN is not


def _are_names(value: object) -> bool:
    if isinstance(value, (str, Iterator)):  # an iterator can be read once only
        return True
    return isinstance(value, Iterable) and all(isinstance(name, str) for name in value)


def _are_shapes(value: object) -> bool:
    return isinstance(value, Mapping) and all(isinstance(name, str) and isinstance(v, Sequence) for name, v in value.items())


_ARGUMENTS: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(("check", "seed"), (_is_count, "0 or more")),
    **dict.fromkeys(("rtol", "atol"), (_is_tolerance, "a number of at least 0")),
    **dict.fromkeys(("exclude", "enable", "disable"), (_are_names, "a string, or several")),
    **dict.fromkeys(
        ("fuse_pool_conv", "stem", "plain_conv", "prologue", "epilogue", "concat", "fold", "autotune", "time"),
        (lambda value: isinstance(value, bool), "True or False"),
    ),
    **dict.fromkeys(("input_shapes", "fix_shapes"), (_are_shapes, "sizes by name, as {'x': [1, 3, 224, 224]}")),
    "base_dir": (lambda value: isinstance(value, (str, os.PathLike)), "a folder"),
    "progress": (callable, "a function"),
}

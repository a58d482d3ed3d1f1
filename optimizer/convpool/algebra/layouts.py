# SPDX-License-Identifier: Apache-2.0
"""Where the channels of an operator's tensors stand: behind the batch, as in ONNX's Conv, or last, as the kernels read them."""

from __future__ import annotations

LAYOUTS = {0: (False, False), 1: (True, True), 2: (False, True), 3: (True, False)}
"""Whether X, and whether R and Y, have the channels last, by the attribute channels_last."""


def number_of(x_last: bool, y_last: bool) -> int:
    """The attribute channels_last of a node."""
    return next(number for number, layout in LAYOUTS.items() if layout == (x_last, y_last))


def to_channels_last(rank: int) -> list[int]:
    """The permutation from [N, C, spatial...] to [N, spatial..., C] for `rank` spatial axes."""
    return [0, *range(2, rank + 2), 1]


def to_channels_first(rank: int) -> list[int]:
    """The inverse of `to_channels_last`."""
    return [0, rank + 1, *range(1, rank + 1)]


def function_perms(channels_last: int, rank: int, residual: bool) -> dict[str, list[int]]:
    """The attributes by which the operator's function permutes tensors around its channels-first body."""
    x_last, y_last = LAYOUTS[channels_last]
    same, first, last = list(range(rank + 2)), to_channels_first(rank), to_channels_last(rank)
    perms = {"x_perm": first if x_last else same, "y_perm": last if y_last else same}
    return perms | ({"r_perm": first if y_last else same} if residual else {})

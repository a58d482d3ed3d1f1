# SPDX-License-Identifier: Apache-2.0
"""Spatial sizes of tensors: as inferred, and by how they came about."""

from __future__ import annotations

from convpool.algebra.geometry import Ints
from convpool.ir.index import Scope


def spatial_size(scope: Scope, tensor: str, rank: int, first_axis: int = 2) -> Ints | None:
    """Static spatial sizes of a tensor, None where any is unknown.  first_axis: 1 where the channels stand last."""
    shape = scope.info(tensor).shape
    if shape is None or len(shape) != rank + 2:
        return None
    size = tuple(dim for dim in shape[first_axis : first_axis + rank] if isinstance(dim, int))
    return size if len(size) == rank else None

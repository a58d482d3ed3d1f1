# SPDX-License-Identifier: Apache-2.0
"""What a model must keep to before anything else looks at it.

onnx's checker and the runtimes are written in C++; what they make of a damaged file differs from version to version, up to a
crash.  Whatever can be told without them is refused here.
"""

from __future__ import annotations

import math

from onnx import ModelProto, TensorProto, helper

from convpool.errors import ModelError
from convpool.ir.external import is_external, tensor_bytes
from convpool.ir.protos import tensors


def check_tensors(model: ModelProto) -> None:
    """Raise ModelError for a stored tensor of an unknown type, or whose data does not fill its shape."""
    for tensor in tensors(model):
        needed = tensor_bytes(tensor)
        if is_external(tensor):
            continue
        where = f"tensor '{tensor.name}'"
        if tensor.HasField("raw_data"):
            if needed is None or len(tensor.raw_data) != needed:
                expected = "strings" if needed is None else f"{needed} for {list(tensor.dims)}"
                raise ModelError(f"{where}: data; got {len(tensor.raw_data)} bytes, expected {expected}")
            continue
        elements, count = math.prod(tensor.dims), len(getattr(tensor, helper.tensor_dtype_to_field(tensor.data_type)))
        if count != _stored(tensor.data_type, elements, needed):
            raise ModelError(f"{where}: data; got {count} stored values, expected {elements} for {list(tensor.dims)}")


def _stored(data_type: int, elements: int, needed: int | None) -> int:
    """How many values of its field hold so many elements: two of a complex number, one of several narrow ones."""
    if data_type in (TensorProto.COMPLEX64, TensorProto.COMPLEX128):
        return 2 * elements
    return min(elements, needed) if needed is not None else elements

# SPDX-License-Identifier: Apache-2.0
"""Files around a model: written whole or not at all, and external data checked, placed and added to.

External data stays where it is while a model is worked on; only tensors asked for are read.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np
import onnx
from onnx import ModelProto, TensorProto
from onnx.external_data_helper import ExternalDataInfo, set_external_data

from convpool.errors import ModelError, OutputError, first_line
from convpool.ir.protos import tensors

EXTERNAL_THRESHOLD_BYTES = 1024
"""New weights of at least this size go to an external file where the model keeps its weights in such files."""


def check_output(path: Path, others: Mapping[str, Iterable[Path]] | None = None) -> None:
    """Raise OutputError for a path in no folder, of a folder, or of one of `others`, files by what they are."""
    if not path.parent.is_dir():
        raise OutputError(f"{path}: no folder {str(path.parent)!r}; make it first")
    if path.is_dir():
        raise OutputError(f"{path}: a folder; expected a file name")
    for what, files in (others or {}).items():
        if path.resolve() in {file.resolve() for file in files}:
            raise OutputError(f"{path}: {what}, which would be overwritten; give another file name")


def write_atomically(out: Path, data: bytes) -> None:
    """Write a file so that it is there whole or not at all; a device or pipe is just written to.  Raises OSError."""
    if out.exists() and not out.is_file():
        out.write_bytes(data)
        return
    handle, name = tempfile.mkstemp(dir=out.parent, prefix=f".{out.name}.", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask)
        os.replace(name, out)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise


def check_external_data(model: ModelProto, base_dir: Path | None) -> frozenset[str]:
    """The locations of the model's external data, each inside `base_dir` and large enough.  Raises ModelError."""
    sizes: dict[str, int] = {}
    for tensor in tensors(model):
        if tensor.data_location != TensorProto.EXTERNAL:
            continue
        where = f"tensor '{tensor.name}'"
        try:
            info = ExternalDataInfo(tensor)
        except ValueError as error:
            raise ModelError(f"{where}: external data; {first_line(error)}") from error
        if base_dir is None:
            raise ModelError(f"{where}: external data of a model without a folder; give a path, or base_dir")
        if not info.location:
            raise ModelError(f"{where}: external data without a location")
        if info.location not in sizes:
            sizes[info.location] = _external_size(where, base_dir, info.location)
        offset, size = int(info.offset or 0), sizes[info.location]
        needed = _tensor_bytes(tensor)
        length = int(info.length) if info.length else needed
        if length != needed or offset < 0 or offset + length > size:
            raise ModelError(
                f"{where}: external data {info.location!r}; got {length} bytes at {offset} of {size}, expected {needed}"
            )
    return frozenset(sizes)


def _locations(model: ModelProto) -> frozenset[str]:
    external = (tensor for tensor in tensors(model) if tensor.data_location == TensorProto.EXTERNAL)
    return frozenset(ExternalDataInfo(tensor).location for tensor in external)


def _external_size(where: str, base_dir: Path, location: str) -> int:
    path = (base_dir / location).resolve()
    if os.path.isabs(location) or not path.is_relative_to(base_dir.resolve()):
        raise ModelError(f"{where}: external data {location!r} lies outside the model's folder")
    if not path.is_file():
        raise ModelError(f"{where}: external data file {location!r} is missing")
    return path.stat().st_size


def _tensor_bytes(tensor: TensorProto) -> int:
    count = int(np.prod(tensor.dims, dtype=np.int64))
    name = TensorProto.DataType.Name(tensor.data_type)
    bits = {"INT4": 4, "UINT4": 4, "FLOAT4E2M1": 4, "INT2": 2, "UINT2": 2}.get(name)
    if bits:
        return -(-count * bits // 8)
    return count * onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize


def place_external_data(model: ModelProto, base_dir: Path, out: Path, created: list[Path]) -> None:
    """Have every data file that the model refers to beside `out`; adapt locations where names are taken."""
    folder = out.resolve().parent
    if folder == base_dir.resolve():
        return
    places: dict[str, str] = {}
    for tensor in tensors(model):
        if tensor.data_location != TensorProto.EXTERNAL:
            continue
        location = ExternalDataInfo(tensor).location
        if location not in places:
            places[location] = _place_file((base_dir / location).resolve(), folder, location, out.stem, created)
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = places[location]


def _place_file(source: Path, folder: Path, location: str, stem: str, created: list[Path]) -> str:
    target, wanted, number = folder / location, Path(location).name, 0
    while target.exists():
        if _same_content(source, target):
            return location
        number += 1
        location = f"{stem}-{number}-{wanted}"
        target = folder / location
    for parent in reversed(target.relative_to(folder).parents):
        if not (folder / parent).exists():
            (folder / parent).mkdir()
            created.append(folder / parent)
    created.append(target)
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
    return location


def _same_content(first: Path, second: Path) -> bool:
    """Whether two files are one, or one the copy that `_place_file` made of the other."""
    a, b = first.stat(), second.stat()
    return os.path.samestat(a, b) or (a.st_size, a.st_mtime_ns) == (b.st_size, b.st_mtime_ns)


def move_to_external(model: ModelProto, names: set[str], out: Path, taken: frozenset[str], created: list[Path]) -> None:
    """Write the constants `names` to a data file of `out`'s name, but none in `taken`, and refer to it."""
    moving = [tensor for tensor in tensors(model) if tensor.name in names and len(tensor.raw_data) >= EXTERNAL_THRESHOLD_BYTES]
    if not moving:
        return
    location, number = f"{out.name}.data", 0
    while location in taken or location in _locations(model):
        number += 1
        location = f"{out.name}.{number}.data"
    data = b"".join(tensor.raw_data for tensor in moving)
    path = out.parent / location
    if not path.exists():
        created.append(path)
    write_atomically(path, data)
    offset = 0
    for tensor in moving:
        length = len(tensor.raw_data)
        set_external_data(tensor, location, offset, length)
        tensor.ClearField("raw_data")
        offset += length

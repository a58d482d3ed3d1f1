# SPDX-License-Identifier: Apache-2.0
"""Files: those that a command writes, and those that hold a model's weights.

A file to be written is checked before any work, and then there whole or not at all.  External data are checked before anything
reads them, and read one tensor at a time.  They are read here and not by onnx, whose readers differ from version to version in
what they refuse and in how they say so."""

from __future__ import annotations

import errno
import os
import secrets
import shlex
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import onnx
from onnx import ModelProto, TensorProto
from onnx.external_data_helper import load_external_data_for_tensor

from convpool.errors import ModelError, OutputError, first_line
from convpool.ir.protos import sparse_values, tensors

ROOM_BYTES = 15
"""Extra length of the names of files that are made beside an output."""


def check_output(path: Path, others: Mapping[str, Iterable[Path]] | None = None) -> None:
    """Raise OutputError for a path in no folder, of a folder or read-only file, or of one of `others`, files by what they are.
    And for one that is too long for the names of the files beside it, which are longer, or that is another name of an open file,
    as /dev/stderr: to replace it would change the system."""
    try:
        os.lstat(_part(path.parent, path.name))
    except ValueError as error:
        raise OutputError(f"{str(path)!r}: no file name; got {error}, expected none") from error
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            room = f"expected room for a name of {ROOM_BYTES} bytes more"
            raise OutputError(f"{path}: cannot be written; {error.strerror}, {room}; give a shorter one") from error
    if not os.path.isdir(path.parent):
        raise OutputError(f"{path}: no folder {str(path.parent)!r}; make it first")
    if os.path.isdir(path):
        raise OutputError(f"{path}: a folder; expected a file name")
    folder = os.path.realpath(path.parent)
    if (folder == "/dev" or folder.startswith("/proc/")) and (os.path.isfile(path) or not os.path.exists(path)):
        raise OutputError(f"{path}: in a folder of devices and open files; expected another file name, or - for stdout")
    if os.path.isfile(path) and not (path.stat().st_mode & 0o222 and os.access(path, os.W_OK)):
        raise OutputError(f"{path}: a read-only file; give another name, or allow writing with chmod u+w")
    for what, files in (others or {}).items():
        if os.path.realpath(path) in map(os.path.realpath, files):  # Path.resolve raises errors for links in a circle
            raise OutputError(f"{path}: {what}, which would be overwritten; give another file name")


@dataclass(frozen=True)
class NewFile:
    """A file that is written under a name of its own until it is whole."""

    file: IO[bytes]
    path: Path

    def settle(self, target: Path) -> None:
        """Give it its name, in place of the file of that name: permissions stay, and owner and extended attributes where that is
        allowed, as they do for a program that writes into the file.  Raises OSError."""
        self.file.flush()
        if self.path == target:  # a device or pipe
            return
        os.fsync(self.file.fileno())
        if target.exists():
            status = target.stat()
            with suppress(OSError):
                os.chown(self.path, status.st_uid, status.st_gid)
            for name in os.listxattr(target) if hasattr(os, "listxattr") else ():
                with suppress(OSError):
                    os.setxattr(self.path, name, os.getxattr(target, name))
            os.chmod(self.path, stat.S_IMODE(status.st_mode))
        os.replace(self.path, target)

    @property
    def settled(self) -> bool:
        """True if it has its name; certain also if interrupted right after the renaming."""
        return not os.path.lexists(self.path)


@contextmanager
def unfinished(folder: Path, name: str, mode: int = 0o666) -> Iterator[NewFile]:
    """A new file in `folder` to write to, gone at the end unless it was settled.  Raises OSError."""
    path = _part(folder, name)
    try:
        with open(path, "xb", opener=lambda path, flags: os.open(path, flags, mode)) as file:
            yield NewFile(file, path)
    finally:
        with suppress(OSError):
            os.unlink(path)


@contextmanager
def replacing(out: Path) -> Iterator[NewFile]:
    """A new file for `out`; a device or pipe itself.  Raises OSError."""
    if os.path.exists(out) and not os.path.isfile(out):
        with open(out, "wb") as file:
            yield NewFile(file, out)
        return
    mode = stat.S_IMODE(out.stat().st_mode) if out.exists() else 0o666
    with unfinished(out.parent, out.name, mode) as new:
        yield new


def write_atomically(out: str | os.PathLike[str], data: bytes, what: str = "") -> None:
    """Write a file, whole or not at all, or a device or pipe.  what: begins messages.  Raises OutputError."""
    try:
        with replacing(Path(out)) as new:
            new.file.write(data)
            new.settle(Path(out))
    except OSError as error:
        raise OutputError(f"{what}{os.fspath(out)}: cannot be written; {error.strerror or error}") from error


def _part(folder: Path, name: str) -> Path:
    """A name that no file has; no name that is made of an output's is longer."""
    return folder / f".{name}.{secrets.token_urlsafe(6)}.part"


_BITS = {"INT4": 4, "UINT4": 4, "FLOAT4E2M1": 4, "INT2": 2, "UINT2": 2, "FLOAT6E2M3": 6, "FLOAT6E3M2": 6}
"""Bits of an element by type, where elements share bytes."""
MAX_DIGITS = 19
"""Python refuses to read numbers of some thousand digits; those that fit 64 bits have no more than these."""
MAX_ELEMENTS = 2**59
"""More of the widest type have sizes in bytes that do not fit 64 bits."""


@dataclass(frozen=True)
class Place:
    """Where a tensor lies: the file, relative to the model's folder, and the bytes in it."""

    location: str
    offset: int
    length: int


def is_external(tensor: TensorProto) -> bool:
    """Return True if a tensor lies in a file of its own."""
    return tensor.data_location == TensorProto.EXTERNAL


def place_of(tensor: TensorProto) -> Place:
    """Where an external tensor lies.  Raises ModelError for a place that says too little, or too much."""
    where, entries = f"tensor '{tensor.name}'", {entry.key: entry.value for entry in tensor.external_data}
    for key in ("offset", "length"):
        value = entries.get(key) or "0"
        if not (value.isascii() and value.isdigit() and len(value) <= MAX_DIGITS):
            raise ModelError(f"{where}: {key} of its external data; got {value[:40]!r}, expected a number of bytes")
    if not entries.get("location"):
        raise ModelError(f"{where}: external data without a location")
    needed = tensor_bytes(tensor)
    if needed is None:
        raise ModelError(f"{where}: external data; got strings, expected numbers")
    length = int(entries.get("length") or needed)
    return Place(entries["location"], int(entries.get("offset") or 0), length)


def tensor_bytes(tensor: TensorProto) -> int | None:
    """Bytes of a tensor's elements as raw data; None for strings.  Raises ModelError for an unknown type or a negative size."""
    where = f"tensor '{tensor.name}'"
    if tensor.data_type not in TensorProto.DataType.values() or tensor.data_type == TensorProto.UNDEFINED:
        raise ModelError(f"{where}: element type; got {tensor.data_type}, expected one of ONNX's")
    if any(size < 0 for size in tensor.dims):
        raise ModelError(f"{where}: shape; got {list(tensor.dims)}, expected no negative size")
    count = 1
    for size in tensor.dims if 0 not in tensor.dims else (0,):
        count *= size
        if count > MAX_ELEMENTS:  # the product of a million sizes takes minutes, and Python does not print it
            raise ModelError(f"{where}: shape; got {list(tensor.dims[:8])}, expected at most {MAX_ELEMENTS} elements")
    if tensor.data_type == TensorProto.STRING:
        return None
    bits = _BITS.get(TensorProto.DataType.Name(tensor.data_type))
    if bits:
        return -(-count * bits // 8)
    return count * onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize


Stamp = tuple[int, int]
"""A file's bytes, and when it was last written, in nanoseconds."""


def check_external_data(model: ModelProto, base_dir: Path | None) -> dict[str, Stamp]:
    """The locations of the model's external data, each inside `base_dir`, large enough and readable.  Raises ModelError."""
    stamps: dict[str, Stamp] = {}
    for tensor in filter(is_external, sparse_values(model)):
        raise ModelError(f"tensor '{tensor.name}': sparse, with external data; expected its values in the model itself, or dense")
    for tensor in filter(is_external, tensors(model)):
        where = f"tensor '{tensor.name}'"
        if base_dir is None:
            raise ModelError(f"{where}: external data of a model without a folder; give a path, or base_dir")
        place, needed = place_of(tensor), tensor_bytes(tensor)
        if place.location not in stamps:
            stamps[place.location] = _checked_stamp(where, base_dir, place.location)
        size, _ = stamps[place.location]
        if place.length != needed or place.offset + place.length > size:
            raise ModelError(
                f"{where}: external data {place.location!r}; got {place.length} bytes at {place.offset} of {size}, "
                f"expected {needed}"
            )
    return stamps


def check_unchanged(base_dir: Path, stamps: Mapping[str, Stamp]) -> None:
    """Raise ModelError for a data file that has been written since: old and new weights may not stand beside one another."""
    for location, stamp in stamps.items():
        with suppress(OSError):  # whoever reads it has an error of its own
            status = (base_dir / location).stat()
            if (status.st_size, status.st_mtime_ns) != stamp:
                got = "got shorter" if status.st_size < stamp[0] else "has changed"
                raise ModelError(f"external data {location!r}: {got} since the model was loaded")


def _checked_stamp(where: str, base_dir: Path, location: str) -> Stamp:
    """The stamp of a data file that onnx reads too: a result that it does not load would be of no use."""
    what = f"{where}: external data {location!r}"
    if "\0" in location:
        raise ModelError(f"{what}; expected a file name")
    path = base_dir / location
    here, there = shlex.quote(location), shlex.quote(f"{location}.copy")
    copy = f"copy it: cp -L -- {here} {there} && mv -- {there} {here}"
    try:
        inside = not os.path.isabs(location) and path.resolve().is_relative_to(base_dir.resolve())
        path.is_file()
    except (OSError, RuntimeError) as error:  # a name too long, or links in a circle
        raise ModelError(f"{what}: cannot be read; {getattr(error, 'strerror', None) or error}") from error
    if not inside:
        link = " through a symbolic link" if path.is_symlink() else ""
        raise ModelError(f"{what} lies outside the model's folder{link}" + (f"; {copy}" if link else ""))
    if not path.is_file():
        raise ModelError(f"{what}: the file is missing")
    status = path.stat()
    size = status.st_size
    probe = TensorProto(name="probe", data_type=TensorProto.UINT8, dims=[min(size, 1)])
    refer_to(probe, Place(location, 0, min(size, 1)))
    try:
        if size:
            load_external_data_for_tensor(probe, str(base_dir))
    except OSError as error:
        raise ModelError(f"{what}: cannot be read; {error.strerror or error}") from error
    except (onnx.checker.ValidationError, ValueError, RuntimeError) as error:
        links = path.stat().st_nlink
        linked = "a symbolic link" if path.is_symlink() else f"a file with {links} hard links" if links > 1 else ""
        reason = f"got {linked}, which onnx {onnx.__version__} does not read; {copy}" if linked else first_line(error)
        raise ModelError(f"{what}; {reason}") from error
    return size, status.st_mtime_ns


def external_bytes(tensor: TensorProto, base_dir: Path) -> bytes:
    """The bytes of an external tensor, from its file.  Raises ModelError."""
    place = place_of(tensor)
    try:
        with open(base_dir / place.location, "rb") as file:
            file.seek(place.offset)
            data = file.read(place.length)
    except OSError as error:
        raise ModelError(f"external data {place.location!r}: cannot be read; {error.strerror or error}") from error
    if len(data) != place.length:
        raise ModelError(f"external data {place.location!r}: got shorter since the model was loaded")
    return data


def read_in(tensor: TensorProto, base_dir: Path) -> None:
    """Make an external tensor one that holds its bytes itself.  Raises ModelError."""
    tensor.raw_data = external_bytes(tensor, base_dir)
    tensor.ClearField("data_location")
    del tensor.external_data[:]


def refer_to(tensor: TensorProto, place: Place) -> None:
    """Make a tensor one that lies in a file."""
    tensor.ClearField("raw_data")
    del tensor.external_data[:]
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", place.location), ("offset", place.offset), ("length", place.length)):
        tensor.external_data.add(key=key, value=str(value))


def external_size(model: ModelProto) -> int:
    """Bytes of the model's external tensors, those that share theirs counted once."""
    return sum(place.length for place in {place_of(tensor) for tensor in filter(is_external, tensors(model))})

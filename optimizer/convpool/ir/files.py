# SPDX-License-Identifier: Apache-2.0
"""Files: those that a command writes, those that hold a model's weights, and a model with these.

A file to be written is checked before any work, and then there whole or not at all.  External data are checked before anything
reads them, and read one tensor at a time.  They are read here and not by onnx, whose readers differ from version to version in
what they refuse and in how they say so.

A model is written with its weights inside or in data files of its own.  The files of the original are only read: none is linked
to, moved or changed, and no file that is there is overwritten but the one asked for.  Data files come first and the model last,
so that an interruption leaves what was there as it was.
"""

from __future__ import annotations

import errno
import filecmp
import os
import secrets
import shlex
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import IO, TYPE_CHECKING

import onnx
from google.protobuf.message import DecodeError, EncodeError
from onnx import ModelProto, TensorProto
from onnx.external_data_helper import load_external_data_for_tensor
from onnx.serialization import registry

from convpool.errors import ModelError, OptionError, OutputError, first_line
from convpool.ir.protos import sparse_values, tensors

if TYPE_CHECKING:
    from convpool.ir.model import LoadedModel

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


@contextmanager
def output_errors(what: str) -> Iterator[None]:
    """Raise OutputError for OSError.  what: begins the message."""
    try:
        yield
    except OSError as error:
        raise OutputError(f"{what} {error.strerror or error}") from error


def write_atomically(out: str | os.PathLike[str], data: bytes, what: str = "") -> None:
    """Write a file, whole or not at all, or a device or pipe.  what: begins messages.  Raises OutputError."""
    with output_errors(f"{what}{os.fspath(out)}: cannot be written;"), replacing(Path(out)) as new:
        new.file.write(data)
        new.settle(Path(out))


@contextmanager
def written_with(out: Path, data: bytes) -> Iterator[None]:
    """`write_atomically`, once the body has passed, else not at all; its name is taken from the start.  Raises OutputError."""
    with output_errors(f"{out}: cannot be written;"), replacing(out) as new, ExitStack() as stack:
        new.file.write(data)
        new.file.flush()
        with suppress(FileExistsError):
            out.touch(exist_ok=False)  # somebody else may write there meanwhile
            stack.push(lambda kind, *_: out.unlink() if kind and out.exists() and out.stat().st_size == 0 else None)
        yield
        new.settle(out)


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
    return Place(entries["location"], int(entries.get("offset") or 0), int(entries.get("length") or needed))


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
        with suppress(FileNotFoundError, NotADirectoryError):
            path.stat()
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
        str(base_dir).encode()
        if size:
            load_external_data_for_tensor(probe, str(base_dir))
    except UnicodeEncodeError as error:
        got = f"got a folder whose name is no UTF-8, which onnx {onnx.__version__} does not read"
        raise ModelError(f"{what}; {got}; give the folder another name") from error
    except OSError as error:
        raise ModelError(f"{what}: cannot be read; {error.strerror or error}") from error
    except (onnx.checker.ValidationError, ValueError, RuntimeError) as error:
        links = path.stat().st_nlink
        linked = "a symbolic link" if path.is_symlink() else f"a file with {links} hard links" if links > 1 else ""
        reason = f"got {linked}, which onnx {onnx.__version__} does not read; {copy}" if linked else first_line(error)
        raise ModelError(f"{what}; {reason}") from error
    return size, status.st_mtime_ns


def read_in(tensor: TensorProto, base_dir: Path) -> None:
    """Make an external tensor one that holds its bytes itself.  Raises ModelError."""
    place = place_of(tensor)
    try:
        with open(base_dir / place.location, "rb") as file:
            file.seek(place.offset)
            data = file.read(place.length)
    except OSError as error:
        raise ModelError(f"external data {place.location!r}: cannot be read; {error.strerror or error}") from error
    if len(data) != place.length:
        raise ModelError(f"external data {place.location!r}: got shorter since the model was loaded")
    tensor.raw_data = data
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


LAYOUTS = ("auto", "one", "keep")
"""Where weights go: inside the model where it fits one file, else as `one`; in one data file; in files as the original's."""
PROTOBUF_LIMIT_BYTES = 2**31 - 1
INLINE_LIMIT_BYTES = 2**31 - 2**27
"""Largest model written as one file: protobuf's limit less room for what other tools add to a model."""
EXTERNAL_THRESHOLD_BYTES = 1024
"""Smaller weights stay inside the model."""
PAGE_BYTES = 4096
"""Weights of this size and more begin at a multiple of it, so that a runtime can map them."""
_CHUNK_BYTES = 2**22


def serialize(model: ModelProto) -> bytes:
    """Serialised model.  Raises ModelError beyond protobuf's 2 GiB."""
    try:
        return model.SerializeToString()
    except (EncodeError, ValueError) as error:
        text = f"model: too large for one file; got over {PROTOBUF_LIMIT_BYTES} bytes, expected less; give it external data"
        raise ModelError(text) from error


def self_contained(proto: ModelProto, base_dir: Path | None = None) -> ModelProto:
    """A copy of a model with its external data read in.  Raises ModelError, also for more than one file holds."""
    if (size := _whole_bytes(proto)) > PROTOBUF_LIMIT_BYTES:
        raise ModelError(f"model: too large without data files; got {size} bytes, expected at most {PROTOBUF_LIMIT_BYTES}")
    copy = deepcopy(proto)
    for tensor in filter(is_external, tensors(copy)):
        assert base_dir is not None, "checked when the model was loaded"
        read_in(tensor, base_dir)
    return copy


def check_model_output(path: Path, others: Mapping[str, Iterable[Path]] | None = None) -> None:
    """`check_output` of a model, whose name may not stand for one of onnx's text formats.  Raises OutputError."""
    check_output(path, others)
    if (form := registry.get_format_from_file_extension(path.suffix)) not in (None, "protobuf"):
        raise OutputError(f"{path}: a name by which onnx reads {form}, expected one for a binary model, as {path.stem}.onnx")


def save(model: LoadedModel, out: Path, new_constants: Iterable[str] = (), layout: str = "auto") -> list[Path]:
    """Write a model atomically, and give all the files that it needs, itself first.

    An unchanged model is written byte for byte, unless its data moves.  A model written under the name that it came from may go
    on to use its data files.  new_constants: names of tensors that go to a data file under "keep".  layout: of `LAYOUTS`.
    Nothing is left behind on failure.  Raises OptionError, OutputError, ModelError.
    """
    if layout not in LAYOUTS:
        raise OptionError(f"external_data: got {layout!r}, expected one of {', '.join(LAYOUTS)}")
    check_model_output(out)
    model.check_data()
    proto, base_dir = model.proto, model.base_dir
    originals = set(map(os.path.realpath, model.weight_files))
    if os.path.realpath(out) in originals:
        raise OutputError(f"{out}: holds weights of the model; expected another name")
    sources = {location: (base_dir / location).resolve() for location in _locations(proto)} if base_dir is not None else {}
    place = os.path.realpath(out.parent), out.name
    in_place = model.path is not None and place == (os.path.realpath(model.path.parent), model.path.name)
    with output_errors(f"{out}: cannot be written;"):
        may_stay = layout != "one" and (in_place or not sources)
        if may_stay and (unchanged := model.unchanged_bytes()) is not None:
            write_atomically(out, unchanged)
            return _needed(proto, out)
        with replacing(out) as new, _Placer(out, base_dir, set() if in_place else originals, new) as placer:
            if layout == "auto" and _whole_bytes(proto) <= INLINE_LIMIT_BYTES:
                proto = self_contained(proto, base_dir) if sources else proto
            else:
                proto = deepcopy(proto)
                if layout == "keep" and not in_place:
                    placer.copy_files(proto, sources)
                placer.write_one(proto, None if layout != "keep" else set(new_constants) if sources else set())
            new.file.write(serialize(proto))
            new.settle(out)
    return _needed(proto, out)


def locations_in(path: Path) -> set[str]:
    """The locations that the model in a file refers to; none where it holds no model."""
    model = ModelProto()
    try:
        if path.is_file():
            model.ParseFromString(path.read_bytes())
        entries = [entry for tensor in filter(is_external, tensors(model)) for entry in tensor.external_data]
        return {os.path.normpath(entry.value) for entry in entries if entry.key == "location" and "\0" not in entry.value}
    except (OSError, DecodeError, RuntimeError, ValueError, TypeError):  # names that are no UTF-8 raise, or are bytes
        return set()


def _needed(proto: ModelProto, out: Path) -> list[Path]:
    return [out, *(out.parent / location for location in _locations(proto))]


def _whole_bytes(proto: ModelProto) -> int:
    return proto.ByteSize() + external_size(proto)


def _locations(proto: ModelProto) -> list[str]:
    """The data files of a model, each once."""
    return list(dict.fromkeys(place_of(tensor).location for tensor in filter(is_external, tensors(proto))))


class _Placer:
    """Writes data files beside a model, each under the first name that is free.

    The model that is to be replaced may refer to a name: then a file that holds the very same bytes is used again, and none is
    made.  So neither that model nor one that somebody else writes meanwhile gets other data than its own, however this ends.
    Deletes what it made unless the model was settled.
    """

    def __init__(self, out: Path, base_dir: Path | None, avoided: set[str], model: NewFile) -> None:
        """avoided: files that are not used even if they hold the same: the original's, which may go away."""
        self._out, self._base_dir, self._avoided, self._model = out, base_dir, avoided, model
        self._created: list[Path] = []

    def __enter__(self) -> _Placer:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None or self._model.settled:
            return
        for path in reversed(self._created):
            with suppress(OSError):
                path.rmdir() if path.is_dir() else path.unlink()

    @cached_property
    def _known(self) -> set[str]:
        return locations_in(self._out)

    def copy_files(self, proto: ModelProto, sources: dict[str, Path]) -> None:
        """Copy the data files `sources` beside the model, and refer to the copies."""
        places = {location: self._copy(source, location) for location, source in sources.items()}
        for tensor in filter(is_external, tensors(proto)):
            place = place_of(tensor)
            refer_to(tensor, Place(places[place.location], place.offset, place.length))

    def write_one(self, proto: ModelProto, names: set[str] | None) -> None:
        """Move the tensors `names` to one data file; None: all external ones, and those of EXTERNAL_THRESHOLD_BYTES."""

        def moves(tensor: TensorProto) -> bool:
            if is_external(tensor):
                return names is None
            return len(tensor.raw_data) >= EXTERNAL_THRESHOLD_BYTES and (names is None or tensor.name in names)

        moving = [tensor for tensor in tensors(proto) if moves(tensor)]
        if not moving:
            return
        with self._unfinished(self._out.parent) as new:
            keys = [place_of(tensor) if is_external(tensor) else number for number, tensor in enumerate(moving)]
            places: dict[Place | int, Place] = {}  # tensors that share bytes go on to
            for key, tensor in zip(keys, moving, strict=True):
                if key not in places:
                    places[key] = self._append(new.file, tensor)
            new.file.truncate()
            location = self._settle(new, _names(f"{self._out.name}.data"))
        for key, tensor in zip(keys, moving, strict=True):
            refer_to(tensor, Place(location, places[key].offset, places[key].length))

    def _append(self, file: IO[bytes], tensor: TensorProto) -> Place:
        length = place_of(tensor).length if is_external(tensor) else len(tensor.raw_data)
        if length >= PAGE_BYTES:
            file.seek(-file.tell() % PAGE_BYTES, os.SEEK_CUR)
        offset = file.tell()
        if is_external(tensor):
            assert self._base_dir is not None
            _copy_bytes(self._base_dir / place_of(tensor).location, place_of(tensor).offset, length, file)
        else:
            file.write(tensor.raw_data)
        return Place("", offset, length)

    def _copy(self, source: Path, location: str) -> str:
        folder = self._out.parent / Path(location).parent
        for parent in reversed([folder, *folder.parents]):
            if not parent.exists():
                with suppress(FileExistsError):  # somebody else was faster
                    parent.mkdir()
                    self._created.append(parent)
        with self._unfinished(folder) as new:
            _copy_bytes(source, 0, source.stat().st_size, new.file)
            new.file.truncate()
            return self._settle(new, _copies(location, self._out.stem))

    def _unfinished(self, folder: Path) -> AbstractContextManager[NewFile]:
        """A new data file.  Raises OutputError where the model goes into a device or pipe."""
        if self._model.path == self._out:
            raise OutputError(f"{self._out}: a device or pipe, which takes no data file; expected a file's name")
        return unfinished(folder, self._out.name)

    def _settle(self, new: NewFile, locations: Iterator[str]) -> str:
        """Give a data file the first name that suits.  The location."""
        new.file.flush()
        for location in locations:
            target = self._out.parent / location
            if os.path.normpath(location) in self._known:
                # A result's data is a file of its own that no model given has.
                plain = target.is_file() and not target.is_symlink() and target.stat().st_nlink == 1
                usable = plain and os.path.realpath(target) not in self._avoided
                if usable and filecmp.cmp(new.path, target, shallow=False):
                    return location
            elif os.path.realpath(target) != os.path.realpath(self._out):
                with suppress(FileExistsError):
                    target.touch(exist_ok=False)
                    self._created.append(target)
                    new.settle(target)
                    return location
        raise AssertionError("names without end")


def _names(name: str) -> Iterator[str]:
    """name.data, name.1.data, name.2.data, ..., with ? for what is no UTF-8, as names in a model are."""
    yield (name := name.encode(errors="replace").decode())
    yield from (f"{name.removesuffix('.data')}.{number}.data" for number in count(1))


def _copies(location: str, stem: str) -> Iterator[str]:
    """folder/name, folder/stem-1-name, folder/stem-2-name, ..."""
    path = Path(location)
    yield location
    stem = stem.encode(errors="replace").decode()  # names in a model are UTF-8
    yield from (str(path.parent / f"{stem}-{number}-{path.name}") for number in count(1))


def _copy_bytes(source: Path, offset: int, length: int, file: IO[bytes]) -> None:
    """Append bytes of a file; those that are all zero as a hole.  Raises OSError, ModelError."""
    zeros = bytes(_CHUNK_BYTES)
    with open(source, "rb") as given:
        given.seek(offset)
        while length:
            chunk = given.read(min(length, _CHUNK_BYTES))
            if not chunk:
                raise ModelError(f"external data {source.name!r}: got shorter since the model was loaded")
            if len(chunk) == _CHUNK_BYTES and chunk == zeros:
                file.seek(len(chunk), os.SEEK_CUR)
            else:
                file.write(chunk)
            length -= len(chunk)

# SPDX-License-Identifier: Apache-2.0
"""Writing a model, with its weights inside or in data files of its own.

The files of the original are only read: none is linked to, moved or changed, and no file that is there is overwritten but the
one asked for.  Data files come first and the model last, so that an interruption leaves what was there as it was.
"""

from __future__ import annotations

import filecmp
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from copy import deepcopy
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import IO

from google.protobuf.message import DecodeError, EncodeError
from onnx import ModelProto, TensorProto
from onnx.serialization import registry

from convpool.errors import ModelError, OptionError, OutputError
from convpool.ir import files
from convpool.ir.model import LoadedModel
from convpool.ir.protos import tensors

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
    for tensor in filter(files.is_external, tensors(copy)):
        assert base_dir is not None, "checked when the model was loaded"
        files.read_in(tensor, base_dir)
    return copy


def check_model_output(path: Path, others: Mapping[str, Iterable[Path]] | None = None) -> None:
    """`check_output` of a model, whose name may not stand for one of onnx's text formats.  Raises OutputError."""
    files.check_output(path, others)
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
    try:
        may_stay = layout != "one" and (in_place or not sources)
        if may_stay and (unchanged := model.unchanged_bytes()) is not None:
            files.write_atomically(out, unchanged)
            return _needed(proto, out)
        with files.replacing(out) as new, _Placer(out, base_dir, set() if in_place else originals, new) as placer:
            if layout == "auto" and _whole_bytes(proto) <= INLINE_LIMIT_BYTES:
                proto = self_contained(proto, base_dir) if sources else proto
            else:
                proto = deepcopy(proto)
                if layout == "keep" and not in_place:
                    placer.copy_files(proto, sources)
                placer.write_one(proto, None if layout != "keep" else set(new_constants) if sources else set())
            new.file.write(serialize(proto))
            new.settle(out)
    except OSError as error:
        raise OutputError(f"{out}: cannot be written; {error.strerror or error}") from error
    return _needed(proto, out)


def referred(path: Path) -> set[str]:
    """The locations that the model in a file refers to; none where it holds no model."""
    model = ModelProto()
    try:
        if path.is_file():
            model.ParseFromString(path.read_bytes())
        external = filter(files.is_external, tensors(model))
        return {os.path.normpath(entry.value) for tensor in external for entry in tensor.external_data if entry.key == "location"}
    except (OSError, DecodeError, RuntimeError, ValueError, TypeError):  # names that are no UTF-8 raise, or are bytes
        return set()


def _needed(proto: ModelProto, out: Path) -> list[Path]:
    return [out, *(out.parent / location for location in _locations(proto))]


def _whole_bytes(proto: ModelProto) -> int:
    return proto.ByteSize() + files.external_size(proto)


def _locations(proto: ModelProto) -> list[str]:
    """The data files of a model, each once."""
    return list(dict.fromkeys(files.place_of(tensor).location for tensor in filter(files.is_external, tensors(proto))))


class _Placer:
    """Writes data files beside a model, each under the first name that is free.

    The model that is to be replaced may refer to a name: then a file that holds the very same bytes is used again, and none is
    made.  So neither that model nor one that somebody else writes meanwhile gets other data than its own, however this ends.
    Deletes what it made unless the model was settled.
    """

    def __init__(self, out: Path, base_dir: Path | None, avoided: set[str], model: files.NewFile) -> None:
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
        return referred(self._out)

    def copy_files(self, proto: ModelProto, sources: dict[str, Path]) -> None:
        """Copy the data files `sources` beside the model, and refer to the copies."""
        places = {location: self._copy(source, location) for location, source in sources.items()}
        for tensor in filter(files.is_external, tensors(proto)):
            place = files.place_of(tensor)
            files.refer_to(tensor, files.Place(places[place.location], place.offset, place.length))

    def write_one(self, proto: ModelProto, names: set[str] | None) -> None:
        """Move the tensors `names` to one data file; None: all external ones, and those of EXTERNAL_THRESHOLD_BYTES."""

        def moves(tensor: TensorProto) -> bool:
            if files.is_external(tensor):
                return names is None
            return len(tensor.raw_data) >= EXTERNAL_THRESHOLD_BYTES and (names is None or tensor.name in names)

        moving = [tensor for tensor in tensors(proto) if moves(tensor)]
        if not moving:
            return
        with self._unfinished(self._out.parent) as new:
            keys = [files.place_of(tensor) if files.is_external(tensor) else number for number, tensor in enumerate(moving)]
            places: dict[files.Place | int, files.Place] = {}  # tensors that share bytes go on to
            for key, tensor in zip(keys, moving, strict=True):
                if key not in places:
                    places[key] = self._append(new.file, tensor)
            new.file.truncate()
            location = self._settle(new, _names(f"{self._out.name}.data"))
        for key, tensor in zip(keys, moving, strict=True):
            files.refer_to(tensor, files.Place(location, places[key].offset, places[key].length))

    def _append(self, file: IO[bytes], tensor: TensorProto) -> files.Place:
        length = files.place_of(tensor).length if files.is_external(tensor) else len(tensor.raw_data)
        if length >= PAGE_BYTES:
            file.seek(-file.tell() % PAGE_BYTES, os.SEEK_CUR)
        offset = file.tell()
        if files.is_external(tensor):
            assert self._base_dir is not None
            _copy_bytes(self._base_dir / files.place_of(tensor).location, files.place_of(tensor).offset, length, file)
        else:
            file.write(tensor.raw_data)
        return files.Place("", offset, length)

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

    def _unfinished(self, folder: Path) -> AbstractContextManager[files.NewFile]:
        """A new data file.  Raises OutputError where the model goes into a device or pipe."""
        if self._model.path == self._out:
            raise OutputError(f"{self._out}: a device or pipe, which takes no data file; expected a file's name")
        return files.unfinished(folder, self._out.name)

    def _settle(self, new: files.NewFile, locations: Iterator[str]) -> str:
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
    """name.data, name.1.data, name.2.data, ..."""
    yield name
    yield from (f"{name.removesuffix('.data')}.{number}.data" for number in count(1))


def _copies(location: str, stem: str) -> Iterator[str]:
    """folder/name, folder/stem-1-name, folder/stem-2-name, ..."""
    path = Path(location)
    yield location
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

# SPDX-License-Identifier: Apache-2.0
"""Files that a command writes: checked before any work, and then there whole or not at all."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from convpool.errors import OutputError

ROOM_BYTES = 15
"""By so much the names of files that are made beside an output are longer than its own."""


def check_output(path: Path, others: Mapping[str, Iterable[Path]] | None = None) -> None:
    """Raise OutputError for a path in no folder, of a folder or read-only file, or of one of `others`, files by what they are.

    And for one that is too long for the names of the files beside it, which are longer.
    """
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
    if os.path.isfile(path) and not (path.stat().st_mode & 0o222 and os.access(path, os.W_OK)):
        raise OutputError(f"{path}: a read-only file; give another name, or allow writing with chmod u+w")
    for what, files in (others or {}).items():
        if path.resolve() in {file.resolve() for file in files}:
            raise OutputError(f"{path}: {what}, which would be overwritten; give another file name")


@dataclass(frozen=True)
class NewFile:
    """A file that is written under a name of its own until it is whole."""

    file: IO[bytes]
    path: Path

    def settle(self, target: Path) -> None:
        """Give it its name, in place of the file of that name, whose permissions it keeps.  Raises OSError."""
        self.file.flush()
        if self.path == target:  # a device or pipe
            return
        os.fsync(self.file.fileno())
        if target.exists():
            os.chmod(self.path, stat.S_IMODE(target.stat().st_mode))
        os.replace(self.path, target)

    @property
    def settled(self) -> bool:
        """Whether it has its name; certain also where an interruption came right after the renaming."""
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


def write_atomically(out: Path, data: bytes) -> None:
    """Write a file so that it is there whole or not at all; a device or pipe is just written to.  Raises OSError."""
    with replacing(out) as new:
        new.file.write(data)
        new.settle(out)


def _part(folder: Path, name: str) -> Path:
    """A name that no file has; no name that is made of an output's is longer."""
    return folder / f".{name}.{secrets.token_urlsafe(6)}.part"

# SPDX-License-Identifier: Apache-2.0
"""Files that a command writes: checked before any work, and then there whole or not at all."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from convpool.errors import OutputError


def check_output(path: Path, others: Mapping[str, Iterable[Path]] | None = None) -> None:
    """Raise OutputError for a path in no folder, of a folder or read-only file, or of one of `others`, files by what they are."""
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
        os.fsync(self.file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(self.path, stat.S_IMODE(target.stat().st_mode) if target.exists() else 0o666 & ~umask)
        os.replace(self.path, target)


@contextmanager
def unfinished(folder: Path, name: str) -> Iterator[NewFile]:
    """A new file in `folder` to write to, gone at the end unless it was settled.  Raises OSError."""
    handle, path = tempfile.mkstemp(dir=folder, prefix=f".{name}.", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            yield NewFile(file, Path(path))
    finally:
        with suppress(OSError):
            os.unlink(path)


def write_atomically(out: Path, data: bytes) -> None:
    """Write a file so that it is there whole or not at all; a device or pipe is just written to.  Raises OSError."""
    if os.path.exists(out) and not os.path.isfile(out):
        out.write_bytes(data)
        return
    with unfinished(out.parent, out.name) as new:
        new.file.write(data)
        new.settle(out)

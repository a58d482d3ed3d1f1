# SPDX-License-Identifier: Apache-2.0
"""Which file is taken for libconvpool.so: the named one, else the one that the distribution convpool-cuda installed."""

import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from convpool.cuda import LibraryError, library, location
from convpool.cuda.errors import NotBuiltError
from convpool.errors import TensorRTError
from convpool.tensorrt import plugin_path


def install(folder: Path, name: str, version: str) -> Path:
    """A distribution as pip leaves it, with the library's file; the file."""
    information = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    file = folder / location.INSTALLED
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(b"a library")
    return file


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of distributions that comes first, and no library by name."""
    for name in ("CONVPOOL_LIBRARY", "CONVPOOL_PLUGIN_LIBRARY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    library._load.cache_clear()
    yield tmp_path
    library._load.cache_clear()


def test_the_distribution_s_file_is_the_library_and_the_plugin(folder):
    install(folder, "convpool", "0.7.0")
    file = install(folder, "convpool-cuda", "0.7.0")
    assert location.library_path() == file and plugin_path() == file.resolve()


def test_another_version_of_the_distribution_is_refused(folder):
    install(folder, "convpool", "0.7.0")
    install(folder, "convpool-cuda", "0.6.9")
    message = "convpool-cuda: another version; got 0.6.9, expected convpool's 0.7.0; run `pip install ./plugin`"
    with pytest.raises(LibraryError, match=message):
        library.load()
    with pytest.raises(TensorRTError, match=message):
        plugin_path()


def test_a_distribution_without_its_file_is_an_error(folder):
    install(folder, "convpool", "0.7.0")
    install(folder, "convpool-cuda", "0.7.0").unlink()
    with pytest.raises(LibraryError, match="not found; got .*libconvpool.so, expected the file of convpool-cuda; run"):
        location.library_path()


def test_without_the_distribution_the_library_is_not_built(folder, monkeypatch):
    monkeypatch.setattr(location, "DISTRIBUTION", "convpool-none")
    with pytest.raises(NotBuiltError, match="not built; got no convpool-none, expected it installed; run `pip install ./plugin`"):
        library.load()


def test_a_named_file_comes_first(folder, monkeypatch):
    install(folder, "convpool-cuda", "0.6.9")
    (folder / "own.so").write_bytes(b"another")
    monkeypatch.setenv("CONVPOOL_LIBRARY", str(folder / "own.so"))
    assert location.library_path() == folder / "own.so" and plugin_path() == folder / "own.so"
    with pytest.raises(LibraryError, match="cannot be loaded; got .*own.so"):
        library.load()
    monkeypatch.setenv("CONVPOOL_PLUGIN_LIBRARY", str(folder / "third.so"))
    with pytest.raises(
        TensorRTError, match="not found; got .*third.so, expected the built library; CONVPOOL_PLUGIN_LIBRARY names"
    ):
        plugin_path()


def places(folder: Path) -> dict[str, bool]:
    """Values of the variable with whether there is such a file, from inside `folder`."""
    odd = ["a b.so", "é 中.so", "\x1b[2J.so", "-rf", "$HOME", os.fsdecode(b"caf\xe9.so"), "n" * 240]
    for name in ("own.so", "deep/own.so", *odd):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"no library")
    (folder / "link.so").symlink_to("own.so")
    (folder / "broken.so").symlink_to("none.so")
    (folder / "circle.so").symlink_to("circle.so")
    os.mkfifo(folder / "fifo")
    there = ["own.so", "./own.so", ".//deep/../own.so", "deep/own.so", str(folder / "own.so"), "link.so", *odd]
    absent = ". .. / deep deep/ own.so/ /dev/null /dev/zero fifo broken.so circle.so none.so libm.so.6".split()
    absent += ["~/own.so", " own.so", "n" * 300, "n/" * 3000, "\n", os.fsdecode(b"\xff\xfe")]
    return dict.fromkeys(there, True) | dict.fromkeys(absent, False)


@pytest.mark.parametrize("variable", ["CONVPOOL_LIBRARY", "CONVPOOL_PLUGIN_LIBRARY"])
def test_odd_values_of_the_variable(folder, monkeypatch, variable):
    """A file is loaded from where it was found, whatever the loader's own folders have; else one error."""
    monkeypatch.chdir(folder)
    for named, there in places(folder).items():
        monkeypatch.setenv(variable, named)
        find = location.library_path if variable == "CONVPOOL_LIBRARY" else plugin_path
        if there:
            assert find().is_absolute() and find().samefile(named), named
            if variable == "CONVPOOL_LIBRARY":
                with pytest.raises(LibraryError, match=f"cannot be loaded; got {re.escape(str(folder.resolve()))}"):
                    library.load()
        else:
            with pytest.raises(
                (LibraryError, TensorRTError), match=f"not found; got {re.escape(named)}, expected the built library"
            ):
                find()


def test_an_empty_value_is_none(folder, monkeypatch):
    file = install(folder, "convpool-cuda", "0.7.0")
    install(folder, "convpool", "0.7.0")
    for variable in ("CONVPOOL_LIBRARY", "CONVPOOL_PLUGIN_LIBRARY"):
        monkeypatch.setenv(variable, "")
    assert location.library_path() == file and plugin_path() == file.resolve()


@pytest.mark.parametrize(
    "message", [b"", b"caf\xe9", b"\x1b]0;OWNED\x07", "é 中".encode(), b"\xff" * 60, b"\x9b2J", b"a\nb", "\u202e".encode()]
)
def test_messages_of_any_bytes(monkeypatch, message):
    """The library quotes a file and names its path."""
    monkeypatch.setattr(library, "load", lambda: SimpleNamespace(convpool_last_error=lambda: message))
    assert library.last_error().isprintable() and len(library.last_error()) >= len(message.decode(errors="ignore"))

# SPDX-License-Identifier: Apache-2.0
"""Saves beside each other, interrupted and killed at every step: a model never has another's weights, and what was there stays.
Every step is one that Python's audit events name: opening, renaming, deleting and making of files.  There another model is saved,
an interruption or a signal comes, or the process ends."""

import errno
import os
import signal
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial
from itertools import count, product
from pathlib import Path
from tempfile import mkdtemp
from unittest.mock import Mock

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper

import convpool
from convpool import interrupt
from convpool.cli.group import command, run
from convpool.errors import OutputError
from tests.support.models import graph
from tests.support.rewriting import PAIR

EVENTS = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.chmod"}
LAYOUTS = ("auto", "one", "keep")
ENDED, NO_SUCH_STEP = 0, 3


def make(folder: Path, value: float, location: str = "deep/w.bin") -> Path:
    """A model whose weights, in a file, are all `value`, as its producer's name says."""
    model = graph(PAIR)
    model.producer_name = f"{value}"
    tensor = model.graph.initializer[0]
    data = np.full(tuple(tensor.dims), value, np.float32).tobytes()
    (folder / location).parent.mkdir(parents=True)
    (folder / location).write_bytes(data)
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, text in (("location", location), ("length", str(len(data)))):
        tensor.external_data.add(key=key, value=text)
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    return folder / "model.onnx"


def assert_own_weights(folder: Path) -> set[str]:
    """Every model has the weights that its producer's name says; the files that belong to one."""
    needed = set()
    for path in folder.glob("*.onnx"):
        model = onnx.load(path)
        (weights,) = (numpy_helper.to_array(tensor) for tensor in model.graph.initializer if tensor.name.startswith("w"))
        assert np.unique(weights) == [float(model.producer_name)], path
        bare = onnx.load(path, load_external_data=False)
        needed |= {e.value for t in bare.graph.initializer for e in t.external_data if e.key == "location"} | {path.name}
    return needed


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() or not any(path.iterdir())}


STEP: list = [-1, "", None]
"""So many steps in a folder before `hook` does something, and what."""


def hook(event: str, arguments: tuple) -> None:
    if STEP[0] >= 0 and event in EVENTS and str(arguments[0]).startswith(STEP[1]):
        STEP[0] -= 1
        if STEP[0] < 0:
            STEP[2]()


hooked = cache(sys.addaudithook)


def at_step(number: int, folder: Path, then: Callable[[], object], work: Callable[[], object], apart: bool) -> int:
    """Do `work`, and `then` before its step `number` in a folder; the status that it ends with.  apart: in another process, where
    `then` ends it: a fork of a large process takes longer than the work."""
    child = os.fork() if apart else 0
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    hooked(hook)
    STEP[:], status = (number, str(folder), then), 1
    try:
        work()
        status = NO_SUCH_STEP if STEP[0] >= 0 else ENDED
    except KeyboardInterrupt:
        status = 130
    finally:
        STEP[0] = -1
        if apart:
            os._exit(status)
    return status


def every_step(place: Path, work: Callable, then: Callable, status: int, prepare: Callable = lambda _: None, apart: bool = True):
    """The folder after each step of `work` at which `then` came, a new one each time."""
    for number in count():
        folder = Path(mkdtemp(dir=place))
        prepare(folder)
        ended = at_step(number, folder, partial(then, folder), partial(work, folder), apart)
        if ended == NO_SUCH_STEP:
            assert number >= 3
            return
        assert ended == status, (number, ended)
        yield folder


ENDINGS = [(Mock(side_effect=KeyboardInterrupt), 130), (lambda _: os._exit(9), 9)]
"""How a process is interrupted or killed, and its status."""


@pytest.mark.parametrize("out", ["same.onnx", "other.onnx"])
@pytest.mark.parametrize("values", [(1.0, 2.0), (1.0, 1.0)], ids=["other weights", "same weights"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_another_save_at_every_step(tmp_path, layout, values, out):
    """The first goes on, is interrupted or is killed; then a third model is saved, and an old model may lack its data."""
    sources = [make(tmp_path / f"in{number}", value) for number, value in enumerate((*values, 3.0))]
    first, second, third = (convpool.optimize(path, check=0, lowering="direct") for path in sources)

    for ending, status in ((lambda _: None, ENDED), *ENDINGS):

        def then(folder: Path, ending: Callable[[Path], None] = ending) -> None:
            second.save(folder / out, external_data=layout)
            ending(folder)

        save = partial(first.save, external_data=layout)
        for folder in every_step(tmp_path, lambda at, save=save: save(at / "same.onnx"), then, status, apart=status == 9):
            needed = assert_own_weights(folder)
            assert (folder / out).exists()
            if status != 9 and out != "same.onnx":  # else the first one may have been whole, and was replaced
                assert files(folder) == needed
            assert status == 9 or not [name for name in files(folder) if name.endswith(".part")]
            third.save(folder / "third.onnx", external_data=layout)
            third.save(folder / "same.onnx", external_data=layout)
            assert_own_weights(folder)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("lost", [False, True], ids=["whole", "without its data"])
def test_an_old_model_at_every_step(tmp_path, layout, lost):
    """It stays as it was until the new one is there, also where its data is missing and the new one's would have that name."""
    old, new = (convpool.optimize(make(tmp_path / f"in{v}", v), check=0, lowering="direct") for v in (1.0, 2.0))

    def prepare(folder: Path) -> None:
        written = old.save(folder / "o.onnx", external_data=layout)
        for path in written[1:] if lost else ():
            path.unlink()

    save = partial(new.save, external_data=layout)
    for ending, status in ENDINGS:
        for folder in every_step(tmp_path, lambda folder: save(folder / "o.onnx"), ending, status, prepare, status == 9):
            if onnx.load(folder / "o.onnx", load_external_data=False).producer_name == "2.0" or not lost or layout == "auto":
                assert_own_weights(folder)
            else:
                with pytest.raises((onnx.checker.ValidationError, FileNotFoundError)):
                    onnx.load(folder / "o.onnx")


def interrupted(source: Path, target: Path, replace=os.replace) -> None:
    replace(source, target)
    if target.suffix == ".onnx":
        raise KeyboardInterrupt


REFUSED = Mock(side_effect=OSError(errno.EPERM, "Operation not permitted"))


@pytest.mark.parametrize("name, function, ends", [("replace", interrupted, True), ("link", REFUSED, False)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_the_model_needs_stays_after_its_renaming_and_on_file_systems_without_links(
    tmp_path, monkeypatch, layout, name, function, ends
):
    """An interruption comes right behind the renaming."""
    (tmp_path / "o").mkdir()
    result = convpool.optimize(make(tmp_path / "in", 1.0), check=0, lowering="direct")
    monkeypatch.setattr(os, name, function)
    with pytest.raises(KeyboardInterrupt) if ends else nullcontext():
        result.save(tmp_path / "o" / "o.onnx", external_data=layout)
    assert assert_own_weights(tmp_path / "o") == files(tmp_path / "o")


@pytest.mark.parametrize(("number", "lost"), [*((number, False) for number in interrupt.WORDS), (signal.SIGHUP, True)], ids=str)
def test_signals_at_every_step_of_a_command(tmp_path, number, lost):
    """One line and 128 + n, that may have nowhere to go; what was there is left, or the result, its data beside the report."""
    source = str(make(tmp_path / "in", 1.0))

    def prepare(folder: Path) -> None:
        (folder / "o.onnx").write_bytes(b"old")

    def work(folder: Path) -> None:
        os.dup2(os.open("/dev/full" if lost else tmp_path / "err", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
        sys.stderr, sys.argv = open(2, "w", buffering=1, closefd=False), ["convpool"]
        for each in interrupt.WORDS:
            signal.signal(each, signal.SIG_DFL)
        interrupt.end_quietly()
        out, report = str(folder / "o.onnx"), str(folder / "o.onnx.data")
        words = ["optimize", source, "-o", out, "--report", report, "--external-data", "one", "--no-check", "-q"]
        status = run(command, "convpool", words)
        if status:
            os._exit(status)

    for folder in every_step(tmp_path, work, lambda _: os.kill(os.getpid(), number), 128 + number, prepare):
        if not lost:
            assert (tmp_path / "err").read_text().strip() == f"convpool: {interrupt.WORDS[number]}"
        whole = (folder / "o.onnx").read_bytes() != b"old"
        needed = assert_own_weights(folder) if whole else {"o.onnx"}
        assert files(folder) in (needed, needed | {"o.onnx.data"} if whole and "o.onnx.data" not in needed else needed)


@pytest.mark.parametrize("number", interrupt.WORDS, ids=str)
def test_handlers_of_others_stay(number):
    before = {each: signal.getsignal(each) for each in interrupt.WORDS}
    signal.signal(number, signal.SIG_IGN)
    try:
        interrupt.end_quietly(), interrupt.raise_again()  # here runs pytest, not a command
        assert signal.getsignal(number) is signal.SIG_IGN
        assert interrupt.told(KeyboardInterrupt(number)) == (interrupt.WORDS[number], 128 + number)
    finally:
        signal.signal(number, before[number])


ALPHABETS = {"a": 1, "\udcff": 1, "é": 2, "中": 3, "😀": 4}


@pytest.mark.parametrize(("letter", "length"), list(product(ALPHABETS, (200, 232, 236, 240, 241, 245, 250, 255, 256, 300))))
def test_names_near_the_limit(tmp_path, letter, length):
    """Refused before the work, or saved in every layout, with names taken too; also one that is no UTF-8."""
    name = (letter * (length // ALPHABETS[letter])).ljust(length - ALPHABETS[letter] * (length // ALPHABETS[letter]), "a")
    model = make(tmp_path / "in", 1.0)
    result, fits = convpool.optimize(model, check=0, lowering="direct"), len(os.fsencode(name)) <= 240
    for layout in LAYOUTS:
        folder = tmp_path / layout
        (folder / "deep").mkdir(parents=True)
        if fits:
            (folder / f"{name}.data").touch(), (folder / "deep/w.bin").touch()
            result.save(folder / name, external_data=layout)
            onnx.load(folder / name)
        else:
            told = "File name too long, expected room for a name of 15 bytes more; give a shorter"
            with pytest.raises(OutputError, match=told):
                result.save(folder / name, external_data=layout)
            assert files(folder) == {"deep"}


@pytest.mark.parametrize("length", range(4070, 4102, 2))
def test_paths_near_the_limit(tmp_path, length):
    folder = tmp_path
    while len(str(folder)) < length - 230:
        folder /= "f" * 100
    folder /= "f" * (length - len(str(folder)) - 3)
    result = convpool.optimize(graph(PAIR), check=0)
    if length <= 4080:
        folder.mkdir(parents=True)
        result.save(folder / "o", external_data="one")
        onnx.load(folder / "o", load_external_data=False)
    else:
        folder.parent.mkdir(parents=True)
        with pytest.raises(OutputError, match="File name too long"):
            result.save(folder / "o", external_data="one")


WRITERS = (
    "optimize {m} -o {n}", "optimize {m} --report {n}", "inspect {m} --report {n}", "verify {m} {m} --report {n}",
    "build {m} -o {n}", "build {m} -o e --report {n}", "build {m} -o e --timing-cache {n}", "tune {m} -o {n}",
)  # fmt: skip


@pytest.mark.parametrize("words", WRITERS)
def test_every_command_refuses_a_long_name_first(tmp_path, words, monkeypatch, capsys):
    monkeypatch.setattr("convpool.cli.optimize.optimize", None)
    model = make(tmp_path / "in", 1.0)
    monkeypatch.chdir(tmp_path)
    before = files(tmp_path)
    assert run(command, "convpool", words.format(m=model, n="n" * 245).split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"convpool: {'n' * 245}: cannot be written; File name too long") and "give a shorter one" in line
    assert files(tmp_path) == before


@pytest.mark.parametrize(("mask", "old"), list(product((0o022, 0o027, 0o077), (None, 0o600, 0o640, 0o644, 0o666, 0o755))))
def test_permissions(tmp_path, mask, old):
    """Keep those of the file replaced, or what the umask leaves; never more in between."""
    out, seen = tmp_path / "o.onnx", []
    if old is not None:
        out.touch()
        out.chmod(old)
    result = convpool.optimize(graph(PAIR), check=0)
    replace, before = os.replace, os.umask(mask)

    def seeing(source: Path, target: Path) -> None:
        seen.append(source.stat().st_mode & 0o777)
        replace(source, target)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "replace", seeing)
        try:
            written = result.save(out, external_data="one")
        finally:
            os.umask(before)
    assert [path.stat().st_mode & 0o777 for path in written] == [0o666 & ~mask if old is None else old, 0o666 & ~mask]
    assert seen == [0o666 & ~mask, 0o666 & ~mask if old is None else old]

# SPDX-License-Identifier: Apache-2.0
"""onnxruntime sessions on the CPU, in another process: onnxruntime ends the one it is in on some models.

One process serves all sessions.  Where a model ends it, the other sessions are made again in the next one when they are used.
"""

from __future__ import annotations

import atexit
import pickle
import threading
import time
import weakref
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from onnx import ModelProto

from convpool.check import session_process
from convpool.check.inputs import Arrays
from convpool.check.session_process import READY, Sessions, packed, unpacked
from convpool.ir.model import LoadedModel
from convpool.ir.process import EndedError, OtherProcess, ended
from convpool.ir.save import serialize

START_S = 120
"""Limit for importing onnxruntime, on a loaded machine."""


def make_session(model: LoadedModel, *, optimize: bool, threads: int = 0, spin: bool = False) -> Any:
    """An onnxruntime session on the CPU, in this process.

    optimize: with onnxruntime's own passes.  threads: 0 for as many as there are cores.  spin: idle threads wait for work
    awake, as is onnxruntime's default: faster for a session by itself, and in the way of others.
    """
    options: dict[str, Any] = {"optimize": optimize, "threads": threads, "spin": spin}
    return session_process.open_session(serialize(model.proto), _folder(model), **options)


class Session:
    """As `make_session`, in another process, for models that may end it: then it raises EndedError.

    The model is kept as it is, and may not change.
    """

    def __init__(self, model: LoadedModel, *, optimize: bool, threads: int = 0, spin: bool = False) -> None:
        self._model, self._options = model, {"optimize": optimize, "threads": threads, "spin": spin}
        with _lock:
            self._make(_current())

    def get_inputs(self) -> list[Any]:
        """The inputs, with name and type."""
        return [SimpleNamespace(name=name, type=kind) for name, kind in self._inputs]

    def get_outputs(self) -> list[Any]:
        """The outputs, with their names."""
        return [SimpleNamespace(name=name) for name in self._outputs]

    def run(self, names: list[str] | None, arrays: Arrays) -> list[Any]:
        """As an onnxruntime session's."""
        return self._ask("run", names, arrays)

    def turn(self, arrays: Arrays) -> float:
        """Microseconds per run, the runs timed where they are done; see `session_process.turn`."""
        return self._ask("turn", arrays)

    def _ask(self, method: str, *arguments: Any) -> Any:
        with _lock:
            place = _current()
            if self._place() is not place:
                self._make(place)
            return place.ask(method, self._number, *arguments)

    def _make(self, place: _Place) -> None:
        content = pickle.PickleBuffer(serialize(self._model.proto))
        self._number, self._inputs, self._outputs = place.ask("make", content, _folder(self._model), self._options)
        self._place = weakref.ref(place)
        weakref.finalize(self, place.drop, self._number).atexit = False


class _There(OtherProcess):
    """Sessions in another process."""

    def __init__(self) -> None:
        found = [find_spec(name) for name in ("numpy", "onnxruntime", "ml_dtypes")]
        folders = dict.fromkeys(str(Path(spec.origin).parents[1]) for spec in found if spec is not None and spec.origin)
        super().__init__(session_process.__file__, *folders)
        self.gone, self._ready, self._dropped = False, False, list[int]()

    def is_ready(self) -> bool:
        """Wait until it is; False where it does not start."""
        with suppress(TimeoutError):
            self._ready = self._ready or self.read(1, time.monotonic() + START_S) == READY
        if not self._ready:
            self.end(0)
        return self._ready

    def ask(self, method: str, *arguments: Any) -> Any:
        """What a method of `Sessions` gives.  Raises EndedError, and RuntimeError in place of what onnxruntime raises."""
        while self._dropped:
            self._exchange("drop", self._dropped.pop())
        return self._exchange(method, *arguments)

    def drop(self, number: int) -> None:
        """Forget a session: at once, or with the next request where one is under way, perhaps of this thread."""
        if not self.is_own or self.gone:
            return
        self._dropped.append(number)
        if _lock.acquire(blocking=False):
            try:
                self.ask("drop", self._dropped.pop())
            except EndedError:
                pass
            finally:
                _lock.release()

    def _exchange(self, *request: Any) -> Any:
        try:
            self.write(packed(request))
            kind, value = unpacked(self.read)
        except EOFError:
            self.gone = True
            raise ended(self.end()) from None
        except BaseException:
            self.gone = True
            self.end(0)
            raise
        if kind != "done":
            raise MemoryError if kind == "memory" else RuntimeError(value)
        return value


class _Here:
    """Sessions in this process, where no other one can be started."""

    def __init__(self) -> None:
        self._sessions = Sessions()

    def ask(self, method: str, *arguments: Any) -> Any:
        """What a method of `Sessions` gives.  Raises what onnxruntime raises."""
        return getattr(self._sessions, method)(*arguments)

    def drop(self, number: int) -> None:
        """Forget a session."""
        self._sessions.drop(number)


_Place = _There | _Here
_lock = threading.Lock()
_place: _Place | None = None


def prepare() -> None:
    """Start the process, which takes as long as importing onnxruntime, if it does not run; do not wait for it."""
    with _lock:
        _start()


def _start() -> _Place:
    global _place
    if _place is None or (isinstance(_place, _There) and (_place.gone or not _place.is_own)):
        try:
            _place = _There()
        except OSError:
            _place = _Here()
    return _place


def _current() -> _Place:
    """Where sessions are from now on."""
    global _place
    place = _start()
    if isinstance(place, _There) and not place.is_ready():
        place = _place = _Here()
    return place


def fitted(session: Any, arrays: Arrays) -> Arrays:
    """The arrays as a session's inputs take them: in float32 where the model was made float32."""
    floats = {item.name for item in session.get_inputs() if item.type == "tensor(float)"}
    return {name: array.astype(np.float32, copy=False) if name in floats else array for name, array in arrays.items()}


def evaluate(model: ModelProto, name: str) -> np.ndarray:
    """The value of one tensor of a model without inputs, for `convpool.ir.index`.  Raises what `Session` does."""
    (result,) = Session(LoadedModel(model, None, 0), optimize=False).run([name], {})
    return result


def _folder(model: LoadedModel) -> str | None:
    return None if model.base_dir is None else str(model.base_dir)


def _end() -> None:
    if isinstance(_place, _There) and _place.is_own:
        _place.end()


atexit.register(_end)

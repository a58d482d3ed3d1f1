# SPDX-License-Identifier: Apache-2.0
"""Progress of a build, and how Ctrl-C stops one."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from convpool import interrupt
from convpool.tensorrt.build_options import Progress


def monitor_of(trt: ModuleType, config: Any, progress: Progress | None) -> Any:
    """The config's new monitor, which hands TensorRT's steps on; None without a progress function, or before TensorRT 10.

    TensorRT prints an exception in a callback and goes on: the monitor keeps it as `error` and stops the build.
    """
    if progress is None or not hasattr(trt, "IProgressMonitor") or not hasattr(config, "progress_monitor"):
        return None

    tell = progress

    class Monitor(trt.IProgressMonitor):  # type: ignore[name-defined]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self._steps: dict[str, int] = {}
            self.error: BaseException | None = None

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            self._steps[phase_name] = num_steps
            self._tell(phase_name, 0, num_steps)

        def step_complete(self, phase_name: str, step: int) -> bool:
            self._tell(phase_name, step + 1, self._steps.get(phase_name, 0))
            return self.error is None

        def phase_finish(self, phase_name: str) -> None:
            steps = self._steps.pop(phase_name, 0)
            self._tell(phase_name, steps, steps)

        def _tell(self, *step: Any) -> None:
            try:
                if self.error is None:
                    tell(*step)
            except BaseException as error:
                self.error = error

    config.progress_monitor = Monitor()
    return config.progress_monitor


@contextmanager
def interruptible(monitor: Any) -> Iterator[None]:
    """Ctrl-C stops the build at its next step: Python would raise KeyboardInterrupt in a callback, where it is printed.

    So do SIGTERM and SIGHUP in a command.  Without a monitor these end the process at once, as nothing is being written.
    """
    own = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in interrupt.WORDS if own}
    raising = [number for number, handler in before.items() if handler in (signal.default_int_handler, interrupt.stop)]

    def stop(number: int, _frame: object) -> None:
        monitor.error = KeyboardInterrupt(number)

    for number in raising:
        if monitor is not None:
            signal.signal(number, stop)
        elif number != signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)
    try:
        yield
    finally:
        for number in raising:
            signal.signal(number, before[number])

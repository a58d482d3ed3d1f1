# SPDX-License-Identifier: Apache-2.0
"""The loop over rows and methods.  Whatever was measured is in the record, also after Ctrl-C or a failure."""

from __future__ import annotations

import fnmatch
import functools
import importlib.metadata
import importlib.util
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from benchmarks.layers import cpu, cublas, cuconv, cudnn, ort, tactics, textbook
from benchmarks.layers.case import LIMITS, NORMALS, Candidate, Case, Skip
from benchmarks.layers.device import Device, DeviceError
from benchmarks.layers.figures import NO_WORKSPACE, ON_CPU, OURS, RULE, SLOW, TACTIC
from benchmarks.layers.record import Entry, Result, machine, new_entry, significant
from benchmarks.layers.rows import Row
from benchmarks.layers.tensorrt import Worker, WorkerError
from convpool import cuda
from convpool.cuda import tuned
from convpool.errors import ConvpoolError, first_line

LIBRARIES: dict[str, Callable[[Case], list[Candidate]]] = {
    "cudnn_naive": cudnn.naive,
    "cudnn_fused": cudnn.fused,
    "cudnn_direct": cudnn.direct,
    "cublas_fused": cublas.fused,
    "cublas_direct": cublas.direct,
    "sat_direct": cudnn.summed_area,
    "cuconv": cuconv.two_stages,
    "textbook_direct": textbook.basic,
    "textbook_tiled": textbook.tiled,
    "textbook_gemm": textbook.unrolled,
    **{name: ort.candidates(name) for name in ort.NAMES},
}
TENSORRT = {f"tensorrt_{form}": form for form in ("naive", "fused", "direct")}
CHOICES = (NO_WORKSPACE, RULE, OURS)
METHODS = (*LIBRARIES, *TENSORRT, *ON_CPU, *CHOICES)
"""Every method by name; tactics come on top, as convpool:TACTIC."""

SLOW_GPU_MACS, SLOW_CPU_MACS = 2 * 10**10, 10**9
"""Multiply-adds above which the slow methods are left out unless they are asked for."""
HOPELESS = 1.5
"""An algorithm whose first call takes so many times the fastest one's is not looked at closer."""
PREFIX = "conv_avgpool_"

Progress = Callable[[int, int, str], None]
"""Called with (rows done, rows in all, what is being measured)."""


@dataclass(frozen=True)
class Options:
    """Methods to measure and how.  methods: patterns as in a shell; plans: how many of cuDNN's
    engines to try, None: all; tensorrt_python: the interpreter with TensorRT, None: this one."""

    precisions: tuple[str, ...] = ()
    layout: str = "nhwc"
    methods: tuple[str, ...] = ("*",)
    replays: int = 15
    plans: int | None = None
    on_cpu: bool = False
    slow: bool = False
    tensorrt_python: str | None = None
    tensorrt_level: int = 3

    def wants(self, name: str) -> bool:
        """Return True if a method is to be measured."""
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.methods)


def protocol(options: Options) -> dict[str, Any]:
    """How figures come about, for the record."""
    try:
        version = importlib.metadata.version("convpool")
    except importlib.metadata.PackageNotFoundError:
        version = None
    return {
        "timing": "CUDA graph of calls on rotated inputs, L2 emptied before every replay; median and interquartile range",
        "replays": options.replays,
        "plans": options.plans,
        "bias": "none on either side",
        "weights": "constant; what a method makes of them is made once, before",
        "convpool": version,
        "versions": {},
        "choice": "cost rule" if os.environ.get("CONVPOOL_TUNED") == tuned.OFF else "measured before, else cost rule",
    }


class Run:
    """One run, which fills `record`.  Raises DeviceError without a GPU where a method needs one, WorkerError where the
    TensorRT that was asked for cannot be had."""

    def __init__(self, record: dict[str, Any], work: Sequence[tuple[Row, str]], options: Options) -> None:
        self.record, self.work, self.options = record, work, options
        self.device: Device | None = None
        self.worker: Worker | None = None
        self._no_worker = ""
        self._by_rule: dict[tuple[Row, str], cuda.Tactic] = {}
        if any(map(options.wants, (*LIBRARIES, *CHOICES))) or any(p.startswith(TACTIC) for p in options.methods):
            self._use_gpu()
        if options.wants(RULE):
            self._by_rule = dict(zip(work, tactics.by_rule(work, options.layout, cuda.current_device()), strict=True))
        if any(map(options.wants, TENSORRT)):
            self._use_tensorrt()

    def _use_gpu(self) -> None:
        self.device = device = Device(self.options.replays, self.options.plans)
        about = self.record["protocol"]
        about["compute_capability"], about["multiprocessors"] = device.compute_capability, device.multiprocessors
        about["versions"].update(device.versions())
        precisions = dict.fromkeys(precision for _, precision in self.work)
        if "fp32" in precisions:
            precisions["tf32"] = None  # in which three products make one of fp32
        self.record["ceilings"] = {
            "copy_tb_per_s": device.copy_tb_per_s(),
            "tflops": {precision: device.tflops(precision) for precision in precisions},
        }
        self.record["machine"] = machine()  # again, now that the clocks are up

    def _use_tensorrt(self) -> None:
        python = self.options.tensorrt_python
        if python is None and importlib.util.find_spec("tensorrt") is None:
            self._no_worker = "no TensorRT in this Python; --tensorrt-python names another"
            return
        try:
            self.worker = Worker(python)
        except WorkerError as error:
            if python is not None:
                raise
            self._no_worker = first_line(error)
            return
        self.record["protocol"]["versions"]["TensorRT"] = self.worker.version
        self.record["protocol"]["tensorrt_level"] = self.options.tensorrt_level

    def measure(self, progress: Progress) -> None:
        """Measure everything.  KeyboardInterrupt and errors pass through; the record keeps what was done."""
        try:
            for number, (row, precision) in enumerate(self.work):
                entry = new_entry(row, precision, self.options.layout)
                self.record["rows"].append(entry)
                try:
                    self._row(row, entry, functools.partial(self._tell, progress, number))
                finally:
                    if not entry["methods"]:
                        self.record["rows"].remove(entry)
        finally:
            if self.worker is not None:
                self.worker.close()

    def _tell(self, progress: Progress, number: int, what: str) -> None:
        progress(number, len(self.work), f"{self.work[number][0].name} {what}")

    def _row(self, row: Row, entry: Entry, progress: Callable[[str], None]) -> None:
        options, methods, seconds = self.options, entry["methods"], entry.setdefault("seconds", {})
        if self.device is not None:
            with _timed(seconds, "data"):
                case = Case(self.device, row, entry["precision"], options.layout)
            entry["input_sets"] = case.sets
            for name, make in LIBRARIES.items():
                if options.wants(name):
                    progress(name)
                    slow = name.startswith(("textbook", "cuconv")) and row.naive_macs > SLOW_GPU_MACS and not options.slow
                    with _timed(seconds, name):
                        found = {"skipped": SLOW} if slow else measure(case, functools.partial(make, case))
                    methods[name] = self._after_prologue(row, entry["precision"], found)
                    case.chosen[name] = methods[name].get("how", "")
            with _timed(seconds, OURS):
                methods.update(self._ours(case, progress))
        for name, form in TENSORRT.items():
            if options.wants(name):
                progress(name)
                with _timed(seconds, name):
                    found = self._tensorrt(row, entry["precision"], form)
                methods[name] = self._after_prologue(row, entry["precision"], found)
        for name in ON_CPU if options.on_cpu else ():
            if options.wants(name):
                progress(name)
                slow = row.naive_macs > SLOW_CPU_MACS and not options.slow
                reason = "without a prologue only" if row.prologue else SLOW if slow else ""
                with _timed(seconds, name):
                    methods[name] = {"skipped": reason} if reason else cpu.measure(name, row)

    def _after_prologue(self, row: Row, precision: str, found: Result) -> Result:
        """A library's result with the time of the row's prologue added: a kernel of its own at the speed of memory."""
        size_bytes, bandwidth = row.prologue_bytes(precision), self.record["ceilings"].get("copy_tb_per_s")
        if "us" not in found or not size_bytes:
            return found
        if bandwidth is None:
            return {"skipped": "the prologue's time needs the copy bandwidth, which is measured with another method beside"}
        prologue_us = round(size_bytes / (bandwidth * 1e6), 3)
        return {**found, "us": round(found["us"] + prologue_us, 3), "prologue_us": prologue_us}

    def _tensorrt(self, row: Row, precision: str, form: str) -> Result:
        """TensorRT's result.  A row that ends its process is skipped, and the next one gets a new process."""
        options = self.options
        if self.worker is None:
            return {"skipped": self._no_worker}
        try:
            return self.worker.measure(row, precision, options.layout, form, options.replays, options.tensorrt_level)
        except WorkerError as error:
            self.worker.close()
            self.worker = None
            self._use_tensorrt()
            return {"skipped": first_line(error)}

    def _ours(self, case: Case, progress: Callable[[str], None]) -> dict[str, Result]:
        """Results of the tactics asked for and of the choices, which are tactics too."""
        options = self.options
        choices = {name: tactics.choice(case, workspace=name == OURS) for name in (NO_WORKSPACE, OURS) if options.wants(name)}
        if options.wants(RULE):
            choices[RULE] = self._by_rule[case.row, case.precision]
        measured: dict[int, Result] = {}
        results = {}
        for tactic in tactics.usable(case):
            name = TACTIC + tactic.name.removeprefix(PREFIX)
            slow = tactic.family == "generic" and case.row.direct_flops > 2 * SLOW_GPU_MACS and not options.slow
            asked = options.wants(name) and not slow
            if asked or tactic in choices.values():
                progress(name)
                measured[tactic.id] = measure(case, functools.partial(_only, case, tactic))
            if asked:
                results[name] = measured[tactic.id]
        return results | {name: measured[tactic.id] for name, tactic in choices.items()}


@contextmanager
def _timed(seconds: dict[str, float], what: str) -> Iterator[None]:
    """Keeps the wall seconds of a block."""
    start = time.perf_counter()
    try:
        yield
    finally:
        seconds[what] = round(time.perf_counter() - start, 2)


def _only(case: Case, tactic: cuda.Tactic) -> list[Candidate]:
    return [tactics.candidate(case, tactic)]


def measure(case: Case, make: Callable[[], list[Candidate]]) -> Result:
    """The result of a method: of the fastest of its candidates whose output is right.

    Raises DeviceError if the GPU cannot go on.
    """
    try:
        candidates = make()
        ranked = list(_ranked(case, candidates))
        wrong = None
        for candidate in ranked:
            errors, exact = case.check(candidate)
            if all(error <= LIMITS[case.precision] for error in errors.values()):
                result = {
                    **case.device.measure(candidate.call, case.sets),
                    "error": significant(errors[NORMALS]),
                    "exact": exact,
                    "how": candidate.how,
                }
                if candidate.tactic is not None:
                    result["tactic"] = candidate.tactic
                return result | ({"candidates": len(candidates)} if len(candidates) > 1 else {})
            wrong = wrong or {"wrong": max(errors.values(), key=lambda e: (e != e, e)), "how": candidate.how}
        return wrong or {"skipped": "no algorithm runs this"}
    except Skip as reason:
        return {"skipped": str(reason)}
    except (ConvpoolError, RuntimeError, MemoryError) as error:
        _alive(case, error)
        return {"skipped": first_line(error)}


def _ranked(case: Case, candidates: list[Candidate]) -> Iterator[Candidate]:
    """Fastest first, by few replays; those that fail are left out."""
    if len(candidates) == 1:
        yield candidates[0]
        return
    timed, least = [], math.inf
    for number, candidate in enumerate(candidates):
        try:
            us = case.device.measure(candidate.call, case.sets, quick=True, give_up_us=HOPELESS * least)["us"]
        except (ConvpoolError, RuntimeError, MemoryError) as error:
            _alive(case, error)
            continue
        timed.append((us, number))
        least = min(least, us)
    for _, number in sorted(timed):
        yield candidates[number]


def _alive(case: Case, error: BaseException) -> None:
    """Nothing if the GPU still works after an error, else DeviceError."""
    try:
        case.device.torch.cuda.synchronize()
    except RuntimeError as later:
        raise DeviceError(f"GPU: stopped at {case.row.name}; got {first_line(error)}; {first_line(later)}") from error

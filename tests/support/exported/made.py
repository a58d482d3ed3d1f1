# SPDX-License-Identifier: Apache-2.0
"""Exported models with what convpool makes of them, each made once."""

import shutil
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator

import convpool
from convpool.report import Report
from tests.support import sessions
from tests.support.data_files import snapshot
from tests.support.exported.cases import CASES
from tests.support.exported.exporting import Exported, export

LAYOUTS = ("auto", "one", "keep")
MODELS = [(name, exporter) for name, case in CASES.items() for exporter in case.exporters]
NO_KERNELS = {"float64", "bfloat16"}
"""Cases whose types have no kernels in onnxruntime on a CPU; onnx's reference runs them."""


@dataclass(frozen=True)
class Made:
    """An exported model, its result in every layout in a folder of its own, and the files before and after.  files: by layout,
    those that `save` names, the model first."""

    exported: Exported
    report: Report
    changed: bool
    files: dict[str, list[Path]]
    before: dict[str, tuple]
    after: dict[str, tuple]


@cache
def root() -> Path:
    """A new folder for all models."""
    return Path(mkdtemp(prefix="convpool-exported-"))


def remove() -> None:
    """Delete all models."""
    if root.cache_info().currsize:
        shutil.rmtree(root())
        root.cache_clear()
        made.cache_clear()


@cache
def made(name: str, exporter: str) -> Made:
    """Export a case, optimize the file, and save the result in every layout."""
    folder = root() / exporter / str(list(CASES).index(name))
    exported, before = export(name, exporter, folder / "original"), snapshot(folder / "original")
    result, files = convpool.optimize(exported.path), {}
    for layout in LAYOUTS:
        (folder / layout).mkdir()
        files[layout] = result.save(folder / layout / "result.onnx", external_data=layout)
    return Made(exported, result.report, result.changed, files, before, snapshot(folder / "original"))


def assert_gives(path: Path, exported: Exported, name: str) -> None:
    """A stored model gives PyTorch's outputs."""
    if name in NO_KERNELS:
        outputs = ReferenceEvaluator(onnx.load(path)).run(None, exported.feeds)
    else:
        outputs = sessions.run(str(path), exported.feeds)
    for output, expected in zip(outputs, exported.expected, strict=True):
        assert output.shape == expected.shape and np.isfinite(expected).all() and np.ptp(expected) > 0
        error = np.abs(output.astype(np.float64) - expected).max() / np.abs(expected).max()
        assert error <= exported.tolerance, f"{path}: {error:.3g} of the largest, {exported.tolerance:.3g} allowed"

# SPDX-License-Identifier: Apache-2.0
"""`convpool doctor` on whatever machine this is."""

import os
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner

from convpool.cli import doctor
from convpool.cuda import library

ANOTHER = os.path.realpath(np.random.bit_generator.__file__)
"""A library that is not convpool's."""


def test_report_fits_a_screen_and_names_every_part():
    result = CliRunner().invoke(doctor.command, [], env={"COLUMNS": "100"})
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert len(lines) <= 30
    for what in ("convpool", "driver", "GPU", "library", "plugin", "TensorRT", "CUDA provider"):
        assert any(line.startswith(what) for line in lines), what
    assert lines[-1].startswith("Works: the optimizer")


@pytest.mark.parametrize("state", [doctor.OK, doctor.MISSING])
def test_kernels_that_do_not_run_here_do_not_work(monkeypatch, state):
    parts = ("driver", "GPU", "library", "architectures", "plugin", "array library", "TensorRT", "CUDA provider")
    found = [*(doctor.Finding(part, doctor.OK, "") for part in parts), doctor.Finding("kernels", state, "an old driver")]
    monkeypatch.setattr(doctor, "findings", lambda: found)
    rest = "the kernels, TensorRT engines, onnxruntime on the GPU."
    last = CliRunner().invoke(doctor.command, []).output.splitlines()[-1]
    assert last == f"Works: the optimizer{',' if state == doctor.OK else '; not yet:'} {rest}"


def test_missing_library_comes_with_advice(monkeypatch, tmp_path):
    monkeypatch.setenv("CONVPOOL_LIBRARY", str(tmp_path / "libconvpool.so"))
    library = next(f for f in doctor.findings() if f.what == "library")
    assert library.state == doctor.MISSING and "unset it" in library.advice
    assert library.found == f"not found; got {tmp_path}/libconvpool.so, expected the built library"


def test_a_library_that_is_another_comes_with_advice(monkeypatch):
    monkeypatch.setenv("CONVPOOL_LIBRARY", ANOTHER)
    library = next(f for f in doctor.findings() if f.what == "library")
    assert library.state == doctor.MISSING and "undefined symbol" in library.found and "unset it" in library.advice


@pytest.mark.parametrize(
    ("script", "state", "found"),
    [
        ("echo 580.1", doctor.OK, "CUDA 13.0, driver 580.1"),
        ("echo NVIDIA-SMI has failed; exit 9", doctor.NOTE, "CUDA 13.0; nvidia-smi: NVIDIA-SMI has failed"),
        ("exit 3", doctor.NOTE, "CUDA 13.0; nvidia-smi: status 3"),
    ],
)
def test_an_nvidia_smi_that_fails_is_no_driver_version(monkeypatch, tmp_path, script, state, found):
    class Driver:
        def cuDriverGetVersion(self, version):
            version._obj.value = 13000

    smi = tmp_path / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\n{script}\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(doctor, "driver", Driver)
    driver = doctor._driver()
    assert (driver.state, driver.found) == (state, found)


def test_covered_architectures():
    assert [cc for cc in (70, 75, 80, 86, 89, 90, 100) if doctor._covered(cc, [75, 80, 90])] == [75, 80, 86, 89, 90, 100]


def test_a_missing_plugin_comes_with_advice_and_a_library_without_one_is_none(monkeypatch):
    names = "CONVPOOL_PLUGIN_LIBRARY names"
    for path, field, text in (("/none.so", "advice", names), (ANOTHER, "found", "no plugins in it; got")):
        monkeypatch.setenv("CONVPOOL_PLUGIN_LIBRARY", path)
        plugin = next(f for f in doctor.findings() if f.what == "plugin")
        assert plugin.state == doctor.MISSING and getattr(plugin, field).startswith(f"{text} {path}")


def test_without_the_distribution_it_says_how_to_get_it(monkeypatch):
    for name in ("CONVPOOL_LIBRARY", "CONVPOOL_PLUGIN_LIBRARY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(library, "DISTRIBUTION", "convpool-none")
    library._load.cache_clear()
    found = {f.what: f for f in doctor.findings()}
    assert (found["library"].state, found["library"].found) == (doctor.MISSING, "not built: pip install ./plugin")
    assert "compiles for 5 GPU architectures, about" in found["library"].advice and "architectures" not in found
    assert (found["plugin"].state, found["plugin"].found) == (doctor.MISSING, "comes with the library")


def test_advice_names_the_architectures_that_are_here_or_the_compiler_that_is_not(monkeypatch):
    monkeypatch.delenv("CONVPOOL_LIBRARY", raising=False)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: "/usr/bin/g++" if name == "g++" else None)
    advice = doctor._advice("CONVPOOL_LIBRARY", [("A", 90), ("B", 80), ("C", 90)])
    assert advice.startswith("`pip install ./plugin` in") and "CONVPOOL_CUDA_ARCHITECTURES=80,90 compiles for" in advice
    assert "ARCHITECTURES" not in doctor._advice("CONVPOOL_LIBRARY", [])
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    assert doctor._advice("CONVPOOL_LIBRARY", []).startswith("install a C++ compiler (Debian: apt-get install g++), then `pip")


@pytest.mark.parametrize(
    ("providers", "library", "state", "found", "advice"),
    [
        (["CPUExecutionProvider"], doctor.OK, doctor.NOTE, "not in onnxruntime 1.99", "pip install onnxruntime-gpu"),
        ([doctor.CUDA], doctor.MISSING, doctor.NOTE, "onnxruntime 1.99; libconvpool_ort.so comes with the library", ""),
        ([doctor.CUDA], doctor.OK, doctor.OK, "onnxruntime 1.99, libconvpool_ort.so", ""),
    ],
)
def test_the_cuda_provider_comes_with_advice(monkeypatch, tmp_path, providers, library, state, found, advice):
    runtime = SimpleNamespace(__version__="1.99", get_available_providers=lambda: providers)
    monkeypatch.setattr(doctor, "runtime_module", lambda: runtime)
    for name in ("libconvpool.so", "libconvpool_ort.so"):
        (tmp_path / name).touch()
    monkeypatch.setenv("CONVPOOL_LIBRARY", str(tmp_path / "libconvpool.so"))
    finding = doctor._provider(doctor.Finding("library", library, ""))
    assert (finding.state, finding.found) == (state, found) and advice in finding.advice
    (tmp_path / "libconvpool_ort.so").unlink()
    if state == doctor.OK:
        lost = doctor._provider(doctor.Finding("library", doctor.OK, ""))
        assert lost.state == doctor.NOTE and lost.found.startswith("libconvpool_ort.so: not found; got")

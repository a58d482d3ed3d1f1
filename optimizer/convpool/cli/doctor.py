# SPDX-License-Identifier: Apache-2.0
"""`convpool doctor`: what this machine has of what convpool's GPU parts need, and what to do about the rest.

Looks without changing anything, and imports GPU packages only to ask whether they are there.
"""

import ctypes
import ctypes.util
import importlib.metadata
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass

import click
from rich.markup import escape

from convpool.cli.table import make_console
from convpool.cuda.library import INSTALL, VARIABLE, driver
from convpool.errors import OnnxruntimeError, TensorRTError
from convpool.onnxruntime.session import CUDA, NAME, runtime_module
from convpool.onnxruntime.session import library_path as ort_library_path
from convpool.tensorrt.package import plugin_path

OK, MISSING, NOTE = "ok", "missing", "note"
_COMPILE = "pip install ./plugin"
_COMPILES = (
    "in convpool's repository: it compiles for 5 GPU architectures, about 6 minutes on 2 cores (`pip` shows nothing meanwhile)"
)
_GPU_PACKAGE = "pip uninstall onnxruntime, then pip install onnxruntime-gpu (the two share a folder)"
_MARKS = {OK: "[green]ok[/]     ", MISSING: "[red]missing[/]", NOTE: "[yellow]note[/]   "}


@dataclass(frozen=True)
class Finding:
    """One line of the report; `advice` says what to do if state is not OK."""

    what: str
    state: str
    found: str
    advice: str = ""


def _version(*distributions: str) -> str | None:
    for name in distributions:
        try:
            return f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _gpus() -> list[tuple[str, int]]:
    """(name, compute capability as major*10+minor) of every GPU, by the driver; empty without driver or GPU."""
    cuda = driver()
    if cuda is None or cuda.cuInit(0) != 0:
        return []
    count = ctypes.c_int()
    cuda.cuDeviceGetCount(ctypes.byref(count))
    gpus = []
    for index in range(count.value):
        device, name = ctypes.c_int(), ctypes.create_string_buffer(256)
        major, minor = ctypes.c_int(), ctypes.c_int()
        if cuda.cuDeviceGet(ctypes.byref(device), index) == 0:
            cuda.cuDeviceGetName(name, 256, device)
            cuda.cuDeviceGetAttribute(ctypes.byref(major), 75, device)  # COMPUTE_CAPABILITY_MAJOR
            cuda.cuDeviceGetAttribute(ctypes.byref(minor), 76, device)
            gpus.append((name.value.decode(), major.value * 10 + minor.value))
    return gpus


def _driver() -> Finding:
    if (cuda := driver()) is None:
        advice = "install NVIDIA's driver; without it, only the optimizer works"
        return Finding("driver", MISSING, "libcuda.so.1 not found", advice)
    version = ctypes.c_int()
    cuda.cuDriverGetVersion(ctypes.byref(version))
    number = f"CUDA {version.value // 1000}.{version.value % 1000 // 10}"
    smi = shutil.which("nvidia-smi")
    if not smi:
        return Finding("driver", OK, number)
    query = [smi, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        asked = subprocess.run(query, capture_output=True, text=True, timeout=30)
        failed, said = asked.returncode != 0, (asked.stdout + asked.stderr).splitlines() or [f"status {asked.returncode}"]
    except (OSError, subprocess.TimeoutExpired) as error:
        failed, said = True, [str(error)]
    if failed:
        return Finding("driver", NOTE, f"{number}; nvidia-smi: {said[0]}", "see what keeps nvidia-smi from answering")
    return Finding("driver", OK, f"{number}, driver {said[0]}")


def _covered(cc: int, architectures: list[int]) -> bool:
    """Machine code runs within its major version from its minor on; PTX of the last one on anything later."""
    return any(a // 10 == cc // 10 and a <= cc for a in architectures) or cc >= max(architectures)


def _advice(variable: str, gpus: list[tuple[str, int]]) -> str:
    """Advise on a library that cannot be used."""
    if named := os.environ.get(variable):
        return f"{variable} names {named}: unset it, or name the built library"
    if not (shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")):
        return f"install a C++ compiler (Debian: apt-get install g++), then `{_COMPILE}` {_COMPILES}"
    here = ",".join(sorted({str(cc) for _, cc in gpus}))
    return f"`{_COMPILE}` {_COMPILES}" + (f"; CONVPOOL_CUDA_ARCHITECTURES={here} compiles for the GPU here alone" if here else "")


def _shown(error: Exception) -> str:
    """An error's first two parts: what, and what was got."""
    return "; ".join(str(error).removeprefix("libconvpool: ").split("; ")[:2])


def _library(gpus: list[tuple[str, int]]) -> list[Finding]:
    from convpool.cuda import LibraryError, library, tactics
    from convpool.errors import NotBuiltError

    try:
        lib = library.load()
    except LibraryError as error:
        shown = f"not built: {_COMPILE}" if isinstance(error, NotBuiltError) else _shown(error)
        return [Finding("library", MISSING, shown, _advice(VARIABLE, gpus))]
    cuda_version = lib.convpool_cuda_version()
    architectures = [int(a) for a in lib.convpool_architectures().decode().split(",")]
    cuda = f"CUDA {cuda_version // 1000}.{cuda_version % 1000 // 10}"
    built = f"{lib.convpool_version().decode()}, {cuda}, {len(tactics())} tactics"
    findings = [Finding("library", OK, built)]
    uncovered = [(name, cc) for name, cc in gpus if not _covered(cc, architectures)]
    wanted = ",".join(sorted({str(cc) for _, cc in uncovered}))
    there = ", ".join(f"sm_{a}" for a in architectures) + "".join(f"; none for {name} ({cc / 10})" for name, cc in uncovered)
    command = f"`CONVPOOL_CUDA_ARCHITECTURES={wanted} pip install --force-reinstall --no-deps ./plugin` in convpool's repository"
    state, advice = (MISSING, command) if uncovered else (OK, "")
    return [*findings, Finding("architectures", state, there, advice)]


def _plugin(library: Finding) -> Finding:
    """TensorRT's plugins, a part of the library, which needs no TensorRT to be loaded."""
    named = os.environ.get("CONVPOOL_PLUGIN_LIBRARY")
    if library.state != OK and not named:
        return Finding("plugin", MISSING, "comes with the library")
    try:
        path = plugin_path()
        if not hasattr(ctypes.CDLL(str(path)), "getPluginCreators"):
            raise TensorRTError(f"no plugins in it; got {path}, expected convpool's library")
    except (TensorRTError, OSError, UnicodeDecodeError) as error:
        return Finding("plugin", MISSING, _shown(error), _advice("CONVPOOL_PLUGIN_LIBRARY" if named else VARIABLE, []))
    return Finding("plugin", OK, path.name)


def _provider(library: Finding) -> Finding:
    """Check that onnxruntime can run the kernels: CUDA provider, library of custom operators."""
    only = "only needed to run the kernels in onnxruntime: "
    try:
        runtime = runtime_module()
        if CUDA not in runtime.get_available_providers():
            return Finding("CUDA provider", NOTE, f"not in onnxruntime {runtime.__version__}", only + _GPU_PACKAGE)
        found = f"onnxruntime {runtime.__version__}"
        if library.state != OK:
            return Finding("CUDA provider", NOTE, f"{found}; {NAME} comes with the library")
        return Finding("CUDA provider", OK, f"{found}, {ort_library_path().name}")
    except OnnxruntimeError as error:
        return Finding("CUDA provider", NOTE, _shown(error), only + INSTALL)


def _packages() -> list[Finding]:
    pycuda = _version("pycuda")
    arrays = ", ".join(v for v in (pycuda, _version("cupy-cuda13x", "cupy-cuda12x", "cupy"), _version("torch")) if v)
    onnxruntime = _version("onnxruntime", "onnxruntime-gpu")
    tensorrt = _version("tensorrt", "tensorrt-cu12", "tensorrt-cu13")  # lean and RTX build no engines with plugins
    neither, needed = "found neither pycuda nor CuPy nor PyTorch", "pip install pycuda (needs a CUDA toolkit), or CuPy or PyTorch"
    engines, runs = "only needed to build engines: pip install tensorrt", "pip install onnxruntime: every check runs models in it"
    rows = (
        ("array library", arrays, MISSING, neither, needed),
        ("TensorRT", tensorrt, NOTE, "no Python package found", engines),
        ("onnxruntime", onnxruntime, MISSING, "not found", runs),
    )
    return [Finding(what, OK, there) if there else Finding(what, *missing) for what, there, *missing in rows]


def _runs(gpus: list[tuple[str, int]]) -> Finding:
    """Check that the library can use this GPU, as far as is known without running a kernel."""
    from convpool.cuda import ConvpoolError, Problem

    problem = Problem(n=1, c=32, m=32, spatial=(16, 16), kernel_shape=3, pool_kernel_shape=2, pool_pads=1, strides=2)
    try:
        tactic = problem.default_tactic()
    except ConvpoolError as error:
        return Finding("kernels", MISSING, str(error), "see the lines above")
    return Finding("kernels", OK, f"{gpus[0][0]} would take {tactic.name.removeprefix('conv_avgpool_')} for a 3x3 layer")


def findings() -> list[Finding]:
    """Everything `convpool doctor` shows, top to bottom."""
    gpus = _gpus()
    installed = _version("convpool") or "not installed, runs from its folder"
    names = ", ".join(f"{name} (compute capability {cc / 10})" for name, cc in gpus)
    needed = "a GPU of compute capability 7.5 or later runs the kernels; the optimizer needs none"
    state, advice = (OK, "") if max((cc for _, cc in gpus), default=0) >= 75 else (MISSING, needed)
    found = [Finding("convpool", OK, f"{installed}, Python {sys.version.split()[0]}"), _driver()]
    found.append(Finding("GPU", state, names or "no GPU found", advice))
    library_findings = _library(gpus)
    found += library_findings
    if gpus and library_findings[0].state == OK:
        found.append(_runs(gpus))
    return [*found, _plugin(library_findings[0]), *_packages(), _provider(library_findings[0])]


@click.command("doctor", short_help="Show what works on this machine.", context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """Show what the GPU parts need, what this machine has of it, and how to get the rest."""
    console = make_console(stderr=False)
    all_findings = findings()
    for f in all_findings:
        console.print(f"{f.what:13} {_MARKS[f.state]} {escape(f.found)}", soft_wrap=True)
    advice = [f for f in all_findings if f.advice]
    for f in advice:
        console.print(f"[bold]{f.what}[/]: {escape(f.advice)}", soft_wrap=True)
    states = {f.what: f.state for f in all_findings}
    runs = all(states.get(k, MISSING) != MISSING for k in ("driver", "GPU", "library", "architectures", "kernels"))
    kernels, provider = runs and states["array library"] == OK, runs and states["CUDA provider"] == OK
    engines = kernels and states["plugin"] == OK and states["TensorRT"] == OK
    ready = {"the kernels": kernels, "TensorRT engines": engines, "onnxruntime on the GPU": provider}
    works = ", ".join(["the optimizer", *(what for what, there in ready.items() if there)])
    missing = ", ".join(what for what, there in ready.items() if not there)
    console.print(f"Works: {works}{f'; not yet: {missing}' if missing else ''}.", soft_wrap=True)

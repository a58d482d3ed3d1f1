# SPDX-License-Identifier: Apache-2.0
"""The library file itself, and both adapters driven by a program that plays TensorRT."""

import ctypes
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEADER = ROOT / "plugin" / "include" / "convpool.h"


def test_exports_the_c_api_and_what_tensorrt_looks_up(plugin):
    listing = subprocess.run(["nm", "-D", "--defined-only", plugin], capture_output=True, text=True, check=True)
    names = {line.split()[-1].partition("@")[0] for line in listing.stdout.splitlines()}
    api = set(re.findall(r"^CONVPOOL_API [\w ]+\W(convpool_\w+)\(", HEADER.read_text(), re.MULTILINE))
    assert len(api) > 10 and names == api | {"getCreators", "getPluginCreators", "setLoggerFinder"}


def test_links_neither_tensorrt_nor_cuda_libraries_nor_a_second_file(plugin):
    listing = subprocess.run(["readelf", "-d", plugin], capture_output=True, text=True, check=True)
    needed = set(re.findall(r"\(NEEDED\).*\[(.*?)\]", listing.stdout))
    allowed = {
        "libstdc++.so.6", "libgcc_s.so.1", "libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1",
        "ld-linux-x86-64.so.2",
    }  # fmt: skip
    assert needed and needed <= allowed
    assert "RPATH" not in listing.stdout and "RUNPATH" not in listing.stdout


def test_no_creators_for_a_process_without_tensorrt(plugin):
    """An old-interface object of the wrong layout would crash whoever calls it, so an unknown caller gets none."""
    script = (
        "import ctypes, sys\n"
        "library = ctypes.CDLL(sys.argv[1]); count = ctypes.c_int32(-1)\n"
        "library.getPluginCreators(ctypes.byref(count)); old = count.value\n"
        "library.getCreators(ctypes.byref(count)); print(old, count.value)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, plugin], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "384"]
    assert "TensorRT version; got 0, expected 8.6 or 9" in done.stderr


def _gpu_here() -> bool:
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int(0)
    return cuda.cuInit(0) == 0 and cuda.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0


@pytest.mark.parametrize("device", ["pretended H100", "none"])
def test_host_drives_both_adapters(built, device):
    """Create, shapes, formats, tactics, workspace, serialise, clone, run, destroy; and every kind of wrong input."""
    if device == "none" and _gpu_here():
        pytest.skip("this machine has a GPU")
    library, flag = (built.plugin, "0") if device == "none" else (built.plugin_h100, "1")
    done = subprocess.run([built.host, library, flag], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    checks, failed = map(int, re.search(r"(\d+) checks, (\d+) failed", done.stdout).groups())
    assert failed == 0 and checks > (200_000 if flag == "1" else 50_000)


def test_the_build_s_hash_is_of_the_sources_alone(tmp_path):
    """The same wherever and whenever it is built, without git; another name or content gives another one."""
    if shutil.which("cmake") is None:
        pytest.skip("no cmake")

    def build_hash(folder: str, sources: dict[str, str]) -> str:
        for name, text in sources.items():
            (tmp_path / folder).mkdir(exist_ok=True)
            (tmp_path / folder / name).write_text(text)
        header, names = tmp_path / folder / "build_hash.h", ";".join(sources)
        script = ROOT / "plugin/tensorrt/build_hash.cmake"
        command = ["cmake", f"-DSOURCES={names}", f"-DFOLDER={tmp_path / folder}", f"-DOUTPUT={header}", "-P", script]
        subprocess.run(command, check=True, capture_output=True)
        return re.search(r'kBuildHash\[\] = "([0-9a-f]{12})"', header.read_text())[1]

    first = build_hash("one", {"a.cu": "x", "b.h": "y"})
    assert build_hash("two", {"b.h": "y", "a.cu": "x"}) == first
    others = [build_hash("three", {"a.cu": "x", "b.h": "z"}), build_hash("four", {"a.cu": "x", "c.h": "y"})]
    assert len({first, *others}) == 3


def test_both_adapters_run_on_a_gpu(built):
    """Every tactic, bit for bit as convpool_launch; weights kept only where the node says that they are constant."""
    if not _gpu_here():
        missing = pytest.fail if os.environ.get("REQUIRE_GPU") == "1" else pytest.skip
        missing("no GPU")
    done = subprocess.run([built.host, built.plugin, "gpu"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    checks, failed = map(int, re.search(r"(\d+) checks, (\d+) failed", done.stdout).groups())
    assert failed == 0 and checks > 300


def test_declarations_agree_with_the_sdk(tmp_path):
    """The project's own declarations against the headers of an SDK: layouts and numbers to compile, slots to run."""
    folder = os.environ.get("CONVPOOL_TENSORRT_INCLUDE_DIR")
    if not folder:
        pytest.skip("CONVPOOL_TENSORRT_INCLUDE_DIR is not set: no TensorRT SDK headers")
    version = Path(folder, "NvInferVersion.h").read_text()
    major = re.search(r"#define (?:NV_TENSORRT_MAJOR|TRT_MAJOR_ENTERPRISE) +(\d+)", version)[1]
    nvcc = Path(shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc").resolve()
    cuda = next(p for p in (nvcc.parents[1] / "include", Path("/usr/local/cuda/include")) if (p / "cuda.h").exists())
    program = tmp_path / "check"
    subprocess.run(
        [
            shutil.which("c++") or "g++", "-std=c++17", f"-DCONVPOOL_TENSORRT_SDK_MAJOR={major}",
            "-DCONVPOOL_DECLARE_ALL", "-isystem", folder, "-isystem", str(cuda),
            str(ROOT / "plugin/tensorrt/check_declarations.cpp"), "-o", program,
        ],
        check=True,
    )  # fmt: skip
    done = subprocess.run([program], capture_output=True, text=True)
    assert done.returncode == 0 and ", 0 differ" in done.stdout, done.stdout

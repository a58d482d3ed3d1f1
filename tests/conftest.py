# SPDX-License-Identifier: Apache-2.0
"""Builds the library, the pretended-H100 library and the host program once, with whatever nvcc there is.  CONVPOOL_PLUGIN_BUILD
names a build folder that has them already (cmake -DCONVPOOL_PLUGIN_TESTS=ON)."""

import fcntl
import gc
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from convpool.tensorrt import TensorRTError, plugin_path
from tests.support.torch import require_cuda

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="session", autouse=True)
def _without_waiting():
    """Files are not forced to the disk: a process that ends, or is killed, loses nothing that it has written."""
    gc.freeze()  # what is imported and collected stays
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        yield


@dataclass(frozen=True)
class Built:
    """The files of one build."""

    folder: Path
    plugin: Path
    plugin_h100: Path
    host: Path


def _build(folder: Path) -> None:
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    options = ["-DCONVPOOL_PLUGIN_TESTS=ON", "-DCONVPOOL_CUDA_ARCHITECTURES=90", f"-DPython3_EXECUTABLE={sys.executable}"]
    configure = ["cmake", *generator, "-S", str(ROOT / "plugin"), "-B", str(folder), *options]
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:  # one process of pytest-xdist builds, the others find all done
        fcntl.flock(lock, fcntl.LOCK_EX)
        for command in (configure, ["cmake", "--build", str(folder), "--parallel", str(os.cpu_count() or 2)]):
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                pytest.fail(f"{' '.join(command)}:\n{(done.stdout + done.stderr)[-4000:]}", pytrace=False)


@pytest.fixture(scope="session")
def built() -> Built:
    """The built files; a skip where there is no CUDA compiler to build them with."""
    folder = Path(os.environ.get("CONVPOOL_PLUGIN_BUILD") or ROOT / "build" / "plugin-tests")
    if "CONVPOOL_PLUGIN_BUILD" not in os.environ:
        if shutil.which("cmake") is None:
            pytest.skip("no cmake")
        if not _has_nvcc():
            pytest.skip(
                "no nvcc: install a CUDA toolkit, or pip install 'nvidia-cuda-nvcc==13.0.*' "
                "'nvidia-cuda-runtime==13.0.*' 'nvidia-cuda-cccl==13.0.*'"
            )
        _build(folder)
    files = Built(
        folder,
        folder / "libconvpool.so",
        folder / "pretended" / "libconvpool_plugin_h100.so",
        folder / "tensorrt" / "host" / "convpool_plugin_host",
    )
    missing = [path for path in (files.plugin, files.plugin_h100, files.host) if not path.is_file()]
    assert not missing, missing
    return files


@pytest.fixture(scope="session")
def plugin(request) -> Path:
    """The library of plugins, libconvpool.so: the installed package's, which users get, else the one built here."""
    if "CONVPOOL_PLUGIN_BUILD" not in os.environ:
        try:
            return plugin_path()
        except TensorRTError:
            pass
    return request.getfixturevalue("built").plugin


@pytest.fixture(params=["cpu", "cuda"])
def device(request):
    """Each device of PyTorch's; a test of the GPU's is skipped, or fails, where there is none."""
    if request.param == "cuda":
        require_cuda()
    return request.param


def _has_nvcc() -> bool:
    if shutil.which("nvcc") or Path("/usr/local/cuda/bin/nvcc").exists():
        return True
    try:
        import nvidia
    except ImportError:
        return False
    return any(Path(root, part, "bin", "nvcc").exists() for root in nvidia.__path__ for part in ("cu13", "cuda_nvcc"))

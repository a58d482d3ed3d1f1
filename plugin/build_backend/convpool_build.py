# SPDX-License-Identifier: Apache-2.0
"""PEP 517 backend: scikit-build-core, plus nvcc from PyPI where no CUDA toolkit is.

Without a C++ compiler it stops before anything is downloaded, and says so.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from scikit_build_core.build import *  # noqa: F403
from scikit_build_core.build import get_requires_for_build_editable as _editable
from scikit_build_core.build import get_requires_for_build_wheel as _wheel

# The last release that keeps to CUDA 13.0, which every driver of series 580 and later runs.
CUDA_FROM_PYPI = [
    "nvidia-cuda-nvcc==13.0.*",
    "nvidia-cuda-crt==13.0.*",
    "nvidia-nvvm==13.0.*",
    "nvidia-cuda-runtime==13.0.*",
    "nvidia-cuda-cccl==13.0.*",
]


def _has_toolkit() -> bool:
    roots = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")] + ["/usr/local/cuda", "/opt/cuda"]
    return bool(os.environ.get("CUDACXX") or shutil.which("nvcc") or any(Path(r, "bin", "nvcc").exists() for r in roots if r))


def _has_compiler() -> bool:
    return bool(os.environ.get("CXX") or any(shutil.which(name) for name in ("c++", "g++", "clang++")))


def _cuda() -> list[str]:
    if not _has_compiler():
        sys.exit("convpool-cuda: no C++ compiler found; install one (Debian: apt-get install g++). The optimizer needs none.")
    return [] if _has_toolkit() else CUDA_FROM_PYPI


def get_requires_for_build_wheel(config_settings=None) -> list[str]:
    """List what building needs; stop where there is no C++ compiler."""
    return [*_wheel(config_settings), *_cuda()]


def get_requires_for_build_editable(config_settings=None) -> list[str]:
    """List what building a wheel needs."""
    return [*_editable(config_settings), *_cuda()]

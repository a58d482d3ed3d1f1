# SPDX-License-Identifier: Apache-2.0
"""GPU tests are skipped without a GPU, and fail instead where REQUIRE_GPU=1.  The library on a pretended runtime."""

import os

import pytest

from convpool.cuda import training
from tests.support.gpu import skip_or_fail
from tests.support.kernels import pretended


@pytest.fixture
def lib(monkeypatch):
    """The pretended library, with the functions that the module declares."""
    lib = pretended.load(monkeypatch)
    for name in training._ARGUMENTS:
        training.function.__wrapped__(name)
    return lib


@pytest.fixture(scope="session")
def gpu():
    """A current CUDA context by pycuda; its device.  pytest-xdist's processes take the GPUs in turn."""
    try:
        import pycuda.driver

        pycuda.driver.init()
        worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")
        os.environ.setdefault("CUDA_DEVICE", str(int(worker) % pycuda.driver.Device.count()))
        import pycuda.autoinit
    except Exception as error:  # no pycuda, no driver, no device: each with its own exception
        skip_or_fail(f"no GPU: {type(error).__name__}: {error}")
    return pycuda.autoinit.device


@pytest.fixture(name="torch")
def torch_with_a_gpu():
    """PyTorch with a GPU."""
    try:
        import torch

        if not torch.cuda.is_available():
            raise RuntimeError("torch.cuda.is_available() is False")
    except Exception as error:
        skip_or_fail(f"no PyTorch with a GPU: {error}")
    return torch

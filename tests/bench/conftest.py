"""GPU tests are skipped without a GPU, and fail instead where REQUIRE_GPU=1."""

from __future__ import annotations

import os

import pytest

from convpool.bench.device import DeviceError, modules


@pytest.fixture
def gpu():
    """PyTorch and CuPy with a GPU."""
    try:
        return modules()
    except DeviceError as error:
        if os.environ.get("REQUIRE_GPU") == "1":
            pytest.fail(str(error))
        pytest.skip(str(error))

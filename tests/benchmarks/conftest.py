# SPDX-License-Identifier: Apache-2.0
"""GPU tests are skipped without a GPU, and fail instead where REQUIRE_GPU=1."""

import pytest

from benchmarks.layers.device import DeviceError, modules
from tests.support.gpu import skip_or_fail


@pytest.fixture
def gpu():
    """PyTorch and CuPy with a GPU."""
    try:
        return modules()
    except DeviceError as error:
        skip_or_fail(str(error))

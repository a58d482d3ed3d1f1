# SPDX-License-Identifier: Apache-2.0
"""Skip a test that needs a GPU without one; fail it where REQUIRE_GPU=1."""

import importlib.util
import os
from typing import NoReturn

import pytest


def missing() -> str:
    """Say what keeps TensorRT engines from running here, or ""; they need pycuda and a GPU."""
    for name in ("tensorrt", "pycuda"):
        if importlib.util.find_spec(name) is None:
            return f"no {name}"
    import pycuda.driver as driver

    try:
        driver.init()
        return "" if driver.Device.count() else "no GPU"
    except driver.Error as error:
        return f"no GPU: {error}"


def skip_or_fail(reason: str) -> NoReturn:
    """Skip the calling test, or fail it where a GPU was promised."""
    if os.environ.get("REQUIRE_GPU") == "1":
        pytest.fail(f"REQUIRE_GPU=1, but {reason}")
    pytest.skip(reason)


def require_gpu() -> None:
    """Skip or fail the calling test where engines cannot be run."""
    reason = missing()
    if reason:
        skip_or_fail(reason)

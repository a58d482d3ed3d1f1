"""Whether TensorRT engines can be run here: needs a GPU, TensorRT and pycuda.  REQUIRE_GPU=1 makes a skip a failure."""

from __future__ import annotations

import importlib.util
import os

import pytest


def missing() -> str:
    """What keeps engines from running here, or ""."""
    for name in ("tensorrt", "pycuda"):
        if importlib.util.find_spec(name) is None:
            return f"no {name}"
    import pycuda.driver as driver

    try:
        driver.init()
        return "" if driver.Device.count() else "no GPU"
    except driver.Error as error:
        return f"no GPU: {error}"


def require_gpu() -> None:
    """Skip the calling test, or fail it where a GPU was promised."""
    reason = missing()
    if reason and os.environ.get("REQUIRE_GPU") == "1":
        pytest.fail(f"REQUIRE_GPU=1, but {reason}")
    if reason:
        pytest.skip(reason)

# SPDX-License-Identifier: Apache-2.0
"""A TensorRT that is pretended; an engine of one and a driver that are played."""

import sys
import types

import pytest

from convpool.tensorrt import Engine, builder
from convpool.tensorrt import engine as engine_module
from tests.support.played_engine import Played, played_pycuda
from tests.support.pretended_tensorrt import pretended_tensorrt


@pytest.fixture
def trt(monkeypatch):
    """TensorRT 8.6 with the plugin."""
    module = pretended_tensorrt()
    module.plugins = []
    monkeypatch.setattr(builder, "load_plugin", module.plugins.append)
    return module


@pytest.fixture
def driver(monkeypatch):
    driver, package = played_pycuda(), types.ModuleType("pycuda")
    package.driver = driver
    monkeypatch.setitem(sys.modules, "pycuda", package)
    monkeypatch.setitem(sys.modules, "pycuda.driver", driver)
    monkeypatch.setattr("atexit.register", lambda *_: None)
    return driver


@pytest.fixture
def engine_of(driver, monkeypatch):
    monkeypatch.setattr(engine_module, "load_plugin", lambda trt: None)

    def make(**arguments) -> Engine:
        return Engine(b"plan", trt=Played(driver, **arguments))

    return make

"""TensorRT 11's own plugin registry (the lean runtime: no GPU needed) loads the library and makes the plugin.

Each test is a process of its own: a registry lives as long as its process, and a mistake here would end it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("tensorrt_lean_bindings")

PRELUDE = """
import json
import numpy as np
import tensorrt_lean_bindings as trt
from convpool.tensorrt.library import find_creator, load_plugin

GOOD = dict(pool_kernel_shape=[2, 2], pool_strides=[1, 1], pool_pads=[1] * 4, pool_dilations=[1, 1],
            kernel_shape=[3, 3], strides=[2, 2], pads=[0] * 4, dilations=[1, 1], group=[1])

def fields(**values):
    kind = trt.PluginFieldType.INT32
    return trt.PluginFieldCollection([trt.PluginField(k, np.array(v, np.int32), kind) for k, v in values.items()])

load_plugin(trt)
creator = find_creator(trt)
"""


def run(plugin, code: str, status: int = 0) -> tuple[object, str]:
    """What the code prints as JSON last, and everything on stderr."""
    environment = {**os.environ, "CONVPOOL_PLUGIN_LIBRARY": str(plugin)}
    done = subprocess.run([sys.executable, "-c", PRELUDE + code], capture_output=True, text=True, env=environment)
    assert done.returncode == status, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1]) if done.stdout.strip() else None, done.stderr


def test_loading_twice_is_loading_once(plugin):
    first, _ = run(plugin, "load_plugin(trt); print(json.dumps([c.name for c in trt.get_plugin_registry().all_creators]))")
    assert first.count("ConvAvgPool") == 1


def test_lists_every_attribute_of_the_operator(plugin):
    from convpool import operator

    names, _ = run(plugin, "print(json.dumps([f.name for f in creator.field_names]))")
    node = set(operator._ATTRIBUTES) - {"weight_perm", "plugin_version", "plugin_namespace"}
    assert set(names) == node | {"allow_tf32", "constant_weights"}


@pytest.mark.parametrize("phase", ["BUILD", "RUNTIME"])
def test_creates_the_plugin(plugin, phase):
    code = f"""
made = creator.create_plugin("layer", fields(**GOOD), trt.TensorRTPhase.{phase})
kinds = [made.get_capability_interface(kind) for kind in
         (trt.PluginCapabilityType.CORE, trt.PluginCapabilityType.BUILD, trt.PluginCapabilityType.RUNTIME)]
core, build, _ = kinds
print(json.dumps([[core.plugin_name, core.plugin_version, core.plugin_namespace], [k.interface_info.kind for k in kinds],
                  build.num_outputs, build.timing_cache_id, build.format_combination_limit]))
"""
    (names, kinds, outputs, identity, _), errors = run(plugin, code)
    assert names == ["ConvAvgPool", "1", ""]
    assert kinds == ["PLUGIN_V3ONE_CORE", "PLUGIN_V3ONE_BUILD", "PLUGIN_V3ONE_RUNTIME"]
    assert outputs == 1
    assert "pool_kernel_shape 2 2; " in identity and "strides 2 2; " in identity
    assert errors == ""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("pads=[1]", "pads; got 1 values, expected 4 for a kernel_shape of 2"),
        ("strides=[0, 2]", "strides[0]; got 0, expected 1 to 65535"),
        ("kernel_shape=[3] * 4", "kernel_shape; got 4 values, expected 1 to 3"),
        ("group=[-1]", "group[0]; got -1"),
        ("pool_kernel_shape=[]", "pool_kernel_shape; got 0 values, expected 2"),
    ],
)
def test_refuses_wrong_attributes_by_name(plugin, change, message):
    code = f"""
made = [creator.create_plugin("layer", fields(**{{**GOOD, **dict({change})}}), phase)
        for phase in (trt.TensorRTPhase.BUILD, trt.TensorRTPhase.RUNTIME)]
print(json.dumps([one is None for one in made]))
"""
    refused, errors = run(plugin, code)
    assert refused == [True, True]
    assert errors.count(f"convpool: createPlugin: {message}") == 2


def test_a_missing_library_says_what_to_do(plugin, monkeypatch, tmp_path):
    from convpool.tensorrt import TensorRTError, plugin_path

    monkeypatch.setenv("CONVPOOL_PLUGIN_LIBRARY", str(tmp_path / "none.so"))
    with pytest.raises(TensorRTError, match="not found; got .*none.so, expected the built library; install"):
        plugin_path()


def test_a_file_that_is_no_plugin_library_is_an_error(plugin, tmp_path):
    wrong = tmp_path / "wrong.so"
    wrong.write_bytes(b"no library")
    code = "import tensorrt_lean_bindings as trt\nfrom convpool.tensorrt import load_plugin\nload_plugin(trt)"
    environment = {**os.environ, "CONVPOOL_PLUGIN_LIBRARY": str(wrong)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 1
    assert "wrong.so: cannot be loaded as a plugin library" in done.stderr.splitlines()[-1]

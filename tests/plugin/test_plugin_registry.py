# SPDX-License-Identifier: Apache-2.0
"""TensorRT 11's own plugin registry (the lean runtime: no GPU needed) loads the library and makes the plugin.  Each test is a
process of its own: a registry lives as long as its process, and a mistake here would end it."""

import dataclasses
import json
import os
import subprocess
import sys

import pytest
from onnx import helper

from convpool.algebra.parts import FUSED_VARIANTS, OPERATORS
from convpool.ir import schema
from tests.support.operator_models import SAMPLED

pytest.importorskip("tensorrt_lean_bindings")

PRELUDE = """
import json
import numpy as np
import tensorrt_lean_bindings as trt
from convpool.tensorrt.package import find_creator, load_plugin

GOOD = dict(pool_kernel_shape=[2, 2], pool_strides=[1, 1], pool_pads=[1] * 4, pool_dilations=[1, 1],
            kernel_shape=[3, 3], strides=[2, 2], pads=[0] * 4, dilations=[1, 1], group=[1])
UPSAMPLED = dict(upsample=[2, 2], **{name: value for name, value in GOOD.items() if not name.startswith("pool_")})
def good(name):
    return UPSAMPLED if "UpsampleConv" in name else GOOD

# As the ONNX parser passes attributes on: integers, or floats.  A PluginField does not keep its array.
KEPT = []
def fields(**values):
    def field(name, value):
        real = isinstance(value, float)
        kind = trt.PluginFieldType.FLOAT32 if real else trt.PluginFieldType.INT32
        KEPT.append(np.array(value, np.float32 if real else np.int32).reshape(-1))
        return trt.PluginField(name, KEPT[-1], kind)
    return trt.PluginFieldCollection([field(*item) for item in values.items()])

load_plugin(trt)
creator = find_creator(trt)
"""


def run(plugin, code: str, status: int = 0) -> tuple[object, str]:
    """Run code: what it prints as JSON last, and everything on stderr."""
    environment = {**os.environ, "CONVPOOL_PLUGIN_LIBRARY": str(plugin)}
    done = subprocess.run([sys.executable, "-c", PRELUDE + code], capture_output=True, text=True, env=environment)
    assert done.returncode == status, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1]) if done.stdout.strip() else None, done.stderr


def test_loading_twice_is_loading_once(plugin):
    first, _ = run(plugin, "load_plugin(trt); print(json.dumps([c.name for c in trt.get_plugin_registry().all_creators]))")
    assert sorted(name for name in first if "ConvAvgPool" in name or "UpsampleConv" in name) == sorted(schema.OP_TYPES)


def test_lists_every_attribute_of_the_operators(plugin):
    code = f"""
print(json.dumps({{name: [[f.name, str(f.type)] for f in find_creator(trt, name).field_names] for name in {schema.OP_TYPES}}}))
"""
    found, _ = run(plugin, code)
    of_functions = {"weight_perm", "x_perm", "y_perm", "r_perm", "scales", "plugin_version", "plugin_namespace"}
    for name, fields in found.items():
        attributes = schema.attributes_of(OPERATORS[name])
        assert {field for field, _ in fields} == set(attributes) - of_functions
        assert {field for field, kind in fields if "FLOAT32" in kind} == set(attributes) & {"alpha", "prologue_alpha", "epsilon"}


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


def node_attributes(op_type: str) -> dict[str, object]:
    """The attributes of a fused variant that the optimizer writes, as Python values, without those that are not fields."""
    node = helper.make_node("ConvAvgPool", ["x", "w", "b"], ["y"], domain=schema.DOMAIN)
    kind = OPERATORS[op_type]
    before, after = (slope if step == "LeakyRelu" else 0.0 for step, slope in ((kind.prologue, 0.25), (kind.epilogue, 0.1)))
    kind = dataclasses.replace(kind, prologue_alpha=before, epilogue_alpha=after)
    schema.give_parts(node, dataclasses.replace(kind, norm_groups=4, epsilon=1e-5) if kind.normalized else kind)
    assert node.op_type == op_type
    return {item.name: helper.get_attribute_value(item) for item in node.attribute}


def test_creates_every_fused_variant_from_the_optimizer_s_attributes(plugin):
    """In both phases; then once more from the attributes of each other variant, which its name contradicts."""
    wanted = {name: node_attributes(name) for name in SAMPLED if name in FUSED_VARIANTS}
    code = f"""
wanted = {wanted}
core, build = trt.PluginCapabilityType.CORE, trt.PluginCapabilityType.BUILD
made, refused = {{}}, 0
for name, attributes in wanted.items():
    for phase in (trt.TensorRTPhase.BUILD, trt.TensorRTPhase.RUNTIME):
        one = find_creator(trt, name).create_plugin("layer", fields(**good(name), **attributes), phase)
        made[one.get_capability_interface(core).plugin_name] = one.get_capability_interface(build).timing_cache_id
    for other, others in wanted.items():
        made_of_others = find_creator(trt, name).create_plugin("layer", fields(**good(name), **others), trt.TensorRTPhase.BUILD)
        refused += made_of_others is None
print(json.dumps([made, refused]))
"""
    (made, refused), errors = run(plugin, code)
    assert list(made) == list(wanted) and len(set(made.values())) == len(wanted)
    # Two say the same: both operators have a variant of each kind.
    said = {name: dataclasses.astuple(dataclasses.replace(OPERATORS[name], upsamples=False)) for name in wanted}
    denied = sum(said[a] != said[b] for a in wanted for b in wanted)
    assert refused == denied == errors.count("by the operator's name") + errors.count("norm_groups")
    assert "prologue_alpha 0.25; " in made["LeakyReluConvAvgPool"] and made["LeakyReluConvAvgPool"].endswith("; alpha 0")


@pytest.mark.parametrize("op_type", ["ConvAvgPool", "AffineReluConvAvgPoolAdd"])
def test_channels_last_may_only_be_0(plugin, op_type):
    attributes = {} if op_type == "ConvAvgPool" else node_attributes(op_type)
    code = f"""
made = [find_creator(trt, "{op_type}").create_plugin("layer", fields(**GOOD, **{attributes}, channels_last=layout),
                                                     trt.TensorRTPhase.BUILD) for layout in (0, 1, 2, 3)]
print(json.dumps([one is None for one in made]))
"""
    refused, errors = run(plugin, code)
    assert refused == [False, True, True, True]
    message = f"convpool: createPlugin: {op_type}: channels_last; got 1, expected 0 in TensorRT; convpool build makes such nodes"
    assert message in errors


def test_a_file_that_is_no_plugin_library_is_an_error(plugin, tmp_path):
    wrong = tmp_path / "wrong.so"
    wrong.write_bytes(b"no library")
    code = "import tensorrt_lean_bindings as trt\nfrom convpool.tensorrt import load_plugin\nload_plugin(trt)"
    environment = {**os.environ, "CONVPOOL_PLUGIN_LIBRARY": str(wrong)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 1
    assert "wrong.so: cannot be loaded as a plugin library" in done.stderr.splitlines()[-1]

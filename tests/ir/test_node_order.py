# SPDX-License-Identifier: Apache-2.0
"""Graphs whose nodes are out of order: converters write them, runtimes take them."""

import onnx
import pytest

import convpool
from convpool.errors import ModelError
from models import generators


def reversed_nodes(name: str) -> onnx.ModelProto:
    model = generators.generate(name)
    nodes = list(model.graph.node)[::-1]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return model


@pytest.mark.parametrize("name", ["lenet5", "discriminator_block", "wgan_gp_slices_small"])
def test_rewritten_and_sorted(name):
    model = reversed_nodes(name)
    before = model.SerializeToString()
    result = convpool.optimize(model)
    assert model.SerializeToString() == before
    assert sum(site.status == "rewritten" for site in result.report.sites) >= 2
    assert result.report.verification.passed
    onnx.checker.check_model(result.model, full_check=True)


def test_node_that_only_a_branch_needs_comes_first():
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["": 17]>
        g (float[1,2,8,8] x, bool c) => (float[1,2,4,4] y) {
            y = If (c) <
                then_branch = t () => (float[1,2,4,4] a) {
                    k = Conv <kernel_shape = [1,1]> (r, w)
                    a = AveragePool <kernel_shape = [2,2], strides = [2,2]> (k)
                },
                else_branch = e () => (float[1,2,4,4] b) { b = AveragePool <kernel_shape = [2,2], strides = [2,2]> (r) }
            >
            w = ConstantOfShape <value = float[1] {0.5}> (s)
            s = Constant <value_ints = [2,2,1,1]> ()
            r = Relu (x)
        }""")
    result = convpool.optimize(model, check=3)
    assert [node.op_type for node in result.model.graph.node][-1] == "If"
    assert [site.status for site in result.report.sites] == ["rewritten"]
    assert result.report.verification.passed


def test_unchanged_model_keeps_its_bytes(tmp_path):
    model = reversed_nodes("squeeze_excite")
    path, out = tmp_path / "m.onnx", tmp_path / "out.onnx"
    path.write_bytes(model.SerializeToString())
    result = convpool.optimize(path)
    result.save(out)
    assert not result.changed and out.read_bytes() == path.read_bytes()


def test_cycle_is_refused():
    model = generators.generate("lenet5")
    first, last = model.graph.node[0], model.graph.node[-2]
    first.input[0] = last.output[0]
    with pytest.raises(ModelError, match="not valid ONNX"):
        convpool.optimize(model)

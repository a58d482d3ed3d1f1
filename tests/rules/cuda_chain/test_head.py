# SPDX-License-Identifier: Apache-2.0
"""With --target cuda: a sum or mean over space and the product of matrices behind it, as one node."""

import json

import numpy as np
import onnx
import pytest

import convpool
from convpool.cli.group import run
from convpool.cli.optimize import command
from tests.support.cuda_target import NARROW, TAIL, for_cuda, layouts, wide
from tests.support.models import graph, operators, weights

MAP = f"{TAIL}\nt = Conv<pads=[1,1,1,1]>(p, k)\nz = AveragePool<kernel_shape=[4,4], strides=[4,4]>(t)\na = Relu(z)\n"
"""A map of 16 channels, 8 by 8 elements, with the channels last."""
SUM = "m = ReduceSum<keepdims=0>(a, s)\n"
CONSTANTS = {
    **NARROW,
    "s": [2, 3],
    "o": [0],
    "row": [3],
    "back": [-1, -2],
    "d": [0, -1],
    "three": [4, 1, 16],
    "flat": [4, 16, 64],
    "e": weights((5, 16)),
    "f": weights((16, 5)),
    "b": weights((5,)),
    "one": weights((1, 5)),
    "scalar": weights((1,)),
    "rows": weights((4, 1)),
    "four": weights((5, 4)),
    "vector": weights((16,)),
    "v2": weights((64, 3)),
}
TAKEN = {
    "a sum and a Gemm": SUM + "y = Gemm<transB=1>(m, e, b)",
    "a sum over negative axes and a Gemm": "m = ReduceSum<keepdims=0>(a, back)\ny = Gemm(m, f, one)",
    "a mean, a view and a Gemm": "n = ReduceMean<axes=[2,3]>(a)\nm = Flatten(n)\ny = Gemm<transB=1>(m, e)",
    "a mean, a Squeeze and a Gemm": "n = ReduceMean<axes=[2,3]>(a)\nm = Squeeze(n, s)\ny = Gemm(m, f, scalar)",
    "a global mean, a view and a MatMul": "n = GlobalAveragePool(a)\nm = Reshape(n, d)\ny = MatMul(m, f)",
    "factors of one": SUM + "y = Gemm<transB=1, alpha=1.0, beta=1.0>(m, e, b)",
}


def head(name: str) -> onnx.ModelProto:
    return wide(MAP + TAKEN[name], CONSTANTS, outputs="float[a,b] y")


@pytest.mark.parametrize("name", TAKEN)
def test_a_head_becomes_one_node(name):
    result = for_cuda(head(name))
    found = operators(result.model.graph)
    assert found == {"ConvAvgPool": 2, "ConvAvgPoolRelu": 1, "Flatten": 1} and layouts(result.model) == [2, 1, 1]
    site = next(site for site in result.report.sites if site.pattern == "head")
    assert site.status == "rewritten" and site.pool and (site.macs_before, site.macs_after) == (80, 80)


def test_the_node_has_the_name_of_the_product():
    model = head("a sum and a Gemm")
    model.graph.node[-1].name = "classifier"
    names = {node.op_type: node.name for node in for_cuda(model).model.graph.node if node.output[0].startswith("y")}
    assert names == {"ConvAvgPool": "classifier", "Flatten": ""}


STAYS = {
    "another factor": SUM + "y = Gemm<transB=1, alpha=2.0>(m, e, b)",
    "another factor of the bias": SUM + "y = Gemm<transB=1, beta=2.0>(m, e, b)",
    "the other operand turned": SUM + "y = Gemm<transA=1, transB=1>(m, four)",
    "computed weights": SUM + "g = Tanh(m)\ny = Gemm<transB=1>(m, g)",
    "weights of one axis": SUM + "n = MatMul(m, vector)\ny = Unsqueeze(n, o)",
    "a bias per sample": SUM + "y = Gemm<transB=1>(m, e, rows)",
    "a computed bias": SUM + "g = ReduceMean<axes=[0]>(m)\nj = MatMul(g, f)\ny = Gemm<transB=1>(m, e, j)",
    "another reader": SUM + "n = Neg(m)\nq = Gemm<transB=1>(m, e, b)\ny = Concat<axis=1>(n, q)",
    "another reader of what a view reads": "n = ReduceMean<axes=[2,3]>(a)\nm = Flatten(n)\nh2 = Squeeze(n, s)\n"
    "q = Gemm<transB=1>(m, e, b)\ny = Concat<axis=1>(h2, q)",
    "other axes": "m = ReduceSum<keepdims=0>(a, o)\nn = Flatten(m)\ny = MatMul(n, v2)",
    "an operand of three axes": SUM + "n = Reshape(m, three)\nq = MatMul(n, f)\ny = Flatten(q)",
    "a map of three axes": "r = Reshape(a, flat)\nm = ReduceSum<keepdims=0>(r, two)\ny = Gemm<transB=1>(m, e)",
    "another type": "c = Cast<to=11>(a)\nm = ReduceSum<keepdims=0>(c, s)\ng = MatMul(m, doubles)\ny = Cast<to=1>(g)",
    "something between": SUM + "n = Tanh(m)\ny = Gemm<transB=1>(n, e, b)",
    "another layout": "h1 = Softmax<axis=1>(x)\nm = ReduceSum<keepdims=0>(h1, s)\n"
    "q = Gemm<transB=1>(m, e)\nr = GlobalMaxPool(a)\nh2 = Flatten(r)\n"
    "y = Concat<axis=1>(q, h2)",
}


@pytest.mark.parametrize("name", STAYS)
def test_heads_that_stay(name):
    constants = {**CONSTANTS, "two": [2], "doubles": weights((16, 5), dtype=np.float64)}
    model = wide(MAP + STAYS[name], constants, outputs="float[c,d] y")
    result = for_cuda(model)
    products = [sum(node.op_type in ("Gemm", "MatMul") for node in item.graph.node) for item in (model, result.model)]
    assert products[0] == products[1] > 0
    assert not [site for site in result.report.sites if site.pattern == "head"]


def head_of(channels: int, kind: str, end: str, size: str = "32,32", factor: float = 1.0) -> convpool.OptimizeResult:
    """The target's result for a head of so many channels."""
    dtype = {"float": np.float32, "float16": np.float16}[kind]
    constants = {
        "w": weights((32, 16, 3, 3)).astype(dtype) / 12,
        "k": weights((channels, 32, 3, 3)).astype(dtype) / 17,
        "s": [2, 3],
        "e": (factor * weights((5, channels))).astype(dtype),
    }
    narrow = MAP.replace("[4,4]", "[2,2]")  # with windows of 4x4, so few channels are written as one convolution
    model = graph(narrow + end, constants, inputs=f"{kind}[4,16,{size}] x", outputs=f"{kind}[a,b] y")
    return convpool.optimize(model, target="cuda", check=0)


@pytest.mark.parametrize(
    ("taken", "channels", "kind", "end", "size", "factor"),
    [
        (True, 12, "float", SUM, "32,32", 1),
        (False, 10, "float", SUM, "32,32", 1),
        (True, 8, "float16", SUM, "32,32", 1),
        (False, 12, "float16", SUM, "32,32", 1),
        (False, 12, "float", SUM, "H,32", 1),
        (False, 12, "float", SUM, "32,36", 1),
        (True, 8, "float16", "m = ReduceMean<axes=[2,3], keepdims=0>(a)\n", "32,32", 400),
        (False, 8, "float16", SUM, "32,32", 1600),
    ],
)
def test_channels_sizes_and_numbers_of_a_head(taken, channels, kind, end, size, factor):
    """Channels in multiples of 16 bytes, maps of a known size of at most 64 elements, and weights that the type has when
    multiplied by the map's size."""
    found = operators(head_of(channels, kind, end + "y = Gemm<transB=1>(m, e)", size, factor).model.graph)
    assert ("Gemm" in found, "Flatten" in found) == (not taken, taken)


def test_the_report_tells_of_chains_and_layouts(tmp_path, capsys):
    onnx.save(head("a mean, a view and a Gemm"), tmp_path / "in.onnx")
    assert (
        run(command, "convpool-optimize", [str(tmp_path / "in.onnx"), "--target", "cuda", "--report", str(tmp_path / "r.json")])
        == 0
    )
    out = capsys.readouterr().out
    assert "layout    4 nodes with channels last" in out and "ReduceMean 1 -> 0" in out
    assert json.loads((tmp_path / "r.json").read_text())["summary"]["channels_last"] == 4
    written = onnx.load(tmp_path / "in.convpool.onnx")
    assert {item.key: item.value for item in written.metadata_props} == {"convpool.target": "cuda"}

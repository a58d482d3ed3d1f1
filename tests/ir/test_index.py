# SPDX-License-Identifier: Apache-2.0
"""The index of a graph: computed shapes, open batches, nodes out of order, and names that a node reads."""

from unittest.mock import Mock

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import convpool
from convpool.errors import ModelError
from convpool.ir import inference
from convpool.ir.index import infer_function, with_shapes_folded
from convpool.ir.protos import _read_names
from models import generators
from tests.support.models import FUNCTION, graph, index, operators
from tests.support.rewriting import IF_BODY, IF_INPUTS, POOL, rewrite, verified

CONV = "h = Conv<pads=[1,1,1,1]>(x, w)\ns = Shape(h)\n"
MEAN = "f = Reshape(h, t)\ny = ReduceMean<axes=[2]>(f)"
CONSTANTS = {
    "zero": [0], "one": [1], "two": [2], "three": [3], "minus": [-1], "below": [-4], "all": [144], "both": [0, 1],
    "reverse": [1, 0], "scalar": np.int64(0), "tail": [32, 144], "thirtytwo": [32],
}  # fmt: skip
TARGETS = {  # the target of a Reshape to batch, channels and positions: whether it is known to be that
    "Slice": ("p = Slice(s, zero, two)\nt = Concat<axis=0>(p, minus)", True),
    "Slice along an axis": ("p = Slice(s, zero, two, zero)\nt = Concat<axis=0>(p, minus)", True),
    "Slice by steps of 1": ("p = Slice(s, zero, two, zero, one)\nt = Concat<axis=0>(p, all)", True),
    "Slice from behind": ("p = Slice(s, below, two)\nt = Concat<axis=0>(p, minus)", True),
    "Gather of one": ("p = Gather(s, zero)\nt = Concat<axis=0>(p, tail)", True),
    "Gather of two": ("p = Gather(s, both)\nt = Concat<axis=0>(p, minus)", True),
    "Gather of a number": ("g = Gather(s, scalar)\np = Unsqueeze(g, zero)\nt = Concat<axis=0>(p, tail)", True),
    "Gather from behind": ("p = Gather(s, below)\nt = Concat<axis=0>(p, tail)", True),
    "a part of Shape": ("p = Shape<end=2>(h)\nt = Concat<axis=0>(p, minus)", True),
    "a part of Shape from behind": ("p = Shape<start=-4, end=-2>(h)\nt = Concat<axis=0>(p, minus)", True),
    "two parts of Shape": ("p = Shape<end=1>(h)\nq = Shape<start=1, end=2>(h)\nt = Concat<axis=0>(p, q, minus)", True),
    "channels first of all": ("p = Gather(s, reverse)\nt = Concat<axis=0>(p, minus)", False),
    "every second": ("q = Slice(s, zero, three, zero, two)\nt = Concat<axis=0>(q, minus)", False),
    "given by a caller": ("p = Slice(s, zero, e)\nt = Concat<axis=0>(p, minus)", False),
    "one picked by a caller": ("p = Gather(s, e)\nt = Concat<axis=0>(p, tail)", True),  # others have other numbers of elements
    "a product": ("p = Gather(s, zero)\nq = Mul(p, one)\nt = Concat<axis=0>(q, tail)", None),
}


@pytest.mark.parametrize(("body", "known"), TARGETS.values(), ids=TARGETS)
def test_a_target_of_a_reshape_that_follows_from_shapes(body, known):
    """None: either would be right."""
    given = "float[N,16,12,12] x, int64[1] e" if ", e)" in body else "float[N,16,12,12] x"
    model = graph(f"{CONV}{body}\n{MEAN}", CONSTANTS, inputs=given, outputs="float[a,b,c] y")
    (site,) = convpool.optimize(model, check=0, lowering="direct").report.sites
    assert known is None or (site.status == "rewritten") == known, site.reason
    if site.status == "rewritten" and ", e)" not in body:
        assert operators(rewrite(model, 1).graph)["AveragePool"] == 1


@pytest.mark.parametrize(("last", "values"), [("all", [32, -1, 144]), ("minus", None)])
def test_an_open_size_that_changes_its_place_is_minus_1_in_a_target(last, values):
    target = f"i = Identity(reverse)\np = Gather(s, i)\nt = Concat<axis=0>(p, {last})"  # which onnx does not follow
    model = graph(f"{CONV}{target}\n{MEAN}", CONSTANTS, inputs="float[N,16,12,12] x", outputs="float[a,b,c] y")
    (scope,) = index(model)
    folded = with_shapes_folded(model, scope)
    assert (folded is None) == (values is None)
    if folded is not None:
        assert numpy_helper.to_array(folded.graph.initializer[-1]).tolist() == values


@pytest.mark.parametrize(("size", "known"), [(12, True), (13, True), ("W", False)])
def test_a_target_from_all_sizes(size, known):
    """Positions as a product of what Gather picks."""
    body = "r = Gather(s, two)\nc = Gather(s, three)\nn = Mul(r, c)\nt = Concat<axis=0>(zero, thirtytwo, n)"
    model = graph(f"{CONV}{body}\n{MEAN}", CONSTANTS, inputs=f"float[N,16,12,{size}] x", outputs="float[a,b,c] y")
    (site,) = convpool.optimize(model, check=0, lowering="direct").report.sites
    assert (site.status == "rewritten") == known
    if known:
        rewrite(model, 1)


ALONE = "h = Conv<pads=[1,1,1,1]>(x, w)\n"


def test_sizes_of_a_tile_that_constants_give():
    """The repeats of Tile are its second input; they come from a Concat."""
    body = f"n = Concat<axis=0>(one, two)\nt = Tile(x, n)\n{ALONE.replace('(x,', '(t,')}y = ReduceMean<axes=[2,3], keepdims=1>(h)"
    verified(graph(body, {"one": [1, 1], "two": [2, 1]}, inputs="float[1,16,12,12] x"), 1, lowering="direct")


@pytest.mark.parametrize("computed", ["starts", "ends", "axes", "steps"])
def test_sizes_of_a_slice_that_constants_give(computed):
    """Each of Slice's inputs, one of them from a Concat."""
    given = {"starts": [0, 1], "ends": [8, 9], "axes": [2, 3], "steps": [1, 1]}
    constants = {name: values for name, values in given.items() if name != computed}
    constants |= {f"{computed}{i}": [value] for i, value in enumerate(given[computed])}
    body = f"{computed} = Concat<axis=0>({computed}0, {computed}1)\nt = Slice(x, starts, ends, axes, steps)\n"
    model = graph(body + ALONE.replace("(x,", "(t,") + "y = ReduceMean<axes=[2,3], keepdims=1>(h)", constants)
    verified(model, 1, lowering="direct")


def test_a_gather_of_one_index_gives_a_number():
    """Also of a shape with an open batch, of which onnx knows nothing."""
    for picked, shape in ((np.int64(2), ()), (np.array([2]), (1,)), (np.array([[2, 3]]), (1, 2))):
        body = "s = Shape(x)\ng = Gather(s, i)\ny = Identity(g)"
        model = graph(body, {"i": picked}, inputs="float[N,16,12,14] x", outputs="int64[a] y")
        model.graph.output[0].type.tensor_type.ClearField("shape")
        (scope,) = index(model)
        found = scope.constant("g")
        assert found is not None and found.shape == shape and found.array().reshape(-1).tolist() == [12, 14][: found.array().size]


def test_a_function_whose_shapes_cannot_be_inferred(monkeypatch):
    model = graph("y = local.net<e = 1>(x, w)", functions=FUNCTION.format("b = Relu(a)"))
    inputs = [helper.make_tensor_value_info("a", TensorProto.FLOAT, (2, 3))]
    assert infer_function(model, model.functions[0], inputs) is not None
    monkeypatch.setattr(inference, "infer", Mock(side_effect=ValueError))
    assert infer_function(model, model.functions[0], inputs) is None


def reversed_nodes(name: str) -> onnx.ModelProto:
    model = generators.generate(name)
    nodes = list(model.graph.node)[::-1]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return model


@pytest.mark.parametrize("name", ["lenet5", "discriminator_block", "wgan_gp_slices_small"])
def test_rewritten_and_sorted(name):
    model = reversed_nodes(name)
    before, result = model.SerializeToString(), convpool.optimize(model)
    assert model.SerializeToString() == before
    assert sum(site.status == "rewritten" for site in result.report.sites) >= 2
    assert result.report.verification.passed
    onnx.checker.check_model(result.model, full_check=True)


def test_node_that_only_a_branch_needs_comes_first():
    body = f"""y = If(c) <then_branch = t () => (float[1,2,4,4] a) {{ k = Conv<kernel_shape=[1,1]>(r, v) a = {POOL}(k) }},
                 else_branch = e () => (float[1,2,4,4] b) {{ b = {POOL}(r) }}>
        v = ConstantOfShape<value=float[1] {{0.5}}>(s) s = Constant<value_ints=[2,2,1,1]>() r = Relu(x)"""
    model = graph(body, inputs="float[1,2,8,8] x, bool c", outputs="float[1,2,4,4] y")
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


def test_a_constant_that_a_body_has_too():
    """A name with two values is refused: runtimes take either.  The same numbers in other fields are one."""
    model = graph(IF_BODY, {"v": (32, 16, 3, 3)}, inputs=IF_INPUTS)
    (w,), again = model.graph.initializer[:1], model.graph.node[0].attribute[0].g.initializer.add()
    again.CopyFrom(helper.make_tensor("w", TensorProto.FLOAT, w.dims, numpy_helper.to_array(w).ravel()))
    verified(model, 2, lowering="direct")
    again.float_data[0] += 1
    with pytest.raises(ModelError, match="^tensor 'w': two values, in the main graph and in a body; expected one$"):
        convpool.optimize(model)


def test_what_a_node_reads_through_its_bodies():
    body = """y = If(flag) <then_branch = yes () => (float[a] t) { u = Add(outer, own) t = Mul(u, x) },
      else_branch = no () => (float[a] late) { v = Neg(x) }>"""
    model = graph(body, inputs="float[4] x, bool flag, float[4] outer, float[4] late", outputs="float[a] y")
    node = model.graph.node[0]
    assert _read_names(node) == {"flag", "outer", "own", "x", "late"}
    node.attribute[0].g.initializer.append(numpy_helper.from_array(np.ones(4, np.float32), "own"))
    assert _read_names(node) == {"flag", "outer", "x", "late"}
    node.attribute[1].g.input.append(helper.make_tensor_value_info("late", TensorProto.FLOAT, [4]))
    assert _read_names(node) == {"flag", "outer", "x"}

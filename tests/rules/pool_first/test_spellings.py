# SPDX-License-Identifier: Apache-2.0
"""Pairs as other exporters write them: with Transposes between, in functions, in the domain ai.onnx, with sparse weights.

The random models are right, stable, and have the pairs that the plain model has.  Their bound is that of `test_property`, once
for each of the two models.  CONVPOOL_TEST_ROUNDS multiplies the number of cases.
"""

import copy
import functools
from collections import Counter
from itertools import product

import numpy as np
import onnx
import pytest
from onnx import AttributeProto, helper, numpy_helper

import convpool
from convpool.algebra.parts import to_channels_first, to_channels_last
from convpool.errors import ModelError
from convpool.ir.inference import infer_shapes
from convpool.ir.inlining import inlined
from convpool.ir.protos import model_nodes
from tests.support import sessions
from tests.support.error_bounds import UNIT_ROUNDOFF, evaluate, gamma
from tests.support.models import TYPES, graph, operators, random_feeds, sparse_of, weights
from tests.support.random_pooling import make_case
from tests.support.rewriting import IF_BODY, IF_INPUTS, PAIR, POOL, assert_close, assert_stable, cases, rewrite

ELEMENTWISE = ("Add", "Sub", "Mul", "Div", "Relu", "Identity", "Tanh", "Sigmoid", "LeakyRelu")


def in_long_domain(model: onnx.ModelProto, rng: np.random.Generator) -> onnx.ModelProto:
    """Some nodes, and perhaps the import, by the domain's long name."""
    result = copy.deepcopy(model)
    for node in model_nodes(result):
        node.domain = "ai.onnx" if not node.domain and rng.random() < 0.8 else node.domain
    for entry in result.opset_import:
        entry.domain = "ai.onnx" if not entry.domain and rng.random() < 0.5 else entry.domain
    return result


class _Turner:
    """Writes a main graph as converters from TensorFlow do."""

    def __init__(self, model: onnx.ModelProto) -> None:
        inferred = infer_shapes(model)
        assert inferred is not None
        values = (*inferred.graph.value_info, *inferred.graph.input, *inferred.graph.output)
        self.ranks = {value.name: len(value.type.tensor_type.shape.dim) for value in values}
        self.constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
        for node in model.graph.node:
            if node.op_type == "Constant" and node.attribute[0].name == "value":
                self.constants[node.output[0]] = numpy_helper.to_array(node.attribute[0].t)
        self.outputs = {value.name for value in model.graph.output}
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self.last: dict[str, str] = {}

    def transpose(self, source: str, target: str, perm: list[int]) -> str:
        self.nodes.append(helper.make_node("Transpose", [source], [target], perm=perm))
        return target

    def is_map(self, name: str) -> bool:
        return name not in self.constants and self.ranks.get(name, 0) > 2

    def in_either(self, node: onnx.NodeProto) -> int:
        """The rank of what an elementwise node joins; 0 where it stays between Transposes."""
        ranks = {self.ranks.get(name, 0) for name in (*node.input, *node.output) if name not in self.constants}
        rank = ranks.pop() if len(ranks) == 1 and node.op_type in ELEMENTWISE else 0
        return rank if rank > 2 and all(self.constants[n].ndim <= rank for n in node.input if n in self.constants) else 0

    def with_channels_last(self, name: str, rank: int) -> str:
        """A tensor with the channels last, made where it is not there yet."""
        if name in self.constants:
            array = self.constants[name]
            array = array.reshape((1,) * (rank - array.ndim) + array.shape).transpose(to_channels_last(rank - 2))
            while array.ndim and array.shape[0] == 1 and rank > 3:  # [C], as they write it
                array = array[0]
            stored = f"{name}_{len(self.initializers)}_last"
            self.initializers.append(numpy_helper.from_array(np.ascontiguousarray(array), stored))
            return self.initializers[-1].name
        if name not in self.last:
            self.last[name] = self.transpose(name, f"{name}_last", to_channels_last(rank - 2))
        return self.last[name]

    def add(self, node: onnx.NodeProto) -> None:
        rank = self.in_either(node)
        if rank:
            made = copy.deepcopy(node)
            made.input[:] = [self.with_channels_last(name, rank) for name in node.input]
            made.output[:] = [f"{node.output[0]}_last"]
            self.nodes.append(made)
            self.last[node.output[0]] = made.output[0]
            if node.output[0] in self.outputs:
                self.transpose(made.output[0], node.output[0], to_channels_first(rank - 2))
            return
        made = copy.deepcopy(node)
        for position, name in enumerate(node.input):
            if name in self.last:
                first = f"{name}_first{len(self.nodes)}"
                made.input[position] = self.transpose(self.last[name], first, to_channels_first(self.ranks[name] - 2))
        self.nodes.append(made)
        for name in node.output:
            if self.is_map(name):
                self.with_channels_last(name, self.ranks[name])


def with_channels_last(model: onnx.ModelProto) -> onnx.ModelProto:
    """Every map is kept with its channels last, and turned around whatever needs them first."""
    turner, result = _Turner(model), copy.deepcopy(model)
    for node in model.graph.node:
        turner.add(node)
    del result.graph.node[:]
    result.graph.node.extend(turner.nodes)
    result.graph.ClearField("value_info")
    result.graph.initializer.extend(turner.initializers)
    used = {name for node in result.graph.node for name in node.input}
    given = {value.name for value in result.graph.input}
    for index in reversed(range(len(result.graph.initializer))):
        name = result.graph.initializer[index].name
        if name not in used and name not in given:
            del result.graph.initializer[index]
    return result


def in_functions(model: onnx.ModelProto, rng: np.random.Generator, depth: int = 2) -> onnx.ModelProto:
    """Runs of nodes as functions, some with functions in them, some attributes of whose nodes are the call's."""
    result = copy.deepcopy(model)
    result.ir_version = max(result.ir_version, 10)
    result.graph.ClearField("value_info")
    result.opset_import.append(helper.make_opsetid("local", 1))
    outputs = [value.name for value in model.graph.output]
    nodes = _as_calls(result, list(model.graph.node), outputs, rng, depth)
    del result.graph.node[:]
    result.graph.node.extend(nodes)
    return result


def _as_calls(model, nodes, outputs, rng, depth) -> list[onnx.NodeProto]:
    found, position = [], 0
    while position < len(nodes):
        size = int(rng.integers(1, 4))
        run, rest = nodes[position : position + size], nodes[position + size :]
        position += size
        if rng.random() < 0.3:
            found += run
            continue
        made = {name for node in run for name in node.output if name}
        inputs = list(dict.fromkeys(name for node in run for name in node.input if name and name not in made))
        needed = {name for node in rest for name in node.input} | set(outputs)
        results = [name for node in run for name in node.output if name in needed]
        if not results:
            found += run
            continue
        given = []
        inner = [copy.deepcopy(node) for node in run]
        for number, node in enumerate(inner):
            for attribute in node.attribute:
                if attribute.type in (AttributeProto.INT, AttributeProto.INTS) and rng.random() < 0.5:
                    name = f"{attribute.name}{number}"
                    given.append(copy.deepcopy(attribute))
                    given[-1].name = name
                    kind, own = attribute.type, attribute.name
                    attribute.Clear()
                    attribute.name, attribute.type, attribute.ref_attr_name = own, kind, name
        if depth and rng.random() < 0.5 and not given:
            inner = _as_calls(model, inner, results, rng, depth - 1)
        imports = [*(entry for entry in model.opset_import if entry.domain != "local"), helper.make_opsetid("local", 1)]
        name = f"Part{len(model.functions)}"
        names = [attribute.name for attribute in given]
        model.functions.append(helper.make_function("local", name, inputs, results, inner, imports, names))
        call = helper.make_node(name, inputs, results, name=f"call{len(model.functions)}", domain="local")
        call.attribute.extend(given)
        found.append(call)
    return found


CASES = cases(120)
SPELLINGS = {
    "channels last": lambda model, rng: with_channels_last(model),
    "functions": in_functions,
    "functions with channels last": lambda model, rng: in_functions(with_channels_last(model), rng),
    "long domain": in_long_domain,
}
LEAST = {"channels last": 0.85, "functions": 0.9, "functions with channels last": 0.8, "long domain": 1.0}
"""Shares of the plain model's pairs that are found.  Slices and Resizes keep their Transposes, and constants of other functions
stay unknown."""


def rewritten(result: convpool.OptimizeResult) -> int:
    return sum(site.status == "rewritten" for site in result.report.sites)


@functools.cache
def plain_cases() -> list[tuple]:
    """Seed and case of each usable random model, its exact values, and its plain result."""
    found = []
    for seed in range(CASES):
        case = make_case(seed)
        if case.dtype == "float32" and case.model.ir_version >= 4:
            exact = evaluate(case.model, case.feeds)[case.model.graph.output[0].name]
            if np.isfinite(exact.magnitude).all():
                found.append((seed, case, exact, convpool.optimize(case.model, check=0, lowering=case.lowering)))
    return found


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_another_spelling_is_right_and_has_the_same_pairs(spelling):
    counts: Counter[str] = Counter()
    for seed, case, exact, of_plain in plain_cases():
        options = {"check": 0, "lowering": case.lowering}
        model = SPELLINGS[spelling](case.model, np.random.default_rng(seed))
        try:
            wanted = sessions.run(model, case.feeds)[0]
        except Exception:  # a runtime's limits are none of the result's
            counts["does not run"] += 1
            continue
        before, result = model.SerializeToString(deterministic=True), convpool.optimize(model, **options)
        after = result.model.SerializeToString(deterministic=True)
        assert model.SerializeToString(deterministic=True) == before, f"case {seed}: the model given was changed"
        plain = rewritten(of_plain)
        counts.update({"cases": 1, "plain": plain, "found": min(plain, rewritten(result))})
        if not result.changed:
            assert spelling == "long domain" or after == before, f"case {seed}: changed without a pair"
            continue
        again = convpool.optimize(result.model, **options)
        assert again.model.SerializeToString(deterministic=True) == after, f"case {seed}: the second run changed the model"
        models = (result.model, model, of_plain.model)  # the last one has those of computed weights
        new, old, own = (sum(node.op_type == "Transpose" for node in one.graph.node) for one in models)
        assert new <= old + own or "functions" in spelling, f"case {seed}: {new} Transposes, before {old}"
        bound = gamma(2 * exact.roundings + 100, UNIT_ROUNDOFF["float32"]) * exact.magnitude
        for output in (wanted, sessions.run(result.model, case.feeds)[0]):
            assert output.shape == exact.value.shape and (np.abs(output - exact.value) <= bound).all(), f"case {seed}: values"
    print(counts)
    assert counts["cases"] >= 0.3 * CASES and counts["found"] >= LEAST[spelling] * counts["plain"] > 0


LAST = {1: "[0,2,1]", 2: "[0,2,3,1]", 3: "[0,2,3,4,1]"}
FIRST = {1: "[0,2,1]", 2: "[0,3,1,2]", 3: "[0,4,1,2,3]"}
NHWC = {
    "bias": (32,), "scale": (32,), "row": (1, 32), "one": np.float32(3), "g": (32,),
    "v": np.linspace(1, 2, 32, dtype=np.float32),
}  # fmt: skip
BETWEEN = {
    "nothing": "q = Identity(p)",
    "a bias": "q = Add(p, bias)",
    "a scale and a bias": "r = Mul(scale, p)\nq = Sub(row, r)",
    "a number": "q = Div(p, one)",
    "a bias behind a norm": "r = Transpose<perm=FIRST>(p)\ns = BatchNormalization(r, g, g, g, v)\n"
    "t = Transpose<perm=LAST>(s)\nq = Add(t, bias)",
    "a residual": "e = Conv<pads=PADS>(i, w)\nf = Transpose<perm=LAST>(e)\nr = Add(p, f)\nq = Add(r, bias)",
    "the input": "d = Conv(i, k)\nf = Transpose<perm=LAST>(d)\nr = Sum(f, p)\nq = Mul(r, scale)",
}
AVERAGES = {
    "AveragePool": "a = Transpose<perm=FIRST>(q)\nb = AveragePool<kernel_shape=TWOS, strides=TWOS>(a)\n"
    "y = Transpose<perm=LAST>(b)",
    "GlobalAveragePool": "a = Transpose<perm=FIRST>(q)\nb = GlobalAveragePool(a)\ny = Transpose<perm=LAST>(b)",
    "ReduceMean": "y = ReduceMean<axes=SPACE, keepdims=0>(q)",
    "ReduceMean that keeps axes": "y = ReduceMean<axes=SPACE, keepdims=1>(q)",
}


def channels_last_pair(between: str, average: str, rank: int, size: int = 8) -> onnx.ModelProto:
    """A convolution with a Relu in front and an average, as converters from TensorFlow write them."""
    body = "r0 = Relu(x)\ni = Transpose<perm=FIRST>(r0)\nc = Conv<pads=PADS>(i, w)\np = Transpose<perm=LAST>(c)\n"
    body += f"{between}\n{average}"
    numbers = {"PADS": [1] * 2 * rank, "TWOS": [2] * rank, "SPACE": list(range(1, rank + 1))}
    for name, value in ({"FIRST": FIRST[rank], "LAST": LAST[rank]} | numbers).items():
        body = body.replace(name, str(value))
    dims = ",".join([str(size)] * rank)
    outputs = ",".join("abcde"[: 2 if "keepdims=0" in average else rank + 2])
    constants = {"w": (32, 16, *[3] * rank), "k": (32, 16, *[1] * rank), **NHWC}
    return graph(body, constants, inputs=f"float[1,{dims},16] x", outputs=f"float[{outputs}] y")


@pytest.mark.parametrize(("rank", "between", "average"), product(LAST, BETWEEN, AVERAGES))
def test_transposes_between_the_parts_of_a_pair_vanish(rank, between, average):
    model = channels_last_pair(BETWEEN[between], AVERAGES[average], rank)
    pairs = 2 if between in ("a residual", "the input") else 1
    result = rewrite(model, pairs, "fused" if rank == 3 else "auto")
    kept = 1 if "ReduceMean" in average else 2  # in front of the convolution, and behind the average
    assert operators(result.graph).get("Transpose", 0) <= kept
    assert not {"Identity", "BatchNormalization"} & set(operators(result.graph))


PADDED = {10: "q = Pad<pads=[0,1,1,0,0,1,1,0]>(p)", 13: "q = Pad(p, amounts)", 18: "q = Pad(p, two, , axes)"}


@pytest.mark.parametrize("opset", PADDED)
def test_a_pad_with_channels_last_becomes_the_convolution_s(opset):
    model = channels_last_pair(PADDED[opset], AVERAGES["AveragePool"], 2).graph
    model.node[2].attribute[0].ints[:] = [2, 2, 2, 2]  # so far that what the convolution would give in the pads is zeros
    constants = {"amounts": [0, 1, 1, 0, 0, 1, 1, 0], "two": [1, 1, 1, 1], "axes": [1, 2]}
    used = {name for node in model.node for name in node.input}
    model.initializer.extend(numpy_helper.from_array(np.array(v, np.int64), k) for k, v in constants.items() if k in used)
    whole = helper.make_model(model, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    assert operators(rewrite(whole, 1, "fused").graph) == {"Relu": 1, "Transpose": 2, "Conv": 1}


MIDDLE = "between convolution and pooling; got"
STAYS = {
    "a nonlinear node": ("q = Relu(p)", "AveragePool", f"Relu 'q': {MIDDLE} Relu, expected linear"),
    "one in front of a mean": ("q = Tanh(p)", "ReduceMean", f"Tanh 'q': {MIDDLE} Tanh, expected linear"),
    "another order": (
        "q = Transpose<perm=[0,2,1,3]>(p)",
        "AveragePool",
        f"Transpose 'q': {MIDDLE} Transpose, expected views that cancel",
    ),
    "another reader": ("q = Add(p, bias)\nz = Softmax(q)", "AveragePool", "Add 'q': output 'a' has 2 readers; got other readers"),
    "a node of one layout": ("q = LRN<size=3>(p)", "AveragePool", None),
}


@pytest.mark.parametrize("what", STAYS)
def test_transposes_stay_where_no_pair_appears(what):
    between, average, reason = STAYS[what]
    model = channels_last_pair(between, AVERAGES[average], 2)
    if "z =" in between:
        model.graph.output.append(helper.make_tensor_value_info("z", 1, [None] * 4))
    result = convpool.optimize(model, check=0)
    assert not result.changed and result.model == model
    reasons = [site.reason for site in result.report.sites]
    assert len(reasons) == (reason is not None) and all(found.startswith(reason) for found in reasons), reasons


LOCAL = '<domain: "local", opset_import: ["": 17, "local": 1]>'
CONV = """<domain: "local", opset_import: ["": 17]> conv (a, k) => (b) { b = Conv<pads=[1,1,1,1]>(a, k) }"""
MEAN = f"""<domain: "local", opset_import: ["": 17]> mean (a) => (b) {{ b = {POOL}(a) }}"""
CALLED = "h = local.conv(x, w)\ny = POOL(h)"
HALVES = {
    "the convolution": (CALLED, CONV),
    "the average": ("h = Conv<pads=[1,1,1,1]>(x, w)\ny = local.mean(h)", MEAN),
    "one each": ("h = local.conv(x, w)\ny = local.mean(h)", CONV + MEAN),
    "what is between": (
        "h = Conv<pads=[1,1,1,1]>(x, w)\nb = local.bias(h)\ny = POOL(b)",
        "LOCAL bias (a) => (b) { c = Constant<value_floats=[2.0]>() b = Add(c, a) }",
    ),
    "an attribute of the call": (
        "h = local.conv<p=[1,1,1,1]>(x, w)\ny = POOL(h)",
        "LOCAL conv <p> (a, k) => (b) { b = Conv<pads: ints = @p>(a, k) }",
    ),
    "an attribute of the call, both": (
        "y = local.both<p=[1,1,1,1]>(x, w)",
        "LOCAL both <p> (a, k) => (b) { c = Conv<pads: ints = @p>(a, k) b = POOL(c) }",
    ),
    "a default of an attribute": (CALLED, "LOCAL conv <p: ints = [1,1,1,1]> (a, k) => (b) { b = Conv<pads: ints = @p>(a, k) }"),
    "an optional input left out": (CALLED, "LOCAL conv (a, k, c) => (b) { b = Conv<pads=[1,1,1,1]>(a, k, c) }"),
    "a function in a function": (
        "h = local.outer(x, w)\ny = POOL(h)",
        "LOCAL outer (a, k) => (b) { b = local.conv(a, k) }" + CONV,
    ),
    "a function's parts in two others": (
        "y = local.outer(x, w)",
        "LOCAL outer (a, k) => (b) { c = local.conv(a, k) b = local.mean(c) }" + CONV + MEAN,
    ),
    "names of the model": (
        "b = Relu(x)\nh = local.conv(b, w)\ny = POOL(h)",
        "LOCAL conv (x, w) => (y) { h = Identity(x) b = Identity(h) y = Conv<pads=[1,1,1,1]>(b, w) }",
    ),
    "a body in a function": (
        CALLED,
        """LOCAL conv (a, k) => (b) {
          one = Constant<value_int=1>() yes = Cast<to=9>(one)
          r = If(yes) <then_branch = t () => (float[n,c,h,w] u) { u = Relu(a) },
                       else_branch = e () => (float[n,c,h,w] v) { v = Abs(a) }>
          b = Conv<pads=[1,1,1,1]>(r, k) }""",
    ),
    "transposes": (
        "i = Transpose<perm=[0,2,3,1]>(x)\nh = local.conv(i, w)\nb = Mul(h, two)\ny = local.mean(b)",
        """LOCAL conv (a, k) => (b) {
          c = Transpose<perm=[0,3,1,2]>(a) d = Conv<pads=[1,1,1,1]>(c, k) b = Transpose<perm=[0,2,3,1]>(d) }
        LOCAL mean (a) => (b) { c = Transpose<perm=[0,3,1,2]>(a) b = POOL(c) }""",
    ),
}


@pytest.mark.parametrize(("what", "lowering"), product(HALVES, ("direct", "convavgpool")))
def test_functions_with_a_part_of_a_pair_are_inlined(what, lowering):
    body, functions = (text.replace("POOL", POOL).replace("LOCAL", LOCAL) for text in HALVES[what])
    result = rewrite(graph(body, {"two": (32,)}, functions=functions), 1, lowering)
    assert {function.domain for function in result.functions} <= {"ai.convpool"}
    names = [node.name for node in result.graph.node if node.name]
    assert len(names) == len(set(names))


def test_only_the_calls_of_a_pair_are_inlined():
    """The others stay, and so does a function with a pair of its own, and one that nothing calls."""
    own = f"""<domain: "local", opset_import: ["": 17]> both (a, k) => (b) {{ c = Conv<pads=[1,1,1,1]>(a, k) b = {POOL}(c) }}"""
    unused = """<domain: "local", opset_import: ["": 17]> unused (a) => (b) { b = Relu(a) }"""
    body = f"h = local.conv(x, w)\np = {POOL}(h)\nr = Relu(p)\nt = local.conv(r, v)\nu = Tanh(t)\ny = local.both(u, v)"
    result = rewrite(graph(body, {"v": (32, 32, 3, 3)}, functions=CONV + own + unused), 2, "direct")
    assert [node.op_type for node in result.graph.node] == ["AveragePool", "Conv", "Relu", "conv", "Tanh", "both"]
    assert {function.name for function in result.functions} == {"conv", "both", "unused"}


def test_a_function_that_hands_an_input_on():
    """onnxruntime does not take it."""
    functions = """<domain: "local", opset_import: ["": 17]> conv (a, k) => (b, a) { b = Conv<pads=[1,1,1,1]>(a, k) }"""
    body = f"h, x2 = local.conv(x, w)\nb = Conv<pads=[1,1,1,1]>(x2, w)\ns = Add(h, b)\ny = {POOL}(s)"
    model = graph(body, functions=functions)
    result, feeds = convpool.optimize(model, check=0, lowering="direct").model, random_feeds(model)
    assert operators(result.graph) == {"Add": 1, "AveragePool": 2, "Conv": 2, "Identity": 1}
    plain = graph(body.replace("h, x2 = local.conv(x, w)", "h = Conv<pads=[1,1,1,1]>(x, w)\nx2 = Identity(x)"))
    np.testing.assert_allclose(sessions.run(result, feeds)[0], sessions.run(plain, feeds)[0], rtol=0, atol=1e-4)


def test_a_function_in_a_branch():
    body = IF_BODY.replace("Conv<pads=[1,1,1,1]>(x, w)", "local.conv(x, w)")
    assert not rewrite(graph(body, {"v": (32, 16, 3, 3)}, inputs=IF_INPUTS, functions=CONV), 2, "direct").functions


def test_functions_stay_where_no_pair_appears():
    model = graph(f"h = local.conv(x, w)\nr = Relu(h)\ny = {POOL}(r)", functions=CONV)
    result = convpool.optimize(model, check=0)
    assert not result.changed and result.model == model
    (site,) = result.report.sites
    assert site.reason == "Relu 'r': between convolution and pooling; got Relu, expected linear operators only"


def test_functions_that_grow_without_end_stay():
    """Each calls the one before twice: 2^17 nodes."""
    text = CONV + """<domain: "local", opset_import: ["": 17]> f0 (a) => (b) { b = Abs(a) }"""
    for number in range(1, 18):
        calls = f"c = local.f{number - 1}(a) b = local.f{number - 1}(c)"
        text += f"""<domain: "local", opset_import: ["": 17, "local": 1]> f{number} (a) => (b) {{ {calls} }}"""
    model = graph(f"h = local.conv(x, w)\np = {POOL}(h)\ny = local.f17(p)", functions=text)
    given = convpool.ir.model.LoadedModel(model, None, 0)
    assert convpool.pipeline.in_reach(given, convpool.options.options_for())[0] is given


@pytest.mark.parametrize(("opset", "fits"), [(11, True), (16, True), (6, False)])
def test_a_function_of_another_opset(opset, fits):
    """It is inlined where its operators mean the same: Conv of 11 does, that of 6 has other attributes by then."""
    model = graph(f"h = local.conv(x, w)\ny = {POOL}(h)", functions=CONV.replace("17", str(opset)))
    assert (inlined(model) is not None) == fits
    if fits:
        rewrite(model, 1, "direct")


@pytest.mark.parametrize(("call", "node", "fits"), [("l.net", "Relu(f)", 1), ("l.net", "other.some(f)", 0), ("Neg", "Abs(f)", 0)])
def test_a_function_of_the_standard_domain_or_that_has_nodes_of_a_domain_in_another_version(call, node, fits):
    domain, _, name = call.rpartition(".")
    function = f'<domain: "{domain}", opset_import: ["": 17, "other": 2]> {name} (f) => (g) {{ g = {node} }}'
    model = graph(f"h = Conv(x, w)\ny = {call}(h)", functions=function, imports=', "l": 1, "other": 1')
    assert (inlined(model) is not None) == fits


LONG = "ai.onnx"
PLACES = {
    "the convolution": (PAIR, {"Conv"}, ""),
    "the pooling": (PAIR, {"AveragePool"}, ""),
    "all": (PAIR, {"Conv", "AveragePool"}, ""),
    "branches": (IF_BODY, {"Conv", "AveragePool"}, ""),
    "the If": (IF_BODY, {"If"}, ""),
    "a function": (
        "y = local.both(x, w)",
        {"Conv"},
        CONV.replace(" conv ", " both ").replace("}", f"c = {POOL}(b) }}").replace("(b)", "(c)", 1),
    ),
}


@pytest.mark.parametrize(("place", "imported", "lowering"), product(PLACES, ("", LONG, "both"), ("direct", "convavgpool")))
def test_nodes_of_the_long_domain(place, imported, lowering):
    body, op_types, functions = PLACES[place]
    inputs = IF_INPUTS if "If" in body else "float[1,16,12,12] x"
    model = graph(body, {"v": (32, 16, 3, 3)}, inputs=inputs, functions=functions, imports=', "local": 1' if functions else "")
    plain = rewrite(model, 2 if "If" in body else 1, lowering)
    for node in model_nodes(model):
        node.domain = LONG if node.op_type in op_types else node.domain
    for holder in (model, *model.functions):
        if imported == "both":
            holder.opset_import.append(helper.make_opsetid(LONG, 17))
        else:
            holder.opset_import[0].domain = imported
    before = model.SerializeToString(deterministic=True)
    assert convpool.optimize(model, check=1, lowering=lowering).model == plain
    assert model.SerializeToString(deterministic=True) == before


def test_opsets_of_both_names_must_agree():
    model = graph(PAIR)
    model.opset_import.append(helper.make_opsetid(LONG, 11))
    with pytest.raises(ModelError, match=r"opset of '', which is 'ai.onnx' too; got \[11, 17\], expected one version"):
        convpool.optimize(model)


def test_an_unchanged_file_keeps_the_long_domain(tmp_path):
    model = graph("y = Relu(x)")
    model.graph.node[0].domain = LONG
    onnx.save(model, tmp_path / "in.onnx")
    convpool.optimize(tmp_path / "in.onnx").save(tmp_path / "out.onnx")
    assert (tmp_path / "in.onnx").read_bytes() == (tmp_path / "out.onnx").read_bytes()


@pytest.mark.parametrize(
    ("lowering", "flat", "node", "kind", "bias"),
    product(("direct", "fused", "convavgpool"), (True, False), (True, False), (*TYPES, "1-D"), (True, False)),
)
def test_sparse_weights_are_made_dense_where_they_are_folded(lowering, flat, node, kind, bias):
    rank, kind = (1, "float") if kind == "1-D" else (2, kind)
    dims, window = ",".join(["12"] * rank), f"kernel_shape={[2] * rank}, strides={[2] * rank}"
    body = f"h = Conv<pads={[1] * 2 * rank}>(x, w)\ny = AveragePool<{window}>(h)"
    body = body.replace("y =", "s =") + "\nz = Identity(s)\ny = Add(z, b)" if bias else body
    ends = {"inputs": f"{kind}[1,16,{dims}] x", "outputs": f"{kind}[{'n,c,h,w'[: 2 * rank + 3]}] y"}
    model = graph(body, {"b": weights((1, *[1] * rank), dtype=TYPES[kind])}, **ends)
    for tensor in [tensor for tensor in model.graph.initializer if tensor.name == "w"]:
        model.graph.initializer.remove(tensor)
    sparse = sparse_of(weights((32, 16, *[3] * rank), dtype=TYPES[kind]), "w", flat)
    if node:
        model.graph.node.insert(0, helper.make_node("Constant", [], ["w"], sparse_value=sparse))
    else:
        model.graph.sparse_initializer.append(sparse)
    result = convpool.optimize(model, check=1, lowering=lowering)
    assert [site.lowering for site in result.report.sites] == [lowering]
    stays = lowering == "direct"  # its Conv reads the weights as they are
    assert len(result.model.graph.sparse_initializer) == (stays and not node)
    assert operators(result.model.graph).get("Constant", 0) == (stays and node)
    wanted = ["sparse constants: 1 dense in the result"] * (not stays)
    assert [warning.split(",")[0] for warning in result.report.warnings] == wanted
    assert_stable(result.model, lowering=lowering)


def test_an_operand_of_fewer_axes_in_a_function_whose_attributes_are_given():
    """Nothing there has a shape but the function's inputs."""
    functions = """<opset_import: ["": 17], domain: "local"> f <s> (x, w, k, two) => (y) {
    c = Conv<strides: ints = @s>(x, w) t = Identity(k) h = Add(c, t) r = Unsqueeze(h, two) y = ReduceMean<axes=[2,3,4]>(r) }"""
    model = graph("y = local.f<s=[1,1]>(x, w, k, two)", {"k": (32, 1, 1), "two": [2]}, functions=functions)
    assert_close(model, convpool.optimize(model, check=0).model)


def test_a_sparse_map_beside_a_small_one():
    """onnx takes the product's shape for that of the small one, which would not vary over space."""
    model = graph(f"m = Mul(s, k)\nh = Conv<pads=[1,1,1,1]>(x, w)\nd = Mul(h, m)\ny = {POOL}(d)", {"k": (1, 32, 1, 1)})
    model.graph.sparse_initializer.append(sparse_of(weights((1, 32, 12, 12)), "s"))
    (site,) = convpool.optimize(model).report.sites
    assert site.reason == "Mul 'd': operands; got two that vary over space, expected one that does not"

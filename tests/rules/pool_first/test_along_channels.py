# SPDX-License-Identifier: Apache-2.0
"""Nodes that change nothing, or act along channels, between a convolution and its average.

Random models of small integers, whose sums and means float32 holds exactly: the result of every target and lowering is the
original's to the bit, in onnxruntime.  Below them: why other nodes stay.
"""

from collections.abc import Callable

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import convpool
from tests.support import sessions
from tests.support.models import graph, graph_of, operators
from tests.support.random_graph import RandomGraph
from tests.support.rewriting import POOL, assert_stable, rewrite

WAYS: tuple[dict, ...] = (
    *({"target": target} for target in ("any", "cpu", "cuda", "tensorrt")),
    {"lowering": "direct"},
    {"lowering": "fused"},
)
SEEDS = 24
"""Variants of each kind."""
COSTS = ("saves too little", "unknown size")
"""Reasons that may keep a pair that is exact to rewrite."""
NEWEST = 22
"""The newest opset that is drawn."""


class Net(RandomGraph):
    """A convolution of random rank, groups, open sizes and opset, behind it the nodes that a kind adds."""

    def __init__(self, seed: int, least: int = 7, filters: int = 8, channels: int = 8, kernel: int = 0) -> None:
        super().__init__(seed)
        self.opset = int(self.rng.integers(max(7, least), NEWEST + 1))
        self.rank = int(self.rng.choice([1, 2, 2, 3]))
        self.channels, self.batch = channels, int(self.rng.choice([1, 2, 4]))
        self.first = "n" if self.rng.integers(2) else self.batch
        self.group = int(self.rng.choice([1, 1, 2, 4])) if filters == 8 else 1
        size = [int(n) for n in self.rng.choice([4, 8], self.rank)]
        self.size = size
        k = kernel or int(self.rng.choice([1, 3]))
        weight = self.rng.integers(-2, 3, (filters, channels // self.group, *[k] * self.rank))
        bias = [self.constant(self.rng.integers(-4, 5, filters), np.float32)] if self.rng.integers(2) else []
        inputs = ["x", self.constant(weight, np.float32), *bias]
        self.name = self.node("Conv", inputs, pads=[k // 2] * 2 * self.rank, group=self.group)
        self.shape = [self.batch, filters, *size]

    def told(self, op_type: str, name: str, from_opset: int, outputs: int = 1, key: str = "axes", *, values, **given):
        """A node whose integers are an attribute before some opset, and an input from it on."""
        if self.opset < from_opset:
            return self.node(op_type, [name], outputs, **{key: list(values)}, **given)
        return self.node(op_type, [name, self.constant(values)], outputs, **given)

    def slice(self, name: str, axis: int, start: int, end: int, step: int = 1) -> str:
        if self.opset < 10:
            return self.node("Slice", [name], axes=[axis], starts=[start], ends=[end])
        return self.node("Slice", [name, *map(self.constant, ([start], [end], [axis], [step]))])

    def pad(self, name: str, pads: list[int], **given) -> str:
        return self.told("Pad", name, 11, key="pads", values=pads, **given)

    def axis(self, axis: int) -> int:
        """The axis, or the same counted from the end."""
        return axis - (self.rank + 2 if self.opset >= 11 and self.rng.integers(2) else 0)

    def reshape(self, name: str, shape: list[int]) -> str:
        return self.node("Reshape", [name, self.constant(shape)])

    def average(self, name: str) -> str:
        """One of the ways to write an average of windows that are powers of two, or of the map."""
        spatial = list(range(2, self.rank + 2))
        kind = self.rng.choice(["AveragePool", "AveragePool", "GlobalAveragePool", "ReduceMean", "kept"])
        if kind == "AveragePool":
            return self.node(kind, [name], kernel_shape=[2] * self.rank, strides=[2] * self.rank)
        if kind == "GlobalAveragePool":
            return self.node(kind, [name])
        return self.told("ReduceMean", name, 18, values=spatial, keepdims=int(kind == "kept"))

    def finish(self, *outputs: str, opened: bool | None = None) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
        """The model and what to run it on.  opened: whether spatial sizes are open too; drawn where None."""
        opened = bool(self.rng.integers(2)) if opened is None else opened
        size = [f"s{axis}" for axis in range(self.rank)] if opened else self.size
        x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [self.first, self.channels, *size])
        given = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs]
        model = self.model([x], given, self.opset)
        for value in model.graph.output:
            known = next(item for item in onnx.shape_inference.infer_shapes(model).graph.output if item.name == value.name)
            value.type.tensor_type.shape.SetInParent()
            for axis in range(len(known.type.tensor_type.shape.dim)):
                value.type.tensor_type.shape.dim.add(dim_param=f"{value.name}_{axis}")
        return model, {"x": self.rng.integers(-3, 4, (self.batch, self.channels, *self.size)).astype(np.float32)}


def check(model: onnx.ModelProto, feeds: dict[str, np.ndarray], ways: tuple[dict, ...] = WAYS) -> list[int]:
    """How many pairs each way rewrites: equal to the bit, stable, and with a reason for each that stays."""
    wanted, counts = sessions.run(model, feeds), []
    for way in ways:
        result = convpool.optimize(model, check=0, **way)
        onnx.checker.check_model(result.model, full_check=True)
        sites = result.report.sites
        assert sites and all(site.status == "rewritten" or site.reason for site in sites), (way, sites)
        for one, other in zip(wanted, sessions.run(result.model, feeds), strict=True):
            np.testing.assert_array_equal(other, one, err_msg=str(way))
        assert_stable(result.model, **way)
        counts.append(sum(site.status == "rewritten" for site in sites))
    return counts


def shuffle(net: Net, name: str) -> str:
    groups = int(net.rng.choice([2, 4]))
    split = net.reshape(name, [-1, groups, 8 // groups, *net.size])
    return net.reshape(net.node("Transpose", [split], perm=[0, 2, 1, *range(3, net.rank + 3)]), [-1, 8, *net.size])


def transposes(net: Net, name: str) -> str:
    perm = [0, *(1 + net.rng.permutation(net.rank + 1))]
    return net.node("Transpose", [net.node("Transpose", [name], perm=perm)], perm=np.argsort(perm).tolist())


def unsqueezed(net: Net, name: str) -> str:
    axes = [int(net.rng.integers(1, net.rank + 3))]
    return net.told("Squeeze", net.told("Unsqueeze", name, 13, values=axes), 13, values=axes)


def one_of_split(net: Net, name: str) -> str:
    return net.told("Split", name, 13, 2, "split", values=[3, 5], axis=net.axis(1))[int(net.rng.integers(2))]


NOTHING: dict[str, tuple[int, bool, Callable[[Net, str], str]]] = {  # the first opset; whether sizes may be open; the nodes
    "Cast": (7, True, lambda net, name: net.node("Cast", [name], to=TensorProto.FLOAT)),
    "CastLike": (15, True, lambda net, name: net.node("CastLike", [name, "x"])),
    "Cast behind a Cast and an Identity": (
        7,
        True,
        lambda net, name: net.node("Cast", [net.node("Identity", [net.node("Cast", [name], to=1)])], to=1),
    ),
    "Dropout": (7, True, lambda net, name: net.node("Dropout", [name])),
    "Reshape to its shape": (7, False, lambda net, name: net.reshape(name, [-1, *net.shape[1:]])),
    "Reshape by zeros": (7, True, lambda net, name: net.reshape(name, [0] * (net.rank + 1) + [-1])),
    "flattened, and back": (7, False, lambda net, n: net.reshape(net.node("Flatten", [n]), [-1, *net.shape[1:]])),
    "space flattened, and back": (7, False, lambda net, n: net.reshape(net.reshape(n, [0, 0, -1]), [-1, *net.shape[1:]])),
    "Transpose of no axes": (7, True, lambda net, name: net.node("Transpose", [name], perm=list(range(net.rank + 2)))),
    "Transposes": (7, True, transposes),
    "Unsqueeze, Squeeze": (7, True, unsqueezed),
    "Concat": (7, True, lambda net, name: net.node("Concat", [name], axis=int(net.rng.integers(0, net.rank + 2)))),
    **{name: (8, True, lambda net, n, name=name: net.node(name, [n])) for name in ("Sum", "Max", "Min", "Mean")},
    "Pad": (7, True, lambda net, name: net.pad(name, [0] * 2 * (net.rank + 2))),
    "Slice": (7, True, lambda net, name: net.slice(name, int(net.rng.integers(0, net.rank + 2)), 0, 2**31 - 1)),
    "Slice to the size": (7, False, lambda net, name: net.slice(name, net.rank + 1, 0, net.size[-1])),
    "Expand": (8, True, lambda net, name: net.node("Expand", [name, net.constant([1] * int(net.rng.integers(1, net.rank + 3)))])),
    "Expand to its shape": (8, False, lambda net, name: net.node("Expand", [name, net.constant([1, *net.shape[1:]])])),
    "Tile": (7, True, lambda net, name: net.node("Tile", [name, net.constant([1] * (net.rank + 2))])),
    "Split into one": (
        7,
        True,
        lambda net, name: net.node("Split", [name], axis=2, **({"num_outputs": 1} if net.opset >= 18 else {})),
    ),
}
ALONG: dict[str, tuple[int, bool, Callable[[Net, str], str]]] = {
    "Neg": (7, True, lambda net, name: net.node("Neg", [name])),
    "Slice": (7, True, lambda net, name: net.slice(name, net.axis(1), 2, 2**31 - 1)),
    "Slice of a Slice": (10, True, lambda net, n: net.slice(net.slice(n, 1, 1, 8, 2), net.axis(1), 0, 3)),
    "Slice that reverses": (10, True, lambda net, name: net.slice(name, net.axis(1), -1, -(2**31), -1)),
    "Slice of the batch": (7, True, lambda net, name: net.slice(name, 0, 0, 1)),
    "Gather": (7, True, lambda net, n: net.node("Gather", [n, net.constant(net.rng.integers(0, 8, 5))], axis=net.axis(1))),
    "Gather of all": (7, True, lambda net, n: net.node("Gather", [n, net.constant(net.rng.permutation(8))], axis=1)),
    "Pad": (7, True, lambda net, name: net.pad(name, [0, 1, *[0] * (net.rank + 1), 2, *[0] * net.rank])),
    "Pad that mirrors": (7, True, lambda net, name: net.pad(name, [0, 1, *[0] * (2 * net.rank + 2)], mode="edge")),
    "one of a Split": (7, True, one_of_split),
    "shuffle": (7, False, shuffle),
    "shuffle of a selection": (
        7,
        False,
        lambda net, n: shuffle(net, net.node("Gather", [n, net.constant(range(7, -1, -1))], axis=1)),
    ),
    "mean of the channels": (7, True, lambda net, name: net.told("ReduceMean", name, 18, values=[net.axis(1)])),
    "sum of the channels": (7, True, lambda net, name: net.told("ReduceSum", name, 13, values=[1])),
    "factors behind a selection": (
        7,
        True,
        lambda net, n: net.node("Mul", [net.slice(n, 1, 0, 4), net.constant([[[2]] * 4] if net.rank == 1 else 2, np.float32)]),
    ),
    "Concat of selections of two convolutions": (
        7,
        True,
        lambda net, n: net.node("Concat", [net.slice(n, 1, 0, 4), net.slice(second(net), 1, 4, 8)], axis=1),
    ),
}


def second(net: Net) -> str:
    """A pointwise convolution beside the first one."""
    return net.node("Conv", ["x", net.constant(net.rng.integers(-2, 3, (8, 8, *[1] * net.rank)), np.float32)])


@pytest.mark.parametrize("name", [*NOTHING, *(f"{name} of channels" for name in ALONG)])
def test_a_pair_is_found_through_it(name):
    least, may_open, between = NOTHING[name] if name in NOTHING else ALONG[name.removesuffix(" of channels")]
    found = 0
    for seed in range(SEEDS):
        net = Net(seed, least)
        model, feeds = net.finish(net.average(between(net, net.name)), opened=None if may_open else False)
        check(model, feeds, WAYS if seed < 4 else (WAYS[seed % len(WAYS)],))
        (site, *_) = convpool.optimize(model, check=0, lowering="direct").report.sites
        assert site.status == "rewritten" or any(word in site.reason for word in COSTS), (seed, site.reason)
        found += site.status == "rewritten"
    assert found >= SEEDS // 2


def mean(net: Net, name: str, axes: list[int], op_type: str = "ReduceMean", keep: bool | None = None) -> str:
    """A mean or sum over these axes, some counted from the end; keep: whether they stay, drawn where None."""
    axes = [axis - (net.rank + 2 if net.opset >= 11 and net.rng.integers(2) else 0) for axis in axes]
    keep = bool(net.rng.integers(2)) if keep is None else keep
    return net.told(op_type, name, 18 if op_type == "ReduceMean" else 13, values=axes, keepdims=int(keep))


def whole(net: Net, first: int = 1) -> list[int]:
    return list(range(first, net.rank + 2))


def flat(net: Net, name: str) -> str:
    """[N, positions] in one of the ways."""
    shapes = [[0, -1], [-1, int(np.prod(net.size))], [net.batch, -1] if net.first == net.batch else []]
    shape = shapes[int(net.rng.integers(3))]
    return net.reshape(name, shape) if shape else net.node("Flatten", [name])


PATCHES: dict[str, Callable[[Net, str], str]] = {
    "mean over 1, 2, 3": lambda net, n: mean(net, n, whole(net)),
    "sum over 1, 2, 3": lambda net, n: mean(net, n, whole(net), "ReduceSum"),
    "sum, divided": lambda net, n: net.node(
        "Div", [mean(net, n, whole(net), "ReduceSum"), net.constant(float(np.prod(net.size)), np.float32)]
    ),
    "flattened": lambda net, n: net.told("ReduceMean", flat(net, n), 18, values=[1], keepdims=int(net.rng.integers(2))),
    "over the positions, then the channel": lambda net, n: mean(net, mean(net, n, whole(net, 2), keep=True), [1]),
    "over the channel, then the positions": lambda net, n: mean(net, mean(net, n, [1], keep=True), whole(net, 2)),
    "over all axes": lambda net, n: mean(net, n, whole(net, 0)),
    "over all, no axes told": lambda net, n: net.node("ReduceMean", [n], keepdims=int(net.rng.integers(2))),
    "over all of one axis": lambda net, n: net.told("ReduceMean", net.reshape(n, [-1]), 18, values=[0], keepdims=0),
    "over each sample, then the batch": lambda net, n: net.told(
        "ReduceMean", mean(net, n, whole(net), keep=False), 18, values=[0], keepdims=0
    ),
}


@pytest.mark.parametrize("name", PATCHES)
def test_scores_of_patches(name):
    """The mean of a convolution of one channel over more than space."""
    found = 0
    for seed in range(SEEDS):
        net = Net(seed, filters=1, channels=64, kernel=5)
        model, feeds = net.finish(PATCHES[name](net, net.name), opened=False)
        check(model, feeds, WAYS if seed < 4 else (WAYS[seed % len(WAYS)],))
        (site,) = convpool.optimize(model, check=0, lowering="fused").report.sites
        assert site.status == "rewritten" or any(word in site.reason for word in COSTS), (seed, site.reason)
        found += site.status == "rewritten"
    assert found >= SEEDS // 2


@pytest.mark.parametrize("form", ["Flatten", "Reshape", "ReduceMean"])
def test_scores_of_patches_of_an_open_size(form):
    for seed in range(SEEDS):
        net = Net(seed, filters=1, channels=64, kernel=1)
        name = net.name
        if form != "ReduceMean":
            name = net.node("Flatten", [name]) if form == "Flatten" else net.reshape(name, [0, -1])
        y = net.told("ReduceMean", name, 18, values=whole(net) if form == "ReduceMean" else [1], keepdims=0)
        model, feeds = net.finish(y, opened=True)
        check(model, feeds, ({"lowering": "direct"},))
        (site,) = convpool.optimize(model, check=0, lowering="direct").report.sites
        assert "saves too little" in site.reason


@pytest.mark.parametrize("seed", range(SEEDS))
def test_parts_of_a_split_that_are_averaged_alike_are_averaged_before_it(seed):
    net = Net(seed)
    count = int(net.rng.choice([2, 4]))
    parts = net.told("Split", net.name, 13, count, "split", values=[8 // count] * count, axis=net.axis(int(seed % 5 > 0)))
    if seed % 5 == 0:  # the batch
        net.batch, net.first = 8, "n"
    unread = int(net.rng.integers(count)) if net.rng.integers(3) == 0 else None
    state = net.rng.bit_generator.state
    averages = []
    for number, part in enumerate(parts):
        net.rng.bit_generator.state = state  # each alike
        averages += [net.average(part)] if number != unread else []
    model, feeds = net.finish(*averages)
    check(model, feeds)
    result = convpool.optimize(model, check=0, lowering="direct")
    found = operators(result.model.graph)
    if any(site.status == "rewritten" for site in result.report.sites):
        assert (
            found.get("AveragePool", 0) + found.get("GlobalAveragePool", 0) == found["Split"] == 1
            and len(result.report.sites) == 1
        )
    else:
        assert all(any(word in site.reason for word in COSTS) for site in result.report.sites), result.report.sites


def test_averages_of_parts_stand_where_their_readers_find_them():
    """A reader of the first average may stand before the second."""
    body = f"c = Conv<pads=[1,1,1,1]>(x, w)\nd, e = Split<axis=-3>(c)\np = {POOL}(d)\nr = Relu(p)\nq = {POOL}(e)\ny = Add(r, q)"
    result = rewrite(graph(body), 1)
    assert [node.op_type for node in result.graph.node] == ["AveragePool", "Conv", "Split", "Relu", "Add"]


def test_a_cast_to_the_same_type_does_not_keep_neighbours_apart():
    body = "s = Mul(x, k)\nt = Cast<to=1>(s)\nh = Conv<pads=[1,1,1,1]>(t, w)\nc = Cast<to=1>(h)\n"
    body += f"p = {POOL}(c)\nd = Cast<to=1>(p)\ny = Relu(d)"
    assert operators(rewrite(graph(body, {"k": np.float32(2)}), 1, "convavgpool").graph) == {"AffineConvAvgPoolRelu": 1}


SLICE = {"one": [1], "two": [2], "end": [9], "last": [3], "rows": [2], "minus": [-1], "begin": [-(2**31)]}
SLICE |= {"ids": [1, 0], "id": np.int64(1)}
SPLIT = "c = Conv<pads=[1,1,1,1]>(x, w)\nd, e = Split<axis=1>(c)\n"
STAYS: dict[str, tuple] = {  # nodes from c to the average, the reason, and what `graph_of` is given
    "Cast to another type": (
        f"d = Cast<to=11>(c)\ny = {POOL}(d)",
        "Cast 'd': between convolution and pooling; got Cast of FLOAT to DOUBLE, expected linear operators only",
        {"outputs": "double[a,b,c,d] y"},
    ),
    "Cast to another type and back": (
        f"d = Cast<to=10>(c)\ne = Cast<to=1>(d)\ny = {POOL}(e)",
        "Cast 'e': between convolution and pooling; got Cast of FLOAT16 to FLOAT, expected linear operators only",
    ),
    "CastLike another type": (
        f"d = CastLike(c, v)\ny = {POOL}(d)",
        "CastLike 'd': between convolution and pooling; got CastLike of FLOAT to FLOAT16, expected linear operators only",
        {"inputs": "float[1,16,12,12] x, float16 v", "outputs": "float16[a,b,c,d] y"},
    ),
    "rows of Slice": (
        f"d = Slice(c, one, end, rows)\ny = {POOL}(d)",
        "Slice 'd': axes of Slice; got 2, expected 0 and 1, batch and channels, alone",
    ),
    "rows reversed": (
        f"d = Slice(c, minus, begin, rows, minus)\ny = {POOL}(d)",
        "Slice 'd': axes of Slice; got 2, expected 0 and 1, batch and channels, alone",
    ),
    "axes computed": (
        f"d = Slice(c, one, end, v)\ny = {POOL}(d)",
        "Slice 'd': axes of Slice; got a computed tensor, expected a constant",
        {"inputs": "float[1,16,12,12] x, int64[1] v"},
    ),
    "rows of Gather": (
        f"d = Gather<axis=2>(c, ids)\ny = {POOL}(d)",
        "Gather 'd': axes of Gather; got 2, expected 0 and 1, batch and channels, alone",
    ),
    "one channel of Gather": (
        "d = Gather<axis=1>(c, id)\ny = ReduceMean<axes=[1,2], keepdims=0>(d)",
        "Gather 'd': axes of what it gives; got 3, expected 4",
        {"outputs": "float[a] y"},
    ),
    "rows of Split": (
        f"d, e = Split<axis=2>(c)\ny = {POOL}(d)",
        "Split 'd': axes of Split; got 2, expected 0 and 1, batch and channels, alone",
    ),
    "a part of a Split that is read": (
        f"d, e = Split<axis=1>(c)\nf = Relu(e)\ny = {POOL}(d)",
        "Split 'd': results of Split that are read; got 2, expected one, or all by averages that are alike",
        {"outputs": "float[a,b,c,d] y, float[e,g,h,i] f"},
    ),
    "rolled channels": (
        f"d = Slice(c, one, end, one)\ne = Slice(c, one, last, one)\nf = Concat<axis=1>(d, e)\ny = {POOL}(f)",
        "Conv 'c': output 'c' has 2 readers; got other readers, expected only the pooling",
    ),
    "rows and columns exchanged": (
        f"d = Transpose<perm=[0,1,3,2]>(c)\ny = {POOL}(d)",
        "Transpose 'd': between convolution and pooling; got Transpose, expected views that cancel, or shuffle channels",
    ),
    "channels cut across": (
        f"d = Reshape(c, r)\ny = {POOL}(d)",
        "Reshape 'd': shape of a Reshape; got [1, 24, 16, 12], expected axes split in two, or joined",
        {"r": [1, 24, 16, 12]},
    ),
    "a view that something else reads": (
        f"d = Reshape(c, r)\ne = Reshape(d, s)\ny = {POOL}(e)\nz = Relu(d)",
        "Reshape 'd': output 'd' has 2 readers; got other readers, expected only the pooling",
        {"r": [1, 32, 144], "s": [1, 32, 12, 12], "outputs": "float[a,b,c,d] y, float[e,g,h] z"},
    ),
    "DepthToSpace": (
        f"d = DepthToSpace<blocksize=2>(c)\ny = {POOL}(d)",
        "DepthToSpace 'd': between convolution and pooling; got DepthToSpace, expected linear operators only",
    ),
    "repeated columns": (
        f"d = Tile(c, t)\ny = {POOL}(d)",
        "Tile 'd': between convolution and pooling; got Tile, expected linear operators only",
        {"t": [1, 1, 1, 2]},
    ),
    "larger by Expand": (
        f"d = Expand(c, t)\ny = {POOL}(d)",
        "Expand 'd': between convolution and pooling; got Expand, expected linear operators only",
        {"t": [2, 32, 12, 12]},
    ),
    "the larger one": (
        f"d = Max(c, x32)\ny = {POOL}(d)",
        "Max 'd': between convolution and pooling; got Max, expected linear operators only",
        {"inputs": "float[1,16,12,12] x, float[1,32,12,12] x32"},
    ),
    "channels flattened with space": (
        "d = Flatten(c)\nf = Identity(d)\ny = ReduceMean<axes=[1]>(f)",
        "Flatten 'd': between convolution and pooling; got Flatten, expected views that cancel, or shuffle channels",
        {"outputs": "float[a,b] y"},
    ),
    "the batch averaged, not the channel": (
        "y = ReduceMean<axes=[0,2,3], keepdims=0>(c)",
        "ReduceMean 'y': axes of the average; got the batch and others, expected all axes, or not the batch",
        {"outputs": "float[a] y"},
    ),
}


@pytest.mark.parametrize("name", STAYS)
def test_reason(name):
    nodes, expected, given = (*STAYS[name], {})[:3]
    model = graph_of(f"c = Conv<pads=[1,1,1,1]>(x, w)\n{nodes}", {**SLICE, **given})
    result = convpool.optimize(model, check=0)
    assert [(site.status, site.reason) for site in result.report.sites][:1] == [("rejected", expected)]
    assert result.model.SerializeToString() == model.SerializeToString()


def test_averages_of_parts_of_which_one_is_excluded_stay():
    body = f"{SPLIT}p = {POOL}(d)\nq = {POOL}(e)\ny = Add(p, q)"
    (site, other) = convpool.optimize(graph(body), check=0, exclude=["q"]).report.sites
    assert site.reason == "Split 'd': averages of its results; got one excluded by name, expected none"
    assert other.status == "excluded"


def test_averages_of_parts_that_differ_stay():
    body = f"{SPLIT}p = {POOL}(d)\nq = GlobalAveragePool(e)\ny = Add(p, q)"
    for site in convpool.optimize(graph(body), check=0).report.sites:
        assert site.reason == "Split 'd': results of Split that are read; got 2, expected one, or all by averages that are alike"


def test_pads_of_channels_in_front_of_a_convolution_stay():
    """They are none of its own, even behind a Pad of space."""
    body = f"a = Pad(x, space)\nb = Pad(a, channels)\nd = Pad(b, space)\nc = Conv(d, w)\ny = {POOL}(c)"
    pads = {"space": [0, 0, 1, 1, 0, 0, 1, 1], "channels": [0, 2, 0, 0, 0, 1, 0, 0]}
    model = graph(body, pads, inputs="float[1,13,12,12] x")
    for way, pairs in (("convavgpool", 1), ("direct", 0), ("fused", 1)):
        rewrite(model, pairs, way)


def test_a_cast_of_an_unknown_type_stays():
    body = f"v = local.some(x)\nc = Conv<kernel_shape=[3,3]>(v, w)\nd = Cast<to=1>(c)\ny = {POOL}(d)"
    (site,) = convpool.optimize(graph(body.replace("(v, w)", "(v, v)"), imports=', "local": 1'), check=0).report.sites
    wanted = "Cast 'd': between convolution and pooling; got Cast of an unknown type to FLOAT, expected linear operators only"
    assert site.reason == wanted

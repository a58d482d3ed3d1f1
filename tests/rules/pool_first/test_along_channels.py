# SPDX-License-Identifier: Apache-2.0
"""Nodes that change nothing, or act along channels, between a convolution and its average.

Random models of small integers, whose sums and means float32 holds exactly: the result of every target and lowering is the
original's to the bit, in onnxruntime.  Below them: why other nodes stay.
"""

from collections.abc import Callable, Sequence

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import convpool
from convpool.algebra.geometry import COMPUTED
from tests.support import sessions
from tests.support.models import graph, graph_of, operators
from tests.support.random_graph import RandomGraph
from tests.support.rewriting import POOL, assert_stable, cases, rewrite

WAYS: tuple[dict, ...] = tuple({"target": target} for target in ("any", "cpu", "cuda", "tensorrt"))
WAYS += ({"lowering": "direct"}, {"lowering": "fused"})
SEEDS = cases(10)
"""Variants of each kind; a sixth of them by every way, the others by one in turn."""
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
        model = self.model([x], [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs], self.opset)
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


def cast(net: Net, name: str) -> str:
    return net.node("Cast", [name], to=TensorProto.FLOAT)


def gather(net: Net, name: str, places: Sequence[int], axis: int = 1) -> str:
    return net.node("Gather", [name, net.constant(places)], axis=axis)


def shuffle(net: Net, name: str) -> str:
    parts = ([2, 4], [4, 2], [2, 2, 2])[int(net.rng.integers(3))]
    perm = [0, *(1 + net.rng.permutation(len(parts))), *range(1 + len(parts), 1 + len(parts) + net.rank)]
    return net.reshape(net.node("Transpose", [net.reshape(name, [-1, *parts, *net.size])], perm=perm), [-1, 8, *net.size])


def transposes(net: Net, name: str) -> str:
    perm = [0, *(1 + net.rng.permutation(net.rank + 1))]
    return net.node("Transpose", [net.node("Transpose", [name], perm=perm)], perm=np.argsort(perm).tolist())


def unsqueezed(net: Net, name: str) -> str:
    axes = [int(net.rng.integers(1, net.rank + 3))]
    return net.told("Squeeze", net.told("Unsqueeze", name, 13, values=axes), 13, values=axes)


def one_of_split(net: Net, name: str) -> str:
    return net.told("Split", name, 13, 2, "split", values=[3, 5], axis=net.axis(1))[int(net.rng.integers(2))]


NOTHING: dict[str, Callable[[Net, str], str]] = {
    "Cast": cast,
    "CastLike": lambda net, name: net.node("CastLike", [name, "x"]),
    "Cast behind a Cast and an Identity": lambda net, name: cast(net, net.node("Identity", [cast(net, name)])),
    "Dropout": lambda net, name: net.node("Dropout", [name]),
    "Reshape to its shape": lambda net, name: net.reshape(name, [-1, *net.shape[1:]]),
    "Reshape by zeros": lambda net, name: net.reshape(name, [0] * (net.rank + 1) + [-1]),
    "flattened, and back": lambda net, name: net.reshape(net.node("Flatten", [name]), [-1, *net.shape[1:]]),
    "space flattened, and back": lambda net, name: net.reshape(net.reshape(name, [0, 0, -1]), [-1, *net.shape[1:]]),
    "Transpose of no axes": lambda net, name: net.node("Transpose", [name], perm=list(range(net.rank + 2))),
    "Transposes": transposes,
    "Unsqueeze, Squeeze": unsqueezed,
    "Concat": lambda net, name: net.node("Concat", [name], axis=int(net.rng.integers(0, net.rank + 2))),
    **{name: lambda net, n, name=name: net.node(name, [n]) for name in ("Sum", "Max", "Min", "Mean")},
    "Pad": lambda net, name: net.pad(name, [0] * 2 * (net.rank + 2)),
    "Slice": lambda net, name: net.slice(name, int(net.rng.integers(0, net.rank + 2)), 0, 2**31 - 1),
    "Slice to the size": lambda net, name: net.slice(name, net.rank + 1, 0, net.size[-1]),
    "Expand": lambda net, name: net.node("Expand", [name, net.constant([1] * int(net.rng.integers(1, net.rank + 3)))]),
    "Expand to its shape": lambda net, name: net.node("Expand", [name, net.constant([1, *net.shape[1:]])]),
    "Tile": lambda net, name: net.node("Tile", [name, net.constant([1] * (net.rank + 2))]),
    "Split into one": lambda net, name: net.node("Split", [name], axis=2, **({"num_outputs": 1} if net.opset >= 18 else {})),
}
ALONG: dict[str, Callable[[Net, str], str]] = {
    "Neg of channels": lambda net, name: net.node("Neg", [name]),
    "Slice of channels": lambda net, name: net.slice(name, net.axis(1), 2, 2**31 - 1),
    "Slice of a Slice of channels": lambda net, name: net.slice(net.slice(name, 1, 1, 8, 2), net.axis(1), 0, 3),
    "Slice that reverses channels": lambda net, name: net.slice(name, net.axis(1), -1, -(2**31), -1),
    "Slice of the batch": lambda net, name: net.slice(name, 0, 0, 1),
    "Gather of channels": lambda net, name: gather(net, name, net.rng.integers(0, 8, 5), net.axis(1)),
    "Gather of all channels": lambda net, name: gather(net, name, net.rng.permutation(8)),
    "Pad of channels": lambda net, name: net.pad(name, [0, 1, *[0] * (net.rank + 1), 2, *[0] * net.rank]),
    "Pad that mirrors channels": lambda net, name: net.pad(name, [0, 1, *[0] * (2 * net.rank + 2)], mode="edge"),
    "one of a Split of channels": one_of_split,
    "shuffle of channels": shuffle,
    "shuffle of a selection of channels": lambda net, name: shuffle(net, gather(net, name, range(7, -1, -1))),
    "mean of the channels": lambda net, name: net.told("ReduceMean", name, 18, values=[net.axis(1)]),
    "sum of the channels": lambda net, name: net.told("ReduceSum", name, 13, values=[1]),
    "factors behind a selection of channels": lambda net, name: net.node(
        "Mul", [net.slice(name, 1, 0, 4), net.constant([[[2]] * 4] if net.rank == 1 else 2, np.float32)]
    ),
    "Concat of selections of channels of two convolutions": lambda net, name: net.node(
        "Concat", [net.slice(name, 1, 0, 4), net.slice(second(net), 1, 4, 8)], axis=1
    ),
}
FROM_OPSET = {"CastLike": 15, "Slice of a Slice of channels": 10, "Slice that reverses channels": 10}
FROM_OPSET |= dict.fromkeys(("Sum", "Max", "Min", "Mean", "Expand", "Expand to its shape"), 8)
KNOWN_SIZES = ("its shape", "and back", "to the size", "shuffle")
"""Words of those that name spatial sizes."""


def second(net: Net) -> str:
    """A pointwise convolution beside the first one."""
    return net.node("Conv", ["x", net.constant(net.rng.integers(-2, 3, (8, 8, *[1] * net.rank)), np.float32)])


def check_seeds(
    net_of: Callable[[int], Net], between: Callable[[Net, str], str], opened: bool | None, lowering: str, sites: int = 1
) -> None:
    """Half of the seeds' pairs or more are rewritten, and others stay for their costs alone."""
    found = 0
    for seed in range(SEEDS):
        net = net_of(seed)
        model, feeds = net.finish(between(net, net.name), opened=opened)
        check(model, feeds, WAYS if seed < SEEDS // 6 else (WAYS[seed % len(WAYS)],))
        site, *others = convpool.optimize(model, check=0, lowering=lowering).report.sites
        assert len(others) < sites
        assert site.status == "rewritten" or any(word in site.reason for word in COSTS), (seed, site.reason)
        found += site.status == "rewritten"
    assert found >= SEEDS // 2


@pytest.mark.parametrize("name", NOTHING | ALONG)
def test_a_pair_is_found_through_it(name):
    between, least = (NOTHING | ALONG)[name], FROM_OPSET.get(name, 7)
    opened = False if any(word in name for word in KNOWN_SIZES) else None
    check_seeds(lambda seed: Net(seed, least), lambda net, x: net.average(between(net, x)), opened, "direct", 1 + ("two" in name))


def mean(net: Net, name: str, axes: list[int], op_type: str = "ReduceMean", keep: bool | None = None) -> str:
    """A mean or sum over these axes, some counted from the end; keep: whether they stay, drawn where None."""
    axes = [axis - (net.rank + 2 if net.opset >= 11 and net.rng.integers(2) else 0) for axis in axes]
    keep = bool(net.rng.integers(2)) if keep is None else keep
    return net.told(op_type, name, 18 if op_type == "ReduceMean" else 13, values=axes, keepdims=int(keep))


def whole(net: Net, first: int = 1) -> list[int]:
    return list(range(first, net.rank + 2))


def flat(net: Net, name: str) -> str:
    """[N, positions] in one of the ways."""
    shape = [[0, -1], [-1, int(np.prod(net.size))], [net.batch, -1] if net.first == net.batch else []][int(net.rng.integers(3))]
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
    check_seeds(lambda seed: Net(seed, filters=1, channels=64, kernel=5), PATCHES[name], False, "fused")


@pytest.mark.parametrize("form", ["Flatten", "Reshape", "ReduceMean"])
def test_scores_of_patches_of_an_open_size(form):
    for seed in range(SEEDS):
        name = (net := Net(seed, filters=1, channels=64, kernel=1)).name
        if form != "ReduceMean":
            name = net.node("Flatten", [name]) if form == "Flatten" else net.reshape(name, [0, -1])
        y = net.told("ReduceMean", name, 18, values=whole(net) if form == "ReduceMean" else [1], keepdims=0)
        model, feeds = net.finish(y, opened=True)
        check(model, feeds, ({"lowering": "direct"},))
        (site,) = convpool.optimize(model, check=0, lowering="direct").report.sites
        assert "saves too little" in site.reason


def test_a_cast_to_the_same_type_does_not_keep_neighbours_apart():
    body = "s = Mul(x, k)\nt = Cast<to=1>(s)\nh = Conv<pads=[1,1,1,1]>(t, w)\nc = Cast<to=1>(h)\n"
    body += f"p = {POOL}(c)\nd = Cast<to=1>(p)\ny = Relu(d)"
    assert operators(rewrite(graph(body, {"k": np.float32(2)}), 1, "convavgpool").graph) == {"AffineConvAvgPoolRelu": 1}


SLICE = {"one": [1], "two": [2], "end": [9], "last": [3], "rows": [2], "minus": [-1], "begin": [-(2**31)]}
SLICE |= {"ids": [1, 0], "id": np.int64(1)}
LINEAR = "between convolution and pooling; got {}, expected linear operators only"
VIEWS = "between convolution and pooling; got {}, expected views that cancel, or shuffle channels"
ALONE = "expected 0 and 1, batch and channels, alone"
READ = "Split 'd': results of Split that are read; got 2, expected one"
READERS = "output '{}' has 2 readers; got other readers, expected only the pooling"
STAYS: dict[str, tuple] = {  # nodes from c to the average or what POOL reads, the reason, and what `graph_of` is given
    "Cast to another type": ("d = Cast<to=11>(c)",
        f"Cast 'd': {LINEAR.format('Cast of FLOAT to DOUBLE')}", {"outputs": "double[a,b,c,d] y"}),
    "Cast to another type and back": ("e = Cast<to=10>(c)\nd = Cast<to=1>(e)",
        f"Cast 'd': {LINEAR.format('Cast of FLOAT16 to FLOAT')}"),
    "CastLike another type": ("d = CastLike(c, v)", f"CastLike 'd': {LINEAR.format('CastLike of FLOAT to FLOAT16')}",
        {"inputs": "float[1,16,12,12] x, float16 v", "outputs": "float16[a,b,c,d] y"}),
    "rows of Slice": ("d = Slice(c, one, end, rows)", f"Slice 'd': axes of Slice; got 2, {ALONE}"),
    "rows reversed": ("d = Slice(c, minus, begin, rows, minus)", f"Slice 'd': axes of Slice; got 2, {ALONE}"),
    "axes computed": ("d = Slice(c, one, end, v)",
        f"Slice 'd': axes of Slice; got {COMPUTED}, expected a constant", {"inputs": "float[1,16,12,12] x, int64[1] v"}),
    "rows of Gather": ("d = Gather<axis=2>(c, ids)", f"Gather 'd': axes of Gather; got 2, {ALONE}"),
    "one channel of Gather": ("d = Gather<axis=1>(c, id)\ny = ReduceMean<axes=[1,2], keepdims=0>(d)",
        "Gather 'd': axes of what it gives; got 3, expected 4", {"outputs": "float[a] y"}),
    "rows of Split": ("d, e = Split<axis=2>(c)", f"Split 'd': axes of Split; got 2, {ALONE}"),
    "a part of a Split that is read": ("d, e = Split<axis=1>(c)\nf = Relu(e)",
        READ, {"outputs": "float[a,b,c,d] y, float[e,g,h,i] f"}),
    "rolled channels": ("e = Slice(c, one, end, one)\nf = Slice(c, one, last, one)\nd = Concat<axis=1>(e, f)",
        f"Conv 'c': {READERS.format('c')}"),
    "rows and columns exchanged": ("d = Transpose<perm=[0,1,3,2]>(c)", f"Transpose 'd': {VIEWS.format('Transpose')}"),
    "halves of channels and rows exchanged": (
        "e = Reshape(c, r)\nf = Transpose<perm=[0,3,2,1,4,5]>(e)\nd = Reshape(f, s)",
        f"Reshape 'd': {VIEWS.format('Reshape')}",
        {"r": [1, 2, 16, 2, 16, 32], "s": [1, 32, 32, 32], "inputs": "float[1,16,32,32] x"},
    ),
    "channels cut across": ("d = Reshape(c, r)",
        "Reshape 'd': shape of a Reshape; got [1, 24, 16, 12], expected axes split in two, or joined", {"r": [1, 24, 16, 12]}),
    "a view that something else reads": (
        "e = Reshape(c, r)\nd = Reshape(e, s)\nz = Relu(e)",
        f"Reshape 'e': {READERS.format('e')}",
        {"r": [1, 32, 144], "s": [1, 32, 12, 12], "outputs": "float[a,b,c,d] y, float[e,g,h] z"},
    ),
    "DepthToSpace": ("d = DepthToSpace<blocksize=2>(c)", f"DepthToSpace 'd': {LINEAR.format('DepthToSpace')}"),
    "repeated columns": ("d = Tile(c, t)", f"Tile 'd': {LINEAR.format('Tile')}", {"t": [1, 1, 1, 2]}),
    "larger by Expand": ("d = Expand(c, t)", f"Expand 'd': {LINEAR.format('Expand')}", {"t": [2, 32, 12, 12]}),
    "the larger one": ("d = Max(c, v)",
        f"Max 'd': {LINEAR.format('Max')}", {"inputs": "float[1,16,12,12] x, float[1,32,12,12] v"}),
    "channels flattened with space": ("d = Flatten(c)\nf = Identity(d)\ny = ReduceMean<axes=[1]>(f)",
        f"Flatten 'd': {VIEWS.format('Flatten')}", {"outputs": "float[a,b] y"}),
    "the batch averaged, not the channel": (
        "y = ReduceMean<axes=[0,2,3], keepdims=0>(c)",
        "ReduceMean 'y': axes of the average; got the batch and others, expected all axes, or not the batch",
        {"outputs": "float[a] y"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STAYS)
def test_reason(name):
    nodes, expected, given = (*STAYS[name], {})[:3]
    average = "" if "y =" in nodes else f"\ny = {POOL}(d)"
    model = graph_of(f"c = Conv<pads=[1,1,1,1]>(x, w)\n{nodes}{average}", {**SLICE, **given})
    result = convpool.optimize(model, check=0)
    assert [(site.status, site.reason) for site in result.report.sites][:1] == [("rejected", expected)]
    assert result.model.SerializeToString() == model.SerializeToString()


def test_pads_of_channels_in_front_of_a_convolution_stay():
    """They are none of its own, even behind a Pad of space."""
    body = f"a = Pad(x, space)\nb = Pad(a, channels)\nd = Pad(b, space)\nc = Conv(d, w)\ny = {POOL}(c)"
    model = graph(body, {"space": [0, 0, 1, 1, 0, 0, 1, 1], "channels": [0, 2, 0, 0, 0, 1, 0, 0]}, inputs="float[1,13,12,12] x")
    for way, pairs in (("convavgpool", 1), ("direct", 0), ("fused", 1)):
        rewrite(model, pairs, way)


def test_a_cast_of_an_unknown_type_stays():
    body = f"v = local.some(x)\nc = Conv<kernel_shape=[3,3]>(v, w)\nd = Cast<to=1>(c)\ny = {POOL}(d)"
    (site,) = convpool.optimize(graph(body.replace("(v, w)", "(v, v)"), imports=', "local": 1'), check=0).report.sites
    assert site.reason == f"Cast 'd': {LINEAR.format('Cast of an unknown type to FLOAT')}"


@pytest.mark.parametrize("opset", [7, 8, 9])
@pytest.mark.parametrize("lowering", ["direct", "fused"])
def test_the_order_of_channels_in_old_models(opset, lowering):
    """Before IR 4 a Constant gives it, which has no integers before opset 9."""
    body = "c = Conv<pads=[1,1,1,1]>(x, w)\nd = Reshape(c, s)\ne = Transpose<perm=[0,2,1,3,4]>(d)\nf = Reshape(e, t)"
    model = graph(f"{body}\ny = {POOL}(f)", {"s": [1, 4, 8, 12, 12], "t": [1, 32, 12, 12]}, opset=opset, ir=3)
    ops = [node.op_type for node in rewrite(model, 1, lowering).graph.node]
    assert ops.count("Gather") == 1 and ops.count("Cast") == (opset < 9)

# SPDX-License-Identifier: Apache-2.0
"""Convolutions and poolings between pairs, as nodes of the operator, for onnxruntime's CUDA provider.

    ConvAvgPool - Relu - Conv - ConvAvgPool        ConvAvgPool - Relu - ConvAvgPool - ConvAvgPool

It saves no arithmetic.  The kernels keep the channels last, where the provider turns tensors around each convolution, and do
with it what stands before and behind.  Conditions: (1) a pair has become a node of the operator in the scope; (2) no attribute
refers to a function's; (3) two spatial axes; (4) a convolution can be a node (`convs.against_node`), its weights are constants
of a type that the kernels have, and its input channels multiples of 16 bytes or those of an image; an AveragePool has whole
windows side by side without padding, and at most POOL_CHANNELS channels, which the kernels multiply by the identity; (5) its
input or result has the channels last (`layouts`), of an AveragePool both; or a SiLU or a map by image stands in front, which the
kernels do as they turn X, and are several passes of the provider's; (6) no Pad can come to stand in front (`rules.offloaded`).

The head of many networks, a sum or mean over space and the product of matrices behind it, becomes one node too:

    x - ReduceSum (2, 3) - Gemm        x - ConvAvgPool - Flatten

The mean over the whole map is an average pooling, and the Gemm a convolution of one element: two or three kernels less.
Conditions: (1) and (2) as above; (7) the sum or mean is over all of a 2-D map of a known size, of a type that the kernels have;
only views (Flatten, Reshape, Squeeze) stand behind it; (8) nothing else reads what they give; (9) the Gemm multiplies by a
constant [C, M] and adds at most a constant, a MatMul multiplies by one; (10) the channels are multiples of 16 bytes; (11) x has
the channels last (`layouts`); (12) the type has the weights of a sum, the map's size times as large, to its precision.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
from onnx import TensorProto, helper

from convpool.algebra.expand import UpsampleSpec
from convpool.algebra.geometry import Ints, PoolSpec
from convpool.algebra.parts import MAX_UPSAMPLE, OP_TYPE, UPSAMPLING_OP_TYPE, keeps
from convpool.ir import schema
from convpool.ir.edit import Edit
from convpool.ir.index import Scope
from convpool.ir.protos import attributes, is_op, known_attributes, label, stand_for
from convpool.options import FILTER_ELEMENTS, IMAGE_CHANNELS, OF_IMAGES, POOL_CHANNELS
from convpool.report import Log
from convpool.rules import convs
from convpool.rules.base import Context, NodesPlan, Reject, Rule, Site, reject, spatial_size
from convpool.rules.cuda_chain.layouts import VIEWS, Ports, channels_last, ports_of, summed_axes
from convpool.rules.neighbours.patterns import mapped_by
from convpool.rules.offloaded import alone, whole_windows
from convpool.rules.pool_first.pairs import PairPlan, PairRule, PairSite
from convpool.rules.resampling.resize import Resample, recognise
from convpool.rules.resampling.rule import has_fast_kernel
from convpool.rules.sizes import same_size

PATTERN = "chain"
CHUNK_BYTES = 16
"""Bytes of a pixel's channels that the kernels read at once."""


@dataclass(frozen=True)
class ChainSite(PairSite):
    """A convolution.  first: whether it and its neighbours would have the channels first."""

    first: bool = False


class ChainConv(PairRule):
    """Every convolution of a scope with nodes of the operator that can be one too."""

    names = ("chain_conv",)

    def sites(self, scope: Scope, context: Context) -> Iterator[ChainSite]:
        """The model's own convolutions, each with the layout around it."""
        if not ports_of(scope):
            return
        taken = chain(scope, context)
        for index, node in enumerate(scope.nodes):
            if is_op(node, "Conv") and (scope.path, node.output[0]) in context.originals:
                yield ChainSite(scope, index, node.input[0], index, PATTERN, first=index not in taken)

    def check(self, site: ChainSite, context: Context) -> PairPlan | Reject:
        scope, index = site.scope, site.conv
        leaf = _conv(scope, index, context)
        if isinstance(leaf, Reject):
            return leaf
        if site.first:
            return reject(scope, index, "layout", "other nodes before and behind it", "nodes of the operator")
        return alone(scope, leaf, PATTERN)


@dataclass(frozen=True)
class PoolPlan(NodesPlan):
    """An AveragePool that becomes a node of the operator, whose convolution is the identity."""

    window: PoolSpec
    channels: int
    elem_type: int

    operator_version = schema.POOLING_VERSION


class ChainPool(Rule):
    """Every AveragePool between nodes of the operator."""

    names = ("chain_pool",)

    def sites(self, scope: Scope, context: Context) -> Iterator[Site]:
        """The poolings that have channels last on both sides."""
        if ports_of(scope):
            yield from (Site(scope, index) for index in sorted(chain(scope, context)) if is_op(scope.nodes[index], "AveragePool"))

    def check(self, site: Site, context: Context) -> PoolPlan | None:
        return _pooling(site.scope, site.root, context)

    def apply(self, plan: PoolPlan, edit: Edit) -> None:
        old, channels = plan.scope.nodes[plan.node], plan.channels
        dtype = helper.tensor_dtype_to_np_dtype(plan.elem_type)
        key, shape = (plan.elem_type, channels), (channels, *(1,) * convs.RANK, channels)
        wanted = f"{old.output[0]}_identity"
        identity = edit.common(("identity", *key), lambda: np.eye(channels, dtype=dtype).reshape(shape), wanted)
        zeros = edit.common(("zeros", *key), lambda: np.zeros(channels, dtype), f"{old.output[0]}_bias")
        edit.nodes.append(schema.make_node([old.input[0], identity, zeros], old.output[0], plan.window, convs.POINT))
        stand_for(edit.nodes[-1], old)
        edit.replace(plan.node, plan.own)

    def rewritten(self, plan: PoolPlan, outputs: list[str], times: dict[str, float] | None, log: Log) -> None:
        node = plan.scope.nodes[plan.node]
        known = [dim for dim in (plan.scope.info(node.output[0]).shape or (None,))[2:] if isinstance(dim, int)]
        count = math.prod(known) * plan.channels**2 if len(known) == convs.RANK else None
        values = {"pool": label(node), "macs_before": 0, "macs_after": count, "operator": OP_TYPE}
        log.rewritten(self.site_report(plan.scope, PATTERN, "convavgpool", **values), outputs[0])


@dataclass(frozen=True)
class ShortcutPlan(NodesPlan):
    """An upsampling, and the 1x1 convolution in front of it, which become a node of UpsampleConv."""

    up: UpsampleSpec
    leaf: convs.ConvLeaf
    passed: frozenset[int]

    operator_version = schema.UPSAMPLING_VERSION

    @property
    def shared(self) -> frozenset[int]:
        """Where the scales come from."""
        return self.passed


class ChainUpsample(Rule):
    """Every nearest upsampling that `resize_last` put behind a 1x1 convolution, between nodes of the operators.

        x - Conv - Resize - Add        x - UpsampleConv - Add

    Its kernels multiply for every copy of a pixel, which is little beside a pass over the result in another layout.  A target
    without chains has it where an Add alone reads the result, which `fuse_epilogue` then fuses, with what is behind it: the Add
    in the epilogue of its other operand's convolution takes TensorRT longer (docs/decisions/034).
    """

    names = ("chain_upsample",)
    needs = ("Resize",)

    def sites(self, scope: Scope, context: Context) -> Iterator[Site]:
        """The Resizes that nodes of the operators around them keep in the kernels' layout."""
        if not ports_of(scope):
            return
        taken = chain(scope, context) if context.enabled("chain_conv") else None
        for index, node in enumerate(scope.nodes):
            if is_op(node, "Resize") and (_is_added(scope, node.output[0]) if taken is None else index in taken):
                yield Site(scope, index)

    def check(self, site: Site, context: Context) -> ShortcutPlan | None:
        plan = _shortcut(site.scope, site.root, context)
        return plan if context.enabled("chain_conv") or plan is None or has_fast_kernel(*plan.leaf.weight_shape[:2]) else None

    def apply(self, plan: ShortcutPlan, edit: Edit) -> None:
        scope, leaf = plan.scope, plan.leaf
        old, output = scope.nodes[leaf.node], scope.nodes[plan.node].output[0]
        assert leaf.weight is not None
        weight, m = leaf.weight, leaf.weight_shape[0]
        dtype = helper.tensor_dtype_to_np_dtype(weight.data_type)
        w = edit.common((old.input[1],), lambda: np.moveaxis(weight.array(), 1, -1), f"{old.input[1]}_channels_last")
        b = old.input[2] if leaf.bias is not None else ""
        b = b or edit.common(("zeros", weight.data_type, m), lambda: np.zeros(m, dtype), f"{output}_bias")
        edit.nodes.append(schema.make_node([leaf.input, w, b], output, plan.up, leaf.conv))
        stand_for(edit.nodes[-1], old)
        edit.replace(plan.node, plan.own)
        edit.drop_unread(plan.passed)

    def rewritten(self, plan: ShortcutPlan, outputs: list[str], times: dict[str, float] | None, log: Log) -> None:
        """Change the report of the convolution, which gave what the Resize gives."""
        name = plan.scope.nodes[plan.leaf.node].name or plan.scope.nodes[plan.node].output[0]
        log.upsamples(plan.scope.path, name, outputs[0], UPSAMPLING_OP_TYPE)


def _is_added(scope: Scope, name: str) -> bool:
    """Return True if only an Add reads a tensor, of two computed maps of its shape."""
    reader = next(iter(scope.readers.get(name, ())), None)
    if reader is None or scope.other_readers(name) is not None or not is_op(scope.nodes[reader], "Add"):
        return False
    maps = scope.nodes[reader].input
    return same_size(scope, maps, convs.RANK, 0) and all(scope.constant(other) is None for other in maps)


def _shortcut(scope: Scope, index: int, context: Context) -> ShortcutPlan | None:
    """A Resize that gives what a convolution of the model gave, with the 1x1 convolution in front of it; None for another."""
    node = scope.nodes[index]
    wanted = context.enabled("chain_upsample") and (scope.path, node.output[0]) in context.originals
    if not wanted or not is_op(node, "Resize"):
        return None
    found, conv = recognise(scope, index, convs.RANK), scope.producer.get(node.input[0])
    if not isinstance(found, Resample) or found.up is None or max(found.up.factors) > MAX_UPSAMPLE or conv is None:
        return None
    if not is_op(scope.nodes[conv], "Conv") or scope.other_readers(found.input) is not None:
        return None
    leaf = _conv(scope, conv, context)
    if isinstance(leaf, Reject) or leaf.weight is None or leaf.conv != convs.POINT or scope.opset < schema.UPSAMPLING_OPSET:
        return None
    if leaf.bias is None and any(scope.nodes[conv].input[2:]) or leaf.weight_shape[0] % chunk(leaf.weight.data_type):
        return None
    return ShortcutPlan(scope, (index, conv), found.up, leaf, found.nodes - {index})


def chain(scope: Scope, context: Context) -> frozenset[int]:
    """The convolutions and poolings that nodes of the operator around them keep in the kernels' layout."""
    given = ports_of(scope)
    own = {
        index: Ports(node.input[0], node.output[0])
        for index, node in enumerate(scope.nodes)
        if not context.excluded(label(node)) and known_attributes(node) is not None and _may_be_taken(scope, index, context)
    }
    for index in range(len(scope.nodes)):
        shortcut = _shortcut(scope, index, context) if known_attributes(scope.nodes[index]) is not None else None
        if shortcut is not None:
            between = scope.nodes[index].input[0]
            own |= {shortcut.leaf.node: Ports(shortcut.leaf.input, between), index: Ports(between, scope.nodes[index].output[0])}
    while own:
        last = channels_last(scope, {**given, **own}, sums=False)
        away = {index for index, item in own.items() if not _stays(scope, index, item, last)}
        if not away:
            break
        own = {index: item for index, item in own.items() if index not in away}
    return frozenset(own)


def _stays(scope: Scope, index: int, item: Ports, last: frozenset[str]) -> bool:
    """Condition (5)."""
    ends, node = (item.x in last, item.y in last), scope.nodes[index]
    if is_op(node, "Conv") and mapped_by(scope, item.x, convs.RANK) is not None:
        return True
    return any(ends) if is_op(node, "Conv", "Resize") else all(ends)


def _may_be_taken(scope: Scope, index: int, context: Context) -> bool:
    """Return True if a node is a convolution or pooling that conditions (2) to (4) admit."""
    node = scope.nodes[index]
    if is_op(node, "Conv"):
        return (scope.path, node.output[0]) in context.originals and isinstance(_conv(scope, index, context), convs.ConvLeaf)
    return is_op(node, "AveragePool") and isinstance(_pooling(scope, index, context), PoolPlan)


def _conv(scope: Scope, index: int, context: Context) -> convs.ConvLeaf | Reject:
    """A convolution, or which of conditions (3) and (4) fails."""
    leaf = convs.constant_leaf(scope, index, context)
    if isinstance(leaf, Reject):
        return leaf
    assert leaf.weight is not None
    kind = leaf.weight.data_type
    if kind not in convs.KERNEL_TYPES:
        return reject(scope, index, "type", TensorProto.DataType.Name(kind), "float16, bfloat16 or float32")
    channels, multiple = leaf.weight_shape[1], chunk(kind)
    of_image = channels <= IMAGE_CHANNELS and channels * leaf.conv.taps <= FILTER_ELEMENTS
    if channels % multiple and not of_image:
        return reject(scope, index, "input channels", channels, f"a multiple of {multiple}, or an image of {OF_IMAGES}")
    return leaf


def chunk(elem_type: int) -> int:
    """How many channels of a type the kernels read at once."""
    return int(CHUNK_BYTES // helper.tensor_dtype_to_np_dtype(elem_type).itemsize)


def _pooling(scope: Scope, index: int, context: Context) -> PoolPlan | None:
    """A pooling that conditions (3) and (4) admit."""
    node, rank = scope.nodes[index], len(attributes(scope.nodes[index])["kernel_shape"])
    window = whole_windows(scope, index, convs.RANK) if rank == convs.RANK else None
    if not isinstance(window, PoolSpec) or any(window.pads):
        return None
    kind, channels = scope.info(node.input[0]).elem_type, convs.channel_count(scope, node.input[0])
    if kind not in convs.KERNEL_TYPES or convs.against_node(scope, convs.POINT, context.main_opset, window) is not None:
        return None
    if channels is None or channels > POOL_CHANNELS or channels % chunk(kind):
        return None
    return PoolPlan(scope, (index,), window, channels, kind)


HEAD = "head"
MEANS = ("ReduceSum", "ReduceMean", "GlobalAveragePool")


@dataclass(frozen=True)
class HeadPlan(NodesPlan):
    """The nodes that go, from the sum or mean to the product; weights [M, 1, 1, C] and bias [M]."""

    window: PoolSpec
    weight: np.ndarray = field(compare=False)
    bias: np.ndarray = field(compare=False)

    operator_version = schema.POOLING_VERSION


class ChainHead(Rule):
    """Every product of matrices behind a sum or mean over space."""

    names = ("chain_head",)

    def sites(self, scope: Scope, context: Context) -> Iterator[Site]:
        if ports_of(scope):
            for index, node in enumerate(scope.nodes):
                if is_op(node, "Gemm", "MatMul") and _from_map(scope, index):
                    yield Site(scope, index)

    def check(self, site: Site, context: Context) -> HeadPlan | None:
        scope, nodes = site.scope, _from_map(site.scope, site.root)
        mean, x = scope.nodes[nodes[0]], scope.nodes[nodes[0]].input[0]
        read = any(scope.other_readers(scope.nodes[index].output[0]) is not None for index in nodes[:-1])
        size = None if read else _map_size(scope, nodes[0])
        linear = None if size is None else _linear(scope, site.root)
        if size is None or linear is None:
            return None
        weight, bias = linear
        window = replace(convs.NO_POOLING, kernel_shape=size)
        refusal = convs.against_node(scope, convs.POINT, context.main_opset, window)
        if refusal is not None or weight.shape[1] % chunk(scope.info(x).elem_type):
            return None
        ports = {**ports_of(scope), nodes[0]: Ports(x, mean.output[0])}
        if x not in channels_last(scope, ports):
            return None
        if is_op(mean, "ReduceSum"):
            dtype, scaled = weight.dtype, weight.astype(np.float64) * math.prod(size)
            if not keeps(scaled, dtype):
                return None
            weight = scaled.astype(dtype)
        return HeadPlan(scope, tuple(nodes), window, weight.reshape(len(weight), *(1,) * convs.RANK, -1), bias)

    def apply(self, plan: HeadPlan, edit: Edit) -> None:
        first, last = plan.scope.nodes[plan.nodes[0]], plan.scope.nodes[plan.nodes[-1]]
        y = last.output[0]
        weight = edit.constant(plan.weight, f"{last.input[1]}_channels_last")
        bias = edit.constant(plan.bias, f"{y}_bias")
        product = edit.fresh(f"{y}_map")
        edit.nodes.append(schema.make_node([first.input[0], weight, bias], product, plan.window, convs.POINT))
        stand_for(edit.nodes[-1], last)
        edit.nodes.append(helper.make_node("Flatten", [product], [y], axis=1))
        edit.replace(plan.nodes[-1], plan.nodes)

    def rewritten(self, plan: HeadPlan, outputs: list[str], times: dict[str, float] | None, log: Log) -> None:
        pool, count = label(plan.scope.nodes[plan.nodes[0]]), plan.weight.size
        values = {"pool": pool, "macs_before": count, "macs_after": count, "operator": OP_TYPE}
        log.rewritten(self.site_report(plan.scope, HEAD, "convavgpool", **values), outputs[0])


def _from_map(scope: Scope, index: int) -> list[int]:
    """The nodes from the sum or mean over space to the product `index`, in order; none where there is no such chain."""
    found = [index]
    name = scope.nodes[index].input[0]
    while (producer := scope.producer.get(name)) is not None:
        node = scope.nodes[producer]
        found.insert(0, producer)
        if is_op(node, *MEANS):
            return found
        if not is_op(node, *VIEWS):
            break
        name = node.input[0]
    return []


def _map_size(scope: Scope, index: int) -> Ints | None:
    """The sizes of the map that a sum or mean is over: condition (7)."""
    node = scope.nodes[index]
    axes = (2, 3) if is_op(node, "GlobalAveragePool") else summed_axes(scope, index)
    fits = axes == (2, 3) and scope.info(node.input[0]).elem_type in convs.KERNEL_TYPES
    return spatial_size(scope, node.input[0], convs.RANK) if fits else None


def _linear(scope: Scope, index: int) -> tuple[np.ndarray, np.ndarray] | None:
    """Weights [M, C] and bias [M] of the product: condition (9)."""
    node = scope.nodes[index]
    values = attributes(node)
    usual = values.get("alpha", 1.0) == values.get("beta", 1.0) == 1 and not values.get("transA", 0)
    usual = usual and len(scope.info(node.input[0]).shape or ()) == 2
    constant = scope.weights(node.input[1]) if usual else None
    if constant is None or len(constant.shape) != 2:
        return None
    weight = constant.array() if values.get("transB", 0) else constant.array().T  # a MatMul has no transB
    bias = np.zeros(len(weight), weight.dtype)
    if len(node.input) > 2 and node.input[2]:
        added = scope.constant(node.input[2])
        if added is None or added.array().size not in (1, len(bias)) or any(n != 1 for n in added.shape[:-1]):
            return None
        bias = np.broadcast_to(added.array().reshape(-1), bias.shape).astype(weight.dtype)
    return np.ascontiguousarray(weight), np.ascontiguousarray(bias)

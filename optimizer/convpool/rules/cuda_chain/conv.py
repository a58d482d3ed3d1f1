# SPDX-License-Identifier: Apache-2.0
"""Convolutions and poolings between pairs, as nodes of the operator, for onnxruntime's CUDA provider.

    ConvAvgPool - Relu - Conv - ConvAvgPool        ConvAvgPool - Relu - ConvAvgPool - ConvAvgPool

It saves no arithmetic.  The kernels keep the channels last, where the provider turns tensors around each convolution, and do
with it what stands before and behind.  Conditions: (1) a pair has become a node of the operator in the scope; (2) no attribute
refers to a function's; (3) two spatial axes; (4) a convolution can be a node (`convs.against_node`), its weights are constants
of a type that the kernels have, and its input channels multiples of 16 bytes or those of an image; an AveragePool has whole
windows side by side without padding, and at most `pool_channels` channels, which the kernels multiply by the identity; (5) its
input or result has the channels last (`layouts`), of an AveragePool both; or a SiLU or a map by image stands in front, which the
kernels do as they turn X, and are several passes of the provider's; (6) no Pad can come to stand in front (`image_conv`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from onnx import TensorProto, helper

from convpool.algebra.expand import UpsampleSpec
from convpool.algebra.geometry import PoolSpec
from convpool.algebra.parts import MAX_UPSAMPLE, OP_TYPE, UPSAMPLING_OP_TYPE
from convpool.ir import schema
from convpool.ir.edit import Edit
from convpool.ir.index import Scope
from convpool.ir.protos import attributes, is_op, known_attributes, label, stand_for
from convpool.report import Log
from convpool.rules import convs
from convpool.rules.base import Context, NodePlan, Plan, Reject, Rule, Site, reject, rejection
from convpool.rules.cuda_chain.layouts import Ports, channels_last, ports_of
from convpool.rules.neighbours.patterns import mapped_by
from convpool.rules.offloaded import whole_windows
from convpool.rules.pool_first.pairs import PairPlan, PairRule, PairSite, node_plan
from convpool.rules.resampling.resize import Resample, recognise
from convpool.rules.resampling.rule import has_fast_kernel

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
    on_operators = True

    def sites(self, scope: Scope, context: Context) -> Iterator[ChainSite]:
        """The model's own convolutions, each with the layout around it."""
        if not context.made_operator or not ports_of(scope):
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
        leaf = convs.with_pads_in_front(scope, leaf)
        if any(True for _ in convs.pads_upstream(scope, leaf.input)):
            return reject(scope, index, "Pad in front", "pads that the convolution cannot take", "none")
        pooling = convs.Pooling(index, (), leaf.input, scope.nodes[index].output[0], PATTERN, convs.WINDOW)
        return node_plan(scope, pooling, leaf)


@dataclass(frozen=True)
class PoolPlan(NodePlan):
    """An AveragePool that becomes a node of the operator, whose convolution is the identity."""

    window: PoolSpec
    channels: int
    elem_type: int

    operator_version = schema.VERSION


class ChainPool(Rule):
    """Every AveragePool between nodes of the operator."""

    names = ("chain_pool",)
    on_operators = True

    def sites(self, scope: Scope, context: Context) -> Iterator[Site]:
        """The poolings that have channels last on both sides."""
        if context.made_operator and ports_of(scope):
            taken = chain(scope, context)
            yield from (Site(scope, index) for index in sorted(taken) if is_op(scope.nodes[index], "AveragePool"))

    def check(self, site: Site, context: Context) -> PoolPlan | Reject:
        return _pooling(site.scope, site.root, context)

    def apply(self, plan: PoolPlan, edit: Edit) -> None:
        old, channels = plan.scope.nodes[plan.node], plan.channels
        dtype = helper.tensor_dtype_to_np_dtype(plan.elem_type)
        key = (plan.elem_type, channels)

        def eye() -> np.ndarray:
            return np.eye(channels).reshape(channels, *(1,) * convs.RANK, channels).astype(dtype)

        identity = edit.shared(("identity", *key), eye, f"{old.output[0]}_identity")
        zeros = edit.shared(("zeros", *key), lambda: np.zeros(channels, dtype), f"{old.output[0]}_bias")
        edit.nodes.append(schema.make_node([old.input[0], identity, zeros], old.output[0], plan.window, convs.POINT))
        stand_for(edit.nodes[-1], old)
        edit.replace(plan.node, plan.own)

    def rewritten(self, plan: PoolPlan, outputs: list[str], times: dict[str, float] | None, log: Log) -> None:
        node = plan.scope.nodes[plan.node]
        shape = plan.scope.info(node.output[0]).shape or (None,)
        known = [dim for dim in shape[2:] if isinstance(dim, int)]
        count = math.prod(known) * plan.channels**2 if len(known) == convs.RANK else None
        values = {"pool": label(node), "macs_before": 0, "macs_after": count, "operator": OP_TYPE}
        log.rewritten(self.site_report(plan.scope, PATTERN, "convavgpool", **values), outputs[0])


@dataclass(frozen=True)
class ShortcutPlan(Plan):
    """A 1x1 convolution and the upsampling behind it, which become a node of UpsampleConv."""

    resize: int
    up: UpsampleSpec
    leaf: convs.ConvLeaf
    passed: frozenset[int]

    operator_version = schema.UPSAMPLING_VERSION

    @property
    def own(self) -> frozenset[int]:
        return frozenset((self.resize, self.leaf.node))

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
    on_operators = True

    def sites(self, scope: Scope, context: Context) -> Iterator[Site]:
        """The Resizes that nodes of the operators around them keep in the kernels' layout."""
        if not context.made_operator or not ports_of(scope):
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
        old, output = scope.nodes[leaf.node], scope.nodes[plan.resize].output[0]
        assert leaf.weight is not None
        weight, m = leaf.weight, leaf.weight_shape[0]
        dtype = helper.tensor_dtype_to_np_dtype(weight.data_type)
        w = edit.shared((old.input[1],), lambda: np.moveaxis(weight.array(), 1, -1), f"{old.input[1]}_channels_last")
        b = old.input[2] if leaf.bias is not None else ""
        b = b or edit.shared(("zeros", weight.data_type, m), lambda: np.zeros(m, dtype), f"{output}_bias")
        edit.nodes.append(schema.make_node([leaf.input, w, b], output, plan.up, leaf.conv))
        stand_for(edit.nodes[-1], old)
        edit.replace(plan.resize, plan.own)
        edit.drop_unread(plan.passed)

    def rewritten(self, plan: ShortcutPlan, outputs: list[str], times: dict[str, float] | None, log: Log) -> None:
        """Change the report of the convolution, which gave what the Resize gives."""
        name = plan.scope.nodes[plan.leaf.node].name or plan.scope.nodes[plan.resize].output[0]
        log.upsamples(plan.scope.path, name, outputs[0], UPSAMPLING_OP_TYPE)


def _is_added(scope: Scope, name: str) -> bool:
    """Return True if only an Add reads a tensor, of two computed maps of its shape."""
    shape, reader = scope.info(name).shape, next(iter(scope.readers.get(name, ())), None)
    if reader is None or scope.other_readers(name) is not None or not is_op(scope.nodes[reader], "Add") or not shape:
        return False
    return all(scope.info(other).shape == shape and scope.constant(other) is None for other in scope.nodes[reader].input)


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
    return ShortcutPlan(scope, index, found.up, leaf, found.nodes - {index})


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
        last = channels_last(scope, {**given, **own}, context.options.limits, sums=False)
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
    channels, multiple, limits = leaf.weight_shape[1], chunk(kind), context.options.limits
    of_image = channels <= limits.image_channels and channels * leaf.conv.taps <= limits.filter_elements
    if channels % multiple and not of_image:
        return reject(scope, index, "input channels", channels, f"a multiple of {multiple}, or an image of {limits.of_images}")
    return leaf


def chunk(elem_type: int) -> int:
    """How many channels of a type the kernels read at once."""
    return int(CHUNK_BYTES // helper.tensor_dtype_to_np_dtype(elem_type).itemsize)


def _pooling(scope: Scope, index: int, context: Context) -> PoolPlan | Reject:
    """Conditions (3) and (4) of a pooling."""
    node, limits = scope.nodes[index], context.options.limits
    info = scope.info(node.input[0])
    if len(attributes(node)["kernel_shape"]) != convs.RANK:
        return reject(scope, index, "spatial axes", len(attributes(node)["kernel_shape"]), convs.RANK)
    window = whole_windows(scope, index, convs.RANK)
    if isinstance(window, Reject):
        return window
    if any(window.pads):
        return reject(scope, index, "pads", list(window.pads), "none")
    if (found := convs.against_node(scope, convs.POINT, context.main_opset, window)) is not None:
        return rejection(scope, index, found)
    channels = info.shape[1] if info.shape is not None and len(info.shape) == convs.RANK + 2 else None
    if info.elem_type not in convs.KERNEL_TYPES:
        return reject(scope, index, "type", TensorProto.DataType.Name(info.elem_type), "float16, bfloat16 or float32")
    multiple = chunk(info.elem_type)
    if not isinstance(channels, int) or channels > limits.pool_channels or channels % multiple:
        return reject(scope, index, "channels", channels, f"at most {limits.pool_channels}, a multiple of {multiple}")
    return PoolPlan(scope, index, window, channels, info.elem_type)

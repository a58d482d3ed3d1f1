# SPDX-License-Identifier: Apache-2.0
"""Convolutions and poolings between pairs, as nodes of the operator, for onnxruntime's CUDA provider.

    ConvAvgPool - Relu - Conv - ConvAvgPool        ConvAvgPool - Relu - ConvAvgPool - ConvAvgPool

It saves no arithmetic.  The kernels keep the channels last, where the provider turns tensors around each convolution, and do
with it what stands before and behind.  Conditions: (1) a pair has become a node of the operator in the scope; (2) no attribute
refers to a function's; (3) two spatial axes; (4) a convolution can be a node (`convs.against_node`), its weights are constants
of a type that the kernels have, and its input channels multiples of 16 bytes or those of an image; an AveragePool has whole
windows side by side without padding, and at most `pool_channels` channels, which the kernels multiply by the identity; (5) its
input or result has the channels last (`layouts`), of an AveragePool both; (6) no Pad can come to stand in front (`image_conv`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from onnx import NodeProto, TensorProto, helper

from convpool.algebra.geometry import PoolSpec
from convpool.ir import schema
from convpool.ir.edit import Edit
from convpool.ir.index import Scope
from convpool.ir.protos import attributes, is_op, known_attributes, label
from convpool.options import Limits
from convpool.report import Log, SiteReport
from convpool.rules.base import Context, Plan, Reject, Rule, Site, reject, rejection
from convpool.rules.convs import (
    KERNEL_TYPES,
    POINT,
    RANK,
    WINDOW,
    ConvLeaf,
    Pooling,
    against_node,
    constant_leaf,
    pads_upstream,
    with_pads_in_front,
)
from convpool.rules.cuda_chain.layouts import Ports, channels_last, ports_of
from convpool.rules.fuse_pool_conv import whole_windows
from convpool.rules.pool_first.pairs import PairPlan, PairRule, PairSite, macs, operator_lowering

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
        """A plan for one ConvAvgPool, or why the convolution stays.  Raises AttributeReference."""
        scope, index = site.scope, site.conv
        leaf = _conv(scope, index, context)
        if isinstance(leaf, Reject):
            return leaf
        if site.first:
            return reject(scope, index, "layout", "other nodes before and behind it", "nodes of the operator")
        leaf = with_pads_in_front(scope, leaf)
        if any(True for _ in pads_upstream(scope, leaf.input)):
            return reject(scope, index, "Pad in front", "pads that the convolution cannot take", "none")
        pooling = Pooling(index, (), leaf.input, scope.nodes[index].output[0], PATTERN, WINDOW)
        return PairPlan(scope, PATTERN, pooling, leaf, (operator_lowering(pooling, leaf, macs(site)),))


@dataclass(frozen=True)
class PoolPlan(Plan):
    """An AveragePool that becomes a node of the operator, whose convolution is the identity."""

    node: int
    window: PoolSpec
    channels: int
    elem_type: int

    operator_version = schema.VERSION

    @property
    def own(self) -> frozenset[int]:
        """The pooling."""
        return frozenset((self.node,))


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
        """A plan for one ConvAvgPool, or why the pooling stays.  Raises AttributeReference."""
        return _pooling(site.scope, site.root, context)

    def apply(self, plan: PoolPlan, edit: Edit) -> None:
        """Put the node in the pooling's place."""
        old, channels = plan.scope.nodes[plan.node], plan.channels
        dtype = helper.tensor_dtype_to_np_dtype(plan.elem_type)
        nodes: list[NodeProto] = []
        identity = edit.shared(
            ("identity", plan.elem_type, channels),
            lambda: np.eye(channels).reshape(channels, *(1,) * RANK, channels).astype(dtype),
            f"{old.output[0]}_identity",
            nodes,
        )
        zeros = edit.shared(
            ("zeros", plan.elem_type, channels), lambda: np.zeros(channels, dtype), f"{old.output[0]}_bias", nodes
        )
        nodes.append(schema.make_node([old.input[0], identity, zeros], old.output[0], plan.window, POINT, old.name))
        edit.replace(plan.node, {plan.node}, nodes)

    def rewritten(self, plan: PoolPlan, outputs: list[str], times: dict[str, float] | None, log: Log) -> None:
        """Report the pooling."""
        name, path = label(plan.scope.nodes[plan.node]), plan.scope.path
        shape = plan.scope.info(plan.scope.nodes[plan.node].output[0]).shape or (None,)
        known = [dim for dim in shape[2:] if isinstance(dim, int)]
        macs = math.prod(known) * plan.channels**2 if len(known) == RANK else None
        found = SiteReport(
            pool=name,
            pattern=PATTERN,
            status="rewritten",
            lowering="convavgpool",
            macs_before=0,
            macs_after=macs,
            scope=path,
            operator=schema.OP_TYPE,
            rule=self.names[0],
        )
        log.rewritten(found, outputs[0])


def chain(scope: Scope, context: Context) -> frozenset[int]:
    """The convolutions and poolings that nodes of the operator around them keep in the kernels' layout."""
    given = ports_of(scope)
    own = {
        index: Ports(node.input[0], node.output[0])
        for index, node in enumerate(scope.nodes)
        if not context.excluded(label(node)) and known_attributes(node) is not None and _may_be_taken(scope, index, context)
    }
    while own:
        last = channels_last(scope, {**given, **own}, context.options.limits, sums=False)
        away = {index for index, item in own.items() if not _stays(scope.nodes[index], item, last)}
        if not away:
            break
        own = {index: item for index, item in own.items() if index not in away}
    return frozenset(own)


def _stays(node: NodeProto, item: Ports, last: frozenset[str]) -> bool:
    """Condition (5)."""
    ends = (item.x in last, item.y in last)
    return any(ends) if is_op(node, "Conv") else all(ends)


def _may_be_taken(scope: Scope, index: int, context: Context) -> bool:
    """Return True if a node is a convolution or pooling that conditions (2) to (4) admit."""
    node = scope.nodes[index]
    if is_op(node, "Conv"):
        return (scope.path, node.output[0]) in context.originals and isinstance(_conv(scope, index, context), ConvLeaf)
    return is_op(node, "AveragePool") and isinstance(_pooling(scope, index, context), PoolPlan)


def _conv(scope: Scope, index: int, context: Context) -> ConvLeaf | Reject:
    """A convolution, or which of conditions (3) and (4) fails."""
    leaf = constant_leaf(scope, index, context)
    if isinstance(leaf, Reject):
        return leaf
    assert leaf.weight is not None
    kind = leaf.weight.data_type
    if kind not in KERNEL_TYPES:
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
    if len(attributes(node)["kernel_shape"]) != RANK:
        return reject(scope, index, "spatial axes", len(attributes(node)["kernel_shape"]), RANK)
    window = whole_windows(scope, index, RANK)
    if isinstance(window, Reject):
        return window
    if any(window.pads):
        return reject(scope, index, "pads", list(window.pads), "none")
    if (found := against_node(scope, POINT, context.main_opset, window)) is not None:
        return rejection(scope, index, found)
    channels = info.shape[1] if info.shape is not None and len(info.shape) == RANK + 2 else None
    if info.elem_type not in KERNEL_TYPES:
        return reject(scope, index, "type", TensorProto.DataType.Name(info.elem_type), "float16, bfloat16 or float32")
    if not _suits(channels, info.elem_type, limits):
        return reject(
            scope, index, "channels", channels, f"at most {limits.pool_channels}, a multiple of {chunk(info.elem_type)}"
        )
    assert isinstance(channels, int)
    return PoolPlan(scope, index, window, channels, info.elem_type)


def _suits(channels: object, elem_type: int, limits: Limits) -> bool:
    return isinstance(channels, int) and channels <= limits.pool_channels and channels % chunk(elem_type) == 0

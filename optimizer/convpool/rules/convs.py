# SPDX-License-Identifier: Apache-2.0
"""Convolutions as the rules see them, alone and as leaves of the tree in front of an average; the pooling distributes over its
joins.

`conv_leaf` reads a convolution's attributes, weights and sizes; `obstacles_of` tells what a model's opset, its nesting and the
plugin do not admit; `pads_upstream` finds the Pads in front, as onnxruntime moves and merges them.  It merges a Pad of zeros
into the pooling behind it, which then refuses pads that reach the kernel.  It takes out what does nothing between the two, and
moves a Pad through Transposes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from onnx import NodeProto, TensorProto, helper

from convpool.algebra import geometry
from convpool.algebra.geometry import ConvSpec, Ints, Layer, Obstacles, PoolSpec, Refusal, refuse
from convpool.algebra.parts import IDENTITY, Affine, fold
from convpool.ir.index import Constant, Scope
from convpool.ir.protos import FLOATS, AttributeReference, attributes, is_op, known_attributes
from convpool.ir.schema import POOL_DILATIONS_OPSET
from convpool.rules.base import Context, Reject, reject, rejection, spatial_size
from convpool.rules.linear import Step, op_of, order_of, pad_numbers, step_or_reject
from convpool.rules.sizes import OPEN, size_number, traced


@dataclass(frozen=True)
class Pooling:
    """An average over windows of the tensor `input`, written to `output` by the nodes `nodes`, `root` the last.

    spec, without pads, is None for a mean over all of the feature map; in a plan only if its size is unknown.
    squeeze: axes that vanish (ReduceMean, keepdims = 0); factor: what the average is multiplied by (ReduceSum); batch: whether
    it is also over the batch.
    Without an average (`image_conv`), `nodes` is empty, `root` the convolution and the window of `spec` one element.
    """

    root: int
    nodes: tuple[int, ...]
    input: str
    output: str
    kind: str
    spec: PoolSpec | None
    squeeze: Ints = ()
    factor: float = 1.0
    batch: bool = False


@dataclass(frozen=True)
class ConvLeaf:
    """A convolution whose output only the pooling reads, with what stood between already in it.  conv: attributes, with a zero
    Pad behind it added to the pads.  affine: to be folded into weights and bias. behind: nodes that move behind the pooling, in
    order.  size: spatial input size, None where any of it is unknown."""

    node: int
    input: str
    conv: ConvSpec
    weight: Constant | None
    bias: Constant | None
    weight_shape: Ints
    size: Ints | None
    affine: Affine = IDENTITY
    behind: tuple[Step, ...] = ()
    nodes: tuple[int, ...] = ()
    """The convolution and the nodes between it and the join or pooling, all of which go."""
    folded: tuple[Step, ...] = ()
    """The nodes whose effect is in `affine`."""
    passed_pads: tuple[int, ...] = ()
    """Pads in front of the convolution, which reads from before them: nearest first, and they may have other readers."""

    @property
    def layer(self) -> Layer:
        """The convolution as the algebra sees it."""
        return Layer(self.conv, self.weight_shape, self.size, self.weight is not None)


@dataclass(frozen=True)
class JoinTree:
    """Add, Sub, Sum, Mean or Concat of trees: the pooling distributes over it."""

    node: int
    children: tuple[Tree, ...]
    behind: tuple[Step, ...] = ()
    nodes: tuple[int, ...] = ()


Tree = ConvLeaf | JoinTree | str
"""A tensor by name is pooled as it is, since the pooling distributes over the join that reads it."""


def walk(tree: Tree) -> list[Tree]:
    """A tree and all trees in it, left to right."""
    return [tree, *(item for child in (tree.children if isinstance(tree, JoinTree) else ()) for item in walk(child))]


def conv_leaves(tree: Tree) -> list[ConvLeaf]:
    return [item for item in walk(tree) if isinstance(item, ConvLeaf)]


def opaque_leaves(tree: Tree) -> list[str]:
    return [item for item in walk(tree) if isinstance(item, str)]


def tree_nodes(tree: Tree) -> list[int]:
    """The nodes that go when the tree is rewritten."""
    return [node for item in walk(tree) if not isinstance(item, str) for node in item.nodes]


def is_known(scope: Scope, leaf: ConvLeaf) -> bool:
    """Return True if weights and bias are constants."""
    return leaf.weight is not None and (leaf.bias is not None or not any(scope.nodes[leaf.node].input[2:]))


def folded_weights(leaf: ConvLeaf) -> tuple[np.ndarray, np.ndarray | None]:
    """Weights [M, C/group, kernel...] and bias [M] or None with the affine map folded in, in the weights' type."""
    assert leaf.weight is not None
    if leaf.affine is IDENTITY:
        return leaf.weight.array(), None if leaf.bias is None else leaf.bias.array()
    dtype = helper.tensor_dtype_to_np_dtype(leaf.weight.data_type)
    weight, bias = exact_weights(leaf)
    return weight.astype(dtype), None if bias is None else bias.astype(dtype)


def exact_weights(leaf: ConvLeaf) -> tuple[np.ndarray, np.ndarray | None]:
    """`folded_weights` in float64."""
    assert leaf.weight is not None
    return fold(leaf.weight.array(), None if leaf.bias is None else leaf.bias.array(), leaf.affine)


MAX_BODIES = 1
"""Most bodies around a node of the operator.

onnxruntime, up to 1.32 at least, gives tensors of inlined functions one name in a body and in one inside that, and mixes them
up where an If is constant.
"""


def against_node(scope: Scope, conv: ConvSpec, main_opset: int, pool: PoolSpec | None = None) -> Refusal | None:
    """Why a convolution becomes no node of the operator; pool: the window behind it, where there is one of known size.  The
    operator's function has the main graph's opset, so that it cannot be called from a function of another."""
    if scope.depth > MAX_BODIES:
        return refuse("bodies around a ConvAvgPool", scope.depth, f"at most {MAX_BODIES}")
    if (found := geometry.without_kernel(conv, pool)) is not None:
        return found
    return None if scope.opset == main_opset else refuse("opset of the function", scope.opset, f"the model's, {main_opset}")


def obstacles_of(scope: Scope, conv: ConvSpec, context: Context, pool: PoolSpec | None) -> Obstacles:
    """Find what cannot be written for a convolution of this scope and its window."""
    options = context.options
    may_miscount = scope.opset >= POOL_DILATIONS_OPSET and "cpu" in options.devices and not options.for_torch
    no_dilations = None
    if scope.opset < POOL_DILATIONS_OPSET:
        expected = f"opset {POOL_DILATIONS_OPSET}, where AveragePool has dilations"
        no_dilations = refuse("dilated box mean", f"opset {scope.opset}", expected)
    return Obstacles(no_dilations, against_node(scope, conv, context.main_opset, pool), may_miscount)


RANK = 2
"""Spatial axes of an image, or plain convolution, that becomes a node of the operator."""
NO_POOLING = PoolSpec((1,) * RANK, (1,) * RANK, (0,) * (2 * RANK), (1,) * RANK)
"""A pooling of one element."""
POINT = ConvSpec(NO_POOLING.kernel_shape, NO_POOLING.strides, NO_POOLING.pads, NO_POOLING.dilations)
"""A convolution of one element."""
KERNEL_TYPES = (TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.FLOAT)
"""The types that the plugin's kernels have."""
MOVING = ("Expand", "Gather", "Identity", "MaxPool", "Pad", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze")
"""The operators that onnxruntime moves a DequantizeLinear past."""
NOMINAL_CHANNELS = 64
"""Stands for a channel count that is unknown, in cost comparisons only."""


def conv_rank(scope: Scope, index: int) -> int | Reject:
    """Number of spatial axes of a convolution, or a refusal: of more than 3, or where neither attributes nor weights tell."""
    node = scope.nodes[index]
    shape = scope.info(node.input[1]).shape
    rank = len(shape) - 2 if shape is not None else len((known_attributes(node) or {}).get("kernel_shape", ()))
    if rank > 3:
        return reject(scope, index, "spatial axes", rank, "at most 3")
    return rank if rank > 0 else reject(scope, index, "shape of the weights", "unknown", "a known rank")


def against_merged_weights(scope: Scope, name: str) -> Refusal | None:
    """Say why no one node with weights may stand for several that begin with the tensor `name`.  onnxruntime quantizes constant
    weights between a DequantizeLinear and a QuantizeLinear, wherever it can move these."""
    node: NodeProto | None = None
    step: str | None = name
    while step is not None and (index := scope.producer.get(step)) is not None:
        node = scope.nodes[index]
        step = node.input[0] if is_op(node, *MOVING) else _idle(scope, node)
    if step is not None or node is None or node.op_type != "DequantizeLinear":  # of com.microsoft too
        return None
    return refuse("weights that onnxruntime would quantize", "a DequantizeLinear in front", "none")


def channel_count(scope: Scope, name: str) -> int | None:
    """A tensor's channels, or those that weights take; None where they are unknown."""
    shape = scope.info(name).shape
    if shape is None or len(shape) < 2:
        return None
    number = size if isinstance(size := shape[1], int) else size_number(scope, traced(scope, name, 1), {})
    return number if number is not None and number < OPEN else None


def conv_leaf(scope: Scope, index: int, axes: int | None = None) -> ConvLeaf | Reject:
    """Attributes, weights and sizes of convolution `index`, or why they cannot be known.  axes: spatial ones; default its own."""
    node = scope.nodes[index]
    rank = conv_rank(scope, index) if axes is None else axes
    if isinstance(rank, Reject):
        return rank
    values, weight_shape = attributes(node), scope.info(node.input[1]).shape
    kernel = tuple(values.get("kernel_shape") or (weight_shape[2:] if weight_shape else ()))
    if len(kernel) != rank or not all(isinstance(dim, int) for dim in (*kernel, *(weight_shape or ())[2:])):
        return reject(scope, index, "shape of the weights", weight_shape, f"a static kernel with {rank} axes")
    if weight_shape is not None and 0 in weight_shape:
        return reject(scope, index, "shape of the weights", list(weight_shape), "at least one number")
    values["kernel_shape"] = kernel
    spec = geometry.windows(values, rank)
    if isinstance(spec, Refusal):
        return rejection(scope, index, spec)
    if weight_shape is not None and kernel != tuple(weight_shape[2:]):
        return reject(scope, index, "kernel_shape", list(kernel), f"{list(weight_shape[2:])}, as the weights have")
    if (kind := scope.info(node.input[1]).elem_type) and kind not in FLOATS:
        return reject(scope, index, "type of the weights", TensorProto.DataType.Name(kind), "floating point")
    channels = weight_shape[:2] if weight_shape is not None else (None, None)
    known = all(isinstance(dim, int) for dim in channels)
    m, c = (dim if isinstance(dim, int) else NOMINAL_CHANNELS for dim in channels)
    size = spatial_size(scope, node.input[0], rank)
    if size is not None and 0 in size:
        return reject(scope, index, "size of the map", list(size), "at least one element")
    auto_pad = values.get("auto_pad", b"NOTSET").decode(errors="replace")
    if auto_pad.startswith("SAME"):
        if size is None and max(spec.strides) > 1:
            return reject(scope, index, "auto_pad", f"{auto_pad} with strides on an unknown size", "explicit pads")
        spec = replace(spec, pads=geometry.same_pads(auto_pad, kernel, spec.strides, spec.dilations, size))
    conv = ConvSpec(kernel, spec.strides, spec.pads, spec.dilations, int(values.get("group", 1)))
    bias = node.input[2] if len(node.input) > 2 else ""
    shape = scope.info(bias).shape if known and bias else None
    if shape is not None and shape != (m,) and all(isinstance(dim, int) for dim in shape):
        return reject(scope, index, "shape of the bias", list(shape), [m])
    weights, added = scope.weights(node.input[1]), scope.constant(bias) if bias else None
    return ConvLeaf(index, node.input[0], conv, weights, added, (m, c, *kernel), size if known else None, nodes=(index,))


def macs(scope: Scope, index: int) -> int | None:
    """Multiply-adds of convolution `index` for one sample, None where its sizes are unknown."""
    try:
        leaf = conv_leaf(scope, index)
    except AttributeReference:
        return None
    if not isinstance(leaf, ConvLeaf) or leaf.size is None:
        return None
    return geometry.conv_cost(leaf.conv, leaf.weight_shape, leaf.size, 4).macs


def constant_leaf(scope: Scope, index: int, context: Context) -> ConvLeaf | Reject:
    """Do what `conv_leaf` does in 2-D, for constant weights that the operator supports."""
    rank = conv_rank(scope, index)
    if rank != RANK:
        return reject(scope, index, "spatial axes", "an unknown number" if isinstance(rank, Reject) else rank, RANK)
    leaf = conv_leaf(scope, index, rank)
    if isinstance(leaf, Reject):
        return leaf
    if (found := against_node(scope, leaf.conv, context.main_opset)) is not None:
        return rejection(scope, index, found)
    if leaf.weight is None:
        return reject(scope, index, "weights", geometry.COMPUTED, "a constant")
    return leaf


def with_pads_in_front(scope: Scope, leaf: ConvLeaf) -> ConvLeaf:
    """`leaf` with zero Pads in front of it merged into its own.  A Pad left in front of an AveragePool is merged into it by
    onnxruntime, which then refuses pads that reach the kernel.  It merges one into a pooling that is its only reader, even a
    MaxPool, which then finds no zeros: one that a pooling reads stays."""
    name, pads, passed = zero_pads(scope, leaf.input, leaf.conv.rank)
    if not passed or any(_pooled(scope, scope.nodes[index].output[0]) for index in passed):
        return leaf
    return replace(padded(leaf, pads), input=name, passed_pads=passed)


def padded(leaf: ConvLeaf, pads: Ints) -> ConvLeaf:
    """`leaf` with Pads in front in its own; `size` is that of what is read before them."""
    rank, total = leaf.conv.rank, tuple(own + more for own, more in zip(leaf.conv.pads, pads, strict=True))
    size = leaf.size and tuple(n - pads[i] - pads[rank + i] for i, n in enumerate(leaf.size))
    return replace(leaf, conv=replace(leaf.conv, pads=total), size=size)


def _pooled(scope: Scope, tensor: str) -> bool:
    """Return True if a pooling, or a body, reads the tensor, perhaps through idle nodes."""
    pending = [tensor]
    while pending:
        tensor = pending.pop()
        for node in (scope.nodes[index] for index in scope.readers.get(tensor, ())):
            if is_op(node, "MaxPool", "AveragePool"):
                return True
            if is_op(node, "Pad", "Transpose") or _idle(scope, node) == tensor:
                pending.append(node.output[0])
        if tensor in scope.captured:
            return True
    return False


def zero_pads(scope: Scope, name: str, rank: int) -> tuple[str, Ints, tuple[int, ...]]:
    """The tensor that `name` is by only Pads of zeros, their pads in all, and the nodes from it to `name`, nearest first."""
    total: Ints = (0,) * (2 * rank)
    nodes: tuple[int, ...] = ()
    found = name, total, nodes
    while (index := scope.made_by(name, "Identity", "Dropout", "Pad")) is not None:
        step = step_or_reject(scope, index, rank)
        if not isinstance(step, Step) or step.affine is None or min(step.pads or (0,)) < 0:
            break
        name, nodes = scope.nodes[index].input[0], (*nodes, index)
        if step.pads is not None and any(step.pads):
            total = tuple(a + b for a, b in zip(total, step.pads, strict=True))
            found = name, total, nodes
    return found


def pads_upstream(scope: Scope, tensor: str) -> Iterator[tuple[Scope, int | None, tuple[Ints | None, ...]]]:
    """Each Pad, by zeros as far as known, that stands in front of `tensor` once onnxruntime has taken out what does nothing.

    With its scope, and the orders of axes of the Transposes between, the nearest first; () is the reverse one, None an unknown
    one.  onnxruntime moves them to one that stands before the Pad; without one they stay.  None in the Pad's place where
    `tensor` may come from outside of a function.
    """
    name = tensor
    orders: tuple[Ints | None, ...] = ()
    while True:
        while scope.parent is not None and not scope.defines(name):
            scope = scope.parent
        index = scope.producer.get(name)
        if index is None:
            if scope.is_function:
                yield scope, None, orders
            return
        node = scope.nodes[index]
        if is_op(node, "Pad"):
            if _may_pad_zeros(scope, node) and (not orders or _transposed(scope, node.input[0])):
                yield scope, index, orders
            return
        if is_op(node, "Transpose"):
            perm = next((item for item in node.attribute if item.name == "perm"), None)
            order = () if perm is None else None if perm.ref_attr_name else tuple(perm.ints)
            orders = (*orders, order)
            name = node.input[0]
            continue
        step = _idle(scope, node)
        if step is None:
            return
        name = step


SEARCH_LIMIT = 24
"""Nodes that the search for a Transpose visits at most."""


def _transposed(scope: Scope, tensor: str) -> bool:
    """Return True if a Transpose may be in front, a caller's too, within SEARCH_LIMIT nodes."""
    pending = [(scope, tensor)]
    seen: set[tuple[str, int]] = set()
    while pending:
        where, name = pending.pop(0)
        while where.parent is not None and not where.defines(name):
            where = where.parent
        index = where.producer.get(name)
        if index is None:
            if where.is_function and name in where.inputs:
                return True
            continue
        if is_op(where.nodes[index], "Transpose") or len(seen) == SEARCH_LIMIT:
            return True
        if (where.path, index) not in seen:
            seen.add((where.path, index))
            pending += [(where, given) for given in where.nodes[index].input if given]
    return False


def moved_pads(scope: Scope, index: int, orders: tuple[Ints | None, ...], rank: int) -> Ints | None:
    """A Pad's pads, on spatial axes only, behind Transposes of these orders, nearest first; None where they are unknown."""
    try:
        numbers = pad_numbers(scope, index, rank)
    except AttributeReference:
        return None
    if isinstance(numbers, Reject) or any(order is None or order_of({"perm": order}, rank + 2) is None for order in orders):
        return None
    return geometry.transposed(numbers[0], [order for order in orders if order is not None], rank)


def _may_pad_zeros(scope: Scope, node: NodeProto) -> bool:
    values = {item.name: item for item in node.attribute}
    if "mode" in values and values["mode"].s not in (b"constant", b""):  # empty where it refers to a function's
        return False
    filling = node.input[2] if len(node.input) > 2 else ""
    constant = scope.constant(filling) if filling else None
    if constant is not None:
        return not constant.array().any()
    return bool(filling) or "value" not in values or values["value"].f == 0


def _idle(scope: Scope, node: NodeProto) -> str | None:
    """The tensor that a node may hand on as it is; None where it does something."""
    op = op_of(node)
    if is_op(node, "Expand") or op is not None and op.idle:
        return node.input[0]
    if is_op(node, "Cast"):
        known = scope.info(node.input[0]).elem_type
        return None if known and known != next(item.i for item in node.attribute if item.name == "to") else node.input[0]
    if op is not None and op.neutral is not None:
        for data, other in ((0, 1), (1, 0)) if op.commutes else ((0, 1),):
            constant = scope.constant(node.input[other])
            if constant is not None and (constant.array() == op.neutral).all():
                return node.input[data]
    return None

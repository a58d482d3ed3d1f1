"""From a pooling's input back to the convolutions: through linear nodes, and through Add, Sub, Sum and Concat.

    conv - linear... -+
                      Add - linear... - pooling      ->     Add of two pooled convolutions
    conv - linear... -+

A tensor on the way may have no other reader, since its value at full resolution is gone afterwards.  Below a join a
branch that does not qualify is pooled as it is, if it provably has the spatial size of the others (broadcasting over
space does not commute with pooling; Concat broadcasts nothing).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from onnx import NodeProto

from convpool.algebra.affine import IDENTITY
from convpool.algebra.geometry import ConvSpec, Ints, PoolSpec
from convpool.algebra.pads import pad_behind, same_pads, transposed
from convpool.algebra.refusal import Refusal
from convpool.ir.index import Scope
from convpool.ir.protos import AttributeReference, attributes, is_op
from convpool.ir.schema import is_operator
from convpool.passes.linear import BINARY, Step, linear_step, pad_numbers
from convpool.plan import ConvLeaf, JoinTree, Moved, OpaqueLeaf, Reject, Tree, conv_leaves, malformed, reject, rejection

JOINS = ("Add", "Sub", "Sum", "Concat")
ELEMENTWISE = (
    "Abs",
    "BatchNormalization",
    "Cast",
    "Celu",
    "Clip",
    "DequantizeLinear",
    "Dropout",
    "Elu",
    "Erf",
    "Exp",
    "Gelu",
    "GroupNormalization",
    "HardSigmoid",
    "HardSwish",
    "Identity",
    "InstanceNormalization",
    "LeakyRelu",
    "Mish",
    "Neg",
    "PRelu",
    "Pad",
    "QuantizeLinear",
    "Relu",
    "Selu",
    "Sigmoid",
    "Softplus",
    "Softsign",
    "Sqrt",
    "Swish",
    "Tanh",
    "ThresholdedRelu",
)
"""Operators that a report looks through to find the convolution that an inexact site starts from."""
NOMINAL_CHANNELS = 64
"""Stands for a channel count that is unknown, in cost comparisons only."""
NEUTRAL = {"Add": 0, "Sub": 0, "Mul": 1, "Div": 1}
"""The operand with which each does nothing."""
SEARCH_LIMIT = 24
"""Nodes that the search for that convolution visits at most: candidates are local."""
DEPTH_LIMIT = 100
"""Nodes on a way from the pooling that are looked at: below a join, what lies further back is pooled as it is."""


def conv_upstream(scope: Scope, tensor: str) -> int | None:
    """The nearest convolution that `tensor` is computed from by elementwise nodes and joins, exact or not."""
    pending: list[str] = [tensor]
    seen: set[int] = set()
    while pending and len(seen) < SEARCH_LIMIT:
        index = scope.producer.get(pending.pop(0))
        if index is None or index in seen:
            continue
        seen.add(index)
        node = scope.nodes[index]
        if is_op(node, "Conv"):
            return index
        if is_op(node, *ELEMENTWISE):
            pending.append(node.input[0])
        elif is_op(node, *JOINS, *BINARY):
            pending.extend(node.input)
    return None


def conv_rank(scope: Scope, index: int) -> int | None:
    """Number of spatial axes of a convolution, None where neither its attributes nor its weights tell."""
    node = scope.nodes[index]
    shape = scope.info(node.input[1]).shape
    if shape is not None:
        return len(shape) - 2
    try:
        kernel = attributes(node).get("kernel_shape")
    except AttributeReference:
        return None
    return len(kernel) if kernel else None


def spatial_size(scope: Scope, tensor: str, rank: int) -> Ints | None:
    """Static spatial sizes of a tensor, None where any is unknown."""
    shape = scope.info(tensor).shape
    if shape is None or len(shape) != rank + 2:
        return None
    size = tuple(dim for dim in shape[2:] if isinstance(dim, int))
    return size if len(size) == rank else None


def channel_count(scope: Scope, name: str) -> int | None:
    """A tensor's channels, or those that weights take; None where they are unknown."""
    shape = scope.info(name).shape
    return shape[1] if shape is not None and len(shape) > 1 and isinstance(shape[1], int) else None


def conv_leaf(scope: Scope, index: int, rank: int) -> ConvLeaf | Reject:
    """Attributes, weights and sizes of convolution `index`, or why they cannot be known."""
    node = scope.nodes[index]
    values = attributes(node)
    weight_shape = scope.info(node.input[1]).shape
    kernel = tuple(values.get("kernel_shape") or (weight_shape[2:] if weight_shape else ()))
    if len(kernel) != rank or not all(isinstance(dim, int) for dim in kernel):
        return reject(scope, index, "shape of the weights", weight_shape, f"a static kernel with {rank} axes")
    if (wrong := malformed(scope, index, {**values, "kernel_shape": kernel}, rank)) is not None:
        return wrong
    if weight_shape is not None and kernel != tuple(weight_shape[2:]):
        return reject(scope, index, "kernel_shape", list(kernel), f"{list(weight_shape[2:])}, as the weights have")
    channels = weight_shape[:2] if weight_shape is not None else (None, None)
    known = all(isinstance(dim, int) for dim in channels)
    m, c = (dim if isinstance(dim, int) else NOMINAL_CHANNELS for dim in channels)
    strides = tuple(values.get("strides") or (1,) * rank)
    dilations = tuple(values.get("dilations") or (1,) * rank)
    size = spatial_size(scope, node.input[0], rank)
    auto_pad = values.get("auto_pad", b"NOTSET").decode()
    pads = tuple(values.get("pads") or (0,) * (2 * rank)) if auto_pad == "NOTSET" else (0,) * (2 * rank)
    if auto_pad.startswith("SAME"):
        if size is None and any(s > 1 for s in strides):
            return reject(scope, index, "auto_pad", f"{auto_pad} with strides on an unknown size", "explicit pads")
        pads = same_pads(auto_pad, kernel, strides, dilations, size)
    conv = ConvSpec(kernel, strides, pads, dilations, int(values.get("group", 1)))
    bias = node.input[2] if len(node.input) > 2 else ""
    return ConvLeaf(
        index,
        node.input[0],
        conv,
        scope.weights(node.input[1]),
        scope.constant(bias) if bias else None,
        (m, c, *kernel),
        size if known else None,
        nodes=(index,),
    )


def trace(scope: Scope, tensor: str, rank: int, inside: frozenset[int] = frozenset(), depth: int = 0) -> Tree | Reject:
    """The tree of convolutions behind `tensor` as a Tree, or a Reject.

    inside: nodes of the average itself, which may read `tensor` any number of times; depth: nodes from the average.
    """
    index = scope.producer.get(tensor)
    if index is None:
        return Reject(f"tensor '{tensor}'", "producer", "an input or constant", "a convolution")
    node = scope.nodes[index]
    others = scope.sole_reader(tensor)
    if inside and set(scope.readers.get(tensor, ())) <= inside and tensor not in (scope.outputs | scope.captured):
        others = None
    if others is not None:
        return reject(scope, index, f"output '{tensor}' {others}", "other readers", "the pooling alone")
    if is_op(node, "Conv"):
        leaf = conv_leaf(scope, index, rank)
        return leaf if isinstance(leaf, Reject) else with_pads_in_front(scope, leaf)
    if depth == DEPTH_LIMIT:
        return reject(scope, index, "nodes between convolution and pooling", f"over {DEPTH_LIMIT}", "fewer")
    step = linear_step(scope, index, rank)
    if isinstance(step, Reject):
        return step
    if step is not None:
        tree = trace(scope, node.input[step.operand], rank, depth=depth + 1)
        return tree if isinstance(tree, Reject) else _absorb(scope, tree, step)
    if is_op(node, *JOINS):
        return _join(scope, index, rank, depth)
    return reject(scope, index, "between convolution and pooling", node.op_type, "linear operators only")


def with_pads_in_front(scope: Scope, leaf: ConvLeaf) -> ConvLeaf:
    """`leaf` with zero Pads in front of it taken into its own.

    A Pad left in front of an AveragePool is merged into it by onnxruntime, which then refuses pads that reach the kernel.  It
    merges one into a pooling that is its only reader, even a MaxPool, which then finds no zeros: one that a pooling reads stays.
    """
    name, pads, passed = zero_pads(scope, leaf.input, leaf.conv.rank)
    if not passed or any(_pooled(scope, scope.nodes[index].output[0]) for index in passed):
        return leaf
    rank, total = leaf.conv.rank, tuple(own + more for own, more in zip(leaf.conv.pads, pads, strict=True))
    size = leaf.size and tuple(n - pads[i] - pads[rank + i] for i, n in enumerate(leaf.size))
    return replace(leaf, input=name, conv=replace(leaf.conv, pads=total), size=size, passed=passed)


def _pooled(scope: Scope, tensor: str) -> bool:
    """Whether a pooling reads the tensor, if only through what does nothing, or a body that may have one."""
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
    """The tensor that `name` is by Pads of zeros alone, their pads in all, and the nodes from it to `name`, nearest first."""
    found, total, nodes = (name, (0,) * (2 * rank), ()), (0,) * (2 * rank), ()
    while (index := scope.producer.get(name)) is not None and is_op(scope.nodes[index], "Identity", "Dropout", "Pad"):
        try:
            step = linear_step(scope, index, rank)
        except AttributeReference:
            break
        if not isinstance(step, Step) or min(step.pads or (0,)) < 0:
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
    name, orders = tensor, ()
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


def _transposed(scope: Scope, tensor: str) -> bool:
    """Whether the tensor is computed, over SEARCH_LIMIT nodes at most, from what a Transpose gives, or what a caller may."""
    pending, seen = [(scope, tensor)], set()
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
    """A Pad's pads, on spatial axes alone, behind Transposes of these orders, nearest first; None where they are unknown."""
    try:
        numbers = pad_numbers(scope, index, rank)
    except AttributeReference:
        return None
    if isinstance(numbers, Reject) or None in orders:
        return None
    return transposed(numbers[0], [order for order in orders if order is not None], rank)


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
    if is_op(node, "Identity", "Dropout", "Expand"):
        return node.input[0]
    if is_op(node, "Cast"):
        known = scope.info(node.input[0]).elem_type
        return None if known and known != next(item.i for item in node.attribute if item.name == "to") else node.input[0]
    if is_op(node, *NEUTRAL):
        for data, other in ((0, 1), (1, 0)) if node.op_type in ("Add", "Mul") else ((0, 1),):
            constant = scope.constant(node.input[other])
            if constant is not None and (constant.array() == NEUTRAL[node.op_type]).all():
                return node.input[data]
    return None


def _absorb(scope: Scope, tree: Tree, step: Step) -> Tree | Reject:
    """`tree` with one more linear node behind it."""
    if isinstance(tree, OpaqueLeaf):
        raise AssertionError("trace returns opaque leaves only below joins")
    nodes = (*tree.nodes, step.node)
    if step.pads is not None and any(step.pads):
        if isinstance(tree, JoinTree) or tree.behind:
            return reject(scope, step.node, "Pad behind nodes that move", list(step.pads), "Pad next to a convolution")
        conv_node = scope.nodes[tree.node]
        has_bias = len(conv_node.input) > 2 and bool(conv_node.input[2])
        conv = pad_behind(tree.conv, step.pads, has_bias or bool(tree.affine.shift.any()))
        return rejection(scope, step.node, conv) if isinstance(conv, Refusal) else replace(tree, conv=conv, nodes=nodes)
    if step.affine is IDENTITY:
        return replace(tree, nodes=nodes)
    if isinstance(tree, ConvLeaf) and not tree.behind and _foldable(scope, tree, step):
        moved = Moved(step.node, step.operand)
        assert step.affine is not None
        return replace(tree, affine=step.affine.after(tree.affine), folded=(*tree.folded, moved), nodes=nodes)
    return replace(tree, behind=(*tree.behind, Moved(step.node, step.operand)), nodes=nodes)


def _foldable(scope: Scope, leaf: ConvLeaf, step: Step) -> bool:
    conv = scope.nodes[leaf.node]
    constant_bias = leaf.bias is not None or len(conv.input) < 3 or not conv.input[2]
    if step.affine is None or leaf.weight is None or not constant_bias:
        return False
    return step.affine.fits(leaf.weight_shape[0])


def _join(scope: Scope, index: int, rank: int, depth: int) -> JoinTree | Reject:
    node = scope.nodes[index]
    if is_op(node, "Concat"):
        axis = attributes(node).get("axis", 1) % (rank + 2)
        if axis > 1:
            return reject(scope, index, "axis of Concat", axis, "batch or channels")
    elif not _same_size(scope, list(node.input), rank):
        return reject(scope, index, "spatial sizes of the operands", "not provably equal", "equal sizes")
    children, failures = [], []
    for name in node.input:
        child = trace(scope, name, rank, depth=depth + 1)
        if isinstance(child, Reject):
            failures.append(child)
            child = OpaqueLeaf(name)
        children.append(child)
    tree = JoinTree(index, tuple(children), nodes=(index,))
    return tree if conv_leaves(tree) else failures[0]


def _same_size(scope: Scope, names: list[str], rank: int) -> bool:
    """Whether the tensors provably have equal spatial sizes: by their shapes, or by how they came about.

    One of another rank is broadcast, and cannot be pooled as it is.
    """
    shapes = [scope.info(name).shape for name in names]
    if any(s is not None and len(s) != rank + 2 for s in shapes):
        return False
    if all(s is not None and None not in s[2:] for s in shapes):
        if len({s[2:] for s in shapes if s is not None}) == 1:
            return True
    return len({spatial_origin(scope, name, rank) for name in names}) == 1


def spatial_origin(scope: Scope, name: str, rank: int) -> tuple:
    """A tensor and how sizes followed from its: equal origins have equal spatial sizes.

    Windows of extent E and stride S give floor((n - E) / S) + 1 positions; behind one another they are one such window.
    """
    extents, strides = [1] * rank, [1] * rank
    while (index := scope.producer.get(name)) is not None:
        node = scope.nodes[index]
        windows = _windows(scope, index, rank)
        if windows is not None:
            for window in reversed(windows):
                for i, (e, s) in enumerate(window):
                    extents[i], strides[i] = e - s + s * extents[i], s * strides[i]
            name = node.input[0]
        elif is_op(node, *BINARY) and (step := linear_step(scope, index, rank)) and isinstance(step, Step):
            name = node.input[step.operand]
        elif is_op(node, *ELEMENTWISE) and not is_op(node, "Pad", "PRelu"):
            name = node.input[0]
        else:
            break
    return (name, *extents, *strides)


def _windows(scope: Scope, index: int, rank: int) -> list[list[tuple[int, int]]] | None:
    """What a node does to sizes: per window, in order, extent less padding and stride of each axis; None if unknown."""
    node = scope.nodes[index]
    try:
        if is_op(node, "Conv"):
            leaf = conv_leaf(scope, index, rank)
            return None if isinstance(leaf, Reject) else [_window(leaf.conv)]
        values = attributes(node)
    except AttributeReference:
        return None
    names = ("kernel_shape", "strides", "pads", "dilations")
    if is_operator(node):
        pool = PoolSpec(**{key: tuple(values[f"pool_{key}"]) for key in names})
        return [_window(pool), _window(ConvSpec(**{key: tuple(values[key]) for key in names}))]
    if is_op(node, "AveragePool") and not values.get("ceil_mode", 0) and values.get("auto_pad", b"NOTSET") == b"NOTSET":
        defaults = ((), (1,) * rank, (0,) * (2 * rank), (1,) * rank)
        if malformed(scope, index, values, rank) is not None:
            return None
        given = {key: tuple(values.get(key) or default) for key, default in zip(names, defaults, strict=True)}
        return [_window(PoolSpec(**given))]
    return None


def _window(spec: ConvSpec | PoolSpec) -> list[tuple[int, int]]:
    r = spec.rank
    return [
        (spec.dilations[i] * (spec.kernel_shape[i] - 1) + 1 - spec.pads[i] - spec.pads[r + i], spec.strides[i]) for i in range(r)
    ]

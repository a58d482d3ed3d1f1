# SPDX-License-Identifier: Apache-2.0
"""A graph of torch.fx as an ONNX model for the rules: its nodes, types and shapes, without its numbers.

Parameters become inputs of the model, so that no rule takes them for constants: the rewritten module reads them at every call.
PyTorch's functions and methods become operators of ONNX: one translation for each kind, then the table of all.  What has no such
operator becomes a node of the domain `DOMAIN`, of which the rules know only what it reads and gives.

A translation gives a node.  It raises Unknown, or OptionError for sizes that are no numbers, where ONNX has no operator for these
arguments.  It may pin the node: then the rules see it, and leave it as it is.
"""

import inspect
import itertools
import operator
import re
import types
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import onnx
import torch
import torch.nn.functional as F
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from convpool.algebra.geometry import Refusal, refuse
from convpool.errors import OptionError
from convpool.rules.resampling.emit import DOMAIN_OF_TORCH as DOMAIN
from convpool.torch.changes import TRANSFORM, Context, contexts_of, is_of_module, is_plain, value_of
from convpool.torch.plain import HALF_TYPES, conv_pads, sizes

Dim: TypeAlias = int | str | None
OPSET = 22
"""The first whose Conv and AveragePool take bfloat16."""
IR_VERSION = 10
BATCH = 55440 * 13
"""The size that stands for an open batch: no other is likely to be that, and it has many divisors."""
RESULT = "what forward gives"
"""The name of the node and of the tensor behind all that the graph gives; no variable of forward has it."""
ELEM_TYPES = {
    torch.float16: TensorProto.FLOAT16,
    torch.bfloat16: TensorProto.BFLOAT16,
    torch.float32: TensorProto.FLOAT,
    torch.float64: TensorProto.DOUBLE,
    torch.int8: TensorProto.INT8,
    torch.uint8: TensorProto.UINT8,
    torch.int32: TensorProto.INT32,
    torch.int64: TensorProto.INT64,
    torch.bool: TensorProto.BOOL,
}
"""The types that the rules may see; a tensor of any other has none."""
_AVERAGES = frozenset(("AveragePool", "GlobalAveragePool", "ReduceMean", "ReduceSum"))


class Skeleton:
    """The model in the making.  A translation asks it for the names of its inputs, and hands it the nodes."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.labels: dict[str, fx.Node] = {}
        """The node of the graph that a name of the model's nodes stands for."""
        self.pinned: dict[str, Refusal] = {}
        self.contexts: dict[fx.Node, Context] = contexts_of(graph)
        self.protos: dict[str, NodeProto] = {}
        """The model's nodes by their names: those of `labels`, and of `crossings`."""
        self.crossings: dict[str, str] = {}
        """Tensors as they are read in another context than the one they are made in: their names, and those of the tensors."""
        self._casts = any("autocast" in text for context in set(self.contexts.values()) for text in context)
        self._batches: dict[Any, Any] = {}
        for node in graph.find_nodes(op="placeholder"):
            value = value_of(node)
            first = value.shape[0] if isinstance(value, Tensor) and value.dim() and not is_of_module(node) else 0
            if isinstance(first, torch.SymInt) and first.node.expr.is_symbol:
                self._batches.setdefault(first.node.expr, BATCH + len(self._batches) * BATCH)
        self._constants: list[TensorProto] = []
        self._inputs: list[onnx.ValueInfoProto] = []
        self._infos: dict[str, onnx.ValueInfoProto] = {}
        self._counts: Counter[str] = Counter()

    # ---- what translations ask ----

    def dtype(self, node: Any) -> Any:
        """The type of a node's tensor; None where it is none.

        Of what autocast makes the rules see the type that it was made of: in ONNX no operator changes it."""
        value = value_of(node)
        if not isinstance(value, Tensor):
            return None
        casts = self._casts or value.device.type != "meta" and torch.is_autocast_enabled(value.device.type)
        return torch.float32 if casts and value.dtype in HALF_TYPES else value.dtype

    def _size(self, n: Any, axis: int) -> Dim:
        """A size.  An open batch is a number as the first: behind it a rule would take it for the size of a window."""
        if type(n) is int:
            return n
        expression, numbers = n.node.expr, {} if axis else self._batches
        return int(expression.subs(numbers)) if expression.free_symbols <= numbers.keys() else str(n)

    def shape(self, node: Any) -> tuple[Dim, ...] | None:
        """The shape of a node's tensor, with names for open sizes; None where it is none."""
        value = value_of(node)
        return tuple(map(self._size, value.shape, itertools.count())) if isinstance(value, Tensor) else None

    def turns_batch(self, node: fx.Node) -> bool:
        """Return True if the open batch in front of an input is another size of the result, which onnx would count."""
        y, shape = value_of(node), self.shape(node) or ()
        behind = [n.node.expr.free_symbols & self._batches.keys() for n in y.shape[1:] if type(n) is not int] if shape else []
        found = [(self.shape(item), value_of(item)) for item in node.all_input_nodes] if any(behind) else []
        opened = [given for given, x in found if given and type(x.shape[0]) is not int]
        return any((given[0], len(given)) != (shape[0], len(shape)) for given in opened)

    def number(self, array: Any, dtype: Any = np.int64) -> str:
        """The name of a constant."""
        name = f"constant {len(self._constants)}"
        self._constants.append(numpy_helper.from_array(np.asarray(array, dtype), name))
        return name

    def scalar(self, value: float, like: fx.Node) -> str:
        """A number as a constant of the type of a node's tensor."""
        return self.number(value, helper.tensor_dtype_to_np_dtype(ELEM_TYPES.get(self.dtype(like), TensorProto.FLOAT)))

    def pin(self, label: str, why: Refusal | None) -> None:
        """Let a node stay as it is, for a reason."""
        if why is not None:
            self.pinned.setdefault(label, why)

    # ---- what the driver tells ----

    def label(self, node: fx.Node) -> str:
        """A name for a node as a reader of the module knows it: the path of the layer, or its place and the function's name."""
        place, cls = _place(node)
        own = (getattr(node.target, "__name__", None) or str(node.target)).strip("_")
        layers = [
            base.__name__.lower() for base in getattr(cls, "__mro__", ()) if base.__module__.startswith("torch.nn.modules.")
        ]
        leaf = any(own.replace("_", "") in name for name in layers)  # the whole forward of a layer
        wanted = place if leaf and place else f"{place}.{own}".lstrip(".")
        while True:
            self._counts[wanted] += 1
            label = wanted if self._counts[wanted] == 1 else f"{wanted} {self._counts[wanted]}"
            if label not in self.labels:
                self.labels[label] = node
                return label

    def add_input(self, node: fx.Node) -> None:
        """A node of the graph that computes nothing."""
        self._inputs.append(self._info(node.name, node))

    def add(self, node: fx.Node, label: str, proto: NodeProto | None) -> None:
        """Take what stands for a node.  proto: None for one of which the rules know nothing."""
        if proto is None:
            kind = re.sub(r"\W", "_", getattr(node.target, "__name__", None) or str(node.target))
            proto = one(kind, node, *node.all_input_nodes, domain=DOMAIN)
        for other in node.all_input_nodes:
            if self.contexts[other] != self.contexts[node] and other.op not in ("placeholder", "get_attr"):
                self._cross(other, node, proto)
        x, y = (value_of(item) for item in ([*node.all_input_nodes, None][0], node))
        if proto.op_type in _AVERAGES and isinstance(x, Tensor) and x.dtype != y.dtype:  # autocast's on a CPU
            self.pin(label, refuse("type of the averages", y.dtype, x.dtype))
        if TRANSFORM in self.contexts[node]:
            self.pin(label, refuse("transform of torch.func in forward", "one", "none"))
        others = [item for item in (y, *map(value_of, node.all_input_nodes)) if isinstance(item, Tensor) and not is_plain(item)]
        if others:
            self.pin(label, refuse("class of tensors", type(others[0]).__name__, "Tensor"))
        proto.name = label
        self.protos[label] = proto
        if self.dtype(node) in ELEM_TYPES:
            self._infos[node.name] = self._info(node.name, node)

    def _cross(self, made: fx.Node, read: fx.Node, proto: NodeProto) -> None:
        """Let a node read another one's tensor through an Identity, which stays: no rule moves anything across contexts."""
        name = f"{made.name} of {read.name}"
        self.crossings[name] = made.name
        self.protos[name] = helper.make_node("Identity", [made.name], [name], name)
        if made.name in self._infos:
            self._infos[name] = self._info(name, made)
        why = [", ".join(sorted(set(self.contexts[a]) - set(self.contexts[b]))) for a, b in ((made, read), (read, made))]
        self.pin(name, refuse("context in forward", why[0] or "none", why[1] or "none"))
        proto.input[:] = [name if item == made.name else item for item in proto.input]

    def _info(self, name: str, node: fx.Node) -> onnx.ValueInfoProto:
        """A name with the type and shape of a node's tensor; a number where it is none."""
        dtype = self.dtype(node)
        elem_type = TensorProto.INT64 if dtype is None else ELEM_TYPES.get(dtype, TensorProto.FLOAT)
        return helper.make_tensor_value_info(name, elem_type, self.shape(node) or ())

    def model(self, results: Sequence[fx.Node]) -> ModelProto:
        """The model.  results: nodes that the graph gives."""
        end = helper.make_node("Result", [node.name for node in results], [RESULT], name=RESULT, domain=DOMAIN)
        outputs = [helper.make_tensor_value_info(RESULT, TensorProto.FLOAT, ())]
        computed = {name for proto in self.protos.values() for name in proto.output}
        outputs += [self._infos.pop(node.name) for node in dict.fromkeys(results) if node.name in self._infos.keys() & computed]
        graph = helper.make_graph(
            [*self.protos.values(), end], "module", self._inputs, outputs, self._constants, value_info=[*self._infos.values()]
        )
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION)


def _place(node: fx.Node) -> tuple[str, type | None]:
    """The path and the class of the module around a node: TorchDynamo's L['self']._modules['a'].b as a.b."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    if not stack:
        return "", None
    path = re.sub(r"^L\['\w+'\]", "", str(stack[-1][0]))
    return ".".join(part for part in re.split(r"\._modules|[.\[\]'\"]+", path) if part), stack[-1][1]


# ---- translations ----

Arguments = dict[str, Any]


class Unknown(Exception):
    """ONNX has no operator for a call with these arguments."""


def need(condition: Any) -> None:
    """Raise Unknown unless the condition holds."""
    if not condition:
        raise Unknown


def shape_of(s: Skeleton, value: Any) -> tuple[Dim, ...]:
    """The shape of a node's tensor; Unknown where it is none."""
    shape = s.shape(value)
    need(shape is not None)
    return shape or ()


def one(op_type: str, node: fx.Node, *inputs: Any, **values: Any) -> NodeProto:
    """One operator that gives a node's result.  inputs: nodes of the graph, or names."""
    names = [item.name if isinstance(item, fx.Node) else item for item in inputs]
    return helper.make_node(op_type, names, [node.name], **values)


def conv(rank: int, s: Skeleton, label: str, node: fx.Node, a: Arguments) -> NodeProto:
    """A Conv of `rank` spatial axes."""
    shape, (strides, dilations) = shape_of(s, a["weight"]), (sizes(name, a[name], rank, 1) for name in ("stride", "dilation"))
    kernel = tuple(n for n in shape[2:] if isinstance(n, int))
    need(len(shape) == rank + 2 == len(kernel) + 2 and type(a["groups"]) is int)
    pads = conv_pads(a["padding"], kernel, strides, dilations)
    given = s.shape(a["input"])
    if given is not None and len(given) != rank + 2:
        s.pin(label, refuse("dimensions of the input", len(given), f"{rank + 2}, with a batch"))
    bias = [a["bias"]] if isinstance(a["bias"], fx.Node) else []
    values: dict[str, Any] = dict(kernel_shape=kernel, strides=strides, pads=pads, dilations=dilations, group=a["groups"])
    return one("Conv", node, a["input"], a["weight"], *bias, **values)


def average(rank: int, s: Skeleton, label: str, node: fx.Node, a: Arguments) -> NodeProto:
    """AvgPool1d, AvgPool2d or AvgPool3d."""
    kernel, shape = sizes("kernel_size", a["kernel_size"], rank, 1), s.shape(a["input"])
    strides = kernel if a["stride"] in (None, [], ()) else sizes("stride", a["stride"], rank, 1)
    pads = sizes("padding", a["padding"], rank, 0) * 2
    need(shape is None or len(shape) == rank + 2)
    if a.get("divisor_override"):
        s.pin(label, refuse("divisor_override", a["divisor_override"], "none"))
    values = {name: int(a[name]) for name in ("ceil_mode", "count_include_pad")}
    return one("AveragePool", node, a["input"], kernel_shape=kernel, strides=strides, pads=pads, **values)


def adaptive_average(rank: int, s: Skeleton, label: str, node: fx.Node, a: Arguments) -> NodeProto:
    """AdaptiveAvgPool1d, 2d or 3d: windows where the sizes are multiples."""
    given, shape = a["output_size"], s.shape(a["input"])
    wanted = tuple(given) if isinstance(given, (tuple, list)) else (given,) * rank
    need(shape is None or len(shape) == rank + 2)
    if all(n == 1 for n in wanted):
        return one("GlobalAveragePool", node, a["input"])
    kernel = []
    for size, n in zip(shape_of(s, a["input"])[2:], wanted, strict=True):
        n = size if n is None else n
        need(isinstance(size, int) and isinstance(n, int) and n > 0 and size % n == 0)
        kernel.append(size // n)  # type: ignore[operator]
    return one("AveragePool", node, a["input"], kernel_shape=kernel, strides=kernel)


def unary(op_type: str, s: Skeleton, label: str, node: fx.Node, a: Arguments) -> NodeProto:
    """An operator of one tensor, of which the rules need not know more: a node that moves keeps its arguments."""
    need(node.all_input_nodes == [a["input"]])
    return one(op_type, node, a["input"])


def dropout(s: Skeleton, label: str, node: fx.Node, a: Arguments) -> NodeProto:
    """Dropout of single numbers or of channels."""
    need(isinstance(a["p"], (int, float)) and isinstance(a["training"], bool))
    return one("Dropout", node, a["input"], s.number(a["p"], "float32"), s.number(a["training"] and a["p"] > 0, "bool"))


def batch_norm(s: Skeleton, label: str, node: fx.Node, a: Arguments) -> NodeProto:
    given = [a[name] for name in ("weight", "bias", "running_mean", "running_var")]
    need(all(isinstance(value, fx.Node) for value in given) and isinstance(a["training"], bool))
    values: dict[str, Any] = dict(epsilon=float(a["eps"]), training_mode=int(a["training"]))
    return one("BatchNormalization", node, a["input"], *given, **values)


def binary(op_type: str, s: Skeleton, label: str, node: fx.Node, a: Arguments) -> NodeProto:
    need(a["alpha"] == 1 and a["rounding_mode"] is None and a["out"] is None)
    given = [a["input"], a["other"]]
    tensors = [value for value in given if isinstance(value, fx.Node)]
    types = {s.dtype(value) for value in tensors}
    # Not of numbers alone, or tuples that are joined.
    need(len(types) == 1 and all(dtype is not None and dtype.is_floating_point for dtype in types))
    need(all(isinstance(v, fx.Node) or isinstance(v, (int, float)) and not isinstance(v, bool) for v in given))
    return one(op_type, node, *(v if isinstance(v, fx.Node) else s.scalar(v, tensors[0]) for v in given))


def concat(s: Skeleton, label: str, node: fx.Node, a: Arguments) -> NodeProto:
    tensors, axis = a["tensors"], a["dim"]
    need(isinstance(tensors, (tuple, list)) and all(isinstance(t, fx.Node) for t in tensors) and type(axis) is int)
    return one("Concat", node, *tensors, axis=axis)


def pad(s: Skeleton, label: str, node: fx.Node, a: Arguments) -> NodeProto:
    pads, shape = a["pad"], s.shape(a["input"])
    need(isinstance(pads, (tuple, list)) and all(type(n) is int for n in pads) and a["mode"] in ("constant", "reflect"))
    need(shape is not None or not any(pads))
    axes = s.number([len(shape or ()) - 1 - i for i in range(len(pads) // 2)])
    sides = s.number([*pads[::2], *pads[1::2]])
    return one("Pad", node, a["input"], sides, s.scalar(a["value"] or 0.0, a["input"]), axes, mode=a["mode"])


def interpolate(s: Skeleton, label: str, node: fx.Node, a: Arguments) -> NodeProto:
    before, after = shape_of(s, a["input"]), shape_of(s, node)
    need(len(before) > 2)
    pairs: list[Any] = list(zip(before[2:], after[2:], strict=True))
    nearest = a["mode"] in ("nearest", "nearest-exact")
    need(nearest or a["mode"] in ("bilinear", "linear", "trilinear"))
    need(all(isinstance(n, int) and n for pair in pairs for n in pair))
    if a["size"] is None and not a["recompute_scale_factor"]:  # the scale itself sets where values are taken
        given = a["scale_factor"]
        wanted = given if isinstance(given, (tuple, list)) else (given,) * len(pairs)
        need(all(m == n * factor for (n, m), factor in zip(pairs, wanted, strict=True)))
    if nearest:  # of whole factors, where all kinds of it are the same
        need(not any(m % n for n, m in pairs))
        values = dict[str, Any](mode="nearest", coordinate_transformation_mode="asymmetric", nearest_mode="floor")
    else:
        coordinates = "align_corners" if a["align_corners"] else "half_pixel"
        values = dict(mode="linear", coordinate_transformation_mode=coordinates, antialias=int(a["antialias"]))
    return one("Resize", node, a["input"], "", s.number([1, 1, *(m / n for n, m in pairs)], "float32"), **values)


def same(s: Skeleton, label: str, node: fx.Node, a: Arguments) -> NodeProto:
    """A call that changes no number, but the type of floats or the order in memory, which `Rebuilding` gives the result."""
    x, y, others = value_of(a["input"]), value_of(node), node.all_input_nodes[1:]
    need(isinstance(x, Tensor) and isinstance(y, Tensor) and x.device == y.device)
    if x.dtype == y.dtype:
        return one("Identity", node, a["input"])
    need((s.dtype(a["input"]), s.dtype(node)) == (x.dtype, y.dtype) and {x.dtype, y.dtype} <= ELEM_TYPES.keys())
    need(x.is_floating_point() and y.is_floating_point() and all(s.dtype(other) == y.dtype for other in others))
    return one("CastLike", node, a["input"], others[0]) if others else one("Cast", node, a["input"], to=ELEM_TYPES[y.dtype])


# ---- reductions, slices, and functions that only rearrange ----


def getitem(s: Skeleton, label: str, node: fx.Node, a: Arguments) -> NodeProto:
    index, shape = a["other"] if isinstance(a["other"], tuple) else (a["other"],), shape_of(s, a["input"])
    if Ellipsis in [item for item in index if not isinstance(item, fx.Node)]:
        place = [item is Ellipsis for item in index].index(True)
        index = (*index[:place], *[slice(None)] * (len(shape) - len(index) + 1), *index[place + 1 :])
    need(all(isinstance(item, slice) for item in index))
    need(all(value is None or type(value) is int for item in index for value in (item.start, item.stop, item.step)))
    taken = [(axis, item) for axis, item in enumerate(index) if item != slice(None)]
    far = 2**62  # a Slice that ends there takes the rest of an axis
    bounds = [(item.start or 0, far if item.stop is None else item.stop, axis, item.step or 1) for axis, item in taken]
    names = [s.number(list(numbers)) for numbers in zip(*bounds, strict=True)]
    return one("Slice" if names else "Identity", node, a["input"], *names)


def reduction(op_type: str, s: Skeleton, label: str, node: fx.Node, a: Arguments) -> NodeProto:
    dims, shape = (a["dim"],) if type(a["dim"]) is int else a["dim"], s.shape(a["input"])
    need(isinstance(dims, (tuple, list)) and dims and a["dtype"] is None and all(type(d) is int for d in dims))
    axes = list(dims) if shape is None else [d % len(shape) for d in dims]
    return one(op_type, node, a["input"], s.number(axes), keepdims=int(a["keepdim"]))


def reshape(s: Skeleton, label: str, node: fx.Node, a: Arguments) -> NodeProto:
    before, after = shape_of(s, a["input"]), shape_of(s, node)
    need(s.dtype(a["input"]) == s.dtype(node))
    sizes = [n if isinstance(n, int) else 0 if i == 0 and before and before[0] == n else -1 for i, n in enumerate(after)]
    need(sizes.count(-1) < 2 and not any(n == 0 for n in (*after, *before)))
    return one("Reshape", node, a["input"], s.number(sizes))


# ---- the table ----


_CONV = "input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1"
_POOL = "input, kernel_size, stride=None, padding=0, ceil_mode=False, count_include_pad=True, divisor_override=None"
_BINARY = "input, other, *, alpha=1, rounding_mode=None, out=None"
_NORM = "input, running_mean, running_var, weight=None, bias=None, training=False, momentum=0.1, eps=1e-5"
_RESIZE = "input, size=None, scale_factor=None, mode='nearest', align_corners=None, recompute_scale_factor=None, antialias=False"
_REDUCE, _ANY = "input, dim=None, keepdim=False, dtype=None", "input, *sizes, **others"
_LINES: list[tuple[str, str, Callable]] = [
    *((f"conv{r}d", _CONV, partial(conv, r)) for r in (1, 2, 3)),
    *((f"avg_pool{r}d", _POOL, partial(average, r)) for r in (1, 2, 3)),
    *((f"adaptive_avg_pool{r}d", "input, output_size", partial(adaptive_average, r)) for r in (1, 2, 3)),
    *(
        (f"{name} {name}_".lower(), "input, inplace=False", partial(unary, name))
        for name in ("Relu", "Sigmoid", "Tanh", "Selu", "HardSwish", "Mish", "Softsign", "Abs", "Neg", "Exp", "Sqrt")
    ),
    ("leaky_relu leaky_relu_", "input, negative_slope=0.01, inplace=False", partial(unary, "LeakyRelu")),
    ("elu", "input, alpha=1.0, inplace=False", partial(unary, "Elu")),
    ("gelu", "input, *, approximate='none'", partial(unary, "Gelu")),
    ("softplus", "input, beta=1, threshold=20", partial(unary, "Softplus")),
    ("dropout dropout1d dropout2d dropout3d alpha_dropout", "input, p=0.5, training=True, inplace=False", dropout),
    ("batch_norm", _NORM, batch_norm),
    ("add iadd add_", _BINARY, partial(binary, "Add")),
    ("sub isub sub_", _BINARY, partial(binary, "Sub")),
    ("mul imul mul_", _BINARY, partial(binary, "Mul")),
    ("div true_divide truediv itruediv div_", _BINARY, partial(binary, "Div")),
    ("contiguous clone to type type_as float double half bfloat16", "input, *rest, **others", same),
    ("cat concat concatenate", "tensors, dim=0", concat),
    ("pad", "input, pad, mode='constant', value=None", pad),
    ("interpolate upsample upsample_nearest", _RESIZE, interpolate),
    ("getitem", "input, other", getitem),
    ("mean", _REDUCE, partial(reduction, "ReduceMean")),
    ("sum", _REDUCE, partial(reduction, "ReduceSum")),
    ("reshape view flatten unflatten", _ANY, reshape),
]
"""Names of functions and methods, their parameters, and the translation."""


def _functions(name: str) -> Iterator[Any]:
    """What a graph has for a name: PyTorch's functions, Python's operator, an operator of ATen, the method."""
    for home in (F, torch, operator, torch._C._nn):
        found = getattr(home, name, None)
        if callable(found):
            yield found
    if isinstance(getattr(Tensor, name, None), (types.MethodDescriptorType, types.FunctionType)):
        yield name
    packet = getattr(torch.ops.aten, name, None) if name != "batch_norm" else None  # whose arguments have another order
    for overload in packet.overloads() if packet is not None else ():
        yield getattr(packet, overload)


FUNCTIONS = {
    function: (inspect.signature(eval(f"lambda {text}: None")), translate)
    for names, text, translate in _LINES
    for name in names.split()
    for function in _functions(name)
}
"""How a function, or a method by its name, is bound and translated."""

NUMBERS = ("eps", "value", "scale_factor", "ceil_mode", "divisor_override")
"""Arguments that a translation reads; torch.compile may leave them open."""


def translate_call(s: Skeleton, label: str, node: fx.Node) -> NodeProto | None:
    """The node of a function or method, None where there is none."""
    given = arguments(node)
    if given is None or "input" in given and not isinstance(given["input"], (fx.Node, int, float)):
        return None
    if any(isinstance(item, fx.Node) for name in NUMBERS for item in pytree.tree_leaves(given.get(name))):
        return None
    if max(getattr(value_of(item), "ndim", 0) for item in (node, *node.all_input_nodes)) == 1:
        return None  # no part of a pair, and onnx would follow each value, as those of a shape, of all images in a batch
    if s.turns_batch(node):
        return None
    try:
        return FUNCTIONS[node.target][1](s, label, node, given)
    except (Unknown, OptionError):
        return None


def arguments(node: fx.Node) -> Arguments | None:
    """The arguments of a call by their names, complete; None where the function is not known, or has no such."""
    if node.target not in FUNCTIONS:
        return None
    names = {"train": "training", "axis": "dim", "self": "input"}  # torch.dropout's and numpy's
    try:
        bound = FUNCTIONS[node.target][0].bind(*node.args, **{names.get(key, key): value for key, value in node.kwargs.items()})
    except TypeError:
        return None
    bound.apply_defaults()
    return bound.arguments

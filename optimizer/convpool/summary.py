# SPDX-License-Identifier: Apache-2.0
"""The gain of a model: multiply-adds, and time in onnxruntime before and after.

Conv, ConvTranspose, Gemm, MatMul, their quantized forms, and convpool's own operators multiply.  Every node counts once: those in
functions and in the bodies of If, Loop and Scan too, however often these run.  What is computed from constants alone does not
count, since a runtime does it once, when it loads the model.

What a model has in place of pairs is told too: `survey` goes from each convolution forward to the nearest average.  The first
node on the way that no average moves past is the obstacle.  A quantized or fused operator counts for what it was made of: if
nothing else is in the way, the float model, or the one that a runtime has fused, has a pair.
"""

from __future__ import annotations

import math
import os
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
from onnx import NodeProto, TensorProto, helper

from convpool.algebra.expand import UpsampleSpec, kernel_macs
from convpool.algebra.geometry import miscounts
from convpool.algebra.parts import LAYOUTS
from convpool.check.inputs import CheckInputs, shapes_of
from convpool.check.session import OnnxruntimeRunner, Session, evaluate, time_sessions
from convpool.errors import ModelError
from convpool.ir import protos, schema
from convpool.ir.files import external_size, serialize
from convpool.ir.index import Scope
from convpool.ir.model import LoadedModel, feeds, scopes_at
from convpool.ir.protos import STANDARD_DOMAINS, is_op, known_attributes, label, ops_of
from convpool.report import Log, Report, SiteReport, Speed, Summary
from convpool.rules.linear import JOINS, Step, is_map, op_of, step_or_reject
from convpool.rules.pool_first.averages import possible_averages, recognise
from convpool.rules.pool_first.pairs import conv_upstream

Sizes = tuple[int | None, ...]
CONVOLUTIONS = {"Conv": 1, "ConvInteger": 1, "QLinearConv": 3, "ConvTranspose": 1, **dict.fromkeys(schema.OP_TYPES, 1)}
"""The operators that count as convolutions, and which of their inputs are the weights."""
PRODUCTS = ("MatMul", "MatMulInteger", "QLinearMatMul", "Gemm")
"""The products of matrices."""
COUNTED = {*CONVOLUTIONS, *PRODUCTS}


@dataclass(frozen=True)
class NodeMacs:
    """A node that multiplies.  macs: of the whole batch, None where a size is unknown; scope: "" for the main graph."""

    scope: str
    name: str
    convolution: bool
    macs: int | None


@dataclass(frozen=True)
class ModelMacs:
    """The nodes that multiply, and the batch that they were counted for (1 where the inputs have no common one)."""

    nodes: tuple[NodeMacs, ...]
    batch: int = 1

    @property
    def total(self) -> int | None:
        """Multiply-adds a sample, None where any node's are unknown."""
        return self.of(self.nodes)

    @property
    def convolutions(self) -> tuple[NodeMacs, ...]:
        return tuple(node for node in self.nodes if node.convolution)

    def of(self, nodes: Iterable[NodeMacs]) -> int | None:
        """Multiply-adds a sample of some of the nodes, None where any are unknown."""
        counts = [node.macs for node in nodes]
        known = [count for count in counts if count is not None]
        return sum(known) // self.batch if len(known) == len(counts) else None


def count(scopes: Sequence[Scope]) -> ModelMacs:
    """The multiply-adds of an indexed model, outer scopes first.  An open batch counts as 1 where no other size is open; of an If
    whose condition is known counts the branch that it takes."""
    constants: dict[int, set[str]] = {}
    found = []
    batches, batch = (open_batches(scopes[0]), _batch(scopes[0])) if scopes else (frozenset(), 1)
    for scope in scopes:
        if scope.is_own or _is_not_taken(scope):
            continue
        around = constants[id(scope.parent)] if scope.parent is not None else set()
        stored = {*scope.initializers, *scope.sparse}  # but for those that a caller can replace
        constants[id(scope)] = known = around - scope.inputs | (stored if scope.constants_as_inputs else stored - scope.inputs)
        bodies = {child.owner for child in scope.children}
        for index, node in enumerate(scope.nodes):
            constant = node.input and known.issuperset(filter(None, node.input)) and index not in bodies
            if constant or node.op_type == "Constant":
                known.update(node.output)
            elif node.op_type in COUNTED and (node.domain in STANDARD_DOMAINS or schema.is_own(node)):
                sizes = _factors(scope, node, batches)
                macs = None if None in sizes else math.prod(cast(tuple[int, ...], sizes))
                found.append(NodeMacs(scope.path, label(node), node.op_type in CONVOLUTIONS, macs))
    return ModelMacs(tuple(found), batch)


def _is_not_taken(scope: Scope) -> bool:
    """Return True for a branch of an If, and for a body in it, where the condition is known and takes the other one."""
    if (around := scope.parent) is None:
        return False
    node = around.nodes[scope.owner]
    taken = around.constant(node.input[0]) if is_op(node, "If") else None
    return _is_not_taken(around) or taken is not None and scope.path.endswith("then_branch") != bool(taken.array().all())


def open_batches(main: Scope) -> frozenset[str]:
    """The names of the inputs' first sizes, where these are all that a model leaves open; else none."""
    names = set()
    for name in main.inputs - set(main.initializers):
        shape = main.info(name).shape or ("",)
        if not all(isinstance(dim, int) for dim in shape[1:]) or not shape[0]:
            return frozenset()
        names |= {dim for dim in shape[:1] if isinstance(dim, str)}
    return frozenset(names)


def _factors(scope: Scope, node: NodeProto, batches: frozenset[str]) -> Sizes:
    """Factors of one node's multiply-adds, None where a size is unknown.  batches: names of sizes that count as 1."""
    weights = CONVOLUTIONS.get(node.op_type)
    out, x = scope.known_sizes(node.output[0], batches), scope.known_sizes(node.input[0], batches)
    w = None if weights is None else scope.known_sizes(node.input[weights], batches)
    values = (known_attributes(node) or {}) if node.op_type in ("Gemm", *schema.OP_TYPES) else {}
    if weights is None:
        return (*(out if out is not None else (None,)), x[0 if values.get("transA") else -1]) if x else (None,)
    if schema.UPSAMPLE in values:
        return (_upsampled(node, values, out, w),)
    positions = x if node.op_type == "ConvTranspose" else out
    return (*(positions if positions is not None else (None,)), *(w or (None, None))[1:])


def _upsampled(node: NodeProto, values: dict[str, Any], out: Sizes | None, w: Sizes | None) -> int | None:
    """Multiply-adds of an UpsampleConv, as the kernels of phases do them."""
    if out is None or w is None or None in (*out, *w) or len(w) != len(out) or len(values[schema.UPSAMPLE]) != len(out) - 2:
        return None
    before, conv = schema.specs_of(values)
    assert isinstance(before, UpsampleSpec)
    sizes = tuple(size for size in out if size is not None)
    spatial = sizes[1:-1] if LAYOUTS[schema.layout_of(node)][1] else sizes[2:]
    return sizes[0] * kernel_macs(conv, before, w[0] or 0, (w[-1] or 0) * conv.group, spatial)


def _batch(scope: Scope) -> int:
    """The first size that all inputs of a main graph share, but for scalars and initializers; 1 where there is none."""
    shapes = map(scope.known_sizes, scope.inputs - set(scope.initializers))
    first = {shape[0] for shape in shapes if shape and len(shape) > 1}
    return (first.pop() if len(first) == 1 else None) or 1


ROUNDS = 15
BUDGET_S = 5.0
"""The timing stops after so many seconds, though not before three rounds."""


def totals(
    models: Sequence[LoadedModel], nodes: Sequence[list[NodeProto]], sites: list[SiteReport], log: Log, seen: Seen
) -> Summary:
    """The totals of a rewrite, but for `with_macs`, whose shapes a check may tell later.  models, nodes: original and result."""
    (original, result), (before, after) = models, nodes
    status = Counter(site.status for site in sites)
    return Summary(
        rewritten=status["rewritten"],
        rejected=status["rejected"],
        excluded=status["excluded"],
        macs_before=sum(site.macs_before or 0 for site in sites),
        macs_after=sum(site.macs_after or 0 for site in sites),
        operators_before=_counted(before),
        operators_after=_counted(after),
        bytes_before=original.size_bytes,
        bytes_after=len(serialize(result.proto)) + external_size(result.proto),
        seconds=0.0,
        concats=log.concats,
        channels_last=log.channels_last,
        packed=sum(map(bool, map(schema.accumulation_of, filter(schema.is_operator, after)))),
        averages=seen.averages,
        resizes=seen.resizes,
        between=dict(seen.between.most_common()),
    )


def _counted(nodes: Iterable[NodeProto]) -> dict[str, int]:
    """How often each operator occurs."""
    return dict(sorted(Counter(node.op_type for node in nodes).items()))


def misread(nodes: Iterable[NodeProto], opset: int) -> set[str]:
    """The poolings that onnxruntime miscounts before 1.25."""
    found = set()
    for node in nodes if opset >= schema.POOL_DILATIONS_OPSET else ():
        values = known_attributes(node) or {}
        pads = list(values.get("pads", ()) if is_op(node, "AveragePool") and values.get("count_include_pad") else ())
        pads = pads or list(values.get("pool_pads", ()) if schema.is_operator(node) else ())
        if miscounts(tuple(pads)):
            found.add(label(node))
    return found


def with_macs(
    summary: Summary, sites: Sequence[SiteReport], before: ModelMacs, after: ModelMacs, shapes: Mapping[str, Sequence[int]]
) -> Summary:
    """A summary with the multiply-adds of the model, at these shapes, and of the convolutions rewritten, each counted once."""
    names = {(site.scope, site.conv) for site in sites if site.status == "rewritten"}
    rewritten = [node for node in before.convolutions if (node.scope, node.name) in names]
    first, total, left = before.of(rewritten), before.total, after.total
    return replace(
        summary,
        convolutions=len(before.convolutions),
        rewritten_convolutions=len(rewritten),
        rewritten_macs_before=first,
        # All else is as it was.
        rewritten_macs_after=None if first is None or total is None or left is None else first - total + left,
        model_macs_before=total,
        model_macs_after=left,
        counted_shapes={name: list(shape) for name, shape in shapes.items()} if total is not None else {},
        batch=before.batch,
    )


def recount(report: Report, original: LoadedModel, result: LoadedModel, given: Mapping[str, Sequence[int]]) -> None:
    """Count a model of open sizes with those of the check, else those given, else 1 for a first axis that alone is open.  All
    initializers are as stored."""
    sizes = {value.name: [dim.dim_value for dim in value.type.tensor_type.shape.dim] for value in feeds(original.proto)}
    batches = {name: [1, *dims[1:]] for name, dims in sizes.items() if dims and dims[0] <= 0 < min(dims[1:], default=1)}
    shapes: Mapping[str, Sequence[int]] = report.checked_shapes or batches | dict(given)
    if report.summary.model_macs_before is not None and report.summary.model_macs_after is not None:
        report.summary = replace(report.summary, counted_shapes={n: list(s) for n, s in shapes.items()} if batches else {})
    elif shapes or len(feeds(original.proto)) < len(original.proto.graph.input):
        before = count(scopes_at(original, shapes, evaluate))
        after = before if result.proto == original.proto else count(scopes_at(result, shapes, evaluate))
        report.summary = with_macs(report.summary, report.sites, before, after, shapes)


def time_models(report: Report, original: LoadedModel, result: LoadedModel, given: CheckInputs) -> None:
    """Report median times of both models in turn, in onnxruntime as it is by default here; a warning where one cannot run."""
    if given.progress is not None:
        given.progress(1, 1, "timing both models")
    runner, threads = OnnxruntimeRunner(original, "the original", optimize=True, spin=True), physical_cores()
    try:
        inputs, _ = given.maker(original.proto).runnable(0, runner.values)
    except ModelError as error:
        report.warnings.append(f"not timed: {error}")
        return
    models = {"original": original, "result": result}
    try:
        sessions = {name: Session(model, optimize=True, threads=threads, spin=True) for name, model in models.items()}
        times = time_sessions(sessions, inputs, ROUNDS, BUDGET_S)
    except Exception as error:  # onnxruntime's exceptions share no base class
        report.warnings.append(f"not timed: onnxruntime cannot time the models: {error}")
    else:
        report.speed = Speed(times["original"], times["result"], threads, shapes_of(inputs))


def physical_cores() -> int:
    """The cores that this process may use, as onnxruntime counts them by default: threads of one core are one."""
    cores = set()
    for cpu in os.sched_getaffinity(0):
        try:
            cores.add(Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text())
        except OSError:
            cores.add(str(cpu))
    return len(cores)


SEARCH_LIMIT = 64
"""Nodes that the search visits at most from each convolution."""
RUNTIME_DOMAINS = ("com.microsoft", "com.microsoft.nchwc", "com.ms.internal.nhwc")
"""The domains of operators that onnxruntime writes: into a model that it saves, and by its quantizer."""
PREFIXES = ("QLinear", "Nhwc", "NHWC", "Fused")
"""How these operators' names begin, before the name of the operator that they stand for."""
QUANTIZERS = ("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear")
AVERAGES = ("AveragePool", "GlobalAveragePool")
REORDERS = ("ReorderInput", "ReorderOutput")
"""Operators that onnxruntime writes around the convolutions of its own layout."""
INTEGERS = (TensorProto.INT8, TensorProto.UINT8, TensorProto.INT16, TensorProto.UINT16)
QUANTIZED, SAVED, OTHER = "quantized", "saved", "other"
"""Kinds of obstacles."""


@dataclass
class Seen:
    """The forms found in a model.  between: how often an operator is the obstacle, by name.  quantized, saved: pairs of the float
    model, and of the one that onnxruntime has optimized and saved. max_pools: poolings by the maximum behind one."""

    averages: int = 0
    max_pools: int = 0
    resizes: int = 0
    quantized: int = 0
    saved: int = 0
    between: Counter[str] = field(default_factory=Counter)


def survey(scopes: Sequence[Scope]) -> Seen:
    """Count what the scopes of a model have, convpool's own functions aside."""
    seen = Seen()
    for scope in scopes:
        if scope.is_own:
            continue
        ends = _ends(scope, seen)
        maxima = ops_of(scope.nodes, "MaxPool", "GlobalMaxPool")
        seen.max_pools += sum(conv_upstream(scope, node.input[0]) is not None for node in maxima)
        for index, node in enumerate(scope.nodes):
            if _stands_for(node) in ("Resize", "Upsample"):
                seen.resizes += 1
                seen.saved += _is_saved(scope, node)
            if _stands_for(node) in ("Conv", "ConvTranspose"):
                _judge(scope, _way(scope, index, ends), seen)
    return seen


def _ends(scope: Scope, seen: Seen) -> set[str]:
    """The tensors that averages are of.  Counts those over two axes or more: over one they may be of another kind."""
    ends = set()
    for node in scope.nodes:
        if _stands_for(node) in AVERAGES and any(node.input):  # nothing checks nodes of another domain
            seen.averages += 1
            ends.add(node.input[0])
    for chain in possible_averages(scope):
        tensor, shape = chain[-1].input, scope.info(chain[-1].input).shape
        if tensor in ends:
            continue
        try:
            found = None if shape is None else recognise(scope, chain, len(shape) - 2)
        except protos.AttributeReference:
            continue
        if found is not None:
            ends.add(tensor)
            seen.averages += shape is not None and len(shape) > 3
    return ends


def _way(scope: Scope, start: int, ends: set[str]) -> list[int]:
    """The nodes from a convolution to the nearest average, both aside from what is averaged; none where there is no average."""
    before: dict[int, int] = {}
    queue = deque([start])
    while queue and len(before) < SEARCH_LIMIT:
        index = queue.popleft()
        for name in scope.nodes[index].output:
            if name in ends:
                way = [index]
                while way[-1] != start:
                    way.append(before[way[-1]])
                readers = [reader for reader in scope.readers.get(name, ()) if _stands_for(scope.nodes[reader]) in AVERAGES]
                return way[::-1] + readers[:1]
            for reader in scope.readers.get(name, ()):
                # Behind these is no longer the map of the convolution in front.
                ends_search = _stands_for(scope.nodes[reader]) in ("Shape", "Size", "Conv", "ConvTranspose")
                if reader != start and reader not in before and not ends_search:
                    before[reader] = index
                    queue.append(reader)
    return []


def _judge(scope: Scope, way: list[int], seen: Seen) -> None:
    """Note the first obstacle on a way, or what else it shows."""
    obstacles = {index: kind for index in way if (kind := _kind(scope, index)) is not None}
    if not obstacles:
        return
    node = scope.nodes[min(obstacles, key=way.index)]
    seen.between[node.op_type if node.domain in STANDARD_DOMAINS else f"{node.domain}.{node.op_type}"] += 1
    kinds = set(obstacles.values())
    if kinds <= {QUANTIZED, SAVED}:
        seen.saved += SAVED in kinds
        seen.quantized += SAVED not in kinds


def _is_saved(scope: Scope, resize: NodeProto) -> bool:
    """Return True if a convolution in onnxruntime's own form reads a map that is upsampled by nearest neighbours."""
    readers = [scope.nodes[index] for name in resize.output[:1] for index in scope.readers.get(name, ())]
    own = any(node.domain in RUNTIME_DOMAINS and node.op_type in ("Conv", "FusedConv", "NhwcFusedConv") for node in readers)
    return own and (known_attributes(resize) or {}).get("mode", b"nearest") == b"nearest"


def _kind(scope: Scope, index: int) -> str | None:
    """None for a node that an average moves past; QUANTIZED or SAVED where it would past what the node stands for."""
    node = scope.nodes[index]
    op_type = _stands_for(node)
    if _moves_past(scope, index):
        return None
    if is_op(node, *QUANTIZERS, "QLinearConv", "ConvInteger") or op_type != node.op_type and node.op_type.startswith("QLinear"):
        return OTHER if _clips(scope, node) else QUANTIZED
    if is_op(node, "Cast") and any(is_op(scope.nodes[i], "ConvInteger") for i in [scope.producer.get(node.input[0], index)]):
        return QUANTIZED
    if node.domain not in ("", "ai.onnx") and op_type in ("Conv", *AVERAGES, *REORDERS):
        return OTHER if (known_attributes(node) or {}).get("activation", b"") else SAVED
    return OTHER


def _moves_past(scope: Scope, index: int) -> bool:
    """Return True if an average moves past a node, or the node is a convolution or an average."""
    node = scope.nodes[index]
    if is_op(node, "Conv", "Pad", *AVERAGES, *JOINS) or is_map(scope, index):
        return True
    shape = scope.info(node.input[0]).shape if op_of(node) is not None else None
    return shape is not None and isinstance(step_or_reject(scope, index, len(shape) - 2), Step)


def _clips(scope: Scope, node: NodeProto) -> bool:
    """Return True if a node quantizes 0 to the lowest number: like a Relu it clips negatives."""
    position = {"QuantizeLinear": 2, "QLinearConv": 7}.get(node.op_type)
    if position is None or len(node.input) <= position:
        return False
    zero = scope.constant(node.input[position])
    if zero is None or zero.data_type not in INTEGERS:
        return False
    return bool(np.all(zero.array() == np.iinfo(helper.tensor_dtype_to_np_dtype(zero.data_type)).min))


def _stands_for(node: NodeProto) -> str:
    """The standard operator that a node is a form of; "" for one of a domain that is not known."""
    if node.domain not in ("", "ai.onnx", *RUNTIME_DOMAINS):
        return ""
    name = node.op_type
    for prefix in PREFIXES:
        name = name.removeprefix(prefix)
    return "Conv" if name == "ConvInteger" else name


def notes(seen: Seen, sites: Sequence[SiteReport], int8: int) -> list[str]:
    """List what looks like a pair and is none, and what the result costs.  int8: see `Pipeline`."""
    found = []
    if seen.max_pools and not any(site.status == "rewritten" for site in sites):
        found.append(f"MaxPool follows a convolution {seen.max_pools} x: a maximum is not linear, so no pair")
    if int8:
        found.append(f"TensorRT would run {int8} x a float kernel for an INT8 convolution; --target tensorrt leaves these")
    return found

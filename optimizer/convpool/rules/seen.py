# SPDX-License-Identifier: Apache-2.0
"""The convolutions and averages of a model, and what stands between them: a report without a pair tells this.

From each convolution the search goes forward to the nearest average.  The first node on the way that no average moves past is the
obstacle.  A quantized or fused operator counts for what it was made of: if nothing else is in the way, the float model, or the
one that a runtime has fused, has a pair.

Reasons are also put into a few words here, to group the sites that stay for the same one.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from onnx import NodeProto, TensorProto, helper

from convpool.ir.index import Scope
from convpool.ir.protos import AttributeReference, is_op, known_attributes, ops_of
from convpool.report import SiteReport
from convpool.rules.base import BETWEEN, Reject
from convpool.rules.linear import JOINS, Step, is_map, op_of, step_or_reject
from convpool.rules.pool_first.averages import candidates, recognise
from convpool.rules.pool_first.trace import conv_upstream

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
        seen.resizes += len(ops_of(scope.nodes, "Resize", "Upsample"))
        for index, node in enumerate(scope.nodes):
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
    for chain in candidates(scope):
        tensor, shape = chain[-1].input, scope.info(chain[-1].input).shape
        if tensor in ends:
            continue
        try:
            found = None if shape is None else recognise(scope, chain, len(shape) - 2)
        except AttributeReference:
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
    seen.between[_name(scope.nodes[min(obstacles, key=way.index)])] += 1
    kinds = set(obstacles.values())
    if kinds <= {QUANTIZED, SAVED}:
        seen.saved += SAVED in kinds
        seen.quantized += SAVED not in kinds


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
        activation = (known_attributes(node) or {}).get("activation", b"")
        return OTHER if activation else SAVED
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


def _name(node: NodeProto) -> str:
    return node.op_type if node.domain in ("", "ai.onnx") else f"{node.domain}.{node.op_type}"


def verdict_of(verdict: Reject | None) -> dict[str, str]:
    """Status and reason of a site that stays, as its report has them; None for one that is excluded."""
    if verdict is None:
        return {"status": "excluded", "reason": "excluded by name"}
    return {"status": "rejected", "reason": str(verdict), "obstacle": in_short(verdict), "in_words": in_words(verdict)}


def in_short(verdict: Reject) -> str:
    """The obstacle in a few words."""
    condition = verdict.condition
    if condition == BETWEEN:
        return f"{verdict.got} between"
    if condition.startswith("output '"):
        return "read by something else too"
    for beginning, words in (("saves too little", "saves too little"), ("Pad '", "a Pad in front")):
        if condition.startswith(beginning):
            return words
    if verdict.got == "a computed tensor":
        return f"{condition} not constant"
    return f"{condition}: unknown" if "unknown" in verdict.got else condition


def in_words(verdict: Reject) -> str:
    """The reason as a sentence, where `in_short` has words of its own for it; else in full."""
    if verdict.condition == BETWEEN:
        article = "an" if verdict.got[:1] in "AEIOU" else "a"
        return f"{article} {verdict.got} stands between: {verdict.node}"
    if verdict.condition.startswith("output '"):
        return f"read by something else too: {verdict.condition}"
    return str(verdict)


def notes(seen: Seen, sites: Sequence[SiteReport], int8: int) -> list[str]:
    """List what looks like a pair and is none, and what the result costs.  int8: see `Pipeline`."""
    found = []
    if seen.max_pools and not any(site.status == "rewritten" for site in sites):
        found.append(f"MaxPool follows a convolution {seen.max_pools} x: a maximum is not linear, so no pair")
    if int8:
        found.append(f"TensorRT would run {int8} x a float kernel for an INT8 convolution; --target tensorrt leaves these")
    return found


def unmatched(patterns: Iterable[str], matched: Iterable[str]) -> list[str]:
    """A warning for each pattern of `exclude` that matches no name."""
    known = set(matched)
    return [f"exclude: {name!r} matches no convolution, pooling or Concat here" for name in patterns if name not in known]

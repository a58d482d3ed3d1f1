# SPDX-License-Identifier: Apache-2.0
"""Multiply-adds of a whole model: Conv, ConvTranspose, Gemm, MatMul, their quantized forms, and convpool's own operators.

Every node counts once: those in functions and in the bodies of If, Loop and Scan too, however often these run.  What is computed
from constants alone does not count, since a runtime does it once, when it loads the model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from onnx import NodeProto

from convpool.algebra.expand import UpsampleSpec, kernel_macs
from convpool.algebra.parts import LAYOUTS
from convpool.ir.index import Scope
from convpool.ir.protos import STANDARD_DOMAINS, known_attributes, label
from convpool.ir.schema import OP_TYPES, UPSAMPLE, is_own, layout_of, specs_of

Sizes = tuple[int | None, ...]
CONVOLUTIONS = {"Conv": 1, "ConvInteger": 1, "QLinearConv": 3, "ConvTranspose": 1, **dict.fromkeys(OP_TYPES, 1)}
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
    """The multiply-adds of an indexed model, outer scopes first.  An open batch counts as 1 where no other size is open."""
    constants: dict[int, set[str]] = {}
    found = []
    batches, batch = (open_batches(scopes[0]), _batch(scopes[0])) if scopes else (frozenset(), 1)
    for scope in scopes:
        if scope.is_own:
            continue
        around = constants[id(scope.parent)] if scope.parent is not None else set()
        stored = {*scope.initializers, *scope.sparse}  # but for those that a caller can replace
        constants[id(scope)] = known = around - scope.inputs | (stored if scope.constants_as_inputs else stored - scope.inputs)
        bodies = {child.owner for child in scope.children}
        for index, node in enumerate(scope.nodes):
            constant = node.input and known.issuperset(filter(None, node.input)) and index not in bodies
            if constant or node.op_type == "Constant":
                known.update(node.output)
            elif node.op_type in COUNTED and (node.domain in STANDARD_DOMAINS or is_own(node)):
                sizes = _factors(scope, node, batches)
                macs = None if None in sizes else math.prod(cast(tuple[int, ...], sizes))
                found.append(NodeMacs(scope.path, label(node), node.op_type in CONVOLUTIONS, macs))
    return ModelMacs(tuple(found), batch)


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
    values = (known_attributes(node) or {}) if node.op_type in ("Gemm", *OP_TYPES) else {}
    if weights is None:
        return (*(out if out is not None else (None,)), x[0 if values.get("transA") else -1]) if x else (None,)
    if UPSAMPLE in values:
        return (_upsampled(node, values, out, w),)
    positions = x if node.op_type == "ConvTranspose" else out
    return (*(positions if positions is not None else (None,)), *(w or (None, None))[1:])


def _upsampled(node: NodeProto, values: dict[str, Any], out: Sizes | None, w: Sizes | None) -> int | None:
    """Multiply-adds of an UpsampleConv, as the kernels of phases do them."""
    if out is None or w is None or None in (*out, *w) or len(w) != len(out) or len(values[UPSAMPLE]) != len(out) - 2:
        return None
    before, conv = specs_of(values)
    assert isinstance(before, UpsampleSpec)
    sizes = tuple(size for size in out if size is not None)
    spatial = sizes[1:-1] if LAYOUTS[layout_of(node)][1] else sizes[2:]
    return sizes[0] * kernel_macs(conv, before, w[0] or 0, (w[-1] or 0) * conv.group, spatial)


def _batch(scope: Scope) -> int:
    """The first size that all inputs of a main graph share, but for scalars and initializers; 1 where there is none."""
    shapes = map(scope.known_sizes, scope.inputs - set(scope.initializers))
    first = {shape[0] for shape in shapes if shape and len(shape) > 1}
    size = first.pop() if len(first) == 1 else None
    return size or 1

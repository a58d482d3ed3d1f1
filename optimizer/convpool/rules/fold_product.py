# SPDX-License-Identifier: Apache-2.0
"""Maps by constants behind matrix products of one input: they go into the products' weights.

    z - Gemm - Reshape - Add (1) - Mul (a) - scale        z - Gemm - Reshape - scale
             \\                   - Mul (b) - Add - shift   z - Gemm - Reshape - shift
    z - Gemm - Reshape ---------------------+

Conditional normalization computes a scale and a shift from a latent so, and a BatchNormalization in front of it is folded into
both: each step is a layer of some 2 us for a few hundred numbers.  A sum of products of one input is one product.

Conditions: (1) a product is a Gemm or MatMul of a matrix [N, K], not one behind a DequantizeLinear, by constant weights, with a
constant bias for each column, or none; (2) behind it are Add, Sub, Mul and Div by constants for each column, Neg, and sums and
differences of such tensors; views between keep N and M in front, [N, M, 1...]; (3) what others read takes no more products than
there were; (4) the type has the new weights and biases; (5) something else in the model was rewritten.  Weights are computed in
float64, and rounded once.
"""

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, replace

import numpy as np
from onnx import helper

from convpool.algebra.parts import holds, keeps
from convpool.ir.edit import Edit
from convpool.ir.index import Scope
from convpool.ir.protos import is_op, known_attributes, label
from convpool.rules.base import Context, NodesPlan, Rule, Site
from convpool.rules.convs import KERNEL_TYPES, against_merged_weights


@dataclass(frozen=True)
class Product:
    """A tensor [N, M, 1...] that is linear in x [N, K]: the sum of products, each times a factor [M], plus a shift [M].  factors:
    by node of the product.  views: nodes between, in turn.  nodes: all that it is computed by.  mapped: whether they do more than
    multiply, add the bias of a MatMul, and rearrange."""

    x: str
    channels: int
    rank: int
    factors: dict[int, np.ndarray]
    shift: np.ndarray
    views: tuple[int, ...]
    nodes: frozenset[int]
    mapped: bool = False


@dataclass(frozen=True)
class ProductSite(Site):
    """Tensors that share products, by name."""

    products: dict[str, Product]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(label(self.scope.nodes[index]) for index in sorted(self.nodes))

    @property
    def nodes(self) -> frozenset[int]:
        return frozenset().union(*(product.nodes for product in self.products.values()))


@dataclass(frozen=True)
class ProductPlan(NodesPlan):
    """New weights [M, K] and biases [M] for each tensor, by name."""

    site: ProductSite
    constants: dict[str, tuple[np.ndarray, np.ndarray]]


class FoldProduct(Rule):
    """Every group of tensors that share products and are more than these."""

    names = ("fold_product",)
    needs = ("Gemm", "MatMul")

    def sites(self, scope: Scope, context: Context) -> Iterator[ProductSite]:
        """The groups that take no more products than before: conditions (1) to (3)."""
        found = _products(scope)
        made = {scope.producer[name] for name in found}
        groups: list[set[str]] = []
        for name in found:
            if scope.read_outside(name, made):
                near = [group for group in groups if any(found[other].factors.keys() & found[name].factors for other in group)]
                groups = [group for group in groups if group not in near] + [set().union({name}, *near)]
        for group in groups:
            before = {source for name in group for source in found[name].factors}
            kept = {source for name in group if not found[name].mapped for source in found[name].factors}
            mapped = {name: found[name] for name in found if name in group and found[name].mapped}
            if mapped and len(mapped) + len(kept) <= len(before):
                yield ProductSite(scope, max(scope.producer[name] for name in mapped), mapped)

    def check(self, site: ProductSite, context: Context) -> ProductPlan | None:
        """The plan, if the type has the new weights: condition (4)."""
        scope, constants = site.scope, {}
        for name, product in site.products.items():
            weight, bias = np.zeros(()), product.shift
            for source, factor in product.factors.items():
                old, added, dtype = _numbers(scope, source)
                weight, bias = weight + factor[:, None] * old, bias + factor * added
            if not keeps(weight, dtype) or not holds(bias, dtype):
                return None
            constants[name] = weight.astype(dtype), bias.astype(dtype)
        return ProductPlan(scope, tuple(site.nodes), site, constants)

    def apply(self, plan: ProductPlan, edit: Edit) -> None:
        scope = plan.scope
        for name, product in plan.site.products.items():
            weight, bias = plan.constants[name]
            given = [edit.constant(weight, f"{name}_weight"), edit.constant(bias, f"{name}_bias")]
            results = [edit.fresh(f"{name}_product") for _ in product.views] + [name]
            edit.nodes.append(helper.make_node("Gemm", [product.x, *given], results[:1], f"product_of_{name}", transB=1))
            for index, x, y in zip(product.views, results, results[1:], strict=False):
                node = deepcopy(scope.nodes[index])
                node.input[0], node.output[0], node.name = x, y, ""
                edit.nodes.append(node)
            edit.replace(scope.producer[name], {scope.producer[name]})
        edit.drop_unread(plan.site.nodes)


def _products(scope: Scope) -> dict[str, Product]:
    """The products of a scope, and what is computed from them by conditions (1) and (2)."""
    found: dict[str, Product] = {}
    for index, node in enumerate(scope.nodes):
        if len(node.output) == 1 and (product := _source(scope, index) or _behind(scope, index, found)) is not None:
            found[node.output[0]] = product
    return found


def _source(scope: Scope, index: int) -> Product | None:
    """Condition (1)."""
    node, values = scope.nodes[index], known_attributes(scope.nodes[index])
    if not is_op(node, "Gemm", "MatMul") or values is None or values.get("transA", 0):
        return None
    if against_merged_weights(scope, node.input[0]) is not None:
        return None
    weight, shape = scope.constant(node.input[1]), scope.info(node.input[0]).shape
    if weight is None or weight.data_type not in KERNEL_TYPES or len(weight.shape) != 2 or shape is None or len(shape) != 2:
        return None
    m = weight.shape[0 if values.get("transB", 0) else 1]
    if len(node.input) > 2 and node.input[2] and _column(scope, node.input[2], 2, m) is None:
        return None
    return Product(node.input[0], m, 2, {index: np.ones(m)}, np.zeros(m), (), frozenset((index,)))


def _numbers(scope: Scope, index: int) -> tuple[np.ndarray, np.ndarray, np.dtype]:
    """Weights [M, K] and bias [M] of a product in float64, and their type."""
    node, values = scope.nodes[index], known_attributes(scope.nodes[index]) or {}
    weight = scope.constant(node.input[1])
    assert weight is not None
    array = weight.array().astype(np.float64) * values.get("alpha", 1.0)
    array = array if values.get("transB", 0) else array.T
    column = _column(scope, node.input[2], 2, len(array)) if len(node.input) > 2 and node.input[2] else None
    bias = np.zeros(len(array)) if column is None else column * values.get("beta", 1.0)
    return array, bias, helper.tensor_dtype_to_np_dtype(weight.data_type)


def _column(scope: Scope, name: str, rank: int, channels: int) -> np.ndarray | None:
    """A constant as numbers [M] in float64, where it is one for each column of [N, M, 1...], or one for all."""
    constant = scope.constant(name)
    if constant is None or len(constant.shape) > rank:
        return None
    shape = (1,) * (rank - len(constant.shape)) + constant.shape
    if shape[1] not in (1, channels) or any(n != 1 for n in (shape[0], *shape[2:])):
        return None
    return np.broadcast_to(constant.array().astype(np.float64).reshape(-1), (channels,))


def _behind(scope: Scope, index: int, found: dict[str, Product]) -> Product | None:
    """Condition (2): what a node makes of products, None where that is none."""
    node = scope.nodes[index]
    known = [found.get(name) for name in node.input]
    first = next((product for product in known if product is not None), None)
    if first is None:
        return None
    if is_op(node, "Reshape", "Unsqueeze", "Squeeze", "Flatten", "Identity"):
        return _viewed(scope, index, first) if known[0] is not None else None
    is_bias = is_op(node, "Add") and all(is_op(scope.nodes[i], "MatMul") for i in first.nodes) and len(first.nodes) == 1
    mapped = replace(first, nodes=first.nodes | {index}, mapped=not is_bias or None not in known)
    if is_op(node, "Neg"):
        return _times(mapped, np.array(-1.0))
    if not is_op(node, "Add", "Sub", "Mul", "Div") or len(known) != 2:
        return None
    left, right = known
    additive, sign = is_op(node, "Add", "Sub"), -1.0 if is_op(node, "Sub") else 1.0
    if left is not None and right is not None:
        if not additive or (left.x, left.channels, left.rank) != (right.x, right.channels, right.rank):
            return None
        factors = dict(left.factors)
        for source, factor in right.factors.items():
            factors[source] = factors.get(source, 0.0) + sign * factor
        return replace(mapped, factors=factors, shift=left.shift + sign * right.shift, nodes=mapped.nodes | right.nodes)
    column = _column(scope, node.input[1 if right is None else 0], first.rank, first.channels)
    if column is None or is_op(node, "Div") and (right is not None or not column.all()):
        return None
    if additive:
        mapped = _times(mapped, np.array(sign if left is None else 1.0))
        return replace(mapped, shift=mapped.shift + column * (sign if right is None else 1.0))
    return _times(mapped, 1 / column if is_op(node, "Div") else column)


def _times(product: Product, factor: np.ndarray) -> Product:
    factors = {source: factor * old for source, old in product.factors.items()}
    return replace(product, factors=factors, shift=factor * product.shift)


def _viewed(scope: Scope, index: int, product: Product) -> Product | None:
    """A view that gives [N, M, 1...]."""
    shape = scope.info(scope.nodes[index].output[0]).shape
    if not product.channels or shape is None or len(shape) < 2 or shape[1:] != (product.channels, *(1,) * (len(shape) - 2)):
        return None
    return replace(product, rank=len(shape), views=(*product.views, index), nodes=product.nodes | {index})

# SPDX-License-Identifier: Apache-2.0
"""The operator's nodes, as an earlier run wrote them, back to standard operators: with --lowering direct, fused or auto.

    x - ReluConvAvgPoolAdd        x - Relu - AveragePool - Conv - Add
    x - ReluUpsampleConvAdd       x - Relu - Resize - Conv - Add

A prologue and an epilogue become nodes of their own; pooling and convolution become AveragePool and Conv, or, where that is asked
for or cheaper, the one Conv that equals both (`geometry.pool_last`).  An upsampling becomes a Resize; other rules go on from it.
Conditions: (1) no attribute refers to a function's; (2) of a scale and shift by channel, their number and the
type are known.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from onnx import TensorProto, helper

from convpool.algebra import geometry
from convpool.algebra.expand import UpsampleSpec
from convpool.algebra.geometry import ConvSpec, Layer, Lowered, Obstacles, PoolSpec, Refusal, refuse
from convpool.algebra.parts import LAYOUTS, Parts, keeps, outside, to_channels_first, to_channels_last
from convpool.ir import schema
from convpool.ir.edit import Edit
from convpool.ir.index import Constant, Scope
from convpool.ir.protos import attributes, label, stand_for
from convpool.report import Log
from convpool.rules.base import Context, NodesPlan, Reject, Rule, Site, reason_fields, reject, rejection, spatial_size
from convpool.rules.convs import against_merged_weights
from convpool.rules.pool_first.rule import ENOUGH

PATTERN = "conv_avg_pool"


@dataclass(frozen=True)
class LowerPlan(NodesPlan):
    """A node of the operator, what it does, and its new form.  box: the convolution and the pooling behind it, if any."""

    parts: Parts
    before: PoolSpec | UpsampleSpec
    conv: ConvSpec
    lowering: Lowered
    weight: Constant | None
    box: tuple[ConvSpec, PoolSpec] | None
    fallback: Reject | None = None

    @property
    def convolutions(self) -> tuple[int, ...]:
        return (self.node,)


class LowerOperator(Rule):
    """Every node of the operator, unless the lowering is the operator."""

    names = ("lower_operator",)
    needs = schema.OP_TYPES

    def sites(self, scope: Scope, context: Context) -> Iterator[Site]:
        if context.options.lowering != "convavgpool":
            yield from (Site(scope, index) for index, node in enumerate(scope.nodes) if schema.is_operator(node))

    def check(self, site: Site, context: Context) -> LowerPlan | Reject:
        scope, node = site.scope, site.scope.nodes[site.root]
        values, parts = attributes(node), schema.parts_of(node)
        before, conv = schema.specs_of(values)
        if before.rank != conv.rank:
            return reject(scope, site.root, "attributes", str(before), f"numbers for {conv.rank} axes")
        for spec in (conv,) if isinstance(before, UpsampleSpec) else (before, conv):
            if {len(spec.strides), len(spec.dilations), len(spec.pads) // 2} != {conv.rank} or len(spec.pads) % 2:
                return reject(scope, site.root, "attributes", str(spec), f"numbers for {conv.rank} axes")
        if parts.affine and not parts.modulated:
            shift = scope.info(node.input[4])
            if not shift.elem_type or not shift.shape or not isinstance(shift.shape[0], int):
                return reject(scope, site.root, "type and shape of the shift", "unknown", "known ones")
        shape = scope.info(node.input[1]).shape
        if shape is not None and len(shape) != conv.rank + 2:
            return reject(scope, site.root, "shape of the weights", list(shape), f"one of rank {conv.rank + 2}")
        kernel = zip(shape[1:-1], conv.kernel_shape, strict=True) if shape is not None else ()
        if shape is not None and any(isinstance(dim, int) and dim != k for dim, k in kernel):
            return reject(scope, site.root, "shape of the weights", list(shape), f"kernel_shape {list(conv.kernel_shape)}")
        pool = None if isinstance(before, UpsampleSpec) else before
        direct = Lowered("direct", None if pool is None or pool.is_idle else pool, conv)
        box = None if pool is None else geometry.pool_last(pool, conv)
        plan = LowerPlan(scope, (site.root,), parts, before, conv, direct, scope.weights(node.input[1]), box)
        return _with_macs(plan) if context.options.lowering == "direct" else _with_fused(plan, context.options.lowering)

    def apply(self, plan: LowerPlan, edit: Edit) -> None:
        _Writer(plan, edit).run()
        edit.replace(plan.node, plan.own)

    def rewritten(self, plan: LowerPlan, outputs: list[str], times: dict[str, float] | None, log: Log) -> None:
        found, fallback = plan.lowering, plan.fallback.why if plan.fallback else None
        values = {"macs_before": found.macs_before, "macs_after": found.macs_after, "fallback": fallback}
        name = label(plan.scope.nodes[plan.node])
        log.rewritten(self.site_report(plan.scope, PATTERN, found.name, conv=name, **values), None)

    def kept(self, site: Site, why: Reject, times: dict[str, float] | None, log: Log) -> None:
        log.kept(self.site_report(site.scope, PATTERN, None, conv=label(site.scope.nodes[site.root]), **reason_fields(why)))


def _layer(plan: LowerPlan, conv: ConvSpec) -> Layer:
    """The node's convolution, or the one that the pooling follows, as the algebra sees it."""
    known = tuple(dim for dim in plan.scope.info(plan.scope.nodes[plan.node].input[1]).shape or () if isinstance(dim, int))
    channels = (known[0], known[-1]) if len(known) == conv.rank + 2 else (64, 64)
    x_last, _ = LAYOUTS[schema.layout_of(plan.scope.nodes[plan.node])]
    size = spatial_size(plan.scope, plan.scope.nodes[plan.node].input[0], conv.rank, first_axis=1 if x_last else 2)
    if size is not None and isinstance(plan.before, UpsampleSpec):
        size = plan.before.output_size(size)
    return Layer(conv, (*channels, *conv.kernel_shape), size, plan.weight is not None)


def _with_fused(plan: LowerPlan, request: str) -> LowerPlan:
    """The plan with one Conv where that is exact and pays, for auto by cost; else with AveragePool and Conv, and why."""
    if plan.lowering.pool is None:
        return _with_macs(plan)  # nothing to average
    counted = plan.scope.opset < schema.POOL_DILATIONS_OPSET or not geometry.miscounts(plan.lowering.pool.pads)
    found = _fused(plan, by_cost=request == "auto" and counted)
    if isinstance(found, Lowered):
        return _with_macs(replace(plan, lowering=found))
    return replace(_with_macs(plan), fallback=rejection(plan.scope, plan.node, found) if request == "fused" else None)


def _fused(plan: LowerPlan, by_cost: bool) -> Lowered | Refusal:
    """The one Conv of a node, or why there is none.  by_cost: it has to take less time than AveragePool and Conv."""
    if plan.box is None:
        return refuse("pads of the convolution", list(plan.conv.pads), "none that the pooling reaches over")
    conv, pool = plan.box
    if (why := against_merged_weights(plan.scope, plan.scope.nodes[plan.node].input[0])) is not None:
        return why
    layer = _layer(plan, conv)
    found = geometry.lower(layer, pool, "fused", Obstacles())
    if isinstance(found, Refusal):
        return found
    assert plan.weight is not None
    half = np.dtype(np.float16)
    if plan.weight.data_type == TensorProto.FLOAT16 and not keeps(plan.weight.array().astype(np.float64) / pool.taps, half):
        return outside("fused weights")
    size = layer.size or geometry.nominal_size(conv, pool)
    fused, direct = (geometry.lowering_cost(item, layer, size, 4) for item in (found, plan.lowering))
    before = geometry.conv_cost(conv, layer.weight_shape, size, 4)
    if fused.macs > ENOUGH * before.macs or by_cost and fused.time >= direct.time:
        return refuse("saves too little as fused", f"{fused.macs:,} multiply-adds", f"at most {ENOUGH:g} of {before.macs:,}")
    return found


def _with_macs(plan: LowerPlan) -> LowerPlan:
    """The plan with its multiply-adds, where sizes are known."""
    layer = _layer(plan, plan.conv)
    if layer.size is None:
        return plan
    pool = plan.before if isinstance(plan.before, PoolSpec) else None
    before = geometry.lowering_cost(Lowered("direct", pool, plan.conv), layer, layer.size, 4).macs
    after = geometry.lowering_cost(plan.lowering, layer, layer.size, 4).macs
    return replace(plan, lowering=replace(plan.lowering, macs_before=before, macs_after=after))


class _Writer:
    """The standard nodes of one plan."""

    def __init__(self, plan: LowerPlan, edit: Edit) -> None:
        self._plan, self._edit = plan, edit
        self._old = plan.scope.nodes[plan.node]

    def run(self) -> None:
        """Make the nodes; the last gives what the operator's node gave."""
        parts, names = self._plan.parts, dict(zip(self._plan.parts.inputs, self._old.input, strict=False))
        x_last, y_last = LAYOUTS[schema.layout_of(self._old)]
        rank = self._plan.conv.rank
        x = self._permute(names["X"], x_last, to_channels_first(rank))
        if parts.normalized:
            x = self._normalized(x, names["shift"])
        if parts.modulated:
            x = self._add("Add", [self._add("Mul", [x, names["scale"]], "product"), names["shift"]], "scaled")
        elif parts.affine:
            x = self._affine(x, names["scale"], names["shift"])
        x = self._activation(parts.prologue, x, "activated", parts.prologue_alpha)
        if (pool := self._plan.lowering.pool) is not None:
            windows = asdict(pool)
            if all(d == 1 for d in pool.dilations):
                del windows["dilations"]
            x = self._add("AveragePool", [x], "pooled", count_include_pad=1, **windows)
        if isinstance(up := self._plan.before, UpsampleSpec):
            scales, name = np.array(schema.scales_of(up), np.float32), f"{self._old.output[0]}_scales"
            name = self._edit.common(("scales", *up.factors), lambda: scales, name)
            x = self._add("Resize", [x, "", name], "upsampled", **schema.NEAREST)
        inputs = [x, self._weight(), *((names["B"],) if names.get("B") else ())]
        y = self._add("Conv", inputs, "convolved", **asdict(self._plan.lowering.conv))
        stand_for(self._edit.nodes[-1], self._old)
        if parts.residual:
            y = self._add("Add", [y, self._permute(names["R"], y_last, to_channels_first(rank))], "sum")
        y = self._activation(parts.epilogue, y, "result", parts.epilogue_alpha)
        self._permute(y, y_last, to_channels_last(rank))
        self._edit.nodes[-1].output[0] = self._old.output[0]

    def _permute(self, name: str, permuted: bool, perm: list[int]) -> str:
        return self._add("Transpose", [name], "permuted", perm=perm) if permuted else name

    def _add(self, op_type: str, inputs: list[str], what: str, **values: Any) -> str:
        return self._edit.add(op_type, inputs, f"{self._old.output[0]}_{what}", **values)

    def _activation(self, name: str, x: str, what: str, alpha: float) -> str:
        """The result of an activation of the operator; x for none."""
        if name == "Silu":
            return self._add("Mul", [x, self._add("Sigmoid", [x], "gate")], what)
        values = {"alpha": alpha} if name == "LeakyRelu" else {}
        return self._add(name, [x], what, **values) if name else x

    def _normalized(self, x: str, shift: str) -> str:
        """Write mean 0 and variance 1 in groups of channels like the operator's function; shift tells the type."""
        groups, dtype = self._plan.parts.norm_groups, helper.tensor_dtype_to_np_dtype(self._plan.scope.info(shift).elem_type)
        shape = self._edit.common(("groups", groups), lambda: np.array([0, groups, -1]), f"{self._old.output[0]}_groups")
        ones = self._edit.common(("ones", dtype, groups), lambda: np.ones(groups, dtype), f"{shift}_ones")
        zeros = self._edit.common(("zeros", dtype, groups), lambda: np.zeros(groups, dtype), f"{shift}_zeros")
        inputs = [self._add("Reshape", [x, shape], "grouped"), ones, zeros]
        normal = self._add("InstanceNormalization", inputs, "normal", epsilon=self._plan.parts.epsilon)
        return self._add("Reshape", [normal, self._add("Shape", [x], "shape")], "normalized")

    def _affine(self, x: str, scale: str, shift: str) -> str:
        """Write the map like the operator's function: a BatchNormalization, mean 0, variance 1."""
        info = self._plan.scope.info(shift)
        assert info.shape is not None and isinstance(info.shape[0], int)
        count, dtype = info.shape[0], helper.tensor_dtype_to_np_dtype(info.elem_type)
        mean = self._edit.common(("mean", dtype, count), lambda: np.zeros(count, dtype), f"{shift}_mean")
        variance = self._edit.common(("variance", dtype, count), lambda: np.ones(count, dtype), f"{shift}_variance")
        return self._add("BatchNormalization", [x, scale, shift, mean, variance], "scaled", epsilon=0.0)

    def _weight(self) -> str:
        """Weights [M, C/group, kernel...]: a constant, or a Transpose of computed ones."""
        plan, name = self._plan, self._old.input[1]
        if plan.weight is None:
            return self._add("Transpose", [name], "weight", perm=to_channels_first(plan.conv.rank))
        weight = plan.weight
        if plan.lowering.name != "fused":
            return self._edit.common((name,), lambda: np.moveaxis(weight.array(), -1, 1), f"{name}_channels_first")
        assert plan.box is not None
        box, dtype = plan.box, helper.tensor_dtype_to_np_dtype(weight.data_type)
        return self._edit.common(
            (name, plan.conv, plan.before),
            lambda: geometry.fuse_kernel(np.moveaxis(weight.array(), -1, 1), *box).astype(dtype),
            f"{name}_fused",
        )

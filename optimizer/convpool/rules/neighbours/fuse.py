# SPDX-License-Identifier: Apache-2.0
"""Fuse nodes before and behind a ConvAvgPool node, as a fused variant (`convpool.ir.schema`).

    x - BatchNormalization - Relu - ConvAvgPool - Add - Relu        x - AffineReluConvAvgPoolAddRelu
                                              r --+                 r --+

The epilogue: maps per channel, a residual, an activation.  Towards the output: (1) only the next node reads the result; (2)
linear nodes with constants per channel are folded into weights and bias; with a residual already fused, into those of the
convolution that gives it too; (3) an Add or Sum of two fuses with the other operand as the residual, if it provably has the
same shape: nothing is broadcast; of two ConvAvgPool nodes that meet in it, the one with more taps fuses it, since the other is
bound by memory; (4) then at most one Relu, LeakyRelu, Tanh, Sigmoid or SiLU, which is a Sigmoid and a Mul that alone read it.

The prologue: maps per channel, then an activation.  Towards the input: (1) at most one Relu, LeakyRelu or SiLU; (2) before it any
number of linear nodes (`rules.linear`) with constants, one per channel or one for all, that neither raise the rank nor widen
the channels; (3) only the node reads what they give, or nodes that all fuse with them: then each of them recomputes it as it
loads, and it is never written; (4) no layer before fuses with them already: behind a convolution or matrix product that nothing
else reads, every runtime does them for free; (5) in front of a plain convolution (`rules.offloaded`) an activation only, of
what no linear node or Add gives: the plugin's kernels for those would do a map in a pass of its own, and runtimes fuse the
activation with what stays; (6) in front of it neither a SiLU, nor an Add behind a Mul by computed tensors [N, C, 1...], as of
conditional and adaptive normalization: a pass of their own too.  `plain_prologues` of the options lifts (5) and
(6), and so does, with the rule "norm_conv", an InstanceNormalization before: TensorRT has the channels first there, and the pass
moves them too.  Linear nodes with constants before such a Mul change its factor and the Add's summand.  (7) Last
of all a normalization of each image in groups of channels, with constant scale and bias, where "norm_conv" or `plain_prologues`
is on and no computed tensors stand behind it: the node's kernels read the map once more for its statistics, and write nothing.

The residual cannot depend on the node: only the Add reads the node's result, so that would be a cycle.  Zero padding stays exact,
since it comes after the prologue; folding a shift in front of a padded convolution into its bias would not be.  Each step removes
a pass over a tensor (`saved_bytes`) and adds none, so the cost only falls; onnxruntime inlines the function."""

import math
from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from onnx import NodeProto, helper

from convpool.algebra.geometry import COMPUTED
from convpool.algebra.parts import EPILOGUES, IDENTITY, PROLOGUES, Affine, Parts, fold, holds, keeps, outside
from convpool.ir import schema
from convpool.ir.edit import Edit
from convpool.ir.index import Dim, Scope
from convpool.ir.protos import attributes, is_op, known_attributes, label, named
from convpool.options import IMAGE_CHANNELS
from convpool.report import Log
from convpool.rules.base import EXCLUDED, Context, Plan, Reject, Rule, Site, reject, rejection
from convpool.rules.linear import Step, is_map, step_or_reject
from convpool.rules.neighbours import patterns
from convpool.rules.sizes import same_size


@dataclass(frozen=True)
class Weights:
    """New constants for a node: weights as the node stores them, and bias [M].  copies: how many weights a kernel adds up."""

    node: int
    weight: np.ndarray
    bias: np.ndarray
    copies: int = 1


@dataclass(frozen=True)
class FusionPlan(Plan):
    """A node of the operator, what it becomes, and what goes into it.

    channels: M and C.  elem_type: the weights' TensorProto.DataType, else X's.
    upstream: nodes that go where nothing else reads what they give; downstream: nodes that go.  affine, modulation: of the
    prologue.  weights: of the node, scaled: of the convolution that gives the residual; None where they stay.
    """

    node: int
    channels: tuple[int, int]
    elem_type: int
    parts: Parts
    x: str
    output: str
    affine: Affine | None = None
    modulation: patterns.Modulation | None = None
    residual: str | None = None
    upstream: tuple[int, ...] = ()
    downstream: tuple[int, ...] = ()
    weights: Weights | None = None
    scaled: Weights | None = None
    saved_bytes: int | None = None

    @property
    def own(self) -> frozenset[int]:
        """The node, what goes behind it, and the convolution whose weights change."""
        return frozenset((self.node, *self.downstream, *([self.scaled.node] if self.scaled else [])))

    @property
    def shared(self) -> frozenset[int]:
        return frozenset(self.upstream)

    @property
    def operator_version(self) -> int:
        return schema.version_of(self.parts)


@dataclass
class Draft:
    """One node's plan in the making, and why it grows no further."""

    plan: FusionPlan
    rank: int
    context: Context
    rejects: list[Reject] = field(default_factory=list)


class FusionRule(Rule):
    """A rule whose plans are FusionPlans."""

    needs = schema.OP_TYPES

    def sites(self, scope: Scope, context: Context) -> Iterator[Site]:
        """The operator's nodes but those with channels last: their neighbours are no longer the model's own."""
        for index, node in enumerate(scope.nodes):
            if schema.is_operator(node) and not schema.layout_of(node):
                yield Site(scope, index)

    @abstractmethod
    def grow(self, draft: Draft) -> None:
        """Fuse all that can be, into the plan of `draft`."""

    def check(self, site: Site, context: Context) -> FusionPlan | Reject | None:
        """Plan what the node fuses, or say why it fuses nothing; None if no node is there.  Raises AttributeReference."""
        scope, index = site.scope, site.root
        node = scope.nodes[index]
        values, weights = attributes(node), scope.info(node.input[1])
        kind, channels = weights.elem_type or scope.info(node.input[0]).elem_type, channels_of(weights.shape, values)
        if channels is None or not kind:
            return reject(scope, index, "type or shape of the weights", "unknown", "known ones")
        parts = schema.parts_of(node)
        residual = node.input[-1] if parts.residual else None
        plan = FusionPlan(scope, index, channels, kind, parts, node.input[0], node.output[0], residual=residual)
        draft = Draft(plan, len(values["kernel_shape"]), context)
        self.grow(draft)
        if draft.plan.upstream or draft.plan.downstream:
            return replace(draft.plan, saved_bytes=_saved_bytes(draft.plan))
        return replace(draft.rejects[0], others=tuple(draft.rejects[1:])) if draft.rejects else None

    def apply(self, plan: FusionPlan, edit: Edit) -> None:
        """Put the fused node where the last of those stood that it replaces."""
        _fused_node(plan, edit)
        edit.replace(max((plan.node, *plan.downstream)), {plan.node, *plan.downstream})
        if plan.scaled is not None:
            _scaled_node(plan.scaled, edit)
            edit.replace(plan.scaled.node, {plan.scaled.node})
        edit.drop_unread(plan.upstream)

    def rewritten(self, plan: FusionPlan, outputs: list[str], times: dict[str, float] | None, log: Log) -> None:
        node = plan.scope.nodes[plan.node]
        name, operator = label(node), plan.parts.op_type
        found = self.site_report(plan.scope, "conv_avg_pool", "convavgpool", conv=name, pool=name, operator=operator)
        before, behind = (list(map(named, map(plan.scope.nodes.__getitem__, i))) for i in (plan.upstream[::-1], plan.downstream))
        log.fused(found, node.output[0], plan.output, before, behind, plan.saved_bytes)

    def kept(self, site: Site, why: Reject, times: dict[str, float] | None, log: Log) -> None:
        """Add the reasons why nodes beside it stay to the report of the node."""
        if why is not EXCLUDED:
            log.beside(site.scope.path, site.scope.nodes[site.root].output[0], (why, *why.others))


def map_step(scope: Scope, index: int, rank: int) -> Step | Reject | None:
    """The node as a linear map, None where it joins two tensors."""
    return None if is_op(scope.nodes[index], "Sum") else step_or_reject(scope, index, rank)


def slope(scope: Scope, index: int) -> float | None:
    """An activation's slope below 0 as the operator has it; None where it is an attribute of a function around it."""
    values = known_attributes(scope.nodes[index])
    if values is None:
        return None
    return float(values.get("alpha", np.float32(0.01))) if is_op(scope.nodes[index], "LeakyRelu") else 0.0


def channels_of(shape: tuple[Dim, ...] | None, values: Mapping[str, Any]) -> tuple[int, int] | None:
    """(M, C) of a node of the operator by its weights' shape and its attributes; None where they are unknown."""
    known = [dim for dim in shape or () if isinstance(dim, int)]
    return (known[0], known[-1] * int(values.get("group", 1))) if known and len(known) == len(shape or ()) else None


def _saved_bytes(plan: FusionPlan) -> int | None:
    """Bytes that are no longer written and read again, per sample where the batch is open; None if sizes are unknown."""
    scope, total = plan.scope, 0
    item = helper.tensor_dtype_to_np_dtype(plan.elem_type).itemsize
    names = [scope.nodes[i].output[0] for i in plan.upstream if not is_op(scope.nodes[i], "Reshape", "Shape")]
    names += [scope.nodes[plan.node].output[0], *(scope.nodes[i].output[0] for i in plan.downstream)][: len(plan.downstream)]
    for shape in [info.shape for info in map(scope.info, names)]:
        if shape is None or not all(isinstance(dim, int) for dim in shape[1:]):
            return None
        total += 2 * item * math.prod(dim if isinstance(dim, int) else 1 for dim in shape)
    return total


def _fused_node(plan: FusionPlan, edit: Edit) -> None:
    """Make the node of `plan` as it becomes, and the constants that it needs."""
    scope, parts = plan.scope, plan.parts
    node = deepcopy(scope.nodes[plan.node])
    given = dict(zip(schema.parts_of(node).inputs, node.input, strict=False))
    given["X"], stem = plan.x, node.output[0]
    dtype = helper.tensor_dtype_to_np_dtype(plan.elem_type)

    def constant(key: tuple, array: np.ndarray, wanted: str) -> str:
        return edit.common(key, partial(np.asarray, array, dtype), wanted)

    if plan.weights is not None:
        new, old = plan.weights, given.get("B", "")
        given["W"] = constant(("W", plan.node), new.weight, f"{given['W']}_scaled")
        if old or new.bias.any():
            given["B"] = constant(("B", plan.node), new.bias, f"{old or stem + '_bias'}_scaled")
    m, channels = plan.channels
    if (found := plan.modulation) is not None:
        given["scale"], given["shift"] = found.factor, found.summand
        if found.affine is not IDENTITY:  # a map by constants, which comes first
            shape, maps = (1, channels, *(1,) * len(attributes(node)["kernel_shape"])), vars(found.affine)
            columns = {what: np.broadcast_to(maps[what], (channels,)).reshape(shape) for what in ("scale", "shift")}
            names = [constant((what, stem), column, f"{stem}_{what}_column") for what, column in columns.items()]
            given["scale"] = edit.add("Mul", [found.factor, names[0]], f"{stem}_factor")
            product = edit.add("Mul", [found.factor, names[1]], f"{stem}_product")
            given["shift"] = edit.add("Add", [product, found.summand], f"{stem}_shift")
    elif plan.affine is not None:
        scale, shift = (np.broadcast_to(values, (channels,)) for values in (plan.affine.scale, plan.affine.shift))
        given["scale"] = constant(("scale", plan.node), scale, f"{stem}_factor")
        given["shift"] = constant(("shift", plan.node), shift, f"{stem}_shift")
    if plan.residual is not None:
        given["R"] = plan.residual
    if not parts.is_plain and not given.get("B"):
        given["B"] = constant(("zeros", plan.elem_type, m), np.zeros(m), f"{stem}_bias")
    schema.give_parts(node, parts)
    node.input[:] = [given[name] for name in parts.inputs if name != "B" or given.get("B")]
    node.output[0] = plan.output
    edit.nodes.append(node)


def _scaled_node(weights: Weights, edit: Edit) -> None:
    """Make a convolution with other weights and bias."""
    before = edit.scope.nodes[weights.node]
    node = deepcopy(before)
    old = node.input[2] if len(node.input) > 2 else ""
    del node.input[2:]
    node.input[1] = edit.common(("W", weights.node), lambda: weights.weight, f"{node.input[1]}_scaled")
    if old or weights.bias.any():
        node.input.append(edit.common(("B", weights.node), lambda: weights.bias, f"{old or node.output[0] + '_bias'}_scaled"))
    node.input.extend(before.input[3:])
    edit.nodes.append(node)


class FuseEpilogue(FusionRule):
    """The rule that fuses the nodes behind a node of the operator."""

    names = ("fuse_epilogue",)

    def grow(self, draft: Draft) -> None:
        current: FusionPlan | None = draft.plan
        while current is not None:
            if current.parts != draft.plan.parts or current.weights is not draft.plan.weights:
                draft.plan = current  # only an Identity is not worth a change
            current = _behind(draft, current)


def _behind(draft: Draft, plan: FusionPlan) -> FusionPlan | None:
    """The plan with one more node behind; None where there is none that can be fused."""
    scope, parts = plan.scope, plan.parts
    silu = None if draft.context.options.for_torch or parts.epilogue else patterns.silu_behind(scope, plan.output)
    if silu is not None:
        y = scope.nodes[silu[1]].output[0]
        return replace(plan, output=y, downstream=(*plan.downstream, *silu), parts=replace(parts, epilogue="Silu"))
    readers = scope.readers.get(plan.output, [])
    fitting = (i for i in readers if is_op(scope.nodes[i], "Sum", *EPILOGUES) or is_map(scope, i))
    reader = None if parts.epilogue else next(fitting, None)
    if reader is None:
        return None
    node = scope.nodes[reader]
    others = scope.other_readers(plan.output)
    if others is not None:
        condition = f"result '{plan.output}' {others}"
        draft.rejects.append(reject(scope, plan.node, condition, "other readers", f"only {node.op_type}"))
        return None
    taken = replace(plan, output=node.output[0], downstream=(*plan.downstream, reader))
    if is_op(node, *EPILOGUES):
        alpha = slope(scope, reader)
        return None if alpha is None else replace(taken, parts=replace(parts, epilogue=node.op_type, epilogue_alpha=alpha))
    step = map_step(scope, reader, draft.rank)
    if isinstance(step, Step) and step.affine is not None and node.input[step.operand] == plan.output:
        result: FusionPlan | Reject | None = _fold(draft, taken, step)
    elif is_op(node, "Add", "Sum"):
        result = _residual(draft, plan, taken)
    elif isinstance(step, Reject):
        result = step
    else:
        result = reject(scope, reader, "constant operands", "computed ones", "constants per channel")
    if isinstance(result, Reject):
        draft.rejects.append(result)
        return None
    return result


def _fold(draft: Draft, plan: FusionPlan, step: Step) -> FusionPlan | Reject:
    """Condition (2): `step` behind the node, in its weights."""
    scope = plan.scope
    if step.affine is IDENTITY:
        return plan
    assert step.affine is not None
    m, _ = plan.channels
    if not step.affine.fits(m):
        return reject(scope, step.node, "channels", "constants that widen them", f"{m} or 1")
    weights = plan.weights or _weights(scope, plan.node)
    if weights is None:
        return reject(scope, plan.node, "weights", COMPUTED, "constants")
    own, other = _scaled(weights, step.affine), plan.scaled
    if plan.parts.residual and (step.affine.scale != 1).any():
        source = scope.producer.get(plan.residual or "")
        giver = plan.scaled or (_weights(scope, source) if source is not None and _is_bare(draft, source) else None)
        if giver is None:
            got, expected = "one that its convolution cannot fold", "a convolution with constant weights that nothing else reads"
            return reject(scope, step.node, "map behind a residual", got, expected)
        other = _scaled(giver, Affine(step.affine.scale, np.array(0.0)))
        if other is None:
            own = None
    if own is None:
        return rejection(scope, step.node, outside("constants folded into weights"))
    return replace(plan, weights=own, scaled=other)


def _residual(draft: Draft, plan: FusionPlan, taken: FusionPlan) -> FusionPlan | Reject | None:
    """Condition (3): the other operand of the Add."""
    scope, reader = plan.scope, taken.downstream[-1]
    node = scope.nodes[reader]
    if len(node.input) != 2:
        return reject(scope, reader, "operands", len(node.input), 2)
    if plan.parts.residual:
        return reject(scope, reader, "residual", "a second one", "one")
    other = node.input[1] if node.input[0] == plan.output else node.input[0]
    if not same_size(scope, (plan.output, other), draft.rank, 0):
        shapes = [scope.info(name).shape for name in (plan.output, other)]
        got, expected = (list(shape) if shape is not None else "unknown" for shape in reversed(shapes))
        return reject(scope, reader, "shape of the residual", got, f"provably the result's, {expected}")
    rival = scope.producer.get(other)
    if rival is not None and schema.is_operator(scope.nodes[rival]) and _is_bare(draft, rival):
        if (_work(scope, rival), rival) > (_work(scope, plan.node), plan.node):
            return None
    reading = [scope.nodes[index] for index in scope.readers.get(taken.output, ())]
    if any(schema.is_operator(item) and schema.parts_of(item).affine and taken.output in item.input[3:5] for item in reading):
        return None  # an Add that a prologue made, of a number for each image and channel
    return replace(taken, residual=other, parts=replace(plan.parts, residual=True))


def _is_bare(draft: Draft, index: int) -> bool:
    """Return True if a convolution may change, with nothing fused behind it and one reader."""
    scope, node = draft.plan.scope, draft.plan.scope.nodes[index]
    if scope.other_readers(node.output[0]) is not None or draft.context.excluded(label(node)):
        return False
    parts = schema.parts_of(node) if schema.is_operator(node) else None
    return is_op(node, "Conv") if parts is None else not (parts.epilogue or parts.residual or schema.layout_of(node))


def _weights(scope: Scope, index: int) -> Weights | None:
    """The constant weights and bias (zeros if there is none) of a Conv or a node of the operator."""
    node = scope.nodes[index]
    weight = scope.weights(node.input[1])
    has_bias = len(node.input) > 2 and bool(node.input[2])
    bias = scope.constant(node.input[2]) if has_bias else None
    if weight is None or (has_bias and bias is None):
        return None
    array = weight.array()
    copies = math.prod((known_attributes(node) or {}).get(schema.UPSAMPLE, ()))
    return Weights(index, array, bias.array() if bias else np.zeros(array.shape[0], array.dtype), copies)


def _scaled(weights: Weights, affine: Affine) -> Weights | None:
    """The affine map behind the convolution, folded in; None if the type cannot hold the result to its precision."""
    dtype = weights.weight.dtype
    with np.errstate(over="ignore", invalid="ignore"):
        weight, bias = fold(weights.weight, weights.bias, affine)
        assert bias is not None
        if not keeps(weight * weights.copies, dtype) or not holds(bias, dtype):
            return None
        return replace(weights, weight=weight.astype(dtype), bias=bias.astype(dtype))


def _work(scope: Scope, index: int) -> int:
    """Multiply-adds per output position."""
    shape = scope.info(scope.nodes[index].input[1]).shape
    return math.prod(dim for dim in shape[1:] if isinstance(dim, int)) if shape else 0


class FusePrologue(FusionRule):
    """The rule that fuses the nodes in front of a node of the operator."""

    names = ("fuse_prologue",)

    def grow(self, draft: Draft) -> None:
        plan, scope, options = draft.plan, draft.plan.scope, draft.context.options
        if patterns.has_prologue(scope, plan.node):
            return
        normal = "norm_conv" in options.rules and patterns.normalizes(scope, plan.x, draft.rank)
        lifted = options.plain_prologues or normal
        plain = not lifted and _is_plain(scope.nodes[plan.node], plan.channels[1])
        if plain and not patterns.only_an_activation(scope, plan.x):
            producer = scope.producer.get(plan.x)
            if producer is not None and patterns.may_fuse(scope, producer):
                got = "other elementwise nodes in front of a convolution without a pooling"
                draft.rejects.append(reject(scope, producer, "prologue", got, "only an activation"))
            return
        x, parts, affine = plan.x, plan.parts, IDENTITY
        upstream: list[int] = []
        mapped, modulation = False, None
        may_have_pass = not options.for_torch and not plain  # condition (6); a pooling and an upsampling have a pass already
        while (index := scope.producer.get(x)) is not None:
            node = scope.nodes[index]
            if not patterns.may_fuse(scope, index):
                break
            if not _all_fuse(scope, x, plan.node, upstream, draft.context):
                others = f"output '{x}' {scope.other_readers(x)}"
                draft.rejects.append(reject(scope, index, others, "other readers", "only the convolution"))
                break
            silu = patterns.silu_of(scope, index) if may_have_pass else None
            modulated = patterns.modulated_by(scope, index, draft.rank, plan.channels[1]) if may_have_pass else None
            if silu is not None:
                if parts.prologue or mapped:
                    break
                parts, x = replace(parts, prologue="Silu"), silu[1]
            elif modulated is not None:
                if mapped:
                    break
                modulation, x = patterns.Modulation(modulated[1], modulated[2]), modulated[3]
            elif is_op(node, *PROLOGUES):
                alpha = slope(scope, index)
                if alpha is None or parts.prologue or mapped:
                    break
                if not holds(np.asarray(alpha), np.dtype(np.float16)):  # engines compute it in X's type, a float32 model's too
                    draft.rejects.append(reject(scope, index, "slope", f"{alpha:g}", "a number of float16"))
                    break
                parts, x = replace(parts, prologue=node.op_type, prologue_alpha=alpha), node.input[0]
            else:
                step = _fitting(draft, index)
                if isinstance(step, Reject):
                    draft.rejects.append(step)
                    break
                assert step.affine is not None
                if step.affine is not IDENTITY:
                    affine = step.affine if affine is IDENTITY else affine.after(step.affine)
                x = node.input[step.operand]
            upstream += [index, *(found[0] for found in (silu, modulated) if found is not None)]
            mapped = affine is not IDENTITY or modulation is not None
            if mapped or parts.prologue:  # only an Identity is not worth a change
                parts = replace(parts, affine=mapped, modulated=modulation is not None)
                by_image = None if modulation is None else replace(modulation, affine=affine)
                found = affine if mapped else None
                draft.plan = replace(plan, x=x, affine=found, modulation=by_image, parts=parts, upstream=(*upstream,))
        _end_prologue(draft, plan, may_have_pass)


def _normalize(draft: Draft) -> None:
    """Condition (7): what gives the X of the plan, where all that reads it fuses it."""
    plan, scope, options = draft.plan, draft.plan.scope, draft.context.options
    wanted = "norm_conv" in options.rules or options.plain_prologues
    if not wanted or plan.modulation is not None or scope.opset < schema.NORMALIZING_OPSET:
        return
    found = patterns.normalization_of(scope, plan.x, draft.rank, plan.channels[1])
    if found is None or not _all_fuse(scope, plan.x, plan.node, plan.upstream, draft.context):
        return
    affine = found.affine if plan.affine is None else plan.affine.after(found.affine)
    parts = replace(plan.parts, affine=True, normalized=True, norm_groups=found.groups, epsilon=found.epsilon)
    draft.plan = replace(plan, x=found.x, affine=affine, parts=parts, upstream=(*plan.upstream, *found.nodes))


def _end_prologue(draft: Draft, before: FusionPlan, may_have_pass: bool) -> None:
    """Condition (7), then back to the plan before where condition (4) fails or the type has not the numbers.

    may_have_pass: the node may have a pass of its own in front."""
    if may_have_pass:
        _normalize(draft)
    scope, plan = before.scope, draft.plan
    free = plan.upstream and plan.modulation is None and not plan.parts.normalized
    host = patterns.host_of(scope, plan.x) if free else None
    if host is not None:
        got = f"{named(scope.nodes[host])} before it, which fuses it"
        draft.rejects.append(reject(scope, plan.upstream[0], "prologue", got, "a tensor that stays as it is"))
        draft.plan = before
    elif plan.affine is not None and not _representable(before, plan.affine):
        draft.rejects.append(rejection(scope, plan.upstream[0], outside("scale and shift")))
        draft.plan = before


def _fitting(draft: Draft, index: int) -> Step | Reject:
    """Node `index` in front of the chain as a map per channel of a tensor of the same shape; condition (2)."""
    scope, rank = draft.plan.scope, draft.rank
    node = scope.nodes[index]
    step = map_step(scope, index, rank)
    if isinstance(step, Reject):
        return step
    if step is None or step.affine is None:
        return reject(scope, index, "constant operands", "computed ones", "constants per channel")
    if step.affine is IDENTITY:
        return step
    channels = draft.plan.channels
    sizes = {step.affine.scale.size, step.affine.shift.size}
    if is_op(node, "BatchNormalization"):
        return step if sizes == {channels[1]} else reject(scope, index, "parameters", sizes, f"{channels[1]} of each")
    shape = scope.info(node.input[step.operand]).shape
    if shape is None or len(shape) != rank + 2:
        return reject(scope, index, "rank", "unknown" if shape is None else len(shape), rank + 2)
    if sizes != {1} and (shape[1] != channels[1] or not sizes <= {1, channels[1]}):
        return reject(scope, index, "channels", shape[1], f"{channels[1]}, not widened")
    return step


def _all_fuse(scope: Scope, x: str, node: int, chain: Collection[int], context: Context) -> bool:
    """Return True if all readers of `x` fuse it: this chain, or nodes without a prologue yet."""
    if chain:
        return not scope.read_outside(x, chain)
    readers = scope.readers.get(x, [])
    return not scope.read_outside(x, readers) and all(
        schema.is_operator(scope.nodes[i])
        and scope.nodes[i].input[0] == x
        and x not in scope.nodes[i].input[1:]
        and (i == node or not context.excluded(label(scope.nodes[i])) and _may_have_prologue(scope, i, x, context))
        for i in readers
    )


def _is_plain(node: NodeProto, channels: int) -> bool:
    """Return True if a node with so many input channels is a plain convolution of any run.  Raises AttributeReference."""
    window = attributes(node).get("pool_kernel_shape")
    return channels > IMAGE_CHANNELS and window is not None and all(k == 1 for k in window)


def _may_have_prologue(scope: Scope, index: int, x: str, context: Context) -> bool:
    node = scope.nodes[index]
    values = known_attributes(node)
    if values is None or patterns.has_prologue(scope, index) or schema.layout_of(node):
        return False
    channels = channels_of(scope.info(node.input[1]).shape, values)
    free = context.options.plain_prologues or channels is None or not _is_plain(node, channels[1])
    return free or patterns.only_an_activation(scope, x)


def _representable(plan: FusionPlan, affine: Affine) -> bool:
    """Return True if the type has scale and shift; channels are added up within a group."""
    dtype = helper.tensor_dtype_to_np_dtype(plan.elem_type)
    group = int(attributes(plan.scope.nodes[plan.node]).get("group", 1))
    scale = np.broadcast_to(affine.scale, (plan.channels[1],)).reshape(group, -1)
    return keeps(scale, dtype) and holds(affine.shift, dtype)

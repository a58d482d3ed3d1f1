# SPDX-License-Identifier: Apache-2.0
"""Nearest upsampling, then a convolution: compute it on the small map.

    x - Resize - (nodes that act on each element) - Conv        x - (the same nodes) - ConvTranspose, or another form

Conditions of `UpsampleLast`, in their order: (1) no attribute refers to a function's; (2) an upsampling by whole factors is in
front, with nothing between but what `resampling.maps` lists, and Pads of zeros, or of the border's elements where a factor covers
them; (3) strides of 1; (4) dilations of 1, or multiples of the factor; (5) no result reads padding alone; (6) what is upsampled
is one map, or the convolution has one group, constant weights, and can be split by its input channels; (7) weights are constants,
unless the convolution is moved as it is; (8) it takes at most 95% of the time by the cost model.

Cost: `algebra.expand`, fitted in onnxruntime on a CPU; on GPUs what was measured.  `emit.MovingRule` writes for targets with the
plugin a node of UpsampleConv, where `_against_operator` has no reason; else the form that `algebra.expand` describes, a sum where
the convolution was split.  A BatchNormalization behind it is folded first, and an activation goes in front of DepthToSpace.
Where whole factors are only likely, as beside a skip of open size, an If takes the form or Resize and Conv (`upsample_if`).

Any enlarging resampling, then a 1x1 convolution: the convolution goes in front.  And the mirror image.

    x - Resize - Conv 1x1                       x - Conv 1x1 - Resize
    x - Resize - Concat - Conv 1x1              x - Conv 1x1 - Resize - Add
             y -                                         y - Conv 1x1 -

    x - Conv 1x1 - Resize to fewer elements     x - Resize - Conv 1x1

A 1x1 convolution acts on each position alike, and the weights of each position of a resampling add up to one: so the bias moves
too.  Conditions of `ResizeLast`: (1) no attribute refers to a function's; (2) strides of 1, no pads; (3) a resampling that
`resampling.resize` takes is in front, through what `resampling.maps` lists, and enlarges; (4) it is one map, or the convolution
has one group, constant weights, and is split by its input channels; (5) its constants are finite, if it moves in front of an
interpolation, which multiplies by 0 too; (6) it takes at most 95% of the time by the cost model.  Of `ResizeFirst`: (1), (2),
(5), and (6) on a CPU; (3) only the Resize reads the convolution, and makes its result smaller; (7) on a GPU no more numbers are
written than before: the channels that are resized are those of its input then.
"""

import math
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, replace

import numpy as np
from onnx import TensorProto

from convpool.algebra.expand import FORMS, dense_cost
from convpool.algebra.geometry import COMPUTED, NOMINAL_SIZE, Ints
from convpool.algebra.parts import MAX_UPSAMPLE
from convpool.ir.edit import Edit
from convpool.ir.index import Scope
from convpool.ir.protos import attributes, is_op, stand_for
from convpool.ir.schema import UPSAMPLING_OPSET
from convpool.report import OF_TARGET, Log
from convpool.rules import convs
from convpool.rules.base import Context, NodesPlan, Plan, Reject, reject, rejection
from convpool.rules.linear import pad_numbers
from convpool.rules.resampling import plans
from convpool.rules.resampling.emit import MovingRule, ResamplingEmitter, ResamplingRule
from convpool.rules.resampling.maps import Applied, Map, Part, Walk, inputs_of
from convpool.rules.resampling.resize import Resample, first_apart, recognise


class UpsampleLast(MovingRule):
    """Every convolution, but 1x1 ones, that reads what is upsampled."""

    names = ("upsample_last", "upsample_if")
    has_alternatives = True

    def sites(self, scope: Scope, context: Context) -> Iterator[plans.ResamplingSite]:
        """The convolutions of a scope; in a graph of PyTorch's 1x1 ones too.  None by "upsample_if" alone."""
        for pointwise in (False, True) if context.options.for_torch else (False,):
            yield from plans.resampling_sites(scope, pointwise=pointwise) if context.enabled(self.names[0]) else ()

    def check(self, site: plans.ResamplingSite, context: Context) -> plans.ResamplingPlan | Reject | None:
        found = _without_forms(site, context)
        if not isinstance(found, plans.ResamplingPlan):
            return found
        plan, refused = plans.with_normalization(found), None
        options = context.options
        with_plugin = "cpu" not in options.devices and options.lowering == "convavgpool" and options.upsampling is None
        if with_plugin and not plans.moves_as_it_is(plan) and not plan.assumed:
            refused = _against_operator(plan, context)
            if refused is None:
                return plans.in_one_node(replace(plan, skip_is_node=_skip_is_node(plan, context)), plans.OPERATOR)
        formed = plans.with_forms(plan, context)
        # Where neither saves, the reason of the operator, which is asked for, counts.
        return plans.with_activations(formed) if isinstance(formed, plans.ResamplingPlan) else refused or formed

    def alternatives(self, site: plans.ResamplingSite, context: Context) -> dict[str, Plan]:
        found: dict[str, Plan] = {}
        for form in FORMS:
            plan = self.check(site, replace(context, options=replace(context.options, upsampling=form)))
            if isinstance(plan, plans.ResamplingPlan) and plan.lowering == form:
                found[form] = plan
        return found


def _without_forms(site: plans.ResamplingSite, context: Context) -> plans.ResamplingPlan | Reject | None:
    """The plan without forms: conditions (1) to (7)."""
    scope, leaf = site.scope, convs.conv_leaf(site.scope, site.root)
    if isinstance(leaf, Reject):
        return leaf
    rank = leaf.conv.rank
    name, pads, passed = convs.zero_pads(scope, leaf.input, rank)
    walk = Walk(scope, rank, whole_factors=True, assumes=_assumes(site, context))
    read = walk.map(name)
    if not read.resampled and not any(leaf.conv.pads) and not any(pads):
        edges = _edges(scope, name, rank, walk)
        if isinstance(edges, Reject):
            return edges
        read, pads = edges or (read, pads)  # `passed` is empty
    if not read.resampled:
        return next(iter(walk.rejects), None)
    leaf = convs.padded(leaf, pads)
    conv = leaf.conv
    if any(stride != 1 for stride in conv.strides):
        return reject(scope, site.root, "strides", list(conv.strides), "1 on every axis")
    for up in (item.up for item in read.resampled):
        assert up is not None
        if any(
            k > 1 and s > 1 and d > 1 and d % s for d, s, k in zip(conv.dilations, up.factors, conv.kernel_shape, strict=True)
        ):
            return reject(scope, leaf.node, "dilations", list(conv.dilations), f"1, or multiples of {list(up.factors)}")
    if any(pad >= extent for pad, extent in zip(conv.pads, conv.extents * 2, strict=True)):  # some result reads padding alone
        return reject(scope, site.root, "pads", list(conv.pads), f"less than the kernel's extent, {list(conv.extents)}")
    return plans.planned(site, leaf, read, read.nodes | set(passed), context)


def _assumes(site: plans.ResamplingSite, context: Context) -> bool:
    """Return True if an If may decide between the forms and the original, which is not to become such an If again."""
    around = site.scope
    while around.parent is not None and not is_op(around.parent.nodes[around.owner], "If"):
        around = around.parent
    typed = site.scope.info(site.scope.nodes[site.root].output[0]).elem_type
    return context.enabled("upsample_if") and around.parent is None and bool(typed)


def _edges(scope: Scope, name: str, rank: int, walk: Walk) -> tuple[Map, Ints] | Reject | None:
    """The map behind a Pad that repeats elements of the border, as a Pad of the small map and pads that crop; None for another.

    A border of p elements, all equal to the outermost one, is one of ceil(p / s) elements of the small map; the convolution crops
    the rest.  Mode reflect gives the same for p < s.  It crops more where elements of the upsampled map are missing in front
    (`first_apart`).
    """
    index = scope.made_by(name, "Pad")
    if index is None:
        return None
    numbers = pad_numbers(scope, index, rank)
    mode = attributes(scope.nodes[index]).get("mode", b"constant").decode(errors="replace")
    inner = walk.map(scope.nodes[index].input[0])
    missing: Ints = (0,) * rank
    if not inner.resampled and (before := scope.producer.get(scope.nodes[index].input[0])) is not None:
        apart = first_apart(scope, before, rank)
        if apart is not None and mode == "edge":
            whole, missing = apart
            inner = Map((Part(0, convs.channel_count(scope, whole.input), whole.input, whole),), whole.nodes)
    if not inner.resampled:
        return None
    if isinstance(numbers, Reject):
        return numbers
    pads, half = numbers[0], rank + 2
    spatial = (*pads[2:half], *pads[half + 2 :])
    if mode not in ("edge", "reflect"):
        return reject(scope, index, "mode of Pad", f"{mode}, pads {list(spatial)}", "zeros around the map, edge or reflect")
    found = inner.parts[0].resample
    up = found.up if found is not None and not found.assumed else None
    if len(inner.parts) > 1 or up is None or any((*pads[:2], *pads[half : half + 2])) or min(spatial) < 0:
        return reject(scope, index, "Pad", mode, "one of a single upsampled map, on spatial axes")
    factors = up.factors * 2
    if mode == "reflect" and any(p >= s for p, s in zip(spatial, factors, strict=True)):
        return reject(scope, index, "pads of a reflecting Pad", list(spatial), f"less than {list(factors)}")
    spatial = tuple(p - more for p, more in zip(spatial, (*missing, *[0] * rank), strict=True))
    small = tuple(max(-(-p // s), 0) for p, s in zip(spatial, factors, strict=True))
    part = inner.parts[0]
    done = replace(part, source=Applied(index, (part.source,), None, "edges", pads=small))
    return Map((done,), inner.nodes | {index}), tuple(p - s * n for p, s, n in zip(spatial, factors, small, strict=True))


OPERATOR_CHANNELS, OPERATOR_MULTIPLE = 32, 8
"""The fewest input and output channels of a node of UpsampleConv, and what they are multiples of.

On an H100 its kernels are 1.13 to 2.5 times as fast as cuDNN's transposed convolution in fp16 (decision 033)."""


def _against_operator(plan: plans.ResamplingPlan, context: Context) -> Reject | None:
    """The reason why a convolution becomes no node of UpsampleConv.

    The plugin has a fast kernel for one upsampled map of two axes, one group, strides and dilations of 1, and at least
    OPERATOR_CHANNELS channels.  Channels that are not upsampled, as behind a Concat, are convolved apart, and added as the
    residual: that is another pass over the result, for which those of Resize and Concat are gone.
    """
    scope, leaf, conv = plan.scope, plan.leaf, plan.leaf.conv
    resampled = [group for group in plan.groups if group.resample is not None]
    m, c = plans.channels_out(leaf), len(resampled[0].channels)
    apart = sum(len(group.channels) for group in plan.groups) == plans.channels_in(leaf)
    if len(resampled) > 1 or not apart or len(plan.groups) > 1 and c < m:
        got = f"{len(resampled)} of {len(plan.groups)}, {c} to {m} channels"
        expected = f"one, as wide as the result where another map stands beside it, {OF_TARGET}"
        return reject(scope, leaf.node, "upsampled maps", got, expected)
    if leaf.weight is None or not convs.is_known(scope, leaf):
        return reject(scope, leaf.node, "weights", COMPUTED, "a constant")
    if leaf.weight.data_type not in convs.KERNEL_TYPES:
        return reject(scope, leaf.node, "type", TensorProto.DataType.Name(leaf.weight.data_type), "float16, bfloat16 or float32")
    if scope.opset < UPSAMPLING_OPSET:
        return reject(scope, leaf.node, "opset", scope.opset, f"at least {UPSAMPLING_OPSET}, {OF_TARGET}")
    if (found := convs.against_node(scope, conv, context.main_opset)) is not None:
        return rejection(scope, leaf.node, found)
    if conv.rank != convs.RANK:
        return reject(scope, leaf.node, "spatial axes", conv.rank, f"{convs.RANK}, {OF_TARGET}")
    if any(d != 1 for d in conv.dilations) or min(conv.pads) < 0:
        got = f"dilations {list(conv.dilations)}, pads {list(conv.pads)}"
        return reject(scope, leaf.node, "window", got, f"dilations of 1 and no crop, {OF_TARGET}")
    assert resampled[0].resample is not None and resampled[0].resample.up is not None
    up = resampled[0].resample.up
    if max(up.factors) > MAX_UPSAMPLE or not has_fast_kernel(m, c):
        expected = f"factors up to {MAX_UPSAMPLE}, at least {OPERATOR_CHANNELS} channels in multiples of {OPERATOR_MULTIPLE}"
        got = f"factors {list(up.factors)}, {c} to {m} channels"
        return reject(scope, leaf.node, "upsampled map", got, f"{expected}, {OF_TARGET}")
    return None


def has_fast_kernel(*channels: int) -> bool:
    """Return True if the plugin's fast kernels for upsampled maps take so many channels."""
    return not any(n < OPERATOR_CHANNELS or n % OPERATOR_MULTIPLE for n in channels)


def _skip_is_node(plan: plans.ResamplingPlan, context: Context) -> bool:
    """Return True if what stands beside an UpsampleConv is to be a ConvAvgPool: in a chain, with no Pad in front."""
    sources = [source for group in plan.groups if group.resample is None for _, _, found in group.ranges for source in found]
    channels = sum(len(group.channels) for group in plan.groups if group.resample is None)
    if not context.enabled("chain_conv") or channels % OPERATOR_MULTIPLE:
        return False
    return not any(True for source in sources for name in inputs_of(source) for _ in convs.pads_upstream(plan.scope, name))


class ResizeLast(MovingRule):
    """Every 1x1 convolution that reads what is resampled."""

    names = ("resize_last",)

    def sites(self, scope: Scope, context: Context) -> Iterator[plans.ResamplingSite]:
        return plans.resampling_sites(scope, pointwise=True)

    def check(self, site: plans.ResamplingSite, context: Context) -> plans.ResamplingPlan | Reject | None:
        leaf = _pointwise(site.scope, site.root)
        if not isinstance(leaf, convs.ConvLeaf):
            return leaf
        walk = Walk(site.scope, leaf.conv.rank, whole_factors=False)
        read = walk.map(leaf.input)
        if not read.resampled:
            return next(iter(walk.rejects), None)
        picks = all(item.picks for item in read.resampled)
        plan = _infinite(site.scope, leaf, picks=picks) or plans.planned(site, leaf, read, read.nodes, context)
        if isinstance(plan, plans.ResamplingPlan):
            plan = plans.with_forms(plans.with_normalization(plan), context)
        return plans.with_activations(plan) if isinstance(plan, plans.ResamplingPlan) else plan


def _pointwise(scope: Scope, index: int) -> convs.ConvLeaf | Reject:
    """Condition (2)."""
    leaf = convs.conv_leaf(scope, index)
    if isinstance(leaf, Reject):
        return leaf
    if any(stride != 1 for stride in leaf.conv.strides):
        return reject(scope, index, "strides", list(leaf.conv.strides), "1 on every axis")
    return reject(scope, index, "pads", list(leaf.conv.pads), "none") if any(leaf.conv.pads) else leaf


def _infinite(scope: Scope, leaf: convs.ConvLeaf, *, picks: bool) -> Reject | None:
    """Condition (5): a bias of minus infinity, which masks a class, would become NaN.  picks: whether nothing is interpolated."""
    constants = [item.array() for item in (leaf.weight, leaf.bias) if item is not None and not picks]
    if all(np.isfinite(array).all() for array in constants):
        return None
    return reject(scope, leaf.node, "weights and bias", "infinity or NaN", "finite numbers in front of an interpolation")


@dataclass(frozen=True)
class ShrinkPlan(NodesPlan):
    """A convolution that goes behind the resampling that reads it."""

    leaf: convs.ConvLeaf
    resample: Resample
    macs_before: int | None
    macs_after: int | None

    @property
    def convolutions(self) -> tuple[int, ...]:
        return (self.leaf.node,)


class ResizeFirst(ResamplingRule):
    """Every 1x1 convolution whose result is only read to be made smaller."""

    names = ("resize_first",)
    needs = ("Resize", "Upsample")
    pattern = "conv_resize"

    def sites(self, scope: Scope, context: Context) -> Iterator[plans.ResamplingSite]:
        for index, node in enumerate(scope.nodes):
            if is_op(node, "Resize", "Upsample"):
                conv = scope.made_by(node.input[0], "Conv")
                if conv is not None and plans.is_pointwise(scope, conv):
                    yield plans.ResamplingSite(scope, conv, index)

    def check(self, site: plans.ResamplingSite, context: Context) -> ShrinkPlan | Reject | None:
        """A plan if it is exact and saves; None for a Resize that does not make the map smaller."""
        scope = site.scope
        leaf = _pointwise(scope, site.root)
        found = recognise(scope, site.resampler, leaf.conv.rank) if isinstance(leaf, convs.ConvLeaf) else leaf
        if isinstance(found, Reject) or not isinstance(leaf, convs.ConvLeaf):
            return found if isinstance(found, Reject) else None
        assert found is not None
        if found.growth >= 1 or 0 in (scope.info(scope.nodes[site.resampler].output[0]).shape or ()):
            return None
        if (wrong := _infinite(scope, leaf, picks=found.picks)) is not None:
            return wrong
        if (readers := scope.other_readers(found.input)) is not None:
            return reject(scope, site.root, "result of the convolution", readers, "one reader, the Resize")
        size, m, c = leaf.size or (NOMINAL_SIZE,) * leaf.conv.rank, plans.channels_out(leaf), plans.channels_in(leaf)
        dense, elements = dense_cost(leaf.conv, m, c, size), math.prod(size) * found.growth
        before, after = (plans.resize_cost(found, leaf.conv.rank, int(n * elements)) for n in (m, c))
        share = (after + replace(dense, time=dense.time * found.growth)).share_of(before + dense)
        if "cpu" in context.options.devices and share > plans.ENOUGH:
            got = f"{c} channels in place of {m}, {share:.2f} of the time by the cost model"
            return reject(scope, site.root, "resizing the convolution's input", got, f"at most {plans.ENOUGH:.0%} of the time")
        if "gpu" in context.options.devices and c * found.growth > m:
            return reject(scope, site.root, "channels that are resized", c, f"at most {m / found.growth:.0f}, {OF_TARGET}")
        counts = (dense.macs, int(dense.macs * found.growth)) if leaf.size is not None else (None, None)
        return ShrinkPlan(scope, (site.root, site.resampler), leaf, found, *counts)

    def apply(self, plan: ShrinkPlan, edit: Edit) -> None:
        scope, leaf = plan.scope, plan.leaf
        old, resize = scope.nodes[leaf.node], scope.nodes[plan.resample.node]
        emitter = ResamplingEmitter(edit, leaf.conv.rank, resize.output[0], self.names[0])
        small = emitter.resample(old.input[0], plan.resample)
        stand_for(emitter.nodes[-1], resize)
        conv = deepcopy(old)
        conv.input[0], conv.output[0] = small, resize.output[0]
        edit.nodes.append(conv)
        edit.replace(plan.resample.node, plan.own)

    def rewritten(self, plan: ShrinkPlan, outputs: list[str], times: dict[str, float] | None, log: Log) -> None:
        counts = {"macs_before": plan.macs_before, "macs_after": plan.macs_after}
        log.rewritten(self.report(plan.scope, plan.leaf.node, plan.resample.node, "conv_last", **counts), None)

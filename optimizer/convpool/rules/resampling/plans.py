# SPDX-License-Identifier: Apache-2.0
"""The sites and plans of the rules that move a convolution in front of resamplings, and the choice of forms."""

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from onnx import TensorProto, helper

from convpool.algebra import expand
from convpool.algebra.expand import UpsampleSpec, Work
from convpool.algebra.geometry import COMPUTED, NOMINAL_SIZE, Cost, Ints, miscounts, refuse
from convpool.algebra.parts import MAX_UPSAMPLE, holds, keeps, outside
from convpool.ir import schema
from convpool.ir.index import Scope
from convpool.ir.protos import is_op, known_attributes, label
from convpool.report import OF_TARGET
from convpool.rules.base import Context, Plan, Reject, Site, reject, rejection, spatial_size
from convpool.rules.convs import ConvLeaf, against_merged_weights, exact_weights, is_known
from convpool.rules.linear import Step, step_or_reject
from convpool.rules.resampling.maps import Map, Source, count_nodes
from convpool.rules.resampling.resize import Resample, in_float32

RESAMPLING_OPS = ("Resize", "Upsample", "ConvTranspose", "DepthToSpace", "Gather", "GatherND", "Expand", "Tile", "Concat")
"""Operators that a resampling may be spelt with."""
SEARCH_LIMIT = 48
"""Nodes in front of a convolution that the search for a resampling visits at most."""
ACTIVATIONS = (
    "Relu", "LeakyRelu", "Elu", "Clip", "Sigmoid", "Tanh", "HardSigmoid", "HardSwish", "Softplus", "Selu", "Mish", "Gelu",
)  # fmt: skip
"""Operators behind a convolution that go in front of what only moves elements."""
TORCH_NODE = "upsample_conv"
"""The form of PyTorch's graphs: one node of a domain of theirs, with weights of each call."""
GPU_FORMS, GPU_CHANNELS = ("conv_first", "fused"), 64
"""Forms measured on an H100: a ConvTranspose of 64 channels or more is 1.2 to 1.8 times as fast as Resize and Conv."""
GPU_BYTES_PER_US, GPU_MACS_PER_US, LAUNCH_US = 2e6, 2e8, 5.0
"""An H100's rates in 1x1 convolutions and sums, and the time between two launches of onnxruntime."""
TENSORRT_PIXELS, TENSORRT_US, TENSORRT_BYTES = 2048, 3.0, 2
"""The fewest pixels of a small map in TensorRT, the least time to be saved by these rates, and the bytes of an element there.

In its engines, fp16 on an H100, `fused` takes 0.80 to 0.88 of the time from 4096 pixels on, 0.75 with 2048, 0.91 to 1.03 with
1024, and 1.03 to 1.11 with fewer.  A 1x1 convolution in front of a short Resize costs the Add behind it a pass of its own."""
POINTWISE_PIXELS = 512
"""The fewest pixels of a small map of 16 bits for a 1x1 convolution.  In onnxruntime it takes up to 1.85 times as long in front
of a linear Resize of 324 or 361 as behind it on an H200, in front of 1369 and 1444 mostly half as long (decision 034)."""
OPERATOR = "upsampleconv"
"""The form that is a node of UpsampleConv."""
ENOUGH = 0.95
"""Largest share of the time by the cost model that may remain."""


@dataclass(frozen=True)
class ResamplingSite(Site):
    """A convolution, `root`, and the resampling nearest in front of it."""

    resampler: int

    @property
    def names(self) -> tuple[str, ...]:
        return label(self.scope.nodes[self.root]), label(self.scope.nodes[self.resampler])


@dataclass(frozen=True)
class Group:
    """Maps of one size, of which one convolution is computed: those with the same channels added up, others side by side.  It is
    no group of a convolution's.  ranges: first channel, number of channels and sources.  form: one of `expand.FORMS`, OPERATOR or
    TORCH_NODE; "" where the convolution is at the size of the result: nothing is resampled, or moving does not pay."""

    ranges: tuple[tuple[int, int, tuple[Source, ...]], ...]
    resample: Resample | None
    form: str = ""

    @property
    def channels(self) -> list[int]:
        """The channels of the weights that belong to it, in order."""
        return [channel for first, count, _ in self.ranges for channel in range(first, first + count)]


@dataclass(frozen=True)
class ResamplingPlan(Plan):
    """A convolution that goes in front of resamplings.

    leaf: with all pads in it.  dropped: nodes in front that go if nothing else reads them.  folded: a BatchNormalization, which
    the leaf's affine map is.  behind: activations.  Both are the convolution's only readers in turn.  skip_is_node: whether what
    is convolved at the size of the result, beside a node of UpsampleConv, is a ConvAvgPool.
    """

    leaf: ConvLeaf
    groups: tuple[Group, ...]
    dropped: frozenset[int]
    folded: int | None = None
    behind: tuple[int, ...] = ()
    macs_before: int | None = None
    macs_after: int | None = None
    skip_is_node: bool = False

    @property
    def own(self) -> frozenset[int]:
        return frozenset((self.leaf.node, *self.behind, *(() if self.folded is None else (self.folded,))))

    @property
    def shared(self) -> frozenset[int]:
        return self.dropped

    @property
    def convolutions(self) -> tuple[int, ...]:
        return (self.leaf.node,)

    @property
    def operator_version(self) -> int:
        return schema.UPSAMPLING_VERSION if any(group.form == OPERATOR for group in self.groups) else 0

    @property
    def assumed(self) -> tuple[Resample, ...]:
        """The upsamplings whose factors a run has to confirm."""
        return tuple(group.resample for group in self.groups if group.resample is not None and group.resample.assumed)

    @property
    def output(self) -> str:
        """The tensor that the new nodes give."""
        last = self.behind[-1] if self.behind else self.leaf.node if self.folded is None else self.folded
        return self.scope.nodes[last].output[0]

    @property
    def timed(self) -> tuple[frozenset[int], str] | None:
        """All from the resamplings on, where their factors are known."""
        return None if self.assumed else (self.own | self.dropped, self.output)

    @property
    def resampler(self) -> int:
        """The nearest resampling."""
        return max(group.resample.resampler for group in self.groups if group.resample is not None)

    @property
    def lowering(self) -> str:
        """The forms chosen: "direct" and "fused" are words of `expand.FORMS` here, not of LOWERINGS."""
        return "+".join(dict.fromkeys(group.form for group in self.groups if group.form))


def resampling_sites(scope: Scope, *, pointwise: bool) -> Iterator[ResamplingSite]:
    """The convolutions, 1x1 ones or the others, with a resampling in front that no other convolution stands between."""
    if scope.is_own:
        return
    for index, node in enumerate(scope.nodes):
        if is_op(node, "Conv") and is_pointwise(scope, index) == pointwise:
            found = _resampling_upstream(scope, index)
            if found is not None:
                yield ResamplingSite(scope, index, found)


def is_pointwise(scope: Scope, index: int) -> bool:
    """Return True if a convolution is 1x1, of any number of axes, as far as its weights tell."""
    shape = scope.info(scope.nodes[index].input[1]).shape
    return shape is not None and len(shape) > 2 and all(n == 1 for n in shape[2:])


def _resampling_upstream(scope: Scope, index: int) -> int | None:
    seen: set[int] = set()
    pending = deque([scope.nodes[index].input[0]])
    while pending and len(seen) < SEARCH_LIMIT:
        source = scope.producer.get(pending.popleft())
        if source is None or source in seen:
            continue
        seen.add(source)
        node = scope.nodes[source]
        if is_op(node, "Resize", "Upsample") or is_op(node, *RESAMPLING_OPS) and _may_resample(scope, source):
            return source
        if not is_op(node, "Conv", "ConvTranspose", "MatMul", "Gemm", "Shape"):
            pending.extend(node.input)
    return None


def _may_resample(scope: Scope, index: int) -> bool:
    """Return True if another node than a Resize may be of one: of a map; a ConvTranspose of groups, a Concat of one tensor."""
    shape, node = scope.info(scope.nodes[index].output[0]).shape, scope.nodes[index]
    if is_op(node, "Concat"):
        return len(set(node.input)) == 1 < len(node.input)
    if not is_op(node, "ConvTranspose"):
        return shape is None or len(shape) > 2
    return (known_attributes(node) or {}).get("group", 1) > 1


# ---- the plan -----------------------------------------------------------------------------------------------------------


def planned(
    site: ResamplingSite, leaf: ConvLeaf, read: Map, dropped: frozenset[int], context: Context
) -> ResamplingPlan | Reject:
    """The plan without forms, where the convolution can be split as the map that it reads is, or moved as it is."""
    scope = site.scope
    if any(context.excluded(label(scope.nodes[index])) for index in sorted({i for item in read.resampled for i in item.nodes})):
        return reject(scope, site.resampler, "resampling in front", "one excluded by name", "none")
    channels = leaf.weight_shape[1] * leaf.conv.group
    groups = grouped(read, channels)
    if groups is None:
        return reject(scope, leaf.node, "channels of the maps", "unknown", "known")
    one = len(groups) == 1 and is_whole(groups[0], channels)
    if not one and leaf.conv.group > 1:
        return reject(scope, leaf.node, "group of a convolution of several maps", leaf.conv.group, 1)
    plan = ResamplingPlan(scope, leaf, groups, dropped)
    if context.options.for_torch:
        return _against_torch_node(site, leaf, groups, one) or plan
    if not one or plan.assumed or not moves_as_it_is(plan):  # else weights need not be known: that form is the cheapest by far
        if not is_known(scope, leaf) or leaf.weight is None:
            return reject(scope, leaf.node, "weights", COMPUTED, "a constant")
        dtype = helper.tensor_dtype_to_np_dtype(leaf.weight.data_type)
        if not holds(leaf.weight.array().astype(np.float64) * _copies(groups), dtype):
            return rejection(scope, leaf.node, outside("sums of weights"))
    return plan


def _against_torch_node(site: ResamplingSite, leaf: ConvLeaf, groups: tuple[Group, ...], one: bool) -> Reject | None:
    """The reason why no single node stands for a convolution and what is in front of it."""
    scope, conv = site.scope, leaf.conv
    sources = [source for group in groups for _, _, found in group.ranges for source in found]
    if not one or len(sources) > 1:
        return reject(scope, leaf.node, "maps that the convolution reads", "several, or a sum", "one, upsampled as a whole")
    if conv.group > 1 or any(d != 1 for d in conv.dilations):
        return reject(scope, leaf.node, "groups and dilations", [conv.group, *conv.dilations], "1")
    up = groups[0].resample.up if groups[0].resample is not None else None
    if up is None or max(up.factors) > MAX_UPSAMPLE:
        return reject(scope, site.resampler, "factors", list(up.factors) if up is not None else "none", f"at most {MAX_UPSAMPLE}")
    if min(conv.pads) < 0 or not _is_of_nodes(sources[0]):
        return reject(scope, leaf.node, "between upsampling and convolution", "views or borders", "operators of each element")
    return None


def _is_of_nodes(source: Source) -> bool:
    return (
        isinstance(source, str) or source.kind == "node" and all(item is None or _is_of_nodes(item) for item in source.operands)
    )


def grouped(read: Map, channels: int) -> tuple[Group, ...] | None:
    """The parts of a map by the resampling that they have; None where some are of an unknown number of channels."""
    groups: dict[object, dict[tuple[int, int], list[Source]]] = {}
    resamples: dict[object, Resample | None] = {}
    for part in read.parts:
        count = channels if part.channels is None and len(read.parts) == 1 else part.channels
        if count is None:
            return None
        key = part.resample and part.resample.key
        resamples.setdefault(key, part.resample)
        groups.setdefault(key, {}).setdefault((part.first, count), []).append(part.source)
    return tuple(
        Group(tuple((first, count, tuple(sources)) for (first, count), sources in ranges.items()), resamples[key])
        for key, ranges in groups.items()
    )


def is_whole(group: Group, channels: int) -> bool:
    """Return True if a group is of all channels of the convolution, in their order."""
    return group.channels == list(range(channels))


def _copies(groups: Sequence[Group]) -> float:
    """The most weights that a form adds up."""
    return float(max(group.resample.up.copies if group.resample and group.resample.up else 1 for group in groups))


def with_forms(plan: ResamplingPlan, context: Context) -> ResamplingPlan | Reject:
    """The plan with the cheapest form for each of its groups, if it saves time by the cost model; or why not."""
    scope, leaf, conv, options = plan.scope, plan.leaf, plan.leaf.conv, context.options
    if options.for_torch:  # each call decides at run time whether it pays: it knows device and batch
        return in_one_node(plan, TORCH_NODE)
    if not moves_as_it_is(plan) and any(group.resample and in_float32(scope, group.resample) for group in plan.groups):
        return reject(scope, leaf.node, "type", "BFLOAT16", "one that onnxruntime's ConvTranspose has")
    for_gpu = "gpu" in options.devices and options.upsampling is None
    may_be_node = options.lowering == "convavgpool" and context.enabled("chain_upsample")  # with the upsampling
    if for_gpu and (unknown := _unmeasured(plan, may_be_node)) is not None:
        return unknown
    m, large = channels_out(leaf), _large_size(plan)
    out = m * math.prod(conv.output_size(large))
    groups, after, too_many = [], expand.pass_cost(-out, expand.PASS_WEIGHT), None  # n results take n - 1 Adds
    for group in plan.groups:
        dense = expand.dense_cost(conv, m, len(group.channels), large)
        if group.resample is None:
            groups.append(group)
            after += dense
            continue
        work = work_of(plan, group)
        found = _forms(plan, group.resample, work)
        if for_gpu:
            found = [form for form in found if form in GPU_FORMS][:1]  # conv_first before fused
        kept = dense + _cost_now(plan, group.resample, len(group.channels) * math.prod(large))
        if not found:
            if (why := against_merged_weights(scope, group.resample.input)) is not None:
                return rejection(scope, leaf.node, why)
            too_many = refuse("factors", list(work.up.factors), "smaller ones, for so few pixels or so many weights")
            groups.append(group)
            after += kept
            continue
        costs = {form: _cost(form, work, group.resample) for form in found}
        best = options.upsampling if options.upsampling in costs else min(costs, key=lambda form: costs[form].share_of(kept))
        assert best is not None
        moved = costs[best] + expand.pass_cost(out, expand.PASS_WEIGHT)
        keeps_size = len(plan.groups) > 1 and best != options.upsampling and moved.share_of(kept) >= 1
        groups.append(group if keeps_size else replace(group, form=best))
        after += kept if keeps_size else moved
    if too_many is not None and not any(group.form for group in groups):
        return rejection(scope, leaf.node, too_many)
    if any(not group.form for group in groups):
        after += expand.pass_cost(out, expand.PASS_WEIGHT)
    before = expand.dense_cost(conv, m, channels_in(leaf), large) + _cost_between(plan, large=True)
    after += _cost_between(plan, large=False)
    counts = (before.macs, after.macs) if leaf.size is not None else (None, None)
    # `best`: of the last map, where all stay at full size.
    what = "+".join(dict.fromkeys(group.form for group in groups if group.form)) or best
    by_cost = "cpu" in options.devices and options.upsampling not in what.split("+")
    if by_cost and after.share_of(before) > ENOUGH or not any(group.form for group in groups):
        got = f"{after.macs:,} of {before.macs:,} multiply-adds, {after.share_of(before):.2f} of the time by the cost model"
        return reject(scope, leaf.node, f"saves too little as {what}", got, f"at most {ENOUGH:.0%} of the time")
    formed = replace(plan, groups=tuple(groups), macs_before=counts[0], macs_after=counts[1])
    in_engine = for_gpu and "tensorrt" in options.devices and not (what == "conv_first" and may_be_node)
    return (_too_short(formed) if in_engine else None) or formed


def _too_short(plan: ResamplingPlan) -> Reject | None:
    """The reason why one upsampled map is as fast as it is in TensorRT: its layers are too short to save anything."""
    scope, leaf, batch = plan.scope, plan.leaf, _batch(plan)
    if len(plan.groups) > 1 or plan.macs_before is None or plan.macs_after is None or batch is None:
        return None
    if (few := _few_pixels(plan, TENSORRT_PIXELS)) is not None:
        return few
    elements = 2 * channels_in(leaf) * math.prod(_large_size(plan))
    if plan.lowering == "conv_first":
        elements -= 2 * channels_out(leaf) * math.prod(work_of(plan, plan.groups[0]).size)
    saved = batch * (elements * TENSORRT_BYTES / GPU_BYTES_PER_US + (plan.macs_before - plan.macs_after) / GPU_MACS_PER_US)
    if saved >= TENSORRT_US:
        return None
    expected = f"at least {TENSORRT_US:g}, {OF_TARGET}"
    return reject(scope, leaf.node, "microseconds saved by the cost model", f"{saved:.1f}", expected)


def in_one_node(plan: ResamplingPlan, form: str) -> ResamplingPlan:
    """The plan with one node for upsampling and convolution, the kernels' multiply-adds, and what is not upsampled apart."""
    leaf, m = plan.leaf, channels_out(plan.leaf)
    groups = tuple(replace(group, form=form if group.resample is not None else "") for group in plan.groups)
    if leaf.size is None:
        return replace(plan, groups=groups)
    after, out = 0, leaf.conv.output_size(leaf.size)
    for group in plan.groups:
        up = group.resample.up if group.resample is not None else None
        after += expand.kernel_macs(leaf.conv, up or UpsampleSpec((1,) * leaf.conv.rank), m, len(group.channels), out)
    before = expand.dense_cost(leaf.conv, m, channels_in(leaf), leaf.size).macs
    if is_pointwise(plan.scope, leaf.node):  # which is computed first
        after = int(before / _copies(plan.groups))
    return replace(plan, groups=groups, macs_before=before, macs_after=after)


def _forms(plan: ResamplingPlan, resample: Resample, work: Work) -> list[str]:
    """The forms that a convolution behind a resampling has; not direct in float16, whose sums are larger than the result, or with
    pads that onnxruntime miscounts, nor fused where onnxruntime would quantize its weights, nor what merges too many."""
    if resample.up is None or not is_known(plan.scope, plan.leaf):
        return ["conv_first"]
    found = [form for form in expand.FORMS if expand.admits(form, work.conv, work.up)]
    narrow = plan.leaf.weight is not None and plan.leaf.weight.data_type == TensorProto.FLOAT16
    boxes = expand.direct_specs(work.conv, work.up)[1]
    uncounted = plan.scope.opset >= schema.POOL_DILATIONS_OPSET and miscounts(boxes.pads)
    left_out = {"direct": narrow or uncounted, "fused": against_merged_weights(plan.scope, resample.input) is not None}
    return [form for form in found if not left_out.get(form) and (expand.merges(work) or form in ("conv_first", "direct"))]


def moves_as_it_is(plan: ResamplingPlan) -> bool:
    """Return True if the convolution can go in front of every resampling as it is."""
    ups = [group.resample.up for group in plan.groups if group.resample is not None]
    return all(up is None or expand.is_conv_first(plan.leaf.conv, up) for up in ups)


def _unmeasured(plan: ResamplingPlan, may_be_node: bool) -> Reject | None:
    """The reason why a convolution is none of the kinds that were found to be faster on GPUs.  may_be_node: if a 1x1 one in front
    of nearest upsampling may become a node of UpsampleConv with it, later."""
    scope, leaf = plan.scope, plan.leaf
    ups = [group.resample.up for group in plan.groups if group.resample is not None]
    if moves_as_it_is(plan):
        if len(ups) < len(plan.groups) and sum(len(group.channels) for group in plan.groups) > channels_in(leaf):
            return reject(scope, leaf.node, "sum of maps", "one of them not resampled", f"all resampled, {OF_TARGET}")
        resized = sum(len(group.channels) for group in plan.groups if group.resample is not None)
        if len(ups) * channels_out(leaf) > resized:
            moved = len(ups) * channels_out(leaf)
            return reject(scope, leaf.node, "channels that are resized", moved, f"at most {resized}, {OF_TARGET}")
        if len(plan.groups) > 1:
            return _many_launches(plan, resized)
        return _few_pixels(plan, POINTWISE_PIXELS) if item_bytes(plan) == 2 and not (may_be_node and ups[0]) else None
    if len(plan.groups) > 1:
        return reject(scope, leaf.node, "maps of different sizes", len(plan.groups), f"one, {OF_TARGET}")
    (up,) = ups
    assert up is not None
    if up.factors != (2, 2) or leaf.conv.group > 1 or min(channels_out(leaf), channels_in(leaf)) < GPU_CHANNELS:
        got = f"factors {list(up.factors)}, {channels_in(leaf)} to {channels_out(leaf)} channels, {leaf.conv.group} groups"
        expected = f"factors [2, 2], at least {GPU_CHANNELS} channels, {OF_TARGET}"
        return reject(scope, leaf.node, "upsampled map", got, expected)
    taps = math.prod(leaf.conv.kernel_shape)  # for few pixels the further weights of `fused` take longer than the products saved
    merged = math.prod(k + s - 1 for k, s in zip(leaf.conv.kernel_shape, up.factors, strict=True))
    fewest = (merged - taps) * item_bytes(plan) / GPU_BYTES_PER_US / (up.copies * taps - merged) * GPU_MACS_PER_US
    return _few_pixels(plan, math.ceil(fewest))


def _batch(plan: ResamplingPlan) -> int | None:
    """The number of images, if it is known."""
    batch = (plan.scope.info(plan.leaf.input).shape or (None,))[0]
    return batch if isinstance(batch, int) else None


def _few_pixels(plan: ResamplingPlan, fewest: int) -> Reject | None:
    """The reason why one resampled map is no faster on a GPU: all images together have too few pixels, where that is known."""
    leaf, batch = plan.leaf, _batch(plan)
    if leaf.size is None or batch is None or (pixels := batch * math.prod(work_of(plan, plan.groups[0]).size)) >= fewest:
        return None
    return reject(plan.scope, leaf.node, "pixels of the small maps", pixels, f"at least {fewest}, {OF_TARGET}")


def item_bytes(plan: ResamplingPlan) -> int:
    """The bytes of an element of what the convolution reads."""
    return 2 if plan.scope.info(plan.leaf.input).elem_type in (TensorProto.FLOAT16, TensorProto.BFLOAT16) else 4


def _many_launches(plan: ResamplingPlan, resized: int) -> Reject | None:
    """Why convolutions of several maps are no faster on a GPU: each is a launch, each sum a pass.  resized: channels that are."""
    scope, leaf, count = plan.scope, plan.leaf, len(plan.groups)
    m, c, large, images = channels_out(leaf), channels_in(leaf), math.prod(_large_size(plan)), _batch(plan) or 1
    summed = sum(len(group.channels) for group in plan.groups) > c
    maps = [(len(g.channels), math.prod(work_of(plan, g).size) if g.resample else large) for g in plan.groups]

    def time(elements: int, macs: int) -> float:
        return images * (elements * item_bytes(plan) / GPU_BYTES_PER_US + macs / GPU_MACS_PER_US)

    before = time(large * (resized + c * (3 * count - 3 if summed else 2) + c + m), large * c * m)
    after = time(
        sum(n * (channels + m) for channels, n in maps)
        + large * m * (sum(g.resample is not None for g in plan.groups) + 3 * count - 3),
        sum(n * channels * m for channels, n in maps),
    )
    after += LAUNCH_US * (count - 1 if summed else 2 * count - 3)
    if after <= ENOUGH * before:
        return None
    got = f"{after:.2g} of {before:.2g} microseconds by the cost model"
    return reject(scope, leaf.node, "several maps, time on a GPU", got, f"at most {ENOUGH:.0%}, {OF_TARGET}")


def _cost(form: str, work: Work, resample: Resample) -> Cost:
    if resample.up is not None:
        return expand.form_cost(form, work)
    dense = expand.dense_cost(work.conv, work.m, work.c, work.size)
    return dense + resize_cost(resample, work.conv.rank, int(work.m * math.prod(work.size) * resample.growth))


def resize_cost(resample: Resample, rank: int, elements: int, most: float = math.inf) -> Cost:
    """The cost of a resampled map of so many elements.  most: of an element.  A linear Resize of two axes runs on all cores."""
    weight = expand.RESIZE_WEIGHTS[resample.mode][rank - 1] * (expand.SHRINKING[rank - 1] if resample.growth < 1 else 1)
    return expand.pass_cost(elements, min(weight, most), alone=resample.mode != "linear" or rank != 2)


def _cost_now(plan: ResamplingPlan, resample: Resample, elements: int) -> Cost:
    """The cost of a map as the model has it: with three axes Tile, Expand and others copy faster than a Resize picks."""
    is_resize = is_op(plan.scope.nodes[resample.resampler], "Resize", "Upsample")
    return resize_cost(resample, plan.leaf.conv.rank, elements, math.inf if is_resize else expand.COPY_WEIGHT)


def channels_out(leaf: ConvLeaf) -> int:
    return leaf.weight_shape[0]


def channels_in(leaf: ConvLeaf) -> int:
    return leaf.weight_shape[1] * leaf.conv.group


def _large_size(plan: ResamplingPlan) -> Ints:
    """The spatial size of what the convolution reads, nominal where unknown."""
    factors = (group.resample.up.factors for group in plan.groups if group.resample and group.resample.up)
    return plan.leaf.size or tuple(NOMINAL_SIZE * factor for factor in next(factors, (2,) * plan.leaf.conv.rank))


def work_of(plan: ResamplingPlan, group: Group) -> Work:
    """The numbers of the convolution of one group."""
    assert group.resample is not None
    resample, conv = group.resample, plan.leaf.conv
    up = resample.up or UpsampleSpec((1,) * conv.rank)
    size = spatial_size(plan.scope, resample.input, conv.rank, first_axis=2 if resample.turned is None else 1)
    if size is None:
        shrink = up.factors if resample.up else (resample.growth ** (1 / conv.rank),) * conv.rank
        size = tuple(max(int(n / s), 1) for n, s in zip(_large_size(plan), shrink, strict=True))
    return Work(conv, up, channels_out(plan.leaf), len(group.channels), size, plan.scope.opset)


def _cost_between(plan: ResamplingPlan, *, large: bool) -> Cost:
    """The cost of what is done between resamplings and convolution: on the large map as it is, or on the small ones."""
    scope, total = plan.scope, Cost()
    for group in plan.groups:
        size = _large_size(plan) if large or group.resample is None else work_of(plan, group).size
        for _, count, sources in group.ranges:
            steps = sum(count_nodes(source) for source in sources)
            total += expand.pass_cost(steps * count * math.prod(size), expand.PASS_WEIGHT)
            if large and group.resample is not None and scope.other_readers(scope.nodes[group.resample.node].output[0]) is None:
                total += _cost_now(plan, group.resample, int(count * math.prod(size)))
    return total


# ---- what stands behind -------------------------------------------------------------------------------------------------


def with_normalization(plan: ResamplingPlan) -> ResamplingPlan:
    """The plan with a BatchNormalization behind the convolution folded into it."""
    scope, leaf = plan.scope, plan.leaf
    if leaf.weight is None or not is_known(scope, leaf):
        return plan
    index = _only_reader(scope, scope.nodes[leaf.node].output[0])
    if index is None or not is_op(scope.nodes[index], "BatchNormalization"):
        return plan
    step = step_or_reject(scope, index, leaf.conv.rank)
    if not isinstance(step, Step) or step.affine is None or not step.affine.fits(channels_out(leaf)):
        return plan
    dtype = helper.tensor_dtype_to_np_dtype(leaf.weight.data_type)
    leaf = replace(leaf, affine=step.affine)
    weight, bias = exact_weights(leaf)
    fits = keeps(weight * _copies(plan.groups), dtype) and (bias is None or holds(bias, dtype))
    return replace(plan, folded=index, leaf=leaf) if fits else plan


def with_activations(plan: ResamplingPlan) -> ResamplingPlan:
    """The plan with the activation behind it in front of what only moves elements."""
    scope = plan.scope
    if len(plan.groups) > 1 or plan.groups[0].form not in ("conv_first", "subpixel", "phases"):
        return plan
    resample, index = plan.groups[0].resample, _only_reader(scope, plan.output)
    if resample is None or not resample.picks or index is None or not is_op(scope.nodes[index], *ACTIVATIONS):
        return plan
    if any(scope.constant(name) is None for name in scope.nodes[index].input[1:] if name):
        return plan
    return replace(plan, behind=(index,))


def _only_reader(scope: Scope, name: str) -> int | None:
    """The node that alone reads a tensor, as its first input."""
    if scope.other_readers(name) is not None:
        return None
    (index,) = scope.readers[name]
    return index if scope.nodes[index].input[0] == name and len(scope.nodes[index].output) == 1 else None

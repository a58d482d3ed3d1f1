# SPDX-License-Identifier: Apache-2.0
"""The change and the reports of the rules that move a convolution in front of resamplings; and the nodes of a plan: maps at their
own size, the convolution in the form chosen for each, and their sum."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
from onnx import GraphProto, NodeProto, TensorProto, helper

from convpool.algebra import expand
from convpool.algebra.expand import TransposeSpec, UpsampleSpec
from convpool.algebra.geometry import ConvSpec, Ints
from convpool.algebra.parts import UPSAMPLING_OP_TYPE, Parts
from convpool.ir import schema
from convpool.ir.edit import Edit
from convpool.ir.index import Scope
from convpool.ir.protos import attributes, is_op, label, stand_for
from convpool.report import Log, SiteReport
from convpool.rules.base import Reject, Rule, reason_fields
from convpool.rules.convs import NO_POOLING, folded_weights, is_known, macs
from convpool.rules.linear import WHOLE_AXIS
from convpool.rules.resampling import plans
from convpool.rules.resampling.maps import Applied, Source, source_of
from convpool.rules.resampling.resize import Resample, in_float32

DOMAIN_OF_TORCH = "ai.convpool.torch"
"""The domain of nodes that stand in graphs of PyTorch's alone."""


class ResamplingRule(Rule):
    """A rule whose sites are ResamplingSites.  pattern: what a report calls them."""

    needs: ClassVar[Collection[str]] = plans.RESAMPLING_OPS
    pattern: ClassVar[str] = "resize_conv"

    def report(self, scope: Scope, conv: int, resampler: int, lowering: str | None, **values: Any) -> SiteReport:
        names = {"conv": label(scope.nodes[conv]), "pool": label(scope.nodes[resampler])}
        return self.site_report(scope, self.pattern, lowering, **names, **values)

    def kept(self, site: plans.ResamplingSite, why: Reject, times: dict[str, float] | None, log: Log) -> None:
        """One report with the reason, unless the site is of nodes that an earlier round made."""
        scope = site.scope
        nodes = (scope.nodes[site.root], scope.nodes[site.resampler])
        if any(log.made(name) for node in nodes for name in (*node.input, node.output[0])):
            return
        count = macs(scope, site.root)
        counts: dict[str, Any] = {"macs_before": count, "macs_after": count, "times_us": times}
        log.kept(self.report(scope, site.root, site.resampler, None, **counts, **reason_fields(why)))


class MovingRule(ResamplingRule):
    """A rule whose plans are ResamplingPlans."""

    def apply(self, plan: plans.ResamplingPlan, edit: Edit) -> None:
        scope, leaf = plan.scope, plan.leaf
        old = scope.nodes[leaf.node]
        emitter = ResamplingEmitter(
            edit, leaf.conv.rank, plan.output, self.names[0], [scope.nodes[index] for index in plan.behind]
        )
        results: list[str] = []
        for group, weight, bias in self._in_order(plan):
            maps = [emitter.joined("Add", [emitter.tensor(source) for source in sources]) for _, _, sources in group.ranges]
            x = emitter.joined("Concat", maps)
            if group.form == plans.OPERATOR and weight is not None:
                results = [emitter.operator(x, weight, bias, leaf.conv, group.resample, *results)]  # its residual
            else:
                results.append(emitter.convolution(plan, group, x, weight, bias))
        name = emitter.joined("Add", results)
        last = next(node for node in reversed(emitter.nodes) if name in node.output)
        last.output[0] = plan.output
        made = [node for node in emitter.nodes if is_op(node, "Conv", "ConvTranspose", "If") or node.domain]
        stand_for(made[-1] if made[-1].domain else made[0], old)  # by `_in_order` the operator comes last, what moved first
        edit.replace(leaf.node, plan.own)
        edit.drop_unread(plan.dropped)

    def _in_order(self, plan: plans.ResamplingPlan) -> Iterator[tuple[plans.Group, np.ndarray | None, np.ndarray | None]]:
        """The weights and the bias of each group; None for weights that stay, and where there is no bias."""
        leaf = plan.leaf
        if not is_known(plan.scope, leaf) or plan.lowering == plans.TORCH_NODE:
            yield plan.groups[0], None, None
            return
        array, bias = folded_weights(leaf)
        stay = [group for group in plan.groups if not group.form]
        joined = plans.Group(tuple(item for group in stay for item in _at_full_size(group, plan.scope)), None)
        # What is convolved at the size of the result comes last, so that runtimes fuse the sum into that convolution; but for a
        # node of UpsampleConv, which adds it as its residual.
        moved, last = [group for group in plan.groups if group.form], [joined] if stay else []
        ordered = [*last, *moved] if moved[0].form == plans.OPERATOR else [*moved, *last]
        for group in ordered:
            part = array if plans.is_whole(group, plans.channels_in(leaf)) else array[:, group.channels]
            yield group, part, bias if group is ordered[-1] else None

    def rewritten(self, plan: plans.ResamplingPlan, outputs: list[str], times: dict[str, float] | None, log: Log) -> None:
        counts: dict[str, Any] = {"macs_before": plan.macs_before, "macs_after": plan.macs_after, "times_us": times}
        operator = UPSAMPLING_OP_TYPE if plan.operator_version else None
        found = self.report(plan.scope, plan.leaf.node, plan.resampler, plan.lowering, operator=operator, **counts)
        log.rewritten(found, outputs[-1] if operator else None)


def _at_full_size(group: plans.Group, scope: Scope) -> Iterator[tuple[int, int, tuple[Source, ...]]]:
    """The ranges of a group that is convolved at the size of the result."""
    for first, count, sources in group.ranges:
        found = group.resample
        if found is None:
            yield first, count, sources
        elif sources == (source_of(found),):  # nothing stands between
            yield first, count, (scope.nodes[found.node].output[0],)
        else:
            yield first, count, tuple(Applied(found.node, (source,), kind="resample", resample=found) for source in sources)


class ResamplingEmitter:
    """New nodes for one scope, inputs first."""

    def __init__(self, edit: Edit, rank: int, prefix: str, owner: str, activations: Sequence[NodeProto] = ()) -> None:
        """prefix: begins the names of new tensors.  owner: whose plans share what they compute.  activations: nodes on the
        convolution's result, which go in front of what only moves elements."""
        self._owner, self._activations, self.nodes = owner, activations, edit.nodes
        self._edit, self._scope, self._rank, self._prefix = edit, edit.scope, rank, prefix

    def _constant(self, array: np.ndarray, wanted: str) -> str:
        return self._edit.constant(array, f"{self._prefix}_{wanted}")

    def _add(self, op_type: str, inputs: Sequence[str], wanted: str, **values: Any) -> str:
        return self._edit.add(op_type, inputs, f"{self._prefix}_{wanted}", **values)

    # ---- maps at their own size -----------------------------------------------------------------------------------------

    def tensor(self, source: Source) -> str:
        """The tensor that a source is; computed once for all plans of the scope that need it."""
        if isinstance(source, str):
            return source
        key = self._owner, source
        if key not in self._edit.computed:
            self._edit.computed[key] = self._normalised_groups(source) if source.kind == "group_norm" else self._applied(source)
        return self._edit.computed[key]

    def _applied(self, source: Applied) -> str:
        old = self._scope.nodes[source.node]
        operands = [None if item is None else self.tensor(item) for item in source.operands]
        if source.kind == "edges" and operands[0] is not None:
            return self._edge_pad(operands[0], source.pads)
        if source.resample is not None and operands[0] is not None:
            return self.resample(operands[0], source.resample)
        inputs = []
        for number, name in enumerate(old.input):
            given = operands[number] if number < len(operands) else None
            inputs.append(self._operand(old, name, source.channels) if given is None else given)
        return self._copied(old, f"{old.output[0]}_small", dict(enumerate(inputs)))

    def _copied(self, old: NodeProto, wanted: str, inputs: Mapping[int, str]) -> str:
        """A copy of a node with other inputs, by number; the name of its first output, the only one it keeps."""
        node = deepcopy(old)
        node.name = self._edit.fresh(f"{old.name}_moved") if old.name else ""
        for number, name in inputs.items():
            node.input[number] = name
        node.output[:] = [self._edit.fresh(wanted)]
        self.nodes.append(node)
        return node.output[0]

    def _operand(self, node: NodeProto, name: str, channels: tuple[int, int] | None) -> str:
        """An operand that stays: of a constant the channels that the node acts on."""
        constant = self._scope.constant(name) if name and channels is not None else None
        if constant is None or channels is None:
            return name
        array, (first, count) = constant.array(), channels
        axis = 0 if is_op(node, "BatchNormalization", "InstanceNormalization") else array.ndim - self._rank - 1
        if axis < 0 or array.ndim <= axis or array.shape[axis] == 1:  # one number for all channels
            return name
        return self._constant(np.take(array, range(first, first + count), axis), "channels")

    def _normalised_groups(self, source: Applied) -> str:
        (operand,) = source.operands
        assert operand is not None
        x = self.tensor(operand)
        old = self._scope.nodes[source.inner]
        groups = self._scope.info(old.input[0]).shape
        assert groups is not None
        shape = self._constant(np.array([0, groups[1], -1], np.int64), "groups")
        y = self._copied(old, f"{old.output[0]}_small", {0: self._add("Reshape", [x, shape], "grouped")})
        return self._add("Reshape", [y, self._add("Shape", [x], "shape")], "normalised")

    def _edge_pad(self, x: str, pads: Ints) -> str:
        """x with its border repeated on spatial axes, begins then ends."""
        full = (0, 0, *pads[: self._rank], 0, 0, *pads[self._rank :])
        if self._scope.opset < 11:
            return self._add("Pad", [x], "padded", mode="edge", pads=full)
        return self._add("Pad", [x, self._constant(np.array(full, np.int64), "pads")], "padded", mode="edge")

    def joined(self, op_type: str, names: Sequence[str]) -> str:
        """The Concat of maps by channels, or the sum of maps; the map itself of one."""
        if op_type == "Concat":
            return names[0] if len(names) == 1 else self._add("Concat", names, "joined", axis=1)
        total = names[0]
        for name in names[1:]:
            total = self._add("Add", [total, name], "sum")
        return total

    # ---- convolutions and resamplings -----------------------------------------------------------------------------------

    def convolution(
        self, plan: plans.ResamplingPlan, group: plans.Group, x: str, weight: np.ndarray | None, bias: np.ndarray | None
    ) -> str:
        """The nodes of one group's convolution; the tensor that they give."""
        conv, names = plan.leaf.conv, list(filter(None, plan.scope.nodes[plan.leaf.node].input[1:]))
        if weight is None:
            assert group.resample is not None
            if group.form == plans.TORCH_NODE and group.resample.up is not None:
                values = {"factors": group.resample.up.factors, "kernel_shape": conv.kernel_shape, "pads": conv.pads}
                return self._add("UpsampleConv", [x, *names], "upsampled", domain=DOMAIN_OF_TORCH, **values)
            return self._conv_first(x, names, conv, group.resample)
        if group.resample is None and plan.skip_is_node:
            return self.operator(x, weight, bias, conv, None)
        if group.resample is None:
            return self._as_before(x, weight, bias, conv)
        found = replace(group.resample, assumed=False)
        if not group.resample.assumed:
            return self._in_form(group.form, x, weight, bias, conv, found)
        by_sizes, sizes = replace(found, up=None), self._sizes(x, plan.scope.nodes[found.resampler])
        then = self._branch(plan, lambda: self._in_form(group.form, x, weight, bias, conv, found))
        other = self._branch(plan, lambda: self._as_before(self.resample(x, by_sizes, sizes), weight, bias, conv))
        return self._add("If", [self._is_upsampled(found)], "chosen", then_branch=then, else_branch=other)

    def _in_form(self, form: str, x: str, array: np.ndarray, bias: np.ndarray | None, conv: ConvSpec, resample: Resample) -> str:
        """The convolution with weights `array` [M, C/group, kernel...] behind a resampling of x."""
        dtype = array.dtype

        def stored(values: np.ndarray, wanted: str) -> str:
            return self._constant(values.astype(dtype), wanted)

        up = resample.up
        # The mean of padding has no bias in it: that is added behind.
        padded = form == "direct" and up is not None and any(expand.direct_specs(conv, up)[1].pads)
        b: list[str] = []
        if bias is not None:
            repeated = np.tile(bias, up.copies) if form == "subpixel" and up is not None else bias
            b = [stored(np.reshape(repeated, (-1, *[1] * self._rank)) if padded else repeated, "bias")]
        if form == "conv_first":
            return self._conv_first(x, [stored(array, "weight"), *b], conv, resample)
        assert up is not None
        if form == "subpixel":
            spec, crop = expand.subpixel(conv, up)
            y = self._conv([x, stored(expand.subpixel_kernel(array, conv, up), "subpixel"), *b], spec)
            return self._crop(self._interleave(self._activated(y), up), crop)
        if form == "phases":
            specs = expand.phase_specs(conv, up) or []
            kernels = expand.phase_kernels(array, conv, up, specs)
            parts = [
                self._conv([x, stored(kernel, "phase"), *b], spec, "phase") for kernel, spec in zip(kernels, specs, strict=True)
            ]
            return self._interleave(self._activated(self.joined("Concat", parts)), up)
        if form == "direct":
            spread, box = expand.direct_specs(conv, up)
            flipped = stored(expand.transpose_kernel(array, conv) * box.taps, "flipped")
            y = self._conv([x, flipped, *(() if padded else b)], spread, "transpose")
            pads = {"pads": box.pads, "count_include_pad": 1} if padded else {}
            y = self._add("AveragePool", [y], "boxes", kernel_shape=box.kernel_shape, strides=box.strides, **pads)
            return self._add("Add", [y, *b], "shifted") if padded and b else y
        return self._conv([x, stored(expand.fuse_kernel(array, conv, up), "fused"), *b], expand.fused_spec(conv, up), "transpose")

    def _conv_first(self, x: str, names: list[str], conv: ConvSpec, resample: Resample) -> str:
        """`form` "conv_first" with the weights and the bias as they are, by name."""
        spec, crop = (conv, ()) if resample.up is None else expand.conv_first(conv, resample.up)
        return self._crop(self.resample(self._activated(self._conv([x, *names], spec)), resample), crop)

    def _as_before(self, x: str, weight: np.ndarray, bias: np.ndarray | None, conv: ConvSpec) -> str:
        named = ((weight, "weight"), (bias, "bias"))
        return self._activated(self._conv([x, *(self._constant(a, name) for a, name in named if a is not None)], conv))

    def _conv(self, inputs: Sequence[str], spec: ConvSpec | TransposeSpec, wanted: str = "conv") -> str:
        """A Conv or ConvTranspose of x, weights and, if there is one, a bias."""
        return self._add("Conv" if isinstance(spec, ConvSpec) else "ConvTranspose", inputs, wanted, **vars(spec))

    def _branch(self, plan: plans.ResamplingPlan, give: Callable[[], str]) -> GraphProto:
        """The nodes that `give` adds, as the graph of its result."""
        before, self.nodes[:] = list(self.nodes), []
        result = helper.make_tensor_value_info(give(), self._scope.info(plan.output).elem_type, None)
        made, self.nodes[:] = list(self.nodes), before
        return helper.make_graph(made, "branch", [], [result])

    def _is_upsampled(self, found: Resample) -> str:
        """A flag: whether the sizes of a Resize are those of its map times the factors."""
        assert found.up is not None
        node, shape = self._scope.nodes[found.resampler], self._add("Shape", [found.input], "shape")
        factors, axes = np.array([1, 1, *found.up.factors], np.int64), attributes(node).get("axes")
        if axes is not None:
            factors = factors[axes]
            shape = self._add("Gather", [shape, self._constant(np.array(axes, np.int64), "axes")], "shape")
        wanted = self._add("Mul", [shape, self._constant(factors, "factors")], "sizes")
        equal = self._add("Cast", [self._add("Equal", [wanted, node.input[3]], "equal")], "equal", to=TensorProto.INT64)
        return self._add("Cast", [self._add("ReduceMin", [equal], "equal", keepdims=0)], "upsampled", to=TensorProto.BOOL)

    def operator(
        self, x: str, weight: np.ndarray, bias: np.ndarray | None, conv: ConvSpec, resample: Resample | None, *residual: str
    ) -> str:
        """A node of UpsampleConv, or of ConvAvgPool with a window of one element where nothing is resampled.  weight: [M,
        C/group, kernel...].  residual: what it adds, if anything.  It has a bias in any case."""
        before = resample.up if resample is not None and resample.up is not None else NO_POOLING
        given = np.zeros(len(weight)) if bias is None else bias
        stored = self._constant(np.moveaxis(weight, 1, -1), "weight"), self._constant(given.astype(weight.dtype), "bias")
        output = self._edit.fresh(f"{self._prefix}_upsampled" if before is not NO_POOLING else f"{self._prefix}_skip")
        node = schema.make_node([x, *stored, *residual], output, before, conv)
        schema.give_parts(node, Parts(residual=bool(residual), upsamples=before is not NO_POOLING))
        self.nodes.append(node)
        return output

    def _activated(self, name: str) -> str:
        for old in self._activations:
            node = deepcopy(old)
            node.input[0] = name
            for position, bound in enumerate(old.input):
                constant = self._scope.constant(bound) if position and bound in self._scope.producer else None
                if constant is not None:  # its node may stand behind the convolution
                    node.input[position] = self._constant(constant.array(), "bound")
            name = node.output[0] = self._edit.fresh(f"{old.output[0]}_small")
            self.nodes.append(node)
        return name

    def _interleave(self, x: str, up: UpsampleSpec) -> str:
        return self._add("DepthToSpace", [x], "interleaved", blocksize=up.factors[0])

    def _crop(self, x: str, crop: Ints) -> str:
        """Cut elements off the spatial axes, begins then ends; x itself for none."""
        if not any(crop):
            return x
        starts, axes = crop[: self._rank], range(2, self._rank + 2)
        ends = [-n if n else WHOLE_AXIS for n in crop[self._rank :]]
        if self._scope.opset < 10:
            return self._add("Slice", [x], "cropped", starts=starts, ends=ends, axes=list(axes))
        names = [self._constant(np.array(values, np.int64), "crop") for values in (starts, ends, axes)]
        return self._add("Slice", [x, *names], "cropped")

    def resample(self, x: str, found: Resample, sizes: str = "") -> str:
        """The resampling of another map of the same spatial size.  sizes: of the result, where they are computed already."""
        if found.up is not None and in_float32(self._scope, found):
            wide = self._upsample(self._add("Cast", [x], "wide", to=TensorProto.FLOAT), found.up)
            return self._add("Cast", [wide], "narrow", to=TensorProto.BFLOAT16)
        if found.up is not None and not found.assumed:
            return self._upsample(x, found.up)
        for old in (self._scope.nodes[index] for index in (*found.casts, found.node)):
            by_sizes = is_op(old, "Resize") and len(old.input) > 3 and old.input[3]
            x = self._copied(old, f"{self._prefix}_resized", {0: x, **({3: sizes or self._sizes(x, old)} if by_sizes else {})})
        return x

    def _sizes(self, x: str, old: NodeProto) -> str:
        """The sizes of a Resize for a map with another number of channels."""
        axes = attributes(old).get("axes", range(self._rank + 2))
        places = [i for i, axis in enumerate(axes) if axis % (self._rank + 2) < 2]
        if not places or x == old.input[0]:
            return old.input[3]
        shape = self._add("Shape", [x], "shape")
        parts = []
        for position, axis in enumerate(axes):
            kept = axis % (self._rank + 2) < 2
            which = self._constant(np.array([axis % (self._rank + 2) if kept else position], np.int64), "axis")
            parts.append(self._add("Gather", [shape if kept else old.input[3], which], "size", axis=0))
        return self._add("Concat", parts, "sizes", axis=0)

    def _upsample(self, x: str, up: UpsampleSpec) -> str:
        scales, opset = np.array([1, 1, *up.factors], np.float32), self._scope.opset
        if opset < 9:
            return self._add("Upsample", [x], "upsampled", mode="nearest", scales=[float(value) for value in scales])
        name = self._constant(scales, "scales")
        if opset < 11:
            return self._add("Upsample" if opset < 10 else "Resize", [x, name], "upsampled", mode="nearest")
        roi = "" if opset >= 13 else self._constant(np.zeros(0, np.float32), "roi")
        return self._add("Resize", [x, roi, name], "upsampled", **schema.NEAREST)

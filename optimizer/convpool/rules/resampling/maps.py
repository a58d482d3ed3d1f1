# SPDX-License-Identifier: Apache-2.0
"""A tensor as resampled maps: what a convolution reads, taken back to the resamplings in front of it.

    x - Resize - Relu - Concat - Conv          Parts of what the Conv reads:  channels of Relu(x), resampled
                    s - /                                                     channels of s, as they are

| node | moves in front of | condition |
|---|---|---|
| elementwise operators | resamplings that pick elements | (1) other operands are the same at every position, or resampled alike |
| maps per channel | any, and sums | (2) operands as in (1); in a sum nothing is added |
| BatchNormalization | as maps per channel | (3) inference form |
| InstanceNormalization, GroupNormalization | nearest upsampling by whole factors | each element stands there equally often |
| what changes nothing, views that cancel | any | as `linear` tells |
| Reshape, InstanceNormalization, Reshape | the same | (4) groups of channels, and back to the shape before |
| Concat | | (5) of channels, whose numbers are known |
| Add, Sum | | maps that are resampled in different ways become a sum of parts |

Everything else is a part that is not resampled.  It does not matter who else reads a tensor: what is read elsewhere stays too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from convpool.algebra.expand import UpsampleSpec
from convpool.algebra.geometry import Ints
from convpool.algebra.parts import IDENTITY
from convpool.ir.index import Scope
from convpool.ir.protos import attributes, is_op
from convpool.rules.base import Reject, reject
from convpool.rules.convs import channel_count
from convpool.rules.linear import BROADCASTING, UNARY, Step, step_or_reject, varies_over_space
from convpool.rules.resampling.resize import Resample, recognise, size_nodes, unknown_scales
from convpool.rules.sizes import groups_channels, same_size, unknown_ratios

PER_CHANNEL = ("Neg", "Dropout", "Add", "Sub", "Mul", "Div", "BatchNormalization")
"""Operators that may be maps per channel; `linear.step_or_reject` tells."""
MAX_DEPTH = 24
"""Nodes between a convolution and a resampling at most."""


@dataclass(frozen=True)
class Applied:
    """A node of the model, applied to other operands.  kind: "node", "group_norm", "edges", or "resample": a resampling.

    operands: one for each of its inputs that carries data, None for one that stays.  channels: the first of its channels and
    their number, where a node acts on more of them.  "group_norm": the InstanceNormalization `inner` over groups of channels,
    which `node`, a Reshape, ends.  "edges": a Pad that repeats the border, of `pads`, begins then ends.
    """

    node: int
    operands: tuple[str | Applied | None, ...]
    channels: tuple[int, int] | None = None
    kind: str = "node"
    inner: int = 0
    pads: tuple[int, ...] = ()
    resample: Resample | None = None


Source = str | Applied
"""A tensor of the model, by name, at the size that its part is computed at; or nodes on such."""


@dataclass(frozen=True)
class Part:
    """Channels of a map, from `first` on: `source`, and behind it the resampling, if any.  channels: None for an unknown number,
    if they are all."""

    first: int
    channels: int | None
    source: Source
    resample: Resample | None = None


@dataclass(frozen=True)
class Map:
    """A tensor as parts, whose channels add up where they overlap (`summed`).  nodes: from the resamplings on.  loose: of a sum,
    whether one of its parts may be broadcast."""

    parts: tuple[Part, ...]
    nodes: frozenset[int] = frozenset()
    summed: bool = False
    loose: bool = False

    @property
    def resampled(self) -> tuple[Resample, ...]:
        """The resamplings of the parts that have one."""
        return tuple(part.resample for part in self.parts if part.resample is not None)


def source_of(found: Resample) -> Source:
    """The map that a resampling enlarges, with the channels first."""
    return found.input if found.turned is None else Applied(found.turned, (found.input,))


class Walk:
    """Takes tensors of one scope back to their resamplings.  rejects: what was in the way, nearest first."""

    def __init__(self, scope: Scope, rank: int, *, whole_factors: bool, assumes: bool = False) -> None:
        """whole_factors: whether nearest upsampling by whole factors alone counts.  assumes: also by those that a run has to
        confirm."""
        self._scope, self._rank, self._whole_factors = scope, rank, whole_factors
        self._assumes = assumes
        self._known: dict[str, Map] = {}
        self.rejects: list[Reject] = []

    def map(self, tensor: str, depth: int = 0) -> Map:
        """The parts of a tensor; one that is not resampled where there are no others.  Raises AttributeReference."""
        if tensor not in self._known:
            self._known[tensor] = self._plain(tensor)  # ends the search on a graph with a cycle
            if depth <= MAX_DEPTH:
                self._known[tensor] = self._found(tensor, depth)
        return self._known[tensor]

    def _plain(self, tensor: str) -> Map:
        return Map((Part(0, channel_count(self._scope, tensor), tensor),))

    def _found(self, tensor: str, depth: int) -> Map:
        scope, plain = self._scope, self._plain(tensor)
        index = scope.producer.get(tensor)
        if index is None or scope.nodes[index].output[0] != tensor:
            return plain
        node, found = scope.nodes[index], recognise(scope, index, self._rank, nearest=self._whole_factors)
        if isinstance(found, Resample):
            found = replace(found, up=found.likely, assumed=True) if found.likely is not None and self._assumes else found
            found = _against(scope, found, self._rank, whole_factors=self._whole_factors) or found
        if isinstance(found, Reject):
            self.rejects.append(found)
            return plain
        if found is not None:
            return self._resampled(tensor, found, depth)
        idle = _idle(scope, index, self._rank)
        if idle:
            result: Map | None = self.map(scope.nodes[idle[-1]].input[0], depth + 1)
        elif is_op(node, "Concat"):
            result = self._concat(index, depth)
        elif is_op(node, "InstanceNormalization", "GroupNormalization"):
            result = self._normalised(index, depth)
        elif is_op(node, "Reshape"):
            result = self._normalised_groups(index, depth)
        elif is_op(node, "BatchNormalization", *UNARY, *BROADCASTING):
            result = self._elementwise(index, depth)
        else:
            result = None
            self._blocked(index)
        return plain if result is None or not result.resampled else replace(result, nodes=result.nodes | {index, *idle})

    def _resampled(self, tensor: str, found: Resample, depth: int) -> Map:
        """A resampling; of an upsampled map one upsampling by the product of the factors."""
        known = found.up is not None and found.turned is None and not found.assumed
        parts = self.map(found.input, depth + 1).parts if known else ()
        first = parts[0].resample if len(parts) == 1 else None
        if first is not None and first.up is not None and not first.assumed and found.up is not None:
            up = UpsampleSpec(tuple(a * b for a, b in zip(first.up.factors, found.up.factors, strict=True)))
            nodes = found.nodes | self.map(found.input).nodes
            both = replace(found, input=first.input, up=up, growth=float(up.copies), nodes=nodes)
            return Map((replace(parts[0], resample=both),), nodes)
        return Map((Part(0, channel_count(self._scope, tensor), source_of(found), found),), found.nodes)

    def _blocked(self, index: int) -> None:
        """Note a node that nothing moves past, where a resampling stands in front of it, or of a crop or QuantizeLinear there."""
        scope, node = self._scope, self._scope.nodes[index]
        if is_op(node, "Conv", "ConvTranspose", "MatMul", "Gemm") or not node.input:
            return
        before = scope.producer.get(node.input[0])
        for _ in range(MAX_DEPTH):
            if before is not None and is_op(scope.nodes[before], "Pad", "QuantizeLinear", "Slice", "Transpose"):
                before = scope.producer.get(scope.nodes[before].input[0])
        if before is not None and is_op(scope.nodes[before], "Resize", "Upsample"):
            expected = "operators that act on each element alike"
            self.rejects.append(reject(scope, index, "between resize and convolution", node.op_type, expected))

    # ---- nodes between --------------------------------------------------------------------------------------------------

    def _elementwise(self, index: int, depth: int) -> Map | None:
        scope, rank = self._scope, self._rank
        node = scope.nodes[index]
        names = list(node.input) if is_op(node, *BROADCASTING) else list(node.input[:1])
        data = [position for position, name in enumerate(names) if varies_over_space(scope.info(name).shape, rank)]
        maps = [self.map(names[position], depth + 1) for position in data]
        if not any(item.resampled for item in maps):
            return None
        step = step_or_reject(scope, index, rank) if is_op(node, *PER_CHANNEL) else None
        if isinstance(step, Reject) and is_op(node, "BatchNormalization", "Dropout"):
            self.rejects.append(step)
            return None
        per_channel = isinstance(step, Step) and len(data) == 1 and not (is_op(node, "Div") and data == [1])
        if len(maps) > 1:
            return self._joined(index, data, maps)
        (found,) = maps
        picks = all(item.picks for item in found.resampled)
        scales = per_channel and isinstance(step, Step) and step.affine is not None and not step.affine.shift.any()
        if found.summed and not scales or not picks and not per_channel:
            expected = "a scale per channel of a sum of maps" if found.summed else "a scale and shift per channel"
            self.rejects.append(reject(scope, index, "between resize and convolution", node.op_type, expected))
            return None
        if len(found.parts) > 1 and not self._divisible(index, data):
            return None
        return self._applied(index, data, [found], found.nodes)

    def _divisible(self, index: int, data: Sequence[int]) -> bool:
        """Return True if a node acts on some channels as on all: its other operands are constants, or alike for all of them."""
        scope, node = self._scope, self._scope.nodes[index]
        by_channel = is_op(node, "BatchNormalization", "InstanceNormalization")
        for position, name in enumerate(node.input):
            if position in data or not name:
                continue
            shape = scope.info(name).shape
            alike = shape is not None and not by_channel and (len(shape) <= self._rank or shape[-self._rank - 1] == 1)
            if not alike and scope.constant(name) is None:
                return False
        return True

    def _applied(self, index: int, data: Sequence[int], maps: Sequence[Map], nodes: frozenset[int]) -> Map:
        """A node on each of the parts of its operands, which have the same ones."""
        parts = []
        whole = len(maps[0].parts) == 1
        for group in zip(*(item.parts for item in maps), strict=True):
            operands: list[Source | None] = [None] * len(self._scope.nodes[index].input)
            for position, part in zip(data, group, strict=True):
                operands[position] = part.source
            first = group[0]
            assert whole or first.channels is not None
            channels = None if whole or first.channels is None else (first.first, first.channels)
            count = channel_count(self._scope, self._scope.nodes[index].output[0]) if whole else first.channels
            parts.append(replace(first, channels=count, source=Applied(index, tuple(operands), channels)))
        return replace(maps[0], parts=tuple(parts), nodes=nodes)

    def _joined(self, index: int, data: Sequence[int], maps: list[Map]) -> Map | None:
        """An operator on several maps: on their parts, if these are resampled alike; an Add of others is a sum of parts."""
        node, nodes, rank = self._scope.nodes[index], frozenset().union(*(item.nodes for item in maps)), self._rank
        single = all(len(item.parts) == 1 for item in maps)
        kinds = [
            [(part.first, single or part.channels, part.resample and part.resample.key) for part in item.parts] for item in maps
        ]
        alike = all(kind == kinds[0] for kind in kinds) and not any(item.summed for item in maps)
        resamples = [found for item in maps for found in item.resampled]
        picks, same = all(found.picks for found in resamples), {found.input for found in resamples if found.up is None}
        if alike and picks and len(same) <= 1 and self._divisible(index, data):
            return self._applied(index, data, maps, nodes)
        if not is_op(node, "Add", "Sum") or len(data) < len(node.input):
            return None
        shapes = [self._scope.info(name).shape or () for name in node.input]
        channels = {
            channel_count(self._scope, name) if len(shape) == rank + 2 else None
            for name, shape in zip(node.input, shapes, strict=True)
        }
        if len(channels) > 1 or None in channels:
            return None
        sizes = [shape[2:] if single else (shape[0], *shape[2:]) for shape in shapes]
        loose = not same_size(self._scope, node.input, rank, 2 if single else 0)
        if (self._whole_factors or not single) and loose or any(item.loose for item in maps):
            # One of them may be broadcast: a convolution of several elements does not commute with that, nor does a Concat.
            self.rejects.append(reject(self._scope, index, "sizes of the maps that are added", sizes, "the same ones"))
            return None
        return Map(tuple(part for item in maps for part in item.parts), nodes, summed=True, loose=loose)

    def _concat(self, index: int, depth: int) -> Map | None:
        node = self._scope.nodes[index]
        if attributes(node).get("axis", 1) % (self._rank + 2) != 1:
            return None
        maps = [self.map(name, depth + 1) for name in node.input]
        nodes = frozenset().union(*(item.nodes for item in maps))
        if (alike := _alike(maps)) is not None:
            count = channel_count(self._scope, node.output[0])
            return Map((Part(0, count, Applied(index, tuple(item.parts[0].source for item in maps)), alike),), nodes)
        counts = [channel_count(self._scope, name) for name in node.input]
        if any(item.loose for item in maps):
            self.rejects.append(reject(self._scope, index, "sizes of the maps that are added", "unknown", "the same ones"))
            return None
        if None in counts:
            if any(item.resampled for item in maps):
                self.rejects.append(reject(self._scope, index, "channels of the Concat's inputs", "unknown", "known"))
            return None
        parts: list[Part] = []
        first = 0
        for item, count in zip(maps, counts, strict=True):
            assert count is not None
            parts += [replace(part, first=part.first + first, channels=part.channels or count) for part in item.parts]
            first += count
        return Map(tuple(parts), nodes, any(item.summed for item in maps))

    # ---- normalisations -------------------------------------------------------------------------------------------------

    def _of_whole_factors(self, index: int, tensor: str, depth: int) -> Map | None:
        """The map that a normalisation reads, whose parts keep its statistics."""
        found = self.map(tensor, depth + 1)
        if not found.resampled:
            return None
        if found.summed or any(item.up is None or item.assumed for item in found.resampled):
            got, expected = "of another resampling", "of one that repeats each element"
            self.rejects.append(reject(self._scope, index, "statistics of the map", got, expected))
            return None
        return found

    def _normalised(self, index: int, depth: int) -> Map | None:
        node = self._scope.nodes[index]
        found = self._of_whole_factors(index, node.input[0], depth)
        if found is None or len(found.parts) > 1 and (is_op(node, "GroupNormalization") or not self._divisible(index, [0])):
            return None
        return self._applied(index, [0], [found], found.nodes)

    def _normalised_groups(self, index: int, depth: int) -> Map | None:
        """Condition (4): Reshape to [N, groups, rest], InstanceNormalization, Reshape to the shape before."""
        scope = self._scope
        chain = scope.chain(index, "InstanceNormalization", "Reshape")
        if chain is None or not groups_channels(scope, chain, self._rank):
            return None
        _, inner, first = chain
        found = self._of_whole_factors(inner, scope.nodes[first].input[0], depth)
        if found is None or len(found.parts) > 1:
            return None
        part = found.parts[0]
        done = Applied(index, (part.source,), None, "group_norm", inner)
        shapes = size_nodes(scope, [scope.nodes[index].input[1], scope.nodes[first].input[1]])
        return Map((replace(part, source=done),), found.nodes | set(chain) | shapes)


def _against(scope: Scope, found: Resample, rank: int, *, whole_factors: bool) -> Reject | None:
    """The reason why a convolution behind a resampling stays there."""
    index = found.resampler
    if whole_factors and found.up is None:
        if unknown_ratios(scope, index, rank):
            return unknown_scales(scope, index, rank)
        values = attributes(scope.nodes[index])
        got = [values[name].decode() for name in ("mode", "coordinate_transformation_mode", "nearest_mode") if name in values]
        got.append(f"{found.growth:g} times as many elements")
        return reject(scope, index, "resampling", ", ".join(got), "nearest upsampling by whole factors")
    if found.growth <= 1:
        return reject(scope, index, "elements of the result for each of the input", round(found.growth, 6), "more than 1")
    return None


def _idle(scope: Scope, index: int, rank: int) -> Ints:
    """A node that hands its first input on as it is, or views that do so together, nearest first; () for another."""
    step = step_or_reject(scope, index, rank)
    if not isinstance(step, Step) or step.affine is not IDENTITY or any(step.pads or ()):
        return ()
    return (index, *step.before)


def _alike(maps: Sequence[Map]) -> Resample | None:
    """The upsampling of all of these maps, where it is the same one."""
    if any(len(item.parts) > 1 or item.parts[0].resample is None for item in maps):
        return None
    found = [item.parts[0].resample for item in maps]
    return found[0] if found[0] is not None and found[0].up and len({item and item.key for item in found}) == 1 else None


def inputs_of(source: Source) -> Iterator[str]:
    """The tensors that a source is computed from, but for operands that stay."""
    if isinstance(source, str):
        yield source
    else:
        for operand in source.operands:
            if operand is not None:
                yield from inputs_of(operand)


def count_nodes(source: Source) -> int:
    """How many nodes of a source work on a whole map."""
    if isinstance(source, str):
        return 0
    return 1 + sum(count_nodes(operand) for operand in source.operands if operand is not None)

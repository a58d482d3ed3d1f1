"""Concats of channels that repeat an earlier one: they read its result.

    p = Concat(a, b); q = Concat(a, b, c)        p = Concat(a, b); q = Concat(p, c)

A DenseNet joins all maps so far in front of each layer, its transition's among them.  A runtime can let a map be written in
place into one Concat, and copies it into every other that reads it: (n - 1)(n + 2) / 2 copies in a block of n layers, where
joined step by step there are 2 (n - 1) at most.
Conditions: (1) both join along axis 1; (2) the earlier one's inputs, two or more, are the first of the later one's, which
has more.
"""

from __future__ import annotations

from collections.abc import Callable

from onnx import NodeProto

from convpool.ir.index import Scope
from convpool.ir.protos import AttributeReference, attributes, is_op, label


def repeats(scope: Scope, excluded: Callable[[str], bool]) -> dict[int, list[str]]:
    """For each Concat that begins as an earlier one does, by its number, the inputs to read instead."""
    earlier: dict[tuple[str, ...], str] = {}
    lengths: set[int] = set()
    found = {}
    for index, node in enumerate(scope.nodes):
        if not is_op(node, "Concat") or not _joins_channels(node):
            continue
        names = tuple(node.input)
        if not excluded(label(node)):
            for length in sorted((n for n in lengths if n < len(names)), reverse=True):
                if names[:length] in earlier:
                    found[index] = [earlier[names[:length]], *names[length:]]
                    break
        if len(names) > 1:
            earlier.setdefault(names, node.output[0])
            lengths.add(len(names))
    return found


def _joins_channels(node: NodeProto) -> bool:
    try:
        return attributes(node).get("axis") == 1
    except AttributeReference:
        return False

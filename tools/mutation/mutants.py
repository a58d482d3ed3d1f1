# SPDX-License-Identifier: Apache-2.0
"""Small wrong changes to a Python file, from its syntax tree.

Kinds: a comparison flipped or moved by one; arithmetic and bitwise operators exchanged; a number moved by one, a truth value
negated; and/or exchanged; a condition negated, a `not` dropped; None in place of what is returned; a statement or a guard
removed; min/max and any/all exchanged.

Left out: docstrings, annotations, asserts, imports, f-strings, and the arguments of what only words a message.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass

COMPARISONS = {
    ast.Lt: (ast.GtE, ast.LtE),
    ast.LtE: (ast.Gt, ast.Lt),
    ast.Gt: (ast.LtE, ast.GtE),
    ast.GtE: (ast.Lt, ast.Gt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
}
OPERATORS = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}
CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}
WORDING = ("reject", "refuse", "rejection", "outside")
"""Functions whose arguments word a message, beside those that end in Error."""
STATEMENTS = (ast.Expr, ast.AugAssign, ast.Raise, ast.Break, ast.Continue)
"""Statements that are removed; also an `if` without `else`."""


@dataclass(frozen=True)
class Mutant:
    """One change.  line: the first one changed, from 1; before, after: the text there; start, end: its place in UTF-8 bytes."""

    kind: str
    line: int
    before: str
    after: str
    start: int
    end: int

    def apply(self, text: str) -> str:
        """The file with this change."""
        data = text.encode()
        return (data[: self.start] + self.after.encode() + data[self.end :]).decode()


def mutants(text: str) -> list[Mutant]:
    """All changes to a file, in the order of the tree."""
    data, starts = text.encode(), [0]
    for line in text.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = []
    for node in _nodes(ast.parse(text)):
        start, end = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
        before = data[start:end].decode()
        for kind, changed in _changes(node):
            after = "pass" if changed is None else ast.unparse(changed)
            if isinstance(changed, ast.expr) and not isinstance(changed, ast.Constant | ast.Name | ast.Call):
                after = f"({after})"
            if kind == "return None":
                after = "return None"
            found.append(Mutant(kind, node.lineno, before, after, start, end))
    return found


def _nodes(node: ast.AST) -> Iterator[ast.expr | ast.stmt]:
    """The nodes that may be changed, outer ones first."""
    if isinstance(node, ast.expr | ast.stmt):
        yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not _is_left_out(child):
                yield from _nodes(child)


def _is_left_out(node: ast.AST) -> bool:
    if isinstance(node, ast.Assert | ast.Import | ast.ImportFrom | ast.JoinedStr):
        return True
    if isinstance(node, ast.Call):
        name = ast.unparse(node.func)
        return name in WORDING or name.endswith("Error")
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _changes(node: ast.expr | ast.stmt) -> Iterator[tuple[str, ast.AST | None]]:
    """Kinds of changes to a node, with what stands there instead; None for nothing."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        for operator in COMPARISONS.get(type(node.ops[0]), ()):
            yield "comparison", _with(node, ops=[operator()])
    elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS and not _is_text(node):
        yield "operator", _with(node, op=OPERATORS[type(node.op)]())
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield "truth value", _with(node, value=not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield "number", _with(node, value=node.value + 1)
        yield "number", ast.parse(repr(node.value - 1), mode="eval").body
    elif isinstance(node, ast.BoolOp):
        yield "and/or", _with(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "not", node.operand
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CALLS:
        yield "call", _with(node, func=ast.Name(CALLS[node.func.id], ast.Load()))
    elif isinstance(node, ast.IfExp):
        yield "condition", _with(node, test=ast.UnaryOp(ast.Not(), node.test))
    elif isinstance(node, ast.Return) and node.value is not None and ast.unparse(node.value) != "None":
        yield "return None", node
    elif isinstance(node, STATEMENTS) and not isinstance(getattr(node, "value", None), ast.Yield | ast.YieldFrom):
        yield "removed", None
    elif isinstance(node, ast.If) and not node.orelse:
        yield "removed", None


def _with(node: ast.AST, **changes: object) -> ast.AST:
    changed = copy.copy(node)
    for name, value in changes.items():
        setattr(changed, name, value)
    return ast.fix_missing_locations(changed)


def _is_text(node: ast.BinOp) -> bool:
    """Return True if an operand is a string for a person, or a type annotation at run time."""
    return any(
        isinstance(side, ast.JoinedStr) or isinstance(side, ast.Constant) and not isinstance(side.value, int | float)
        for side in (node.left, node.right)
    )

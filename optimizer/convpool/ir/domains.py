# SPDX-License-Identifier: Apache-2.0
"""Domains by another name: `ai.onnx` for the one of the standard operators, and a user's own for convpool's operators."""

from __future__ import annotations

from onnx import FunctionProto, ModelProto, helper

from convpool.errors import ModelError
from convpool.ir.protos import STANDARD_DOMAINS, model_nodes, opset_of
from convpool.ir.schema import DOMAIN, OP_TYPES, functions_for, permutes


def in_default_domain(model: ModelProto) -> ModelProto:
    """The model, as a copy with "" in place of `ai.onnx` where a node, a function or its imports have that.

    onnxruntime takes both for one, but in branches and as a function's import; onnx's checker refuses nodes of `ai.onnx`.
    Raises ModelError where both are imported, and differ.
    """
    name, alias = STANDARD_DOMAINS
    holders = (model, *model.functions)
    for holder in holders:
        versions = {entry.version for entry in holder.opset_import if entry.domain in STANDARD_DOMAINS}
        if len(versions) > 1:
            raise ModelError(f"model: opset of '{name}', which is '{alias}' too; got {sorted(versions)}, expected one version")
    used = {node.domain for node in model_nodes(model)}
    used |= {entry.domain for function in model.functions for entry in function.opset_import}
    if alias not in used or any(function.domain == alias for function in model.functions):
        return model
    result = ModelProto()
    result.CopyFrom(model)
    for node in model_nodes(result):
        node.domain = name if node.domain == alias else node.domain
    for holder in (result, *result.functions):
        version = opset_of(holder.opset_import)
        kept = [entry for entry in holder.opset_import if entry.domain not in STANDARD_DOMAINS]
        del holder.opset_import[:]
        holder.opset_import.extend([helper.make_opsetid(name, version), *kept] if version else kept)
    return result


def move_to_domain(model: ModelProto, domain: str, source: str = DOMAIN) -> bool:
    """Give the model's nodes of these operators and their functions another domain, for runtimes that look for it there.

    source: the domain that they have.  Functions that the domain has already, of an earlier move, stay.  Returns whether there
    was anything to move.
    """
    nodes = [node for node in model_nodes(model) if node.domain == source and node.op_type in OP_TYPES]
    if domain == source or not nodes:
        return False
    for node in nodes:
        node.domain = domain
    known = {function.name for function in model.functions if function.domain == domain}
    for index in reversed(range(len(model.functions))):
        function = model.functions[index]
        if function.domain == source:
            function.domain = domain
            if function.name in known:
                del model.functions[index]
    for holder in (model, *model.functions):
        own = [entry for entry in holder.opset_import if entry.domain == source]
        there = [entry for entry in holder.opset_import if entry.domain == domain]
        for entry in own:
            if there:
                there[0].version = max(there[0].version, entry.version)
                holder.opset_import.remove(entry)
            else:
                entry.domain = domain
    return True


def move_back(model: ModelProto) -> bool:
    """Undo `move_to_domain`, for domains with nothing but these operators as defined here; whether there were any."""
    opset = opset_of(model.opset_import)
    others: dict[str, set[str]] = {}
    for node in model_nodes(model):
        others.setdefault(node.domain, set()).add(node.op_type)
    functions: dict[str, list[FunctionProto]] = {}
    for function in model.functions:
        functions.setdefault(function.domain, []).append(function)
    ours = [
        domain
        for domain, found in functions.items()
        if domain != DOMAIN
        and others.get(domain, set()) <= {function.name for function in found} <= set(OP_TYPES)
        and all(_is_ours(function, opset) for function in found)
    ]
    return any([move_to_domain(model, DOMAIN, domain) for domain in ours])


def _is_ours(function: FunctionProto, opset: int) -> bool:
    """Whether a function computes what the operator of its name does."""
    (own,) = functions_for({function.name}, opset, {function.name} if permutes(function) else ())
    return all(list(getattr(own, part)) == list(getattr(function, part)) for part in ("input", "output", "attribute", "node"))

# SPDX-License-Identifier: Apache-2.0
"""BatchNorms in front of fused layers, in inference: one call for both, which decides how to run them."""

from __future__ import annotations

from torch import fx, nn

from convpool.torch.eager import pooled_conv
from convpool.torch.normed import normed_pooled_conv
from convpool.torch.rewrite.changes import held_by_changes
from convpool.torch.rewrite.layers import as_in
from convpool.torch.rewrite.memory import has_hooks

_SCALE = 3
"""The place of the scale among the arguments of pooled_conv."""
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_TENSORS = ("weight", "bias", "running_mean", "running_var")


def take_norms(root: nn.Module, graph: fx.Graph) -> None:
    """Give the graph's fused layers the BatchNorms in front of them that nothing else reads, in evaluation mode."""
    held = held_by_changes(root, graph)
    for node in list(graph.nodes):
        norm = node.args[0] if node.target is pooled_conv and node.args[_SCALE] is None else None
        if not isinstance(norm, fx.Node) or norm.op != "call_module" or norm in held or len(norm.users) > 1:
            continue
        module = root.get_submodule(str(norm.target))
        if len(norm.args) != 1 or norm.kwargs or not _is_fixed(module):
            continue
        with graph.inserting_before(node):
            tensors = [
                None if getattr(module, name) is None else graph.create_node("get_attr", f"{norm.target}.{name}")
                for name in _TENSORS
            ]
            made = graph.call_function(normed_pooled_conv, ((*tensors, module.eps), norm.args[0], *node.args[1:]))
        made.meta.update(node.meta)
        node.replace_all_uses_with(made)
        graph.erase_node(node)
        graph.erase_node(norm)


def _is_fixed(module: nn.Module) -> bool:
    """Whether a module is a BatchNorm of torch.nn by running means and variances, whose tensors are the same in every call."""
    if module.training or has_hooks(module) or not any(as_in(module, cls) for cls in _NORMS):
        return False
    own = {**module._parameters, **module._buffers}  # without those that parametrizations compute
    return own.keys() >= set(_TENSORS) and own["running_mean"] is not None and own["running_var"] is not None

# SPDX-License-Identifier: Apache-2.0
"""A backend of torch.compile that convolves on the smaller map, before nearest upsampling and behind average pooling.

    model = torch.compile(model, backend="convpool")
    model = torch.compile(model, backend="convpool", options={"inner": "inductor"})

TorchDynamo captures forward and watches what the capture depends on.  The backend rewrites its graph and gives back a function
that runs under PyTorch's own autograd: hooks, autocast, second derivatives and wrappers of modules are PyTorch's.
"""

import functools
import hashlib
import linecache
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch._inductor.custom_graph_pass import CustomGraphPass

from convpool.errors import ModelError, OptionError
from convpool.options import OptimizeOptions, options_for
from convpool.report import Report
from convpool.torch import eager, spectral
from convpool.torch.changes import inputs_of, is_of_module, value_of
from convpool.torch.deprecated import warn
from convpool.torch.rewriting import RuleByName, Unmapped, copied, rewritten_graph


def convpool(
    module: fx.GraphModule, example_inputs: Sequence[Any], *, mode: str | None = None, options: Mapping[str, Any] | None = None
) -> Callable:
    """The backend that torch.compile knows by this name.

    mode: inductor's, which then compiles the rewritten graph.  options: "inner": "inductor" for its default mode; "exclude" as
    `optimize` takes it; others are inductor's.
    """
    given = dict(options or {})
    if given.pop("accumulation", None) is not None:
        warn("accumulation", "convpool.torch sums in float32; leave it out")
    inner, exclude = given.pop("inner", "inductor" if mode else None), given.pop("exclude", ())
    if inner not in (None, "inductor"):
        raise OptionError(f"inner: got {inner!r}, expected None or 'inductor'")
    if given and inner is None:
        raise OptionError(f"options: got {', '.join(given)}, expected 'inner': 'inductor' with them")
    compiler = torch._TorchCompileInductorWrapper(mode, given, None) if inner else None
    return Backend(options_for(exclude=exclude), compiler)(module, example_inputs)


@dataclass
class Captured:
    """One graph that TorchDynamo has captured.

    call: the inputs and the mode that it is for.  breaks: where forward could not be followed, so that another graph follows.
    """

    call: str
    breaks: str = ""
    reports: list[Report] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


class Backend:
    """The backend, and what it has seen.  inner: of torch.compile, what compiles the rewritten graph: nothing, or inductor."""

    def __init__(self, options: OptimizeOptions | None = None, inner: Callable | None = None) -> None:
        self.options, self.inner = options or OptimizeOptions(), inner
        self.captured: list[Captured] = []

    def __call__(self, module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable:
        """A function that runs the graph rewritten, or the graph itself where nothing changes."""
        reason = getattr(module, "compile_subgraph_reason", None)
        seen = Captured(_described(module.graph), _where(reason) if getattr(reason, "graph_break", False) else "")
        self.captured.append(seen)
        if self.inner is not None:
            _rewrite_in_place(module.graph, self.options, seen)
            module.convpool = InductorPass().uuid()  # read by caches of graphs, whose gradients are convpool's code
            module.recompile()
            return self.inner(module, example_inputs)
        bodies = [child for child in module.modules() if isinstance(child, fx.GraphModule)]  # such as a checkpoint's
        for body in bodies:
            _keep_checkpoints(body)
            _keep_derivatives(body)
        for body in bodies[1:]:
            body.forward = self._runner(body, seen)
        return self._runner(module, seen)

    def _runner(self, module: fx.GraphModule, seen: Captured) -> Callable:
        """A function that runs the module's graph rewritten, or as it is where nothing changes.

        With gradients a GPU has two graphs: for CUDA graphs, and for eager steps."""
        graph, rule_by_name = _rewritten_or_none(module.graph, self.options, seen)
        if graph is None or not rule_by_name:
            return module.forward
        batch = eager.place_of_batch(module.graph)
        if batch is None or not torch.is_grad_enabled():
            return _guarded(module, eager.runnable(module, graph))
        eager.give_derivatives(graph)
        for_graphs = eager.runnable(module, graph)
        kept = copied(module.graph)  # TorchDynamo takes from its graph what it knows of the inputs
        step_of = functools.partial(_eager_step, module, kept, rule_by_name, self.options)
        return _guarded(module, eager.by_stream(step_of, for_graphs, batch))


def _eager_step(
    module: fx.GraphModule, graph: fx.Graph, rule_by_name: RuleByName, options: OptimizeOptions, scale: float
) -> Callable:
    """A function that runs an eager step on a GPU, for a batch that is `scale` times the one that TorchDynamo captured."""
    taken, with_derivatives = eager.gaining(graph, rule_by_name, scale)
    made = _rewritten_or_none(graph, options, Captured(""), rule_by_name.keys() - taken)[0] if taken else copied(graph)
    if made is None:
        return module.forward
    if eager.may_have_penalty(made):
        nodes = [node for node in made.nodes if node.name in with_derivatives or "convolution" in node.meta]
        eager.give_derivatives(made, nodes)  # of those that the rules have made, too
    return eager.runnable(module, made, with_derivatives=with_derivatives)


def _rewritten_or_none(
    graph: fx.Graph, options: OptimizeOptions, seen: Captured, stay: Collection[str] = ()
) -> tuple[fx.Graph | None, RuleByName]:
    """The rewritten graph, and the convolutions that were rewritten, but for those of `stay`; the report goes to `seen`.  None in
    place of the graph where the original is to run: whatever is wrong with it."""
    try:
        made, report, rule_by_name = rewritten_graph(graph, options, stay)
    except (Unmapped, ModelError) as error:
        seen.errors.append(f"the graph stays as it is: {error}")
        return None, {}
    seen.reports.append(report)
    return made, rule_by_name


def _rewrite_in_place(graph: fx.Graph, options: OptimizeOptions, seen: Captured) -> None:
    """Rewrite a graph for a compiler.  Its inputs stay: TorchDynamo has attributes of its own on them."""
    rewritten, rule_by_name = _rewritten_or_none(graph, options, seen)
    if rewritten is None or not rule_by_name:
        return
    eager.run_by_library(rewritten)
    spectral.normalize_at_once(rewritten, torch.ops.convpool.normalized_weights.default)
    for node in reversed(graph.nodes):
        if node.op != "placeholder":
            graph.erase_node(node)
    made = dict(zip(rewritten.find_nodes(op="placeholder"), graph.nodes, strict=True))
    for node in rewritten.nodes:
        made[node] = made.get(node) or graph.node_copy(node, made.__getitem__)


# ---- eager calls ----


def _guarded(module: fx.GraphModule, run: Callable) -> Callable:
    """`run`, but the module where what the graph changes has come to share memory with another tensor; arguments may have one."""
    original, (known, changed) = module.forward, inputs_of(module.graph)
    if not changed or len(set(known.values())) == 1:
        return run

    def guarded(*inputs: Any) -> Any:
        before = {inputs[place].untyped_storage()._cdata: known[place] for place in changed}
        shares = any([before.get(inputs[place].untyped_storage()._cdata, memory) != memory for place, memory in known.items()])
        return original(*inputs) if shares else run(*inputs)

    return guarded


def _keep_checkpoints(module: fx.GraphModule) -> None:
    """Recompute in the backward pass what forward says, in bodies too, and call regions: AOTAutograd alone knows them."""
    for node in module.graph.find_nodes(op="call_function", target=torch.ops.higher_order.invoke_subgraph):
        node.target, node.args = torch.ops.higher_order.wrap, (node.args[0], *node.args[2:])
    for node in module.graph.find_nodes(op="call_function", target=torch.ops.higher_order.tag_activation_checkpoint):
        body, *inputs = node.args
        for given, item in zip(inputs, getattr(module, body.target).graph.find_nodes(op="placeholder"), strict=True):
            item.meta["grapharg"] = given.meta.get("grapharg")  # its own has none
        node.target, node.args = _checkpointed, (body, [is_of_module(item) for item in inputs], *inputs)
    module.recompile()


def _keep_derivatives(module: fx.GraphModule) -> None:
    """Let backward passes of functions of autograd have derivatives, but of once_differentiable: TorchDynamo's have none."""
    for node in module.graph.find_nodes(op="call_function", target=torch.ops.higher_order.autograd_function_apply):
        body = getattr(module, node.args[1].target)
        once = any("autograd/function.py" in (item.meta.get("stack_trace") or "") for item in body.graph.nodes)
        for switch in () if once else body.graph.find_nodes(op="call_function", target=torch._C._set_grad_enabled):
            body.graph.erase_node(switch)
        body.recompile()


def _checkpointed(body: Callable, own: Sequence[bool], *inputs: Any, **options: Any) -> Any:
    """PyTorch's checkpoint.  own: which inputs are the module's, no arguments there: so the body may change them.

    TorchDynamo does not tell which of these were arguments, nor those that nothing reads: a reentrant checkpoint whose other
    arguments need no gradients is one that is not reentrant, so that parameters get theirs."""
    kept = [value if is_own else None for value, is_own in zip(inputs, own, strict=True)]

    def run(*given: Any) -> Any:
        rest = iter(given)
        return body(*[value if is_own else next(rest) for value, is_own in zip(kept, own, strict=True)])

    given = [value for value, is_own in zip(inputs, own, strict=True) if not is_own]
    if not any(isinstance(value, Tensor) and value.requires_grad for value in given):
        options["use_reentrant"] = False
    return torch.utils.checkpoint.checkpoint(run, *given, **{"use_reentrant": False, **options})


# ---- what a person reads of a graph ----


def _described(graph: fx.Graph) -> str:
    """The inputs and the mode that a graph is for."""
    values = [value_of(node) for node in graph.find_nodes(op="placeholder") if not is_of_module(node)]
    tensors = [value for value in values if isinstance(value, Tensor)]
    inputs = [f"{str(x.dtype).removeprefix('torch.')}[{', '.join(map(str, x.shape))}]" for x in tensors]
    modes = "with gradients" if torch.is_grad_enabled() else "without gradients"
    casts = any(torch.is_autocast_enabled(x.device.type) for x in tensors if x.device.type != "meta")
    return ", ".join([*inputs, modes, *(["autocast"] if casts else [])])


def _where(reason: Any) -> str:
    """Why TorchDynamo's graph ends before forward does, in a line."""
    own, stack = (str(Path(__file__).parents[1]), "/torch/nn/modules/"), getattr(reason, "user_stack", None) or ()
    frames = [frame for frame in stack if not any(place in frame.filename for place in own)]
    if not frames:
        return str(reason.reason).strip().splitlines()[0]
    name, line = frames[-1].filename, frames[-1].lineno
    return f"{Path(name).name}:{line}: {linecache.getline(name, line).strip()}"


# ---- as a pass of inductor ----


class InductorPass(CustomGraphPass):
    """A pass of inductor over a graph before autograd."""

    def __call__(self, graph: fx.Graph) -> None:
        """Rewrite the graph."""
        _rewrite_in_place(graph, OptimizeOptions(), Captured(""))

    def uuid(self) -> Any:
        """A digest of the package's files, by which inductor's cache tells this version from another."""
        files = sorted(Path(__file__).parents[1].rglob("*.py"))
        return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def compile_options(*, accumulation: Any = None) -> dict[str, Any]:
    """Options for torch.compile, by which inductor rewrites the pairs that it captures.  Ends with release 0.4."""
    warn("compile_options", "use backend='convpool' with options={'inner': 'inductor'}")
    return {"pre_grad_custom_pass": InductorPass()}

# SPDX-License-Identifier: Apache-2.0
"""Timing the lowerings of one site in onnxruntime on the machine at hand, since the best differs by layer.

The site's nodes are cut out into a model of their own, which is optimized once per lowering.  All of them, the
original included, then take turns, so that a drift of the machine's speed meets them alike; the median decides.
Source: Suita et al., JPDC 2020, section 5, where too the best method differs by layer.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from onnx import ModelProto, helper, numpy_helper

from convpool.algebra.expand import FORMS
from convpool.algebra.lowering import LOWERINGS
from convpool.check.inputs import InputMaker
from convpool.check.session import OnnxruntimeRunner, evaluate, time_sessions
from convpool.errors import ModelError
from convpool.ir.index import Scope
from convpool.ir.inference import infer_shapes
from convpool.ir.model import LoadedModel
from convpool.ir.process import EndedError
from convpool.options import OptimizeOptions
from convpool.pipeline import Pipeline
from convpool.rules import Stage
from convpool.rules.base import Context, Plan, Reject, Rule, Site, reject

ROUNDS = 9
BUDGET_S = 1.5
"""A site's rounds stop when this much time is spent, though not before three."""


class Tuner:
    """Chooses lowerings by measurement."""

    def __init__(self, seed: int, progress: Callable[[int, int, str], None] | None) -> None:
        self._seed, self._progress, self._done, self._expected = seed, progress, 0, 0

    def expect(self, sites: int) -> None:
        """So many more sites will be timed, for the progress shown."""
        self._expected += sites

    def tune(self, rule: Rule, site: Site, plan: Plan, context: Context) -> tuple[Plan | Reject, dict[str, float] | None]:
        """The fastest plan, a Reject where the original is, or `plan` where none can be timed; and medians in microseconds."""
        scope, node = site.scope, site.scope.nodes[site.root]
        if self._progress:
            self._progress(self._done, self._expected, f"timing {node.name or node.output[0]}")
        self._done += 1
        candidates = rule.alternatives(site, context)
        if not candidates or plan.timed is None:
            return plan, None
        try:
            cut = _cut_out(plan.scope, *plan.timed, context)
            runners = {"original": OnnxruntimeRunner(LoadedModel(cut, None, 0), "the site", optimize=True, spin=True)}
            arrays, _ = InputMaker(cut, None, {}, self._seed).runnable(0, runners["original"].values)
            for name in candidates:
                lowered = LoadedModel(_lowered(cut, rule, name), None, 0)
                runners[name] = OnnxruntimeRunner(lowered, "the site", optimize=True, spin=True)
                runners[name].values(arrays)
            sessions = {name: runner.session for name, runner in runners.items()}
            times = time_sessions(sessions, arrays, ROUNDS, BUDGET_S)
        except (ModelError, EndedError):  # the site cannot be cut out, or onnxruntime cannot run it: there is nothing to measure
            return plan, None
        best = min(times, key=lambda name: times[name])
        if best == "original":
            expected = f"a lowering faster than {times[best]:.1f} us"
            got = ", ".join(f"{name} {value:.1f} us" for name, value in times.items() if name != best)
            return reject(scope, site.root, "measured slower", got, expected), times
        return candidates[best], times


def _cut_out(scope: Scope, indices: frozenset[int], result: str, context: Context) -> ModelProto:
    """The site's nodes as a model: constants become initializers, everything else inputs of known type."""
    nodes = [scope.nodes[index] for index in sorted(indices)]
    made = {name for node in nodes for name in node.output}
    inputs, constants = [], []
    for name in dict.fromkeys(name for node in nodes for name in node.input if name and name not in made):
        constant = scope.constant(name)
        if constant is not None:
            constants.append(numpy_helper.from_array(np.ascontiguousarray(constant.array()), name))
            continue
        info = scope.info(name)
        shape = context.sizes.get(name, info.shape)
        if not info.elem_type or shape is None:
            raise ModelError(f"{name}: type or rank unknown")
        inputs.append(helper.make_tensor_value_info(name, info.elem_type, shape))
    elem_type = scope.info(result).elem_type or inputs[0].type.tensor_type.elem_type
    output = helper.make_tensor_value_info(result, elem_type, None)
    graph = helper.make_graph(nodes, "site", inputs, [output], constants)
    return helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", context.main_opset)])


def _lowered(model: ModelProto, rule: Rule, lowering: str) -> ModelProto:
    """A copy of a cut-out site in the lowering, or the form of an upsampling, asked for."""
    result = LoadedModel(ModelProto(), None, 0)
    result.proto.CopyFrom(model)
    options = OptimizeOptions(
        passes=frozenset(rule.names),
        lowering=lowering if lowering in LOWERINGS else "auto",
        upsampling=lowering if lowering in FORMS else None,
    )
    Pipeline(result, infer_shapes(result.proto), options, evaluate).run((Stage((rule,), repeats=False),))
    return result.proto

# SPDX-License-Identifier: Apache-2.0
"""Random models: each is rejected with a reason and left as it is to the byte, or rewritten exactly.

Two bounds per rewritten case, with e the float64 value of the original, |e| its magnitude (`exact.Traced`: the same
sums over absolute values), u the unit roundoff of the model's type:

1. The result in float64 arithmetic differs from e only by the rounding of the constants that the rewrite made and by
   float64's own: |r - e| <= (gamma(2 s + 1, u) + gamma(n, 2^-53)) |e|.  Each of the s rewritten convolutions adds a
   rounding of its weights (fold or fuse) and of its bias; a mean written as Mul by 1/n adds that constant's own; each
   node that a convolution fuses adds one more, of scale and shift or of the weights again.  A wrong window, pad or
   channel is off by a share of |e| near 1, so this detects it in every type.
2. The result run in its own type: |y - e| <= gamma(n + 2 s + 1, u) |e|, n the roundings on the longest way through
   the result, each operator counted with all of its terms.  A rewritten model sums the same terms as the original, so
   |e| serves both.

The float64 arithmetic is the tests' own (`tests.support.error_bounds`).  For the types without kernels in onnxruntime (bfloat16,
float64) the second run is onnx's ReferenceEvaluator's.  CONVPOOL_TEST_ROUNDS multiplies the number of cases,
CONVPOOL_PROPERTY_FIRST sets the first.
"""

import os
import re
from collections import Counter
from dataclasses import dataclass, field, replace

import numpy as np
import onnx
import pytest
from onnx.inliner import inline_local_functions
from onnx.reference import ReferenceEvaluator

import convpool
from convpool import options
from convpool.ir import schema
from convpool.rules import offloaded
from tests.support import sessions
from tests.support.error_bounds import UNIT_ROUNDOFF, Traced, evaluate, gamma
from tests.support.random_models import Case
from tests.support.random_pooling import make_case
from tests.support.rewriting import cases

CASES = cases(800)
FIRST = int(os.environ.get("CONVPOOL_PROPERTY_FIRST", "0"))
REASON = re.compile(r"^(tensor|[A-Z]\w+) '[^']*': .+; got .+, expected .+", re.DOTALL)
"""<node>: <condition>; got <value>, expected <value>."""
REWRITTEN = {
    "rewritten": 375, "lowering convavgpool": 240, "lowering direct": 50, "lowering fused": 32, "lowering auto": 38,
    "pool average": 100, "pool global": 22, "pool slices": 18, "pool steps": 17, "pool resize": 7, "pool box": 46,
    "pool view": 29, "pool reduce": 24, "pool unsqueezed": 28, "pool axes": 13, "pool flattened": 18, "pool sum": 25,
}  # fmt: skip
"""So many of a thousand cases, or more, are rewritten: a tenth to a fifth fewer than now, to see a form that is lost."""
RUNTIME_OPSET, RUNTIME_IR = 26, 13
"""The newest that the oldest onnxruntime of interest is known to take; newer models are checked by the first bound."""


@dataclass
class Tally:
    """The outcome of all cases together."""

    failures: list[str] = field(default_factory=list)
    counts: Counter = field(default_factory=Counter)
    reasons: Counter = field(default_factory=Counter)
    worst: dict[str, float] = field(default_factory=dict)

    def ratio(self, what: str, error: np.ndarray, bound: np.ndarray) -> float:
        """The largest error in units of its bound, kept if it is the worst so far."""
        assert (error[bound == 0] == 0).all(), f"{what}: an error where none is allowed"
        value = float((error[bound > 0] / bound[bound > 0]).max(initial=0.0))
        self.worst[what] = max(self.worst.get(what, 0.0), value)
        return value


@pytest.fixture(scope="module")
def tally() -> Tally:
    """All cases, run once; there plain convolutions are narrow, and no costs of a CPU count."""
    result = Tally()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offloaded, "WIDE_CHANNELS", options.IMAGE_CHANNELS + 1)
        patch.setattr(offloaded, "CHANNEL_MULTIPLE", 1)
        patch.setitem(options.TARGETS, "any", replace(options.TARGETS["any"], devices=("gpu",)))
        run_cases(result)
    print(f"\n{CASES} cases: {dict(result.counts.most_common())}\nworst error/bound: {result.worst}\nrejected:")
    for reason, count in result.reasons.most_common():
        print(f"  {count:5d} {reason}")
    return result


def run_cases(result: Tally, count: int = CASES, target: str = "any") -> None:
    for seed in range(FIRST, FIRST + count):
        try:
            check_case(make_case(seed), result, target)
        except Exception as error:  # collected, so that one run shows every failure
            result.failures.append(f"case {seed}: {type(error).__name__}: {str(error)[:400]}")


def test_every_case_is_rejected_or_exact(tally):
    shown = "\n".join(tally.failures[:20])
    again = "CONVPOOL_TEST_ROUNDS=0 CONVPOOL_PROPERTY_FIRST=<case> python -m pytest tests/rules/pool_first/test_property.py"
    assert not tally.failures, f"{len(tally.failures)} of {CASES} cases fail; repeat one by\n{again}\n{shown}"


def test_every_case_is_rejected_or_exact_for_cuda():
    """Every second case with the target cuda, whose lowering is the operator."""
    result = Tally()
    run_cases(result, CASES // 2, "cuda")
    print(f"\n{CASES // 2} cases: {dict(result.counts.most_common())}\nworst error/bound: {result.worst}")
    assert not result.failures, f"{len(result.failures)} cases fail\n" + "\n".join(result.failures[:20])
    if CASES >= 500:
        assert result.counts["channels last"] >= 0.02 * CASES and result.counts["ran"] >= 0.05 * CASES


def test_the_cases_reach_what_they_are_for(tally):
    if CASES < 500:
        pytest.skip("too few cases for shares")
    shares = {"rejected": 0.2, "ran": 0.2, "evaluated": 0.03, "absorbing": 0.05, "named": 0.04}
    some = [*(f"rank {rank}" for rank in (1, 2, 3)), *UNIT_ROUNDOFF, "join Add", "join Concat"]
    some += [f"weights {kind}" for kind in ("overridable", "computed", "constant", "identity")]
    some += [f"prologue {part}" for part in ("none", "Affine", "AffineRelu", "LeakyRelu")]
    some += [f"epilogue {part}" for part in ("none", "Relu", "Tanh", "Sigmoid", "Add", "AddRelu")]
    for name, least in {
        **dict.fromkeys([*some, "plain", "residual broadcast", "stem", "plain_conv"], 0.001),
        **shares,
        **{name: count / 1000 for name, count in REWRITTEN.items()},
    }.items():
        assert tally.counts[name] >= least * CASES, f"only {tally.counts[name]} of {CASES} cases are '{name}'"
    assert len(tally.reasons) >= 10
    assert tally.counts["evaluator is wrong on the original"] <= 0.01 * CASES


def check_case(case: Case, tally: Tally, target: str = "any") -> None:
    """Everything that holds for any model, then the two bounds.  Every fourth case is without fused variants, every third without
    stems, every fifth without plain convolutions."""
    fused = case.seed % 4 > 0
    more = [name for name, every in (("image_conv", 3), ("plain_conv", 5)) if case.seed % every]
    options = {"check": 0, "disable": () if fused else ("fuse_prologue", "fuse_epilogue")}
    options |= {"lowering": case.lowering, "enable": more} if target == "any" else {"target": target}
    before, result = case.model.SerializeToString(deterministic=True), convpool.optimize(case.model, **options)
    after = result.model.SerializeToString(deterministic=True)
    assert case.model.SerializeToString(deterministic=True) == before, "the model given was changed"
    sites = result.report.sites
    for site in sites:
        if site.status == "rejected":
            assert REASON.match(site.reason), f"a reason without node, value and expectation: {site.reason}"
            tally.reasons[re.sub(r"'[^']*'", "*", site.reason.split("; got")[0])] += 1
    rewritten = sum(site.status == "rewritten" for site in sites)
    tally.counts["cases"] += 1
    if not rewritten:
        assert after == before, "no site was rewritten, yet the model changed"
        tally.counts["rejected" if sites else "no site"] += 1
        return
    tally.counts["rewritten"] += 1
    tally.counts.update([f"lowering {case.lowering}", case.dtype, *(f"{k} {v}" for k, v in case.tags.items())])
    again = convpool.optimize(result.model, **options)
    assert again.model.SerializeToString(deterministic=True) == after, "the second run changed the model"
    for kind in offloaded.KINDS.values():
        tally.counts[kind] += any(site.pattern == kind and site.status == "rewritten" for site in sites)
    tally.counts["stem behind a pooling"] += any(site.pattern == "stem" and bool(site.pool) for site in sites)
    tally.counts["channels last"] += any(map(schema.layout_of, filter(schema.is_operator, result.model.graph.node)))
    marks = {"convpool.target": "cuda"} if target == "cuda" else {}
    assert {item.key: item.value for item in result.model.metadata_props if item.key.startswith("convpool")} == marks
    check_form(case.model, result.model)
    kinds = [node.op_type for node in result.model.graph.node if node.domain == "ai.convpool"]
    if not fused:
        assert set(kinds) <= {"ConvAvgPool"}, f"{kinds}, without the options"
        tally.counts["plain"] += bool(kinds)
    elif case.operator is not None and case.lowering == "convavgpool" and target == "any" and len(kinds) == 1:
        assert kinds == [case.operator], f"{kinds[0]}, must be {case.operator}; {[site.beside for site in sites]}"
        before, after = case.operator.split("ConvAvgPool")
        tally.counts.update(["named", f"prologue {before or 'none'}", f"epilogue {after or 'none'}"])
    single = case.tags["join"] == "none"
    if case.tags["rank"] == "3" or single and (case.tags["group"] != "1" or case.tags["window"] == "large"):
        assert not kinds, f"{kinds}, for which the plugin has no fast kernel"
    if "broadcast" in case.tags.get("residual", ""):
        assert not any("Add" in kind for kind in kinds), "a residual that is broadcast was fused"
    absorbed = sum(len(site.absorbed) for site in sites)
    assert fused or not absorbed
    tally.counts["absorbing"] += absorbed > 0
    turned = sum(node.op_type in ("Mul", "Add") for node in result.model.graph.node) if target == "cuda" else 0  # of a norm
    check_values(case, result.model, 2 * rewritten + 1 + absorbed + turned, tally)


def check_form(original: onnx.ModelProto, result: onnx.ModelProto) -> None:
    """The result is as valid as the original, and its outside is the same."""
    try:
        onnx.checker.check_model(original, full_check=True)
    except onnx.checker.ValidationError:
        pass
    else:
        onnx.checker.check_model(result, full_check=True)
    initializers = {tensor.name for tensor in original.graph.initializer} if original.ir_version < 4 else set()
    inputs = [[value for value in m.graph.input if value.name not in initializers] for m in (original, result)]
    assert inputs[0] == inputs[1] and list(original.graph.output) == list(result.graph.output)
    for name in ("producer_name", "producer_version", "domain", "model_version", "doc_string"):
        assert getattr(original, name) == getattr(result, name), name
    assert list(original.metadata_props) == [item for item in result.metadata_props if not item.key.startswith("convpool")]
    assert (original.graph.name, original.graph.doc_string) == (result.graph.name, result.graph.doc_string)
    made = [name for node in result.graph.node for name in node.output]
    known = {*made, *(tensor.name for tensor in result.graph.initializer)}
    assert len(made) == len(set(made)), "a tensor is made twice"
    assert {value.name for value in result.graph.value_info} <= known, "value_info of a tensor that is gone"
    used = {name for node in result.graph.node for name in node.input}
    unused = {tensor.name for tensor in result.graph.initializer} - used
    assert unused <= {value.name for value in result.graph.input}, f"constants that nothing reads: {unused}"


def check_values(case: Case, result: onnx.ModelProto, constants: int, tally: Tally) -> None:
    """The two bounds of the module's docstring, and that value_info tells the truth.  constants: roundings of the constants that
    the rewrite made, on the way of any term."""
    name = case.model.graph.output[0].name
    exact = evaluate(case.model, case.feeds)[name]
    if not np.isfinite(exact.magnitude).all():  # a division by data that is 0
        tally.counts["infinite"] += 1
        return
    env = evaluate(result, case.feeds)
    for info in result.graph.value_info:
        if not info.type.tensor_type.HasField("shape"):
            continue
        dims = [dim.dim_value if dim.HasField("dim_value") else None for dim in info.type.tensor_type.shape.dim]
        shape = env[info.name].value.shape
        assert len(dims) == len(shape) and all(d in (None, n) for d, n in zip(dims, shape, strict=True)), info.name
    made, unit = env[name], UNIT_ROUNDOFF[case.dtype]
    assert made.value.shape == exact.value.shape
    tiny = gamma(exact.roundings + made.roundings + 8, UNIT_ROUNDOFF["float64"])
    bound = (gamma(constants, unit) + tiny) * exact.magnitude
    ratio = tally.ratio(f"{case.dtype} constants", np.abs(made.value - exact.value), bound)
    assert ratio <= 1, f"{case.lowering}, {case.tags}: in float64 {ratio:.3g} times the bound"
    output = run(case, result, exact, tally)
    if output is not None:
        assert output.shape == exact.value.shape
        bound = gamma(made.roundings + constants, unit) * exact.magnitude
        ratio = tally.ratio(f"{case.dtype} run", np.abs(output.astype(np.float64) - exact.value), bound)
        assert ratio <= 1, f"{case.lowering}, {case.tags}: {ratio:.3g} times the bound when run"


def run(case: Case, result: onnx.ModelProto, exact: Traced, tally: Tally) -> np.ndarray | None:
    """The output as a runtime computes it; None where there is none for such a model."""
    opset = max(entry.version for entry in result.opset_import if not entry.domain)
    native = case.dtype in ("float32", "float16")
    if native and (opset > RUNTIME_OPSET or result.ir_version > RUNTIME_IR):
        return None
    if not native and opset < 14 and any("Affine" in node.op_type for node in result.graph.node):
        return None  # onnx's evaluator mixes the batch's own mean into BatchNormalization
    if not native and any(array.size > 4000 for array in case.feeds.values()):
        return None  # the reference is slow
    runner = sessions.run if native else reference_run
    try:
        original = runner(case.model, case.feeds)[0]
    except Exception:  # a runtime's limits, such as dilations with SAME, are none of the result's
        tally.counts["original does not run"] += 1
        return None
    if not native:
        # onnx's evaluator mixes the batch's own mean into BatchNormalization before opset 14.
        error = np.abs(original.astype(np.float64) - exact.value)
        if (error > gamma(exact.roundings + 1, UNIT_ROUNDOFF[case.dtype]) * exact.magnitude).any():
            assert opset < 14 and any(node.op_type == "BatchNormalization" for node in case.model.graph.node)
            tally.counts["evaluator is wrong on the original"] += 1
            return None
    tally.counts["ran" if native else "evaluated"] += 1
    return runner(result, case.feeds)[0]


def reference_run(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> list:
    """All outputs by onnx's evaluator, which wants every input of a function, optional or not."""
    return ReferenceEvaluator(inline_local_functions(model)).run(None, feeds)

# SPDX-License-Identifier: Apache-2.0
"""onnx's own backend test suite: every model is optimized; one without a pair stays as it is, one with a pair computes the same.
Its cases are the installed onnx package's: single operators, small models with control flow and sequences, models converted from
PyTorch, and the light forms of real networks."""

import warnings
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx.backend.test.loader import load_model_tests

import convpool
from convpool.errors import ModelError
from tests.support.sessions import session

KINDS = ("node", "simple", "pytorch-converted", "pytorch-operator")
LIGHT = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
RTOL, ATOL = 1e-4, 1e-5
"""A rewritten sum of n float32 products is off by up to n 6e-8 of their magnitudes, n up to 1e3 in these models."""


@dataclass
class Outcome:
    """The outcome of all cases; `failures` has a line for each that broke."""

    optimized: int = 0
    refused: list[str] = field(default_factory=list)
    rewritten: dict[str, int] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)


def backend_cases():
    """(name, model) of every case of the suite that the package brings the model of."""
    for kind in KINDS:
        for case in load_model_tests(kind=kind):
            yield f"{kind}/{case.name}", case.model or onnx.load(Path(case.model_dir) / "model.onnx")
    for path in sorted(LIGHT.glob("*.onnx")):
        yield f"light/{path.stem}", onnx.load(path)


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    """All cases, once."""
    result = Outcome()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # making the cases overflows on purpose
        for name, model in backend_cases():
            try:
                run_case(name, model, result)
            except Exception as error:  # collected, so that one run shows every failure
                result.failures.append(f"{name}: {type(error).__name__}: {str(error)[:200]}")
    return result


def test_no_model_breaks(outcome):
    assert not outcome.failures, "\n".join([f"{len(outcome.failures)} cases", *outcome.failures[:30]])


def test_only_models_that_onnx_refuses_too_are_refused(outcome):
    assert len(outcome.refused) <= 20, "\n".join(outcome.refused)


def test_the_suite_is_really_run(outcome):
    assert outcome.optimized >= 1900
    assert outcome.rewritten["light/light_densenet121"] == 3


def run_case(name: str, model: onnx.ModelProto, outcome: Outcome) -> None:
    """Optimize, then compare with the original in onnxruntime where that is another model."""
    before = model.SerializeToString(deterministic=True)
    try:
        result = convpool.optimize(model, check=0)
    except ModelError as error:
        with pytest.raises(Exception):  # noqa: B017 - the checker has several kinds of exception
            onnx.checker.check_model(model)
        outcome.refused.append(f"{name}: {error}")
        return
    outcome.optimized += 1
    assert model.SerializeToString(deterministic=True) == before, "the model given was changed"
    rewritten = sum(site.status == "rewritten" for site in result.report.sites)
    if not rewritten:
        assert result.model.SerializeToString(deterministic=True) == before, "nothing rewritten, yet changed"
        return
    outcome.rewritten[name] = rewritten
    runners, rng = [session(each) for each in (model, result.model)], np.random.default_rng(0)
    feeds = {value.name: rng.standard_normal(value.shape).astype(np.float32) for value in runners[0].get_inputs()}
    for one, other in zip(*(runner.run(None, feeds) for runner in runners), strict=True):
        np.testing.assert_allclose(other, one, rtol=RTOL, atol=ATOL * max(1.0, np.abs(one).max()))

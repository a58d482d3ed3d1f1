# SPDX-License-Identifier: Apache-2.0
"""onnx's own backend test suite: every model is optimized, and what onnxruntime runs gives the same outputs as before.

Its cases are the installed onnx package's: single operators, small models with control flow and sequences, models
converted from PyTorch, and the light forms of real networks.  Where the inputs come with the case they are used.
"""

import warnings
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
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
    compared: int = 0
    refused: list[str] = field(default_factory=list)
    rewritten: dict[str, int] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)


def backend_cases():
    """(name, model, inputs or None) of every case of the suite that the package brings the model of."""
    for kind in KINDS:
        for case in load_model_tests(kind=kind):
            if case.model is not None:
                yield f"{kind}/{case.name}", case.model, case.data_sets[0][0] if case.data_sets else None
            else:
                folder = Path(case.model_dir)
                yield f"{kind}/{case.name}", onnx.load(folder / "model.onnx"), stored_inputs(folder)
    for path in sorted(LIGHT.glob("*.onnx")):
        yield f"light/{path.stem}", onnx.load(path), None


def stored_inputs(folder: Path) -> list | None:
    """The tensors of the first data set; None where an input is no tensor."""
    arrays = []
    for path in sorted((folder / "test_data_set_0").glob("input_*.pb"), key=lambda p: int(p.stem.split("_")[1])):
        tensor = onnx.TensorProto()
        try:
            tensor.ParseFromString(path.read_bytes())
            arrays.append(numpy_helper.to_array(tensor))
        except Exception:  # a sequence or optional, stored as another message
            return None
    return arrays


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    """All cases, once."""
    result = Outcome()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # making the cases overflows on purpose
        for name, model, inputs in backend_cases():
            try:
                run_case(name, model, inputs, result)
            except Exception as error:  # collected, so that one run shows every failure
                result.failures.append(f"{name}: {type(error).__name__}: {str(error)[:200]}")
    return result


def test_no_model_breaks(outcome):
    assert not outcome.failures, "\n".join([f"{len(outcome.failures)} cases", *outcome.failures[:30]])


def test_only_models_that_onnx_refuses_too_are_refused(outcome):
    assert len(outcome.refused) <= 20, "\n".join(outcome.refused)


def test_the_suite_is_really_run(outcome):
    assert outcome.optimized >= 1900
    assert outcome.compared >= 1200
    assert outcome.rewritten["light/light_densenet121"] == 3


def run_case(name: str, model: onnx.ModelProto, inputs: list | None, outcome: Outcome) -> None:
    """Optimize, then compare with the original in onnxruntime where that runs it."""
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
    if rewritten:
        outcome.rewritten[name] = rewritten
    else:
        assert result.model.SerializeToString(deterministic=True) == before, "nothing rewritten, yet changed"
    try:
        original = session(model)
        feeds = make_feeds(original, inputs)
        expected = original.run(None, feeds)
    except Exception:  # onnxruntime lacks the operator, opset or type; the checker has seen the result
        return
    outcome.compared += 1
    compare(expected, session(result.model).run(None, feeds), original.run(None, feeds))


def make_feeds(runner, inputs: list | None) -> dict[str, object]:
    """The case's own inputs, or random ones for a network that has none."""
    if inputs is not None:
        return {value.name: array for value, array in zip(runner.get_inputs(), inputs, strict=False)}
    rng = np.random.default_rng(0)
    return {value.name: rng.standard_normal(value.shape).astype(np.float32) for value in runner.get_inputs()}


def compare(expected: list, got: list, again: list) -> None:
    """Equal within the tolerance; outputs in which the original differs from itself are random."""
    assert len(expected) == len(got)
    for one, other, repeated in zip(expected, got, again, strict=True):
        if isinstance(one, list) and isinstance(other, list):
            compare(one, other, repeated)
        elif not isinstance(one, np.ndarray) or one.dtype.kind not in "fc":
            assert np.array_equal(one, other) or not np.array_equal(one, repeated)
        elif np.array_equal(one, repeated, equal_nan=True):
            np.testing.assert_allclose(other, one, rtol=RTOL, atol=ATOL * max(1.0, np.abs(one[np.isfinite(one)]).max(initial=0)))

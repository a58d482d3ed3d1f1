# SPDX-License-Identifier: Apache-2.0
"""The check where outputs are not finite, and what it makes of its random inputs then."""

import json

import ml_dtypes  # noqa: F401  numpy knows bfloat16 by it
import numpy as np
import onnx
import pytest

import convpool
from convpool.check import session as runners
from convpool.check.judge import Judge, Tolerance
from convpool.cli.group import run
from convpool.cli.optimize import command
from convpool.errors import VerificationError
from tests.support.damaged_pairs import PAIR, POOL, change, pair, swap


def test_infinities_must_stand_in_the_same_places():
    model = change(pair(), "w", lambda w: np.sign(w) * 3e38)
    assert not convpool.verify(model, change(model, "w", lambda w: w * -1)).passed
    assert convpool.verify(model, model).passed


OVERFLOW = "s = Mul(x, huge)\nh = Conv<pads=[1,1,1,1]>(s, w)\ny = " + POOL + "(h)"


def overflowing(factor: float, **given) -> onnx.ModelProto:
    return pair(body=OVERFLOW, constants={"huge": np.float32(factor)}, **given)


def test_outputs_without_a_finite_value_prove_nothing():
    model = change(pair(), "w", lambda w: w * np.nan)
    for result in (model, change(model, "b", np.zeros_like)):
        found = convpool.verify(model, result)
        assert not found.passed and not found.differs
        assert found.outputs[0].not_finite == 1 and found.not_finite == "100 % of y is NaN or infinite in both"
    with pytest.raises(VerificationError) as caught:
        convpool.optimize(model)
    assert str(caught.value) == (
        "verification: output 'y' cannot be compared; every value is NaN or infinite in the original; "
        "give other inputs with --data, or leave the check out with --no-check"
    )
    assert '"not_finite": 1.0' in caught.value.report.to_json()
    assert convpool.optimize(model, check=0).changed


def test_one_output_of_several_without_a_finite_value():
    body = PAIR + "\nn = Mul(x, nan)\nv = Conv(n, w)\nz = " + POOL + "(v)"
    model = pair(body=body, constants={"nan": np.float32(np.nan)}, outputs="float[a,b,c,d] y, float[e,f,g,h] z")
    found = convpool.verify(model, model)
    assert [(output.passed, output.not_finite) for output in found.outputs] == [(True, 0.0), (False, 1.0)]


@pytest.mark.parametrize(("factor", "scale"), [(1e35, 1.0), (1e37, 2.0**-4), (3e38, 2.0**-8)])
def test_inputs_are_made_smaller_where_everything_overflows(factor, scale, monkeypatch):
    seen, values = [], runners.OnnxruntimeRunner.values

    def recorded(self, arrays):
        seen.append(float(np.abs(arrays["x"]).max()))
        return values(self, arrays)

    monkeypatch.setattr(runners.OnnxruntimeRunner, "values", recorded)
    model = overflowing(factor)
    found = convpool.optimize(model, check=2).report.verification
    assert found.passed and found.outputs[0].max_rel_error < 1e-5 and found.outputs[0].not_finite == 0
    assert found.input_scale == scale
    assert seen[-1] == pytest.approx(scale * 4, rel=0.5)
    assert not convpool.verify(model, change(model, "w", swap)).passed


def test_given_inputs_are_not_made_smaller():
    model = overflowing(3e38)
    data = {"x": np.full((1, 16, 12, 12), 100, np.float32)}
    assert not convpool.verify(model, model, data=data).passed
    assert convpool.verify(model, model, data={"x": data["x"] * 1e-6}).passed


def test_the_share_that_is_not_finite_is_told(capsys, tmp_path):
    def broken(w):
        w = w.copy()
        w[:8] = np.nan
        return w

    onnx.save(change(pair(), "w", broken), tmp_path / "model.onnx")
    report = tmp_path / "report.json"
    assert run(command, "convpool-optimize", [str(tmp_path / "model.onnx"), "--report", str(report)]) == 0
    assert "25 % of y is NaN or infinite in both" in capsys.readouterr().out
    (output,) = json.loads(report.read_text())["verification"]["outputs"]
    assert output["passed"] and output["not_finite"] == 0.25
    assert convpool.optimize(pair()).report.verification.not_finite == ""


def test_the_command_writes_nothing_that_is_not_proven(capsys, tmp_path):
    path, report = tmp_path / "model.onnx", tmp_path / "report.json"
    onnx.save(change(pair(), "w", lambda w: w * np.inf), path)
    assert run(command, "convpool-optimize", [str(path), "--report", str(report)]) == 1
    captured = capsys.readouterr()
    assert "NOT COMPARABLE" in captured.out and "DIFFERS" not in captured.out
    assert captured.err.count("\n") == 1 and "--data" in captured.err and "--no-check" in captured.err
    assert json.loads(report.read_text())["verification"]["passed"] is False
    assert not (tmp_path / "model.convpool.onnx").exists()
    assert run(command, "convpool-optimize", [str(path), "--no-check", "-q"]) == 0


@pytest.mark.parametrize(
    ("nudged", "alike"), [([[5, 1], [0, 1]], True), ([[0, 1], [0, 1]], False), ([[np.inf, 1], [5, 1]], False)]
)
def test_only_finite_runs_show_that_the_original_jumps(nudged, alike):
    """One of the runs on slightly changed inputs has to move as far as the result does."""
    judge = Judge(["y"], Tolerance(1e-3, 1e-3, None))
    arrays = [np.array(values, np.float32) for values in ([0, 1], [5, 1], *nudged)]
    assert judge._jumps_alike(arrays[0], arrays[1], arrays[2:]) is alike

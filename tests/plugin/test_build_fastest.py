"""The fastest form of a model's pairs, with engines and times pretended: what is built, kept, left out and shown."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import onnx
import pytest

from convpool import optimize
from convpool.build_cli import build_command
from convpool.cli import run
from convpool.errors import OptionError
from convpool.tensorrt import TensorRTError, autotune, build_fastest
from convpool.tensorrt.engine import TensorInfo
from models.generators import generate

TIMES = {"none": 30.0, "convavgpool": 12.0, "direct": 20.0, "fused": 15.0}


class FakeEngine:
    def __init__(self, form: str) -> None:
        self.form, self.plan = form, form.encode()
        shape = (2, 3, 32, 32)
        self.inputs = {"image": TensorInfo("image", shape, np.dtype(np.float32), ((shape, shape, shape),))}

    def save(self, path) -> None:
        path.write_bytes(self.plan)


@pytest.fixture
def pretend(monkeypatch):
    """Pretended builds and times; what was built, with which options, and how the failing forms fail."""
    seen = SimpleNamespace(options={}, failing={}, shapes=None)

    def build(model, *, lowering, **options):
        seen.options[lowering] = options
        if lowering in seen.failing:
            raise seen.failing[lowering]
        return FakeEngine(lowering)

    def time_in_turn(engines, inputs):
        seen.shapes = {name: x.shape for name, x in inputs[0].items()}
        return {form: [TIMES[form] + late for late in (0.0, 0.5, 9.0)] for form in engines}

    monkeypatch.setattr(autotune, "build_engine", build)
    monkeypatch.setattr(autotune, "time_in_turn", time_in_turn)
    return seen


def test_the_form_of_the_least_median_is_kept(pretend):
    found = build_fastest(generate("wgan_gp_small", batch=2), precision="fp16")
    assert (found.engine.form, found.lowering, found.left_out) == ("convavgpool", "convavgpool", {})
    assert found.times_us == {form: value + 0.5 for form, value in TIMES.items()}
    assert pretend.shapes == {"image": (2, 3, 32, 32)}
    caches = {options.pop("timing_cache") for options in pretend.options.values()}
    assert len(caches) == 1 and not next(iter(caches)).exists()  # shared, and gone
    assert all(options == {"plugin": True, "precision": "fp16"} for options in pretend.options.values())


def test_without_the_plugin_its_form_is_not_built(pretend, tmp_path):
    found = build_fastest(generate("wgan_gp_small", batch=2), plugin=False, timing_cache=tmp_path / "kept.cache")
    assert set(pretend.options) == {"none", "direct", "fused"} and found.lowering == "fused"
    assert all(options["timing_cache"] == tmp_path / "kept.cache" for options in pretend.options.values())


def test_a_form_that_cannot_be_built_is_left_out(pretend):
    pretend.failing["convavgpool"] = TensorRTError("no plugin")
    found = build_fastest(generate("wgan_gp_small", batch=2))
    assert found.lowering == "fused" and found.left_out == {"convavgpool": "no plugin"}
    for form in TIMES:
        pretend.failing[form] = TensorRTError(f"no {form}")
    with pytest.raises(TensorRTError, match="^no none$"):
        build_fastest(generate("wgan_gp_small", batch=2))
    pretend.failing["none"] = OptionError("shapes are wrong")  # as they would be for every form
    with pytest.raises(OptionError, match="shapes are wrong"):
        build_fastest(generate("wgan_gp_small", batch=2))


def test_a_model_that_has_the_operator_is_refused():
    with pytest.raises(OptionError, match="has ConvAvgPool nodes already; expected the original model"):
        build_fastest(optimize(generate("wgan_gp_small", batch=2), check=0).model)


def test_the_command_shows_the_times_and_writes_the_fastest(pretend, monkeypatch, tmp_path, capsys):
    from convpool import build_cli

    model, engine, report = tmp_path / "m.onnx", tmp_path / "m.engine", tmp_path / "r.json"
    onnx.save(generate("wgan_gp_small", batch=2), model)
    pretend.failing["direct"] = TensorRTError("out of memory")
    monkeypatch.setattr(build_cli, "_check_can_run", lambda what_for: None)
    options = ["--autotune", "--check", "0", "--report", str(report)]
    assert run(build_command, "convpool-build", [str(model), "-o", str(engine), *options]) == 0
    assert engine.read_bytes() == b"convavgpool"
    assert json.loads(report.read_text())["autotune"] == {
        "lowering": "convavgpool", "times_us": {"none": 30.5, "convavgpool": 12.5, "fused": 15.5},
        "left_out": {"direct": "out of memory"},
    }  # fmt: skip
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[:5] == ["lowering us over MODEL", "none 30.5 1.00", "convavgpool 12.5 2.44 kept", "fused 15.5 1.97",
                         "direct left out: out of memory"]  # fmt: skip
    assert run(build_command, "convpool-build", [str(model), "-o", str(engine), "--autotune", "--lowering", "direct"]) == 2
    assert "--autotune: got --lowering direct too; expected one of them" in capsys.readouterr().err

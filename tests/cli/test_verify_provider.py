# SPDX-License-Identifier: Apache-2.0
"""`convpool verify --provider cuda`: what it refuses on a machine without the provider."""

import onnxruntime
import pytest

from convpool.cli.verify import main
from convpool.onnxruntime import CUDA
from models import digits


def status(monkeypatch, *arguments: str) -> int:
    """The command's exit status."""
    monkeypatch.setattr("sys.argv", ["convpool-verify", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code)


def test_a_machine_without_the_provider_is_told_what_is_missing(monkeypatch, capsys):
    if CUDA in onnxruntime.get_available_providers():
        pytest.skip("this onnxruntime has the CUDA provider")
    model = str(digits.MODEL_PATH)
    assert status(monkeypatch, model, model, "--provider", "cuda") == 2
    line = capsys.readouterr().err
    assert "expected CUDAExecutionProvider" in line and line.count("\n") == 1
    assert status(monkeypatch, model, model, "--provider", "cpu", "-q") == 0


def test_an_engine_runs_in_tensorrt_alone(monkeypatch, capsys):
    assert status(monkeypatch, str(digits.MODEL_PATH), "model.engine", "--provider", "cuda") == 2
    assert "--provider: got cuda, expected a model to run by it; model.engine is an engine" in capsys.readouterr().err

# SPDX-License-Identifier: Apache-2.0
"""The examples run as a user runs them, on small models."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples"
SCRIPTS = sorted(FOLDER.glob("*.py"))
BUNDLED = ROOT / "models" / "lenet5_digits.onnx"
MOST_LINES = 100


def example(number: int, folder: Path, *arguments: object, without: str = "") -> subprocess.CompletedProcess[str]:
    """Run an example in `folder`.  without: a module that is not to be found."""
    (script,) = FOLDER.glob(f"{number:02}_*.py")
    code = f"import runpy, sys; sys.modules[{without!r}] = None; del sys.argv[0]; runpy.run_path(sys.argv[0], None, '__main__')"
    words = [sys.executable, *(["-c", code] if without else []), str(script), *map(str, arguments)]
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)


def operators(path: Path) -> list[str]:
    return [node.op_type for node in onnx.load(path).graph.node]


def run_both(result: Path) -> float:
    """Largest difference between the bundled model and `result` on one image."""
    image = np.random.default_rng(1).random((1, 1, 32, 32), np.float32)
    one, other = (onnxruntime.InferenceSession(path).run(None, {"image": image})[0] for path in (BUNDLED, result))
    return float(np.abs(one - other).max())


def test_the_examples_are_six_short_ones_that_the_page_lists():
    assert [path.name[:2] for path in SCRIPTS] == ["01", "02", "03", "04", "05", "06"]
    assert all(len(path.read_text().splitlines()) <= MOST_LINES for path in SCRIPTS)
    assert re.findall(r"^\| \[(\S+)\]\(\1\)", (FOLDER / "README.md").read_text(), re.MULTILINE) == [p.name for p in SCRIPTS]


def test_a_model_is_optimized_for_a_cpu_and_timed(tmp_path):
    done = example(1, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "rewritten: 2 of 3 convolutions\n" in done.stdout and re.search(r"time on \d+ threads: .*x\)", done.stdout)
    assert "AveragePool" not in operators(tmp_path / "optimized.onnx")
    assert run_both(tmp_path / "optimized.onnx") < 1e-5


def test_an_exported_model_is_optimized_without_pytorch(tmp_path):
    done = example(2, tmp_path, BUNDLED, without="torch")
    assert done.returncode == 0, done.stderr
    assert operators(tmp_path / "discriminator.convpool.onnx").count("ConvAvgPoolTanh") == 2
    assert run_both(tmp_path / "discriminator.convpool.onnx") < 1e-5
    assert ("no engine: " in done.stdout) != (tmp_path / "discriminator.engine").exists()


def test_without_pytorch_the_export_says_what_to_install(tmp_path):
    done = example(2, tmp_path, without="torch")
    assert (done.returncode, done.stdout, list(tmp_path.iterdir())) == (2, "", [])
    assert "pip install torch" in done.stderr


def test_a_module_of_pytorch_is_exported_and_optimized(tmp_path):
    pytest.importorskip("torch", reason="the export needs PyTorch")
    done = example(2, tmp_path)
    assert done.returncode == 0, done.stderr
    assert operators(tmp_path / "discriminator.convpool.onnx")[:2] == ["ConvAvgPoolRelu", "ConvAvgPoolRelu"]


def test_a_model_is_checked_with_data_of_ones_own(tmp_path):
    np.savez(tmp_path / "mine.npz", image=np.zeros((3, 1, 32, 32), np.float32))
    for arguments in ((), (BUNDLED, "mine.npz")):
        done = example(3, tmp_path, *arguments)
        assert done.returncode == 0, done.stderr
        assert re.search(r"logits: largest error .*\nwithin our own tolerance: True\n", done.stdout)
    assert np.load(tmp_path / "data.npz")["image"].shape == (8, 1, 32, 32)
    assert run_both(tmp_path / "checked.onnx") < 1e-5


def test_the_python_interface(tmp_path):
    done = example(4, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "direct:        ['AveragePool', 'Conv', 'Relu', 'AveragePool', 'Conv']\n" in done.stdout
    assert "  Conv_0: excluded" in done.stdout and "OptionError:" in done.stdout and "ModelError:" in done.stdout
    assert operators(tmp_path / "direct.onnx") == ["AveragePool", "Conv", "Relu", "AveragePool", "Conv"]


def test_a_report_is_read(tmp_path):
    done = example(5, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "1 of 3 convolutions rewritten\n" in done.stdout and "equal to the original: True\n" in done.stdout
    report = json.loads((tmp_path / "report.json").read_text())
    report["sites"] += [{**report["sites"][0], "status": "rejected", "obstacle": "Relu between"}] * 3
    report["speed"] = {"original_us": 20, "result_us": 10}
    (tmp_path / "other.json").write_text(json.dumps(report))
    printed = example(5, tmp_path, "other.json").stdout
    assert "left unchanged 3 times: Relu between\n" in printed and "times in us: 20 -> 10\n" in printed


def test_a_gan_is_trained(tmp_path):
    pytest.importorskip("torch", reason="it trains with PyTorch")
    done = example(6, tmp_path)
    assert done.returncode == 0, done.stderr
    losses = [float(text) for text in re.findall(r"^(?:plain|optimized|compiled) .* loss (\S+)$", done.stdout, re.MULTILINE)]
    assert len(losses) == 3 and losses == pytest.approx([losses[0]] * 3, rel=1e-3)

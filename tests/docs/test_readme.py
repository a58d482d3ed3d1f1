"""The README's commands and code run as they are written, and its figures are those on record."""

from __future__ import annotations

import json
import re
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import cpu

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
COMMANDS = re.findall(r"^\$ (convpool-optimize .*?)(?:\s+#.*)?$", README, re.MULTILINE)
PYTHON = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder with the bundled model in it."""
    shutil.copy(ROOT / "models" / "lenet5_digits.onnx", tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_readme_has_commands_and_code():
    assert len(COMMANDS) >= 5 and len(PYTHON) >= 1


@pytest.mark.parametrize("command", COMMANDS)
def test_command(command, folder):
    script = command.replace("convpool-optimize", f"{sys.executable} -m convpool.cli", 1)
    done = subprocess.run(["bash", "-c", script], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    made = {path.name for path in folder.iterdir()} - {"lenet5_digits.onnx"}
    wanted = re.findall(r"(?:-o|--report|>) ([\w.]+)", command)
    assert made == set(wanted) if wanted else made == {"lenet5_digits.convpool.onnx"}


def test_output_shown_is_what_the_command_prints(folder):
    done = subprocess.run(
        [sys.executable, "-m", "convpool.cli", "lenet5_digits.onnx"], capture_output=True, text=True, check=True
    )
    shown = README.split("$ convpool-optimize lenet5_digits.onnx\n")[1].split("```")[0]

    def settled(text: str) -> list[str]:
        """Without the time and the rounding errors, which depend on the machine."""
        lines = (re.sub(r"[\d.]+(e-\d+)? (absolute|relative|s$)", r"\2", line) for line in text.strip().splitlines())
        return [" ".join(line.split()) for line in lines]

    assert settled(done.stdout) == settled(shown)


@pytest.mark.parametrize("code", PYTHON)
def test_code(code, folder):
    subprocess.run([sys.executable, "-c", code], check=True)


def gpu_table(record: dict) -> str:
    """Speed-ups of the default tactic over cuDNN, input size by channels."""
    found = {(row["size"], row["channels"]): row["cudnn_conv_then_pool_us"] / row["default_us"] for row in record["rows"]}
    sizes, channels = (sorted({key[i] for key in found}) for i in (0, 1))
    lines = ["| size | " + " | ".join(f"{c} channels" for c in channels) + " |", "|---" * (len(channels) + 1) + "|"]
    lines += [f"| {n}x{n} | " + " | ".join(f"{found[n, c]:.2f}" for c in channels) + " |" for n in sizes]
    mean = statistics.geometric_mean(found.values())
    assert len(found) == 20 and abs(mean - record["geomean_speedup_default"]) < 1e-6
    return "\n".join([*lines, "", f"Geometric mean: {mean:.2f}."])


def test_gpu_figures_are_those_on_record():
    record = json.loads((ROOT / "benchmarks" / "results" / "h200_f16_nhwc.json").read_text())
    table = README.split("<!-- h200_f16_nhwc.json -->")[1].split("<!-- end -->")[0]
    assert table.strip() == gpu_table(record)


def test_cpu_figures_are_those_on_record():
    record = json.loads((ROOT / "benchmarks" / "results" / "cpu.json").read_text())
    table = README.split("<!-- cpu.json -->")[1].split("<!-- end -->")[0]
    assert table.strip() == cpu.markdown(record).strip()

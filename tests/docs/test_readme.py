# SPDX-License-Identifier: Apache-2.0
"""The commands and code of the README and of docs/commands.md run as they are written; tables and pictures are the records'."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest

from benchmarks import tables
from benchmarks.layers import record as records
from benchmarks.layers.cli import command as bench
from benchmarks.layers.table import markdown
from convpool import pipeline, summary
from convpool.cli.group import COMMANDS as COMMAND_NAMES
from convpool.cli.group import command as group
from convpool.cli.group import run

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
PAGE = (ROOT / "docs" / "commands.md").read_text()
BENCHMARKS = (ROOT / "benchmarks" / "README.md").read_text()
COMMANDS = re.findall(r"^\$ (convpool (?:optimize|inspect) .*?)(?:\s+#.*)?$", README + PAGE, re.MULTILINE)
BENCH = re.findall(r"^\$ python -m benchmarks layers (.*?)(?:\s+#.*)?$", BENCHMARKS, re.MULTILINE)
MOST_LINES = 120
RESULTS = (ROOT / "docs" / "results.md").read_text()
DRAWN = re.findall(r"\((\w+\.png)\)\n\nDrawn by `(.*?)`", RESULTS)
MOST_PICTURE_BYTES = 60_000
PYTHON = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder with the bundled model in it."""
    shutil.copy(ROOT / "models" / "lenet5_digits.onnx", tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_readme_is_short_and_has_commands_and_code():
    assert len(README.splitlines()) <= MOST_LINES
    assert len(re.findall(r"^\$ convpool (?:optimize|inspect) ", README, re.MULTILINE)) >= 5 and len(PYTHON) == 1
    assert len(COMMANDS) >= 8


@pytest.mark.parametrize("command", COMMANDS)
def test_command(command, folder, monkeypatch):
    for module in (pipeline, summary):
        monkeypatch.setattr(module, "BUDGET_S", 0)
    if re.search("[|>]", command):
        script = command.replace("convpool ", f"{sys.executable} -m convpool ", 1)
        done = subprocess.run(["bash", "-c", script], capture_output=True, check=False)
        assert done.returncode == 0, done.stderr
    else:
        assert run(group, "convpool", shlex.split(command)[1:]) == 0
    made = {path.name for path in folder.iterdir()} - {"lenet5_digits.onnx"}
    wanted = set(re.findall(r"(?:-o|--report|>) ([\w.]+)", command))
    if not re.search(r" (-o|--dry-run|inspect) ", command):
        wanted.add("lenet5_digits.convpool.onnx")
    assert made == wanted


def test_output_shown_is_what_the_command_prints(folder, capsys):
    assert run(group, "convpool", ["optimize", "lenet5_digits.onnx"]) == 0
    shown = README.split("$ convpool optimize lenet5_digits.onnx\n")[1].split("```")[0]

    def settled(text: str) -> list[str]:
        """Without the time and the rounding errors, which depend on the machine."""
        lines = (re.sub(r"[\d.]+(e-\d+)? (absolute|relative|s$)", r"\2", line) for line in text.strip().splitlines())
        return [" ".join(line.split()) for line in lines]

    assert settled(capsys.readouterr().out) == settled(shown)


@pytest.mark.parametrize("code", PYTHON)
def test_code(code, folder):
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", tables.DOCUMENTS)
def test_tables_are_those_of_the_records_and_commands(name):
    """`python -m benchmarks tables` writes the tables that are there."""
    text = (ROOT / name).read_text()
    assert text == tables.filled(text)


def test_every_table_stands_in_a_document():
    found = [block for name in tables.DOCUMENTS for block in tables.blocks((ROOT / name).read_text())]
    assert sorted(found) == sorted(tables.TABLES)


def test_the_table_of_layers_is_of_all_layers():
    record = records.load(str(ROOT / "benchmarks" / "results" / "h200_suita_table2_fp16.json"))
    assert len(record["rows"]) == 20
    assert tables.blocks(RESULTS)["h200_suita_table2_fp16.json"] == markdown(record)


@pytest.mark.parametrize("arguments", BENCH)
def test_bench_command(arguments, tmp_path, monkeypatch, capsys):
    """Every option is understood; what would be measured is listed only, since there may be no GPU."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.json").write_text('[{"c": 64, "m": 128, "size": 56}]')
    shutil.copy(ROOT / "benchmarks" / "results" / "h200_suita_table2_fp16.json", tmp_path / "table2.json")
    words = shlex.split(arguments)
    assert run(bench, "python -m benchmarks layers", words if "--merge" in words else [*words, "--list"]) == 0
    assert "suita-table2" in capsys.readouterr().out
    assert (tmp_path / "table2.csv").exists() == ("table2.csv" in words)


def picture_of(path: Path) -> str:
    """Which rows a picture says that it shows."""
    from PIL import Image

    with Image.open(path) as image:
        return image.info["Description"]


@pytest.mark.parametrize("path, command", DRAWN)
def test_pictures_are_of_the_figures_on_record(path, command, tmp_path, monkeypatch):
    """The command draws a picture of the same rows as the one in the repository."""
    monkeypatch.chdir(ROOT)
    picture = ROOT / "docs" / path
    assert picture.stat().st_size < MOST_PICTURE_BYTES
    words = shlex.split(command.replace(f"docs/{path}", str(tmp_path / "drawn.png")))
    programs = {"convpool": [sys.executable, "-m", "convpool"], "python": [sys.executable]}
    done = subprocess.run([*programs[words[0]], *words[1:]], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert picture_of(tmp_path / "drawn.png") == picture_of(picture)


def test_every_command_has_its_options_in_the_page_of_commands():
    assert [name for name in COMMAND_NAMES if f"\n## convpool {name}" not in PAGE] == []
    shown = {name for name in COMMAND_NAMES if f"<!-- options of convpool {name} -->" in PAGE}
    parameters = {name: group.get_command(click.Context(group), name).params for name in COMMAND_NAMES}
    assert shown == {name for name, given in parameters.items() if any(isinstance(p, click.Option) for p in given)}


def test_the_readme_s_first_sentences_hold_the_record_s_extremes():
    """Counted here from the table's cells, apart from how the sentences are made."""
    table = tables.blocks(README)["speed-ups"]
    cells = (re.findall(rf"^\|(?:[^|]*\|){{{column}}} (\d\.\d\d) \(", table, re.MULTILINE) for column in (1, 2, 3))
    cpu, gpu, sessions = (list(map(float, column)) for column in cells)
    assert len(cpu) > len(gpu) >= 4 and len(sessions) >= 3
    numbers = [float(x) for x in re.findall(r"\d\.\d", tables.blocks(README)["gains"])]
    extremes = [extreme(column) for column in (cpu, gpu, sessions) for extreme in (min, max)]
    assert numbers == pytest.approx(extremes, abs=0.051)


def test_the_readme_s_training_steps_are_the_record_s():
    steps = tables.load("h200_torch_training.json")["steps"].items()
    *ratios, penalty = sorted(s["original"]["us"] / s["convpool"]["us"] for name, s in steps if "generator" not in name)
    text = f"{min(ratios):.1f} to {max(ratios):.1f} times as fast on an H200, {penalty:.0f} times with an R1 penalty"
    assert f"discriminators in PyTorch's [CUDA graphs](docs/results.md#pytorch): {text}" in " ".join(README.split())

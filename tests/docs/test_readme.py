# SPDX-License-Identifier: Apache-2.0
"""The README's commands and code run as they are written; tables and pictures of the documents are those on record."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import tables
from convpool.bench import record as records
from convpool.bench.cli import command as bench
from convpool.bench.table import markdown
from convpool.cli.common import run

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
COMMANDS = re.findall(r"^\$ (convpool-optimize .*?)(?:\s+#.*)?$", README, re.MULTILINE)
BENCH = re.findall(r"^\$ convpool-bench (.*?)(?:\s+#.*)?$", README, re.MULTILINE)
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


@pytest.mark.parametrize("name", tables.DOCUMENTS)
def test_tables_are_those_of_the_records_and_commands(name):
    """`python -m benchmarks.tables` writes the tables that are there."""
    text = (ROOT / name).read_text()
    assert text == tables.filled(text)


def test_every_table_stands_in_a_document():
    found = [block for name in tables.DOCUMENTS for block in tables.blocks((ROOT / name).read_text())]
    assert sorted(found) == sorted(tables.TABLES)


def test_the_table_of_layers_is_of_all_layers():
    record = records.load(str(ROOT / "benchmarks" / "results" / "h200_suita_table2_fp16.json"))
    assert len(record["rows"]) == 20
    assert tables.blocks(RESULTS)["h200_suita_table2_fp16.json"] == markdown(record)


def test_the_readme_has_bench_commands():
    assert len(BENCH) == 6


@pytest.mark.parametrize("arguments", BENCH)
def test_bench_command(arguments, tmp_path, monkeypatch, capsys):
    """Every option is understood; what would be measured is listed only, since there may be no GPU."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.json").write_text('[{"c": 64, "m": 128, "size": 56}]')
    shutil.copy(ROOT / "benchmarks" / "results" / "h200_suita_table2_fp16.json", tmp_path / "table2.json")
    words = shlex.split(arguments)
    assert run(bench, "convpool-bench", words if "--merge" in words else [*words, "--list"]) == 0
    assert "suita-table2" in capsys.readouterr().out
    assert (tmp_path / "table2.csv").exists() == ("table2.csv" in words)


def picture_of(path: Path) -> str:
    """Which rows a picture says that it shows."""
    from PIL import Image

    with Image.open(path) as image:
        return image.info["Description"]


def test_every_picture_has_its_command():
    assert len(DRAWN) == 3 == RESULTS.count("![")
    assert {path for path in re.findall(r"!\[.*?\]\(docs/(.*?)\)", README)} <= {path for path, _ in DRAWN}


@pytest.mark.parametrize("path, command", DRAWN)
def test_pictures_are_of_the_figures_on_record(path, command, tmp_path, monkeypatch):
    """The command draws a picture of the same rows as the one in the repository."""
    monkeypatch.chdir(ROOT)
    picture = ROOT / "docs" / path
    assert picture.stat().st_size < MOST_PICTURE_BYTES
    words = shlex.split(command.replace(f"docs/{path}", str(tmp_path / "drawn.png")))
    programs = {"convpool-bench": [sys.executable, "-m", "convpool.bench.cli"], "python": [sys.executable]}
    done = subprocess.run([*programs[words[0]], *words[1:]], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert picture_of(tmp_path / "drawn.png") == picture_of(picture)

# SPDX-License-Identifier: Apache-2.0
"""The command line without a GPU: listing, CPU rows, merging, one line on stderr for whatever cannot be."""

import json

import pytest

from benchmarks.layers import cli
from benchmarks.layers import record as records
from benchmarks.layers.device import DeviceError, modules
from convpool.cli.group import run
from tests.support.bench_record import record


def has_gpu() -> bool:
    try:
        modules()
    except DeviceError:
        return False
    return True


def bench(*args: str) -> int:
    """Exit status of the command in this process."""
    return run(cli.command, "python -m benchmarks layers", [str(arg) for arg in args])


@pytest.fixture
def own(tmp_path):
    """A file with one small row."""
    path = tmp_path / "own.json"
    path.write_text('[{"c": 4, "m": 6, "size": 9, "label": "mine"}]')
    return path


@pytest.fixture
def recorded(tmp_path):
    """The record made by hand, in a file."""
    path = tmp_path / "recorded.json"
    path.write_bytes(records.to_json(record()))
    return path


def one_line(capsys) -> str:
    """stderr, which is one line of the program's."""
    captured = capsys.readouterr()
    assert captured.err.startswith("python -m benchmarks layers: ") and captured.err.count("\n") == 1 and captured.out == ""
    return captured.err


@pytest.mark.skipif(has_gpu(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so_in_one_line(capsys, tmp_path):
    out = tmp_path / "out.json"
    assert bench("suita-table1", "--json", out) == 2
    assert "GPU" in one_line(capsys) and not out.exists()


def test_cpu_methods_need_no_gpu(capsys, tmp_path, own):
    out = tmp_path / "out.json"
    assert bench(own, "--cpu", "--methods", "*_cpu", "--methods", "cpu_*", "--json", out, "--csv", tmp_path / "out.csv") == 0
    (entry,) = records.load(str(out))["rows"]
    assert set(entry["methods"]) == {"cpu_loop", "onnxruntime_cpu"} and entry["methods"]["onnxruntime_cpu"]["us"] > 0
    assert (tmp_path / "out.csv").read_text().count("\n") == 3
    assert "onnxruntime cpu" in capsys.readouterr().out


def test_recorded_results_are_shown_and_written_again(capsys, tmp_path, recorded):
    paths = [tmp_path / name for name in ("a.json", "a.csv", "a.png", "tuned.def")]
    options = [f"--{name}={path}" for name, path in zip(("json", "csv", "plot", "tune"), paths, strict=True)]
    assert bench("--merge", recorded, *options) == 0
    assert "geometric mean 2.68" in capsys.readouterr().out
    written = json.loads(paths[0].read_text())
    assert written.pop("summary")["choice"] == {"within": 1.05, "convpool": {"rows": 2, "close": 1}}
    assert written == json.loads(recorded.read_text())
    assert paths[1].read_text().startswith("suite,row,") and paths[2].read_bytes().startswith(b"\x89PNG")
    assert paths[3].read_text().count("\nCONVPOOL_TUNED(90, 132, 1001, ") == 2


def test_a_run_is_added_to_an_earlier_one(tmp_path, own, recorded):
    out = tmp_path / "out.json"
    assert bench(own, "--cpu", "--methods", "onnxruntime_cpu", "--merge", recorded, "--json", out, "-q") == 0
    assert [entry["row"]["suite"] for entry in records.load(str(out))["rows"]] == ["suita-table2", "suita-table2", "own.json"]


@pytest.mark.parametrize(
    ("args", "part"),
    [
        ((), "suite: got none, expected one of suita-table1"),
        (("nothing.json",), "nothing.json: cannot be read"),
        (("suita-table3",), "suita-table3: cannot be read; got No such file or directory"),
        (("batch1", "--methods", "cudnn"), "--methods: got 'cudnn', expected one of cudnn_naive"),
        (("batch1", "--rows", "huge*"), "--rows: no row's name matches huge*"),
        (("batch1", "--precision", "fp8"), "fp8"),
        (("batch1", "--replays", "1"), "--replays"),
        (("batch1", "--plans", "0"), "--plans"),
        (("batch1", "--json", "nowhere/out.json"), "no folder 'nowhere'"),
        (("--merge", "nothing.json"), "nothing.json: cannot be read"),
    ],
)
def test_an_unusable_option_is_one_line(args, part, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert bench(*args) == 2
    assert part in one_line(capsys)


def test_a_wrong_result_is_exit_status_1(tmp_path, own, monkeypatch, capsys):
    monkeypatch.setattr("benchmarks.layers.cpu.measure", lambda name, row: {"wrong": 0.5, "how": ""})
    assert bench(own, "--cpu", "--methods", "cpu_loop") == 1
    captured = capsys.readouterr()
    assert "wrong results: cpu_loop" in captured.err and "WRONG 1x4x9x9 to 6, 3x3 fp16: cpu_loop" in captured.out

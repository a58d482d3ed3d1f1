# SPDX-License-Identifier: Apache-2.0
"""`convpool COMMAND`: help in sections, inspect, completion, `--skip-unchanged`, and a provider that is not there."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import click
import onnx
import onnxruntime
import pytest

import convpool
from convpool.cli import group
from convpool.cli.group import COMMANDS, SectionedCommand, command, run
from convpool.cli.optimize import command as optimize
from convpool.cli.verify import main
from convpool.onnxruntime import CUDA
from convpool.options import RULE_TEXTS
from models import digits
from tests.support.models import graph
from tests.support.rewriting import PAIR

FOUND = {name: command.get_command(click.Context(command), name) for name in COMMANDS}


@pytest.fixture
def model(tmp_path, monkeypatch) -> str:
    monkeypatch.chdir(tmp_path)
    onnx.save(graph(PAIR), "in.onnx")
    return "in.onnx"


@pytest.mark.parametrize(("arguments", "status", "lines"), [([], 0, 0), (["doctors"], 2, 1), (["doctor", "-x"], 2, 1)])
def test_help_without_a_command_and_mistakes_in_one_line(arguments, status, lines, capsys):
    assert run(command, "convpool", arguments) == status
    captured = capsys.readouterr()
    assert len(captured.err.splitlines()) == lines
    assert all(f"\n  {name} " in captured.out for name in COMMANDS) == (status == 0)


def test_optimize_and_verify_under_one_name(model, capsys):
    assert run(command, "convpool", ["optimize", model, "--lowering", "direct", "-q"]) == 0
    assert [node.op_type for node in onnx.load("in.convpool.onnx").graph.node] == ["AveragePool", "Conv"]
    assert run(command, "convpool", ["verify", model, "in.convpool.onnx"]) == 0
    assert "agrees" in capsys.readouterr().out
    assert run(command, "convpool", ["optimize", "none.onnx"]) == 2
    assert capsys.readouterr().err == "convpool: none.onnx: no such file\n"


@pytest.mark.parametrize("error", [IndexError("list index"), RecursionError("too deep"), MemoryError()])
def test_a_fault_of_its_own_has_not_the_status_of_outputs_that_differ(model, error, monkeypatch, capsys):
    monkeypatch.setattr("convpool.cli.optimize.optimize", Mock(side_effect=error))
    assert run(command, "convpool", ["optimize", model]) == 2
    first, *_, kind, last = capsys.readouterr().err.splitlines()
    assert first.startswith("Traceback") and kind.startswith(type(error).__name__) and last.startswith("convpool: a fault of")
    assert os.listdir() == ["in.onnx"]


@pytest.mark.parametrize("name", [name for name, found in FOUND.items() if isinstance(found, SectionedCommand)])
def test_every_option_stands_in_a_section_of_the_help(name, capsys):
    found = FOUND[name]
    named = [parameter for names in found.sections.values() for parameter in names]
    known = [parameter.name for parameter in found.params if isinstance(parameter, click.Option)]
    assert len(named) == len(set(named)) and set(named) <= set(known)
    assert run(command, "convpool", [name, "--help"]) == 0
    printed = capsys.readouterr().out
    options = [option for p in found.params if isinstance(p, click.Option) for option in p.opts if option.startswith("--")]
    assert all(re.search(rf"^  (-\w, )?(--[\w-]+ / )?{option}\b", printed, re.MULTILINE) for option in options)
    assert all(f"\n{heading}:\n" in printed for heading in (*found.sections, "Examples"))


def test_optimize_has_four_sections_and_few_options_beside(capsys):
    assert list(FOUND["optimize"].sections) == ["Output", "What to rewrite", "Check", "GPU plugin"]
    assert run(command, "convpool", ["optimize", "--help"]) == 0
    rest, rules = re.split(r"\nRules.*:\n", capsys.readouterr().out.split("\nOptions:\n")[1].split("\nExamples:\n")[0])
    assert re.findall(r"--[\w-]+", rest) == ["--version", "--help"]
    assert re.findall(r"^  (\w+) ", rules, re.MULTILINE) == list(RULE_TEXTS)


@pytest.mark.parametrize("line", FOUND["optimize"].examples + FOUND["inspect"].examples)
def test_the_examples_of_the_help_run(line, model, monkeypatch):
    onnx.save(graph(PAIR.replace("(x,", "(image,"), inputs="float[1,3,H,W] image", constants={"w": (4, 3, 3, 3)}), "model.onnx")
    words = shlex.split(line.partition("#")[0])
    assert words[0] == "convpool" and run(command, "convpool", words[1:]) == 0


def test_examples_of_verify_and_build_and_steps_that_inspect_names_are_understood():
    steps = ("convpool optimize in.onnx --target cpu --time", "convpool build in.onnx -o in.engine")
    for _, name, *rest in map(shlex.split, (*FOUND["verify"].examples, *FOUND["build"].examples, *steps)):
        FOUND[name].make_context(name, rest)


@pytest.mark.parametrize("shape", ["x:2,16,12,12", "x:2x16x12x12", "x:2x16,12x12"])
def test_shapes_with_commas_or_crosses(shape, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    onnx.save(graph(PAIR, inputs="float[N,16,H,W] x"), "in.onnx")
    assert run(command, "convpool", ["inspect", "in.onnx", "--input-shape", shape, "--report", "out.json"]) == 0
    assert json.loads((tmp_path / "out.json").read_text())["summary"]["counted_shapes"] == {"x": [2, 16, 12, 12]}


@pytest.mark.parametrize("words", [["inspect"], ["optimize", "--no-check"]])
def test_shapes_that_do_not_fit_are_refused_where_nothing_is_run_too(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    onnx.save(graph(PAIR, inputs="float[N,16,H,W] x"), "in.onnx")
    told = {
        "z:2x16x12x12": "input shape: no input 'z'; expected one of x",
        "x:2;3": "expected NAME:1x3x224x224 or NAME:1,3,224,224",
    }
    for shape, text in {**told, "x:2x16": "input shape: input 'x'; got shape [2, 16], expected ['N', 16, 'H', 'W']"}.items():
        assert run(command, "convpool", [*words, "in.onnx", "--input-shape", shape]) == 2
        assert text in capsys.readouterr().err


def test_inspect_tells_the_gain_and_what_to_run_and_writes_nothing(model, capsys):
    assert run(command, "convpool", ["inspect", model]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "convolution  pooling  rewritten as  multiply-adds  after",
        "h  y  convavgpool  664 k  166 k",
        "rewrites  1 of 1 convolution: 664 k -> 166 k multiply-adds",
        "model     664 k -> 166 k multiply-adds (-75 %)",
        "next      on a CPU: convpool optimize in.onnx --target cpu --time",
        "next      in onnxruntime on a GPU: convpool optimize in.onnx --target cuda",
        "next      in TensorRT: convpool build in.onnx -o in.engine",
    ]
    assert os.listdir() == ["in.onnx"]
    os.rename("in.onnx", "-in.onnx")
    assert run(command, "convpool", ["inspect", "--", "-in.onnx"]) == 0
    assert "convpool build ./-in.onnx -o ./-in.engine" in capsys.readouterr().out
    onnx.save(graph("h = Conv(x, w)\ny = MaxPool<kernel_shape=[2,2]>(h)"), model)
    assert run(command, "convpool", ["inspect", model]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "Nothing to rewrite: no Conv stands beside an average pooling or a resize.",
        "seen      1 convolution, 0 averages, 0 Resizes",
        "model     461 k multiply-adds",
        "note      MaxPool follows a convolution 1 x: a maximum is not linear, so no pair",
    ]


def completed(**asked: str) -> subprocess.CompletedProcess:
    """Ask the command what a shell asks that completes a line."""
    script = f"import sys; sys.argv = ['convpool']; from {group.__name__} import main; main()"
    return subprocess.run([sys.executable, "-c", script], env={**os.environ, **asked}, capture_output=True, text=True)


@pytest.mark.parametrize("shell", ["bash_source", "zsh_source", "fish_source"])
def test_the_shell_gets_a_script(shell):
    done = completed(_CONVPOOL_COMPLETE=shell)
    assert (done.returncode, done.stderr) == (0, "") and "_CONVPOOL_COMPLETE" in done.stdout


@pytest.mark.parametrize(
    ("words", "last", "told"), [("convpool opti", "1", "plain,optimize\n"), ("convpool optimize mod", "2", "file,mod\n")]
)
def test_completion_in_the_shell(words, last, told):
    done = completed(_CONVPOOL_COMPLETE="bash_complete", COMP_WORDS=words, COMP_CWORD=last)
    assert (done.returncode, done.stdout) == (0, told)


@pytest.mark.parametrize("stands", ["MODEL", "a pair", "a fold", "sizes"])
def test_a_copy_is_written_where_something_changes(stands, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    body = {"a pair": PAIR, "a fold": "a = Identity(x)\ny = Relu(a)"}.get(stands, "y = Relu(x)")
    onnx.save(graph(body, inputs="float[N,16,12,12] x"), "in.onnx")
    words = {"a fold": ["--fold"], "sizes": ["--fix-shape", "x:1x16x12x12"]}.get(stands, [])
    assert run(optimize, "convpool-optimize", ["in.onnx", "--skip-unchanged", "--report", "r.json", *words]) == 0
    report, last = json.loads(Path("r.json").read_text()), capsys.readouterr().out.splitlines()[-1]
    assert report["changed"] == (stands != "MODEL") and report["options"]["skip_unchanged"] is True
    assert Path("in.convpool.onnx").exists() == report["changed"]
    assert last == ("written   in.convpool.onnx" if report["changed"] else "written   nothing: the model is unchanged")
    assert run(optimize, "convpool-optimize", ["in.onnx", *words]) == 0
    copy = "" if report["changed"] else ", an unchanged copy (--skip-unchanged writes none)"
    assert capsys.readouterr().out.splitlines()[-1] == f"written   in.convpool.onnx{copy}" and Path("in.convpool.onnx").exists()


def test_a_copy_that_is_skipped_from_python_and_on_stdout(tmp_path, capsys):
    result = convpool.optimize(graph("y = Relu(x)"))
    assert result.save(tmp_path / "y.onnx", skip_unchanged=True) == [] and not (tmp_path / "y.onnx").exists()
    assert result.save(tmp_path / "y.onnx") == [tmp_path / "y.onnx"]
    assert run(optimize, "convpool-optimize", [str(tmp_path / "y.onnx"), "--skip-unchanged", "-o", "-"]) == 2
    assert "--skip-unchanged: got stdout; expected a file's name with -o" in capsys.readouterr().err


def test_nodes_moved_to_another_domain_are_a_change(tmp_path):
    onnx.save(convpool.optimize(graph(PAIR), check=0).model, tmp_path / "in.onnx")
    words = [str(tmp_path / "in.onnx"), "--skip-unchanged", "--no-check", "-q"]
    assert run(optimize, "convpool-optimize", words) == 0 and not (tmp_path / "in.convpool.onnx").exists()
    assert run(optimize, "convpool-optimize", [*words, "--domain", "trt.plugins"]) == 0
    assert [node.domain for node in onnx.load(tmp_path / "in.convpool.onnx").graph.node] == ["trt.plugins"]


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

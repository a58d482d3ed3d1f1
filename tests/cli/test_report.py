# SPDX-License-Identifier: Apache-2.0
"""The report: gains, why sites stay, what to do next, its look on a terminal and in a pipe, and names as plain text."""

import io
import json
import os
import re
import subprocess
import sys

import numpy as np
import onnx
import pytest
from rich.console import Console
from rich.markup import escape

import convpool
from convpool import pipeline
from convpool import summary as gains
from convpool.api import DROP_INPUTS
from convpool.check.session import evaluate
from convpool.cli.group import NewFile, StepBar, command, run
from convpool.cli.optimize import command as optimize
from convpool.cli.table import PrintableConsole, print_table, show
from convpool.errors import printable
from convpool.ir.model import load, scopes_at
from convpool.summary import count
from models import generators
from tests.support.models import graph
from tests.support.resizing import UP
from tests.support.rewriting import IF_BODY, IF_INPUTS, PAIR, POOL

OPEN = "float[1,16,H,W] x"
CONV = 32 * 16 * 9
"""Multiply-adds of the pairs' convolution for one output position."""


def printed(report: convpool.Report, *, columns: int | None = None, verbose: bool = False) -> str:
    """The report as it is shown in a pipe, or on a terminal so many columns wide."""
    look = {"no_color": True, "highlight": False, "force_terminal": columns is not None}
    console = Console(file=io.StringIO(), width=columns or 160, **look)
    show(report, console, verbose=verbose)
    return console.file.getvalue()


def summary(model: onnx.ModelProto, **options) -> convpool.Summary:
    return convpool.optimize(model, **{"check": 0, **options}).report.summary


def test_only_what_is_rewritten_is_in_the_sum_and_the_model_is_counted_whole():
    body = f"{PAIR.replace('y =', 'p =')}\nk = Conv(x, v)\nr = Relu(k)\nq = {POOL}(r)\ns = Add(p, q)\n"
    body += "f = Flatten(s)\nm = MatMul(f, a)\ny = Gemm<transB=1>(m, b)"
    model = graph(body, {"v": (32, 16, 1, 1), "a": (1152, 20), "b": (10, 20)}, outputs="float[d,e] y")
    report = convpool.optimize(model, check=0).report
    found, rest = report.summary, 32 * 16 * 144 + 1152 * 20 + 20 * 10
    assert (found.rewritten_macs_before, found.rewritten_macs_after) == (144 * CONV, 36 * CONV)
    assert (found.model_macs_before, found.model_macs_after) == (144 * CONV + rest, 36 * CONV + rest)
    assert (found.convolutions, found.rewritten_convolutions, found.counted_shapes) == (2, 1, {})
    assert found.macs_before == 144 * CONV + 32 * 16 * 144  # as before: the sum over all sites
    lines = printed(report).splitlines()
    assert "rewritten 1 of 2 convolutions: 664 k -> 166 k multiply-adds" in lines
    assert "model     761 k -> 263 k multiply-adds (-65 %)" in lines


def test_a_convolution_that_another_site_rejects_counts_once():
    """A second pooling behind a Relu names the convolution that was just rewritten."""
    found = summary(graph(f"{PAIR.replace('y =', 'p =')}\nr = Relu(p)\ny = GlobalAveragePool(r)"), lowering="direct")
    assert (found.rewritten, found.rejected) == (1, 1)
    assert (found.rewritten_macs_before, found.rewritten_macs_after) == (144 * CONV, 36 * CONV)
    assert found.macs_before > found.rewritten_macs_before


@pytest.mark.parametrize(
    ("body", "given", "macs"),
    [
        ("y = Conv<group=2>(x, w)", {"w": (32, 8, 3, 3)}, 100 * 32 * 8 * 9),
        ("y = ConvTranspose(x, v)", {"v": (16, 8, 3, 3)}, 144 * 16 * 8 * 9),
        ("t = Transpose<perm=[0,2,3,1]>(x)\ny = MatMul(t, m)", {"m": (16, 5)}, 144 * 16 * 5),
        ("m = MatMul(a, b)\ny = Mul(x, m)", {"a": (12, 7), "b": (7, 12)}, 0),  # a runtime folds it
        (IF_BODY, {"w": (32, 16, 3, 3), "v": (32, 16, 3, 3)}, 2 * 144 * CONV),
    ],
    ids=["groups", "transposed", "matrix product", "of constants", "branches"],
)
def test_what_counts(body, given, macs):
    inputs = IF_INPUTS if body is IF_BODY else "float[1,16,12,12] x"
    assert summary(graph(body, given, inputs=inputs), disable=["pool_first"]).model_macs_before == macs


def test_a_function_counts_once_and_the_operators_own_not():
    functions = f"""<opset_import: ["": 17], domain: "local">
    twice (a, w) => (b) {{ c = Conv<pads=[1,1,1,1]>(a, w)\n b = {POOL}(c) }}"""
    found = summary(graph("y = local.twice(x, w)", functions=functions), lowering="direct")
    assert (found.model_macs_before, found.model_macs_after, found.convolutions) == (144 * CONV, 36 * CONV, 1)
    again = summary(convpool.optimize(graph(PAIR), check=0).model)
    assert (again.model_macs_before, again.convolutions, again.rewritten) == (36 * CONV, 1, 0)


def test_what_a_caller_may_replace_is_counted_as_stored_and_named_as_the_obstacle():
    model = graph(f"{PAIR.replace('y =', 'p =')} q = Reshape(p, c) y = MatMul(q, m)", {"c": [-1, 36], "m": (36, 5)})
    model.graph.input.extend(onnx.helper.make_tensor_value_info(t.name, t.data_type, t.dims) for t in model.graph.initializer)
    report = convpool.optimize(model, check=0, lowering="fused").report
    assert report.summary.model_macs_before == 144 * CONV + 32 * 36 * 5 and report.hints == [DROP_INPUTS]


def test_a_batch_is_counted_a_sample():
    found = summary(graph(PAIR, inputs="float[4,16,12,12] x"))
    assert (found.batch, found.model_macs_before, found.rewritten_macs_after) == (4, 144 * CONV, 36 * CONV)


@pytest.mark.parametrize(
    ("inputs", "options", "shapes", "shown"),
    [
        ("float[N,16,12,12] x", {}, {"x": [1, 16, 12, 12]}, "664 k -> 166 k multiply-adds (-75 %), with input x:1x16x12x12"),
        (OPEN, {"check": 1}, {"x": [1, 16, 64, 64]}, "18.9 M -> 4.72 M multiply-adds (-75 %), with input x:1x16x64x64"),
        (OPEN, {"input_shapes": {"x": [1, 16, 12, 12]}}, {"x": [1, 16, 12, 12]}, "664 k -> 166 k multiply-adds"),
        (OPEN, {}, {}, "multiply-adds unknown\n"),
    ],
    ids=["open batch", "sizes of the check", "sizes given", "unknown"],
)
def test_open_sizes_are_counted_with_those_of_the_check(inputs, options, shapes, shown):
    report = convpool.optimize(graph(PAIR, inputs=inputs), **{"check": 0, **options}).report
    assert report.summary.counted_shapes == shapes
    assert (report.summary.model_macs_before is None) == (not shapes)
    assert f"\nmodel     {shown}" in printed(report)


def test_sizes_given_are_counted_through_shapes_that_a_model_computes():
    """Attention behind a pair, with its sizes read from the map, as exporters write it."""
    body = f"""{PAIR.replace("y =", "p =")}
        s = Shape(p) n = Gather(s, batch) k = Abs(heads) c = Concat<axis=0>(n, k, minus) q = Reshape(p, c)
        t = Transpose<perm=[0,1,3,2]>(q) y = MatMul(q, t)"""
    model = graph(body, {"batch": [0], "heads": [4, 8], "minus": [-1]}, inputs="float[N,16,H,W] x")
    report = convpool.optimize(model, check=0, input_shapes={"x": [2, 16, 12, 12]}).report
    products = 4 * 8 * 8 * 36
    assert (report.summary.model_macs_before, report.summary.model_macs_after) == (144 * CONV + products, 36 * CONV + products)
    assert report.hints == []


def test_densenet121_counts_what_is_known_of_it():
    """2.83 G multiply-adds, as the paper's table of the architecture's cost has it; three transitions of 103 M."""
    found = count(scopes_at(load(generators.generate("densenet121")), {"input": (1, 3, 224, 224)}, evaluate))
    assert round(found.total / 1e9, 2) == 2.83 and len(found.convolutions) == 120


def test_speed_is_measured_in_turn_and_shown_in_one_line(monkeypatch):
    seen = []

    def fake(sessions, arrays, rounds, budget_s):
        seen.append((list(sessions), {name: array.shape for name, array in arrays.items()}))
        return {"original": 27000.0, "result": 15500.0}

    def lowerings_win(sessions, arrays, rounds, budget_s):
        return {name: 2.0 if name == "original" else 1.0 for name in sessions}

    monkeypatch.setattr(gains, "time_sessions", fake)
    monkeypatch.setattr(pipeline, "time_sessions", lowerings_win)
    monkeypatch.setattr(gains, "physical_cores", lambda: 2)
    report = convpool.optimize(graph(PAIR), time=True).report
    assert seen == [(["original", "result"], {"x": (1, 16, 12, 12)})]
    assert "speed     here, 2 threads: 27 ms -> 15.5 ms (1.74x)\n" in printed(report)
    assert json.loads(report.to_json())["speed"]["original_us"] == 27000.0
    steps: list[str] = []
    autotuned = convpool.optimize(graph(PAIR), autotune=True, progress=lambda done, total, what: steps.append(what))
    assert autotuned.report.speed is not None and steps[-1] == "timing both models"
    assert convpool.optimize(graph(PAIR), autotune=True, time=False).report.speed is None
    assert convpool.optimize(graph("y = Relu(x)"), time=True).report.speed is None
    assert len(seen) == 2


def test_the_models_run_at_the_time_that_is_shown():
    speed = convpool.optimize(graph(PAIR), time=True).report.speed
    assert speed.original_us > 0 and speed.result_us > 0 and speed.threads >= 1


def many(count: int) -> onnx.ModelProto:
    """`count` pairs that stay: each second one has another reader, the others a Relu between."""
    lines = []
    for i in range(count):
        middle = f"b{i} = Identity(h{i})\nz{i} = Neg(h{i})" if i % 2 else f"b{i} = Relu(h{i})"
        lines.append(f"h{i} = Conv<pads=[1,1,1,1]>(x, w)\n{middle}\ny{i} = {POOL}(b{i})")
    outputs = ", ".join(f"float[a,b,c{i},d{i}] y{i}" for i in range(count))
    outputs += "".join(f", float[a,b,e{i},f{i}] z{i}" for i in range(1, count, 2))
    return graph("\n".join(lines), outputs=outputs)


def test_many_sites_that_stay_are_grouped_and_listed_when_asked():
    report = convpool.optimize(many(5), check=0).report
    assert [site.obstacle for site in report.sites].count("Relu between") == 3
    lines = printed(report).splitlines()
    assert "Nothing rewritten: all 5 candidates are left unchanged." in lines
    assert "rejected  5: 3 x Relu between, 2 x read by something else too" in lines
    assert not any("got Relu" in line for line in lines)
    assert sum("got Relu" in line for line in printed(report, verbose=True).splitlines()) == 3
    assert json.loads(report.to_json())["sites"][0]["obstacle"] == "Relu between"


def test_few_sites_that_stay_have_their_reasons():
    shown = printed(convpool.optimize(many(1), check=0).report)
    assert "Nothing rewritten: the one candidate is left unchanged.\n" in shown
    assert "rejected  h0 -> y0: a Relu stands between: Relu 'b0'\n" in shown
    report = convpool.optimize(many(2), check=0).report
    assert "rejected  h1 -> y1: read by something else too: output 'h1' has 2 readers\n" in printed(report)
    assert json.loads(report.to_json())["sites"][0]["reason"].endswith("got Relu, expected linear operators only")


def test_what_is_not_the_operator_says_why():
    model = graph("h = Conv<pads=[1,1,1,1], group=2>(x, w)\n" + f"y = {POOL}(h)", {"w": (32, 8, 3, 3)})
    report = convpool.optimize(model, check=0).report
    assert report.sites[0].fallback == "group of a ConvAvgPool; got 2, expected 1, for which the plugin has kernels"
    assert f"direct    1 x instead of convavgpool: {report.sites[0].fallback}\n" in printed(report)
    assert convpool.optimize(model, check=0, lowering="fused").report.sites[0].fallback is None


LONG = "features/stage{}/a/very/long/scope/of/modules/transition/{}"


@pytest.mark.parametrize(
    ("options", "start"),
    [({}, "check     agrees with the original"), ({"rtol": 0, "atol": 0}, "check     DIFFERS from the original")],
)
def test_the_check_says_whether_the_models_agree(options, start):
    model = graph(PAIR, inputs="float[1,3,16,16] x", constants={"w": (4, 3, 3, 3)})
    try:
        report = convpool.optimize(model, lowering="direct", **options).report
    except convpool.VerificationError as error:
        report = error.report
    (line,) = [line for line in printed(report).splitlines() if line.startswith("check")]
    assert line.startswith(f"{start} in onnxruntime on 1 set of inputs: largest error ")


def long_names() -> convpool.Report:
    model = graph("\n".join(f"h{i} = Conv<pads=[1,1,1,1]>(x, w)\ny{i} = {POOL}(h{i})" for i in "01"), outputs="float[a,b,c,d] y0")
    for number, node in enumerate(model.graph.node):
        node.name = LONG.format(number, node.op_type)
    return convpool.optimize(model, check=0).report


@pytest.mark.parametrize("columns", [80, 100, 60])
def test_a_site_is_one_line_on_a_terminal(columns):
    sites = [line for line in printed(long_names(), columns=columns).splitlines() if " convavgpool " in line]
    assert len(sites) == 2 and all(len(line) <= columns for line in sites)
    assert all(line.startswith("...") and "on/Conv " in line and "166 k" in line for line in sites)


def test_a_site_is_one_line_without_padding_in_a_pipe():
    lines, name = printed(long_names()).splitlines(), LONG.format(0, "Conv")
    assert lines[0] == "convolution  pooling  rewritten as  multiply-adds  after"
    assert lines[1] == f"{name}  {LONG.format(1, 'AveragePool')}  convavgpool  664 k  166 k"
    assert all(line == line.rstrip() for line in lines)


@pytest.mark.parametrize(
    ("body", "heading"),
    [
        (f"h = Conv<pads=[1,1,1,1]>(x, w)\ny = {POOL}(h)", "pooling"),
        (f"{UP}y = Conv<pads=[1,1,1,1]>(u, w)", "resize"),
        (f"{UP}g = Conv<pads=[1,1,1,1]>(u, w)\nf = Relu(g)\ne = Conv<pads=[1,1,1,1]>(f, v)\ny = {POOL}(e)", "pooling or resize"),
    ],
)
def test_the_second_column_says_what_stands_beside_the_convolution(body, heading):
    model = graph(body, {"s": np.array([1, 1, 2, 2], np.float32), "v": (32, 32, 3, 3)})
    assert f"convolution  {heading}  rewritten as" in printed(convpool.optimize(model, check=0).report, verbose=True)


def test_names_with_brackets_and_empty_cells_are_shown_as_they_are():
    console = Console(file=io.StringIO(), width=30, force_terminal=True, no_color=True)
    print_table(console, ("a", "b"), [[r"\[red]x", ""], ["x" * 40, "12345"]], right=(1,), names=(0,))
    assert [line.split() for line in console.file.getvalue().splitlines()[1:]] == [["[red]x", "-"], ["..." + "x" * 20, "12345"]]
    PrintableConsole(file=(file := io.StringIO()), emoji=False).print("model:heart:0")
    assert file.getvalue() == "model:heart:0\n"


def test_an_exclusion_that_matches_nothing_is_a_warning():
    report = convpool.optimize(graph(PAIR), check=0, exclude=["zzz*", "y"]).report
    assert report.warnings == ["exclude: 'zzz*' matches no convolution, pooling or Concat here"]
    shown = printed(report)
    assert f"warning   {report.warnings[0]}\n" in shown and "excluded  1 by name\n" in shown


def test_the_report_on_stdout(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    onnx.save(graph(PAIR), "in.onnx")
    assert run(optimize, "convpool-optimize", ["in.onnx", "--report", "-"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["summary"]["rewritten"] == 1 and "rewritten 1 of 1 convolution" in captured.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.convpool.onnx", "in.onnx"]
    assert run(optimize, "convpool-optimize", ["in.onnx", "-o", "-", "--report", "-"]) == 2
    assert [NewFile().convert(name, None, None) for name in ("/dev/stdout", "/dev/fd/1", "out.json")] == ["-", "-", "out.json"]


def test_a_custom_operator_says_how_to_go_on(tmp_path, capsys):
    onnx.save(graph(f"{PAIR.replace('y =', 'p =')}\ny = my.Own(p)", imports=', "my": 1'), tmp_path / "in.onnx")
    assert run(optimize, "convpool-optimize", [str(tmp_path / "in.onnx")]) == 2
    assert capsys.readouterr().err.rstrip().endswith("check=0 (--no-check) skips the check")
    assert run(optimize, "convpool-optimize", [str(tmp_path / "in.onnx"), "--no-check"]) == 0


def test_a_model_that_onnxruntime_cannot_run_is_not_timed():
    model = graph(f"{PAIR.replace('y =', 'p =')}\ny = my.Own(p)", imports=', "my": 1')
    report = convpool.optimize(model, check=0, autotune=True).report
    assert report.summary.rewritten == 1 and report.speed is None
    assert report.warnings[0].startswith("not timed: onnxruntime cannot load the original: ")


def test_a_model_on_stdin_is_compared(tmp_path, monkeypatch, capsys):
    onnx.save(graph(PAIR), path := str(tmp_path / "model.onnx"))
    for words, status in (("- FILE", 0), ("FILE -", 0), ("- -", 2)):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(graph(PAIR).SerializeToString())))
        assert run(command, "convpool", ["verify", *words.replace("FILE", path).split()]) == status
    assert "stdin: empty" in capsys.readouterr().err


def test_stdin_is_called_so(monkeypatch, capsys):
    model = graph(PAIR)
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="weights")
    wrong = {b"": "stdin: empty", b"abc": "stdin: truncated, or not an ONNX model"}
    for data, text in {**wrong, model.SerializeToString(): "give its path in place of -\n"}.items():
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))
        assert run(optimize, "convpool-optimize", ["-", "-o", "-"]) == 2
        assert text in capsys.readouterr().err


CONTROLS = {
    "title": "\x1b]0;OWNED\x1b\\",
    "clear": "\x1b[2J",
    "link": "\x1b]8;;http://evil\x07x\x1b]8;;\x07",
    "8-bit": "\x9b31m\x9d0;x\x9c",
    "line": "\nconvpool: fine",
    "return": "\r\rconvpool: fine",
    "bidi": "\u202e\u202d\u202a\u202b\u202c",
    "isolates": "\u2066\u2067\u2068\u2069",
    "marks": "\u200e\u200f\u061c",
    "separators": "\u2028\u2029\x85",
    "invisible": "\u200b\ufeff\U000e0041\xad",
    "markup": "[/x][link=http://evil]x[/link]\x1b[bold]",
    "each": "".join(map(chr, (*range(1, 32), 127, 128, 159))),
}
"""Every one stands in the middle of a name."""


def models(text: str) -> dict[str, onnx.ModelProto]:
    """Models with the text in one of their names: those that are rewritten, kept, and refused."""
    name = f"a{text}b"
    found = {place: graph(PAIR) for place in ("conv", "kept", "op_type", "input", "output", "data", "attribute")}
    for model in found.values():
        model.graph.node[0].name = "c"
    found["conv"].graph.node[0].name = found["conv"].graph.node[1].name = name
    found["kept"].graph.node[0].name = name
    found["kept"].graph.node[1].attribute.append(onnx.helper.make_attribute("auto_pad", "SAME_UPPER"))
    found["op_type"].graph.node.add().CopyFrom(onnx.helper.make_node(name, ["x"], ["z"]))
    found["input"].graph.input[0].name = found["input"].graph.node[0].input[0] = name
    found["output"].graph.output[0].name = found["output"].graph.node[1].output[0] = name
    found["data"].graph.initializer[0].name, found["data"].graph.initializer[0].raw_data = name, b"x"
    found["attribute"].graph.node[0].attribute.append(onnx.helper.make_attribute(name, 1))
    return found


@pytest.mark.parametrize("text", CONTROLS.values(), ids=CONTROLS)
def test_no_command_prints_a_control_character(tmp_path, capsys, text):
    path, out = str(tmp_path / "m.onnx"), str(tmp_path / "o.onnx")
    for place, model in models(text).items():
        onnx.save(model, path)
        for words in (["optimize", path, "-o", out, "-v", "--no-check"], ["inspect", path, "-v"], ["verify", path, path]):
            status, shown = run(command, "convpool", words), capsys.readouterr()
            printed = shown.out + shown.err
            assert [c for c in printed.replace("\n", "") if not c.isprintable()] == []
            assert not any(line.startswith("convpool: fine") for line in printed.splitlines())
            assert status != 2 or len(shown.err.splitlines()) == 1
            if place == "conv" and words[0] != "verify":
                assert printable(f"a{text}b") in printed


@pytest.mark.parametrize("text", CONTROLS.values(), ids=CONTROLS)
def test_a_terminal_gets_escape_sequences_of_convpool_alone(text):
    file = io.StringIO()
    console = PrintableConsole(file=file, force_terminal=True, highlight=False, emoji=False, width=200)
    print_table(console, ("name",), [[f"[green]{escape('a' + text + 'b')}[/]"]], names=(0,))
    console.print(escape(f"a{text}b"), soft_wrap=True)
    console.print(f"a{text}b", markup=False)
    bar = StepBar(hidden=False)
    bar.update(1, 2, f"a{text}b")
    console.print(bar._bar.get_renderable())
    shown = file.getvalue()
    assert shown.count(printable(f"a{text}b")) == 4
    assert re.sub(r"\x1b\[[\d;]*m|\n", "", shown).isprintable()


def test_warnings_and_tracebacks_are_shown_as_text():
    """And a file's name of any bytes, in any encoding."""
    code = """
import sys, warnings, click
from convpool.cli.group import run
@click.command()
@click.argument("what")
def command(what):
    warnings.warn("of \\x1b[2J\\u202e" + what, RuntimeWarning)
    print("caf\\udce9 \\u4e2d")
    if what == "bug": raise AssertionError("\\x1b]0;OWNED\\x07")
sys.exit(run(command, "convpool"))
"""
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    for what, status in (("warning", 0), ("bug", 2)):
        done = subprocess.run([sys.executable, "-c", code, what], capture_output=True, text=True, check=False, env=environment)
        assert done.returncode == status, done.stderr
        assert done.stdout == "caf\\udce9 \\u4e2d\n"
        lines = done.stderr.splitlines()
        assert lines[0] == f"convpool: warning: of \\x1b[2J\\u202e{what}"
        assert (lines[-2:-1] == ["AssertionError: \\x1b]0;OWNED\\x07"]) == (what == "bug") and (len(lines) > 1) == (what == "bug")

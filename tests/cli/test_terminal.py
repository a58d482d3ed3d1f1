# SPDX-License-Identifier: Apache-2.0
"""Names that come from files reach the terminal as text: no control character is printed as it is."""

import io
import os
import re
import subprocess
import sys

import onnx
import pytest
from rich.markup import escape

from convpool.cli.group import StepBar, command, run
from convpool.cli.table import PrintableConsole, print_table
from convpool.errors import printable
from tests.support.models import graph
from tests.support.rewriting import PAIR

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
    **{f"{number:02x}": chr(number) for number in (*range(1, 32), 127, 128, 159)},
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
            status = run(command, "convpool", words)
            shown = capsys.readouterr()
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
    for what, status in (("warning", 0), ("bug", 1)):
        words = [sys.executable, "-c", code, what]
        done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
        assert done.returncode == status, done.stderr
        assert done.stdout == "caf\\udce9 \\u4e2d\n"
        lines = done.stderr.splitlines()
        assert lines[0] == f"convpool: warning: of \\x1b[2J\\u202e{what}"
        assert (lines[-1] == "AssertionError: \\x1b]0;OWNED\\x07") == (what == "bug") and (len(lines) > 1) == (what == "bug")


def test_names_are_no_pictures():
    file = io.StringIO()
    PrintableConsole(file=file, emoji=False).print("model:heart:0")
    assert file.getvalue() == "model:heart:0\n"

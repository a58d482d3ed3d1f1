# SPDX-License-Identifier: Apache-2.0
"""The command `convpool`, and the common part of all commands: help in sections, the progress bar, option types, exit
statuses, writing a report.

It holds all commands under one name.  convpool-optimize and the like are the same commands.
"""

from __future__ import annotations

import io
import math
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import click
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn

from convpool import interrupt
from convpool.algebra.parts import ACCUMULATIONS
from convpool.cli.table import make_console
from convpool.errors import ConvpoolError, ModelError, VerificationError, printable
from convpool.ir.files import written_with
from convpool.ir.model import LoadedModel, load

REST = "Options"
"""The section of options that no other names."""
HELP: dict[str, Any] = {"context_settings": {"help_option_names": ["-h", "--help"]}}
"""Keyword arguments of a command: the names of its help."""


class SectionedCommand(click.Command):
    """A command with options in sections, words and what they mean in lists, both by heading, and examples in a shell."""

    def __init__(
        self,
        *args: Any,
        sections: Mapping[str, Sequence[str]] | None = None,
        lists: Mapping[str, Mapping[str, str]] | None = None,
        examples: Sequence[str] = (),
        **attributes: Any,
    ) -> None:
        super().__init__(*args, **{**HELP, **attributes})
        self.sections, self.lists = dict(sections or {}), dict(lists or {})
        self.examples = tuple(examples)

    def help_records(self, ctx: click.Context) -> dict[str, list[tuple[str, str]]]:
        """(names and value, text) of every option by the heading of its section; a section without options is left out."""
        heading_of = {name: heading for heading, names in self.sections.items() for name in names}
        rows: dict[str, list[tuple[str, str]]] = {heading: [] for heading in (*self.sections, REST)}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx) if isinstance(param, click.Option) else None  # arguments stand in the usage
            if record is not None:
                rows[heading_of.get(param.name or "", REST)].append(record)
        return {heading: records for heading, records in rows.items() if records}

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for heading, records in self.help_records(ctx).items():
            with formatter.section(heading):
                formatter.write_dl(records)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for heading, words in self.lists.items():
            with formatter.section(heading):
                formatter.write_dl(list(words.items()))
        if self.examples:
            with formatter.section("Examples"):
                formatter.write("".join(f"{'':{formatter.current_indent}}{line}\n" for line in self.examples))
        super().format_epilog(ctx, formatter)


complete_file = click.Path().shell_complete
"""Has the shell complete a file's name, without the checks of click.Path, which are more than a command wants."""


STEPS = (BarColumn(), MofNCompleteColumn())
"""The columns of a bar for a known number of steps."""


class StepBar:
    """A line on stderr of these columns and the step; nothing if `hidden` or where stderr is no terminal."""

    def __init__(self, *columns: ProgressColumn, hidden: bool) -> None:
        console = make_console(stderr=True)
        self._shown = console.is_terminal and not hidden
        self._bar = Progress(*columns, TextColumn("{task.description}", markup=False), console=console, transient=True)
        self._task = self._bar.add_task("", total=None)

    def __enter__(self) -> StepBar:
        if self._shown:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown:
            self._bar.stop()

    def update(self, done: int, total: int | None, what: str) -> None:
        """Show that step number `done` of `total`, None for an unknown number, is under way, and what it is."""
        self._bar.update(self._task, completed=done, total=total, description=printable(what))


NamedShape = tuple[str, list[int]]
"""An input's name and its sizes."""


class InputShape(click.ParamType):
    """NAME:1x3x224x224 or NAME:1,3,224,224; the name may hold colons."""

    name = "NAME:DIMS"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> NamedShape:
        """(name, sizes) of one option value."""
        name, colon, dims = value.rpartition(":")
        sizes = re.split("[x,]", dims)
        if not colon or not name or not all(re.fullmatch("[0-9]{1,99}", size) for size in sizes):
            self.fail(f"got {value[:200]!r}, expected NAME:1x3x224x224 or NAME:1,3,224,224", param, ctx)
        return name, [int(size) for size in sizes]


class Tolerance(click.FloatRange):
    """A finite number of at least 0; click's own range lets nan through."""

    name = "number"

    def __init__(self) -> None:
        super().__init__(min=0)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"got {value!r}, expected a finite number", param, ctx)
        return number


SHAPE: dict[str, Any] = {"type": InputShape(), "multiple": True, "metavar": "NAME:1x3x224x224"}
"""Keyword arguments of an option that gives shapes of inputs."""
ACCUMULATION: dict[str, Any] = {
    "type": click.Choice(tuple(ACCUMULATIONS)),
    "help": "How GPU kernels sum the pooling windows of ConvAvgPool nodes in fp16 and bf16. default: in fp32. packed: in fp16 or "
    "bf16 itself where a kernel can; faster, and the largest error in fp16 is 3.9e-4 to 5.4e-4 of the largest result instead of "
    "3.3e-4 to 4.8e-4. No effect in fp32 and on standard operators. Default: as the nodes of MODEL say; default for new ones.",
}
"""Keyword arguments of the option --accumulation."""
CHECK: dict[str, Any] = {"type": click.IntRange(min=0), "default": 1, "show_default": True, "metavar": "N"}
"""Keyword arguments of the option --check."""
SEED = click.option("--seed", **CHECK | {"default": 0}, help="Seed of the random inputs.")
DATA = click.option("--data", metavar="FILE.npz", help="Compare on these inputs instead of random ones.")


class NewFile(click.ParamType):
    """The name of a file to be written: not empty, as of an unset variable, nor that of a folder, which Path would drop."""

    name = "file"

    def __init__(self, *, stdout: bool = True) -> None:
        """stdout: whether "-" and the system's names of stdout stand for it, or are no file's name."""
        self._stdout = stdout

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        value = "-" if value in ("/dev/stdout", "/dev/fd/1", "/proc/self/fd/1") else value
        if not value or value.endswith((os.sep, f"{os.sep}.")) or value == "-" and not self._stdout:
            self.fail(f"got {value!r}, expected a file's name", param, ctx)
        return value


def comparison_options(report: str) -> Callable[[Callable], Callable]:
    """The options with which every command of engines ends.  report: what --report writes."""
    options = (
        click.option("--rtol", type=Tolerance(), help="Relative tolerance. Default: by precision."),
        click.option("--atol", type=Tolerance(), help="Absolute tolerance. Default: by precision and output."),
        SEED,
        click.option("--report", "report_path", type=NewFile(), metavar="FILE.json", help=report),
        click.option("-q", "--quiet", is_flag=True, help="Print nothing but errors."),
        click.version_option(package_name="convpool"),
    )

    def add(command: Callable) -> Callable:
        for option in reversed(options):  # the last one added comes first in the help
            command = option(command)
        return command

    return add


def run(cli: click.Command, name: str, args: list[str] | None = None) -> int:
    """Run a click command and return its exit status: 1 for a failed verification, 2 for anything unusable."""
    _tame_python(name)
    try:
        try:
            interrupt.raise_again()
            cli.main(args=args, prog_name=name, standalone_mode=False)
        finally:
            interrupt.ignore()
    except click.ClickException as error:
        return _fail(name, error.format_message(), 2)
    except (click.Abort, KeyboardInterrupt) as error:
        return _fail(name, *interrupt.told(error.__cause__ or error))
    except VerificationError as error:
        return _fail(name, str(error), 1)
    except ConvpoolError as error:
        return _fail(name, str(error), 2)
    except SystemExit as error:  # a closed pipe, for which click and rich have a status that means a mismatch here; a completion
        return 2 if error.code else 0
    except OSError as error:
        if isinstance(error.__context__, KeyboardInterrupt):  # click writes an empty line, which a lost terminal does not take
            return _fail(name, *interrupt.told(error.__context__))
        with suppress(OSError):
            sys.stdout.close()  # else the interpreter tries once more to write what is left
        return _fail(name, f"{error.filename or 'stdout'}: {error.strerror or error}", 2)
    except Exception as error:  # Python would end with 1, the status of outputs that differ
        _tell("".join(traceback.format_exception(error)).rstrip())
        return _fail(name, "a fault of convpool's own; please report it with the lines above", 2)
    return 0


def _fail(name: str, message: str, status: int) -> int:
    _tell(f"{name}: {' '.join(message.split())}")
    return status


def _tell(text: str) -> None:
    """Print lines on stderr, which may be closed."""
    with suppress(OSError):
        print(*map(printable, text.split("\n")), sep="\n", file=sys.stderr)


def _tame_python(name: str) -> None:
    """Have Python show in lines of `_tell` what it prints by itself, and all names in any encoding of stdout."""
    warnings.formatwarning = lambda message, *_, **__: f"{name}: warning: {printable(' '.join(str(message).split()))}\n"
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def load_model(name: str) -> LoadedModel:
    """The model of a file, or on stdin for "-".  Raises ModelError, in words for a command."""
    if name != "-":
        return load(Path(name))
    if sys.stdin is None:
        raise ModelError("stdin: closed; expected a model")
    try:
        return load(sys.stdin.buffer.read())
    except ModelError as error:
        text = str(error).replace("the bytes given", "stdin")
        if "external data" in text:
            text = text.partition("; give")[0] + "; give its path in place of -"
        raise ModelError(text) from error


def write_report(path: str | None, text: str, write_result: Callable[[], Any] = list) -> Any:
    """Write a report where one is asked for; "-" is stdout.  write_result: writes what it tells of, too, and gives the files,
    none if `list`; where that fails there is no report.  Raises OutputError."""
    if path == "-":
        click.echo(text, nl=False)
    with written_with(Path(path), text.encode()) if path and path != "-" else nullcontext():
        return write_result()


COMMANDS = {
    "optimize": "convpool.cli.optimize:command",
    "inspect": "convpool.cli.optimize:inspect_command",
    "verify": "convpool.cli.verify:verify_command",
    "build": "convpool.cli.build:build_command",
    "tune": "convpool.cli.tune:command",
    "doctor": "convpool.cli.doctor:command",
}
"""Where each command is, in the order of the help."""


class LazyGroup(click.Group):
    """A group that imports a command when it is asked for: engines need more than the optimizer."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return resolve_name(COMMANDS[cmd_name]) if cmd_name in COMMANDS else None


@click.group(cls=LazyGroup, invoke_without_command=True, **HELP)
@click.version_option(package_name="convpool")
@click.pass_context
def command(context: click.Context) -> None:
    """Compute convolutions beside pooling and resizing on the smaller map: the same result in fewer operations.

    \b
    convpool inspect model.onnx                  show what the model would gain
    convpool optimize model.onnx                 write and check model.convpool.onnx
    convpool build model.onnx -o model.engine    build a TensorRT engine with the plugin
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def main() -> None:
    """Entry point; turns exceptions into exit statuses and one line on stderr."""
    sys.exit(run(command, "convpool"))

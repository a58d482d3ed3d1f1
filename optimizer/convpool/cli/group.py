# SPDX-License-Identifier: Apache-2.0
"""`convpool`: all commands under one name.  convpool-optimize and the like are the same commands."""

from __future__ import annotations

import sys
from importlib import import_module

import click

from convpool.cli.common import run
from convpool.errors import OptionError

COMMANDS = {
    "optimize": "convpool.cli.optimize:command",
    "inspect": "convpool.cli.inspect:command",
    "verify": "convpool.cli.verify:verify_command",
    "build": "convpool.cli.build:build_command",
    "tune": "convpool.cli.tune:command",
    "doctor": "convpool.cli.doctor:command",
}
"""Where each command is, in the order of the help."""


class LazyGroup(click.Group):
    """A group that imports a command when it is asked for: engines need more than the optimizer."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All names, in the order of the help."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of a name, None where there is none."""
        if cmd_name not in COMMANDS:
            return bench if cmd_name == "bench" else None
        module, _, name = COMMANDS[cmd_name].partition(":")
        found = getattr(import_module(module), name)
        assert isinstance(found, click.Command)
        return found


@click.command("bench", hidden=True, context_settings={"ignore_unknown_options": True, "help_option_names": []})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def bench(arguments: tuple[str, ...]) -> None:
    """Say where the command of earlier releases is."""
    raise OptionError(
        "bench: not part of the package any more; `convpool tune` measures tactics for your GPU, and "
        "`python -m benchmarks layers` in convpool's repository all methods"
    )


@click.group(cls=LazyGroup, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="convpool")
@click.pass_context
def command(context: click.Context) -> None:
    """Compute average pooling before convolution: the same result in fewer operations, in ONNX models and on GPUs.

    \b
    convpool inspect model.onnx                  show what the model would gain
    convpool optimize model.onnx                 write and check model.convpool.onnx
    convpool build model.onnx -o model.engine    build a TensorRT engine with the plugin
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def bench_main() -> None:
    """Entry point of convpool-bench, which ends with the next release."""
    sys.exit(run(bench, "convpool-bench"))


def main() -> None:
    """Entry point; turns exceptions into exit statuses and one line on stderr."""
    sys.exit(run(command, "convpool"))


if __name__ == "__main__":
    main()

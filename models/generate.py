# SPDX-License-Identifier: Apache-2.0
"""Writes a generated network to a file: ``python -m models.generate NAME -o out.onnx``, from the repository's root.

``--list`` shows the names; ``--set`` overrides any argument of a network, ``--size`` is short for ``--set size=...``.
"""

from __future__ import annotations

import argparse
import ast
import sys
from pathlib import Path

from models import generators


def _batch(text: str) -> str | int:
    return text if text == "dynamic" else int(text)


def _setting(text: str) -> tuple[str, object]:
    key, separator, value = text.partition("=")
    if not separator:
        raise argparse.ArgumentTypeError(f"{text}: got no '=', expected KEY=VALUE")
    try:
        return key, ast.literal_eval(value)
    except (SyntaxError, ValueError):
        return key, value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m models.generate", description=__doc__.splitlines()[0])
    parser.add_argument("name", nargs="?", metavar="NAME", help="the network; see --list")
    parser.add_argument("--list", action="store_true", help="list the networks, their sites and arguments")
    parser.add_argument("-o", "--output", type=Path, help="the ONNX file to write (default: NAME.onnx)")
    parser.add_argument("--batch", type=_batch, default="dynamic", help="'dynamic' (default) or a number")
    parser.add_argument("--seed", type=int, default=generators.DEFAULT_SEED, help="of the weights (default: %(default)s)")
    parser.add_argument("--opset", type=int, default=generators.DEFAULT_OPSET, help="default: %(default)s")
    parser.add_argument("--dtype", default="float32", choices=("float16", "float32", "float64"))
    parser.add_argument("--size", type=int, help="height and width (depth, or samples) of the input")
    parser.add_argument(
        "--set",
        type=_setting,
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="settings",
        help="an argument of the network, as --list shows them; repeat for more",
    )
    return parser


def _print_list() -> None:
    for name, generator in generators.REGISTRY.items():
        sites = ", ".join(f"{count} {kind}" for kind, count in generator.sites.items()) or "no sites"
        args = ", ".join(f"{key}={value!r}" for key, value in generator.parameters.items())
        print(f"{name}: {generator.summary}\n    {sites}; {args}")


def main(argv: list[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    if options.list:
        _print_list()
        return 0
    if options.name is None:
        print("NAME: missing; --list shows the networks", file=sys.stderr)
        return 2
    args = dict(options.settings) | ({} if options.size is None else {"size": options.size})
    output = options.output or Path(f"{options.name}.onnx")
    try:
        model = generators.generate(
            options.name, batch=options.batch, seed=options.seed, opset=options.opset, dtype=options.dtype, **args
        )
        output.write_bytes(generators.serialize(model))
    except OSError as error:
        print(f"{output}: cannot be written; {error.strerror or error}", file=sys.stderr)
        return 2
    except (KeyError, TypeError, ValueError) as error:
        print(error.args[0] if isinstance(error, KeyError) else error, file=sys.stderr)
        return 2
    print(f"{output}: {len(model.graph.node)} nodes, {output.stat().st_size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""The tables in the documents that are made from records, from the commands' options and from the operator's schemas.

    python -m benchmarks.tables

writes every table anew between its two markers, `<!-- NAME -->` and `<!-- end -->`.  A test compares the documents with it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click
import onnx

from benchmarks import model_times
from benchmarks.network_times import OURS, ratios, times_of
from convpool.bench import record as records
from convpool.bench.figures import figures, geometric_mean
from convpool.bench.table import markdown
from convpool.cli.build import build_command
from convpool.cli.optimize import command as optimize_command
from convpool.cli.verify import verify_command
from convpool.ir import schema

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
DOCUMENTS = ("README.md", "docs/operator.md", "docs/results.md", "docs/tensorrt.md")
NETWORKS = {
    "sngan64": "SNGAN discriminator 64x64",
    "sngan64_in_place": "the same, ReLUs in place as in torch-mimicry",
    "stargan_v2": "StarGAN v2 discriminator 256x256",
    "wgan_gp": "WGAN-GP critic 32x32",
    "densenet_transition1": "DenseNet transition 56x56x256",
    "densenet_transition2": "DenseNet transition 28x28x512",
    "densenet_transition3": "DenseNet transition 14x14x1024",
    "densenet121": "DenseNet-121",
    "lenet5_digits": "LeNet-5, digits",
}
"""What the documents call the networks of a record."""


def table(headings: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    """A table in Markdown; None is an empty cell."""
    headings = list(headings)
    lines = [headings, ["---"] * len(headings), *rows]
    text = (["" if cell is None else str(cell).replace("|", "\\|") for cell in line] for line in lines)
    return "\n".join(f"| {' | '.join(cells)} |".replace("|  |", "| |").replace("|  |", "| |") for cells in text)


def options(command: click.Command) -> str:
    """A command's options: names and value, default, help."""
    context = click.Context(command)
    rows = []
    for option in command.params:
        found = option.get_help_record(context) if isinstance(option, click.Option) else None
        if found is None:
            continue
        names, text = found
        meaning, default = re.fullmatch(r"(.*?)(?:\s*\[(?:default: ([^;\]]*))?.*\])?", text, re.DOTALL).groups()
        names = names.replace("INTEGER RANGE", "N").replace("FLOAT RANGE", "X")
        rows.append([f"`{names}`", default and f"`{default}`", meaning])
    return table(["option", "default", "meaning"], rows)


def attributes(op_type: str, version: int, without: Iterable[str] = ()) -> str:
    """The attributes of an operator of the domain, but for those named in `without`."""
    rows = []
    for name, attribute in onnx.defs.get_schema(op_type, version, schema.DOMAIN).attributes.items():
        if name not in without:
            default = None if attribute.required else onnx.helper.get_attribute_value(attribute.default_value)
            default = f'`"{default.decode()}"`' if isinstance(default, bytes) else default
            rows.append([f"`{name}`", attribute.type.name.lower(), default, attribute.description])
    return table(["attribute", "type", "default", "meaning"], sorted(rows, key=lambda row: (row[2] is not None, row[0])))


def networks(record: dict[str, Any]) -> str:
    """Times of networks in microseconds; the plugin's is the engine's as `convpool-build` makes it."""
    rows = []
    for row in record["rows"]:
        times = times_of(row)
        times["plugin"] = next(times[name] for name in OURS if name in times)
        times = {name: f"{us:.1f}" for name, us in times.items()}
        cells = [times.get(name) for name in ("original", "direct", "fused", "stem", "plugin")]
        speedups = [ratio and f"{ratio:.2f}" for ratio in ratios(row)]
        rows.append([f"{NETWORKS[row['network']]}, batch {row['batch']}", row["precision"], *cells, *speedups, row["commit"][:7]])
    ways = ["original", "direct", "fused", "pairs and images", "plugin"]
    return table(["network", "precision", *ways, "over original", "over direct, fused", "commit"], rows)


def engines(record: dict[str, Any]) -> str:
    """Errors of engines: the largest over static and open shapes."""
    rows = []
    for model in dict.fromkeys(row["model"] for row in record["rows"]):
        cells = [NETWORKS[model]]
        for precision in ("fp32", "fp16"):
            found = [row for row in record["rows"] if (row["model"], row["precision"]) == (model, precision)]
            error, ratio = (max(row[key] for row in found) for key in ("plugin_error", "ratio"))
            cells += [scientific(error), scientific(found[0]["limit"]), f"{ratio:.2f}"]
        rows.append(cells)
    columns = [f"{precision} {what}" for precision in ("fp32", "fp16") for what in ("error", "limit", "ratio")]
    return table(["model", *columns], rows) + f"\n\nAt {record['commit'][:7]}."


def scientific(value: float) -> str:
    """Two digits and an exponent without zeros in front."""
    return re.sub(r"e([+-])0*", lambda found: f"e{'-' if found[1] == '-' else ''}", f"{value:.1e}")


def speedups() -> str:
    """The README's summary of the records."""
    on_cpu, layers = load("cpu.json"), records.load(str(RESULTS / "h200_suita_table2_fp16.json"))
    found = [figures(entry, layers["ceilings"]) for entry in layers["rows"]]
    naive, others = geometric_mean(row.over_naive for row in found), geometric_mean(row.over_others for row in found)
    named = {row["name"]: row["speedup"] for row in on_cpu["rows"]}
    engines = {row["network"]: ratios(row)[0] for row in load("h200_trt86_networks.json")["rows"]}
    chosen = ("sngan64", "stargan_v2", "wgan_gp", "densenet_transition1", "densenet121")
    rows = [
        ["onnxruntime, 2 CPU cores", "eight single layers, geometric mean", f"{on_cpu['layers_geometric_mean']:.2f}"],
        *(["onnxruntime, 2 CPU cores", name, f"{named[name]:.2f}"] for name in ("sngan64, batch 8", "densenet121, batch 1")),
        [
            "CUDA library, H200, fp16",
            "20 layers, geometric mean, over convolution, then pooling",
            f"{naive:.2f}",
        ],
        ["CUDA library, H200, fp16", "the same layers, over the fastest other method of any kind", f"{others:.2f}"],
        *(["TensorRT 8.6 with the plugin, H200, fp16", NETWORKS[name], f"{engines[name]:.2f}"] for name in chosen),
    ]
    return table(["where", "what", "times as fast"], rows)


def load(name: str) -> Any:
    """A record by its file's name."""
    return json.loads((RESULTS / name).read_text())


TABLES: dict[str, Callable[[], str]] = {
    "speed-ups": speedups,
    "options of convpool-optimize": lambda: options(optimize_command),
    "options of convpool-build": lambda: options(build_command),
    "options of convpool-verify": lambda: options(verify_command),
    "attributes of ConvAvgPool": lambda: attributes(schema.OP_TYPE, schema.VERSION),
    "attributes of fused variants": lambda: attributes(
        "AffineReluConvAvgPool",
        schema.FUSED_VARIANTS_VERSION,
        onnx.defs.get_schema(schema.OP_TYPE, schema.VERSION, schema.DOMAIN).attributes,
    ),
    "cpu.json": lambda: model_times.markdown(load("cpu.json")),
    "h200_suita_table2_fp16.json": lambda: markdown(records.load(str(RESULTS / "h200_suita_table2_fp16.json"))),
    "h200_trt86_networks.json": lambda: networks(load("h200_trt86_networks.json")),
    "h200_trt86_networks_float.json": lambda: networks(load("h200_trt86_networks_float.json")),
    "h200_trt86_engines.json": lambda: engines(load("h200_trt86_engines.json")),
}
"""The tables by the names in their markers."""


def blocks(text: str) -> dict[str, str]:
    """The tables of a document by name, as they stand there."""
    found = re.findall(r"^<!-- (?!end)(.*?) -->\n(.*?)^<!-- end -->$", text, re.MULTILINE | re.DOTALL)
    return {name: body.strip() for name, body in found}


def filled(text: str) -> str:
    """A document with every table made anew."""
    return re.sub(
        r"^(<!-- (?!end)(.*?) -->\n).*?^<!-- end -->$",
        lambda found: f"{found[1]}{TABLES[found[2]]().strip()}\n<!-- end -->",
        text,
        flags=re.MULTILINE | re.DOTALL,
    )


def main() -> None:
    """Write every document's tables anew."""
    for name in DOCUMENTS:
        path = ROOT / name
        path.write_text(filled(path.read_text()))


if __name__ == "__main__":
    main()

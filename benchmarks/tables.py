# SPDX-License-Identifier: Apache-2.0
"""The tables in the documents that are made from records, from the commands' options and from the operator's schemas.

    python -m benchmarks tables

writes every table anew between its two markers, `<!-- NAME -->` and `<!-- end -->`.  A test compares the documents with it.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click
import onnx

from benchmarks import model_times, onnxruntime_times, papers, resizing
from benchmarks.layers import record as records
from benchmarks.layers.figures import figures, geometric_mean
from benchmarks.layers.table import markdown
from benchmarks.network_times import NETWORKS as ENGINES
from benchmarks.network_times import OURS, errors, ratios, times_of
from convpool.algebra.parts import OP_TYPE, OPERATORS, UPSAMPLING_OP_TYPE
from convpool.cli.group import COMMANDS, SectionedCommand
from convpool.cli.group import command as group
from convpool.ir import schema

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
DOCUMENTS = ("README.md", "docs/commands.md", "docs/operator.md", "docs/papers.md", "docs/results.md")
NETWORKS = {
    "sngan64": "SNGAN discriminator 64x64",
    "sngan64_in_place": "SNGAN, ReLUs in place as in torch-mimicry",
    "stargan_v2": "StarGAN v2 discriminator 256x256",
    "wgan_gp": "WGAN-GP critic 32x32",
    "densenet_transition1": "DenseNet transition 56x56x256",
    "densenet_transition2": "DenseNet transition 28x28x512",
    "densenet_transition3": "DenseNet transition 14x14x1024",
    "densenet121": "DenseNet-121",
    "lenet5_digits": "LeNet-5, digits",
    "wgan_gp_slices": "WGAN-GP critic, pooling by slices",
    "biggan128": "BigGAN discriminator 128x128",
    "biggan256": "BigGAN discriminator 256x256",
    "stargan_v2_style": "StarGAN v2 style encoder 256x256",
    "igebm": "IGEBM 32x32",
    "darknet19": "Darknet-19",
    "densenet_bc100": "DenseNet-BC 100",
    "mobilenet_v1": "MobileNet v1, audio",
    "nextvit": "Next-ViT",
    "lenet5": "LeNet-5",
    "condensenet74": "CondenseNet-74",
    "conv_global_pool": "one convolution, then a mean over 56x56",
    "conv_pool": "one convolution, then pooling",
    "discriminator_block": "one block of a discriminator",
    "sparcnet": "SPARCNet",
    "sngan_generator": "SNGAN generator 64x64",
    "biggan_generator": "BigGAN generator 128x128",
    "stargan_v2_generator": "StarGAN v2 generator 256x256",
    "unet_nearest": "U-Net, nearest upsampling, 512x512",
    "vae_decoder": "VAE decoder, Stable Diffusion's, 512x512",
}
"""Names in the documents of the networks of a record."""


def table(headings: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    """A table in Markdown; None is an empty cell."""
    headings = list(headings)
    lines = [headings, ["---"] * len(headings), *rows]
    text = (["" if cell is None else str(cell).replace("|", "\\|") for cell in line] for line in lines)
    return "\n".join(f"| {' | '.join(cells)} |".replace("|  |", "| |").replace("|  |", "| |") for cells in text)


def options(name: str) -> str:
    """A command's options and lists, a table for each section of its help."""
    command = group.get_command(click.Context(group), name)
    assert isinstance(command, SectionedCommand)
    context = click.Context(command, **command.context_settings)
    tables = []
    for heading, found in command.help_records(context).items():
        rows = []
        for names, text in found:
            meaning, default = re.fullmatch(r"(.*?)(?:\s*\[(?:default: ([^;\]]*))?.*\])?", text, re.DOTALL).groups()
            rows.append([f"`{names}`", default and f"`{default}`", meaning])
        tables.append(f"{heading}:\n\n{table(['option', 'default', 'meaning'], rows)}")
    for heading, words in command.lists.items():
        tables.append(f"{heading}:\n\n{table(['name', 'meaning'], [[f'`{word}`', text] for word, text in words.items()])}")
    return "\n\n".join(tables)


def attributes(op_type: str, without: Iterable[str] = ()) -> str:
    """The attributes of an operator of the domain, but for those named in `without`."""
    rows = []
    for name, (kind, default, meaning) in schema.attributes_of(OPERATORS[op_type]).items():
        if name not in without:
            shown = f'`"{default}"`' if isinstance(default, str) else default
            rows.append([f"`{name}`", onnx.AttributeProto.AttributeType.Name(kind).lower(), shown, meaning])
    return table(["attribute", "type", "default", "meaning"], sorted(rows, key=lambda row: (row[2] is not None, row[0])))


def label(row: dict[str, Any]) -> str:
    """The name of a record's network or upsampled layer, with the batch."""
    layer = ENGINES[row["network"]].layer
    name = f"{layer[0]} to {layer[1]} channels, {layer[2]}x{layer[2]}" if layer else NETWORKS[row["network"]]
    return f"{name}, batch {row['batch']}"


def networks(record: dict[str, Any]) -> str:
    """Times of networks in microseconds; the plugin's is the engine's as `convpool-build` makes it."""
    rows = []
    for row in record["rows"]:
        times = times_of(row)
        times["plugin"] = next(times[name] for name in OURS if name in times)
        times = {name: f"{us:.1f}" for name, us in times.items()}
        cells = [times.get(name) for name in ("original", "direct", "fused", "stem", "plugin")]
        speedups = [ratio and f"{ratio:.2f}" for ratio in ratios(row)]
        rows.append([label(row), row["precision"], *cells, *speedups, row["commit"][:7]])
    ways = ["original", "direct", "fused", "pairs and images", "plugin"]
    return table(["network", "precision", *ways, "over original", "over direct, fused", "commit"], rows)


def generators(record: dict[str, Any]) -> str:
    """Times of networks and layers that enlarge maps, with the errors that they were accepted with."""
    rows = []
    for row in record["rows"]:
        times = times_of(row)
        times["plugin"] = next(times[name] for name in OURS if name in times)
        over = [f"{times['original'] / times[name]:.2f}" if name in times else None for name in ("fused", "plugin")]
        cells = [f"{times[name]:.1f}" if name in times else None for name in ("original", "fused", "plugin")]
        rows.append([label(row), *cells, *over, row["bar"], *errors(row), row["commit"][:7]])
    ways = ["original", "fused", "plugin", "original over fused", "over plugin", "asked"]
    return table(["network or layer, fp16", *ways, "error, original", "error, plugin", "limit", "commit"], rows)


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


GAINS = (
    ("SNGAN discriminator, 64x64", "sngan64, batch 8", "sngan64"),
    ("WGAN-GP critic, 32x32", "wgan_gp, batch 8", "wgan_gp"),
    ("StarGAN v2 discriminator, 256x256", "stargan_v2, batch 1", "stargan_v2"),
    ("BigGAN discriminator, 128x128", "biggan128, batch 8", "biggan128"),
    ("LeNet-5 with average pooling", "lenet5_digits, batch 1", None),
    ("DenseNet-121", "densenet121, batch 1", "densenet121"),
)
"""The README's networks: what it calls them, and their names in the records of the CPU and of GPUs."""


Gain = tuple[str, float]
"""Batch and speed-up."""


def measured_gains() -> list[tuple[str, Gain, Gain | None, Gain | None]]:
    """The README's networks, each with batch and speed-up on the CPU, in TensorRT and in onnxruntime on a GPU.

    TensorRT's are those at its default builder level where they are on record.
    """
    on_cpu = {row["name"]: row["speedup"] for row in load("cpu.json")["rows"]}
    built = [row for name in ("", "_level3") for row in load(f"h200_trt86_networks{name}.json")["rows"]]
    engines = {row["network"]: (f"batch {row['batch']}", ratios(row)[0]) for row in built}
    sessions = {
        row["network"]: (f"batch {row['batch']}", onnxruntime_times.gain(row))
        for row in load("h200_ort.json")["rows"]
        if row["precision"] == "fp16" and row["graphs"]
    }
    return [(name, (cpu.split(", ")[1], on_cpu[cpu]), engines.get(gpu), sessions.get(gpu)) for name, cpu, gpu in GAINS]


def gains() -> str:
    """The README's first sentences."""
    rows = measured_gains()
    cpu, gpu, sessions = ([row[column][1] for row in rows if row[column]] for column in (1, 2, 3))
    return (
        "**convpool computes convolutions beside pooling and resizing on the smaller map, exactly.** "
        f"Networks with average pooling\nrun {min(cpu):.1f} to {max(cpu):.1f} times as fast on a CPU. "
        f"On a GPU they run {min(gpu):.1f} to {max(gpu):.1f} times as fast in TensorRT, "
        f"and {min(sessions):.1f} to {max(sessions):.1f} times in onnxruntime."
    )


def speedups() -> str:
    """The README's summary of the records."""
    layers = records.load(str(RESULTS / "h200_suita_table2_fp16.json"))
    found = [figures(entry, layers["ceilings"]) for entry in layers["rows"]]
    naive, others = geometric_mean(row.over_naive for row in found), geometric_mean(row.over_others for row in found)
    rows = [[name, *(cell and f"{cell[1]:.2f} ({cell[0]})" for cell in cells)] for name, *cells in measured_gains()]
    rows.append(["8 single layers, geometric mean", f"{load('cpu.json')['layers_geometric_mean']:.2f}", None, None])
    rows.append([f"{len(found)} layers, CUDA library, geometric mean: over convolution and pooling", None, f"{naive:.2f}", None])
    rows.append(["the same layers: over the fastest method of any other library", None, f"{others:.2f}", None])
    return table(["times as fast", "onnxruntime, 2 CPU cores", "TensorRT, H200, fp16", "onnxruntime, H200, fp16"], rows)


def packed_layers() -> dict[str, Any]:
    """The record of packed sums, with the other libraries' times of the record of exact sums: to these it is the same layer."""
    exact, packed = (records.load(str(RESULTS / f"h200_suita_table2_fp16{name}.json")) for name in ("", "_packed"))
    theirs = {_layer(entry): entry["methods"] for entry in exact["rows"]}
    rows = []
    for entry in packed["rows"]:
        ours = {name: result for name, result in entry["methods"].items() if name.startswith("convpool")}
        others = {name: result for name, result in theirs[_layer(entry)].items() if not name.startswith("convpool")}
        rows.append({**entry, "methods": {**others, **ours}})
    return {**packed, "rows": rows}


def _layer(entry: dict[str, Any]) -> str:
    return json.dumps({**entry["row"], "packed": None}, sort_keys=True)


def load(name: str) -> Any:
    """A record by its file's name."""
    return json.loads((RESULTS / name).read_text())


TABLES: dict[str, Callable[[], str]] = {
    "gains": gains,
    "speed-ups": speedups,
    **{f"options of convpool {name}": functools.partial(options, name) for name in COMMANDS if name != "doctor"},
    "attributes of ConvAvgPool": lambda: attributes(OP_TYPE),
    "attributes of UpsampleConv": lambda: attributes(UPSAMPLING_OP_TYPE, schema.attributes_of(OPERATORS[OP_TYPE])),
    "attributes of fused variants": lambda: attributes("AffineReluConvAvgPoolAddRelu", schema.attributes_of(OPERATORS[OP_TYPE])),
    "cpu.json": lambda: model_times.markdown(load("cpu.json")),
    "resizing_cpu.json": lambda: resizing.markdown(load("resizing_cpu.json")),
    "public_models.json": lambda: resizing.public_markdown(load("public_models.json")),
    "h200_suita_table2_fp16.json": lambda: markdown(records.load(str(RESULTS / "h200_suita_table2_fp16.json"))),
    "h200_suita_table2_fp16_packed.json": lambda: markdown(packed_layers()),
    "h200_trt86_networks.json": lambda: networks(load("h200_trt86_networks.json")),
    "h200_trt86_networks_level3.json": lambda: networks(load("h200_trt86_networks_level3.json")),
    "h100_trt86_generators.json": lambda: generators(load("h100_trt86_generators.json")),
    "h200_trt86_networks_float.json": lambda: networks(load("h200_trt86_networks_float.json")),
    "the papers' tables on record": papers.coverage,
    **{f"claims of {name}": functools.partial(papers.markdown, name) for name in papers.PAPERS},
    **{
        name: lambda name=name: onnxruntime_times.markdown(load(name), NETWORKS)
        for name in ("h200_ort.json", "h100_ort_generators.json")
    },
    "h100_ort_resizing.json": lambda: onnxruntime_times.resizing_markdown(load("h100_ort_resizing.json")),
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

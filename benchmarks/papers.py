# SPDX-License-Identifier: Apache-2.0
"""The papers' claims, and what the records say of them.

    python -m benchmarks papers                                # every claim: the paper's figure, this one's, the verdict, why
    python -m benchmarks papers --picture docs/papers.png      # the papers' speed-up, row by row

docs/papers.md has the same text (`python -m benchmarks tables` writes it).  Every figure is computed here: the papers' from their
tables in `benchmarks.layers.data`, this machine's from the records in benchmarks/results.  So is every verdict.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.counts import tokura_operations
from benchmarks.layers import record as records
from benchmarks.layers.figures import Figures, figures, geometric_mean
from benchmarks.layers.paper import FIVE, speed_up_fused, speed_up_naive
from benchmarks.layers.record import Entry, entry_row
from benchmarks.layers.suites import SUITES

RESULTS = Path(__file__).resolve().parent / "results"
TABLES = {  # record, suite and precision of each table of the papers
    "Suita, table 1": ("h200_suita_table1_fp32.json", "suita-table1", "fp32"),
    "Suita, table 2": ("h200_suita_table2_fp16.json", "suita-table2", "fp16"),
    "Tokura, table II": ("h200_tokura_fp32_fp16.json", "tokura", "fp32"),
    "Tokura, table III": ("h200_tokura_fp32_fp16.json", "tokura", "fp16"),
}
NAMES = {"cudnn": "cuDNN", "cublas": "cuBLAS", "tensorrt": "TensorRT", "sat": "summed-area table"}


@dataclass(frozen=True)
class Claim:
    """A claim, the paper's figure, this one's, whether it holds here, and why."""

    text: str
    paper: str
    here: str
    holds: bool
    why: str

    @property
    def verdict(self) -> str:
        """In a word or two."""
        return "holds" if self.holds else "not here"


def rows_of(table: str) -> list[tuple[Entry, Figures]]:
    """Entries of a paper's table, in its order, with their figures."""
    name, suite, precision = TABLES[table]
    record = records.load(str(RESULTS / name))
    found = {entry_row(entry): entry for entry in record["rows"] if entry["precision"] == precision and entry["layout"] == "nhwc"}
    rows = SUITES[suite][0]
    return [(found[row], figures(found[row], record["ceilings"])) for row in rows if row in found]


def cells(table: str) -> tuple[int, int]:
    """(cells of a paper's table with a time on record, cells in all): five methods of every row."""
    found = rows_of(table)
    return sum("us" in entry["methods"].get(name, {}) for entry, _ in found for name in FIVE), 5 * len(
        SUITES[TABLES[table][1]][0]
    )


def winners(times: Iterable[dict[str, float]]) -> Counter[str]:
    """How often each of the five methods is the fastest of them."""
    return Counter(min(FIVE, key=lambda name: one[name]) for one in times if all(name in one for name in FIVE))


def counted(found: Counter[str]) -> str:
    """Winners as words, the most frequent first."""
    return ", ".join(f"{count} {name(method)}" for method, count in found.most_common())


def name(method: str) -> str:
    """Write a method as the papers do: cuBLAS(direct)."""
    library, _, form = method.partition("_")
    return f"{NAMES[library]}({form})"


def at(table: str, c: int, m: int, size: int) -> tuple[dict[str, float], Figures]:
    """The paper's times and this record's figures of one row."""
    for entry, found in rows_of(table):
        row = entry_row(entry)
        if (row.c, row.m, row.h) == (c, m, size):
            return found.paper, found
    raise KeyError((table, c, m, size))


def mean(values: Iterable[float | None]) -> float:
    """Arithmetic, as the papers average."""
    return statistics.fmean(value for value in values if value is not None)


def suita() -> list[Claim]:
    """Suita et al., JPDC 2020."""
    claims = []
    for table, precision, stated in (("Suita, table 1", "fp32", 2.90), ("Suita, table 2", "fp16", 1.43)):
        found = [row for _, row in rows_of(table)]
        paper, here = mean(speed_up_naive(row.paper) for row in found), mean(row.direct_over_naive for row in found)
        ours = mean(row.times["cudnn_naive"] / row.ours_us for row in found if row.ours_us)
        claims.append(
            Claim(
                f"{precision}: pooling first is {stated:.2f} times as fast as cuDNN naive, on average",
                f"{paper:.2f}",
                f"{here:.2f}; convpool {ours:.2f}",
                here > 1.1,
                "A quarter of the products, by the same libraries.",
            )
        )
    for table, precision in (("Suita, table 1", "fp32"), ("Suita, table 2", "fp16")):
        found = [row for _, row in rows_of(table)]
        paper, here = [speed_up_fused(row.paper) for row in found], [row.direct_over_fused for row in found]
        below = sum(value < 1 for value in here if value)
        ours = mean(min(row.times["cudnn_fused"], row.times["cublas_fused"]) / row.ours_us for row in found if row.ours_us)
        claims.append(
            Claim(
                f"{precision}: pooling first beats the fused kernel, by libraries alone",
                f"{mean(paper):.2f} on average; behind in {sum(value < 1 for value in paper if value)} of {len(paper)} rows",
                f"{mean(here):.2f}; behind in {below} of {len(here)}; convpool {ours:.2f}",
                mean(here) > 1,
                "The fused kernel has 16 taps for 9, but it is one call: pooling first writes the means to memory and reads them "
                "again. convpool's fused kernels (`direct_tma`, `direct_fused`) keep them on chip.",
            )
        )
    paper, row = at("Suita, table 1", 128, 128, 64)
    claims.append(
        Claim(
            "fp32, 128 channels of 64x64: 9.49 times, since cuDNN chose a slow algorithm for naive",
            f"{speed_up_naive(paper):.2f}",
            f"{row.direct_over_naive:.2f}",
            bool(row.direct_over_naive and row.direct_over_naive > 5),
            "An outlier of cuDNN 7.1; the engines of cuDNN 9 are timed, and the fastest counts.",
        )
    )
    found = [row for _, row in rows_of("Suita, table 2")]
    here = winners(row.times for row in found)
    claims.append(
        Claim(
            "fp16: with small maps of many channels cuDNN naive is the fastest of the five",
            counted(winners(row.paper for row in found)),
            counted(here),
            here["cudnn_naive"] > 0,
            "So the best method has to be chosen for each layer; convpool's library does by measurement or by its cost rule.",
        )
    )
    tables = [row.times["sat_direct"] / row.times["cudnn_direct"] for row in found if "sat_direct" in row.times]
    claims.append(
        Claim(
            "for windows of 2x2 the direct sum is more efficient than a summed-area table",
            "stated",
            f"the table takes {geometric_mean(tables):.2f} times as long ({min(tables):.2f} to {max(tables):.2f})",
            min(tables) > 1,
            "The table is in fp32 and goes through memory three times.",
        )
    )
    return claims


def tokura() -> list[Claim]:
    """Tokura et al., 2018."""
    claims = []
    for table, precision, stated in (("Tokura, table II", "fp32", 1.8), ("Tokura, table III", "fp16", 4.4)):
        paper, row = at(table, 512, 512, 32)
        here = row.times["cudnn_naive"] / row.times["cublas_direct"]
        ours = row.times["cudnn_naive"] / row.ours_us if row.ours_us else float("nan")
        claims.append(
            Claim(
                f"{precision}, 512 to 512 channels: cuBLAS(direct) is {stated} times as fast as cuDNN naive",
                f"{paper['cudnn_naive'] / paper['cublas_direct']:.2f}",
                f"{here:.2f}; convpool {ours:.2f}",
                here >= 0.9 * stated,
                "On the V100 cuDNN ran naive without tensor cores in this row (no star in the table); cuDNN 9 runs it with them."
                if precision == "fp16"
                else "cuDNN and cuBLAS without tensor cores; convpool with three TF32 products for each one.",
            )
        )
    for table, precision in (("Tokura, table II", "fp32"), ("Tokura, table III", "fp16")):
        found = [row for _, row in rows_of(table)]
        here = winners(row.times for row in found)
        claims.append(
            Claim(
                f"{precision}: the fastest of the five in the 25 pairs of channels"
                + (" is cuBLAS(direct)" if precision == "fp16" else " is mostly a direct sum"),
                counted(winners(row.paper for row in found)),
                counted(here),
                here.most_common(1)[0][0].endswith("direct"),
                "Two launches: one kernel takes the means while it unrolls, then the product.",
            )
        )
    sizes = {"n": 32, "k": 3, "c_in": 512, "c_out": 512, "p": 2}
    direct = tokura_operations("direct", **sizes)
    naive, fused = (tokura_operations(form, **sizes) / direct for form in ("naive", "fused"))
    claims.append(
        Claim(
            "512 to 512 channels: about 4 times fewer operations than naive, 1.8 than fused; nvprof counts as many",
            f"{direct:,} by the formula, 1,217,946,624 counted",
            f"{naive:.2f} and {fused:.2f} times fewer; all 250 counts agree (`tests/benchmarks/test_counts.py`)",
            3.9 < naive < 4.1 and 1.7 < fused < 1.9,
            "nvprof's count equals the formula, except where a library pads fewer outputs to a tile of 64 or 128.",
        )
    )
    return claims


def _faster(ratios: list[float]) -> str:
    """In how many of the rows."""
    return f"{sum(ratio > 1 for ratio in ratios)} of {len(ratios)}"


def cuconv() -> list[Claim]:
    """Jorda et al., cuConv."""
    record = records.load(str(RESULTS / "h200_cuconv.json"))
    claims = []
    for kernel in (1, 3, 5):
        found = [figures(entry, record["ceilings"]) for entry in record["rows"] if entry_row(entry).kernel == kernel]
        two_stages = [
            row.times["cudnn_fused"] / row.times["cuconv"] for row in found if {"cudnn_fused", "cuconv"} <= set(row.times)
        ]
        ours = [row.over_naive for row in found if row.over_naive]
        theirs = f"two stages: up to {max(two_stages):.2f}, faster in {_faster(two_stages)}"
        claims.append(
            Claim(
                f"{kernel}x{kernel} convolutions without pooling, batch 1 to 64, fp32: faster than the best of cuDNN",
                "up to 2.29" if kernel == 1 else "up to 2.29 over all kernels",
                f"{theirs}; convpool: up to {max(ours):.2f}, {geometric_mean(ours):.2f} on average, faster in {_faster(ours)}",
                max(two_stages) > 1,
                "Our two stages are written from the paper's description, without tensor cores. convpool's fp32 is three TF32 "
                "products on tensor cores, which cuDNN does not offer.",
            )
        )
    return [*claims, _cuconv_in_fp16()]


def _cuconv_in_fp16() -> Claim:
    record = records.load(str(RESULTS / "h200_cuconv_fp16.json"))
    found = [figures(entry, record["ceilings"]) for entry in record["rows"]]
    ours = [row.over_naive for row in found if row.over_naive]
    stages = [row.times["cudnn_fused"] / row.times["cuconv"] for row in found if {"cudnn_fused", "cuconv"} <= set(row.times)]
    return Claim(
        "the same layers in fp16, channels last, which the paper does not have",
        "",
        f"two stages: up to {max(stages):.2f}, faster in {_faster(stages)}; convpool: up to {max(ours):.2f}, "
        f"{geometric_mean(ours):.2f} on average, faster in {_faster(ours)}",
        max(stages) > 1,
        "cuDNN and convpool multiply on tensor cores here, the two stages do not.",
    )


def textbook() -> list[Claim]:
    """Kirk and Hwu's chapter, its kernels on Suita's layers in fp32."""
    record = records.load(str(RESULTS / "h200_textbook.json"))
    times = [{name: one["us"] for name, one in entry["methods"].items() if "us" in one} for entry in record["rows"]]
    rows = [row for row in times if {"textbook_direct", "textbook_tiled", "textbook_gemm"} <= set(row)]
    tiled = [row["textbook_direct"] / row["textbook_tiled"] for row in rows]
    product = [row["textbook_tiled"] / row["textbook_gemm"] for row in rows]
    layer = SUITES["suita-table1"][0][-1]
    pairs = [row["speedup"] for row in json.loads((RESULTS / "h200_lenet5_pairs.json").read_text())["rows"]]
    expansion = layer.kernel**2 * layer.conv_size[0] * layer.conv_size[1] / (layer.h * layer.w)
    return [
        Claim(
            "tiles in shared memory improve the basic kernel dramatically",
            "stated",
            f"{geometric_mean(tiled):.2f} times as fast ({min(tiled):.2f} to {max(tiled):.2f}), in {_faster(tiled)} rows",
            geometric_mean(tiled) > 1.2,
            "An H200's caches already serve what taps share, and a tile of 16x16 outputs is mostly empty on maps of 8x8.",
        ),
        Claim(
            "unrolling and multiplying matrices is faster still",
            "stated",
            f"{geometric_mean(product):.2f} times as fast as tiles, in {_faster(product)} rows",
            geometric_mean(product) > 1,
            "A tiled product in float32, without tensor cores, of a matrix that goes through memory.",
        ),
        Claim(
            "the unrolled matrix approaches K K times the size of the input",
            "K K",
            f"{expansion:.2f} for 3x3 on 64x64, padded",
            abs(expansion - 9) < 0.5,
            "So the implicit products of convpool unroll on the way to shared memory, as the chapter's last section wants it.",
        ),
        Claim(
            "LeNet-5's layers: a convolution, then means with gain, bias and tanh",
            "two layers each",
            f"one node each; {min(pairs):.2f} to {max(pairs):.2f} times as fast as with tanh behind it, batch 1 to 256",
            min(pairs) > 1,
            "A launch and a pass over a map less, by convpool's library (`python -m benchmarks lenet5_pairs`).",
        ),
    ]


def course() -> list[Claim]:
    """The course report on image filters."""
    found = json.loads((RESULTS / "h200_filter_bank.json").read_text())
    memory, files = found["in_memory_s"], found["files"]
    loop, gpu, kernels, transfers = (
        memory[name]["100"] for name in ("loop", "GPU", "GPU, kernels alone", "GPU, transfers alone")
    )
    return [
        Claim(
            "a GPU filters many images about 17 times as fast as one core does, copies included (pools them 160 to 190 times)",
            "17.45 and 16.39 (5,000 and 10,000 images)",
            f"{loop / gpu:,.0f} times in memory (100 images), {files['over_loop']:.0f} from files to files ({files['images']:,})",
            loop / gpu > 17,
            "A thread for each place and not for each image, all nine filters and the pooling in one kernel.",
        ),
        Claim(
            "copies between host and device are the bottleneck",
            "stated",
            f"100 images: {transfers * 1e3:.2f} ms of copies, {kernels * 1e3:.2f} ms of kernels, {gpu * 1e3:.2f} ms together",
            transfers > kernels,
            "They overlap, so that the kernels cost nothing; each image and result crosses once.",
        ),
        Claim(
            "the GPU's results equal the CPU's",
            "stated",
            f"to the bit, in files {'checked after the run' if files['equal'] else 'that differ'}",
            files["equal"],
            f"Whole numbers. From files to files takes {files['over_slower']:.2f} times as long as the files alone.",
        ),
    ]


PAPERS: dict[str, Callable[[], list[Claim]]] = {
    "Suita et al.": suita,
    "Tokura et al.": tokura,
    "cuConv": cuconv,
    "the textbook": textbook,
    "the course report": course,
}
WHERE = {"the course report": ("RTX 2070", "H200"), "the textbook": ("text", "H200")}
"""Machines of a paper and of the records, where they are not V100 and H200."""
OTHERS = {  # other rows by all methods: record, precision, layout
    "Suita's layers, TF32": ("h200_suita_table2_tf32.json", "tf32", "nhwc"),
    "Suita's layers, bf16": ("h200_suita_table2_bf16.json", "bf16", "nhwc"),
    "Suita's layers, fp16, channels first": ("h200_suita_table2_fp16_nchw.json", "fp16", "nchw"),
    "pairs of SNGAN, WGAN-GP and StarGAN v2, fp16": ("h200_networks_layers.json", "fp16", "nhwc"),
    "windows of 3 and 4, and 5x5 convolutions, fp16": ("h200_windows.json", "fp16", "nhwc"),
}


def markdown(paper: str) -> str:
    """The claims of a paper as a table."""
    theirs, here = WHERE.get(paper, ("V100", "H200"))
    lines = [f"| claim | paper ({theirs}) | here ({here}) | verdict | why |", "| --- | --- | --- | --- | --- |"]
    for claim in PAPERS[paper]():
        lines.append(f"| {claim.text} | {claim.paper} | {claim.here} | {claim.verdict} | {claim.why} |")
    return "\n".join(lines)


def coverage() -> str:
    """Cells of each table on record, and convpool against naive and all others; then of other rows by all methods."""
    lines = ["| rows | cells on record | over the faster naive | over the fastest of all others | least |", "|---" * 5 + "|"]
    for table in TABLES:
        have, all_of_it = cells(table)
        lines.append(_line(f"{table}, {TABLES[table][2]}", f"{have} of {all_of_it}", rows_of(table)))
    for label, (file, precision, layout) in OTHERS.items():
        record = records.load(str(RESULTS / file))
        entries = [entry for entry in record["rows"] if (entry["precision"], entry["layout"]) == (precision, layout)]
        have = sum("us" in entry["methods"].get(method, {}) for entry in entries for method in FIVE)
        found = [(entry, figures(entry, record["ceilings"])) for entry in entries]
        lines.append(_line(label, f"{have} of {5 * len(entries)}", found))
    return "\n".join(lines)


def _line(label: str, on_record: str, found: list[tuple[Entry, Figures]]) -> str:
    """Geometric means, and the least with its row and the method that comes so close."""
    over_naive = geometric_mean(row.over_naive for _, row in found if row.over_naive)
    others = [(row.over_others, entry, row.other) for entry, row in found if row.over_others]
    least, entry, other = min(others, key=lambda one: one[0])
    mean_of_others = geometric_mean(ratio for ratio, _, _ in others)
    closest = f"{least:.2f}: {entry_row(entry).name} ({name(other or '')})"
    return f"| {label} | {on_record} | {over_naive:.2f} | {mean_of_others:.2f} | {closest} |"


def picture() -> bytes:
    """Direct over cuDNN naive in every row of the tables: the paper's, by libraries here, and convpool's."""
    from matplotlib.figure import Figure

    from benchmarks.layers.plot import save

    figure = Figure(figsize=(12, 10), layout="constrained")
    shown: list[Any] = []
    for axes, table in zip(figure.subplots(len(TABLES), 1), TABLES, strict=True):
        found = rows_of(table)
        shown += [entry for entry, _ in found]
        series = {
            "paper, V100": [speed_up_naive(row.paper) for _, row in found],
            "libraries, H200": [row.direct_over_naive for _, row in found],
            "convpool, H200": [row.times["cudnn_naive"] / row.ours_us if row.ours_us else 0 for _, row in found],
        }
        for number, (label, values) in enumerate(series.items()):
            axes.bar([i + 0.27 * (number - 1) for i in range(len(found))], [value or 0 for value in values], 0.26, label=label)
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set(yscale="log", ylabel="times cuDNN naive", title=f"{table}, {TABLES[table][2]}: pooling first over cuDNN naive")
        layers = [entry_row(entry) for entry, _ in found]
        labels = [f"{r.h}x{r.w}, {r.c}" if table.startswith("Suita") else f"{r.c} to {r.m}" for r in layers]
        axes.set_xticks(range(len(found)), labels, rotation=60, fontsize=7)
        axes.margins(x=0.01)
    handles = figure.axes[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside upper center", ncols=3, fontsize="small")
    return save(figure, shown)


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks papers", description=__doc__.splitlines()[0])
    parser.add_argument("--picture", type=Path, metavar="FILE.png", help="draw the speed-ups of every row instead")
    parser.add_argument("--json", action="store_true", help="print the claims as JSON")
    options = parser.parse_args()
    if options.picture:
        options.picture.write_bytes(picture())
        return 0
    claims = {paper: make() for paper, make in PAPERS.items()}
    if options.json:
        print(json.dumps({paper: [vars(claim) for claim in found] for paper, found in claims.items()}, indent=1))
        return 0
    print(coverage())
    for paper, found in claims.items():
        print(f"\n{paper}")
        for claim in found:
            print(f"  {claim.text}\n    paper: {claim.paper}\n    here: {claim.here}\n    {claim.verdict}. {claim.why}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""docs/papers.md: its figures are the records' and the papers', counted here once more by other ways."""

import csv
import json
import re
import statistics
from collections import defaultdict
from pathlib import Path

import pytest

from benchmarks import papers

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "papers.md").read_text()
DATA = ROOT / "benchmarks" / "layers" / "data"
CLAIMS = {claim.text: claim for make in papers.PAPERS.values() for claim in make()}


def claim(beginning: str) -> papers.Claim:
    (found,) = [claim for text, claim in CLAIMS.items() if text.startswith(beginning)]
    return found


def times(name: str, precision: str) -> list[dict[str, float]]:
    """Microseconds by method of each row of a record, read without the package."""
    rows = json.loads((ROOT / "benchmarks" / "results" / name).read_text())["rows"]
    measured = [row["methods"] for row in rows if row["precision"] == precision]
    return [{method: result["us"] for method, result in methods.items() if "us" in result} for methods in measured]


def papers_table(dtype: str) -> list[dict[str, float]]:
    found: dict = defaultdict(dict)
    for line in csv.DictReader((DATA / "suita2020.csv").read_text().splitlines()):
        if line["dtype"] == dtype:
            found[line["size"], line["channels"]][line["method"]] = float(line["ms"])
    return list(found.values())


def direct(row: dict[str, float]) -> float:
    return min(row["cudnn_direct"], row["cublas_direct"])


@pytest.mark.parametrize(
    ("dtype", "record", "stated"), [("fp32", "h200_suita_table1_fp32.json", 2.90), ("fp16", "h200_suita_table2_fp16.json", 1.43)]
)
def test_pooling_first_over_naive(dtype, record, stated):
    found = claim(f"{dtype}: pooling first is")
    here = statistics.fmean(row["cudnn_naive"] / direct(row) for row in times(record, dtype))
    ours = statistics.fmean(row["cudnn_naive"] / row["convpool"] for row in times(record, dtype))
    assert found.paper == f"{stated:.2f}" == f"{statistics.fmean(r['cudnn_naive'] / direct(r) for r in papers_table(dtype)):.2f}"
    assert found.here == f"{here:.2f}; convpool {ours:.2f}" and found.holds == (here > 1.1)


def test_pooling_first_over_the_fused_kernel():
    ratios = [min(row["cudnn_fused"], row["cublas_fused"]) / direct(row) for row in times("h200_suita_table2_fp16.json", "fp16")]
    found = claim("fp16: pooling first beats")
    assert found.here.startswith(f"{statistics.fmean(ratios):.2f}; behind in {sum(r < 1 for r in ratios)} of 20; convpool ")
    assert found.holds == (statistics.fmean(ratios) > 1)
    assert found.verdict == ("holds" if found.holds else "not here")


def test_tokuras_speed_ups_at_512_channels():
    for precision, stated in (("fp32", "1.83"), ("fp16", "4.41")):
        (row,) = times("h200_tokura_fp32_fp16.json", precision)[-1:]
        found = claim(f"{precision}, 512 to 512 channels: cuBLAS")
        assert found.paper == stated
        assert found.here.startswith(f"{row['cudnn_naive'] / row['cublas_direct']:.2f}; convpool ")


def test_cuconv_s_own_question():
    rows = json.loads((ROOT / "benchmarks" / "results" / "h200_cuconv.json").read_text())["rows"]
    pointwise = [row["methods"] for row in rows if row["row"]["kernel"] == 1]
    ratios = [one["cudnn_fused"]["us"] / one["convpool"]["us"] for one in pointwise if {"cudnn_fused", "convpool"} <= set(one)]
    found = claim("1x1 convolutions")
    assert f"convpool: up to {max(ratios):.2f}, " in found.here
    assert found.here.endswith(f"faster in {sum(ratio > 1 for ratio in ratios)} of {len(ratios)}")


def test_the_course_report_s_filters():
    found = json.loads((ROOT / "benchmarks" / "results" / "h200_filter_bank.json").read_text())
    memory, files = found["in_memory_s"], found["files"]
    assert f"{memory['loop']['100'] / memory['GPU']['100']:,.0f} times in memory" in claim("a GPU filters").here
    assert f"{files['loop_s'] / files['end_to_end_s']:.0f} from files" in claim("a GPU filters").here
    slower = max(files["files_s"], files["transfers_s"])
    assert f"{files['end_to_end_s'] / slower:.2f} times as long as the files alone" in claim("the GPU's results").why
    assert files["equal"] and files["end_to_end_s"] < 1.3 * slower and files["loop_s"] > 20 * files["end_to_end_s"]


def test_lenet5_is_faster_with_tanh_in_the_node():
    rows = json.loads((ROOT / "benchmarks" / "results" / "h200_lenet5_pairs.json").read_text())["rows"]
    ratios = [row["separate_us"] / row["fused_us"] for row in rows]
    assert {row["batch"] for row in rows} == {1, 8, 32, 64, 128, 256} and min(ratios) > 1
    assert f"; {min(ratios):.2f} to {max(ratios):.2f} times as fast" in claim("LeNet-5's layers").here


def test_rows_of_other_suites_were_run_by_all_methods():
    lines = papers.coverage().splitlines()
    for label, (file, precision, _) in papers.OTHERS.items():
        (line,) = [line for line in lines if line.startswith(f"| {label} |")]
        rows = times(file, precision)
        ratios = [min(us for name, us in row.items() if not name.startswith("convpool")) / row["convpool"] for row in rows]
        assert f"| {statistics.geometric_mean(ratios):.2f} | {min(ratios):.2f}: " in line
        assert line in PAGE


def test_every_cell_of_the_papers_tables_is_on_record():
    """Find Suita's 200 and Tokura's 250, each checked before it was timed."""
    assert [papers.cells(table) for table in papers.TABLES] == [(100, 100), (100, 100), (125, 125), (125, 125)]
    for table in papers.TABLES:
        for entry, _ in papers.rows_of(table):
            assert all(entry["methods"][method]["error"] <= 1.7e-2 for method in papers.FIVE)


def test_the_page_has_every_claim_with_its_verdict():
    lines = [line for line in PAGE.splitlines() if re.search(r"\| (holds|not here) \|", line)]
    assert len(lines) == len(CLAIMS) >= 14
    for one in CLAIMS.values():
        assert f"| {one.text} | {one.paper} | {one.here} | {one.verdict} | {one.why} |" in lines
    assert {one.holds for one in CLAIMS.values()} == {True, False}

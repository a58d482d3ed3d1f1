# SPDX-License-Identifier: Apache-2.0
"""Records: merging, CSV, the table of tactics, figures and means, the table and the picture."""

from __future__ import annotations

import csv
import io
import math

import pytest
from rich.console import Console

from convpool.bench import record as records
from convpool.bench import tuned
from convpool.bench.figures import figures, geometric_mean, overview, roofline_us, summary
from convpool.bench.paper import paper_speed_up, paper_times
from convpool.bench.plot import to_png
from convpool.bench.suites import SUITES
from convpool.bench.table import markdown, show
from convpool.bench.timing import input_sets, schedule, summarize
from convpool.errors import OptionError
from tests.support.bench_record import record, result


def test_geometric_mean():
    assert geometric_mean([2, 8]) == pytest.approx(4)
    assert geometric_mean([5]) == pytest.approx(5)
    assert math.isnan(geometric_mean([]))


def test_figures_of_rows():
    data = record()
    small, large = (figures(entry, data["ceilings"]) for entry in data["rows"])
    assert (small.naive_us, small.others_us, small.other) == (8, 6, "cudnn_fused")  # neither CPU nor wrong methods count
    assert (small.over_naive, small.over_others, small.choice) == (2, 1.5, 1)
    assert (large.naive_us, large.best_us, large.best) == (1800, 400, "direct_gemm_a")
    assert (large.over_naive, large.choice) == (3.6, 1.25)
    # 309 GFLOP at 800 TFLOP/s against 336 MB at 4 TB/s: arithmetic; the small row moves 328 kB.
    assert large.roofline_us == pytest.approx(2 * 64 * 32 * 32 * 512 * 512 * 9 / 800e6)
    assert small.roofline_us == pytest.approx(327680 / 4e6)
    lines = {line["what"]: line for line in summary([small, large])}
    assert lines["over the faster naive"] == {
        "what": "over the faster naive",
        "mean": pytest.approx(math.sqrt(2 * 3.6)),
        "least": 2,
        "rows": 2,
    }
    assert lines["over the fastest of all others"]["mean"] == pytest.approx(math.sqrt(1.5 * 3.6))


def test_without_ceilings_there_is_no_roofline():
    entry = record()["rows"][0]
    assert roofline_us(entry, {}) is None and figures(entry, {}).of_roofline is None


def test_the_papers_figures():
    small = SUITES["suita-table1"][0][0]
    assert paper_times(small, "fp32")["cudnn_naive"] == 104
    assert paper_times(small, "tf32") == paper_times(small, "fp32") != paper_times(small, "fp16")
    naive, speed_up = paper_speed_up(SUITES["suita-table2"][0][-1], "fp16")
    assert (naive, speed_up) == (15300, pytest.approx(15.3 / 6.16))
    last = SUITES["tokura"][0][-1]
    assert paper_speed_up(last, "fp16") == (830, pytest.approx(830 / 188))
    assert paper_times(last, "bf16") == {} and paper_speed_up(SUITES["densenet"][0][0], "fp16") is None
    for suite, precision in (("suita-table1", "fp32"), ("suita-table2", "fp16")):
        mean = geometric_mean(paper_speed_up(row, precision)[1] for row in SUITES[suite][0])
        assert mean > 1.4  # the papers' abstract: 2.90 and 1.43 by their own way of averaging, for their one method


def test_merge_adds_rows_and_methods_and_later_results_win():
    first, second = record(), record()
    del first["rows"][1]
    second["rows"][0]["methods"] = {"tensorrt_naive": result(9), "tensorrt_fused": result(7)}
    second["ceilings"] = {"tflops": {"tf32": 400.0}}
    merged = records.merge([first, second])
    assert [records.entry_row(entry).h for entry in merged["rows"]] == [8, 64]
    methods = merged["rows"][0]["methods"]
    assert (methods["cudnn_naive"]["us"], methods["tensorrt_naive"]["us"], methods["tensorrt_fused"]["us"]) == (8, 9, 7)
    assert merged["ceilings"] == {"copy_tb_per_s": 4.0, "tflops": {"fp16": 800.0, "tf32": 400.0}}
    assert len(merged["merged"]) == 2 and "merged" not in records.merge([first])
    assert first["rows"][0]["methods"]["tensorrt_naive"]["us"] == 10  # the arguments stay as they are


def test_merge_keeps_the_seconds_of_each_method():
    old, first, second = record(), record(), record()
    first["rows"][0]["seconds"] = {"data": 1.0, "cudnn_naive": 2.0}
    second["rows"][0]["seconds"] = {"data": 0.5, "tensorrt_naive": 3.0}
    for order in ([old, first, second], [first, old, second]):
        small, large = records.merge(order)["rows"]
        assert small["seconds"] == {"data": 0.5, "cudnn_naive": 2.0, "tensorrt_naive": 3.0} and "seconds" not in large
    assert first["rows"][0]["seconds"] == {"data": 1.0, "cudnn_naive": 2.0}


def test_rows_of_other_precisions_and_layouts_are_others():
    first, second = record(), record()
    for entry in second["rows"]:
        entry["layout"] = "nchw"
    assert len(records.merge([first, second])["rows"]) == 4


def test_json_and_back(tmp_path):
    data = record()
    data["rows"][0]["methods"]["cudnn_fused"] = {"wrong": math.nan, "how": ""}
    path = tmp_path / "a.json"
    records.write(str(path), records.to_json(data))
    back = records.load(str(path))
    assert back["rows"][0]["methods"]["cudnn_fused"] == {"wrong": None, "how": ""}
    assert back["rows"][1] == data["rows"][1]
    assert path.read_text().count("\n") < 60 and '"cudnn_fused": {"wrong": null, "how": ""}' in path.read_text()


def test_a_recorded_command_names_no_folders():
    words = ["convpool-bench", "own.json", "--rows", "*x8x8 *", "--json", "/a/b/c.json", "--csv=../d.csv"]
    assert records.without_folders(words) == "convpool-bench own.json --rows '*x8x8 *' --json c.json --csv=d.csv"


def test_errors_keep_three_digits():
    assert records.significant(2.93347e-4) == 2.93e-4 and math.isnan(records.significant(math.nan))


@pytest.mark.parametrize("text", ["{", "[]", '{"format": 2, "rows": []}', '{"format": 1, "rows": [{"row": {"x": 1}}]}'])
def test_what_is_no_record_is_told(text, tmp_path):
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(OptionError, match="a.json"):
        records.load(str(path))


def test_csv_has_every_result():
    data = record()
    lines = list(csv.DictReader(io.StringIO(records.to_csv(data).decode())))
    assert len(lines) == sum(len(entry["methods"]) for entry in data["rows"])
    by_method = {(line["row"], line["method"]): line for line in lines}
    assert by_method["64x32x8x8 to 32, 3x3", "cudnn_naive"]["us"] == "8"
    assert by_method["64x32x8x8 to 32, 3x3", "textbook_direct"]["note"] == "wrong: 0.25"
    assert by_method["64x512x64x64 to 512, 3x3", "cudnn_fused"]["note"] == "slow"


def test_the_tuning_table_names_the_fastest_tactic_of_each_problem(tmp_path):
    path = tmp_path / "tuned.def"
    data = record()
    path.write_bytes(tuned.merged(data, str(path)))
    lines = path.read_text().splitlines()
    assert lines[0].startswith("//") and [line.split("  // ")[1] for line in lines[1:]] == [
        "4.0 us, conv_avgpool_direct_gemm_a",
        "400.0 us, conv_avgpool_direct_gemm_a",
    ]
    # cc, multiprocessors, tactic, f16, no TF32, channels last twice, no residual, no prologue, group, n, c, m, rank; then sizes
    axis = "8, 2, 1, 1, 1, 1, 3, 2, 0, 0, 1"
    assert lines[1].startswith(f"CONVPOOL_TUNED(90, 132, 1001, 0, 0, 1, 1, 0, 0, 1, 64, 32, 32, 2, {axis}, {axis})  //")
    # A later run replaces the row of its problem and leaves the others and the comments alone.
    del data["rows"][1]
    data["rows"][0]["methods"]["convpool:filter_fused_b"]["us"] = 3
    path.write_text(f"// kept\n\n{lines[1]}\n{lines[2]}\n")
    later = tuned.merged(data, str(path)).decode().splitlines()
    assert (later[:2], later[3:]) == (["// kept", ""], [lines[2]])
    assert later[2].startswith("CONVPOOL_TUNED(90, 132, 3001, ")


def test_a_tuning_table_that_cannot_be_made_is_refused(tmp_path):
    path = tmp_path / "tuned.def"
    path.write_text("// fine\nCONVPOOL_TUNED(90, x)\n")
    with pytest.raises(OptionError, match=r"tuned.def: line 2: no row; got 'CONVPOOL_TUNED\(90, x\)'"):
        tuned.merged(record(), str(path))
    old = record()
    del old["protocol"]["multiprocessors"]
    with pytest.raises(OptionError, match="does not say its GPU's multiprocessors"):
        tuned.merged(old, str(tmp_path / "other.def"))


def test_the_overview_counts_close_choices_and_gives_the_share_of_copy_bandwidth():
    found = overview(record())
    assert found["choice"] == {"within": 1.05, "convpool": {"rows": 2, "close": 1}}
    small, large = found["rows"]
    assert (small["name"], small["over_naive"], small["choice"]) == ("64x32x8x8 to 32, 3x3", 2, 1)
    assert small["of_copy"] == pytest.approx(327680 / 4e6 / 4, rel=1e-2) and large["choice"] == 1.25
    assert small["rule_choice"] is None


def with_rule() -> dict:
    """The record with the cost rule's choice: slower than the library's in the first row, faster in the second."""
    data = record()
    for entry, tactic in zip(data["rows"], ("filter_fused_b", "direct_gemm_a"), strict=True):
        entry["methods"]["convpool_rule"] = entry["methods"][f"convpool:{tactic}"]
    return data


def test_the_cost_rules_choice_is_counted_and_shown_beside_the_librarys():
    data = with_rule()
    assert overview(data)["choice"] == {
        "within": 1.05,
        "convpool": {"rows": 2, "close": 1},
        "convpool_rule": {"rows": 2, "close": 1},
    }
    assert [row["rule_choice"] for row in overview(data)["rows"]] == [1.25, 1]
    assert [figures(entry, {}).over_others for entry in data["rows"]] == [1.5, 3.6]  # it is none of the others
    del data["rows"][0]["methods"]["convpool_rule"]
    text = _shown(data)
    assert "the cost rule's choice is within 5% of the fastest tactic in 1 of 1 rows" in text
    assert "the library's choice is within 5% of the fastest tactic in 1 of 2 rows" in text
    assert "convpool rule" in text and "cost rule" not in _shown(record()) and "all tables" not in text
    data["rows"] += [{**entry, "precision": "tf32"} for entry in with_rule()["rows"]]
    text = _shown(data)
    assert "all tables: the library's choice is within 5% of the fastest tactic in 2 of 4 rows" in text
    assert "all tables: the cost rule's choice is within 5% of the fastest tactic in 2 of 3 rows" in text


def test_the_cost_rules_choice_is_no_row_of_the_tuning_table(tmp_path):
    path = str(tmp_path / "tuned.def")
    assert tuned.merged(with_rule(), path) == tuned.merged(record(), path)


def _shown(data) -> str:
    console = Console(file=io.StringIO(), width=400, highlight=False)
    show(data, console)
    return console.file.getvalue()


def test_the_table():
    text = _shown(record())
    lines = text.splitlines()
    assert lines[0] == "NVIDIA H200"
    assert lines[1] == "measured here: copy 4.00 TB/s, matrix product fp16 800 TFLOP/s"
    header = next(line for line in lines if line.startswith("layer"))
    assert header.split("  ")[0] == "layer" and "fastest tactic" in header and "tensorrt fused" not in header
    small = next(line.split() for line in lines if line.startswith("64x32x8x8"))
    # layer (3 words); cudnn naive, fused; tensorrt naive; wrong textbook; cpu loop; ours; fastest; ratios; the paper's
    assert small == "64x32x8x8 to 32, 3x3 8.0 6.0 10.0 wrong 1.0 4.0 4.0 2.00 1.50 2% 2% 70 2.07".split()
    large = next(line.split() for line in lines if line.startswith("64x512"))
    assert large == "64x512x64x64 to 512, 3x3 2000.0 - 1800.0 500.0 400.0 3.60 3.60 77% 17% 15300 2.48".split()
    assert "over the faster naive: geometric mean 2.68, least 2.00, 2 rows" in text
    assert "the library's choice is within 5% of the fastest tactic in 1 of 2 rows" in text
    assert "WRONG 64x32x8x8 to 32, 3x3 fp16: textbook_direct, relative error 0.25" in text
    assert "not run: cudnn_fused (1 row): slow" in text


def test_a_record_without_gpu_figures_is_shown_too():
    data = record()
    data["ceilings"], data["machine"] = {}, {}
    for entry in data["rows"]:
        entry["methods"] = {"cpu_loop": result(5)}
    text = _shown(data)
    assert "5.0" in text and "geometric mean" in text and "over the faster naive" not in text


def test_the_table_in_markdown():
    data = record()
    for entry, shape in zip(data["rows"], ((8, 32), (8, 512)), strict=True):
        entry["row"].update(h=shape[0], w=shape[0], c=shape[1], m=shape[1])
    assert markdown(data).splitlines() == [
        "| size | 32 channels | 512 channels |",
        "|---|---|---|",
        "| 8x8 | 2.00 / 1.50 | 3.60 / 3.60 |",
        "",
        "Geometric means: 2.68 / 2.32.",
    ]


def test_the_picture():
    data = to_png(record())
    assert data.startswith(b"\x89PNG") and len(data) > 10000


def test_a_picture_of_nothing_is_refused():
    data = record()
    for entry in data["rows"]:
        del entry["methods"]["convpool"]
    with pytest.raises(OptionError, match="nothing to draw"):
        to_png(data)


def test_timing_keeps_within_its_budget():
    assert input_sets(268 * 2**20, 50 * 2**20) == 4 and input_sets(2**16, 50 * 2**20) == 64
    assert input_sets(20 * 2**20, 50 * 2**20) == 10
    assert schedule(5, 64, 15) == (64, 15)
    assert schedule(40_000, 64, 15) == (5, 5)
    assert schedule(2e6, 4, 15) == (1, 3)
    assert schedule(2e6, 4, 2) == (1, 2)


def test_median_and_interquartile_range():
    assert summarize([1, 2, 3, 4, 5, 6, 7]) == {"us": 4, "spread_us": 4}

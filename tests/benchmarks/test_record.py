# SPDX-License-Identifier: Apache-2.0
"""Records: merging, CSV, the table of tactics, figures and means, the table and the picture."""

import math

import pytest

from benchmarks.layers import record as records
from benchmarks.layers import tactics
from benchmarks.layers.figures import figures, roofline_us, summary
from benchmarks.layers.paper import FIVE, paper_times, speed_up_fused, speed_up_naive
from benchmarks.layers.suites import SUITES
from convpool.cuda import tuned
from convpool.cuda.timing import input_sets, schedule, summarize
from convpool.errors import OptionError
from tests.support.bench_record import record, result


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
    naive = {"mean": pytest.approx(math.sqrt(2 * 3.6)), "least": 2, "rows": 2}
    assert lines["over the faster naive"] == {"what": "over the faster naive", **naive}
    assert lines["over the fastest of all others"]["mean"] == 1.5 and lines["over the fastest of all others"]["rows"] == 1
    assert lines["libraries alone, direct over cuDNN naive"]["mean"] == 2.5  # 2000 / 800; the small row has no cublas_direct
    assert "libraries alone, direct over fused" not in lines


def test_fp32_has_the_rate_of_three_products_in_tf32():
    """0.31 TFLOP at a third of 480 TFLOP/s; without TF32's rate the ceiling is not known."""
    entry = {**record()["rows"][1], "precision": "fp32"}
    flops, rates = entry["direct_flops"], {"fp32": 50.0, "tf32": 480.0}
    assert roofline_us(entry, {"copy_tb_per_s": 4.0, "tflops": rates}) == pytest.approx(flops / 160e6)
    assert roofline_us(entry, {"copy_tb_per_s": 4.0, "tflops": {**rates, "fp32": 200.0}}) == pytest.approx(flops / 200e6)
    assert roofline_us(entry, {"copy_tb_per_s": 4.0, "tflops": {"fp32": 50.0}}) is None


def test_over_all_others_only_where_all_of_the_papers_ran():
    for name in FIVE:
        data = record()
        del data["rows"][0]["methods"][name]
        found = figures(data["rows"][0], {})
        assert found.over_others is None and found.over_naive == (2 if name != "cudnn_naive" else 2.5)
    large = figures(record()["rows"][1], {})  # where one was left out as slow
    assert (large.over_others, large.over_naive) == (None, 3.6)


def test_without_a_pooling_the_original_is_one_convolution():
    entry = record()["rows"][0]
    entry["row"] |= {"pool": 1, "pool_stride": 1}
    for name in ("cudnn_naive", "cudnn_direct", "cublas_direct", "tensorrt_naive"):
        entry["methods"][name] = {"skipped": "no pooling: the same as the fused form"}
    entry["methods"]["tensorrt_fused"] = result(5)
    found = figures(entry, {})
    assert (found.over_naive, found.over_others, found.direct_over_naive) == (1.25, 1.25, None)


def test_the_papers_figures():
    small = SUITES["suita-table1"][0][0]
    assert paper_times(small, "fp32")["cudnn_naive"] == 104
    assert paper_times(small, "tf32") == paper_times(small, "fp32") != paper_times(small, "fp16")
    last = SUITES["tokura"][0][-1]
    assert set(paper_times(last, "fp16")) == set(paper_times(small, "fp32")) == set(FIVE)
    assert speed_up_naive(paper_times(last, "fp16")) == pytest.approx(830 / 188)
    assert speed_up_naive(paper_times(last, "fp32")) == pytest.approx(387 / 212)
    assert paper_times(last, "bf16") == {} and paper_times(SUITES["densenet"][0][0], "fp16") == {}
    assert speed_up_naive({}) is None and speed_up_fused({"cudnn_direct": 1.0, "cublas_direct": 2.0}) is None


# Suita et al., the rows "Speed-up: naive" and "Speed-up: fused" of table 2.
TABLE_2 = {
    8: ((2.07, 1.31, 0.925, 0.406, 0.368), (2.00, 2.00, 1.55, 0.845, 0.824)),
    16: ((3.90, 1.67, 1.18, 0.740, 0.516), (2.10, 1.97, 1.50, 0.872, 0.548)),
    32: ((2.17, 1.64, 1.22, 1.21, 1.14), (1.06, 0.770, 0.747, 1.05, 1.26)),
    64: ((1.21, 1.11, 1.37, 1.88, 2.48), (0.757, 0.689, 0.971, 0.903, 1.16)),
}


def test_the_papers_speed_ups_are_computed_as_the_paper_defines_them():
    for row in SUITES["suita-table2"][0]:
        times, column = paper_times(row, "fp16"), (32, 64, 128, 256, 512).index(row.c)
        for compute, stated in zip((speed_up_naive, speed_up_fused), TABLE_2[row.h], strict=True):
            assert compute(times) == pytest.approx(stated[column], rel=0.01)  # of times with three digits


@pytest.mark.parametrize(("suite", "precision", "mean"), [("suita-table1", "fp32", 2.90), ("suita-table2", "fp16", 1.43)])
def test_the_papers_averages_are_arithmetic(suite, precision, mean):
    found = [speed_up_naive(paper_times(row, precision)) for row in SUITES[suite][0]]
    assert sum(found) / len(found) == pytest.approx(mean, abs=0.005)


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


def test_a_recorded_command_names_no_folders():
    words = ["python", "-m", "benchmarks", "layers", "own.json", "--rows", "*x8x8 *", "--json", "/a/b/c.json", "--csv=../d.csv"]
    assert records.without_folders(words) == "python -m benchmarks layers own.json --rows '*x8x8 *' --json c.json --csv=d.csv"


@pytest.mark.parametrize("text", ["{", "[]", '{"format": 2, "rows": []}', '{"format": 1, "rows": [{"row": {"x": 1}}]}'])
def test_what_is_no_record_is_told(text, tmp_path):
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(OptionError, match="a.json"):
        records.load(str(path))


def test_the_tuning_table_names_the_fastest_tactic_of_each_problem(tmp_path):
    path, data = tmp_path / "tuned.def", record()
    path.write_bytes(tuned.merged(tactics.fastest(data), str(path)))
    lines = path.read_text().splitlines()
    notes = [line.split("  // ")[1] for line in lines[1:]]
    assert lines[0].startswith("//") and notes == [f"{us} us, conv_avgpool_direct_gemm_a" for us in (4.0, 400.0)]
    # cc, multiprocessors, tactic, f16, no TF32, channels last twice, no residual, no prologue, group, n, c, m, rank; then sizes
    axis = "8, 2, 1, 1, 1, 1, 3, 2, 0, 0, 1"
    assert lines[1].startswith(f"CONVPOOL_TUNED(90, 132, 1001, 0, 0, 1, 1, 0, 0, 1, 64, 32, 32, 2, {axis}, {axis})  //")
    # A later run replaces the row of its problem and leaves the others and the comments alone.
    del data["rows"][1]
    data["rows"][0]["methods"]["convpool:filter_fused_b"]["us"] = 3
    path.write_text(f"// kept\n\n{lines[1]}\n{lines[2]}\n")
    later = tuned.merged(tactics.fastest(data), str(path)).decode().splitlines()
    assert (later[:2], later[3:]) == (["// kept", ""], [lines[2]])
    assert later[2].startswith("CONVPOOL_TUNED(90, 132, 3001, ")


def test_a_tuning_table_that_cannot_be_made_is_refused(tmp_path):
    path = tmp_path / "tuned.def"
    path.write_text("// fine\nCONVPOOL_TUNED(90, x)\n")
    with pytest.raises(OptionError, match=r"tuned.def: line 2: no row; got 'CONVPOOL_TUNED\(90, x\)'"):
        tuned.merged(tactics.fastest(record()), str(path))
    rows = ["9" * 5000, "1" * 11, "", "1 2", "1,\t2", *r", 1, ,1 1,,2 -1 +1 1.0 0x1 1e3 １ ٣ ² 1\n a 1;2".split()]
    for row in rows:
        path.write_text(f"CONVPOOL_TUNED({row})\n")
        with pytest.raises(OptionError, match="tuned.def: line 1: no row; got '.{,62}', expected CONVPOOL_TUNED"):
            tuned.merged([], str(path))
    old = record()
    del old["protocol"]["multiprocessors"]
    with pytest.raises(OptionError, match="does not say its GPU's multiprocessors"):
        tuned.merged(tactics.fastest(old), str(tmp_path / "other.def"))


def test_timing_keeps_within_its_budget():
    assert input_sets(268 * 2**20, 50 * 2**20) == 4 and input_sets(2**16, 50 * 2**20) == 64
    assert input_sets(20 * 2**20, 50 * 2**20) == 10
    assert schedule(5, 64, 15) == (64, 15)
    assert schedule(40_000, 64, 15) == (5, 5)
    assert schedule(2e6, 4, 15) == (1, 3)
    assert schedule(2e6, 4, 2) == (1, 2)


def test_median_and_interquartile_range():
    assert summarize([1, 2, 3, 4, 5, 6, 7]) == {"us": 4, "spread_us": 4}

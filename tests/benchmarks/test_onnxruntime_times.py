# SPDX-License-Identifier: Apache-2.0
"""Use of the times of networks on onnxruntime's CUDA provider; and one network on a GPU."""

import json

from benchmarks import onnxruntime_times as times
from tests.support.gpu import skip_or_fail

ROW = {
    "network": "sngan64",
    "batch": 64,
    "precision": "fp16",
    "graphs": True,
    "methods": {
        "original": {"us": 900.0},
        "original_nhwc": {"us": 800.0},
        "fused": {"us": 700.0},
        "fused_nhwc": {"wrong": 0.3},
        "direct": {"same_as": "original"},
        "pairs": {"us": 500.0},
        "cuda": {"us": 200.0},
        "cuda_nhwc": {"skipped": "no"},
    },
}


def test_a_method_that_is_another_s_has_its_time():
    assert times.times_of(ROW)["direct"] == 900.0 and "fused_nhwc" not in times.times_of(ROW)


def test_the_table_compares_with_the_faster_layout():
    table = times.markdown({"rows": [{**ROW, "commit": "0123456789"}]}, {"sngan64": "SNGAN"}).splitlines()
    assert table[2] == "| SNGAN, batch 64, fp16 | 800.0 | 700.0 | 500.0 | 200.0 | 4.00 | 3.5 | 3.50 | 0123456 |"
    alone = {**ROW, "graphs": False, "methods": {"original": {"us": 5.0}}}
    line = times.markdown({"rows": [alone]}).splitlines()[2]
    assert line == "| sngan64, batch 64, fp16, no CUDA graph | 5.0 | | | | | | | |"


def test_forms_of_resized_layers_are_compared_with_the_original_by_the_same_figure():
    methods = {
        "original": {"us": 90.0, "eager_us": 100.0},
        "original_nhwc": {"us": 80.0, "eager_us": 120.0},
        "resized": {"same_as": "resized_fused"},
        "resized_fused": {"us": 40.0, "eager_us": 80.0},
        "resized_phases": {"wrong": 0.3},
    }
    row = {"network": "Real-ESRGAN", "batch": 1, "methods": methods}
    *_, line, mean = times.resizing_markdown({"rows": [row]}).splitlines()
    assert line == "| Real-ESRGAN, batch 1 | 80.0 | 2.00 | 1.25 | 2.00 | | |"
    assert mean == "| geometric mean of the first 1 | | 2.00 | 1.25 | | | |"


def test_a_row_takes_the_place_of_its_like(tmp_path):
    path = tmp_path / "record.json"
    later = {**ROW, "methods": {"original": {"us": 1.0}}}
    rows = [{**ROW, "network": "igebm"}, ROW, {**ROW, "graphs": False}, {**ROW, "precision": "tf32"}, later]
    for row in rows:
        record = times.add_row(path, row)
    assert json.loads(path.read_text()) == record
    keys = [(row["network"], row["precision"], row["graphs"]) for row in record["rows"]]
    assert keys == [("sngan64", "fp16", True), ("igebm", "fp16", True), ("sngan64", "fp16", False), ("sngan64", "tf32", True)]
    assert record["rows"][0] == later


def test_a_network_is_timed_on_a_gpu():
    try:
        times.require_cuda(times.runtime_module())
        times.library_path()
    except Exception as error:
        skip_or_fail(str(error))
    row = times.time_network("wgan_gp", 2, "fp16", ["original", "original_nhwc", "function", "cuda"], 2, True)
    assert all("us" in found for found in row["methods"].values()), row

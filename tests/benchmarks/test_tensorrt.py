# SPDX-License-Identifier: Apache-2.0
"""TensorRT's networks are built by the real builder of TensorRT-RTX, without a GPU."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.layers import cpu
from benchmarks.layers.rows import LAYOUTS, Row
from benchmarks.layers.tensorrt_worker import _data, _ends, build
from convpool.errors import ConvpoolError


def test_every_form_is_built():
    pytest.importorskip("tensorrt_rtx_bindings")
    program = [sys.executable, "-m", "tests.support.rtx.build_layers"]
    done = subprocess.run(program, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr[-2000:]
    sizes = json.loads(done.stdout)
    assert len(sizes) == (2 + 1) * 3 * 3 and min(sizes.values()) > 1000
    for kernel, side, layouts in ((3, 4, LAYOUTS), (1, 2, LAYOUTS[:1])):
        for precision, item in (("fp16", 2), ("tf32", 4), ("fp32", 4)):
            more = 24 * 16 * (side**2 - kernel**2) * item  # the fused form's engine holds the larger kernel
            for layout in layouts:
                engine = f"{kernel} {precision} {layout}"
                assert sizes[f"{engine} fused"] - sizes[f"{engine} naive"] > more / 2


@pytest.mark.parametrize("row", [Row(3, 5, 4, 9, 8), Row(1, 5, 4, 9, 8, stride=2)], ids=lambda row: row.name)
def test_the_data_of_a_row_is_made_once_and_right_in_both_layouts(row):
    w, x, right = _data(row, "fp32", "nchw")
    assert _data(row, "fp32", "nchw")[1] is x
    np.testing.assert_array_equal(right, cpu.reference(x, w, row)[[0, -1]])
    same_w, last, same = _data(row, "fp32", "nhwc")
    np.testing.assert_array_equal(w, same_w)
    np.testing.assert_array_equal(same, cpu.reference(last.transpose(0, 3, 1, 2), w, row)[[0, -1]])
    np.testing.assert_array_equal(_ends(last, "nhwc"), last[[0, -1]].transpose(0, 3, 1, 2))


def test_box_means_of_a_strided_convolution_are_refused():
    trt = pytest.importorskip("tensorrt_rtx_bindings")
    row = Row(1, 8, 8, 9, 9, stride=2)
    w = np.zeros((8, 8, 3, 3), np.float16)
    with pytest.raises(ConvpoolError, match="no dilation"):
        build(trt, row, "direct", "fp16", "nhwc", w, 3)

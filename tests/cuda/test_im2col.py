# SPDX-License-Identifier: Apache-2.0
"""Index maps against definitions: TMA's im2col mode, and the phases of an upsampled convolution. Needs no GPU."""

import itertools
import random
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

PLUGIN = Path(__file__).parents[2] / "plugin"
COMPILER = shutil.which("c++") or shutil.which("g++")
FIELDS = ("n", "h", "w", "out_h", "out_w", "kh", "kw", "stride_h", "stride_w", "dilation_h", "dilation_w", "pad_h", "pad_w")
PROGRAM = f"""
#include <cstdio>
#include "families/implicit_gemm_tma/im2col_box.h"
int main() {{
    convpool::Tactic tactic{{}};
    tactic.name = "tactic";
    convpool::Shape2d s{{}};
    while (std::scanf("{"%d" * len(FIELDS)}", {", ".join(f"&s.{name}" for name in FIELDS)}) == {len(FIELDS)}) {{
        convpool::Im2colBox box;
        const std::string reason = convpool::implicit_gemm_tma::find_box(s, tactic, box);
        if (reason.empty())
            std::printf("%d %d %d %d %u %u\\n", box.lower[0], box.lower[1], box.upper[0], box.upper[1], box.strides[0],
                        box.strides[1]);
        else
            std::printf("%s\\n", reason.c_str());
    }}
}}
"""


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    """find_box() of shapes given as dicts: lower, upper and strides, of the width and of the height each, or a reason."""
    nvcc = Path(shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc").resolve()
    headers = next((p for p in (nvcc.parents[1] / "include", Path("/usr/local/cuda/include")) if (p / "cuda.h").exists()), None)
    if COMPILER is None or headers is None:
        pytest.skip("no C++ compiler" if COMPILER is None else "no CUDA headers")
    folder = tmp_path_factory.mktemp("im2col")
    (folder / "main.cpp").write_text(PROGRAM)
    includes = [f"-I{PLUGIN / 'include'}", f"-I{PLUGIN / 'src'}", "-isystem", headers]
    subprocess.run([COMPILER, "-std=c++20", *includes, folder / "main.cpp", "-o", folder / "plan"], check=True)

    def ask(shapes):
        text = "\n".join(" ".join(str(shape[name]) for name in FIELDS) for shape in shapes)
        lines = subprocess.run([folder / "plan"], input=text, capture_output=True, text=True, check=True).stdout.splitlines()
        assert len(lines) == len(shapes)
        return [line if "tactic" in line else [[int(v) for v in line.split()][i : i + 2] for i in (0, 2, 4)] for line in lines]

    return ask


def shape(rng: random.Random) -> dict[str, int]:
    """A convolution with at least one window, not always all that fit, as one before a pooling has it."""
    values = {"n": rng.randint(1, 3)}
    for axis in "hw":
        kernel, dilation = rng.choice((1, 2, 3, 4, 7)), rng.choice((1, 1, 2, 3, 90))
        stride, pad = rng.choice((1, 2, 3, 4, 8, 9)), rng.choice((0, 0, 1, 2, 5, 129))
        size = rng.randint(1, 40) if rng.random() < 0.9 else rng.randint(120, 300)
        windows = (size + pad + rng.choice((0, 1, pad)) - dilation * (kernel - 1) - 1) // stride + 1
        if windows < 1:
            return shape(rng)
        values |= {axis: size, f"k{axis}": kernel, f"stride_{axis}": stride, f"dilation_{axis}": dilation, f"pad_{axis}": pad}
        values[f"out_{axis}"] = rng.randint(1, windows) if rng.random() < 0.2 else windows
    return values


def walk(s: dict[str, int], box: list[list[int]], x: int, y: int, n: int, count: int):
    """The windows' starts, as the PTX ISA describes them: from (x, y) of image n on, row by row and image by image."""
    (lower_x, lower_y), (upper_x, upper_y), (stride_x, stride_y) = box
    for _ in range(count):
        yield x, y, n
        x += stride_x
        if x >= s["w"] + upper_x:
            x, y = lower_x, y + stride_y
            if y >= s["h"] + upper_y:
                y, n = lower_y, n + 1


def test_the_walk_is_the_convolutions(plan):
    rng = random.Random(5)
    shapes, taken = [shape(rng) for _ in range(1500)], 0
    for s, box in zip(shapes, plan(shapes), strict=True):
        if isinstance(box, str):
            continue
        taken += 1
        places = itertools.product(range(s["n"]), range(s["out_h"]), range(s["out_w"]))
        windows = [(ox * s["stride_w"] - s["pad_w"], oy * s["stride_h"] - s["pad_h"], n) for n, oy, ox in places]
        for first in range(0, len(windows), 64):
            assert list(walk(s, box, *windows[first], min(64, len(windows) - first))) == windows[first : first + 64], (s, box)
    assert taken > 500


def test_what_does_not_fit_into_a_tensor_map_is_refused(plan):
    rng = random.Random(6)
    shapes, refused = [shape(rng) for _ in range(1500)], 0
    for s, box in zip(shapes, plan(shapes), strict=True):
        fits = True
        for axis in "hw":
            out, stride, pad = s[f"out_{axis}"], s[f"stride_{axis}"], s[f"pad_{axis}"]
            fits &= (stride <= 8 or out == 1) and s[f"dilation_{axis}"] * (s[f"k{axis}"] - 1) <= 255
            fits &= pad <= 128 and -128 <= (out - 1) * stride - pad + 1 - s[axis] <= 127
        assert fits != isinstance(box, str), (s, box)
        refused += not fits
        if fits:
            assert all(-128 <= corner <= 127 for corner in box[0] + box[1]), (s, box)
    assert refused > 200


PHASES_PROGRAM = """
#include <cstdio>
#include "gemm/phases.h"
int main() {
    int scale, kernel, pad;
    while (std::scanf("%d %d %d", &scale, &kernel, &pad) == 3) {
        convpool::PhaseAxis axis(scale, kernel, pad);
        std::printf("%d", axis.lead);
        for (int phase = 0; phase < scale; ++phase) {
            std::printf(" | %d", axis.shift(phase));
            for (int tap = 0; tap < axis.taps(phase); ++tap) {
                const convpool::TapRange range = axis.summed(axis.taps_before(phase) + tap);
                std::printf(" %d,%d", range.begin, range.end);
            }
        }
        axis.differences = true;
        for (int tap = 0; tap < axis.all_taps(); ++tap)
            std::printf("%s%d,%d,%g", tap == 0 ? " | " : " ", axis.summed(tap).begin, axis.summed(tap).end, axis.factor(tap));
        std::printf("\\n");
    }
}
"""
AXES = list(itertools.product((1, 2, 3, 4), (1, 2, 3, 4, 5, 7, 9), (0, 1, 2, 3, 5, 11)))


@pytest.fixture(scope="module")
def phases(tmp_path_factory) -> dict:
    """Return, by (scale, kernel, pad), the lead, each phase's shift and taps, and taps and factors of columns of differences."""
    if COMPILER is None:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("phases")
    (folder / "main.cpp").write_text(PHASES_PROGRAM)
    subprocess.run([COMPILER, "-std=c++20", f"-I{PLUGIN / 'src'}", folder / "main.cpp", "-o", folder / "main"], check=True)
    given = "\n".join(" ".join(map(str, axis)) for axis in AXES)
    lines = subprocess.run([folder / "main"], input=given, capture_output=True, text=True, check=True).stdout.splitlines()
    found = {}
    for axis, line in zip(AXES, lines, strict=True):
        lead, *parts = line.split(" | ")
        *words, columns = [[[int(n) for n in r.split(",")] for r in part.split()] for part in parts]
        found[axis] = int(lead), [(first, ranges) for (first,), *ranges in words], columns
    return found


@pytest.mark.parametrize("axis", AXES, ids=lambda axis: "s{}k{}p{}".format(*axis))
def test_phases_make_the_upsampled_convolution(phases, axis):
    scale, kernel, pad = axis
    rng = np.random.default_rng(0)
    x, w = rng.integers(-5, 6, 9), rng.integers(-5, 6, kernel)
    padded = np.pad(np.repeat(x, scale), pad)
    expected = [int(padded[i : i + kernel] @ w) for i in range(len(padded) - kernel + 1)]
    lead, all_phases, columns = phases[axis]
    around, wide = 40, np.pad(x, 40)  # zeros, more than any window reaches
    got = []
    for place in range(len(expected)):
        i, phase = divmod(place, scale)
        shift, ranges = all_phases[phase]
        first = around + i - lead + shift
        got.append(sum(int(wide[first + tap]) * int(w[begin:end].sum()) for tap, (begin, end) in enumerate(ranges)))
    assert got == expected
    assert all(begin < end for _, ranges in all_phases for begin, end in ranges), "no tap of a phase is empty"
    if axis not in ((2, 3, 1), (2, 3, 3), (2, 3, 5), (2, 3, 11)):
        return
    merged, left, right = (factor * int(w[begin:end].sum()) for begin, end, factor in columns)
    half = -np.diff(wide) / 2
    pixels = [around + place // 2 - lead + 1 for place in range(len(expected))]
    apart = [left * half[at - 1] if place % 2 == 0 else right * half[at] for place, at in enumerate(pixels)]
    assert list(merged * wide[pixels] + apart) == expected

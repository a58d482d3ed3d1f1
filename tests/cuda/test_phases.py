# SPDX-License-Identifier: Apache-2.0
"""The phases of an upsampled convolution (gemm/phases.h) against its definition, along one axis. Needs no GPU."""

import itertools
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

PLUGIN = Path(__file__).parents[2] / "plugin"
PROGRAM = """
#include <cstdio>
#include "gemm/phases.h"
int main() {
    int scale, kernel, pad;
    while (std::scanf("%d %d %d", &scale, &kernel, &pad) == 3) {
        const convpool::PhaseAxis axis(scale, kernel, pad);
        std::printf("%d", axis.lead);
        for (int phase = 0; phase < scale; ++phase) {
            std::printf(" | %d", axis.shift(phase));
            for (int tap = 0; tap < axis.taps(phase); ++tap) {
                const convpool::TapRange range = axis.summed(axis.taps_before(phase) + tap);
                std::printf(" %d,%d", range.begin, range.end);
            }
        }
        std::printf("\\n");
    }
}
"""
AXES = list(itertools.product((1, 2, 3, 4), (1, 2, 3, 4, 5, 7, 9), (0, 1, 2, 3, 5, 11)))


@pytest.fixture(scope="module")
def phases(tmp_path_factory) -> dict:
    """Return, by (scale, kernel, pad), the lead, and for each phase its shift and the taps that each of its own sums."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("phases")
    (folder / "main.cpp").write_text(PROGRAM)
    subprocess.run([compiler, "-std=c++20", f"-I{PLUGIN / 'src'}", folder / "main.cpp", "-o", folder / "main"], check=True)
    given = "\n".join(" ".join(map(str, axis)) for axis in AXES)
    lines = subprocess.run([folder / "main"], input=given, capture_output=True, text=True, check=True).stdout.splitlines()
    found = {}
    for axis, line in zip(AXES, lines, strict=True):
        lead, *parts = line.split(" | ")
        words = [part.split() for part in parts]
        found[axis] = int(lead), [(int(first), [tuple(map(int, r.split(","))) for r in ranges]) for first, *ranges in words]
    return found


@pytest.mark.parametrize("axis", AXES, ids=lambda axis: "s{}k{}p{}".format(*axis))
def test_phases_make_the_upsampled_convolution(phases, axis):
    scale, kernel, pad = axis
    rng = np.random.default_rng(0)
    x, w = rng.integers(-5, 6, 9), rng.integers(-5, 6, kernel)
    padded = np.pad(np.repeat(x, scale), pad)
    expected = [int(padded[i : i + kernel] @ w) for i in range(len(padded) - kernel + 1)]
    lead, all_phases = phases[axis]
    around = 40  # zeros, more than any window reaches
    wide = np.pad(x, around)
    got = []
    for place in range(len(expected)):
        i, phase = divmod(place, scale)
        shift, ranges = all_phases[phase]
        first = around + i - lead + shift
        got.append(sum(int(wide[first + tap]) * int(w[begin:end].sum()) for tap, (begin, end) in enumerate(ranges)))
    assert got == expected
    assert all(begin < end for _, ranges in all_phases for begin, end in ranges), "no tap of a phase is empty"

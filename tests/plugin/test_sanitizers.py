# SPDX-License-Identifier: Apache-2.0
"""The host code of all libraries under AddressSanitizer and UndefinedBehaviorSanitizer, on a pretended CUDA runtime.

`make sanitize` is this with more rounds, whose number is CONVPOOL_FUZZ_ROUNDS.
"""

import os
import re
import subprocess
from pathlib import Path

import pytest

ROUNDS = int(os.environ.get("CONVPOOL_FUZZ_ROUNDS", "5000"))


@pytest.fixture(scope="module")
def sanitized(built) -> Path:
    """The folder of the sanitized libraries and programs."""
    if not (built.folder / "CMakeCache.txt").exists():
        pytest.skip("CONVPOOL_PLUGIN_BUILD has built files, but is no build folder of CMake")
    target = ["--target", "convpool_sanitizer_tests", "--parallel", str(os.cpu_count() or 2)]
    done = subprocess.run(["cmake", "--build", str(built.folder), *target], capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return built.folder / "sanitized"


def run(*command: object) -> str:
    """Return a program's output; failed checks, bad access, leaks or undefined behaviour fail."""
    environment = os.environ | {"ASAN_OPTIONS": "malloc_context_size=4"}  # 30 frames of each take a third longer
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=3000, env=environment)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return done.stdout


@pytest.mark.parametrize("first", [1, 1_000_000])
def test_hostile_calls_of_the_c_api(sanitized, first):
    assert f"{ROUNDS} rounds from seed {first}, 0 failed" in run(sanitized / "convpool_fuzz_c_api", first, ROUNDS)


def test_hostile_nodes_in_onnxruntime(sanitized):
    """Attributes, shapes, sizes and inputs, on the CPU provider and on the pretended CUDA."""
    printed = run(sanitized / "convpool_fuzz_onnxruntime", 1, ROUNDS)
    assert int(re.search(rf"{ROUNDS} rounds from seed 1, (\d+) nodes ran", printed)[1]) > ROUNDS // 20


@pytest.mark.parametrize("first", [1, 1_000_000])
def test_hostile_input_to_plugins(sanitized, first):
    """Fields, descriptors, shapes, calls out of order, and engines' bytes; a round takes ten times as long as above."""
    printed = run(sanitized / "convpool_fuzz_plugin", sanitized / "libconvpool_plugin_asan.so", first, ROUNDS // 10)
    assert f"{ROUNDS // 10} rounds of each interface from seed {first}" in printed


def test_a_program_that_plays_tensorrt(sanitized):
    """Engines, fields, shapes and pointers, right ones and damaged ones."""
    printed = run(sanitized / "convpool_plugin_host_asan", sanitized / "libconvpool_plugin_asan.so", "1")
    assert int(re.search(r"(\d+) checks, 0 failed", printed)[1]) > 40_000

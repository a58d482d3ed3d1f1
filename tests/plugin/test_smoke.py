# SPDX-License-Identifier: Apache-2.0
"""The smoke test of the kernels, which ctest runs without Python."""

import re
import shutil
import subprocess

import pytest

from tests.support.gpu import skip_or_fail


def test_every_tactic_has_a_run(built):
    """On an H200, which can run them all."""
    command = [built.smoke, "--plan", "90", str(227 * 1024)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout
    assert done.stdout.splitlines()[-1] == "0 tactics without a run"


def test_by_ctest(built):
    """It passes with a GPU, and counts as skipped without one."""
    if shutil.which("ctest") is None:
        pytest.skip("no ctest")
    command = ["ctest", "--test-dir", str(built.folder), "--tests-regex", "^smoke$", "--verbose", "--no-tests=error"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-4000:]
    if re.search(r"smoke \.+\*\*\*Skipped", done.stdout):
        skip_or_fail(re.search(r"no GPU: .*", done.stdout)[0])
    assert re.search(r"\b(\d+) tactics, 0 failed", done.stdout), done.stdout[-4000:]

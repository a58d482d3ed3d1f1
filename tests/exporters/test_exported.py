# SPDX-License-Identifier: Apache-2.0
"""Files of PyTorch's exporters, weights in data files: rewritten, checked, saved, loaded elsewhere.  CONVPOOL_OLD_ONNX_PYTHON
names a Python with the oldest onnx that convpool takes; it loads every original and result."""

import os
import shutil
import subprocess

import pytest

import convpool
from tests.support.exported import load_models
from tests.support.exported.cases import CASES
from tests.support.exported.made import MODELS, assert_gives, made, remove

OLD_PYTHON = os.environ.get("CONVPOOL_OLD_ONNX_PYTHON")
every_model = pytest.mark.parametrize(("name", "exporter"), MODELS, ids=lambda value: value)


@pytest.fixture(scope="module", autouse=True)
def folders():
    yield
    remove()


@pytest.fixture(scope="module")
def old_onnx():
    """A function that loads a path in the older onnx and gives what that says."""
    if not OLD_PYTHON:
        pytest.skip("CONVPOOL_OLD_ONNX_PYTHON is not set")
    process = subprocess.Popen([OLD_PYTHON, load_models.__file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def load(path):
        process.stdin.write(f"{path}\n")
        process.stdin.flush()
        return process.stdout.readline().rstrip("\n")

    assert process.stdout.readline().strip()
    yield load
    process.stdin.close()
    process.wait()


@every_model
def test_pairs_are_rewritten(name, exporter):
    result = made(name, exporter)
    reasons = [site.reason for site in result.report.sites]
    assert result.report.summary.rewritten == CASES[name].rewritten(exporter), reasons
    assert not convpool.optimize(result.files["auto"][0], check=0).changed


@every_model
def test_check_compared_numbers(name, exporter):
    result = made(name, exporter)
    check = result.report.verification
    assert check.passed
    if result.changed:
        assert check.inputs == 1 and len(check.outputs) == len(result.exported.expected)
        assert all(output.passed and output.not_finite == 0 and not output.note for output in check.outputs)
        assert check.input_scale == 1
    else:
        assert check.reference == "the original, unchanged"


@every_model
def test_original_is_untouched(name, exporter):
    result = made(name, exporter)
    assert len(result.before) > 1  # its data is in files
    assert result.after == result.before


@every_model
def test_original_and_results_give_what_pytorch_does(name, exporter, tmp_path):
    result = made(name, exporter)
    assert_gives(result.exported.path, result.exported, name)
    for layout, files in result.files.items():
        folder = files[0].parent
        assert sorted(files) == sorted(path for path in folder.rglob("*") if path.is_file())
        for file in files:
            target = tmp_path / layout / file.relative_to(folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, target)
        assert_gives(tmp_path / layout / files[0].name, result.exported, name)


@every_model
@pytest.mark.parametrize("oldest", [False, True])
def test_original_and_results_load(name, exporter, oldest, request):
    load, result = request.getfixturevalue("old_onnx") if oldest else load_models.load, made(name, exporter)
    for path in (result.exported.path, *(files[0] for files in result.files.values())):
        assert load(str(path)) == "ok"

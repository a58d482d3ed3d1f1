# SPDX-License-Identifier: Apache-2.0
"""Models with weights in files: what is read, where the files go, and what happens to names that are taken."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto
from onnx.external_data_helper import ExternalDataInfo, set_external_data

import convpool
from convpool.cli.common import run
from convpool.cli.optimize import command
from convpool.errors import OutputError
from convpool.ir.model import LoadedModel
from tests.support import sessions
from tests.support.models import graph, random_feeds

PAIR = "h = Conv<pads=[1,1,1,1]>(x, w)\ny = AveragePool<kernel_shape=[2,2], strides=[2,2]>(h)\nz = MatMul(v, big)"
BIG_BYTES = 2_500_000_000
MEMORY_LIMIT_BYTES = 400_000_000
WEIGHT_BYTES = 32 * 16 * 9 * 4


def make(folder: Path, location: str = "w.bin", columns: int = 50) -> Path:
    """A model in `folder` with both weights in files; a large `big` as a hole in its file, which costs no disk."""
    model = graph(
        PAIR,
        {"big": (1000, 1)},
        inputs="float[1,16,12,12] x, float[1,1000] v",
        outputs="float[a,b,c,d] y, float[e,f] z",
    )
    w, big = sorted(model.graph.initializer, key=lambda tensor: tensor.name, reverse=True)
    big.dims[1] = columns
    (folder / location).parent.mkdir(parents=True, exist_ok=True)
    (folder / location).write_bytes(w.raw_data)
    with open(folder / "big.bin", "wb") as file:
        file.truncate(1000 * columns * 4)
    for tensor, place, length in ((w, location, WEIGHT_BYTES), (big, "big.bin", 1000 * columns * 4)):
        tensor.raw_data = b""
        set_external_data(tensor, place, 0, length)
        tensor.ClearField("raw_data")
    path = folder / "model.onnx"
    path.write_bytes(model.SerializeToString())
    return path


def locations(path: Path) -> dict[str, str]:
    """Where each initializer of a stored model lies; "" for inside."""
    model = onnx.load(path, load_external_data=False)
    return {
        tensor.name: ExternalDataInfo(tensor).location if tensor.data_location == TensorProto.EXTERNAL else ""
        for tensor in model.graph.initializer
    }


def assert_same_outputs(original: Path, result: Path) -> None:
    feeds = random_feeds(onnx.load(original, load_external_data=False))
    for one, other in zip(sessions.run(str(original), feeds), sessions.run(str(result), feeds), strict=True):
        np.testing.assert_allclose(other, one, rtol=0, atol=2e-6 * max(np.abs(one).max(), 1))


@pytest.fixture
def read_names(monkeypatch):
    """The names of the external tensors whose values are read."""
    names, read = [], LoadedModel.read

    def recorded(self, tensor):
        if tensor.data_location == TensorProto.EXTERNAL:
            names.append(tensor.name)
        return read(self, tensor)

    monkeypatch.setattr(LoadedModel, "read", recorded)
    return names


@pytest.mark.parametrize(("lowering", "expected"), [("direct", set()), ("convavgpool", {"w"}), ("fused", {"w"})])
def test_only_weights_that_change_are_read(tmp_path, read_names, lowering, expected):
    result = convpool.optimize(make(tmp_path), check=0, lowering=lowering)
    assert result.changed and set(read_names) == expected


def test_no_tensor_is_read_where_nothing_matches(tmp_path, read_names):
    convpool.optimize(make(tmp_path), check=0, exclude=["*"]).save(tmp_path / "out.onnx")
    assert read_names == []
    assert (tmp_path / "out.onnx").read_bytes() == (tmp_path / "model.onnx").read_bytes()


CHILD = """
import sys
import convpool
result = convpool.optimize(sys.argv[1], check=0, lowering="fused")
result.save(sys.argv[2])
status = open("/proc/self/status").read()
print(result.report.summary.rewritten, int(status.split("VmHWM:")[1].split()[0]) * 1024)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_memory_of_a_model_of_2_5_gb(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir(), target.mkdir()
    path = make(source, columns=BIG_BYTES // 4000)
    assert (source / "big.bin").stat().st_size == BIG_BYTES
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(path), str(target / "out.onnx")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    rewritten, peak_bytes = map(int, done.stdout.split())
    assert rewritten == 1
    assert peak_bytes < MEMORY_LIMIT_BYTES
    assert os.path.samefile(source / "big.bin", target / "big.bin")


def test_verification_runs_with_data_in_files(tmp_path):
    assert convpool.optimize(make(tmp_path), lowering="fused").report.verification.passed


def test_output_beside_the_input_shares_its_files(tmp_path):
    path = make(tmp_path)
    convpool.optimize(path, check=0, lowering="fused").save(tmp_path / "out.onnx")
    assert locations(tmp_path / "out.onnx") == {"big": "big.bin", "w_fused": "out.onnx.data"}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["big.bin", "model.onnx", "out.onnx", "out.onnx.data", "w.bin"]
    assert (tmp_path / "out.onnx.data").stat().st_size == 32 * 16 * 16 * 4
    assert_same_outputs(path, tmp_path / "out.onnx")


def test_output_elsewhere_links_the_files_it_refers_to(tmp_path):
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    path, out = make(tmp_path / "a", "deep/er/w.bin"), tmp_path / "b" / "out.onnx"
    convpool.optimize(path, check=0, lowering="direct").save(out)
    assert locations(out) == {"big": "big.bin", "w": "deep/er/w.bin"}
    for place in ("big.bin", "deep/er/w.bin"):
        assert os.path.samefile(tmp_path / "a" / place, tmp_path / "b" / place)
    assert_same_outputs(path, out)


def test_copies_where_links_are_impossible(tmp_path, monkeypatch):
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    path, out = make(tmp_path / "a"), tmp_path / "b" / "out.onnx"
    monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(OSError(18, "Invalid cross-device link")))
    result = convpool.optimize(path, check=0, lowering="direct")
    result.save(out)
    result.save(out)  # again, over the first copies
    assert not os.path.samefile(tmp_path / "a" / "w.bin", tmp_path / "b" / "w.bin")
    assert sorted(p.name for p in (tmp_path / "b").iterdir()) == ["big.bin", "out.onnx", "w.bin"]
    assert_same_outputs(path, out)


def test_files_in_the_way_stay_as_they_are(tmp_path):
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    path, out = make(tmp_path / "a"), tmp_path / "b" / "out.onnx"
    (tmp_path / "b" / "w.bin").write_bytes(b"somebody else's")
    convpool.optimize(path, check=0, lowering="direct").save(out)
    assert locations(out) == {"big": "big.bin", "w": "out-1-w.bin"}
    assert (tmp_path / "b" / "w.bin").read_bytes() == b"somebody else's"
    assert_same_outputs(path, out)


def test_data_file_with_the_name_of_the_new_one(tmp_path):
    path = make(tmp_path, "out.onnx.data")
    convpool.optimize(path, check=0, lowering="fused", exclude=()).save(tmp_path / "out.onnx")
    assert (tmp_path / "out.onnx.data").stat().st_size == WEIGHT_BYTES, "the input's weights were overwritten"
    assert_same_outputs(path, tmp_path / "out.onnx")


def test_the_model_is_not_written_over_its_own_data(tmp_path):
    result = convpool.optimize(make(tmp_path / "a"), check=0)
    (tmp_path / "b").mkdir()
    for folder in ("a", "b"):
        before = {file.name: file.read_bytes() for file in (tmp_path / folder).iterdir()}
        with pytest.raises(OutputError, match="holds weights of the model"):
            result.save(tmp_path / folder / "w.bin")
        assert {file.name: file.read_bytes() for file in (tmp_path / folder).iterdir()} == before


@pytest.mark.parametrize("option", ["-o", "--report"])
def test_nothing_is_written_over_the_models_data(tmp_path, option, capsys):
    path = make(tmp_path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert run(command, "convpool-optimize", [str(path), option, str(tmp_path / "w.bin")]) == 2
    assert "w.bin: weights of the model, which would be overwritten" in capsys.readouterr().err
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_rewriting_in_place(tmp_path):
    path = make(tmp_path)
    expected = sessions.run(str(path), random_feeds(onnx.load(path, load_external_data=False)))
    convpool.optimize(path, check=0, lowering="fused").save(path)
    first = path.read_bytes()
    got = sessions.run(str(path), random_feeds(onnx.load(path, load_external_data=False)))
    np.testing.assert_allclose(got[0], expected[0], rtol=0, atol=2e-6 * np.abs(expected[0]).max())
    convpool.optimize(path, check=0, lowering="fused").save(path)
    assert path.read_bytes() == first


def test_nothing_is_left_behind_by_a_failure(tmp_path, monkeypatch):
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    path = make(tmp_path / "a", "deep/w.bin")
    result = convpool.optimize(path, check=0, lowering="fused")
    replace = os.replace

    def fail(source, target):
        if str(target).endswith(".onnx"):
            raise OSError(28, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OutputError, match="No space left"):
        result.save(tmp_path / "b" / "out.onnx")
    assert list((tmp_path / "b").iterdir()) == []


def test_base_dir_of_a_model_that_is_no_path(tmp_path):
    path = make(tmp_path)
    model = onnx.load(path, load_external_data=False)
    with pytest.raises(convpool.ModelError, match="without a folder"):
        convpool.optimize(model)
    assert convpool.optimize(model, base_dir=tmp_path).report.summary.rewritten == 1

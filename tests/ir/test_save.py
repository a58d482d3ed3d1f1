# SPDX-License-Identifier: Apache-2.0
"""Files that saving writes, where the weights go, and that nobody's files are harmed."""

import io
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import onnx
import pytest
from google.protobuf.message import EncodeError

import convpool
from convpool.cli.group import run
from convpool.cli.optimize import command
from convpool.errors import ModelError, OptionError, OutputError
from convpool.ir import files as saving
from tests.support import sessions
from tests.support.data_files import WEIGHT_BYTES, assert_loads, assert_same_outputs, locations, make, snapshot
from tests.support.models import graph, random_feeds
from tests.support.rewriting import PAIR

BIG_BYTES = 2_500_000_000
MEMORY_LIMIT_BYTES = 400_000_000
LAYOUTS = ("auto", "one", "keep")


@pytest.fixture
def apart(tmp_path):
    """A model with its data, and the place of a result in another folder."""
    (tmp_path / "b").mkdir()
    return make(tmp_path / "a"), tmp_path / "b" / "out.onnx"


def assert_whole(original: Path, result: Path) -> None:
    """The result loads, and gives what the original gives."""
    assert_loads(result)
    assert_same_outputs(original, result)


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("changed", [True, False])
@pytest.mark.parametrize("lowering", ["convavgpool", "fused"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("folder", ["a", "b"])
def test_original_and_result_stay_whole(tmp_path, folder, layout, lowering, changed):
    """Both load with onnx and run, nothing of the original is touched, and `written` is all that a move needs."""
    (tmp_path / "b").mkdir(), (tmp_path / "c").mkdir()
    path, out = make(tmp_path / "a", "deep/er/w.bin"), tmp_path / folder / "out.onnx"
    before = snapshot(tmp_path / "a")
    result = convpool.optimize(path, lowering=lowering, exclude=() if changed else ["*"])
    assert result.changed == changed
    written, after = result.save(out, external_data=layout), snapshot(tmp_path / "a")
    assert {name: after[name] for name in before} == before
    assert_loads(path)
    assert_whole(path, out)
    assert written[0] == out and len(set(written)) == len(written)
    new = set(names(out.parent)) - set(before if folder == "a" else ())
    assert sorted(str(file.relative_to(out.parent)) for file in written) == sorted(new)
    for file in written:
        place = tmp_path / "c" / file.relative_to(out.parent)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(file, place)
    assert_whole(path, tmp_path / "c" / "out.onnx")


DATA = "out.onnx.data"


@pytest.mark.parametrize("layout, of_big, of_fused", [(None, "", ""), ("one", DATA, DATA), ("keep", "big.bin", DATA)])
def test_weights_go_into_the_model_one_file_or_files_as_the_originals(apart, layout, of_big, of_fused):
    path, out = apart
    written = convpool.optimize(path, lowering="fused").save(out, **({"external_data": layout} if layout else {}))
    assert written[0] == out and {file.name for file in written[1:]} == {of_big, of_fused} - {""}
    assert locations(out) == {"big": of_big, "w_fused": of_fused}
    stored = onnx.load(out, load_external_data=False).graph.initializer
    offsets = [int(entry.value) for tensor in stored for entry in tensor.external_data if entry.key == "offset"]
    assert all(offset % saving.PAGE_BYTES == 0 for offset in offsets)
    assert layout != "keep" or out.with_name(DATA).stat().st_size == 32 * 16 * 16 * 4


def test_tensors_that_share_bytes_go_on_to(tmp_path):
    """Also one that a function has by default, and one for training."""
    path, out = make(tmp_path), tmp_path / "out.onnx"
    model = onnx.load(path, load_external_data=False)
    default = onnx.helper.make_attribute("w", model.graph.initializer[0])
    model.functions.add(name="net", domain="local", opset_import=model.opset_import, attribute_proto=[default])
    for holder in (model.graph, model.training_info.add().algorithm):
        holder.initializer.append(default.t)
        holder.initializer[-1].name = "again"
    path.write_bytes(model.SerializeToString())
    convpool.optimize(path, check=0, exclude=["*"]).save(out, external_data="one")
    assert (tmp_path / "out.onnx.data").stat().st_size <= 200_000 + WEIGHT_BYTES + 2 * saving.PAGE_BYTES
    saved = onnx.load(out, load_external_data=False)
    again = [saved.training_info[0].algorithm.initializer[0], saved.functions[0].attribute_proto[0].t]
    assert all(tensor.external_data == saved.graph.initializer[-1].external_data for tensor in again)


def test_the_limit_decides_over_one_file(tmp_path, monkeypatch):
    result, out = convpool.optimize(make(tmp_path), lowering="fused"), tmp_path / "out.onnx"
    size = result.report.summary.bytes_after
    for limit, count in ((size, 1), (size - 1, 2)):
        monkeypatch.setattr(saving, "INLINE_LIMIT_BYTES", limit)
        assert len(result.save(out)) == count
        assert_loads(out)


CHILD = """
import sys
import convpool
result = convpool.optimize(sys.argv[1], check=0, lowering="fused")
written = result.save(sys.argv[2])
status = open("/proc/self/status").read()
print(len(written), int(status.split("VmHWM:")[1].split()[0]) * 1024)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_memory_of_a_model_of_2_5_gb(tmp_path):
    (tmp_path / "b").mkdir()
    path, out = make(tmp_path / "a", columns=BIG_BYTES // 4000), tmp_path / "b" / "out.onnx"
    assert (tmp_path / "a" / "big.bin").stat().st_size == BIG_BYTES
    done = subprocess.run([sys.executable, "-c", CHILD, str(path), str(out)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    written, peak_bytes = map(int, done.stdout.split())
    assert written == 2 and peak_bytes < MEMORY_LIMIT_BYTES
    assert locations(out) == {"big": "out.onnx.data", "w_fused": "out.onnx.data"}
    assert BIG_BYTES < (tmp_path / "b" / "out.onnx.data").stat().st_size < BIG_BYTES + 1_000_000
    assert (tmp_path / "a" / "big.bin").stat().st_nlink == 1


@pytest.mark.parametrize("layout,taken,instead", [("keep", "w.bin", "out-1-w.bin"), ("one", "out.onnx.data", "out.onnx.1.data")])
def test_files_in_the_way_stay_as_they_are(apart, layout, taken, instead):
    path, out = apart
    out.with_name(taken).write_bytes(b"somebody else's")
    convpool.optimize(path, check=0, lowering="direct").save(out, external_data=layout)
    assert out.with_name(taken).read_bytes() == b"somebody else's" and instead in names(out.parent)
    assert_whole(path, out)


@pytest.mark.parametrize("layout", ["keep", "one"])
def test_links_to_the_same_bytes_are_not_used(apart, layout):
    """onnx does not read them."""
    path, out = apart
    result = convpool.optimize(path, check=0, lowering="direct")
    for file in result.save(out, external_data=layout)[1:]:
        os.link(file, file.with_suffix(".second"))
    result.save(out, external_data=layout)
    assert_loads(out)


def test_data_file_with_the_name_of_the_new_one(tmp_path):
    path = make(tmp_path, "out.onnx.data")
    convpool.optimize(path, check=0, lowering="fused").save(tmp_path / "out.onnx", external_data="one")
    assert (tmp_path / "out.onnx.data").stat().st_size == WEIGHT_BYTES, "the input's weights were overwritten"
    assert_same_outputs(path, tmp_path / "out.onnx")


def test_the_model_is_not_written_over_its_own_data(tmp_path):
    result, before = convpool.optimize(make(tmp_path / "a"), check=0), snapshot(tmp_path / "a")
    with pytest.raises(OutputError, match="holds weights of the model"):
        result.save(tmp_path / "a" / "w.bin")
    assert snapshot(tmp_path / "a") == before


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_model_of_its_datas_name(apart, layout):
    path, out = apart[0], apart[1].with_name("w.bin")
    convpool.optimize(path, check=0, lowering="direct").save(out, external_data=layout)
    assert_whole(path, out)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rewriting_in_place(tmp_path, layout):
    path = make(tmp_path)
    data = {name: content for name, content in snapshot(tmp_path).items() if name != "model.onnx"}
    feeds = random_feeds(onnx.load(path, load_external_data=False))
    expected = sessions.run(str(path), feeds)
    for _ in range(3):
        convpool.optimize(path, lowering="fused").save(path, external_data=layout)
        assert_loads(path)
        np.testing.assert_allclose(sessions.run(str(path), feeds)[0], expected[0], rtol=0, atol=2e-6 * np.abs(expected[0]).max())
        after = snapshot(tmp_path)
        assert {name: after[name] for name in data} == data
    assert names(tmp_path) == sorted({"model.onnx", *data, *(["model.onnx.data"] if layout != "auto" else [])})


@pytest.mark.parametrize("layout", ["auto", "keep"])
def test_an_unchanged_model_in_place_stays_as_it_is(tmp_path, layout):
    path = make(tmp_path)
    content = path.read_bytes()
    written = convpool.optimize(path, check=0, exclude=["*"]).save(path, external_data=layout)
    assert path.read_bytes() == content and sorted(file.name for file in written) == ["big.bin", "model.onnx", "w.bin"]


@pytest.mark.parametrize("change", ["result", "another result", "file", "no file"])
def test_what_is_saved_is_the_result(tmp_path, change):
    """Also if nothing was rewritten: neither what a caller changes later is lost, nor does the file's new content get in."""
    path = tmp_path / "model.onnx"
    onnx.save(graph(PAIR), path)
    result = convpool.optimize(path, check=0, exclude=["*"])
    if change == "result":
        result.model.ir_version = 9
    elif change == "another result":
        result.model = graph(PAIR, ir=9)
    elif change == "file":
        onnx.save(graph(PAIR, ir=9), path)
    else:
        path.unlink()
    result.save(tmp_path / "out.onnx")
    assert onnx.load(tmp_path / "out.onnx") == graph(PAIR, ir=9 if "result" in change else 8)


@pytest.mark.parametrize("how", ["save", "bytes"])
def test_weights_that_changed_after_loading_are_not_mixed_with_older_ones(tmp_path, how):
    """New weights are made of those that were loaded; a network that is trained on may be written over meanwhile."""
    result, data = convpool.optimize(make(tmp_path), check=0), tmp_path / "w.bin"
    content = bytearray(data.read_bytes())
    content[0] ^= 1
    data.write_bytes(content)
    os.utime(data, ns=(1, 1))
    with pytest.raises(ModelError, match="^external data 'w.bin': has changed since the model was loaded$"):
        result.save(tmp_path / "out.onnx") if how == "save" else result.to_bytes()
    assert not (tmp_path / "out.onnx").exists()


def test_files_are_on_the_disk_before_they_have_their_names(tmp_path, monkeypatch):
    """A machine that loses its power right behind the renaming has the whole file."""
    events, replace = [], os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: events.append("on the disk"))
    monkeypatch.setattr(os, "replace", lambda source, target: (events.append("named"), replace(source, target)))
    convpool.optimize(make(tmp_path), check=0, lowering="direct").save(tmp_path / "result.onnx", external_data="auto")
    assert "named" in events and all(events[at - 1] == "on the disk" for at, event in enumerate(events) if event == "named")


def test_a_read_only_file_is_not_replaced(tmp_path, capsys):
    path, out = make(tmp_path), tmp_path / "out.onnx"
    out.write_bytes(b"precious")
    out.chmod(0o444)
    for option in ("-o", "--report"):
        assert run(command, "convpool-optimize", [str(path), option, str(out)]) == 2
        assert "out.onnx: a read-only file; give another name, or allow writing" in capsys.readouterr().err
    with pytest.raises(OutputError, match="read-only"):
        convpool.optimize(path, check=0).save(out)
    assert out.read_bytes() == b"precious"


def test_owner_and_attributes_stay_where_that_is_allowed(tmp_path, monkeypatch):
    out = tmp_path / "out.onnx"
    result = convpool.optimize(graph("h = Conv(x, w)\ny = AveragePool<kernel_shape=[2,2]>(h)"))
    result.save(out)
    kept = {"user.note": b"mine"}
    try:
        os.setxattr(out, "user.note", kept["user.note"])
    except OSError:
        kept = {}  # no such file system
    owner = 12345 if os.geteuid() == 0 else os.geteuid()
    os.chown(out, owner, -1)
    out.chmod(0o640)
    result.save(out)
    assert out.stat().st_uid == owner and stat.S_IMODE(out.stat().st_mode) == 0o640
    assert {name: os.getxattr(out, name) for name in os.listxattr(out) if name.startswith("user.")} == kept
    for name in ("chown", "setxattr"):
        monkeypatch.setattr(os, name, Mock(side_effect=PermissionError))
    result.save(out)
    assert stat.S_IMODE(out.stat().st_mode) == 0o640


def test_sizes_count_the_data_files(tmp_path):
    summary = convpool.optimize(make(tmp_path), check=0, lowering="direct").report.summary
    assert summary.bytes_before == sum(file.stat().st_size for file in tmp_path.iterdir())
    assert summary.bytes_before == pytest.approx(summary.bytes_after, abs=200)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_command_names_all_files(apart, capsys, layout):
    path, out = apart
    assert run(command, "convpool-optimize", [str(path), "-o", str(out), "--external-data", layout]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("written")]
    assert sorted(line.removeprefix("written").strip().split(", ")) == sorted(map(str, out.parent.iterdir()))


def test_stdout_takes_the_weights_along(tmp_path):
    words = [sys.executable, "-m", "convpool.cli", str(make(tmp_path)), "-q", "-o", "-"]
    done = subprocess.run(words, capture_output=True, check=True)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "out.onnx").write_bytes(done.stdout)
    assert_loads(tmp_path / "elsewhere" / "out.onnx")
    done = subprocess.run([*words, "--external-data", "one"], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "stdout, which takes no data file" in done.stderr and not done.stdout


def test_unknown_layout_and_names_that_take_no_model_or_no_data(tmp_path):
    result = convpool.optimize(make(tmp_path), check=0)
    result.save("/dev/null")
    for layout in ("one", "keep"):
        with pytest.raises(OutputError, match="^/dev/null: a device or pipe, which takes no data file"):
            result.save("/dev/null", external_data=layout)
    assert not Path("/dev/null.data").exists()
    told = "external_data: got 'two', expected one of auto, one, keep"
    with pytest.raises(OptionError, match=told), saving.written_with(tmp_path / "r", b"of none"):
        saving.write_atomically(tmp_path / "r", b"of another")
        result.save(tmp_path / "out.onnx", external_data="two")
    assert (tmp_path / "r").read_bytes() == b"of another"
    told = {"new/": "new/: a folder; expected a file name", "a\0b": r"no file name; got (\w+: )?embedded null"}
    for name, text in (told | {"out.pbtxt": "out.pbtxt: a name by which onnx reads textproto"}).items():
        with pytest.raises(OutputError, match=text):
            result.save(f"{tmp_path}/{name}")


def test_zeros_are_copied_as_a_hole_and_not_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(saving, "_CHUNK_BYTES", 4)
    content = b"abcd" + bytes(8) + b"efgh" + bytes(2)
    (tmp_path / "data").write_bytes(content)
    copied = io.BytesIO()
    saving._copy_bytes(tmp_path / "data", 2, len(content) - 2, copied)
    assert copied.getvalue() == content[2:]
    with pytest.raises(ModelError, match="data': got shorter since the model was loaded$"):
        saving._copy_bytes(tmp_path / "data", 2, len(content) - 1, io.BytesIO())


def test_a_model_too_large_for_one_file(monkeypatch):
    model, text = graph(PAIR), "^model: too large for one file; got over 2147483647 bytes, expected less; give it external data$"
    with pytest.raises(ModelError, match=text), monkeypatch.context() as patch:
        patch.setattr(onnx.ModelProto, "SerializeToString", Mock(side_effect=EncodeError))
        convpool.optimize(model)
    result, size = convpool.optimize(model, check=0), saving._whole_bytes(model)
    assert onnx.load_from_string(result.to_bytes()) == result.model
    monkeypatch.setattr(saving, "PROTOBUF_LIMIT_BYTES", size)
    assert saving.self_contained(model, None) == model
    monkeypatch.setattr(saving, "PROTOBUF_LIMIT_BYTES", size - 1)
    with pytest.raises(ModelError, match=f"^model: too large without data files; got {size} bytes, expected at most {size - 1}$"):
        saving.self_contained(model, None)

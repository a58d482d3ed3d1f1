# SPDX-License-Identifier: Apache-2.0
"""Models with weights in files: what is read, and what is refused."""

import os
import subprocess
from itertools import product
from unittest.mock import Mock

import numpy as np
import onnx
import pytest
from onnx import TensorProto
from onnx.external_data_helper import set_external_data

import convpool
from convpool.cli.group import run
from convpool.cli.optimize import command
from convpool.cli.verify import verify_command
from convpool.errors import ModelError
from convpool.ir import files as external
from convpool.ir.files import place_of
from convpool.ir.model import LoadedModel, check_tensors
from tests.support.data_files import make
from tests.support.models import graph


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


@pytest.mark.parametrize("lowering", ["direct", "convavgpool", "fused"])
def test_only_weights_of_pairs_are_read(tmp_path, read_names, lowering):
    assert convpool.optimize(make(tmp_path), check=0, lowering=lowering).changed and set(read_names) == {"w"}


def test_no_tensor_is_read_where_nothing_matches(tmp_path, read_names):
    convpool.optimize(make(tmp_path), check=0, exclude=["*"]).save(tmp_path / "out.onnx")
    assert read_names == []


@pytest.mark.parametrize("layout", ["auto", "one", "keep"])
@pytest.mark.parametrize("option", ["-o", "--report"])
def test_links_in_a_circle_are_replaced_by_a_file(tmp_path, option, layout):
    """They ended in a traceback, and the status of models that differ."""
    source, out = make(tmp_path), tmp_path / "loop.onnx"
    out.symlink_to("loop.onnx")
    words = [str(source), "-q", option, str(out), "--external-data", layout]
    assert run(command, "convpool-optimize", words) == 0 and not out.is_symlink()
    if option == "-o":
        assert convpool.verify(source, out).passed


@pytest.mark.parametrize(("option", "name"), [*product(("-o", "--report", "verify"), ("w.bin", "data.npz"))])
def test_nothing_is_written_over_the_data_read(tmp_path, option, name, capsys):
    path = make(tmp_path)
    np.savez(tmp_path / "data.npz", x=np.ones((1, 16, 12, 12), np.float32), v=np.ones((1, 1000), np.float32))
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    words = [str(path), "--data", str(tmp_path / "data.npz"), option.replace("verify", "--report"), str(tmp_path / name)]
    called, words = (verify_command, [str(path), *words]) if option == "verify" else (command, words)
    assert run(called, "convpool", words) == 2
    what = "--data" if name == "data.npz" else "compared here" if option == "verify" else "weights of the model"
    assert f"{name}: {what}, which would be overwritten" in capsys.readouterr().err
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_base_dir_of_a_model_that_is_no_path(tmp_path):
    model = onnx.load(make(tmp_path), load_external_data=False)
    with pytest.raises(convpool.ModelError, match="without a folder"):
        convpool.optimize(model)
    assert convpool.optimize(model, base_dir=tmp_path).report.summary.rewritten == 1


@pytest.mark.parametrize("kind", ["symbolic link", "hard link", "linked folder"])
def test_linked_data_that_onnx_refuses_is_one_line(tmp_path, kind, capsys):
    path, data = make(tmp_path / "model", "sub/w.bin"), tmp_path / "model" / "sub" / "w.bin"
    if kind == "hard link":
        os.link(data, tmp_path / "other name")
    elif kind == "symbolic link":
        data.rename(tmp_path / "model" / "blob")
        data.symlink_to("../blob")
    else:
        data.parent.rename(tmp_path / "model" / "real")
        data.parent.symlink_to("real")
    try:
        onnx.load(path)
    except onnx.checker.ValidationError:
        pass
    else:
        assert run(command, "convpool-optimize", [str(path), "-q"]) == 0
        onnx.load(path), onnx.load(path.with_suffix(".convpool.onnx"))
        return
    before = sorted(tmp_path.rglob("*"))
    assert run(command, "convpool-optimize", [str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    if kind != "linked folder":
        assert kind in line and "cp -L -- sub/w.bin sub/w.bin.copy && mv -- sub/w.bin.copy sub/w.bin" in line
    assert sorted(tmp_path.rglob("*")) == before
    with pytest.raises(convpool.ModelError):
        convpool.optimize(path)


def test_the_layout_of_a_download_cache_is_refused_with_what_to_do(tmp_path, capsys):
    """Model and data are links to files of other names in another folder."""
    path, cache = make(tmp_path / "model"), tmp_path / "cache"
    cache.mkdir()
    for number, file in enumerate(sorted((tmp_path / "model").iterdir())):
        file.rename(cache / str(number))
        file.symlink_to(cache / str(number))
    assert run(command, "convpool-optimize", [str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "symbolic link; copy it: cp -L" in line


@pytest.mark.parametrize("name", ["INT4", "UINT4", "FLOAT4E2M1", "INT2", "UINT2", "FLOAT6E2M3"])
@pytest.mark.parametrize("count", [512, 513])
def test_elements_that_share_bytes(tmp_path, name, count):
    if name not in TensorProto.DataType.keys():
        pytest.skip("onnx does not have it")
    bits, data_type = 6 if "6" in name else int(name.strip("UINTFLOA")[0]), TensorProto.DataType.Value(name)
    model = onnx.load(path := make(tmp_path), load_external_data=False)
    model.ir_version = onnx.IR_VERSION
    model.graph.initializer.append(onnx.helper.make_tensor("stored", data_type, [count], [0] * count))
    for length, accepted in ((-(-count * bits // 8), True), (-(-count * bits // 8) - 1, False)):
        (tmp_path / "narrow.bin").write_bytes(bytes(length))
        tensor = TensorProto(name="narrow", data_type=data_type, dims=[count], raw_data=b"x")
        set_external_data(tensor, "narrow.bin", 0, length)
        tensor.ClearField("raw_data")
        changed = onnx.ModelProto.FromString(model.SerializeToString())
        changed.graph.initializer.append(tensor)
        path.write_bytes(changed.SerializeToString())
        if accepted:
            convpool.optimize(path, check=0).save(tmp_path / "out.onnx")
            onnx.load(tmp_path / "out.onnx")
        else:
            with pytest.raises(convpool.ModelError, match=f"got {length} bytes at 0 of {length}, expected {length + 1}"):
                convpool.optimize(path, check=0)


FUNCTION = """<opset_import: ["": 17], domain: "own"> added (x) => (y) {
c = Constant<value = float[1] {1.0}>() y = Add(x, c) }"""


def with_function(folder, location: str):
    """A model whose function holds a Constant in a file."""
    body = "a = own.added(x)\nh = Conv(a, w)\ny = AveragePool<kernel_shape=[2,2], strides=[2,2]>(h)"
    model = graph(body, functions=FUNCTION, imports=', "own": 1')
    value = model.functions[0].node[0].attribute[0].t
    value.ClearField("float_data")
    value.raw_data = b"\0\0\x80?"
    (folder / "c.bin").write_bytes(value.raw_data)
    set_external_data(value, location, 0, 4)
    value.ClearField("raw_data")
    path = folder / "model.onnx"
    path.write_bytes(model.SerializeToString())
    return path


@pytest.mark.parametrize("layout", ["auto", "one", "keep"])
def test_data_of_a_function(tmp_path, layout):
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    out = tmp_path / "b" / "out.onnx"
    result = convpool.optimize(with_function(tmp_path / "a", "c.bin"), check=0)
    assert result.report.summary.rewritten == 1
    result.save(out, external_data=layout)
    model = onnx.load(out)
    assert next(f for f in model.functions if f.name == "added").node[0].attribute[0].t.raw_data == b"\0\0\x80?"


def test_data_of_a_function_outside_the_folder(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "c.bin").write_bytes(bytes(4))
    with pytest.raises(convpool.ModelError, match="outside the model's folder"):
        convpool.optimize(with_function(tmp_path / "a", "../c.bin"), check=0)


NAMES = ["w;touch PWNED", "$(touch PWNED)", "`touch PWNED`", "a b", "a  b", "'; touch PWNED; '", "\u202ea", "é 中"]
NAMES += r"""-rf --help ' '' " a&b a|b a>b * ? [a] ~ $HOME a\b #a !! {a,b} a=b -""".split()


@pytest.mark.parametrize("name", NAMES)
def test_the_command_that_is_proposed_copies_the_link_and_nothing_else(tmp_path, name):
    (tmp_path / "model").mkdir()
    path = make(tmp_path / "model", f"./{name}")
    data = path.parent / name
    data.rename(tmp_path / "blob")
    data.symlink_to("../blob")
    with pytest.raises(convpool.ModelError, match="through a symbolic link; copy it: ") as caught:
        convpool.optimize(path)
    words = str(caught.value).partition("; copy it: ")[2].replace("./", "", 1)
    done = subprocess.run(["sh", "-c", words], cwd=path.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert convpool.optimize(path, check=0).changed
    assert {file.name for file in path.parent.iterdir()} == {"big.bin", "model.onnx", name}


DIGITS: dict[str, int | None] = dict.fromkeys("-1 +1 1_0 0x1 1e3 1.0 １ ٣ ² NaN".split())
DIGITS |= dict.fromkeys(["9" * 5000, "1" * 20, " 1", "1 ", "0" * 5000 + "1", "1\0"])
DIGITS |= {"": 0, "0": 0, "00": 0, "4": 4, "0000000000000000004": 4, "9" * 19: int("9" * 19)}
"""The number, None where there is none."""


@pytest.mark.parametrize("text", DIGITS, ids=lambda text: text[:20])
@pytest.mark.parametrize("key", ["offset", "length"])
def test_numbers_of_external_data(key, text):
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[2], data_location=TensorProto.EXTERNAL)
    for entry in (("location", "w.bin"), (key, text)):
        tensor.external_data.add(key=entry[0], value=entry[1])
    if DIGITS[text] is None:
        with pytest.raises(ModelError, match=f"{key} of its external data; got '.{{0,45}}', expected a number of bytes$"):
            place_of(tensor)
    else:
        assert getattr(place_of(tensor), key) == DIGITS[text] or (key == "length" and not text and place_of(tensor).length == 8)


@pytest.mark.parametrize("raw", [True, False])
@pytest.mark.parametrize(
    "dims", [[2**62] * 2, [2**62] * 100, [2**62] * 300, [3] * 1000, [2] * 60, [2] * 300_000, [2**59, 2], [2**63 - 1], [10**9] * 8]
)
def test_sizes_whose_product_no_computer_holds(dims, raw):
    """Python refuses to print numbers of some thousand digits."""
    model = graph("y = Relu(x)")
    tensor = model.graph.initializer.add(name="w", data_type=TensorProto.FLOAT, dims=dims)
    if raw:
        tensor.raw_data = bytes(8)
    with pytest.raises(convpool.ModelError, match="tensor 'w': shape; got .{,200}, expected at most 576460752303423488 elements"):
        convpool.optimize(model)
    tensor.dims.append(0)
    tensor.raw_data = b""
    check_tensors(model)


@pytest.mark.parametrize(("folder", "place"), [("", "x" * 300), ("", "circle"), ("\udcff", "d")])
def test_data_files_whose_names_cannot_be_followed(tmp_path, folder, place):
    (folder := tmp_path / folder).mkdir(exist_ok=True)
    os.symlink("circle", folder / "circle"), (folder / "d").touch()
    told = "(: cannot be read; (File name too long|Too many levels|Symlink)|; got a folder whose name is no UTF-8)"
    with pytest.raises(ModelError, match=f"^w: external data '.*'{told}"):
        external._checked_stamp("w", folder, place)


def test_data_that_are_gone_shorter_or_of_strings(tmp_path):
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[2], data_location=TensorProto.EXTERNAL)
    for key, value in (("location", "data"), ("offset", "0"), ("length", "8")):
        tensor.external_data.add(key=key, value=value)
    with pytest.raises(ModelError, match="^external data 'data': cannot be read; No such file or directory$"):
        external.read_in(tensor, tmp_path)
    (tmp_path / "data").write_bytes(bytes(8))
    assert LoadedModel(onnx.ModelProto(), tmp_path, 0).read(tensor).tobytes() == bytes(8)
    (tmp_path / "data").write_bytes(bytes(7))
    with pytest.raises(ModelError, match="'data': got shorter since the model was loaded"):
        external.read_in(tensor, tmp_path)
    tensor.data_type = TensorProto.STRING
    with pytest.raises(ModelError, match="^tensor 'w': external data; got strings, expected numbers$"):
        external.read_in(tensor, tmp_path)


def test_data_that_cannot_be_read(tmp_path, monkeypatch):
    (tmp_path / "data").write_bytes(bytes(8))
    monkeypatch.setattr(external, "load_external_data_for_tensor", Mock(side_effect=PermissionError(13, "Permission denied")))
    with pytest.raises(ModelError, match="^w: external data 'data': cannot be read; Permission denied$"):
        external._checked_stamp("w", tmp_path, "data")

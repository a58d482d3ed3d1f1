# SPDX-License-Identifier: Apache-2.0
"""A model with its weights in data files, and what a test asks of the files of a result."""

from pathlib import Path

import onnx
from onnx import TensorProto
from onnx.external_data_helper import ExternalDataInfo, set_external_data

from tests.support import sessions
from tests.support.models import graph, random_feeds
from tests.support.rewriting import assert_close

PAIR = "h = Conv<pads=[1,1,1,1]>(x, w)\ny = AveragePool<kernel_shape=[2,2], strides=[2,2]>(h)\nz = MatMul(v, big)"
WEIGHT_BYTES = 32 * 16 * 9 * 4


def make(folder: Path, location: str = "w.bin", columns: int = 50) -> Path:
    """A model in `folder` with both weights in files; a large `big` as a hole in its file, which costs no disk."""
    inputs, outputs = "float[1,16,12,12] x, float[1,1000] v", "float[a,b,c,d] y, float[e,f] z"
    model = graph(PAIR, {"big": (1000, 1)}, inputs=inputs, outputs=outputs)
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
    assert_close(str(original), str(result), random_feeds(onnx.load(original, load_external_data=False)))


def snapshot(folder: Path) -> dict[str, tuple]:
    """Content, inode, links and times of every file in a folder."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            status = path.stat()
            found[str(path.relative_to(folder))] = (path.read_bytes(), status.st_ino, status.st_nlink, status.st_mtime_ns)
    return found


def assert_loads(path: Path) -> None:
    """onnx loads and checks a stored model, and onnxruntime runs it."""
    onnx.load(path)
    onnx.checker.check_model(str(path), full_check=True)
    sessions.run(str(path), random_feeds(onnx.load(path, load_external_data=False)))

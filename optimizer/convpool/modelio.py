"""Reading, checking and writing models.  Weights in external files are read one at a time, and only when asked for."""

from __future__ import annotations

import heapq
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from google.protobuf.message import DecodeError, EncodeError
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, numpy_helper
from onnx.external_data_helper import ExternalDataInfo, set_external_data

from convpool import operator
from convpool.errors import ModelError, OutputError
from convpool.graph import graphs_within, is_op, opset_of, subgraphs

EXTERNAL_THRESHOLD_BYTES = 1024
"""New weights of at least this size go to an external file where the model keeps its weights in such files."""
PROTOBUF_LIMIT_BYTES = 2**31 - 1


@dataclass
class LoadedModel:
    """A model with the folder its external data lies in (None: it has none) and its size as a file."""

    proto: ModelProto
    base_dir: Path | None
    size_bytes: int
    inferred: ModelProto | None = None
    """The model as it was loaded, after shape inference."""
    source: Path | bytes | None = None
    """What the model was parsed from, if not from memory."""
    data_files: frozenset[str] = frozenset()
    """Locations of the external data that the model came with, relative to `base_dir`."""

    def read(self, tensor: TensorProto) -> np.ndarray:
        """The value of a tensor; one in an external file is read from there and not kept."""
        if tensor.data_location != TensorProto.EXTERNAL:
            return numpy_helper.to_array(tensor)
        copy = TensorProto()
        copy.CopyFrom(tensor)
        return numpy_helper.to_array(copy, base_dir=str(self.base_dir))

    @property
    def has_external_data(self) -> bool:
        """Whether any tensor lies in an external file."""
        return any(tensor.data_location == TensorProto.EXTERNAL for tensor in tensors(self.proto))


def load(source: object, base_dir: Path | None = None) -> LoadedModel:
    """Load and check a model: a path, serialised bytes, a ModelProto (used as it is, not copied) or a gs.Graph.

    base_dir: folder of the external data of a model that is no path.  Raises ModelError.
    """
    if isinstance(source, ModelProto):
        model = LoadedModel(source, base_dir, source.ByteSize())
    elif isinstance(source, bytes):
        model = LoadedModel(_parse(source, "the bytes given"), base_dir, len(source), source=source)
    elif isinstance(source, (str, os.PathLike)):
        path = Path(source)
        data = _read_file(path)
        model = LoadedModel(_parse(data, str(path)), path.resolve().parent, len(data), source=path)
    else:
        model = LoadedModel(_from_graphsurgeon(source), base_dir, 0)
    _check_versions(model.proto)
    _check_external_data(model)
    model.data_files = _locations(model.proto)
    model.proto = _in_order(model.proto)
    check(model.proto, "the model")
    model.inferred = infer_shapes(model.proto)
    if model.inferred is not None:
        _check_convolutions(model.inferred)
    return model


def check(model: ModelProto, what: str, full: bool = False) -> None:
    """onnx's checker, also for a model whose external data is not loaded.  Raises ModelError."""
    operator.register_schema()
    probe = model
    if any(not value.type.tensor_type.HasField("shape") for value in _typed_values(model)):
        probe = ModelProto()
        probe.CopyFrom(model)
        _fill_missing_shapes(probe)
    try:
        if any(tensor.data_location == TensorProto.EXTERNAL for tensor in tensors(probe)):
            _check_with_stand_ins(probe, full)
        else:
            onnx.checker.check_model(probe, full_check=full)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError, ValueError) as error:
        raise ModelError(f"{what} is not valid ONNX: {first_line(error)}") from error


def passes_full_check(model: ModelProto) -> bool:
    """Whether onnx's checker with strict shape inference accepts the model."""
    try:
        check(model, "", full=True)
    except ModelError:
        return False
    return True


def infer_shapes(model: ModelProto) -> ModelProto | None:
    """The model with inferred shapes, node for node; None where inference fails or the model is too large for it."""
    operator.register_schema()
    probe = ModelProto()
    probe.CopyFrom(model)
    for tensor in probe.graph.initializer:
        if tensor.data_location != TensorProto.EXTERNAL and len(tensor.raw_data) > 2**14:
            tensor.ClearField("raw_data")  # no shape depends on the values of a large tensor
            tensor.data_location = TensorProto.EXTERNAL
    try:
        return onnx.shape_inference.infer_shapes(probe, data_prop=True)
    except (onnx.shape_inference.InferenceError, RuntimeError, ValueError, EncodeError):
        return None


def serialize(model: ModelProto) -> bytes:
    """Serialised model.  Raises ModelError beyond protobuf's 2 GiB."""
    try:
        return model.SerializeToString()
    except (EncodeError, ValueError) as error:
        raise ModelError(f"model: too large for one file; got over {PROTOBUF_LIMIT_BYTES} bytes, expected less; "
                         "give it external data") from error  # fmt: skip


def save(model: LoadedModel, out: Path, new_constants: set[str]) -> None:
    """Write the model to `out` atomically, with its external data beside it; an unchanged one byte for byte.

    Data files stay where they are if `out` is in their folder; elsewhere they are hard-linked, or copied if that
    fails.  New constants of such a model go to `<out>.data`.  Nothing is left behind on failure.  Raises OutputError.
    """
    if not out.parent.is_dir():
        raise OutputError(f"{out}: no folder {str(out.parent)!r}; make it first")
    if out.is_dir():
        raise OutputError(f"{out}: a folder; expected a file name")
    created: list[Path] = []
    proto = model.proto
    try:
        if model.has_external_data and model.base_dir is not None:
            proto = ModelProto()
            proto.CopyFrom(model.proto)
            _place_external_data(proto, model.base_dir, out, created)
            _move_to_external(proto, new_constants, out, model.data_files, created)
        data = model.source.read_bytes() if isinstance(model.source, Path) else model.source
        write_atomically(out, serialize(proto) if data is None or proto != model.proto else data)
    except OSError as error:
        _discard(created)
        raise OutputError(f"{out}: cannot be written; {error.strerror or error}") from error
    except BaseException:
        _discard(created)
        raise


def write_atomically(out: Path, data: bytes) -> None:
    """Write a file so that it is there whole or not at all; a device or pipe is just written to.  Raises OSError."""
    if out.exists() and not out.is_file():
        out.write_bytes(data)
        return
    handle, name = tempfile.mkstemp(dir=out.parent, prefix=f".{out.name}.", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask)
        os.replace(name, out)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise


def tensors(model: ModelProto) -> Iterator[TensorProto]:
    """Every tensor stored in the model: initializers and Constant values, subgraphs and functions included."""

    def visit(proto) -> Iterator[TensorProto]:
        if isinstance(proto, GraphProto):
            yield from proto.initializer
        for node in proto.node:
            for attribute in node.attribute:
                if attribute.HasField("t"):
                    yield attribute.t
                yield from attribute.tensors
            for _, _, graph in subgraphs(node):
                yield from visit(graph)

    yield from visit(model.graph)
    for function in model.functions:
        yield from visit(function)


def first_line(error: BaseException) -> str:
    """An exception's message on one line, shortened."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else text[:297] + "..."


def _read_file(path: Path) -> bytes:
    if path.is_dir():
        raise ModelError(f"{path}: a folder; expected an ONNX file")
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise ModelError(f"{path}: no such file") from error
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read; {getattr(error, 'strerror', None) or error}") from error


def _parse(data: bytes, where: str) -> ModelProto:
    if not data:
        raise ModelError(f"{where}: empty; expected an ONNX model")
    model = ModelProto()
    try:
        model.ParseFromString(data)
    except (DecodeError, RuntimeError) as error:
        raise ModelError(f"{where}: truncated, or not an ONNX model") from error
    if not model.ir_version or not model.HasField("graph"):
        raise ModelError(f"{where}: not an ONNX model; it has no IR version or no graph")
    return model


def _from_graphsurgeon(source: object) -> ModelProto:
    graphsurgeon = sys.modules.get("onnx_graphsurgeon")  # whoever holds a gs.Graph has imported it
    if graphsurgeon is None or not isinstance(source, graphsurgeon.Graph):
        raise ModelError(f"model: got {type(source).__name__}, expected a path, bytes, ModelProto or gs.Graph")
    return graphsurgeon.export_onnx(source)


def _check_versions(model: ModelProto) -> None:
    newest = onnx.defs.onnx_opset_version()
    for imports in (model.opset_import, *(function.opset_import for function in model.functions)):
        if opset_of(imports) > newest:
            raise ModelError(f"model: opset; got {opset_of(imports)}, expected at most {newest}; update onnx")


def _in_order(model: ModelProto) -> ModelProto:
    """The model, as a copy with sorted nodes where a node stands before one that it reads from.

    Converters write such graphs and runtimes sort them; onnx's checker and one-pass algorithms do not.
    """
    if all(_order(graph.node) is None for graph in _node_lists(model)):
        return model
    result = ModelProto()
    result.CopyFrom(model)
    for graph in _node_lists(result):
        order = _order(graph.node)
        if order is not None:
            nodes = [graph.node[index] for index in order]
            graph.ClearField("node")
            graph.node.extend(nodes)
    return result


def _node_lists(model: ModelProto):
    """Every graph and function body, inner ones first: sorting an outer one copies its nodes."""
    for container in (model.graph, *model.functions):
        inner = [graph for node in container.node for _, _, g in subgraphs(node) for graph in graphs_within(g)]
        yield from reversed(inner)
        yield container


def _order(nodes) -> list[int] | None:
    """Indices of the nodes in an order in which each follows those it reads from; None if they are in one.

    Stable: a node goes no further back than it has to.  Nodes on a cycle stay last, for the checker to refuse.
    """
    producer = {name: index for index, node in enumerate(nodes) for name in node.output if name}
    needs = [{producer[name] for name in _read_names(node) if name in producer} for node in nodes]
    if all(other < index for index, others in enumerate(needs) for other in others):
        return None
    readers: dict[int, list[int]] = {}
    for index, others in enumerate(needs):
        for other in others:
            readers.setdefault(other, []).append(index)
    open_needs = [len(others) for others in needs]
    ready = [index for index, count in enumerate(open_needs) if not count]
    order: list[int] = []
    while ready:
        index = heapq.heappop(ready)
        order.append(index)
        for reader in readers.get(index, ()):
            open_needs[reader] -= 1
            if not open_needs[reader]:
                heapq.heappush(ready, reader)
    rest = sorted(set(range(len(nodes))) - set(order))
    order += rest
    return order if order != list(range(len(nodes))) else None


def _read_names(node: NodeProto) -> set[str]:
    """Tensors that a node reads, through its subgraphs too."""
    names = {name for name in node.input if name}
    for _, _, graph in subgraphs(node):
        made = {name for inner in graph.node for name in inner.output}
        made |= {value.name for value in (*graph.input, *graph.initializer)}
        read = {output.name for output in graph.output}
        for inner in graph.node:
            read |= _read_names(inner)
        names |= read - made
    return names


def _check_external_data(model: LoadedModel) -> None:
    sizes: dict[str, int] = {}
    for tensor in tensors(model.proto):
        if tensor.data_location != TensorProto.EXTERNAL:
            continue
        where = f"tensor '{tensor.name}'"
        try:
            info = ExternalDataInfo(tensor)
        except ValueError as error:
            raise ModelError(f"{where}: external data; {first_line(error)}") from error
        if model.base_dir is None:
            raise ModelError(f"{where}: external data of a model without a folder; give a path, or base_dir")
        if not info.location:
            raise ModelError(f"{where}: external data without a location")
        if info.location not in sizes:
            sizes[info.location] = _external_size(where, model.base_dir, info.location)
        offset, size = int(info.offset or 0), sizes[info.location]
        needed = _tensor_bytes(tensor)
        length = int(info.length) if info.length else needed
        if length != needed or offset < 0 or offset + length > size:
            raise ModelError(
                f"{where}: external data {info.location!r}; got {length} bytes at {offset} of {size}, expected {needed}"
            )


def _locations(model: ModelProto) -> frozenset[str]:
    external = (tensor for tensor in tensors(model) if tensor.data_location == TensorProto.EXTERNAL)
    return frozenset(ExternalDataInfo(tensor).location for tensor in external)


def _external_size(where: str, base_dir: Path, location: str) -> int:
    path = (base_dir / location).resolve()
    if os.path.isabs(location) or not path.is_relative_to(base_dir.resolve()):
        raise ModelError(f"{where}: external data {location!r} lies outside the model's folder")
    if not path.is_file():
        raise ModelError(f"{where}: external data file {location!r} is missing")
    return path.stat().st_size


def _tensor_bytes(tensor: TensorProto) -> int:
    count = int(np.prod(tensor.dims, dtype=np.int64))
    name = TensorProto.DataType.Name(tensor.data_type)
    bits = {"INT4": 4, "UINT4": 4, "FLOAT4E2M1": 4, "INT2": 2, "UINT2": 2}.get(name)
    if bits:
        return -(-count * bits // 8)
    return count * onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize


def _check_convolutions(model: ModelProto) -> None:
    """onnx's checker does not compare a Conv's weights with its other inputs.  model: after shape inference."""
    shapes = {tensor.name: tuple(tensor.dims) for tensor in model.graph.initializer}
    for value in (*model.graph.value_info, *model.graph.input):
        if value.type.tensor_type.HasField("shape"):
            shapes.setdefault(
                value.name,
                tuple(dim.dim_value if dim.HasField("dim_value") else None for dim in value.type.tensor_type.shape.dim),
            )
    for node in model.graph.node:
        if not is_op(node, "Conv"):
            continue
        x, w = shapes.get(node.input[0]), shapes.get(node.input[1])
        group = next((a.i for a in node.attribute if a.name == "group"), 1)
        where = f"Conv '{node.name or node.output[0]}'"
        if w is not None and None not in w:
            if len(w) < 3 or group < 1 or w[0] % group:
                raise ModelError(f"{where}: weights; got shape {list(w)}, expected one that fits group {group}")
            if x is not None and (len(x) != len(w) or x[1] not in (None, w[1] * group)):
                raise ModelError(f"{where}: weights {list(w)}, group {group}; got an input of shape {list(x)}, "
                                 f"expected {w[1] * group} channels and rank {len(w)}")  # fmt: skip
            bias = shapes.get(node.input[2]) if len(node.input) > 2 and node.input[2] else None
            if bias is not None and bias not in ((w[0],), (None,)):
                raise ModelError(f"{where}: bias; got shape {list(bias)}, expected [{w[0]}]")


def _typed_values(model: ModelProto):
    return (value for value in (*model.graph.input, *model.graph.output) if value.type.HasField("tensor_type"))


def _fill_missing_shapes(model: ModelProto) -> None:
    """Shapes for graph inputs and outputs that have none, which the checker refuses and every runtime accepts."""
    inferred = infer_shapes(model)
    known = {value.name: value for value in inferred.graph.output} if inferred is not None else {}
    for value in _typed_values(model):
        if not value.type.tensor_type.HasField("shape"):
            if value.name in known and known[value.name].type.tensor_type.HasField("shape"):
                value.CopyFrom(known[value.name])
            else:
                value.type.tensor_type.shape.SetInParent()


def _check_with_stand_ins(model: ModelProto, full: bool) -> None:
    """Check a model whose external data is elsewhere: the checker only asks whether the files exist."""
    probe = ModelProto()
    probe.CopyFrom(model)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "weights").touch()
        for tensor in tensors(probe):
            if tensor.data_location == TensorProto.EXTERNAL:
                del tensor.external_data[:]
                tensor.external_data.add(key="location", value="weights")
        path = Path(folder, "model.onnx")
        path.write_bytes(probe.SerializeToString())
        onnx.checker.check_model(str(path), full_check=full)


def _place_external_data(model: ModelProto, base_dir: Path, out: Path, created: list[Path]) -> None:
    """Have every data file that the model refers to beside `out`; adapt locations where names are taken."""
    folder = out.resolve().parent
    if folder == base_dir.resolve():
        return
    places: dict[str, str] = {}
    for tensor in tensors(model):
        if tensor.data_location != TensorProto.EXTERNAL:
            continue
        location = ExternalDataInfo(tensor).location
        if location not in places:
            places[location] = _place_file((base_dir / location).resolve(), folder, location, out.stem, created)
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = places[location]


def _place_file(source: Path, folder: Path, location: str, stem: str, created: list[Path]) -> str:
    target, wanted, number = folder / location, Path(location).name, 0
    while target.exists():
        if _same_content(source, target):
            return location
        number += 1
        location = f"{stem}-{number}-{wanted}"
        target = folder / location
    for parent in reversed(target.relative_to(folder).parents):
        if not (folder / parent).exists():
            (folder / parent).mkdir()
            created.append(folder / parent)
    created.append(target)
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
    return location


def _same_content(first: Path, second: Path) -> bool:
    """Whether two files are one, or one the copy that `_place_file` made of the other."""
    a, b = first.stat(), second.stat()
    return os.path.samestat(a, b) or (a.st_size, a.st_mtime_ns) == (b.st_size, b.st_mtime_ns)


def _move_to_external(
    model: ModelProto, names: set[str], out: Path, taken: frozenset[str], created: list[Path]
) -> None:
    """Write the constants `names` to a data file of `out`'s name, but none in `taken`, and refer to it."""
    moving = [
        tensor
        for tensor in tensors(model)
        if tensor.name in names and len(tensor.raw_data) >= EXTERNAL_THRESHOLD_BYTES
    ]
    if not moving:
        return
    location, number = f"{out.name}.data", 0
    while location in taken or location in _locations(model):
        number += 1
        location = f"{out.name}.{number}.data"
    data = b"".join(tensor.raw_data for tensor in moving)
    path = out.parent / location
    if not path.exists():
        created.append(path)
    write_atomically(path, data)
    offset = 0
    for tensor in moving:
        length = len(tensor.raw_data)
        set_external_data(tensor, location, offset, length)
        tensor.ClearField("raw_data")
        offset += length


def _discard(paths: list[Path]) -> None:
    for path in reversed(paths):
        with suppress(OSError):
            path.rmdir() if path.is_dir() else path.unlink()

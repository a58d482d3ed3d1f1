# SPDX-License-Identifier: Apache-2.0
"""Reading and checking models.  Weights in external files are read one at a time, and only when asked for."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np
import onnx
from google.protobuf.message import DecodeError, EncodeError
from onnx import GraphProto, ModelProto, TensorProto, ValueInfoProto, helper, numpy_helper

from convpool.errors import ModelError, first_line
from convpool.ir import notes, schema
from convpool.ir.domains import in_default_domain
from convpool.ir.elsewhere import infer_elsewhere
from convpool.ir.external import check_external_data, external_size, is_external, read_in
from convpool.ir.protos import is_op, label, opset_of, tensors
from convpool.ir.sanity import check_functions, check_strings, check_tensors, check_types
from convpool.ir.toposort import in_order


@dataclass
class LoadedModel:
    """A model with the folder its external data lies in (None: it has none) and the bytes of all its files."""

    proto: ModelProto
    base_dir: Path | None
    size_bytes: int
    inferred: ModelProto | None = None
    """The model as it was loaded, after shape inference."""
    source: Path | bytes | None = None
    """What the model was parsed from, if not from memory."""
    path: Path | None = None
    """The file that it comes from, also once it has changed."""
    data_files: frozenset[str] = frozenset()
    """Locations of the external data that the model came with, relative to `base_dir`."""

    def read(self, tensor: TensorProto) -> np.ndarray:
        """The value of a tensor; one in an external file is read from there and not kept."""
        if not is_external(tensor) or self.base_dir is None:
            return numpy_helper.to_array(tensor)
        copy = TensorProto()
        copy.CopyFrom(tensor)
        read_in(copy, self.base_dir)
        return numpy_helper.to_array(copy)

    @property
    def weight_files(self) -> list[Path]:
        """The files of its external data."""
        return [self.base_dir / name for name in self.data_files] if self.base_dir is not None else []

    @property
    def has_external_data(self) -> bool:
        """Whether any tensor lies in an external file."""
        return bool(self.data_files)


def load(source: object, base_dir: Path | None = None) -> LoadedModel:
    """Load and check a model: a path, serialised bytes, a ModelProto (used as it is, not copied), a gs.Graph, or what this gave.

    base_dir: folder of the external data of a model that is no path.  Raises ModelError.
    """
    if isinstance(source, LoadedModel):
        return source
    if isinstance(source, ModelProto):
        model = LoadedModel(source, base_dir, source.ByteSize())
    elif isinstance(source, bytes):
        model = LoadedModel(_parse(source, "the bytes given"), base_dir, len(source), source=source)
    elif isinstance(source, (str, os.PathLike)):
        path = Path(source)
        data = _read_file(path)
        model = LoadedModel(_parse(data, str(path)), path.absolute().parent, len(data), source=path, path=path)
    else:
        model = LoadedModel(_from_graphsurgeon(source), base_dir, 0)
    check_strings(model.proto)
    model.proto = in_default_domain(model.proto)
    _check_versions(model.proto)
    check_functions(model.proto)
    check_types(model.proto)
    check_tensors(model.proto)
    model.data_files = check_external_data(model.proto, model.base_dir)
    model.size_bytes = (model.size_bytes or model.proto.ByteSize()) + external_size(model.proto)
    model.proto = in_order(model.proto)
    _check_convolutions(model.proto.graph, inferred=False)
    model.inferred = infer_shapes(model.proto)
    check(model, "the model")
    if model.inferred is not None:
        _check_convolutions(model.inferred.graph, inferred=True)
    return model


def check(loaded: LoadedModel, what: str, full: bool = False, inferred: ModelProto | None = None) -> None:
    """onnx's checker, also for a model whose external data is not loaded.  Raises ModelError.

    inferred: a model with the same inputs and outputs, shapes inferred; default: as `loaded` has it.
    """
    schema.register_schema()
    probe = model = loaded.proto
    if any(not value.type.tensor_type.HasField("shape") for value in _typed_values(model)):
        probe = ModelProto()
        probe.CopyFrom(model)
        _fill_missing_shapes(probe, inferred or loaded.inferred)
    try:
        if loaded.has_external_data:
            _check_with_stand_ins(probe, full)
        else:
            onnx.checker.check_model(probe, full_check=full)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError, ValueError) as error:
        raise ModelError(f"{what} is not valid ONNX: {first_line(error)}") from error


def passes_full_check(model: LoadedModel) -> bool:
    """Whether onnx's checker with strict shape inference accepts the model."""
    try:
        check(model, "", full=True)
    except ModelError:
        return False
    return True


def infer_shapes(model: ModelProto) -> ModelProto | None:
    """The model with inferred shapes, node for node; None where inference fails or the model is too large for it.

    Shapes follow from the model's inputs; others that the file notes count where `convpool.ir.notes` says.
    Raises ModelError where it would end the process.
    """
    schema.register_schema()
    probe = ModelProto()
    probe.CopyFrom(model)
    for tensor in probe.graph.initializer:
        if tensor.data_location != TensorProto.EXTERNAL and len(tensor.raw_data) > 2**14:
            tensor.ClearField("raw_data")  # no shape depends on the values of a large tensor
            tensor.data_location = TensorProto.EXTERNAL
    taken = notes.take(probe)
    result = None
    try:
        result = infer_elsewhere(probe)
        if notes.fill_in(probe, result, taken):
            result = infer_elsewhere(probe)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError, RuntimeError, ValueError, EncodeError):
        pass  # without the notes that do not fit, or without shapes
    return result


def at_shapes(model: ModelProto, shapes: Mapping[str, Sequence[int]]) -> ModelProto:
    """A copy of the model whose inputs have the shapes given."""
    fixed = ModelProto()
    fixed.CopyFrom(model)
    for value in fixed.graph.input:
        if value.name in shapes:
            elem_type = value.type.tensor_type.elem_type
            value.CopyFrom(helper.make_tensor_value_info(value.name, elem_type, list(shapes[value.name])))
    return fixed


def _read_file(path: Path) -> bytes:
    if os.path.isdir(path):  # never raises, as for a name too long
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


def _check_convolutions(
    graph: GraphProto, *, inferred: bool, outer: Mapping[str, tuple[int | None, ...]] = MappingProxyType({})
) -> None:
    """onnx's checker does not compare a Conv's weights with its other inputs; old onnx and onnxruntime end the process on some.

    inferred: shapes are those of value_info too.  outer: shapes that are known around a branch or body.
    """
    shapes = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    for value in (*graph.value_info, *graph.input) if inferred else () if outer else graph.input:
        if value.type.tensor_type.HasField("shape"):
            dims = value.type.tensor_type.shape.dim
            known = (dim.dim_value if dim.HasField("dim_value") and dim.dim_value >= 0 else None for dim in dims)
            shapes.setdefault(value.name, tuple(known))
    shapes = {**outer, **shapes}
    for node in graph.node:
        for attribute in node.attribute:
            for body in (attribute.g, *attribute.graphs) if attribute.HasField("g") else attribute.graphs:
                _check_convolutions(body, inferred=inferred, outer=shapes)
        if not is_op(node, "Conv") or len(node.input) < 2:
            continue
        x, w = shapes.get(node.input[0]), shapes.get(node.input[1])
        group = next((a.i for a in node.attribute if a.name == "group"), 1)
        where = f"Conv '{label(node)}'"
        if w is not None and None not in w:
            if len(w) < 3 or group < 1 or w[0] % group:
                raise ModelError(f"{where}: weights; got shape {list(w)}, expected one that fits group {group}")
            if x is not None and (len(x) != len(w) or x[1] not in (None, w[1] * group)):
                raise ModelError(
                    f"{where}: weights {list(w)}, group {group}; got an input of shape {list(x)}, "
                    f"expected {w[1] * group} channels and rank {len(w)}"
                )
            bias = shapes.get(node.input[2]) if len(node.input) > 2 and node.input[2] else None
            if bias is not None and bias not in ((w[0],), (None,)):
                raise ModelError(f"{where}: bias; got shape {list(bias)}, expected [{w[0]}]")


def _typed_values(model: ModelProto) -> Iterator[ValueInfoProto]:
    return (value for value in (*model.graph.input, *model.graph.output) if value.type.HasField("tensor_type"))


def _fill_missing_shapes(model: ModelProto, inferred: ModelProto | None) -> None:
    """Shapes for graph inputs and outputs that have none, which the checker refuses and every runtime accepts.

    They are those of `inferred`, and where that has none either, of the model's own inference.
    """
    missing = [value for value in _typed_values(model) if not value.type.tensor_type.HasField("shape")]
    shaped = _shaped_outputs(inferred)
    if any(value.name not in shaped for value in missing):
        shaped = _shaped_outputs(infer_shapes(model)) | shaped
    for value in missing:
        if value.name in shaped:
            value.CopyFrom(shaped[value.name])
        else:
            value.type.tensor_type.shape.SetInParent()


def _shaped_outputs(model: ModelProto | None) -> dict[str, ValueInfoProto]:
    outputs = model.graph.output if model is not None else ()
    return {value.name: value for value in outputs if value.type.tensor_type.HasField("shape")}


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

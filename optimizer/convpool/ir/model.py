# SPDX-License-Identifier: Apache-2.0
"""Reading and checking models, and the sizes of their inputs: those left open, those given, and the model with these.  Weights in
external files are read one at a time, and only when asked for.

onnx's checker and the runtimes are written in C++; what they make of a damaged file differs from version to version, up to a
crash.  Whatever can be told without them is refused here.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property
from numbers import Integral
from pathlib import Path
from types import MappingProxyType

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from onnx import AttributeProto, FunctionProto, GraphProto, ModelProto, TensorProto, ValueInfoProto, helper, numpy_helper

from convpool.errors import ModelError, OptionError, first_line
from convpool.ir import protos, schema
from convpool.ir.files import Stamp, check_external_data, external_size, is_external, read_in, serialize, tensor_bytes
from convpool.ir.index import Dim, Evaluate, Scope, index_model, with_shapes_folded
from convpool.ir.inference import INFERENCE_ERRORS, fill_gaps, infer_elsewhere, infer_shapes, take, without_large_values
from convpool.ir.inlining import check_functions

SUGGESTED_SIZE = 224
"""Stands for open sizes but the first in a command that is suggested."""
MAX_ROUNDS = 32
"""Most times that a model is inferred again: a chain may read a shape that an earlier one has made known."""


OTHER_FLOATS = (*protos.HALF_TYPES, TensorProto.DOUBLE)
TYPE_ATTRIBUTES = ("to", "dtype", "output_dtype", "output_datatype")


@dataclass
class Inference:
    """A model after shape inference, None where that fails: by itself, and, once it is indexed, with the shapes that follow from
    constants too."""

    plain: ModelProto | None
    folded: ModelProto | None = None


@dataclass
class LoadedModel:
    """A model with the folder its external data lies in (None: it has none) and the bytes of all its files (0: nobody asks)."""

    proto: ModelProto
    base_dir: Path | None = None
    size_bytes: int = 0
    source: Path | bytes | None = None
    """The file or bytes that the model was parsed from, if not from memory."""
    path: Path | None = None
    """The file that it comes from, also once it has changed."""
    data_files: Mapping[str, Stamp] = field(default_factory=dict)
    """The files of the external data that the model came with, by their locations relative to `base_dir`."""

    @cached_property
    def inference(self) -> Inference:
        """The model's shapes, as they are until `changed`.  Copies with the same tensors share them."""
        return Inference(infer_shapes(self.proto))

    @property
    def inferred(self) -> ModelProto | None:
        """The model after shape inference; None where that fails."""
        return self.inference.plain

    def changed(self) -> None:
        """Infer shapes again when they are asked for next: the model has other tensors now."""
        self.__dict__.pop("inference", None)

    def index(self, evaluate: Evaluate) -> list[Scope]:
        """Index every scope, outer ones first, with the shapes that follow from constants too."""
        if self.inference.folded is not None:
            return index_model(self.proto, self.read, evaluate, self.inference.folded)
        inferred, before = self.inferred, None
        for _ in range(MAX_ROUNDS + 1):
            scopes = index_model(self.proto, self.read, evaluate, inferred)
            self.inference.folded = inferred
            if scopes[0].infos == before or (folded := with_shapes_folded(self.proto, scopes[0])) is None:
                break
            before, inferred = scopes[0].infos, infer_shapes(folded)
            if inferred is None:
                break
        return scopes

    def read(self, tensor: TensorProto) -> np.ndarray:
        """The value of a tensor; one in an external file is read from there and not kept."""
        if tensor.data_location != TensorProto.EXTERNAL or self.base_dir is None:
            return numpy_helper.to_array(tensor)
        whole = deepcopy(tensor)
        read_in(whole, self.base_dir)
        return numpy_helper.to_array(whole)

    def unchanged_bytes(self) -> bytes | None:
        """The bytes that it was parsed from, if they give the model as it is: a caller may have changed it, or the file."""
        if self.source is None:
            return None
        try:
            data = self.source if isinstance(self.source, bytes) else _read_file(self.source)
            same = protos.in_order(protos.in_default_domain(_parse(data, str(self.path)))) == self.proto
        except ModelError:
            return None
        return data if same else None

    def check_data(self) -> None:
        """Raise ModelError for a data file that has been written since the model was loaded: old and new weights may not mix."""
        for path, (location, stamp) in zip(self.weight_files, self.data_files.items(), strict=True):
            with suppress(OSError):  # whoever reads it has an error of its own
                status = path.stat()
                if (status.st_size, status.st_mtime_ns) != stamp:
                    got = "got shorter" if status.st_size < stamp[0] else "has changed"
                    raise ModelError(f"external data {location!r}: {got} since the model was loaded")

    def in_float32(self) -> LoadedModel:
        """A copy in which every half-precision and double tensor, type and attribute is float32, as a reference to judge by; its
        external data is read in where it has to be converted."""
        result = deepcopy(self.proto)
        for tensor in (*protos.tensors(result), *protos.sparse_values(result)):
            if tensor.data_type in OTHER_FLOATS:
                tensor.CopyFrom(numpy_helper.from_array(self.read(tensor).astype(np.float32), tensor.name))
        for value in (value for holder in protos.holders(result) for value in _values(holder)):
            kind = value.type
            while (which := kind.WhichOneof("value")) in ("sequence_type", "optional_type"):
                kind = getattr(kind, which).elem_type
            if which == "tensor_type" and kind.tensor_type.elem_type in OTHER_FLOATS:
                kind.tensor_type.elem_type = TensorProto.FLOAT
        attributes = [attribute for node in protos.model_nodes(result) for attribute in node.attribute]
        attributes += [default for function in result.functions for default in function.attribute_proto]
        names = {*TYPE_ATTRIBUTES}
        while more := {item.ref_attr_name for item in attributes if item.name in names and item.ref_attr_name} - names:
            names |= more
        for attribute in attributes:
            if attribute.name in names and attribute.type == AttributeProto.INT and attribute.i in OTHER_FLOATS:
                attribute.i = TensorProto.FLOAT
        return LoadedModel(result, self.base_dir)

    @property
    def float_types(self) -> set[int]:
        """The floating-point types among its stored tensors and its inputs and outputs."""
        found = {tensor.data_type for tensor in (*protos.tensors(self.proto), *protos.sparse_values(self.proto))}
        found |= {value.type.tensor_type.elem_type for value in (*self.proto.graph.input, *self.proto.graph.output)}
        return found & {TensorProto.FLOAT, *OTHER_FLOATS}

    @property
    def weight_files(self) -> list[Path]:
        return [self.base_dir / name for name in self.data_files] if self.base_dir is not None else []


def load(source: object, base_dir: Path | None = None) -> LoadedModel:
    """Load and check a model: a path, serialised bytes, a ModelProto (used as it is, not copied), a gs.Graph, or what this gave.
    base_dir: folder of the external data of a model that is no path.  Raises ModelError."""
    if isinstance(source, LoadedModel):
        return source
    if isinstance(source, ModelProto):
        model = LoadedModel(source, base_dir)
    elif isinstance(source, bytes):
        model = LoadedModel(_parse(source, "the bytes given"), base_dir, len(source), source=source)
    elif isinstance(source, (str, os.PathLike)):
        path, data = Path(source), _read_file(Path(source))
        model = LoadedModel(_parse(data, str(path)), path.absolute().parent, len(data), source=path, path=path)
    else:
        graphsurgeon = sys.modules.get("onnx_graphsurgeon")  # whoever holds a gs.Graph has imported it
        if graphsurgeon is None or not isinstance(source, graphsurgeon.Graph):
            raise ModelError(f"model: got {type(source).__name__}, expected a path, bytes, ModelProto or gs.Graph")
        model = LoadedModel(graphsurgeon.export_onnx(source), base_dir)
    model.size_bytes = model.size_bytes or len(serialize(model.proto))
    check_strings(model.proto)
    model.proto = protos.in_default_domain(model.proto)
    newest = onnx.defs.onnx_opset_version()
    for part in (model.proto, *model.proto.functions):
        if protos.opset_of(part.opset_import) > newest:
            raise ModelError(f"model: opset; got {protos.opset_of(part.opset_import)}, expected at most {newest}; update onnx")
    check_functions(model.proto)
    schema.check_meaning(model.proto)
    check_types(model.proto)
    check_tensors(model.proto)
    model.data_files = check_external_data(model.proto, model.base_dir)
    model.size_bytes += external_size(model.proto)
    model.proto = protos.in_order(model.proto)
    _check_convolutions(model.proto.graph, inferred=False)
    check(model, "the model")
    if model.inferred is not None:
        _check_convolutions(model.inferred.graph, inferred=True)
    return model


def _read_file(path: Path) -> bytes:
    if os.path.isdir(path):  # never raises, as for a name too long
        raise ModelError(f"{path}: a folder; expected an ONNX file")
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise ModelError(f"{path}: no such file") from error
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read; {getattr(error, 'strerror', None) or error}") from error


_TEXT = "ONNX as text, expected its binary form; onnx.load(file, format={!r}) and onnx.save convert it"
_TEXTS = {
    rb"version https://git-lfs": "a pointer of Git LFS, expected an ONNX model; get it with git lfs pull",
    rb'\s*{\s*"': _TEXT.format("json"),
    rb"\s*ir_version": _TEXT.format("textproto"),
    rb"\s*<\s*ir_version": _TEXT.format("onnxtxt"),
}
"""The beginnings of files that hold no binary model, with what these are."""


def _parse(data: bytes, where: str) -> ModelProto:
    if not data:
        raise ModelError(f"{where}: empty; expected an ONNX model")
    model = ModelProto()
    try:
        model.ParseFromString(data)
    except (DecodeError, RuntimeError) as error:
        what = next((what for start, what in _TEXTS.items() if re.match(start, data)), "truncated, or not an ONNX model")
        raise ModelError(f"{where}: {what}") from error
    if not model.ir_version or not model.HasField("graph"):
        raise ModelError(f"{where}: not an ONNX model; it has no IR version or no graph")
    return model


def check_strings(model: ModelProto) -> None:
    """Raise ModelError for a name that is no UTF-8: protobuf lets it through, and gives bytes or raises when it is read."""
    try:
        wrong = next((text for text in _strings(model) if isinstance(text, bytes)), None)
    except UnicodeDecodeError as error:
        wrong = error.object
    if wrong is not None:
        raise ModelError(f"model: a name; got the bytes {bytes(wrong)[:40]!r}, expected UTF-8")


def _strings(model: ModelProto) -> Iterator[str | bytes]:
    for holder in protos.holders(model):
        yield holder.name
        if isinstance(holder, FunctionProto):
            yield from (holder.domain, holder.overload, *holder.input, *holder.output, *holder.attribute)
        else:
            yield from (note.tensor_name for note in holder.quantization_annotation)
            yield from (e.value for note in holder.quantization_annotation for e in note.quant_parameter_tensor_names)
        for value in _values(holder):
            yield value.name
            yield from (dim.dim_param for dim in value.type.tensor_type.shape.dim)
    for node in protos.model_nodes(model):
        yield from (node.name, node.op_type, node.domain, node.overload, *node.input, *node.output)
        yield from (text for item in node.attribute for text in (item.name, item.ref_attr_name))
        yield from (spec.tensor_name for item in node.device_configurations for spec in item.sharding_spec)
    for tensor in (*protos.tensors(model), *protos.sparse_values(model)):
        yield from (tensor.name, *(text for entry in tensor.external_data for text in (entry.key, entry.value)))
    yield from (entry.domain for part in (model, *model.functions) for entry in part.opset_import)


def check_types(model: ModelProto) -> None:
    """Raise ModelError for a tensor of an element type that onnx does not have, or of a negative size."""
    known = set(TensorProto.DataType.values())
    for holder in protos.holders(model):
        for value in _values(holder):
            if (found := value.type.tensor_type.elem_type) not in known:
                raise ModelError(f"tensor '{value.name}': element type; got {found}, expected one of ONNX's")
            sizes = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
            if any(size < -1 for size in sizes):  # some write -1 for an open one
                raise ModelError(f"tensor '{value.name}': shape; got {sizes}, expected no negative size")


def _values(holder: GraphProto | FunctionProto) -> list[ValueInfoProto]:
    if isinstance(holder, FunctionProto):
        return list(holder.value_info)
    return [*holder.input, *holder.output, *holder.value_info]


def check_tensors(model: ModelProto) -> None:
    """Raise ModelError for a stored tensor of an unknown type, whose data does not fill its shape, or of two values."""
    for tensor in protos.tensors(model):
        needed, where = tensor_bytes(tensor), f"tensor '{tensor.name}'"
        if tensor.HasField("segment"):
            raise ModelError(f"{where}: data; got a segment of them, expected all")
        if is_external(tensor):
            continue
        if tensor.HasField("raw_data"):
            if needed is None or len(tensor.raw_data) != needed:
                expected = "strings" if needed is None else f"{needed} for {list(tensor.dims)}"
                raise ModelError(f"{where}: data; got {len(tensor.raw_data)} bytes, expected {expected}")
            continue
        elements, count = math.prod(tensor.dims), len(getattr(tensor, helper.tensor_dtype_to_field(tensor.data_type)))
        stored = elements if needed is None or 2 * needed > elements + 1 else needed  # numbers of at most 4 bits share one
        if count != (2 * elements if tensor.data_type in (TensorProto.COMPLEX64, TensorProto.COMPLEX128) else stored):
            raise ModelError(f"{where}: data; got {count} stored values, expected {elements} for {list(tensor.dims)}")
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    for graph in protos.graphs_within(model.graph)[1:]:
        for tensor in graph.initializer:  # onnxruntime takes the outer one, against what a body's names mean elsewhere
            if not _are_equal(constants.get(tensor.name, tensor), tensor):
                raise ModelError(f"tensor '{tensor.name}': two values, in the main graph and in a body; expected one")


def _are_equal(first: TensorProto, second: TensorProto) -> bool:
    """True for tensors of the same bytes, whichever fields hold them and whatever is noted beside."""
    numbers = first.data_type == second.data_type != TensorProto.STRING and first.dims == second.dims
    stored = numbers and not is_external(first) and not is_external(second)
    return first == second or stored and numpy_helper.to_array(first).tobytes() == numpy_helper.to_array(second).tobytes()


def _check_convolutions(
    graph: GraphProto, *, inferred: bool, outer: Mapping[str, tuple[int | None, ...]] = MappingProxyType({})
) -> None:
    """onnx's checker does not compare a Conv's weights with its other inputs; old onnx and onnxruntime end the process on some.
    inferred: shapes are those of value_info too.  outer: shapes that are known around a branch or body."""
    shapes = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    for value in (*graph.value_info, *graph.input) if inferred else () if outer else graph.input:
        if value.type.tensor_type.HasField("shape"):
            shapes.setdefault(value.name, tuple(dim if isinstance(dim, int) else None for dim in dims_of(value)))
    made = {name for node in graph.node for name in node.output}  # a graph around may give another one the same name later
    shapes = {**{name: shape for name, shape in outer.items() if name not in made}, **shapes}
    for node in graph.node:
        for _, _, body in protos.subgraphs(node):
            _check_convolutions(body, inferred=inferred, outer=shapes)
    for node in protos.ops_of(graph.node, "Conv"):
        if len(node.input) < 2:
            continue
        x, w = shapes.get(node.input[0]), shapes.get(node.input[1])
        group = next((a.i for a in node.attribute if a.name == "group"), 1)
        if w is None or None in w:
            continue
        bias = shapes.get(node.input[2]) if len(node.input) > 2 and node.input[2] else None
        if len(w) < 3 or group < 1 or w[0] % group:
            wrong = f"weights; got shape {list(w)}, expected one that fits group {group}"
        elif x is not None and (len(x) != len(w) or x[1] not in (None, w[1] * group)):
            wrong = f"weights {list(w)}, group {group}; got an input of shape {list(x)}, "
            wrong += f"expected {w[1] * group} channels and rank {len(w)}"
        elif bias is not None and bias not in ((w[0],), (None,)):
            wrong = f"bias; got shape {list(bias)}, expected [{w[0]}]"
        else:
            continue
        raise ModelError(f"Conv '{protos.label(node)}': {wrong}")


def check(loaded: LoadedModel, what: str, full: bool = False, before: ModelProto | None = None) -> None:
    """onnx's checker, also for a model whose external data is not loaded.  Raises ModelError.

    full: with strict shape inference, which another process does, since a model may end it; of an original with its notes and
    without.
    before: of a result, the original after shape inference.  What that notes wrongly, where inference knew nothing, is no fault
    of the result.
    """
    shaped = _shaped_outputs(loaded.inferred) | _shaped_outputs(before)
    probe = without_large_values(loaded.proto)
    fill_gaps(probe, shaped)
    try:
        bare = deepcopy(probe) if full else probe
        for tensor in protos.tensors(bare):
            if tensor.data_location == TensorProto.EXTERNAL:  # onnx's checker asks only whether there are such files
                tensor.CopyFrom(TensorProto(name=tensor.name, data_type=tensor.data_type, dims=[0]))
        onnx.checker.check_model(bare)
        if full:
            if before is None:
                infer_elsewhere(probe, strict=True)
            if before or loaded.inferred:
                take(probe)
                infer_elsewhere(probe, strict=True)
    except INFERENCE_ERRORS as error:
        raise ModelError(f"{what} is not valid ONNX: {first_line(error)}") from error


def passes_full_check(model: LoadedModel) -> bool:
    """Return True if onnx's checker with strict shape inference accepts the model, with its notes and, as a result, without."""
    with suppress(ModelError):
        check(model, "", full=True)
        return True
    return False


def _shaped_outputs(model: ModelProto | None) -> dict[str, ValueInfoProto]:
    outputs = model.graph.output if model is not None else ()
    return {value.name: value for value in outputs if value.type.tensor_type.HasField("shape")}


Shapes = Mapping[str, Sequence[int]]
"""Shapes by input."""


def feeds(model: ModelProto) -> list[ValueInfoProto]:
    """The graph inputs that a caller must give: those without an initializer."""
    initializers = {tensor.name for tensor in model.graph.initializer}
    initializers |= {tensor.values.name for tensor in model.graph.sparse_initializer}
    return [value for value in model.graph.input if value.name not in initializers]


def dims_of(value: ValueInfoProto) -> list[Dim]:
    """The sizes of an input, a name or None for one that is open."""
    dims = value.type.tensor_type.shape.dim
    fixed = [dim.HasField("dim_value") and dim.dim_value >= 0 for dim in dims]  # some write -1 for an open one
    return [dim.dim_value if known else dim.dim_param or None for dim, known in zip(dims, fixed, strict=True)]


def fit_shapes(values: list[ValueInfoProto], shapes: Shapes, what: str = "input shape") -> dict[str, list[int]]:
    """Shapes given for some of the inputs `values`, as numbers.  Raises OptionError for some that do not fit.  what: they are."""
    wanted = {value.name: value for value in values}
    for name, shape in shapes.items():
        if name not in wanted:
            raise OptionError(f"{what}: no input '{name}'; expected one of {', '.join(wanted) or 'none'}")
        if not all(isinstance(size, Integral) and 1 <= size < 2**63 for size in shape):
            raise OptionError(f"{what} of '{name}'; got {list(shape)}, expected positive sizes")
        if not wanted[name].type.HasField("tensor_type"):
            raise OptionError(f"{what}: input '{name}'; got a shape, expected none: it is no tensor")
        check_shape(wanted[name], shape, what)
    return {name: [int(size) for size in shape] for name, shape in shapes.items()}


def fitting(values: list[ValueInfoProto], shapes: Shapes) -> dict[str, Sequence[int]]:
    """Return those of `shapes`, given for inputs by name, that fit one of the inputs `values`."""
    return {value.name: shapes[value.name] for value in values if value.name in shapes and _fits(value, shapes[value.name])}


def check_shape(value: ValueInfoProto, shape: Sequence[int], what: str) -> None:
    """Raise OptionError for a shape that does not fit an input.  what: it is."""
    if not _fits(value, shape):
        shown = [dim if dim is not None else "?" for dim in dims_of(value)]
        raise OptionError(f"{what}: input '{value.name}'; got shape {list(shape)}, expected {shown}")


def _fits(value: ValueInfoProto, shape: Sequence[int]) -> bool:
    if not value.type.tensor_type.HasField("shape"):
        return True
    dims = dims_of(value)
    return len(dims) == len(shape) and all(not isinstance(dim, int) or dim == size for dim, size in zip(dims, shape, strict=True))


def with_fixed(original: LoadedModel, fixed: Shapes, given: Shapes) -> tuple[LoadedModel, dict[str, Sequence[int]]]:
    """The model with inputs of fixed sizes, itself where none are new; and its inputs' known shapes, those given among them.

    Raises ModelError or OptionError.
    """
    inputs = feeds(original.proto)
    sizes, shapes = fit_shapes(inputs, fixed, "fix shape"), fit_shapes(inputs, given)
    known = static_shapes(inputs)
    if all(known.get(name) == shape for name, shape in sizes.items()):
        return original, {**shapes}
    proto = with_sizes(original.proto, sizes)
    inputs = feeds(proto)
    shapes = fit_shapes(inputs, shapes) | static_shapes(inputs)
    model = load(proto, original.base_dir)
    model.path = original.path
    return model, {**shapes}


def static_shapes(inputs: Sequence[ValueInfoProto]) -> dict[str, list[int]]:
    """The shapes of those of these inputs whose sizes are all known, by name."""
    kinds = {value.name: value.type.tensor_type for value in inputs}
    shapes = {name: [dim.dim_value for dim in kind.shape.dim] for name, kind in kinds.items() if kind.HasField("shape")}
    return {name: sizes for name, sizes in shapes.items() if all(size > 0 for size in sizes)}


def suggested(model: ModelProto, known: Mapping[str, Sequence[int]]) -> dict[str, list[int]]:
    """Shapes for inputs with open sizes: those known, else 1 for the first and its name; none for an input of size 0."""
    shapes = {value.name: value.type.tensor_type.shape.dim for value in feeds(model)}
    batches = {dims[0].dim_param for dims in shapes.values() if dims} - {""}
    found = {}
    for name, dims in shapes.items():
        is_empty = any(dim.HasField("dim_value") and dim.dim_value == 0 for dim in dims)
        if any(dim.dim_value <= 0 for dim in dims) and not is_empty:
            sizes = [1 if not axis or dim.dim_param in batches else SUGGESTED_SIZE for axis, dim in enumerate(dims)]
            found[name] = list(known.get(name) or [max(dim.dim_value, 0) or n for dim, n in zip(dims, sizes, strict=True)])
    return found


def with_sizes(model: ModelProto, shapes: Shapes) -> ModelProto:
    """A copy in which inputs have the shapes given, by name, and other tensors the sizes that follow.

    A name that stands for one size in these shapes stands for it in the other inputs too.  Sizes of outputs and in value_info,
    also in bodies, are then those that follow from the inputs: those noted for other sizes go, and names of sizes given too,
    since exporters name sizes by guess.
    """
    fixed = at_shapes(model, shapes)
    sizes: dict[str, set[int]] = {}
    for value in model.graph.input:
        for dim, size in zip(value.type.tensor_type.shape.dim, shapes.get(value.name, ()), strict=False):
            sizes.setdefault(dim.dim_param, set()).add(size)
    sizes.pop("", None)
    for value in fixed.graph.input:
        for dim in value.type.tensor_type.shape.dim:
            if len(sizes.get(dim.dim_param, ())) == 1:
                (dim.dim_value,) = sizes[dim.dim_param]
    for value in [value for holder in protos.holders(fixed) for value in _values(holder)][len(fixed.graph.input) :]:
        for dim in value.type.tensor_type.shape.dim:
            if not dim.dim_param or dim.dim_param in sizes:
                dim.Clear()
    inferred = infer_shapes(fixed)
    for dim, size in protos.noted_sizes(fixed, inferred, outputs=True) if inferred is not None else ():
        if size.HasField("dim_value"):
            dim.dim_value = size.dim_value
    return fixed


def at_shapes(model: ModelProto, shapes: Shapes) -> ModelProto:
    """A copy of the model whose inputs have the shapes given."""
    fixed = deepcopy(model)
    for value in fixed.graph.input:
        if value.name in shapes:
            kind = helper.make_tensor_type_proto(value.type.tensor_type.elem_type, list(shapes[value.name]))
            value.type.tensor_type.CopyFrom(kind.tensor_type)
    return fixed


def scopes_at(model: LoadedModel, shapes: Shapes, evaluate: Evaluate) -> list[Scope]:
    """The index of a model whose inputs have the shapes given, and whose initializers no caller replaces."""
    fixed = at_shapes(model.proto, shapes)
    protos.refill(fixed.graph.input, feeds(fixed))
    return LoadedModel(fixed, model.base_dir).index(evaluate)


def tensor_shapes(model: LoadedModel, shapes: Shapes, evaluate: Evaluate) -> dict[str, tuple[Dim, ...]]:
    """Known shapes of the main graph's tensors when its inputs have the shapes given; none where none are given."""
    if not shapes:
        return {}
    scope = scopes_at(model, shapes, evaluate)[0]
    names = {name for node in scope.nodes for name in (*node.input, *node.output) if name}
    return {name: shape for name in names if (shape := scope.info(name).shape) is not None}

# SPDX-License-Identifier: Apache-2.0
"""Shape inference: from a model's inputs and constants alone, in another process.

Other shapes in a file (value_info, the shapes of outputs and of bodies' inputs and outputs) are notes.  No runtime holds to
them, and who changes the inputs' sizes often leaves them as they were.  Nor does a runtime hold to one name of two sizes of
inputs.  So shape inference starts from a model without notes, in which each open size of an input has a name of its own.  Notes
fill in only where inference knows nothing: behind operators that it does not know and functions, and at the bounds of
bodies.  There

- none counts if any note in the model contradicts what follows from the inputs, or an input has no rank;
- only ranks count if an input has an open size;
- what a Loop's body hands to its next run has the sizes that both its begin and its end note;
- names never count.

A model that is written has no size in its notes that its inputs leave open.

onnx's shape inference is C++ that trusts the model: sizes that fit no operator end the process, by an assertion or a memory
fault, and sizes beyond memory make it run for hours.  One process serves all models, until one of them ends it.  Its results are
used, and not only its survival: what reads beside an array fails at one time and not at another."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import onnx
from google.protobuf.message import EncodeError
from onnx import GraphProto, ModelProto, TensorProto, TensorShapeProto, TypeProto, ValueInfoProto, helper, numpy_helper

from convpool.algebra.geometry import Refusal, windows
from convpool.errors import ModelError
from convpool.ir import inference_process, protos
from convpool.ir.inference_process import GROWTH_BYTES
from convpool.ir.process import EndedError, Shared
from convpool.ir.protos import give, graphs_within, is_op, known_attributes, model_nodes, ops_of, opset_of, refill, subgraphs
from convpool.ir.schema import add_functions_for_sizes, is_own
from convpool.ir.serving import FAILED, MEMORY

Notes = dict[str, ValueInfoProto]
"""Types and shapes that a graph notes of its tensors."""
POOLINGS = ("AveragePool", "LpPool", "MaxPool")
CEIL_OPSET = 22
"""The first opset in which onnx counts the windows of `ceil_mode` as runtimes do."""
MADE_UP = "unk__"
"""How names of sizes begin that shape inference makes up."""
WITHOUT_INFERENCE = ("GroupNormalization", "MeanVarianceNormalization")
"""Operators whose result has the shape of X, and whose shape onnx does not infer: an Identity stands for each meanwhile."""
SAVED = {"FusedConv": "Conv", "PRelu": "Pow", "QuickGelu": "Identity"}
UNKNOWN_SIZE = "UnknownSize"
"""No operator: it stands for one whose result's size onnx says otherwise than runtimes, so that the size is unknown."""
DISPUTED = "onnx says another shape than runtimes"
"""Note of a tensor, after shape inference, whose sizes must not be stored: onnx would find that they contradict its own."""
BRANCHES_OPSET = 11
"""The first opset whose Ifs may have branches of different shapes; before, onnx takes the better known one."""
MISRANKED = ("ConvTranspose", "Squeeze", "Unsqueeze")
"""Operators of which onnx may say a wrong rank, or elements for rows."""
OTHER_VALUES = ("float_data", "int32_data", "string_data", "int64_data", "double_data", "uint64_data")
INFERENCE_ERRORS = (onnx.checker.ValidationError, onnx.shape_inference.InferenceError, RuntimeError, ValueError, EncodeError)
"""The exceptions of onnx's checker and shape inference."""


def infer_shapes(model: ModelProto) -> ModelProto | None:
    """The model with inferred shapes, node for node; None where inference fails or the model is too large for it.  Shapes follow
    from the model's inputs; others that the file notes count where the module says.  Raises ModelError where it would end the
    process."""
    probe = without_large_values(model)
    taken, renamed = take(probe)
    graphs = [graph for graph, _ in taken]
    _complete(probe)
    nodes = model_nodes(probe)
    for node in (*ops_of(nodes, *WITHOUT_INFERENCE), *protos.of_onnxruntime(probe)):
        node.op_type = "Identity"
    for node in nodes:  # onnxruntime writes these into models that it saves; a PRelu's slope may be the larger one
        if node.op_type in SAVED and node.domain in ("com.microsoft", *protos.STANDARD_DOMAINS):
            node.domain, node.op_type = "", SAVED[node.op_type]
    for node in ops_of(nodes, *POOLINGS, "ConvTranspose"):  # runtimes add nothing to the sizes that auto_pad gives
        given = {item.name: item for item in node.attribute}
        auto, dilated = (given.get(name, onnx.AttributeProto()) for name in ("auto_pad", "dilations"))
        same = auto.s in (b"SAME_UPPER", b"SAME_LOWER")
        if same or auto.s == b"VALID":
            give(node, {}, ("pads", "ceil_mode", "output_padding") if same else ("pads",))
        if auto.ref_attr_name or same and is_op(node, *POOLINGS) and (dilated.ref_attr_name or max(dilated.ints, default=1) > 1):
            node.op_type = UNKNOWN_SIZE  # onnxruntime leaves dilations out there
    for node in ops_of(nodes, "Resize"):  # onnxruntime 1.32 leaves negative axes out under a policy
        given = {item.name: item for item in node.attribute}
        if given.keys() >= {"axes", "keep_aspect_ratio_policy"} and given["keep_aspect_ratio_policy"].s != b"stretch":
            node.op_type = UNKNOWN_SIZE if min(given["axes"].ints, default=-1) < 0 else node.op_type
    for node in ops_of(nodes, "Cast"):
        for item in node.attribute:
            if item.name == "to" and item.i not in protos.WIDE:  # onnx would take a size as it is; type and shape stay known
                node.op_type, item.name = "RandomUniformLike", "dtype"
    for node in ops_of(nodes, "SplitToSequence", "STFT", *(["If"] if opset_of(model.opset_import) < BRANCHES_OPSET else [])):
        node.op_type = UNKNOWN_SIZE
    pooled, scaled, result, by_onnx = ops_of(nodes, *POOLINGS), ops_of(nodes, "Resize", "Upsample"), None, None
    try:
        for function in filter(lambda function: not is_own(function), probe.functions):  # convpool's are by whole scales
            _mark_unknown(function)
        for graph in protos.holders(probe) if any(node.op_type == "Slice" for node in nodes) else ():
            _hide_slices(graph)
        result = by_onnx = _infer(probe)
        result = _infer(probe) if _stop_values(graphs, result) else result
        while pooled and drop_windows(probe, graphs, result) or scaled and raise_scales(probe, graphs, result):
            result = _infer(probe)
        if fill_in(probe, result, taken):
            result = _infer(probe)
    except INFERENCE_ERRORS:
        pass  # without the notes that do not fit, or without shapes
    if result is not None and by_onnx is not None:
        for graph, _, types in side_by_side(result, by_onnx) if result is not by_onnx else ():
            for value in (*graph.value_info, *graph.output):
                if _contradict(value.type, types.get(value.name)):
                    value.doc_string = DISPUTED
        result.ClearField("functions")
        result.functions.extend(model.functions)
        for own, typed, _ in side_by_side(model, result):
            for node, before in zip(typed.node, own.node, strict=True):
                node.domain, node.op_type = before.domain, before.op_type
        protos.rename(result.graph, renamed)
    return result


def _hide_slices(graph: GraphProto | onnx.FunctionProto) -> None:
    """Hide ends of Slices of which onnx takes others than runtimes: where `protos.takes_more`, or starts, ends or steps are no
    constants of this graph.  Of a vector it takes all from computed starts, of a map all by steps of an unknown rank."""
    own = dict(_constants(graph.node)) | {item.name: item for item in getattr(graph, "initializer", ())}
    for node in ops_of(graph.node, "Slice"):
        names = [*node.input, *[""] * 4][1:5]
        numbers = [_numbers(own.get(name, ()), np.int64).reshape(-1) for name in names]
        if protos.takes_more(*numbers) or any(names[i] and not len(numbers[i]) for i in (0, 1, 3)):
            node.input[2] = ""


def _stop_values(graphs: list[GraphProto], inferred: ModelProto) -> bool:
    """Hide ranks and values that onnx says wrongly behind nodes of MISRANKED; return True if there are any."""
    nodes = [(n, graph) for graph in graphs for n in graph.node if n.op_type in MISRANKED and is_op(n, *MISRANKED)]
    known, found = _types(inferred) if nodes else {}, False
    for node, body in nodes:
        x, y = (known.get("".join(names[:1]), TypeProto()) for names in (node.input, node.output))
        before, after = (len(kind.tensor_type.shape.dim) for kind in (x, y))  # after: 0 where the axes are no constants here
        if is_op(node, "Unsqueeze"):  # elements of a vector are no rows
            wrong = y.tensor_type.elem_type in protos.INTEGERS and (before == 1 or before < 2 <= after)
        else:  # no axes are all to onnxruntime's Squeeze; onnx ends at an output_shape below the map's
            wrong = after > 0 and (before == after) == is_op(node, "Squeeze")
        if wrong:
            body.value_info.extend([ValueInfoProto(name=node.output[0], type=y)] if is_op(node, "Unsqueeze") else [])
            node.op_type, found = UNKNOWN_SIZE, True
    return found


def without_large_values(model: ModelProto) -> ModelProto:
    """A copy without the values of large tensors, on which no shape depends; they are never copied, nor are the model's texts."""
    probe = ModelProto(ir_version=model.ir_version)
    probe.graph.name = model.graph.name
    for whole, copied, apart in ((model, probe, "graph"), (model.graph, probe.graph, "initializer")):
        for field in whole.DESCRIPTOR.fields:
            if field.message_type is not None and field.name != apart:
                getattr(copied, field.name).extend(getattr(whole, field.name))
    for given in model.graph.initializer:
        kept = given.data_location == TensorProto.EXTERNAL or not given.HasField("raw_data") or math.prod(given.dims) <= 2**12
        kept = kept or any(len(getattr(given, name)) for name in OTHER_VALUES)  # two values, for onnx's checker to refuse
        place = TensorProto(name=given.name, data_type=given.data_type, dims=given.dims, data_location=TensorProto.EXTERNAL)
        probe.graph.initializer.append(given if kept else place)
    return probe


def fill_gaps(model: ModelProto, shaped: Mapping[str, ValueInfoProto]) -> None:
    """Give a model what only onnx's checker asks for: `shaped` for values without shape, names of graphs, onnxruntime's operators
    in a domain of their own, and no metadata."""
    model.ClearField("metadata_props")  # a key may be there twice
    typed = [value for value in model.graph.input if value.type.HasField("tensor_type")]
    # Outputs may have been added by name alone.
    typed += [value for value in model.graph.output if value.type.WhichOneof("value") in (None, "tensor_type")]
    for value in typed:
        if not value.type.tensor_type.HasField("shape"):
            value.CopyFrom(shaped.get(value.name, value))
            value.type.tensor_type.shape.SetInParent()
    for graph in graphs_within(model.graph):
        graph.name = graph.name or "graph"
    own = protos.of_onnxruntime(model)
    for node in own:
        node.domain = "onnxruntime"
    for holder in (model, *model.functions) if own else ():
        holder.opset_import.add(domain="onnxruntime", version=1)


def side_by_side(model: ModelProto, inferred: ModelProto) -> list[tuple[GraphProto, GraphProto, dict[str, TypeProto]]]:
    """Each graph of a model, outer ones first, it after shape inference, and the types known there by tensor."""
    pairs = zip(graphs_within(model.graph), graphs_within(inferred.graph), strict=True)
    return [(own, typed, {v.name: v.type for v in (*typed.value_info, *typed.input, *typed.output)}) for own, typed in pairs]


def _types(inferred: ModelProto) -> dict[str, TypeProto]:
    """The types that are known by tensor, in all graphs of a model whose bodies' names are told apart."""
    return {v.name: v.type for graph in graphs_within(inferred.graph) for v in (*graph.value_info, *graph.input, *graph.output)}


def _constants(nodes: Iterable[onnx.NodeProto]) -> list[tuple[str, Any]]:
    """The names of Constants, each with a tensor or numbers."""
    found = [(name, a) for node in ops_of(nodes, "Constant") for name in node.output for a in node.attribute]
    return [(name, a.t if a.type == a.TENSOR else a.floats or a.ints) for name, a in found]


def _numbers(given: Any, kind: type = np.float32) -> np.ndarray:
    """The numbers of a tensor or an attribute; none where they are of another type, or in another file."""
    if isinstance(given, TensorProto):
        types = (TensorProto.FLOAT,) if kind is np.float32 else protos.INTEGERS
        readable = given.data_type in types and given.data_location != TensorProto.EXTERNAL
        given = numpy_helper.to_array(given) if readable else ()
    return np.array(given, kind)


@np.errstate(all="ignore")
def _mark_unknown(function: onnx.FunctionProto) -> None:
    """Leave no size behind nodes of a function that onnx may misread: see `drop_windows`, `raise_scales`, `_stop_values`."""
    nodes, opset = protos.all_nodes(function), opset_of(function.opset_import)
    rows: set[str] = set()
    for node in ops_of(nodes, "Add", "Cast", "Concat", "Mul", "Sub", "Unsqueeze"):
        rows.update(node.output if is_op(node, "Unsqueeze") or rows.intersection(node.input) else ())
    stored, at = _constants(nodes), 1 if opset < 11 else 2
    full = {name for name, value in stored if _numbers(value, np.int64).size}
    for node in ops_of(nodes, "ConvTranspose", "Gather", "Slice", "Squeeze"):
        none = is_op(node, "Squeeze") and not (full.issuperset(node.input[1:]) and all(item.ints for item in node.attribute))
        if none or rows.intersection(node.input[:1]) or any(item.name == "output_shape" for item in node.attribute):
            node.op_type = UNKNOWN_SIZE
    for node in ops_of(nodes, *POOLINGS) if opset < CEIL_OPSET else ():
        if any(item.name == "ceil_mode" and (item.i or item.ref_attr_name) for item in node.attribute):
            node.op_type = UNKNOWN_SIZE
    for node in ops_of(nodes, "Resize", "Upsample"):
        own = [item.floats for item in node.attribute if item.name == "scales"]
        given = [value for name, value in stored if name == node.input[at]] if len(node.input) > at else own
        exact = [len(scales) and not np.mod(scales, 1 / 16).any() for scales in map(_numbers, given)]
        if not (exact and all(exact)) and [*node.input[at : at + 1]] != [""]:  # behind which are sizes
            node.op_type = UNKNOWN_SIZE


def take(model: ModelProto) -> tuple[list[tuple[GraphProto, Notes]], dict[str, str]]:
    """Take the notes out of a model, and give its main graph and each body in it, with theirs, and names by `tell_apart`.  Inputs
    are then as they count: open sizes have names of their own, constants (before IR 4) are none, and what a caller may replace is
    no constant."""
    renamed, graphs = protos.tell_apart(model), graphs_within(model.graph)
    in_functions = [graphs_within(function)[1:] for function in model.functions]
    bodies = [body for node in ops_of(model_nodes(model), "Loop") for _, _, body in subgraphs(node)]
    both = {item.name for item in model.graph.initializer} & {item.name for item in model.graph.input}
    items: Any = model.graph.input if model.ir_version < 4 else model.graph.initializer
    for index in reversed([index for index, item in enumerate(items) if item.name in both]):
        del items[index]
    model.ir_version = max(model.ir_version, 4)
    names: set[str] = set()
    for value in model.graph.input:
        if not value.type.HasField("tensor_type"):
            _forget_shape(value.type)
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            if not dim.HasField("dim_value") or dim.dim_value < 0:  # some write -1 for an open one
                if not dim.dim_param or dim.dim_param in names:
                    dim.dim_param = f"{MADE_UP}{value.name}_{axis}"
                names.add(dim.dim_param)
    for body in bodies:
        _forget_changing_sizes(body)
    for function, inside in zip(model.functions, in_functions, strict=True):
        function.ClearField("value_info")
        for graph in inside:
            _take_from(graph, False)
    return [(graph, _take_from(graph, graph is model.graph)) for graph in graphs], renamed


def _forget_changing_sizes(body: GraphProto) -> None:
    """Leave no size of what a Loop's body hands to its next run, where its end does not note it too."""
    for value, result in zip(body.input[2:], body.output[1:], strict=False):
        noted = list(result.type.tensor_type.shape.dim)
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            if axis >= len(noted) or noted[axis] != dim:
                dim.Clear()


def _take_from(graph: GraphProto, main: bool) -> Notes:
    known, notes = {value.name: value.type for value in graph.input if main}, {}
    known |= {tensor.name: helper.make_tensor_type_proto(tensor.data_type, tensor.dims) for tensor in graph.initializer}
    for value in (*graph.value_info, *graph.output, *(() if main else graph.input)):
        if value.name in known:  # an output's type counts for more than its own; and onnx takes axes without a shape for no axes
            value.type.CopyFrom(known[value.name])
            continue
        notes[value.name] = ValueInfoProto.FromString(value.SerializeToString())
        _forget_shape(value.type)
    graph.ClearField("value_info")
    return notes


def _forget_shape(kind: TypeProto) -> None:
    """Leave nothing but the element type."""
    which = kind.WhichOneof("value")
    if which in ("tensor_type", "sparse_tensor_type"):
        getattr(kind, which).ClearField("shape")
    elif which in ("sequence_type", "optional_type"):
        _forget_shape(getattr(kind, which).elem_type)
    elif which == "map_type":
        _forget_shape(kind.map_type.value_type)


def fill_in(model: ModelProto, inferred: ModelProto, taken: Sequence[tuple[GraphProto, Notes]]) -> bool:
    """Put the notes that count into a model that is without; whether there are any.  inferred: it, after shape inference."""
    graphs = [(graph, known, noted) for (graph, noted), (_, _, known) in zip(taken, side_by_side(model, inferred), strict=True)]
    pairs = ((note.type, known.get(name)) for _, known, noted in graphs for name, note in noted.items())
    ranks = all(value.type.tensor_type.HasField("shape") for value in model.graph.input)
    ranks = ranks and not any(_contradict(*pair) for pair in pairs)
    is_open, filled = has_open_sizes(model), False
    for graph, known, noted in graphs:
        missing = {name: note for name, note in noted.items() if not known.get(name, TypeProto()).tensor_type.HasField("shape")}
        inputs = {value.name: value for value in graph.input}
        bounds = set(inputs)
        for node in graph.node if missing else ():
            known_by_onnx = onnx.defs.has(node.op_type, "" if node.domain == "ai.onnx" else node.domain)
            if any(subgraphs(node)) or not known_by_onnx and node.op_type != UNKNOWN_SIZE:  # whose notes are often onnx's
                bounds.update(node.output)
        for name, note in missing.items():
            if name not in bounds:
                continue
            filled = True
            value = inputs.get(name) or graph.value_info.add(name=name)
            value.type.CopyFrom(note.type)
            if not ranks or not value.type.HasField("tensor_type"):
                _forget_shape(value.type)
            for dim in value.type.tensor_type.shape.dim:
                if is_open or dim.dim_value < 0 or dim.HasField("dim_param"):
                    dim.Clear()
    return filled


def drop_windows(model: ModelProto, graphs: list[GraphProto], inferred: ModelProto) -> bool:
    """Write poolings with `ceil_mode` in a model's graphs without, whose last window starts behind the map; whether any are.
    Runtimes drop that window; onnx counts it before opset 22.  For shape inference alone: pads are such that sizes are right."""
    found, known = False, _types(inferred)
    for graph in graphs if opset_of(model.opset_import) < CEIL_OPSET else ():
        for node in graph.node:
            values = known_attributes(node) if is_op(node, *POOLINGS) else None
            if not values or not values.get("ceil_mode"):
                continue
            dims = known.get("".join(node.input[:1]), TypeProto()).tensor_type.shape.dim[2:]
            spec, ends, dropped = windows({a.name: list(a.ints) for a in node.attribute if a.ints}, len(dims)), [], False
            if isinstance(spec, Refusal):
                continue
            begins, own_ends = spec.pads[: spec.rank], spec.pads[spec.rank :]
            for dim, extent, stride, begin, end in zip(dims, spec.extents, spec.strides, begins, own_ends, strict=True):
                size = dim.dim_value + begin
                last = -(-(size + end - extent) // stride) * stride
                if dim.HasField("dim_value") and last >= size:
                    last, dropped = last - stride, True
                ends.append(max(last + extent - size, 0) if dim.HasField("dim_value") else end)
            if dropped and graph is model.graph:
                give(node, {"pads": [*begins, *ends]}, ("ceil_mode", "auto_pad"))
            elif dropped:  # onnxruntime holds bodies to what onnx says
                node.op_type = UNKNOWN_SIZE
            found |= dropped
    return found


@np.errstate(all="ignore")
def raise_scales(model: ModelProto, graphs: list[GraphProto], inferred: ModelProto) -> bool:
    """Raise scales of Resizes by a rounding error where results are longer than onnx says; whether there are any.  Runtimes round
    the product of scale and size to float32, up to a whole number too; onnx rounds it down.  For shape inference alone."""
    found, at = False, 1 if opset_of(model.opset_import) < 11 else 2
    known = _types(inferred)
    nodes = [(node, graph) for graph in graphs for node in graph.node]
    stored = dict(_constants(node for node, _ in nodes))
    stored |= {tensor.name: tensor for graph in graphs for tensor in graph.initializer}
    for node, graph in [(node, graph) for node, graph in nodes if is_op(node, "Resize", "Upsample")]:
        dims, own = known.get("".join(node.input[:1]), TypeProto()).tensor_type.shape.dim, {a.name: a for a in node.attribute}
        axes = own["axes"].ints if "axes" in own else range(len(dims))
        given = stored.get(node.input[at], ()) if len(node.input) > at else own.get("scales", onnx.AttributeProto()).floats
        scales = _numbers(given)
        if scales.shape != (len(axes),) or not {*axes} <= {*range(-len(dims), len(dims))}:
            continue
        sizes = np.array([dims[axis].dim_value for axis in axes], np.float32)
        exact, rounded = scales.astype(np.float64) * sizes, scales * sizes
        longer = (np.floor(exact) < np.floor(rounded)) & (rounded < 2**20)  # others may be more than one apart
        raised, found = np.where(longer, np.nextafter(scales, np.float32(np.inf)), scales), found or bool(longer.any())
        if longer.any() and graph is not model.graph:  # onnxruntime holds bodies to what onnx says
            node.op_type = UNKNOWN_SIZE
        elif longer.any() and len(node.input) > at:
            node.input[at] = f"{''.join(node.output)}/raised"
            graph.initializer.append(numpy_helper.from_array(raised, node.input[at]))
        elif longer.any():
            own["scales"].floats[:] = raised.tolist()
    return found


def has_open_sizes(model: ModelProto) -> bool:
    """Return True if an input has an open size, after `take` or shape inference."""
    types = [value.type.tensor_type for value in model.graph.input]
    return any(not kind.HasField("shape") or any(not dim.HasField("dim_value") for dim in kind.shape.dim) for kind in types)


def noted_sizes(model: ModelProto, inferred: ModelProto, outputs: bool) -> Iterator[tuple[Any, Any]]:
    """Yield each size that a model notes, with the one after shape inference; of a tensor whose rank is noted wrongly open ones.
    outputs: the model's own count too."""
    for graph, _, known in side_by_side(model, inferred):
        main = graph is model.graph
        for value in (*graph.value_info, *(() if main else graph.input), *(() if main and not outputs else graph.output)):
            noted, found = value.type.tensor_type, known.get(value.name, TypeProto()).tensor_type
            if noted.HasField("shape") and found.HasField("shape"):
                if len(noted.shape.dim) != len(found.shape.dim):
                    refill(noted.shape.dim, [TensorShapeProto.Dimension() for _ in found.shape.dim])
                yield from zip(noted.shape.dim, found.shape.dim, strict=True)


def _contradict(note: TypeProto, found: TypeProto | None) -> bool:
    """Return True if both know the rank, or an axis' size, and differ."""
    if found is None or not (note.tensor_type.HasField("shape") and found.tensor_type.HasField("shape")):
        return False
    noted, inferred = note.tensor_type.shape.dim, found.tensor_type.shape.dim
    return len(noted) != len(inferred) or any(
        a.HasField("dim_value") and b.HasField("dim_value") and 0 <= a.dim_value != b.dim_value
        for a, b in zip(noted, inferred, strict=True)
    )


ANSWER_S = 50
"""Limit on a loaded machine; processor time is limited by the other process itself."""
_shared = Shared(inference_process, lambda: [str(onnx.onnx_cpp2py_export.__file__)])


def infer(model: bytes, strict: bool = False) -> bytes | None:
    """A serialised model with shapes; None where no other process can ever be started.  Raises InferenceError, EndedError."""
    with _shared.lock:
        process = _shared.current()
        if process is None:
            return None
        try:
            kind, found = process.ask("infer", strict, content=model, patience_s=ANSWER_S)
        except TimeoutError:
            raise EndedError("does not end") from None
        if kind == MEMORY:
            process.end()
            raise EndedError(f"takes more than {GROWTH_BYTES // 2**30} GiB of memory")
        if kind == FAILED:
            raise onnx.shape_inference.InferenceError(found)
        return found


def infer_elsewhere(model: ModelProto, strict: bool = False) -> ModelProto:
    """onnx's shape inference, with small tensors' values or as strict as its full check.  Raises InferenceError, ModelError."""
    model = deepcopy(model)
    _complete(model)
    return _infer(model, strict)


def _infer(model: ModelProto, strict: bool = False) -> ModelProto:
    """Do `infer_elsewhere` for a model with all its functions, and sparse tensors noted."""
    try:
        found = infer(model.SerializeToString(), strict)
    except EndedError as error:
        raise ModelError(f"the model is not valid ONNX: shape inference of onnx {onnx.__version__} {error}") from None
    if found is None:
        return onnx.shape_inference.infer_shapes(model, check_type=strict, strict_mode=strict, data_prop=not strict)
    return ModelProto.FromString(found)


def _complete(model: ModelProto) -> None:
    """Put functions for convpool's operators into a model, and notes for sparse initializers, which onnx takes for numbers."""
    add_functions_for_sizes(model)
    for graph in graphs_within(model.graph):
        for tensor in graph.sparse_initializer:
            graph.value_info.append(helper.make_tensor_value_info(tensor.values.name, tensor.values.data_type, tensor.dims))
        graph.ClearField("sparse_initializer")


def mark_layers(model: ModelProto, inferred: ModelProto | None = None) -> None:
    """Make every float tensor that `inferred`, or shape inference, knows an output of the model."""
    inferred = inferred or infer_elsewhere(model)
    known = {value.name: value for value in inferred.graph.value_info}
    outputs = {value.name for value in model.graph.output}
    for node in model.graph.node:
        for name in node.output:
            value = known.get(name)
            if value is not None and name not in outputs and value.type.tensor_type.elem_type == TensorProto.FLOAT:
                model.graph.output.append(value)

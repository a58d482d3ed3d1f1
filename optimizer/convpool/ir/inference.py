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
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import numpy as np
import onnx
from google.protobuf.message import EncodeError
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, TensorShapeProto, TypeProto, ValueInfoProto, helper, numpy_helper

from convpool.algebra.geometry import Refusal, windows
from convpool.errors import ModelError
from convpool.ir import inference_process, protos
from convpool.ir.inference_process import GROWTH_BYTES
from convpool.ir.inlining import inlined
from convpool.ir.process import EndedError, Shared
from convpool.ir.protos import (
    all_nodes,
    give,
    graphs_within,
    is_op,
    known_attributes,
    model_nodes,
    ops_of,
    opset_of,
    refill,
    side_by_side,
    subgraphs,
)
from convpool.ir.schema import add_functions_for_sizes, is_own

Notes = dict[str, ValueInfoProto]
"""Types and shapes that a graph notes of its tensors."""
POOLINGS = ("AveragePool", "LpPool", "MaxPool")
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
COMPUTED_SHAPES_OPSET = 14
"""The first opset in which onnx follows the sizes that a Reshape is given, if they are computed from shapes."""
MISREAD = (*POOLINGS, "Attention", "Concat", "ConvTranspose", "Einsum", "NonZero", "Resize", "Squeeze", "Unsqueeze", "Upsample")
"""Operators of which onnx may say wrong sizes, by the sizes of what they read, or elements for rows."""
OTHER_VALUES = ("float_data", "int32_data", "string_data", "int64_data", "double_data", "uint64_data")
INFERENCE_ERRORS = (onnx.checker.ValidationError, onnx.shape_inference.InferenceError, RuntimeError, ValueError, EncodeError)
"""The exceptions of onnx's checker and shape inference."""


def infer_shapes(model: ModelProto) -> ModelProto | None:
    """The model with inferred shapes, node for node; None where inference fails or the model is too large for it.  Shapes follow
    from the model's inputs; others that the file notes count where the module says.  Raises ModelError where it would end the
    process."""
    probe = without_large_values(model)
    taken, renamed = take(probe)
    notes = {name: note for _, noted in reversed(taken) for name, note in noted.items()}
    _complete(probe)
    found = inlined(probe)
    whole = probe if found is None else found.model
    refill(whole.functions, filter(is_own, whole.functions))  # of others that stay nothing is known
    _respell(whole)
    result, by_onnx, corrected = None, list[ModelProto](), False
    try:
        while True:
            now = _infer(whole)
            by_onnx += [] if corrected else [now]
            corrected = _correct(whole, now)
            if not corrected:
                result = now
                if not fill_in(whole, now, notes):
                    break
                notes = {}
    except INFERENCE_ERRORS:
        pass  # without the notes that do not fit, or without shapes
    if result is not None:
        for graph, _, types in (entry for other in by_onnx if other is not result for entry in side_by_side(result, other)):
            for value in (*graph.value_info, *graph.output):
                if protos.contradict(value.type, types.get(value.name)):
                    value.doc_string = DISPUTED
        if found is not None:
            inner = graphs_within(result.graph)
            known = {value.name: value for graph in inner for value in (*graph.input, *graph.output, *graph.value_info)}
            for graph in graphs_within(probe.graph):
                made = dict.fromkeys(name for node in graph.node for name in node.output if name in known)
                for bounds in (graph.input, graph.output):
                    refill(bounds, [known.get(value.name, value) for value in bounds])
                graph.value_info.extend(known[name] for name in made if name not in {value.name for value in graph.output})
            result = probe
        refill(result.functions, model.functions)
        for own, typed, _ in side_by_side(model, result):
            for node, before in zip(typed.node, own.node, strict=True):
                node.domain, node.op_type = before.domain, before.op_type
        protos.rename(result.graph, renamed)
    return result


def _respell(model: ModelProto) -> None:
    """Write operators that onnx does not infer, or not as runtimes do, as others that it does."""
    nodes = all_nodes(model.graph)
    if BRANCHES_OPSET <= opset_of(model.opset_import) < COMPUTED_SHAPES_OPSET and len(graphs_within(model.graph)) == 1:
        _raise_opset(model)
    for node in (*ops_of(nodes, *WITHOUT_INFERENCE), *protos.of_onnxruntime(model)):
        node.op_type = "Identity"
    for node in nodes:  # onnxruntime writes these into models that it saves; a PRelu's slope may be the larger one
        if node.op_type in SAVED and node.domain in ("com.microsoft", *protos.STANDARD_DOMAINS):
            node.domain, node.op_type = "", SAVED[node.op_type]
    for node in ops_of(nodes, *POOLINGS, "ConvTranspose", "Resize"):  # runtimes add nothing to the sizes that auto_pad gives
        values = known_attributes(node) or {}
        same = values.get("auto_pad") in (b"SAME_UPPER", b"SAME_LOWER")
        if same or values.get("auto_pad") == b"VALID":
            give(node, {}, ("pads", "ceil_mode") if same else ("pads",))
        odd = same and is_op(node, *POOLINGS) and max(values.get("dilations", ()), default=1) > 1
        odd |= values.get("keep_aspect_ratio_policy", b"stretch") != b"stretch" and min(values.get("axes", ()), default=0) < 0
        if odd:  # onnxruntime leaves dilations out under SAME, and 1.32 a Resize's negative axes under a policy
            node.op_type = UNKNOWN_SIZE
    for node in ops_of(nodes, "Cast"):
        for item in node.attribute:
            if item.name == "to" and item.i not in protos.WIDE:  # onnx would take a size as it is; type and shape stay known
                node.op_type, item.name = "RandomUniformLike", "dtype"
    for node in ops_of(nodes, "SplitToSequence", "STFT", *(["If"] if opset_of(model.opset_import) < BRANCHES_OPSET else [])):
        node.op_type = UNKNOWN_SIZE
    for graph in graphs_within(model.graph) if ops_of(nodes, "Slice") else ():
        _hide_slices(graph)


def _raise_opset(model: ModelProto) -> None:
    """Write a model of opset 11 to 13 in `COMPUTED_SHAPES_OPSET`, which has axes as inputs, and no statistics as results."""
    for entry in model.opset_import:
        entry.version = entry.version if entry.domain else COMPUTED_SHAPES_OPSET
    for node in ops_of(model.graph.node, "BatchNormalization"):
        del node.output[1:]
    for number, node in enumerate(ops_of(model.graph.node, "ReduceSum", "Split", "Squeeze", "Unsqueeze")):
        values, name = known_attributes(node) or {}, f"{MADE_UP}axes_{number}"
        moved = "split" if is_op(node, "Split") else "axes"
        if values.get(moved):
            model.graph.initializer.append(numpy_helper.from_array(np.array(values[moved]), name))
            node.input.append(name)
            give(node, {}, (moved,) if is_op(node, "ReduceSum") else ())  # onnx reads either; a Squeeze is judged by its own


def _hide_slices(graph: GraphProto) -> None:
    """Hide ends of Slices of which onnx takes others than runtimes: where `protos.takes_more`, or starts, ends or steps are no
    constants of this graph.  Of a vector it takes all from computed starts, of a map all by steps of an unknown rank."""
    own = dict(protos.constants_of(graph.node)) | {item.name: item for item in graph.initializer}
    for node in ops_of(graph.node, "Slice"):
        names = [*node.input, *[""] * 4][1:5]
        numbers = [_numbers(own.get(name, ()), np.int64).reshape(-1) for name in names]
        if protos.takes_more(*numbers) or any(names[i] and not len(numbers[i]) for i in (0, 1, 3)):
            node.input[2] = ""


def _correct(model: ModelProto, inferred: ModelProto) -> bool:
    """Put an unknown operator in the place of each node that onnx misreads, with the right sizes where they are known; return
    True if there are any.  In bodies none are: onnxruntime holds them to what onnx says.  Values are lost: of a vector behind an
    Unsqueeze onnx takes elements for rows."""
    graphs = graphs_within(model.graph)
    misread = [(node, graph) for graph in graphs for node in ops_of(graph.node, *MISREAD)]
    if not misread:
        return False
    weights, known, found = [tensor for graph in graphs for tensor in graph.initializer], protos.types_within(inferred), False
    known |= {tensor.name: helper.make_tensor_type_proto(tensor.data_type, tensor.dims) for tensor in weights}
    stored = dict(protos.constants_of(all_nodes(model.graph))) | {tensor.name: tensor for tensor in weights}
    for node, body in misread:
        names, values = ("".join(node.output[:1]), *(node.input or [""])), known_attributes(node) or {}
        kinds = [known.get(name, TypeProto()).tensor_type for name in names]
        after, *operands = ([d.dim_value if d.HasField("dim_value") else -1 for d in kind.shape.dim] for kind in kinds)
        at = 1 if opset_of(model.opset_import) < 11 else 2
        scales = _numbers(stored.get(node.input[at], ()) if len(node.input) > at else values.get("scales", ()))
        right, before = _right_sizes(node, values, after, operands, scales), len(operands[0])
        rows = is_op(node, "Unsqueeze") and kinds[0].elem_type in protos.INTEGERS and (before == 1 or before < 2 <= len(after))
        if rows or right != after:
            node.op_type, found = UNKNOWN_SIZE, True
            if right is not None and (rows or body is model.graph):
                value = body.value_info.add(name=names[0], type=known[names[0]])
                for dim, size in zip(value.type.tensor_type.shape.dim, right, strict=True):
                    dim.MergeFrom(TensorShapeProto.Dimension(dim_value=size if size >= 0 else None))
    return found


@np.errstate(all="ignore")
def _right_sizes(
    node: NodeProto, values: Mapping[str, Any], after: list[int], operands: list[list[int]], scales: np.ndarray
) -> list[int] | None:
    """The sizes of a node's result by runtimes, -1 for an open one; None where they are not known.  after: by onnx.  operands:
    sizes of what it reads; all are none where the rank is unknown.  scales: of a Resize, if they are constant."""
    before, lost = operands[0], len(operands[0]) - len(after)
    if is_op(node, "Concat"):  # onnxruntime leaves those without elements out
        return None if len(before) > 1 and any(0 in sizes for sizes in operands) else after
    if is_op(node, "Einsum"):  # of a letter's sizes onnx takes the first one, runtimes the one that is not 1
        terms = values.get("equation", b"").replace(b" ", b"").split(b"->")[0].split(b",")
        pairs = {pair for term, sizes in zip(terms, operands, strict=False) for pair in zip(term, sizes, strict=False)}
        return after if len(pairs) == len(dict(pairs)) else None
    if is_op(node, "Squeeze"):  # no axes are all to onnxruntime; onnx wants an order of them
        return None if after and lost < max(1, len(values.get("axes", ()))) else after
    if is_op(node, "Attention", "NonZero"):  # 0 for an open size
        return None if 0 in after else after
    if is_op(node, "ConvTranspose") and lost:  # of an output_shape below the map's onnx says the first two sizes
        return None
    counts = np.array(after)
    if is_op(node, "Resize", "Upsample"):  # onnx does not round the product of scale and size to float32
        axes = [axis for axis in values.get("axes", range(len(before))) if -len(before) <= axis < len(before)]
        if after and scales.shape == (len(axes),):
            sizes = np.array(before, np.float32)[axes]
            rounded = np.floor(scales * sizes)
            counts[axes] = np.where((sizes >= 0) & (rounded < 2**20), rounded, counts[axes])
    same = is_op(node, "ConvTranspose") and values.get("auto_pad", b"")[:4] == b"SAME" and not values.get("output_shape")
    if after and (same or is_op(node, *POOLINGS) and values.get("ceil_mode")):
        kernel = values.get("kernel_shape") or operands[:2][-1][2:]
        spec = windows({**values, "kernel_shape": kernel}, len(before) - 2)
        if isinstance(spec, Refusal):
            return None
        sizes, (begins, ends), strides = np.array(before[2:]), np.reshape(spec.pads, (2, -1)), np.array(spec.strides)
        if same:  # as many as steps, or as the windows cover
            covered = np.minimum(sizes * strides, (sizes - 1) * strides + spec.extents + (values.get("output_padding") or 0))
        else:  # runtimes drop a last window that starts behind the map, onnx from opset 22
            last = (sizes + begins + ends - spec.extents + strides - 1) // strides
            covered = last + (last * strides < sizes + begins)
        counts[2:] = np.where(sizes < 0, counts[2:], covered)
    return [int(count) for count in counts]


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


def _numbers(given: Any, kind: type = np.float32) -> np.ndarray:
    """The numbers of a tensor or an attribute; none where they are of another type, or in another file."""
    if isinstance(given, TensorProto):
        types = (TensorProto.FLOAT,) if kind is np.float32 else protos.INTEGERS
        readable = given.data_type in types and given.data_location != TensorProto.EXTERNAL
        given = numpy_helper.to_array(given) if readable else ()
    return np.array(given, kind)


def take(model: ModelProto) -> tuple[list[tuple[GraphProto, Notes]], dict[str, str]]:
    """Take the notes out of a model, and give its main graph and each body in it, with theirs, and names by `tell_apart`.  Inputs
    are then as they count: open sizes have names of their own, constants (before IR 4) are none, and what a caller may replace is
    no constant."""
    renamed, graphs = protos.tell_apart(model), graphs_within(model.graph)
    in_functions = [graph for function in model.functions for graph in graphs_within(function)[1:]]
    bodies = [body for node in ops_of(model_nodes(model), "Loop") for _, _, body in subgraphs(node)]
    both = {item.name for item in model.graph.initializer} & {item.name for item in model.graph.input}
    items: Any = model.graph.input if model.ir_version < 4 else model.graph.initializer
    for index in reversed([index for index, item in enumerate(items) if item.name in both]):
        del items[index]
    model.ir_version = max(model.ir_version, 4)
    names: set[str] = set()
    for value in model.graph.input:
        if not value.type.HasField("tensor_type"):
            protos.forget_shape(value.type)
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            if not dim.HasField("dim_value") or dim.dim_value < 0:  # some write -1 for an open one
                if not dim.dim_param or dim.dim_param in names:
                    dim.dim_param = f"{MADE_UP}{value.name}_{axis}"
                names.add(dim.dim_param)
    for body in bodies:
        _forget_changing_sizes(body)
    for function in model.functions:
        function.ClearField("value_info")
    taken = [(graph, _take_from(graph, graph is model.graph)) for graph in (*graphs, *in_functions)]
    return taken[: len(graphs)], renamed


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
        protos.forget_shape(value.type)
    graph.ClearField("value_info")
    return notes


def fill_in(model: ModelProto, inferred: ModelProto, notes: Notes) -> bool:
    """Put the notes that count into a model that is without; whether there are any.  inferred: it, after shape inference."""
    if not notes:
        return False
    known, filled = protos.types_within(inferred), False
    ranks = all(value.type.tensor_type.HasField("shape") for value in model.graph.input)
    ranks = ranks and not any(protos.contradict(note.type, known.get(name)) for name, note in notes.items())
    is_open = protos.has_open_sizes(model)
    missing = {name: note for name, note in notes.items() if not known.get(name, TypeProto()).tensor_type.HasField("shape")}
    for graph in graphs_within(model.graph) if missing else ():
        bounds: dict[str, ValueInfoProto | None] = {value.name: value for value in graph.input}
        for node in graph.node:
            known_by_onnx = onnx.defs.has(node.op_type, "" if node.domain == "ai.onnx" else node.domain)
            if any(subgraphs(node)) or not known_by_onnx and node.op_type != UNKNOWN_SIZE:  # whose notes are often onnx's
                bounds |= dict.fromkeys(node.output)
        for name in filter(missing.__contains__, bounds):
            filled = True
            value = bounds[name] or graph.value_info.add(name=name)
            value.type.CopyFrom(missing[name].type)
            if not ranks or not value.type.HasField("tensor_type"):
                protos.forget_shape(value.type)
            for dim in value.type.tensor_type.shape.dim:
                if is_open or dim.dim_value < 0 or dim.HasField("dim_param"):
                    dim.Clear()
    return filled


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
            return process.ask("infer", strict, content=model, patience_s=ANSWER_S)
        except TimeoutError:
            raise EndedError("does not end") from None
        except MemoryError:
            process.end()
            raise EndedError(f"takes more than {GROWTH_BYTES // 2**30} GiB of memory") from None
        except RuntimeError as error:
            raise onnx.shape_inference.InferenceError(str(error)) from None


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

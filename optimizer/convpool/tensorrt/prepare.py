# SPDX-License-Identifier: Apache-2.0
"""A model as one TensorRT version's ONNX parser reads it, and the nodes that go to the plugin, by precision, version and GPU.

`lowered` is the same for all versions: the model optimized, with its weights, without local functions of its own.
`for_parser` does what differs:

- TensorRT 8.6 and 9 read opsets up to 17 and no local functions.
- TensorRT 10.0 to 10.6 take a local function before a plugin of the same name.

In half precision (`builder` says how it is asked for) float32 tensors become others: for weakly typed networks constants of the
plugin's nodes (`half_weights`), for strongly typed ones every tensor inside the model (`cast_floats`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from numbers import Integral
from types import ModuleType
from typing import Any, cast

import ml_dtypes
import numpy as np
import onnx
import onnx.inliner
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from convpool.api import optimize, rewrite
from convpool.cuda import current_device
from convpool.errors import ConvpoolError, ModelError
from convpool.ir import schema
from convpool.ir.files import self_contained
from convpool.ir.inference import mark_layers
from convpool.ir.inlining import inlined
from convpool.ir.model import TYPE_ATTRIBUTES, LoadedModel, feeds, fitting
from convpool.ir.protos import all_nodes, give, graphs_within, is_op, known_attributes, refill, rename
from convpool.options import OptimizeOptions
from convpool.tensorrt.build_options import HALF_PRECISIONS, BuildOptions, Profile
from convpool.tensorrt.package import STRONGLY_TYPED_SINCE, parser_major, tensorrt_module
from convpool.types import Lowering

OLD_PARSER_OPSET = 17
"""The newest opset that the parser of TensorRT 8.6 knows."""
CONSTANT_WEIGHTS, ALLOW_TF32 = "constant_weights", "allow_tf32"
ELEMENT_TYPES: dict[str, int] = {"fp16": TensorProto.FLOAT16, "bf16": TensorProto.BFLOAT16}
"""ONNX's number for the type of a half precision."""
_FLOAT_ONLY_INPUTS = {"Resize": (1, 2), "Upsample": (1,)}
"""Inputs that stay float32 whatever the type of the data: regions and scales."""
STEM_MIN_CC = 80
"""Least compute capability, 10 * major + minor, of the plugin's kernel for few channels."""
PLAIN_CONV_CC = 90
"""The compute capability for which the plugin's kernels for plain convolutions are made."""
OFFLOADING = (*HALF_PRECISIONS, "tf32")
"""Precisions in which the plugin also runs convolutions without a pooling."""
OFFLOAD_BEFORE = 10
"""The first major version of TensorRT that keeps all convolutions without a pooling.

Its own kernels differ from those of 8.6, and nothing was measured against them.
"""


def lowered(
    model: LoadedModel,
    lowering: str,
    *,
    layers: bool = False,
    input_shapes: Mapping[str, Sequence[int]] | None = None,
    **keywords: Any,
) -> ModelProto:
    """Return a copy to build an engine from, in the lowering asked for, its weights initializers.

    lowering: as in `convpool.optimize`, or "none"; a model that has nodes for the plugin already is taken as it is.
    layers: make intermediate tensors outputs.  input_shapes: typical shapes, for the size of plain convolutions; those that
    fit no input are left to `builder.add_profiles` to refuse.  keywords: of `convpool.optimize`, which checks nothing here:
    `build` compares the engine itself with the model.
    """
    if lowering != "none" and not has_plugin_nodes(model.proto):
        shapes = fitting(feeds(model.proto), input_shapes or {})
        model = optimize(model, lowering=cast(Lowering, lowering), check=0, input_shapes=shapes, **keywords).loaded
    result = folded(inline_own_functions(self_contained(model.proto, model.base_dir)))
    if layers:
        mark_layers(result)
    return result


def has_plugin_nodes(model: ModelProto) -> bool:
    return any(is_plugin_node(node) for node in all_nodes(model.graph))


def is_plugin_node(node: NodeProto) -> bool:
    """Return True if TensorRT gives the node to the plugin: the name decides, in any domain."""
    return node.op_type in schema.OP_TYPES


def inline_own_functions(model: ModelProto) -> ModelProto:
    """The model without local functions but those of convpool's operators, so that pairs inside them go to the plugin too."""
    found = inlined(model)  # onnx.inliner forgets defaults of a function's attributes, and results that are inputs
    return model if found is None else _without_trailing_blanks(found.model)


def for_parser(model: ModelProto, major: int, *, plugin: bool, allow_tf32: bool, accumulation: str | None = None) -> ModelProto:
    """The model for the ONNX parser of TensorRT `major`.  The model given may be changed.

    accumulation: of the plugin's nodes, as in `convpool.optimize`; None leaves them as they are.
    """
    if any(schema.layout_of(node) for node in filter(is_plugin_node, all_nodes(model.graph))):
        raise ModelError(
            "model: layout of ConvAvgPool nodes; got channels_last, for onnxruntime on CUDA, expected the original "
            "model, or one of --target tensorrt"
        )
    if plugin and has_plugin_nodes(model):  # TensorRT 10.0 to 10.6 take a function before a plugin of the same name
        refill(model.functions, [function for function in model.functions if not schema.is_own(function)])
    if model.functions:
        model = _without_trailing_blanks(onnx.inliner.inline_local_functions(model))
    if major < STRONGLY_TYPED_SINCE:
        opset = next(item.version for item in model.opset_import if item.domain in ("", "ai.onnx"))
        if opset > OLD_PARSER_OPSET:
            raise ModelError(
                f"model: opset; got {opset}, expected at most {OLD_PARSER_OPSET} for TensorRT {major}; export it with "
                f"opset {OLD_PARSER_OPSET}"
            )
    for node in filter(is_plugin_node, all_nodes(model.graph)):
        give(node, {ALLOW_TF32: 1} if plugin and allow_tf32 else {}, (ALLOW_TF32,))
        if accumulation is not None:
            schema.give_accumulation(node, accumulation)
    return model


def _without_trailing_blanks(model: ModelProto) -> ModelProto:
    """Remove empty names at the end of a node's inputs: inlining leaves them for an optional bias, and TensorRT refuses them."""
    for node in all_nodes(model.graph):
        while node.input and not node.input[-1]:
            del node.input[-1]
    return model


def folded(model: ModelProto) -> ModelProto:
    """The model with what it computes from constants stored, as spectral normalisation: TensorRT would in every run."""
    return rewrite(LoadedModel(model, None, model.ByteSize()), OptimizeOptions(rules=frozenset(("fold",)))).model


def set_constant_weights(model: ModelProto, constant: bool) -> None:
    """Give the plugin's nodes whose weights are initializers the attribute constant_weights = 1; no other node has it.

    The plugin then keeps transformed weights from run to run.  constant: false for an engine that may be refitted, since its
    weights change in place and no plugin can see that.
    """
    weights = {tensor.name for tensor in model.graph.initializer} - {value.name for value in model.graph.input}
    for node in filter(is_plugin_node, all_nodes(model.graph)):
        give(node, {}, (CONSTANT_WEIGHTS,))
    for node in filter(is_plugin_node, model.graph.node if constant else ()):  # the main graph's, where a name has one meaning
        if node.input[1] in weights:
            give(node, {CONSTANT_WEIGHTS: 1})


def half_weights(model: ModelProto, kind: int) -> None:
    """Give the plugin's nodes constants of type `kind` (FLOAT16), which weakly typed networks would convert in every run."""
    elsewhere = {
        node.input[index]
        for node in all_nodes(model.graph)
        for index in range(len(node.input))
        if index == 0 or not is_plugin_node(node)
    }
    initializers = {tensor.name: tensor for tensor in model.graph.initializer}
    for node in filter(is_plugin_node, model.graph.node):
        for name in node.input[1:]:
            if name in initializers and name not in elsewhere:
                _convert(initializers[name], kind)


def cast_floats(model: ModelProto, kind: int) -> None:
    """Make all float32 tensors inside of type `kind`, which strongly typed networks then compute in; inputs and outputs stay."""
    graph = model.graph
    of_inputs = ((node, index) for node in all_nodes(graph) for index in _FLOAT_ONLY_INPUTS.get(node.op_type, ()))
    kept = {name for node, index in of_inputs for name in node.input[index : index + 1]}
    for node in all_nodes(graph):
        if node.op_type != "Constant" or node.output[0] not in kept:
            _convert_attributes(node, kind)
    for inner in graphs_within(graph):
        for tensor in inner.initializer:
            if tensor.name not in kept:
                _convert(tensor, kind)
        for value in (*inner.value_info, *(() if inner is graph else (*inner.input, *inner.output))):
            if value.type.tensor_type.elem_type == TensorProto.FLOAT and value.name not in kept:
                value.type.tensor_type.elem_type = kind
    _cast_ends(graph, kind)


def _convert(tensor: TensorProto, kind: int) -> None:
    if tensor.data_type != TensorProto.FLOAT:
        return
    values, dtype = numpy_helper.to_array(tensor), helper.tensor_dtype_to_np_dtype(kind)
    largest = float(ml_dtypes.finfo(dtype).max)
    finite = np.where(np.isfinite(values), np.clip(values, -largest, largest), values)
    tensor.CopyFrom(helper.make_tensor(tensor.name, kind, tensor.dims, finite.astype(dtype).tobytes(), raw=True))


def _convert_attributes(node: NodeProto, kind: int) -> None:
    for attribute in node.attribute:
        if attribute.name in TYPE_ATTRIBUTES and attribute.type == AttributeProto.INT:
            if attribute.i == TensorProto.FLOAT:
                attribute.i = kind
        elif attribute.type == AttributeProto.TENSOR and node.op_type in ("Constant", "ConstantOfShape"):
            _convert(attribute.t, kind)
        elif node.op_type == "Constant" and attribute.name in ("value_float", "value_floats"):
            tensor = numpy_helper.from_array(np.array(helper.get_attribute_value(attribute), np.float32))
            _convert(tensor, kind)
            attribute.CopyFrom(helper.make_attribute("value", tensor))


def _cast_ends(graph: GraphProto, kind: int) -> None:
    """Casts between the float32 inputs and outputs and the inside."""
    first, last, renames = [], [], {}
    initializers = {tensor.name for tensor in graph.initializer}
    for value in graph.input:
        if value.type.tensor_type.elem_type == TensorProto.FLOAT and value.name not in initializers:
            renames[value.name] = f"{value.name}__inside"
            first.append(helper.make_node("Cast", [value.name], [renames[value.name]], to=kind))
    for value in graph.output:
        if value.type.tensor_type.elem_type == TensorProto.FLOAT:
            inside = renames.setdefault(value.name, f"{value.name}__inside")
            last.append(helper.make_node("Cast", [inside], [value.name], to=TensorProto.FLOAT))
    rename(graph, renames)  # also in bodies, whose results may be named as the graph's
    own = {inside: name for name, inside in renames.items()}
    for value in (*graph.input, *graph.output):
        value.name = own.get(value.name, value.name)
    refill(graph.node, [*first, *graph.node, *last])


def with_default_lowering(model: LoadedModel, options: BuildOptions, trt: ModuleType | None = None) -> BuildOptions:
    """The options with the lowering where none is asked for: "convavgpool" with the plugin, "auto" without it.

    In "tf32" with the plugin it is "fused", but for two cases.  TensorRT 8.6 keeps float tensors channels first around
    convolutions of its own.  Between those upsampled convolutions and 1x1 pairs behind a normalization are faster on the plugin,
    other pairs about as fast as fused convolutions, and plain convolutions slower: docs/decisions/016.  So the plugin runs all it
    can where its pairs and upsampled convolutions are as many as the convolutions that TensorRT keeps, or where half of them are
    upsampled ones.  Where 1x1 pairs behind a normalization make up the half, it runs no plain convolutions beside them.
    """
    if not options.plugin:
        return replace(options, lowering="auto")
    if options.precision != "tf32":
        return replace(options, lowering="convavgpool")
    trt = trt or options.trt or tensorrt_module()
    if not offloaded_convs(options, trt)["plain_conv"]:
        return replace(options, lowering="fused")
    nodes = list(all_nodes(lowered(model, "convavgpool", **optimize_keywords(options, trt)).graph))
    left = sum(is_op(node, "Conv", "ConvTranspose") for node in nodes)
    saving = [node for node in nodes if is_plugin_node(node) and not _has_ones(node, "pool_kernel_shape")]
    upsampled = sum(schema.OPERATORS[node.op_type].upsamples for node in saving)
    normalized = sum(_has_ones(node, "kernel_shape") and schema.OPERATORS[node.op_type].affine for node in saving)
    if left <= len(saving) or 0 < len(saving) <= 2 * upsampled:
        return replace(options, lowering="convavgpool")
    if 0 < len(saving) <= 2 * (upsampled + normalized):
        return replace(options, lowering="convavgpool", plain_conv=False)
    return replace(options, lowering="fused")


def _has_ones(node: NodeProto, name: str) -> bool:
    sizes = (known_attributes(node) or {}).get(name)
    return isinstance(sizes, list) and all(size == 1 for size in sizes)


def offloaded_convs(options: BuildOptions, trt: ModuleType | None = None) -> dict[str, bool]:
    """Which convolutions without a pooling the plugin runs, by the rules `image_conv` and `plain_conv`.

    The options must allow a kind.  The plugin then runs it in half precision and TF32 with TensorRT 8.6 or 9 only:

    - plain_conv on GPUs of compute capability 9.0, and in half precision norm_conv beside it.  libconvpool.so is asked which GPU
      there is.
    - image_conv in half precision on GPUs from compute capability 8.0 on, and on an unknown one; in TF32 beside plain_conv.
    """
    none = {"image_conv": False, "plain_conv": False}
    if not options.plugin or options.precision not in OFFLOADING:
        return none
    if parser_major(trt or options.trt or tensorrt_module()) >= OFFLOAD_BEFORE:
        return none
    try:
        cc = current_device()["cc"]
    except ConvpoolError:  # no GPU, or no libconvpool.so to ask
        return {**none, "image_conv": options.stem and options.in_half_precision}
    plain = options.plain_conv and cc == PLAIN_CONV_CC
    images = options.stem and (cc >= STEM_MIN_CC if options.in_half_precision else plain)
    return {"image_conv": images, "plain_conv": plain}


def optimize_keywords(options: BuildOptions, trt: ModuleType) -> dict[str, Any]:
    """The arguments of `convpool.optimize` that decide what of the model goes to the plugin."""
    taken = offloaded_convs(options, trt)
    verbs = {"enable": True, "disable": False}
    offloaded = {verb: [name for name, value in taken.items() if value == wanted] for verb, wanted in verbs.items()}
    if options.precision == "tf32":
        offloaded["disable"].append("norm_conv")  # nothing was measured
    return {"target": "tensorrt", "input_shapes": typical_shapes(options.profile_list), **offloaded}


def typical_shapes(profiles: Sequence[Profile]) -> dict[str, list[int]]:
    """The first profile's typical shapes.  Unusable ones are left out here; `builder.add_profiles` refuses them."""
    first = next(iter(profiles), {})
    shapes = {name: list(three[1]) for name, three in first.items() if len(three) == 3}
    whole = {name: shape for name, shape in shapes.items() if all(isinstance(d, Integral) and d >= 1 for d in shape)}
    return {name: [int(d) for d in shape] for name, shape in whole.items()}

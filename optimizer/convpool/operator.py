"""The operator ai.convpool::ConvAvgPool, version 1: average pooling, then convolution, as one node.

    Y = Conv(AveragePool(X, count_include_pad=1), OIHW(W), B)

| input | shape |
|---|---|
| X | [N, C, spatial...] |
| W | [M, kernel..., C/group]: channels last, as the tensor-core kernels read it |
| B | [M], optional; left out when absent, never "" |

| attribute | meaning |
|---|---|
| pool_kernel_shape, pool_strides, pool_pads, pool_dilations | of the pooling, which counts its padding |
| kernel_shape, strides, pads, dilations, group | of the convolution |
| weight_perm | permutation that brings W to [M, C/group, kernel...]; depends on the rank alone |
| plugin_version = "1", plugin_namespace = "" | by which TensorRT's ONNX parser finds the plugin |

Pads hold all begins, then all ends.  Every attribute is present on every node.  Types: float16, bfloat16, float32,
float64.  The numpy reference is `convpool.reference.conv_avg_pool`.

Every model that convpool writes carries the operator as a model-local function of standard operators too, so
that runtimes without the plugin run it as it stands.
"""

from __future__ import annotations

import atexit

import onnx
from onnx import AttributeProto, FunctionProto, NodeProto, helper
from onnx.defs import OpSchema

from convpool.geometry import ConvSpec, PoolSpec

DOMAIN = "ai.convpool"
OP_TYPE = "ConvAvgPool"
VERSION = 1
MIN_IR_VERSION = 8
"""The first ONNX IR version with model-local functions."""
POOL_DILATIONS_OPSET = 19
"""The first opset whose AveragePool has dilations."""

_INTS_ATTRIBUTES = (
    "pool_kernel_shape",
    "pool_strides",
    "pool_pads",
    "pool_dilations",
    "kernel_shape",
    "strides",
    "pads",
    "dilations",
    "weight_perm",
)
_ATTRIBUTES = (*_INTS_ATTRIBUTES, "group", "plugin_version", "plugin_namespace")
_TYPES = ("tensor(float16)", "tensor(bfloat16)", "tensor(float)", "tensor(double)")


def weight_perm(rank: int) -> list[int]:
    """Permutation from [M, kernel..., C/group] to [M, C/group, kernel...] for `rank` spatial axes."""
    return [0, rank + 1, *range(1, rank + 1)]


def channels_last_perm(rank: int) -> list[int]:
    """The inverse of `weight_perm`: from [M, C/group, kernel...] to [M, kernel..., C/group]."""
    return [0, *range(2, rank + 2), 1]


def make_node(inputs: list[str], output: str, pool: PoolSpec, conv: ConvSpec, name: str = "") -> NodeProto:
    """A ConvAvgPool node with every attribute set.  inputs: X, W and, if there is a bias, B."""
    return helper.make_node(
        OP_TYPE,
        inputs,
        [output],
        name=name or None,
        domain=DOMAIN,
        pool_kernel_shape=pool.kernel_shape,
        pool_strides=pool.strides,
        pool_pads=pool.pads,
        pool_dilations=pool.dilations,
        kernel_shape=conv.kernel_shape,
        strides=conv.strides,
        pads=conv.pads,
        dilations=conv.dilations,
        group=conv.group,
        weight_perm=weight_perm(conv.rank),
        plugin_version="1",
        plugin_namespace="",
    )


def function_proto(opset: int) -> FunctionProto:
    """The operator as a function of the standard operators of `opset`; before 19 pool_dilations must be all 1."""
    transpose = helper.make_node("Transpose", ["W"], ["weight"])
    _refer(transpose, perm="weight_perm")
    pool = helper.make_node("AveragePool", ["X"], ["pooled"], count_include_pad=1)
    _refer(pool, kernel_shape="pool_kernel_shape", strides="pool_strides", pads="pool_pads")
    if opset >= POOL_DILATIONS_OPSET:
        _refer(pool, dilations="pool_dilations")
    conv = helper.make_node("Conv", ["pooled", "weight", "B"], ["Y"])
    _refer(conv, kernel_shape="kernel_shape", strides="strides", pads="pads", dilations="dilations", group="group")
    return helper.make_function(
        DOMAIN,
        OP_TYPE,
        ["X", "W", "B"],
        ["Y"],
        [transpose, pool, conv],
        [helper.make_opsetid("", opset)],
        list(_ATTRIBUTES),
        doc_string="Average pooling that counts its padding, then convolution with channels-last weights.",
    )


def move_to_domain(model: onnx.ModelProto, domain: str) -> None:
    """Give the model's ConvAvgPool nodes and their function another domain, for runtimes that look for it there."""
    if domain == DOMAIN:
        return
    containers = [model.graph, *model.functions]
    while containers:
        for node in containers.pop().node:
            if (node.domain, node.op_type) == (DOMAIN, OP_TYPE):
                node.domain = domain
            for attribute in node.attribute:
                containers += [attribute.g] if attribute.HasField("g") else []
                containers += attribute.graphs
    for holder in (model, *model.functions):
        if isinstance(holder, FunctionProto) and (holder.domain, holder.name) == (DOMAIN, OP_TYPE):
            holder.domain = domain
        for entry in holder.opset_import:
            if entry.domain == DOMAIN:
                entry.domain = domain


def register_schema() -> None:
    """Make the operator known to onnx's checker and shape inference in this process; a second call does nothing."""
    if onnx.defs.has(OP_TYPE, VERSION, DOMAIN):
        return
    parameter, attribute = OpSchema.FormalParameter, OpSchema.Attribute
    optional = OpSchema.FormalParameterOption.Optional
    attributes = [
        attribute(name, OpSchema.AttrType.INTS, "See the operator's documentation.", required=True)
        for name in _INTS_ATTRIBUTES
    ]
    attributes += [
        attribute("group", helper.make_attribute("group", 1), "Number of channel groups."),
        attribute("plugin_version", helper.make_attribute("plugin_version", "1"), "TensorRT plugin version."),
        attribute("plugin_namespace", helper.make_attribute("plugin_namespace", ""), "TensorRT plugin namespace."),
    ]
    schema = OpSchema(
        OP_TYPE,
        DOMAIN,
        VERSION,
        doc=__doc__ or "",
        inputs=[
            parameter("X", "T", "Input, [N, C, spatial...]."),
            parameter("W", "T", "Weights, [M, kernel..., C/group]."),
            parameter("B", "T", "Bias, [M].", param_option=optional),
        ],
        outputs=[parameter("Y", "T", "Output, [N, M, spatial...].")],
        type_constraints=[("T", list(_TYPES), "Floating-point tensors.")],
        attributes=attributes,
    )
    schema.set_type_and_shape_inference_function(_infer)
    onnx.defs.register_schema(schema)
    # onnx would release the Python function after the interpreter is gone, and crash.
    atexit.register(onnx.defs.deregister_schema, OP_TYPE, VERSION, DOMAIN)


def _refer(node: NodeProto, **references: str) -> None:
    """Give `node` attributes that take the value of the function's attributes named."""
    for name, source in references.items():
        kind = AttributeProto.INT if name == "group" else AttributeProto.INTS
        node.attribute.append(AttributeProto(name=name, ref_attr_name=source, type=kind))


def _infer(context: onnx.shape_inference.InferenceContext) -> None:
    """Output type and shape; unknown input dimensions give unknown output dimensions."""
    x, w = context.get_input_type(0), context.get_input_type(1)
    if x is None or not x.HasField("tensor_type"):
        return
    result = onnx.TypeProto()
    result.tensor_type.elem_type = x.tensor_type.elem_type
    if x.tensor_type.HasField("shape"):
        values = {name: tuple(context.get_attribute(name).ints) for name in _INTS_ATTRIBUTES}
        names = ("kernel_shape", "strides", "pads", "dilations")
        pool = PoolSpec(**{name: values[f"pool_{name}"] for name in names})
        conv = ConvSpec(**{name: values[name] for name in names})
        for strides in (pool.strides, conv.strides):
            if min(strides, default=1) < 1:
                raise onnx.shape_inference.InferenceError(f"{OP_TYPE}: strides; got {strides}, expected at least 1")
        dims = x.tensor_type.shape.dim
        if len(dims) != conv.rank + 2:
            raise onnx.shape_inference.InferenceError(
                f"{OP_TYPE}: rank of X; got {len(dims)}, expected {conv.rank + 2} for kernel_shape {conv.kernel_shape}"
            )
        shape = result.tensor_type.shape
        shape.dim.add().CopyFrom(dims[0])
        channels = shape.dim.add()
        if w is not None and w.HasField("tensor_type") and w.tensor_type.HasField("shape"):
            channels.CopyFrom(w.tensor_type.shape.dim[0])
        for i in range(conv.rank):
            out = shape.dim.add()
            if dims[2 + i].HasField("dim_value"):
                # Axes are independent, so any stand-in serves for the unknown ones.
                size = tuple(dims[2 + i].dim_value for _ in range(conv.rank))
                out.dim_value = conv.output_size(pool.output_size(size))[i]
    context.set_output_type(0, result)

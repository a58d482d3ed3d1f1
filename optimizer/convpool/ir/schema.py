# SPDX-License-Identifier: Apache-2.0
"""The operators of the domain ai.convpool in ONNX: nodes, functions and attributes.

    Y = epilogue(Conv(AveragePool(prologue(X), count_include_pad=1), OIHW(W), B) + R)
    Y = epilogue(Conv(Upsample(prologue(X)), OIHW(W), B) + R)

Version 1 has ConvAvgPool, which has neither prologue nor residual nor epilogue; version 2 adds the fused variants
(`convpool.algebra.parts`), version 3 those that end in Tanh or Sigmoid, version 4 UpsampleConv and its variants, version 5 those
with a Silu or Modulated, version 6 those that are Normalized.
docs/operator.md specifies inputs, attributes and types; a reference in numpy is `convpool.algebra.reference`.

Every model that convpool writes carries the operators it uses as model-local functions of standard operators too, so that
runtimes without the plugin run it as it stands.  Users may move the operators to a domain of their own.
"""

from collections.abc import Collection, Mapping
from dataclasses import asdict, replace
from types import MappingProxyType
from typing import Any

from onnx import AttributeProto, FunctionProto, ModelProto, NodeProto, helper, parser

from convpool.algebra.expand import UpsampleSpec
from convpool.algebra.geometry import ConvSpec, PoolSpec
from convpool.algebra.parts import (
    ACCUMULATIONS,
    ACTIVATION_NUMBERS,
    EPILOGUES,
    LAYOUTS,
    MAX_UPSAMPLE,
    OPERATORS,
    PROLOGUES,
    Parts,
    function_perms,
    to_channels_first,
)
from convpool.errors import ModelError, OptionError
from convpool.ir.protos import give, model_nodes, named, opset_of, refill

_WINDOW = ("kernel_shape", "strides", "pads", "dilations")
"""The attributes of a convolution; those of a pooling are these behind `pool_`."""
UPSAMPLE, SCALES = "upsample", "scales"
CHANNELS_LAST = "channels_last"
"""The attribute that says where channels stand: a number of `algebra.parts.LAYOUTS`."""
DOMAIN = "ai.convpool"
POOLING_VERSION, FUSED_VERSION, SATURATING_VERSION, UPSAMPLING_VERSION, MODULATING_VERSION, NORMALIZING_VERSION = range(1, 7)
"""The versions that add ConvAvgPool, its fused variants, their Tanh and Sigmoid, UpsampleConv and its, Silu and Modulated, and
Normalized."""
NEAREST = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
"""Attributes of the Resize that repeats pixels."""
TARGET_KEY = "convpool.target"
"""The key of the metadata that says which runtime a model's nodes of these operators are for."""
MIN_IR_VERSION = 8
"""The first ONNX IR version with model-local functions."""
POOL_DILATIONS_OPSET = 19
"""The first opset whose AveragePool has dilations."""
UPSAMPLING_OPSET = 13
"""The first opset whose Resize needs no regions."""
NORMALIZING_OPSET = 15
"""The first opset with the CastLike that a function of a Normalized operator needs."""
TYPES_OPSET = 22
"""The first opset whose Conv and AveragePool take bfloat16."""
ACCUMULATION = "accumulation"

_POOLING = {
    "pool_kernel_shape": "Window of the pooling.",
    "pool_strides": "Strides of the pooling.",
    "pool_pads": "Zero padding of the pooling, which counts in the average: all begins, then all ends.",
    "pool_dilations": "Dilations of the pooling.",
}
_UPSAMPLING = {UPSAMPLE: f"Copies of a pixel along each axis, 1 to {MAX_UPSAMPLE}."}
_SCALES = {SCALES: "The same as Resize takes it: 1, 1, then upsample."}
_CONVOLUTION = {
    "kernel_shape": "Kernel of the convolution.",
    "strides": "Strides of the convolution.",
    "pads": "Zero padding of the convolution: all begins, then all ends.",
    "dilations": "Dilations of the convolution.",
    "weight_perm": "Permutation that brings W to [M, C/group, kernel...]; it depends only on the number of spatial axes.",
}
_OPTIONAL: dict[str, tuple[int | str, str]] = {
    "group": (1, "Number of channel groups."),
    "plugin_version": ("1", "Version under which TensorRT finds the plugin."),
    "plugin_namespace": ("", "Namespace under which TensorRT finds the plugin."),
    "allow_tf32": (0, "1 lets the plugin compute float32 products in TF32."),
    "constant_weights": (0, "1 tells the plugin that W never changes."),
    CHANNELS_LAST: (0, "Which tensors are [N, spatial..., channels]: 0 none, 1 X, R and Y, 2 R and Y, 3 X."),
    ACCUMULATION: (0, "How kernels sum pooling windows of float16 and bfloat16: 0 in float32, 1 may be in it (packed)."),
}
_OTHERS = ("group", "plugin_version", "plugin_namespace")
"""The attributes that every node has, and the function too."""
_PERMS = {
    "x_perm": "Permutation that brings X to [N, C, spatial...].",
    "y_perm": "Permutation that brings [N, M, spatial...] to Y.",
    "r_perm": "Permutation that brings R to [N, M, spatial...].",
}


def _numbered(activations: tuple[str, ...]) -> str:
    return ", ".join(["0 none", *(f"{ACTIVATION_NUMBERS[name]} {name}" for name in activations)])


_PART_INTS = {
    "prologue_affine": "1 if there are scale and shift by channel, 2 if by image and channel, 3 behind a normalization, else 0.",
    "prologue_activation": f"Activation before the pooling: {_numbered(PROLOGUES)}.",
    "residual": "1 if the input R is there, else 0.",
    "activation": f"Activation of the result: {_numbered(EPILOGUES)}.",
}
_PART_FLOATS = {
    "prologue_alpha": "Slope of a LeakyRelu before the pooling; 0 for other activations.",
    "alpha": "Slope of a LeakyRelu of the result; 0 for other activations.",
}
_NORM_INTS = {"norm_groups": "Groups of channels that are normalized for themselves."}
_NORM_FLOATS = {"epsilon": "Added to the variance of a group."}
OP_TYPES = tuple(OPERATORS)
"""All operators of the domain."""


def version_of(parts: Parts) -> int:
    """The first version of the domain that has the operator."""
    if parts.normalized:
        return NORMALIZING_VERSION
    if parts.modulated or "Silu" in (parts.prologue, parts.epilogue):
        return MODULATING_VERSION
    if parts.upsamples:
        return UPSAMPLING_VERSION
    if parts.epilogue in ("Tanh", "Sigmoid"):
        return SATURATING_VERSION
    return POOLING_VERSION if parts.is_plain else FUSED_VERSION


def is_operator(node: NodeProto) -> bool:
    """Return True if the node is one of these operators in their own domain; `is_own` looks in any."""
    return node.domain == DOMAIN and node.op_type in OP_TYPES


def is_own(part: NodeProto | FunctionProto) -> bool:
    """Return True for a node or a function of these operators in any domain: `--domain` moves them.  Names alone do not tell."""
    name = part.op_type if isinstance(part, NodeProto) else part.name
    attributes = [item.name for item in part.attribute] if isinstance(part, NodeProto) else part.attribute
    return name in OP_TYPES and (part.domain == DOMAIN or "weight_perm" in attributes)


def parts_of(node: NodeProto) -> Parts:
    """Return the parts of a node of these operators; its name and attributes say the same."""
    kind = OPERATORS[node.op_type]
    if kind.is_plain:
        return kind
    given = {item.name: item for item in node.attribute}
    kind = replace(kind, prologue_alpha=given["prologue_alpha"].f, epilogue_alpha=given["alpha"].f)
    return replace(kind, norm_groups=given["norm_groups"].i, epsilon=given["epsilon"].f) if kind.normalized else kind


def specs_of(values: Mapping[str, Any]) -> tuple[PoolSpec | UpsampleSpec, ConvSpec]:
    """Pooling or upsampling, and convolution, of a node of these operators.  values: its attributes."""
    kernel_shape, strides, pads, dilations = (tuple(values[name]) for name in _WINDOW)
    conv = ConvSpec(kernel_shape, strides, pads, dilations, int(values.get("group", 1)))
    if UPSAMPLE in values:
        return UpsampleSpec(tuple(values[UPSAMPLE])), conv
    return PoolSpec(*(tuple(values[f"pool_{name}"]) for name in _WINDOW)), conv


def give_parts(node: NodeProto, parts: Parts) -> None:
    """Turn a node of these operators into the one that does `parts`; the inputs are the caller's."""
    node.op_type = parts.op_type
    values: dict[str, int | float] = {
        "prologue_affine": parts.affine_number,
        "prologue_activation": ACTIVATION_NUMBERS[parts.prologue],
        "prologue_alpha": float(parts.prologue_alpha),
        "residual": int(parts.residual),
        "activation": ACTIVATION_NUMBERS[parts.epilogue],
        "alpha": float(parts.epilogue_alpha),
    }
    if parts.normalized:
        values |= {"norm_groups": parts.norm_groups, "epsilon": float(parts.epsilon)}
    give(node, {} if parts.is_plain else values, (*_PART_INTS, *_PART_FLOATS, *_NORM_INTS, *_NORM_FLOATS))


def layout_of(node: NodeProto) -> int:
    """The attribute channels_last of a node of these operators."""
    return next((item.i for item in node.attribute if item.name == CHANNELS_LAST), 0)


def accumulation_of(node: NodeProto) -> int:
    """The attribute accumulation of a node of these operators, a number of `ACCUMULATIONS`."""
    return next((item.i for item in node.attribute if item.name == ACCUMULATION), 0)


def give_accumulation(node: NodeProto, accumulation: str) -> None:
    """Set the attribute accumulation of a node of these operators, which has no such attribute where it is the default."""
    number = ACCUMULATIONS[accumulation]
    give(node, {ACCUMULATION: number} if number else {}, (ACCUMULATION,))


def give_layout(node: NodeProto, channels_last: int, perms: Mapping[str, Any] = MappingProxyType({})) -> None:
    """Set the attribute channels_last of a node of these operators, which has none where it is 0, and the permutations."""
    give(node, ({CHANNELS_LAST: channels_last} if channels_last else {}) | dict(perms), (CHANNELS_LAST, *_PERMS))


def complete_layouts(nodes: list[NodeProto]) -> set[str]:
    """Give nodes of these operators the permutations that their functions need; the operators that need such functions.  An
    operator has one function in a model.  Where one of its nodes has channels last, that function permutes by attributes, and
    those of the other nodes change nothing."""
    permuting = {node.op_type for node in nodes if layout_of(node)}
    for node in nodes:
        layout, perms = layout_of(node), {}
        if node.op_type in permuting:
            rank = next(len(item.ints) for item in node.attribute if item.name == "kernel_shape")
            perms = function_perms(layout, rank, OPERATORS[node.op_type].residual)
        give_layout(node, layout, perms)
    return permuting


def make_node(inputs: list[str], output: str, before: PoolSpec | UpsampleSpec, conv: ConvSpec, name: str = "") -> NodeProto:
    """A ConvAvgPool or UpsampleConv node, by what stands `before` its convolution.  inputs: X, W and, if there is a bias, B."""
    values: dict[str, Any]
    if isinstance(before, UpsampleSpec):
        values = {UPSAMPLE: before.factors, SCALES: scales_of(before)}
    else:
        values = {f"pool_{attribute}": value for attribute, value in asdict(before).items()}
    values |= asdict(conv)
    values |= {"weight_perm": to_channels_first(conv.rank), "plugin_version": "1", "plugin_namespace": ""}
    op_type = Parts(upsamples=isinstance(before, UpsampleSpec)).op_type
    return helper.make_node(op_type, inputs, [output], name=name or None, domain=DOMAIN, **values)


def scales_of(up: UpsampleSpec) -> list[float]:
    """The scales of the Resize that upsamples."""
    return [1.0, 1.0, *map(float, up.factors)]


def function_proto(op_type: str, opset: int, *, permuting: bool = False, for_sizes: bool = False) -> FunctionProto:
    """An operator as a function of the standard operators of `opset`.

    Before 19 pool_dilations must be all 1; those that upsample need UPSAMPLING_OPSET, those that normalize NORMALIZING_OPSET.
    permuting: with Transposes around, by attributes, for nodes with channels last.  for_sizes: only the sizes of what it gives
    have to be right, and to follow from its inputs' by themselves.
    """
    parts = OPERATORS[op_type]
    x, residual, y = ("X_channels_first", "R_channels_first", "Y_channels_first") if permuting else ("X", "R", "Y")
    body = [f"{x} = Transpose <perm: ints = @x_perm> (X)"] if permuting else []
    if permuting and parts.residual:
        body.append(f"{residual} = Transpose <perm: ints = @r_perm> (R)")
    if parts.normalized and not for_sizes:
        body.append(_NORMALIZATION.replace("INPUT", x))
        x = "normalized"
    if parts.modulated:
        body.append(f"product = Mul ({x}, scale) scaled = Add (product, shift)")
    elif parts.affine:
        # As BatchNormalization, which onnxruntime runs in one pass with a Relu behind it, in its blocked layout too.
        # Mean 0 and variance 1 of shift's type: folded to constants when the function is inlined.
        body.append("mean = Sub (shift, shift) variance = Exp (mean)")
        body.append(f"scaled = BatchNormalization <epsilon = 0.0> ({x}, scale, shift, mean, variance)")
    x = "scaled" if parts.affine else x
    if parts.prologue:
        body.append(_activation(parts.prologue, x, "activated", "prologue_alpha"))
        x = "activated"
    body.append("weight = Transpose <perm: ints = @weight_perm> (W)")
    if parts.upsamples:
        nearest = ", ".join(f'{name} = "{NEAREST[name]}"' for name in sorted(NEAREST))
        body.append(f"factors = Constant <value_floats: floats = @{SCALES}> () upsampled = Resize <{nearest}> ({x}, , factors)")
    else:
        windows = _WINDOW[: 4 if opset >= POOL_DILATIONS_OPSET else 3]
        body.append(f"pooled = AveragePool <count_include_pad = 1, {_referring(windows, 'pool_')}> ({x})")
    given = f"({'upsampled' if parts.upsamples else 'pooled'}, weight, B)"
    result = "convolved" if parts.residual or parts.epilogue else y
    body.append(f"{result} = Conv <{_referring(_WINDOW)}, group: int = @group> {given}")
    if parts.residual:
        total = "sum" if parts.epilogue else y
        body.append(f"{total} = Add ({result}, {residual})")
        result = total
    if parts.epilogue:
        body.append(_activation(parts.epilogue, result, y, "alpha"))
    if permuting:
        body.append(f"Y = Transpose <perm: ints = @y_perm> ({y})")
    attributes = [*(_UPSAMPLING | _SCALES if parts.upsamples else _POOLING), *_CONVOLUTION, *_OTHERS]
    attributes += () if parts.is_plain else (*_PART_INTS, *_PART_FLOATS)
    attributes += (*_NORM_INTS, *_NORM_FLOATS) if parts.normalized else ()
    attributes += ("x_perm", "y_perm", *(("r_perm",) if parts.residual else ())) if permuting else ()
    head = f'<domain: "{DOMAIN}", opset_import: ["" : {opset}]> {op_type} <{", ".join(attributes)}>'
    function = parser.parse_function(f"{head} ({', '.join(parts.inputs)}) => (Y) {{ {' '.join(body)} }}")
    for node in function.node:
        node.ClearField("domain")
    before = "Nearest upsampling" if parts.upsamples else "Average pooling that counts its padding"
    function.doc_string = f"{before}, then convolution with channels-last weights."
    if not parts.is_plain:
        core = Parts(upsamples=parts.upsamples).op_type
        function.doc_string = f"{core} with what its name says before and behind it; zero padding comes after the prologue."
    return function


_NORMALIZATION = """
    kept = Constant <value_ints: ints = [0]> ()
    rest = Constant <value_ints: ints = [-1]> ()
    one = Constant <value_ints: ints = [1]> ()
    number = Constant <value_int: int = @norm_groups> ()
    groups = Reshape (number, one)
    grouped_shape = Concat <axis = 0> (kept, groups, rest)
    grouped = Reshape (INPUT, grouped_shape)
    float_ones = ConstantOfShape <value = float[1] value {1.0}> (groups)
    ones = CastLike (float_ones, INPUT)
    float_zeros = ConstantOfShape <value = float[1] value {0.0}> (groups)
    zeros = CastLike (float_zeros, INPUT)
    normal = InstanceNormalization <epsilon: float = @epsilon> (grouped, ones, zeros)
    shape = Shape (INPUT)
    normalized = Reshape (normal, shape)"""
"""Mean 0 and variance 1 of INPUT in groups of channels, in a function's body."""


def _activation(op_type: str, x: str, y: str, alpha: str) -> str:
    """An activation in a function's body; the function's attribute `alpha` is its slope."""
    if op_type == "Silu":
        gate = f"{y.removesuffix('_channels_first')}_gate"
        return f"{gate} = Sigmoid ({x}) {y} = Mul ({x}, {gate})"
    return f"{y} = {op_type} {f'<alpha: float = @{alpha}> ' if op_type == 'LeakyRelu' else ''}({x})"


def _referring(names: Collection[str], prefix: str = "") -> str:
    """Attributes, lists of integers, that take the values of the function's of the same names behind a prefix."""
    return ", ".join(f"{name}: ints = @{prefix}{name}" for name in names)


def functions_for(
    op_types: set[str], opset: int, permuting: Collection[str] = (), *, for_sizes: bool = False
) -> list[FunctionProto]:
    """The functions of the operators named, in a fixed order.  permuting: operators that have nodes with channels last."""
    names = [name for name in OP_TYPES if name in op_types]
    return [function_proto(name, opset, permuting=name in permuting, for_sizes=for_sizes) for name in names]


def permutes(function: FunctionProto) -> bool:
    """Return True if an operator's function is for nodes with channels last."""
    return "x_perm" in function.attribute


def used_in(model: ModelProto) -> set[str]:
    """Which of these operators the model's graphs and functions use."""
    return {node.op_type for node in model_nodes(model) if is_operator(node)}


def complete_functions(model: ModelProto, opset: int, *, for_sizes: bool = False) -> set[str]:
    """Give a model the functions of the operators that it uses, which are returned, and no other of these; nodes get the
    permutations that their functions need.  for_sizes: see `function_proto`; then none stays that is there."""
    nodes = list(filter(is_operator, model_nodes(model)))
    used, permuting = {node.op_type for node in nodes}, complete_layouts(nodes)  # before nodes in functions are copied
    there = {function.name: function for function in model.functions if function.domain == DOMAIN and function.name in OP_TYPES}
    stay = {name for name in used & there.keys() if not for_sizes and permutes(there[name]) == (name in permuting)}
    kept = [part for part in model.functions if part.domain != DOMAIN or part.name in stay or part.name not in OP_TYPES]
    new = functions_for(used - stay, opset, permuting, for_sizes=for_sizes)
    refill(model.functions, [*kept, *new])
    return used


def add_functions_for_sizes(model: ModelProto) -> None:
    """Give a model functions for all its nodes of these operators, by which onnx infers their results' shapes."""
    nodes = list(filter(is_operator, model_nodes(model)))
    for node in nodes:
        given = {item.name for item in node.attribute if item.ints or item.floats}
        needed = {"kernel_shape", SCALES} if OPERATORS[node.op_type].upsamples else {"kernel_shape"}
        if layout_of(node) not in LAYOUTS or not given >= needed:
            node.op_type += "Unusable"  # has no function: its result stays unknown
    if nodes:
        complete_functions(model, TYPES_OPSET, for_sizes=True)


def attributes_of(parts: Parts) -> dict[str, tuple[int, int | str | None, str]]:
    """The attributes of an operator: type, default and meaning.  Those without a default are required, but for permutations."""
    kinds = {
        AttributeProto.INTS: {**(_UPSAMPLING if parts.upsamples else _POOLING), **_CONVOLUTION},
        AttributeProto.FLOATS: _SCALES if parts.upsamples else {},
        AttributeProto.INT: ({} if parts.is_plain else _PART_INTS) | (_NORM_INTS if parts.normalized else {}),
        AttributeProto.FLOAT: ({} if parts.is_plain else _PART_FLOATS) | (_NORM_FLOATS if parts.normalized else {}),
    }
    found: dict[str, tuple[int, int | str | None, str]] = {}
    for kind, meanings in kinds.items():
        found |= {name: (kind, None, text) for name, text in meanings.items()}
    for name, (default, text) in _OPTIONAL.items():
        found[name] = (AttributeProto.STRING if isinstance(default, str) else AttributeProto.INT, default, text)
    return found | {name: (AttributeProto.INTS, None, _PERMS[name]) for name in _PERMS if name != "r_perm" or parts.residual}


def check_domain(domain: str) -> None:
    """Raise OptionError for a domain in which runtimes look for ONNX's own operators alone."""
    if domain == "" or f"{domain}.".startswith("ai.onnx."):
        raise OptionError(f"domain: got {domain!r}, where ONNX has its own operators; expected another, as trt.plugins")


def move_to_domain(model: ModelProto, domain: str, source: str = DOMAIN) -> bool:
    """Give the model's nodes of these operators and their functions another domain, for runtimes that look for it there.

    source: the domain that they have.  Functions that the domain has already, of an earlier move, stay.  Returns whether there
    was anything to move.  Raises OptionError where the domain has another function of an operator's name, or is ONNX's.
    """
    check_domain(domain)
    nodes = [node for node in model_nodes(model) if node.domain == source and node.op_type in OP_TYPES]
    if domain == source or not nodes:
        return False
    if (name := _clash(model, domain, source)) is not None:
        raise OptionError(f"domain {domain!r}: got another function {name!r}, expected none or convpool's; give another domain")
    for node in nodes:
        node.domain = domain
    known = {function.name for function in model.functions if function.domain == domain}
    for index in reversed(range(len(model.functions))):
        function = model.functions[index]
        if function.domain == source and function.name in OP_TYPES:
            function.domain = domain
            if function.name in known:
                del model.functions[index]
    stays = any(part.domain == source for part in (*model_nodes(model), *model.functions))
    for holder in (model, *model.functions):
        versions = {entry.domain: entry.version for entry in holder.opset_import}
        if source in versions:
            versions[domain] = max(versions.get(domain, 0), versions[source])
            kept = [name for name in versions if stays or name != source]
            refill(holder.opset_import, [helper.make_opsetid(name, versions[name]) for name in kept])
    return True


def _clash(model: ModelProto, domain: str, source: str) -> str | None:
    """The name of a function of `source` that does something else in `domain`."""
    there = {function.name: function for function in model.functions if function.domain == domain}
    moving = (function for function in model.functions if function.domain == source and function.name in OP_TYPES)
    return next((found.name for found in moving if not _same(found, there.get(found.name, found))), None)


def move_back(model: ModelProto) -> bool:
    """Undo `move_to_domain`, for domains with nothing but these operators as defined here; whether there were any."""
    opset = opset_of(model.opset_import)
    ours = []
    for domain in {function.domain: None for function in model.functions if function.domain != DOMAIN}:
        found = [function for function in model.functions if function.domain == domain]
        used, names = {node.op_type for node in model_nodes(model) if node.domain == domain}, {f.name for f in found}
        if used <= names <= set(OP_TYPES) and all(_is_ours(function, opset) for function in found):
            ours.append(domain)
    return any([_clash(model, DOMAIN, domain) is None and move_to_domain(model, DOMAIN, domain) for domain in ours])


def _is_ours(function: FunctionProto, opset: int) -> bool:
    """Return True if a function computes what the operator of its name does."""
    (own,) = functions_for({function.name}, opset, {function.name} if permutes(function) else ())
    return _same(own, function)


def _same(one: FunctionProto, other: FunctionProto) -> bool:
    """Return True if two functions compute the same; onnxslim, for one, changes the order of nodes."""
    same = all(list(getattr(one, part)) == list(getattr(other, part)) for part in ("input", "output", "attribute"))
    return same and sorted(map(_meaning, one.node)) == sorted(map(_meaning, other.node))


def _meaning(node: NodeProto) -> tuple[Any, ...]:
    """The computation of a node, without its name and its documentation."""
    attributes = sorted(item.SerializeToString(deterministic=True) for item in node.attribute)
    return node.op_type, node.domain, list(node.input), list(node.output), attributes


def _check_form(node: NodeProto) -> None:
    """Raise ModelError where a node of these operators has other inputs, outputs or attributes than its operator."""
    parts, given, where = OPERATORS[node.op_type], {item.name: item.type for item in node.attribute}, named(node)
    least = len(parts.inputs) - parts.is_plain
    if not least <= len(node.input) <= len(parts.inputs) or not all(node.input) or len(node.output) != 1:
        counts = f"{len(node.input)} inputs and {len(node.output)} outputs"
        raise ModelError(f"{where}: tensors; got {counts}, expected {', '.join(parts.inputs)}, all named, and Y")
    wanted = attributes_of(parts)
    for name in given.keys() - wanted.keys():
        raise ModelError(f"{where}: {name}; got an attribute of this name, expected none")
    for name, (kind, default, _) in wanted.items():
        if name in given and given[name] != kind or name not in given and default is None and name not in _PERMS:
            got = AttributeProto.AttributeType.Name(given[name]) if name in given else "none"
            raise ModelError(f"{where}: {name}; got {got}, expected {AttributeProto.AttributeType.Name(kind)}")


def check_meaning(model: ModelProto) -> None:
    """Raise ModelError where onnxruntime, which runs functions, would compute something else than these operators do."""
    permuting = {}
    for function in (found for found in model.functions if found.domain == DOMAIN and found.name in OP_TYPES):
        permuting[function.name] = permutes(function)
        if not _is_ours(function, opset_of(function.opset_import)):
            raise ModelError(f"function '{DOMAIN}::{function.name}': got another body, expected the operator's own")
    for node in filter(is_operator, model_nodes(model)):
        _check_form(node)
        known = [item for item in node.attribute if not item.ref_attr_name]
        given: dict[str, list[Any]] = {item.name: list(item.floats if item.name == SCALES else item.ints) for item in known}
        rank, layout = len(given.get("kernel_shape", ())), layout_of(node)
        perms = function_perms(layout, rank, True) if layout in LAYOUTS else {}
        factors, opset, where = tuple(given.get(UPSAMPLE, ())), opset_of(model.opset_import), named(node)
        if factors and (len(factors) != rank or not all(1 <= factor <= MAX_UPSAMPLE for factor in factors)):
            raise ModelError(f"{where}: {UPSAMPLE}; got {list(factors)}, expected {rank} factors from 1 to {MAX_UPSAMPLE}")
        needed = NORMALIZING_OPSET if OPERATORS[node.op_type].normalized else UPSAMPLING_OPSET if factors else 0
        if opset < needed:
            raise ModelError(f"{where}: the model's opset; got {opset}, expected at least {needed}")
        scales = {SCALES: scales_of(UpsampleSpec(factors))} if factors else {}
        for name, expected in {"weight_perm": to_channels_first(rank), **scales, **perms}.items():
            if rank and given.get(name, expected) != expected:
                raise ModelError(f"{where}: {name}; got {given[name]}, expected {expected}")
        if layout and node.op_type in permuting and not permuting[node.op_type]:
            raise ModelError(f"{where}: {CHANNELS_LAST}; got {layout} with a function for channels first")

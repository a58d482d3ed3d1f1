# SPDX-License-Identifier: Apache-2.0
"""Damaged models: small good ones with bytes flipped and cut, or with parts exchanged, removed and filled with nonsense."""

import functools

import numpy as np
import onnx
from onnx import AttributeProto, TensorProto, helper

import convpool
from tests.support.models import graph
from tests.support.random_pooling import make_case

POOL = "AveragePool<kernel_shape=[2,2], strides=[2,2]>"
PAIR = f"h = Conv<pads=[1,1,1,1]>(x, w, b)\ny = {POOL}(h)"
SIZES = (-(2**63), -1, 0, 1, 2, 3, 4, 5, 7, 16, 17, 255, 4096, 2**20, 2**31 - 1, 2**31, 2**33, 2**62, 2**63 - 1)
NAMES = ("", "x", "w", "b", "h", "y", "nowhere", "a/b:0", "é" * 40, "-", "a\0b")
OPERATORS = ("Conv", "AveragePool", "GlobalAveragePool", "ReduceMean", "Pad", "Slice", "Add", "Mul", "Relu", "Reshape", "Concat",
             "If", "Loop", "Constant", "ConstantOfShape", "MaxPool", "ConvTranspose", "Resize", "Cast", "Transpose", "Identity",
             "BatchNormalization", "ConvAvgPool", "NoSuchOperator", "")  # fmt: skip
DOMAINS = ("", "ai.onnx", "ai.convpool", "ai.onnx.ml", "com.microsoft", "nowhere")


@functools.cache
def good_models() -> tuple[bytes, ...]:
    """Small models that hold what the passes and the reader look at."""
    wide = {"b": (32,), "m": (32, 1, 1), "s": (16, 1, 1)}
    bodies = [
        (PAIR, {}),
        (f"r = Relu(x)\nt = Mul(r, s)\nh = Conv<pads=[1,1,1,1]>(t, w, b)\np = {POOL}(h)\na = Add(p, m)\ny = LeakyRelu(a)", {}),
        ("h = Conv(x, w, b)\ny = GlobalAveragePool(h)", {}),
        ("h = Conv(x, w, b)\ny = ReduceMean<axes=[2,3], keepdims=1>(h)", {}),
        (f"q = Pad(x, o)\nh = Conv(q, w, b)\ny = {POOL}(h)", {"o": [0, 0, 1, 1, 0, 0, 1, 1]}),
        ("h = AveragePool<kernel_shape=[2,2], strides=[2,2]>(x)\ny = Conv(h, w, b)", {}),
        (f"c = Concat<axis=1>(x, x)\nh = Conv(x, w, b)\ny = {POOL}(h)\nz = Concat<axis=1>(c, x)", {}),
        (
            "h = Conv<pads=[1,1,1,1]>(x, w, b)\nd = Slice(h, b0, e0, t, e)\ne1 = Slice(h, b1, e0, t, e)\n"
            "f = Add(d, e1)\ny = Div(f, two)",
            {"b0": [0], "b1": [1], "e0": [12], "t": [2], "e": [2], "two": np.float32(2)},
        ),
    ]
    models = []
    for body, constants in bodies:
        outputs = "float[a,b,c,d] y" + (", float[e,f,g,h] z" if "z =" in body else "")
        models.append(graph(body, {**wide, **constants}, outputs=outputs, inputs="float[N,16,12,12] x"))
    models += [graph(PAIR.replace("(x, w, b)", "(x, w)"), inputs=f"{kind}[1,16,12,12] x", outputs=f"{kind}[a,b,c,d] y",
                     opset=22, ir=10, constants={"w": np.ones((8, 16, 3, 3), np.dtype(numpy_type))})
               for kind, numpy_type in (("float16", "float16"), ("double", "float64"))]  # fmt: skip
    inner = helper.make_graph(
        graph(PAIR, wide).graph.node, "branch", [], [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        graph(PAIR, wide).graph.initializer,
    )  # fmt: skip
    choice = graph("y = Identity(x)", inputs="float[1,16,12,12] x, bool c")
    del choice.graph.node[:]
    choice.graph.node.append(helper.make_node("If", ["c"], ["y"], then_branch=inner, else_branch=inner))
    models.append(choice)
    models += [convpool.optimize(model, check=0).model for model in models[:2]]
    return tuple(model.SerializeToString() for model in models)


def damaged(seed: int) -> bytes:
    """The damaged model of this number."""
    rng = np.random.default_rng([seed, 20])
    if rng.random() < 0.5:
        data = good_models()[rng.integers(len(good_models()))]
    else:
        data = make_case(int(rng.integers(1000))).model.SerializeToString()
    if rng.random() < 0.35:
        return _bytes(data, rng)
    model = onnx.ModelProto.FromString(data)
    for _ in range(int(rng.integers(1, 4))):
        change = CHANGES[rng.integers(len(CHANGES))]
        try:
            change(model, rng)
        except (ValueError, TypeError, IndexError, AttributeError):
            continue  # nothing there to change in that way
    data = model.SerializeToString()
    return _bytes(data, rng) if rng.random() < 0.1 else data


def _bytes(data: bytes, rng: np.random.Generator) -> bytes:
    """Bytes flipped, cut, doubled or exchanged; mostly where there are no weights, so that names and structure are hit."""
    content = bytearray(data)
    for _ in range(int(rng.integers(1, 6))):
        at = int(rng.integers(len(content))) if rng.random() < 0.3 else _structural(content, rng)
        kind = rng.integers(5)
        if kind == 0:
            content[at] ^= 1 << int(rng.integers(8))
        elif kind == 1:
            content[at] = int(rng.integers(256))
        elif kind == 2:
            del content[at : at + int(rng.integers(1, 9))]
        elif kind == 3:
            content[at:at] = content[at : at + int(rng.integers(1, 40))]
        elif rng.random() < 0.2:
            del content[at:]
        if not content:
            break
    return bytes(content)


def _structural(content: bytearray, rng: np.random.Generator) -> int:
    """A place in the first or last part, where the nodes and the inputs are."""
    at = int(rng.integers(min(len(content), 600)))
    return at if rng.random() < 0.6 else len(content) - 1 - at


def _pick(items, rng):
    return items[int(rng.integers(len(items)))]


def _size(rng) -> int:
    return int(_pick(SIZES, rng))


def _graphs(model):
    def within(found):
        yield found
        for node in found.node:
            for attribute in node.attribute:
                if attribute.HasField("g"):
                    yield from within(attribute.g)

    return [*within(model.graph)]


def _node(model, rng):
    return _pick([node for holder in (*_graphs(model), *model.functions) for node in holder.node], rng)


def _tensor(model, rng):
    return _pick([tensor for holder in _graphs(model) for tensor in holder.initializer], rng)


def _value(model, rng):
    return _pick([value for g in _graphs(model) for value in (*g.input, *g.output, *g.value_info)], rng)


def change_attribute(model, rng):
    attribute = _pick(_node(model, rng).attribute, rng)
    kind = rng.integers(6)
    if kind == 0:
        attribute.ints[:] = [_size(rng) for _ in range(int(rng.integers(0, 6)))]
    elif kind == 1:
        attribute.ints[int(rng.integers(len(attribute.ints)))] = _size(rng)
    elif kind == 2:
        attribute.i, attribute.f = _size(rng), float(rng.choice([0.0, -1.0, np.nan, np.inf, 1e30]))
    elif kind == 3:
        attribute.type = int(rng.integers(0, 15))
    elif kind == 4:
        attribute.name = str(_pick([*NAMES, "pads", "strides", "kernel_shape", "auto_pad", "group", "dilations", "axes"], rng))
    else:
        attribute.s = bytes(rng.integers(0, 256, 5).astype(np.uint8))


def add_attribute(model, rng):
    name = _pick(("pads", "strides", "kernel_shape", "auto_pad", "group", "dilations", "ceil_mode", "count_include_pad", "axes",
                  "keepdims", "axis", "value", "to"), rng)  # fmt: skip
    values = (_size(rng), [_size(rng) for _ in range(int(rng.integers(1, 5)))], 1.5, "SAME_UPPER", b"\xff\xfe", "é")
    node = _node(model, rng)
    kept = [item for item in node.attribute if item.name != name or rng.random() < 0.3]
    del node.attribute[:]
    node.attribute.extend([*kept, helper.make_attribute(name, _pick(values, rng))])


def remove_attribute(model, rng):
    node = _node(model, rng)
    del node.attribute[int(rng.integers(len(node.attribute)))]


def exchange_attributes(model, rng):
    first, second = _node(model, rng), _node(model, rng)
    own = [AttributeProto.FromString(item.SerializeToString()) for item in first.attribute]
    del first.attribute[:]
    first.attribute.extend(second.attribute)
    del second.attribute[:]
    second.attribute.extend(own)


def refer_to_attribute(model, rng):
    _pick(_node(model, rng).attribute, rng).ref_attr_name = "given"


def change_operator(model, rng):
    node = _node(model, rng)
    node.op_type = str(_pick(OPERATORS, rng))
    if rng.random() < 0.3:
        node.domain = str(_pick(DOMAINS, rng))


def change_name(model, rng):
    node = _node(model, rng)
    names = _pick((node.input, node.output), rng)
    names[int(rng.integers(len(names)))] = str(_pick(NAMES, rng))


def exchange_names(model, rng):
    first, second = _node(model, rng), _node(model, rng)
    a, b = int(rng.integers(len(first.input))), int(rng.integers(len(second.output)))
    first.input[a], second.output[b] = second.output[b], first.input[a]


def more_or_fewer_inputs(model, rng):
    node = _node(model, rng)
    if rng.random() < 0.5:
        node.input.append(str(_pick(NAMES, rng)))
    else:
        del _pick((node.input, node.output), rng)[-1]


def change_dims(model, rng):
    tensor = _tensor(model, rng)
    if rng.random() < 0.5:
        tensor.dims[int(rng.integers(len(tensor.dims)))] = _size(rng)
    else:
        dims = list(tensor.dims)
        rng.shuffle(dims)
        tensor.dims[:] = dims[: int(rng.integers(0, 5))]


def reshape_weights(model, rng):
    tensor = _tensor(model, rng)
    tensor.dims[:] = [*tensor.dims, 1] if rng.random() < 0.5 else [int(np.prod(tensor.dims))]


def change_data(model, rng):
    tensor = _tensor(model, rng)
    kind = rng.integers(4)
    if kind == 0:
        tensor.raw_data = tensor.raw_data[: -int(rng.integers(1, 9))]
    elif kind == 1:
        tensor.ClearField("raw_data")
    elif kind == 2:
        tensor.float_data.extend([1.0] * int(rng.integers(1, 5)))
    else:
        values = np.frombuffer(tensor.raw_data, np.uint8).copy()
        values[rng.integers(0, max(len(values), 1), 64)] = 0xFF
        tensor.raw_data = values.tobytes()


def change_tensor_type(model, rng):
    _tensor(model, rng).data_type = int(rng.integers(-1, 40))


def make_external(model, rng):
    tensor = _tensor(model, rng)
    tensor.data_location = TensorProto.EXTERNAL
    for key in ("location", "offset", "length", "checksum", "__class__"):
        if rng.random() < 0.6:
            value = _pick(
                ("", "data", "data", "../data", "/etc/hostname", "a\0b", "x" * 300, "-1", "0", "1", "18432", "9" * 30, "é"), rng
            )
            tensor.external_data.add(key=key, value=str(value))


def change_value_shape(model, rng):
    shape = _value(model, rng).type.tensor_type.shape
    kind = rng.integers(3)
    if kind == 0:
        shape.dim[int(rng.integers(len(shape.dim)))].dim_value = _size(rng)
    elif kind == 1:
        shape.dim[int(rng.integers(len(shape.dim)))].dim_param = str(_pick(NAMES, rng))
    else:
        del shape.dim[int(rng.integers(len(shape.dim)))]


def change_value_type(model, rng):
    value = _value(model, rng)
    if rng.random() < 0.7:
        value.type.tensor_type.elem_type = int(rng.integers(-1, 40))
    elif rng.random() < 0.5:
        value.type.sequence_type.elem_type.tensor_type.elem_type = 1
    else:
        value.ClearField("type")


def rename_value(model, rng):
    _value(model, rng).name = str(_pick(NAMES, rng))


def change_versions(model, rng):
    if rng.random() < 0.3:
        model.ir_version = int(_pick([-1, 0, 1, 2, 3, 4, 7, 11, 99, 2**40], rng))
    else:
        entry = _pick(model.opset_import, rng)
        entry.version = int(_pick([-1, 0, 1, 6, 7, 8, 9, 10, 11, 13, 18, 22, 26, 2**40], rng))
        if rng.random() < 0.2:
            entry.domain = str(_pick(DOMAINS, rng))


def remove_part(model, rng):
    part = _pick((model.graph.node, model.graph.initializer, model.graph.input, model.graph.output, model.functions,
                  model.opset_import), rng)  # fmt: skip
    del part[int(rng.integers(len(part)))]


def double_part(model, rng):
    part = _pick((model.graph.node, model.graph.initializer, model.graph.input, model.graph.output, model.functions,
                  model.opset_import), rng)  # fmt: skip
    part.append(_pick(part, rng))


def shuffle_nodes(model, rng):
    nodes = [type(node).FromString(node.SerializeToString()) for node in model.graph.node]
    rng.shuffle(nodes)
    del model.graph.node[:]
    model.graph.node.extend(nodes)


def change_function(model, rng):
    function = _pick(model.functions, rng)
    if rng.random() < 0.5:
        names = _pick((function.input, function.output, function.attribute), rng)
        names[int(rng.integers(len(names)))] = str(_pick(NAMES, rng))
    else:
        function.name, function.domain = str(_pick(OPERATORS, rng)), str(_pick(DOMAINS, rng))


def call_itself(model, rng):
    function = _pick(model.functions, rng)
    function.node.append(helper.make_node(function.name, list(function.input), ["again"], domain=function.domain))


def make_sparse(model, rng):
    tensor = _tensor(model, rng)
    sparse = model.graph.sparse_initializer.add()
    sparse.values.CopyFrom(tensor)
    sparse.indices.data_type = TensorProto.INT64
    sparse.dims[:] = [_size(rng) for _ in range(3)]


CHANGES = (
    change_attribute, add_attribute, remove_attribute, exchange_attributes, refer_to_attribute, change_operator,
    change_name, exchange_names, more_or_fewer_inputs, change_dims, reshape_weights, change_data, change_tensor_type,
    make_external, change_value_shape, change_value_type, rename_value, change_versions, remove_part, double_part,
    shuffle_nodes, change_function, call_itself, make_sparse,
)  # fmt: skip

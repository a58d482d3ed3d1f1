# SPDX-License-Identifier: Apache-2.0
"""Damaged models: small good ones with bytes flipped and cut, or with parts exchanged, removed and filled with nonsense.  A part
is any field of any message that ONNX's protobuf has, so nothing of a file is left out; what a field is filled with comes from
lists of values and names that have been trouble, or from another message of its kind."""

import functools

import numpy as np
import onnx
from google.protobuf.message import Message
from onnx import TensorProto, helper

import convpool
from tests.support.models import graph
from tests.support.random_pooling import make_case

POOL = "AveragePool<kernel_shape=[2,2], strides=[2,2]>"
PAIR = f"h = Conv<pads=[1,1,1,1]>(x, w, b)\ny = {POOL}(h)"
SIZES = (-(2**63), -1, 0, 1, 2, 3, 4, 5, 7, 16, 17, 255, 4096, 2**20, 2**31 - 1, 2**31, 2**33, 2**62, 2**63 - 1)
TEXTS = ("", "x", "w", "b", "h", "y", "nowhere", "a/b:0", "é" * 40, "-", "a\0b", "pads", "strides", "kernel_shape", "auto_pad",
         "group", "dilations", "axes", "ceil_mode", "count_include_pad", "keepdims", "SAME_UPPER", "ai.onnx", "ai.convpool",
         "com.microsoft", "Conv", "AveragePool", "GlobalAveragePool", "ReduceMean", "Pad", "Slice", "Add", "Mul", "Relu",
         "Reshape", "Concat", "If", "Loop", "Constant", "ConstantOfShape", "MaxPool", "ConvTranspose", "Resize", "Cast",
         "Transpose", "Identity", "BatchNormalization", "ConvAvgPool", "NoSuchOperator")  # fmt: skip
REALS = (0.0, -1.0, 1.5, np.nan, np.inf, 1e30)


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
    rng = np.random.default_rng([seed, 21])
    if rng.random() < 0.5:
        data = good_models()[rng.integers(len(good_models()))]
    else:
        data = make_case(int(rng.integers(1000))).model.SerializeToString()
    if rng.random() < 0.35:
        return _bytes(data, rng)
    model = onnx.ModelProto.FromString(data)
    for _ in range(int(rng.integers(1, 4))):
        try:
            change(model, rng)
        except (ValueError, TypeError):
            continue  # no value of the field
    data = model.SerializeToString()
    return _bytes(data, rng) if rng.random() < 0.1 else data


def change(model: onnx.ModelProto, rng: np.random.Generator) -> None:
    """Change one field of a message of a random kind; mostly one that is set."""
    if rng.random() < 0.05:
        _make_external(_pick(model.graph.initializer or [TensorProto()], rng), rng)
        return
    kinds: dict[str, list[Message]] = {}
    for message in _messages(model):
        kinds.setdefault(message.DESCRIPTOR.name, []).append(message)
    alike = kinds[_pick(sorted(kinds), rng)]
    message, other = _pick(alike, rng), _pick(alike, rng)
    is_set = [field.name for field, _ in message.ListFields()]
    name = _pick(is_set if is_set and rng.random() < 0.8 else sorted(message.DESCRIPTOR.fields_by_name), rng)
    value = getattr(message, name)
    if rng.random() < 0.1:
        message.ClearField(name)
    elif hasattr(value, "extend"):
        _change_list(value, getattr(other, name), rng)
    elif not isinstance(value, Message):
        setattr(message, name, _another(value, rng))
    elif rng.random() < 0.5:
        value.CopyFrom(getattr(other, name))
    else:
        value.SetInParent()


def _change_list(values, others, rng: np.random.Generator) -> None:
    """An element less, one more, another one, or all in another order or those of another message."""
    kind, at = rng.integers(5), int(rng.integers(len(values))) if values else 0
    if kind == 0 and values:
        del values[at]
    elif kind == 1 or not values:
        element = _pick([*values, *others] or [0, "x", b"x"], rng)
        values.append(element if isinstance(element, Message) else _another(element, rng))
    elif kind == 2 and not isinstance(values[at], Message):
        values[at] = _another(values[at], rng)
    else:
        elements = list(values if kind == 3 else others)
        copies = [type(e).FromString(e.SerializeToString()) if isinstance(e, Message) else e for e in elements]
        rng.shuffle(copies)
        del values[:]
        values.extend(copies)


def _another(value, rng: np.random.Generator):
    """A value of the same type."""
    if isinstance(value, bytes):
        kind = rng.integers(3)
        if kind == 0 and value:
            return bytes(rng.choice([0xFF, *value[:1]]) for _ in value)
        return value[: -int(rng.integers(1, 9))] if kind == 1 else bytes(rng.integers(0, 256, 5).astype(np.uint8))
    if isinstance(value, str):
        return str(_pick(TEXTS, rng))
    return float(_pick(REALS, rng)) if isinstance(value, float) else int(_pick((*SIZES, *range(-1, 40)), rng))


def _messages(message: Message):
    """Yield a message and all within it."""
    yield message
    for _, value in message.ListFields():
        for part in value if hasattr(value, "extend") else [value]:
            if isinstance(part, Message):
                yield from _messages(part)


def _pick(items, rng: np.random.Generator):
    return items[int(rng.integers(len(items)))]


def _make_external(tensor: TensorProto, rng: np.random.Generator) -> None:
    tensor.data_location = TensorProto.EXTERNAL
    for key in ("location", "offset", "length", "checksum", "__class__"):
        if rng.random() < 0.6:
            value = _pick(
                ("", "data", "data", "../data", "/etc/hostname", "a\0b", "x" * 300, "-1", "0", "1", "18432", "9" * 30, "é"), rng
            )
            tensor.external_data.add(key=key, value=str(value))


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

# SPDX-License-Identifier: Apache-2.0
"""Evaluates small ONNX models in float64, node by node, with what an error bound needs.  Shares no code with convpool.

Every tensor carries its value, its magnitude (the same computation with the absolute value of each term, so that
sums cannot cancel) and the number of roundings on the longest way to it.  By Higham, "Accuracy and Stability of
Numerical Algorithms", lemma 3.1, a computation whose every term meets at most n roundings of unit roundoff u is off by
at most gamma(n, u) * magnitude, in whatever order the terms are summed.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np
from onnx import helper, numpy_helper

UNIT_ROUNDOFF = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}


def gamma(roundings: int, unit: float) -> float:
    """Higham's gamma_n, the relative error bound of n roundings; no bound at all from n u = 1 on."""
    return roundings * unit / (1 - roundings * unit) if roundings * unit < 1 else np.inf


@dataclass(frozen=True)
class Traced:
    """value, magnitude: float64 arrays of one shape; roundings: at most so many on the way of any term."""

    value: np.ndarray
    magnitude: np.ndarray
    roundings: int = 0

    @staticmethod
    def of(array: np.ndarray) -> Traced:
        value = np.asarray(array).astype(np.float64)
        return Traced(value, np.abs(value))


def evaluate(model, feeds: dict[str, np.ndarray]) -> dict[str, Traced]:
    """Every tensor of the main graph by name; feeds replace initializers of the same name."""
    env = {tensor.name: Traced.of(numpy_helper.to_array(tensor)) for tensor in model.graph.initializer}
    env |= {name: Traced.of(array) for name, array in feeds.items()}
    functions = {(function.domain, function.name): function for function in model.functions}
    opset = max(entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx"))
    _run(model.graph.node, env, functions, opset, {})
    return env


def _run(nodes, env: dict[str, Traced], functions, opset: int, given: dict) -> None:
    for node in nodes:
        attributes = {}
        for item in node.attribute:
            if not item.ref_attr_name:
                attributes[item.name] = helper.get_attribute_value(item)
            elif item.ref_attr_name in given:
                attributes[item.name] = given[item.ref_attr_name]
        inputs = [env.get(name) if name else None for name in node.input]
        function = functions.get((node.domain, node.op_type))
        if function is None:
            env[node.output[0]] = _operator(node.op_type, inputs, attributes, opset)
            continue
        inner = dict(zip(function.input, inputs, strict=False))
        inner_opset = next(entry.version for entry in function.opset_import if not entry.domain)
        _run(function.node, inner, functions, inner_opset, attributes)
        env |= {outer: inner[name] for outer, name in zip(node.output, function.output, strict=False)}


def _operator(op_type: str, inputs: list, attributes: dict, opset: int) -> Traced:
    if op_type == "Conv":
        return _conv(*inputs, attributes=attributes)
    if op_type in ("AveragePool", "GlobalAveragePool"):
        return _pool(inputs[0], attributes if op_type == "AveragePool" else None)
    if op_type in ("Add", "Sub", "Mul", "Div", "Sum", "Mean"):
        return _arithmetic(op_type, inputs)
    if op_type == "BatchNormalization":
        return _batch_normalization(*inputs, epsilon=attributes.get("epsilon", float(np.float32(1e-5))))
    if op_type in ("Identity", "Dropout"):
        return inputs[0]
    if op_type == "Constant":
        return Traced.of(numpy_helper.to_array(attributes["value"]))
    if op_type == "Concat":
        values, magnitudes = ([getattr(x, part) for x in inputs] for part in ("value", "magnitude"))
        most = max(x.roundings for x in inputs)
        return Traced(*(np.concatenate(part, attributes["axis"]) for part in (values, magnitudes)), most)
    if op_type in ("ReduceMean", "ReduceSum"):
        axes = attributes.get("axes") or inputs[1].value.astype(int).tolist()
        keep = bool(attributes.get("keepdims", 1))
        count = int(np.prod([inputs[0].value.shape[axis] for axis in axes]))
        combine = np.mean if op_type == "ReduceMean" else np.sum
        return _map(inputs[0], lambda part: combine(part, axis=tuple(axes), keepdims=keep), count)
    if op_type in ("Squeeze", "Unsqueeze"):
        axes = attributes.get("axes") or inputs[1].value.astype(int).tolist()
        change = np.squeeze if op_type == "Squeeze" else np.expand_dims
        return _map(inputs[0], lambda part: change(part, tuple(axes)), 0)
    if op_type == "Reshape":
        shape = [n or inputs[0].value.shape[axis] for axis, n in enumerate(inputs[1].value.astype(int).tolist())]
        return _map(inputs[0], lambda part: part.reshape(shape), 0)
    if op_type == "Resize":
        return _map(inputs[0], lambda part: _halved(part, inputs[2].value), 2)
    if op_type == "Transpose":
        return _map(inputs[0], lambda part: part.transpose(attributes["perm"]), 0)
    if op_type == "Slice":
        starts, ends, axes, steps = (item.value.astype(object) for item in inputs[1:5])
        index = [slice(None)] * inputs[0].value.ndim
        for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
            index[int(axis)] = slice(int(start), int(end), int(step))
        return _map(inputs[0], lambda part: part[tuple(index)], 0)
    if op_type == "Relu":
        return Traced(np.maximum(inputs[0].value, 0), inputs[0].magnitude, inputs[0].roundings)
    if op_type == "LeakyRelu":
        slope = attributes.get("alpha", float(np.float32(0.01)))
        value = np.where(inputs[0].value < 0, slope * inputs[0].value, inputs[0].value)
        return Traced(value, inputs[0].magnitude * max(1, abs(slope)), inputs[0].roundings + 1)
    if op_type == "Tanh":  # no steeper than 1, and never more than its argument; runtimes have it to a few units
        return Traced(np.tanh(inputs[0].value), inputs[0].magnitude, inputs[0].roundings + 8)
    if op_type == "Sigmoid":  # no steeper than 1/4, and at most 1/2 + |x|/4
        value = 0.5 * (1 + np.tanh(0.5 * inputs[0].value))
        return Traced(value, 0.5 + 0.25 * inputs[0].magnitude, inputs[0].roundings + 8)
    if op_type == "Exp":
        return _map(inputs[0], lambda part: np.exp(inputs[0].value), 1)
    if op_type == "Pad":
        return _pad(inputs, attributes, opset)
    raise AssertionError(f"the evaluator has no {op_type}; a test generated or a rewrite emitted an unforeseen node")


def _halved(part: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Linear interpolation at 2 i + 1/2 on each axis that `scales` halves; nothing else is generated."""
    for axis, scale in enumerate(scales):
        assert scale in (1, 0.5)
        if scale == 0.5:
            even, odd = (np.take(part, range(start, part.shape[axis] // 2 * 2, 2), axis) for start in (0, 1))
            part = (even + odd) / 2
    return part


def _map(x: Traced, function, roundings: int) -> Traced:
    return Traced(function(x.value), function(x.magnitude), x.roundings + roundings)


def _arithmetic(op_type: str, inputs: list[Traced]) -> Traced:
    values, sizes = [x.value for x in inputs], [x.magnitude for x in inputs]
    roundings = max(x.roundings for x in inputs) + len(inputs)
    if op_type in ("Add", "Sum", "Mean"):
        count = len(inputs) if op_type == "Mean" else 1
        return Traced(sum(values) / count, sum(sizes) / count, roundings)
    if op_type == "Sub":
        return Traced(values[0] - values[1], sizes[0] + sizes[1], roundings)
    total = sum(x.roundings for x in inputs) + 1
    if op_type == "Mul":
        return Traced(values[0] * values[1], sizes[0] * sizes[1], total)
    with np.errstate(divide="ignore", invalid="ignore"):
        # A divisor b that is off by d < |b| / 2 moves the quotient by at most 2 |d / b| of it.
        spread = 2 * sizes[1] / np.abs(values[1]) if inputs[1].roundings else 1.0
        return Traced(values[0] / values[1], sizes[0] / np.abs(values[1]) * spread, total)


def _batch_normalization(x: Traced, scale: Traced, shift: Traced, mean: Traced, variance: Traced, epsilon: float):
    shape = (-1, *[1] * (x.value.ndim - 2))
    factor = (scale.value / np.sqrt(variance.value + epsilon)).reshape(shape)
    offset, middle = shift.value.reshape(shape), mean.value.reshape(shape)
    value = (x.value - middle) * factor + offset
    # Subtraction, epsilon, root, division, product, sum.
    return Traced(value, (x.magnitude + np.abs(middle)) * np.abs(factor) + np.abs(offset), x.roundings + 6)


def _pad(inputs: list, attributes: dict, opset: int) -> Traced:
    x, mode = inputs[0], attributes.get("mode", b"constant").decode()
    if opset < 11:
        pads, fill = list(attributes["pads"]), attributes.get("value", 0.0)
    else:
        pads = inputs[1].value.astype(int).tolist()
        fill = float(inputs[2].value.reshape(())) if len(inputs) > 2 and inputs[2] is not None else 0.0
    rank = x.value.ndim
    if len(inputs) > 3 and inputs[3] is not None:
        axes, full = inputs[3].value.astype(int).tolist(), [0] * (2 * rank)
        for place, axis in enumerate(axes):
            full[axis], full[axis + rank] = pads[place], pads[place + len(axes)]
        pads = full

    def one(part: np.ndarray, value: float) -> np.ndarray:
        index = tuple(slice(max(-pads[i], 0), part.shape[i] - max(-pads[rank + i], 0)) for i in range(rank))
        width = [(max(pads[i], 0), max(pads[rank + i], 0)) for i in range(rank)]
        given = {"constant_values": value} if mode == "constant" else {}
        return np.pad(part[index], width, mode={"constant": "constant", "reflect": "reflect"}[mode], **given)

    return Traced(one(x.value, fill), one(x.magnitude, abs(fill)), x.roundings)


def _geometry(sizes, attributes: dict, kernel: list[int], ceil: bool):
    """Strides, dilations, begin and end pads and output sizes of a window operator, by the ONNX specification."""
    r = len(kernel)
    strides, dilations = attributes.get("strides", [1] * r), attributes.get("dilations", [1] * r)
    extents = [d * (k - 1) + 1 for k, d in zip(kernel, dilations, strict=True)]
    auto = attributes.get("auto_pad", b"NOTSET").decode()
    pads = list(attributes.get("pads", [0] * (2 * r))) if auto == "NOTSET" else [0] * (2 * r)
    out = []
    for i in range(r):
        if auto.startswith("SAME"):
            out.append(-(-sizes[i] // strides[i]))
            total = max((out[i] - 1) * strides[i] + extents[i] - sizes[i], 0)
            pads[i] = total // 2 if auto == "SAME_UPPER" else total - total // 2
            pads[r + i] = total - pads[i]
            continue
        room = sizes[i] + pads[i] + pads[r + i] - extents[i]
        count = (-(-room // strides[i]) if ceil else room // strides[i]) + 1
        # A window that would start in the end padding is left out.
        out.append(count - 1 if ceil and (count - 1) * strides[i] >= sizes[i] + pads[i] else count)
    return strides, dilations, pads, out


def _patches(part: np.ndarray, kernel, strides, dilations, pads, out):
    """For each kernel offset the input elements that meet it; zeros wherever a window leaves the input."""
    r = len(kernel)
    far = [(out[i] - 1) * strides[i] + dilations[i] * (kernel[i] - 1) + 1 - pads[i] - part.shape[2 + i] for i in range(r)]
    part = np.pad(part, [(0, 0), (0, 0), *((pads[i], max(far[i], 0)) for i in range(r))])
    for offset in product(*(range(k) for k in kernel)):
        begin = [o * d for o, d in zip(offset, dilations, strict=True)]
        window = (slice(b, b + s * (n - 1) + 1, s) for b, s, n in zip(begin, strides, out, strict=True))
        yield offset, part[(..., *window)]


def _conv(x: Traced, w: Traced, b: Traced | None = None, *, attributes: dict) -> Traced:
    kernel, group = list(w.value.shape[2:]), attributes.get("group", 1)
    strides, dilations, pads, out = _geometry(x.value.shape[2:], attributes, kernel, False)

    def one(data: np.ndarray, weight: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
        n, m = data.shape[0], weight.shape[0]
        weight = weight.reshape(group, m // group, *weight.shape[1:])
        total = np.zeros((n, group, m // group, *out))
        for offset, patch in _patches(data, kernel, strides, dilations, pads, out):
            flat = patch.reshape(n, group, -1, int(np.prod(out)))
            total += np.einsum("ngcx,gmc->ngmx", flat, weight[(..., *offset)]).reshape(total.shape)
        total = total.reshape(n, m, *out)
        return total if bias is None else total + bias.reshape(-1, *[1] * len(kernel))

    bias = (None, None) if b is None else (b.value, b.magnitude)
    # One product and at most as many additions as there are terms, and the bias.
    roundings = x.roundings + w.roundings + int(np.prod(w.value.shape[1:])) + 1
    return Traced(one(x.value, w.value, bias[0]), one(x.magnitude, w.magnitude, bias[1]), roundings)


def _pool(x: Traced, attributes: dict | None) -> Traced:
    sizes = list(x.value.shape[2:])
    attributes = {"kernel_shape": sizes} if attributes is None else attributes
    kernel = list(attributes["kernel_shape"])
    strides, dilations, pads, out = _geometry(sizes, attributes, kernel, bool(attributes.get("ceil_mode", 0)))
    inside = np.ones((1, 1, *sizes))
    if attributes.get("count_include_pad", 0):
        inside = np.ones((1, 1, *(n + pads[i] + pads[len(sizes) + i] for i, n in enumerate(sizes))))
    begins = [0] * len(sizes) if attributes.get("count_include_pad", 0) else pads
    count = sum(patch for _, patch in _patches(inside, kernel, strides, dilations, begins, out))

    def one(part: np.ndarray) -> np.ndarray:
        return sum(patch for _, patch in _patches(part, kernel, strides, dilations, pads, out)) / count

    return _map(x, one, int(np.prod(kernel)) + 1)

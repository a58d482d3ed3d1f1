# SPDX-License-Identifier: Apache-2.0
"""Random models with open sizes whose notes are of other sizes: value_info, outputs, and bodies' inputs and outputs.  All tensors
are noted at the fixed sizes of an export.  Then the inputs are opened in one of several spellings, and a noted size stays, or
becomes a name, a -1 or nothing."""

from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto, helper

from convpool.ir.protos import graphs_within
from tests.support.models import graph

CHANNELS = 16
MEANS = {
    "window": "{y} = AveragePool<kernel_shape=[{two}], strides=[{two}]>({h})",
    "overlap": "{y} = AveragePool<kernel_shape=[{three}], strides=[{two}], pads=[{ones}]>({h})",
    "same upper": '{y} = AveragePool<kernel_shape=[{two}], strides=[{two}], auto_pad="SAME_UPPER">({h})',
    "same lower": '{y} = AveragePool<kernel_shape=[{three}], strides=[{two}], auto_pad="SAME_LOWER">({h})',
    "ceil": "{y} = AveragePool<kernel_shape=[{two}], strides=[{two}], ceil_mode=1>({h})",
    "ceil, pads count": "{y} = AveragePool<kernel_shape=[{three}], strides=[{two}], pads=[{ones}],"
    " ceil_mode=1, count_include_pad=1>({h})",
    "global": "{y} = GlobalAveragePool({h})",
    "all": "{y} = ReduceMean<axes=[{axes}]>({h})",
    "all, flat": "{y}_f = ReduceMean<axes=[{axes}], keepdims=0>({h})\n{y} = Gemm({y}_f, fc)",
    "last": "{y} = ReduceMean<axes=[-1]>({h})",
    "sum": "{y} = ReduceSum({h}, all_axes)",
    "sum over one": "{y} = ReduceSum({h}, first_axis)",
    "head": "{y}_g = GlobalAveragePool({h})\n{y}_f = Flatten({y}_g)\n{y} = Gemm({y}_f, fc)",
    "view": "{y}_s = Shape({h})\n{y}_b = Slice({y}_s, zero, two_)\n{y}_t = Concat<axis=0>({y}_b, minus)\n"
    "{y}_v = Reshape({h}, {y}_t)\n{y} = ReduceMean<axes=[2]>({y}_v)",
    "sum by a count": "{y}_s = Shape({h})\n{y}_a = Slice({y}_s, two_, big)\n{y}_n = ReduceProd<keepdims=0>({y}_a)\n"
    "{y}_m = Cast<to=1>({y}_n)\n{y}_u = ReduceSum({h}, all_axes)\n{y} = Div({y}_u, {y}_m)",
    "window, shape read": "{y}_p = AveragePool<kernel_shape=[{two}], strides=[{two}]>({h})\n{y}_s = Shape({h})\n"
    "{y}_c = Cast<to=1>({y}_s)\n{y}_k = ReduceMax<keepdims=0>({y}_c)\n{y} = Mul({y}_p, {y}_k)",
}
FRONTS = {
    "": "{a} = Identity({x})",
    "relu": "{a} = Relu({x})",
    "unknown": "{a} = com.microsoft.Gelu({x})",
    "view": "{a}_s = Shape({x})\n{a}_r = Relu({x})\n{a} = Reshape({a}_r, {a}_s)",
    "pool": "{a} = MaxPool<kernel_shape=[{two}], strides=[{two}]>({x})",
    "add": "{a} = Add({x}, {z})",
    "unknown, add": "{a}_g = com.microsoft.Gelu({z})\n{a} = Add({a}_g, {x})",
}
MORE = ("window", "window", "window", "all", "all, flat", "global", "head", "head", "window, shape read")
"""Averages of which more are rewritten."""
PLACES = ("main", "main", "main", "If", "Loop", "Scan", "function")
PARAMETERS = ("w", "fc", "all_axes", "first_axis", "zero", "two_", "minus", "big")
OPSETS = (13, 17)
"""In which the nodes are spelled alike."""
VECTORS = ("_s", "_b", "_t", "_a", "_n")
"""How the names of sizes end."""
IMPORTS = ', "com.microsoft": 1, "local": 1'


@dataclass
class Noted:
    """A model, its choices in words, and the sizes of x that its inputs leave fixed."""

    model: onnx.ModelProto
    words: str
    fixed: list[int | None]

    def feeds(self, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Inputs of sizes at which every window fits, and which no check takes by itself."""
        sizes = [int(rng.choice([1, 2, 4])), CHANNELS, *rng.choice([13, 14, 17, 20, 21], len(self.fixed) - 2)]
        shape = [n if kept is None else kept for n, kept in zip(sizes, self.fixed, strict=True)]
        arrays: dict[str, np.ndarray] = {}
        for value in self.model.graph.input:
            # No runtime holds two inputs to one name.
            batch = 1 if value.name == "z" and self.fixed[0] is None and rng.random() < 0.3 else shape[0]
            array = rng.standard_normal([batch, *shape[1:]]).astype(np.float32)
            arrays[value.name] = np.array(True) if value.name == "flag" else array
        return arrays


def make(seed: int) -> Noted:
    """The model of a seed, of one of OPSETS in turn."""
    rng, opset = np.random.default_rng(seed), OPSETS[seed // 4 % len(OPSETS)]  # each with every target

    def pick(items):
        return items[int(rng.integers(len(items)))]

    rank, place, front, mean = pick([1, 2, 2, 2]), pick(PLACES), pick(list(FRONTS)), pick([*MEANS, *MORE])
    kernel, strides = pick([1, 1, 3, 5]), pick([1, 1, 1, 2])
    export = [pick([1, 1, 2, 8]), CHANNELS, *(pick([16, 24, 64]) for _ in range(rank))]
    opened = pick(["all", "all", "batch", "batch", "batch, others changed", "sides", "last"])
    fixed: list[int | None] = [None, CHANNELS, *(None,) * rank]
    for axis in {"all": (), "sides": (0,), "last": range(1 + rank)}.get(opened, range(2, 2 + rank)):
        fixed[axis] = export[axis] if "changed" not in opened else pick([17, 20])
    model, shapes = _placed(place, _core(front, kernel, strides, mean, rank), export, rank, kernel, opset)
    _note(model, shapes, rng)
    _open(model, fixed, rng)
    words = f"opset {opset}, {place}, {front or 'no front'}, kernel {kernel}, strides {strides}, {mean}"
    words += f", exported at {export}, open: {opened}"
    return Noted(model, words, fixed)


def _core(front: str, kernel: int, strides: int, mean: str, rank: int) -> str:
    """Nodes from {x}, and {z} in some, to {y}; all tensors in between begin with {p}."""

    def times(number: int, count: int = rank) -> str:
        return ", ".join([str(number)] * count)

    conv = f"{{h}} = Conv<pads=[{times(kernel // 2, 2 * rank)}], strides=[{times(strides)}]>({{a}}, w)"
    text = f"{FRONTS[front]}\n{conv}\n{MEANS[mean]}"
    axes = ", ".join(str(2 + axis) for axis in range(rank))
    words = {"two": times(2), "three": times(3), "ones": times(1, 2 * rank), "axes": axes, "a": "{p}a", "h": "{p}h"}
    for key, value in words.items():
        text = text.replace("{" + key + "}", value)
    return text.replace("{y}_", "{p}y_")


def _placed(
    place: str, core: str, export: list[int], rank: int, kernel: int, opset: int
) -> tuple[onnx.ModelProto, dict[str, list[int]]]:
    """The nodes in the main graph, in bodies or in a function; and the shapes of tensors by name, at the sizes of the export."""
    constants = {
        **{"w": (CHANNELS, CHANNELS, *(kernel,) * rank), "fc": (CHANNELS, 5), "all_axes": list(range(2, 2 + rank))},
        **{"first_axis": [2], "zero": [0], "two_": [2], "minus": [-1], "big": [2**31 - 1]},
        **{"trips": np.array(2), "yes": np.array(True)},
    }
    shapes = {"s": export, "t": export, "e": export[1:]}

    def nodes(x: str, y: str, prefix: str, batch: int = export[0]) -> str:
        text = core.replace("{x}", x).replace("{z}", "z").replace("{y}", y).replace("{p}", prefix)
        sizes = ",".join(map(str, [batch, *export[1:]]))
        inputs = f"float[{sizes}] {x}, float[{sizes}] z"
        alone = graph(text.replace("com.microsoft.Gelu", "Relu"), constants, inputs=inputs, outputs=f"float[] {y}")
        alone.graph.output[0].type.tensor_type.ClearField("shape")
        inferred = onnx.shape_inference.infer_shapes(alone, data_prop=True).graph
        for value in (*inferred.value_info, *inferred.output):
            shapes[value.name] = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        return text

    functions = ""
    if place == "main":
        body = nodes("x", "y", "")
    elif place == "If":
        branches = (f"{y} () => (float[] {y}) {{ {nodes('x', y, y[0])} }}" for y in ("ty", "ey"))
        body = "y = If(flag) <then_branch = {}, else_branch = {}>".format(*branches)
    elif place == "Loop":
        given = "(int64 i, bool c, float[] s) => (bool d, float[] t, float[] by)"
        body = f"l, ys = Loop(trips, yes, x) <body = b {given} {{ d = Identity(c) t = Relu(s) {nodes('s', 'by', 'b')} }}>"
        body += "\ny = ReduceMax<axes=[0], keepdims=0>(ys)"
    elif place == "Scan":
        inner = f"e4 = Unsqueeze(e, zero) {nodes('e4', 'by', 'b', 1)}"
        body = f"y = Scan<num_scan_inputs=1, body = b (float[] e) => (float[] by) {{ {inner} }}>(x)"
    else:
        names = ", ".join([*PARAMETERS, *["z"] * ("{z}" in core)])
        body = f"y = local.net(x, {names})"
        given = f'<domain: "local", opset_import: ["": {opset}, "com.microsoft": 1]> net (fx, {names}) => (fy)'
        functions = f"{given} {{ {nodes('fx', 'fy', 'f')} }}"
        shapes["y"] = shapes["fy"]
    sizes = ",".join(map(str, export))
    inputs = f"float[{sizes}] x" + f", float[{sizes}] z" * ("{z}" in core) + ", bool flag" * (place == "If")
    made = {"functions": functions, "imports": IMPORTS, "opset": opset}
    return graph(body, constants, inputs=inputs, outputs="float[] y", **made), shapes


def _note(model: onnx.ModelProto, shapes: dict[str, list[int]], rng: np.random.Generator) -> None:
    """Note shapes as they were at the export, each size in one of several spellings."""
    for inner in graphs_within(model.graph):
        bounds = {value.name: value for value in (*inner.input, *inner.output)}
        for name in dict.fromkeys([*bounds, *(name for node in inner.node for name in node.output)]):
            if name in ("x", "z") or name not in shapes or name not in bounds and rng.random() < 0.2:
                if name == "y":
                    bounds[name].type.tensor_type.ClearField("shape")
                continue
            value, vector = bounds.get(name) or inner.value_info.add(name=name), name.endswith(VECTORS)
            value.CopyFrom(helper.make_tensor_value_info(name, TensorProto.INT64 if vector else TensorProto.FLOAT, shapes[name]))
            for axis, dim in enumerate(() if vector else value.type.tensor_type.shape.dim):
                # onnxruntime holds an If to the sizes of its branches where all are given.
                how = str(rng.choice([*["kept"] * 3 * (axis > 0 or name not in ("ty", "ey")), "n", "h", "s", "-1", ""]))
                if how == "-1":
                    dim.dim_value = -1
                elif how != "kept":
                    dim.dim_param = how


def _open(model: onnx.ModelProto, fixed: list[int | None], rng: np.random.Generator) -> None:
    """Open the sizes of the inputs that are not fixed: by names of their own or shared ones, by -1, or by nothing."""
    spelling = str(rng.choice(["own", "own", "shared", "-1", "none", "mixed"]))
    for value in model.graph.input:
        for axis, (dim, kept) in enumerate(zip(value.type.tensor_type.shape.dim, fixed, strict=False)):
            how = str(rng.choice(["own", "shared", "-1", "none"])) if spelling == "mixed" else spelling
            if kept is not None:
                dim.dim_value = kept
            elif how == "own":
                dim.dim_param = "nchw"[axis]
            elif how == "shared":
                dim.dim_param = "n" if axis == 0 and rng.random() < 0.7 else "s"
            elif how == "-1":
                dim.dim_value = -1
            else:
                dim.Clear()

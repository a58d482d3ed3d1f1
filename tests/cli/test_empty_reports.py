# SPDX-License-Identifier: Apache-2.0
"""A report without a pair says what was seen, what stands between, and at most one step that helps.

Every step named is taken here, and has to change the outcome.
"""

import json
import shlex
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import onnxruntime
import pytest

import convpool
from convpool import api
from convpool.cli.group import command, run
from tests.support.models import graph
from tests.support.rewriting import PAIR, POOL

SCALES = {"s": np.float32(0.1), "z": np.int8(3), "lowest": np.int8(-128), "w8": np.ones((8, 16, 3, 3), np.int8)}
UP = {"up": np.array([1, 1, 2, 2], np.float32)}
FUSED = "\ny = com.microsoft.FusedConv<kernel_shape=[3,3]>(u, w)"
HALF = {"half": np.array([1, 1, 0.5, 0.5], np.float32)}
SOFTMAX = "h = Conv(x, w)\nr = Softmax<axis=1>(h)\n"
MICROSOFT = ', "com.microsoft": 1, "com.microsoft.nchwc": 1'
LOCAL = """<opset_import: ["": 17], domain: "local">
clipped (a) => (b) { b = Clip(a) }"""
SITUATIONS: dict[str, tuple] = {  # nodes, words of the report, and constants
    "no convolution": ("y = Relu(x)", "0 convolutions, 0 averages, 0 Resizes"),
    "an average alone": (f"y = {POOL}(x)", "0 convolutions, 1 average, 0 Resizes"),
    "convolutions alone": ("h = Conv(x, w)\ny = Relu(h)", "1 convolution, 0 averages, 0 Resizes"),
    "the average in front": (f"p = {POOL}(x)\ny = Conv(p, w)", "no average is computed from a convolution"),
    "side by side": (
        f"h = Conv<pads=[1,1,1,1]>(x, w)\na = {POOL}(x)\nb = MaxPool<kernel_shape=[2,2], strides=[2,2]>(h)\n"
        "c = Concat<axis=1>(a, b)\ny = Relu(c)",
        "no average is computed from a convolution",
    ),
    "ReduceMean": ("y = ReduceMean<axes=[2,3]>(x)", "0 convolutions, 1 average, 0 Resizes"),
    "a Resize to one half": ('y = Resize<mode="linear">(x, , half)', "0 convolutions, 1 average, 1 Resize", HALF),
    "a Resize to twice the size": ("h = Conv(x, w)\ny = Resize(h, , up)", "1 convolution, 0 averages, 1 Resize", UP),
    "Softmax": (f"{SOFTMAX}y = {POOL}(r)", "Softmax 1 x"),
    "two kinds": (f"{SOFTMAX}p = {POOL}(r)\nk = Conv(p, v)\nm = CumSum(k, one)\ny = {POOL}(m)", "Softmax 1 x, CumSum 1 x",
        {"v": (32, 32, 1, 1), "one": np.int64(1)}),
    "behind something linear": (f"h = Conv(x, w)\ng = Mul(h, two)\nr = Softmax<axis=1>(g)\ny = {POOL}(r)", "Softmax 1 x",
        {"two": np.float32(2)}),
    "a residual": (f"h = Conv<pads=[1,1,1,1]>(x, v)\ns = Add(h, x)\nr = Softmax<axis=1>(s)\ny = {POOL}(r)", "Softmax 1 x",
        {"v": (16, 16, 3, 3)}),
    "MatMul": (f"h = Conv(x, w)\nr = MatMul(h, m)\ny = {POOL}(r)", "MatMul 1 x", {"m": (10, 12)}),
    "Where": (f"h = Conv(x, w)\nc = Greater(h, h)\nr = Where(c, h, h)\ny = {POOL}(r)", "Where 1 x"),
    "a transposed convolution": (f"h = ConvTranspose(x, v)\ny = {POOL}(h)", "ConvTranspose 1 x", {"v": (16, 8, 3, 3)}),
    "a custom operator": (f"h = Conv(x, w)\nr = my.Own(h)\ny = {POOL}(r)", "my.Own 1 x"),
    "MaxPool": ("h = Conv(x, w)\ny = MaxPool<kernel_shape=[2,2]>(h)", "MaxPool follows a convolution 1 x"),
    "quantized, with an activation": (
        "q = QLinearConv(x8, s, z, w8, s, z, s, lowest)\nf = DequantizeLinear(q, s, lowest)\ny = GlobalAveragePool(f)",
        "QLinearConv 1 x",
        SCALES,
    ),
    "FusedConv with an activation": (f'h = com.microsoft.FusedConv<activation="Relu", kernel_shape=[3,3]>(x, w)\ny = {POOL}(h)',
        "com.microsoft.FusedConv 1 x"),
    "a linear Resize and FusedConv": (f'u = Resize<mode="linear">(x, , up){FUSED}', "0 averages, 1 Resize", UP),
    "in a branch": (
        f"y = If(flag) <then_branch = yes () => (float[a,b,c,d] a) {{ h = Conv(x, w) r = LRN<size=3>(h) a = {POOL}(r) }}, "
        f"else_branch = no () => (float[a,b,c,d] b) {{ b = {POOL}(x) }}>",
        "1 convolution, 2 averages, 0 Resizes",
    ),
}  # fmt: skip
QUANTIZE = "next      run convpool with --lowering auto on the float model, and quantize the result"
ORIGINAL = "next      the model was saved by onnxruntime, with operators of its own: optimize the original"
HELPED: dict[str, tuple] = {  # nodes, words of the report, the step, and constants
    "quantized": ("q = QLinearConv(x8, s, z, w8, s, z, s, z)\nf = DequantizeLinear(q, s, z)\ny = GlobalAveragePool(f)",
        "QLinearConv 1 x", QUANTIZE, SCALES),
    "dynamically quantized": ("q = ConvInteger(x8, w8, z, z)\nf = Cast<to=1>(q)\nm = Mul(f, s)\ny = GlobalAveragePool(m)",
        "ConvInteger 1 x", QUANTIZE, SCALES),
    "FusedConv": (f"h = com.microsoft.FusedConv<kernel_shape=[3,3]>(x, w)\ny = {POOL}(h)", "com.microsoft.FusedConv 1 x",
        ORIGINAL),
    "FusedConv behind a Resize": (f"u = Resize(x, , up){FUSED}", "0 averages, 1 Resize", ORIGINAL, UP),
    "upsampled in onnxruntime's layout": (
        f"u = com.microsoft.nchwc.Upsample<scales=[1,1,2,2]>(x){FUSED.replace('Fused', 'nchwc.')}",
        "0 averages, 1 Resize",
        ORIGINAL,
    ),
}  # fmt: skip


def situation(body: str, constants: dict | None = None) -> onnx.ModelProto:
    inputs = "int8[1,16,12,12] x8" if "x8" in body else "float[1,16,12,12] x" + ", bool flag" * ("If(" in body)
    return graph(body, constants, inputs=inputs, imports=f'{MICROSOFT}, "my": 1, "local": 1', functions=LOCAL)


def inspect(path: Path | str, capsys, *words: str) -> list[str]:
    """Return what the command prints."""
    assert run(command, "convpool", ["inspect", str(path), *words]) == 0
    return capsys.readouterr().out.splitlines()


def steps(lines: list[str]) -> list[str]:
    """The lines that name a next step, but for those that tell how to use a result."""
    return [line for line in lines if line.startswith("next") and not line.startswith(("next      on a", "next      in "))]


@pytest.mark.parametrize("name", SITUATIONS)
def test_an_empty_report_says_what_was_seen(name, tmp_path, capsys):
    body, words, *constants = SITUATIONS[name]
    onnx.save(situation(body, *constants), tmp_path / "m.onnx")
    lines = inspect(tmp_path / "m.onnx", capsys)
    assert lines[0] == "Nothing to rewrite: no Conv stands beside an average pooling or a resize."
    assert any(words in line for line in lines), lines
    assert lines[1].startswith("seen      ") and len(lines) <= 5 and steps(lines) == []


@pytest.mark.parametrize("domain", ["com.microsoft", "com.microsoft.nchwc"])
@pytest.mark.parametrize("op_type", ["AveragePool", "Conv", "QLinearConv"])
@pytest.mark.parametrize("names", [([], ["y"]), ([""], ["y"]), (["x"], []), ([""], [""]), (["x", "", ""], ["y", ""])])
def test_nodes_that_nobody_checks_end_no_report(domain, op_type, names, tmp_path, capsys):
    model = situation("h = Conv(x, w)\ny = Relu(h)")
    node = onnx.helper.make_node(op_type, [name.replace("x", "h") for name in names[0]], [name and "z" for name in names[1]])
    node.domain = domain
    model.graph.node.append(node)
    onnx.save(model, tmp_path / "m.onnx")
    assert inspect(tmp_path / "m.onnx", capsys)[0].startswith("Nothing to rewrite")


@pytest.mark.parametrize("name", HELPED)
def test_an_empty_report_names_the_step_that_helps(name, tmp_path, capsys):
    body, words, step, *constants = HELPED[name]
    onnx.save(situation(body, *constants), tmp_path / "m.onnx")
    lines = inspect(tmp_path / "m.onnx", capsys)
    assert any(words in line for line in lines) and steps(lines) == [step]


@pytest.mark.parametrize("level", ["ORT_ENABLE_EXTENDED", "ORT_ENABLE_ALL"])
def test_the_original_of_a_model_saved_by_onnxruntime_has_the_pair(level, tmp_path, capsys):
    body = f"{PAIR.replace('y =', 'p =')}\nr = Relu(p)\nk = Conv(r, v)\ny = GlobalAveragePool(k)"
    original, options = graph(body, {"v": (32, 32, 3, 3)}), onnxruntime.SessionOptions()
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    options.optimized_model_filepath = str(tmp_path / "saved.onnx")
    options.log_severity_level = 4
    onnxruntime.InferenceSession(original.SerializeToString(), options, providers=["CPUExecutionProvider"])
    lines = inspect(tmp_path / "saved.onnx", capsys)
    saved = any("nchwc" in node.domain for node in onnx.load(tmp_path / "saved.onnx").graph.node)
    assert steps(lines) == [ORIGINAL] * saved
    assert convpool.optimize(original, check=0).report.summary.rewritten > 0


CUMSUM = "a = CumSum(none, axis)\n"
"""An operator that the passes do not see through, and onnxruntime computes."""
NONE = {"none": [0] * 8, "axis": np.int64(0), "v": (128, 16, 1, 1), "w48": (48, 128, 3, 3)}
SAME = POOL.replace("<", '<auto_pad="SAME_UPPER", ')
PREPARED = {
    "a mean over open sizes": ("h = Conv(x, w)\ny = GlobalAveragePool(h)", "--fix-shape"),
    "a mean in two steps": ("h = Conv(x, w)\na = ReduceMean<axes=[2]>(h)\ny = ReduceMean<axes=[3]>(a)", "--fix-shape"),
    "ceil_mode": (f"h = Conv<pads=[1,1,1,1]>(x, w)\ny = {POOL.replace('<', '<ceil_mode=1, ')}(h)", "--fix-shape"),
    "SAME_UPPER": (f"h = Conv<pads=[1,1,1,1]>(x, w)\ny = {SAME}(h)", "--fix-shape"),
    "a Resize by means of sizes that nothing tells": (
        "m = Conv<strides=[2,2]>(x, v)\na = Shape<end=2>(m)\nb = Shape<start=2>(x)\nc = Mul(b, b)\nd = Div(c, b)\n"
        "s = Concat<axis=0>(a, d)\n"
        'u = Resize<mode="nearest", coordinate_transformation_mode="asymmetric", nearest_mode="floor">(m, , , s)\n'
        "y = Conv<pads=[1,1,1,1]>(u, w48)",
        "--target cpu --fix-shape",
    ),
    "a computed Pad": (f"h = Conv<pads=[1,1,1,1]>(x, w)\n{CUMSUM}p = Pad(h, a)\ny = {POOL}(p)", "--fold"),
    "a Pad of sizes": (
        f"h = Conv<pads=[1,1,1,1]>(x, w)\ns = Shape(x)\nt = Sub(s, s)\nd = Concat<axis=0>(t, t)\na = CumSum(d, axis)\n"
        f"p = Pad(h, a)\ny = {POOL}(p)",
        "--fold --fix-shape",
    ),
}
WITHOUT_STEP = {
    "a Relu": f"h = Conv(x, w)\nr = Relu(h)\ny = {POOL}(r)",
    "a Pad that a caller gives": f"h = Conv(x, w)\np = Pad(h, n)\ny = {POOL}(p)",
    "a Relu on open sizes": "h = Conv(x, w)\nr = Relu(h)\ny = GlobalAveragePool(r)",
    "another reader": f"h = Conv(x, w)\nr = Softmax<axis=1>(h)\np = {POOL}(h)\nq = {POOL}(r)\ny = Add(p, q)",
}


def rewritten(path: Path, *words: str) -> int:
    """How many pairs of a model `inspect` or `optimize` rewrites."""
    report = path.with_suffix(".json")
    assert run(command, "convpool", [*words, "--report", str(report)]) == 0
    return json.loads(report.read_text())["summary"]["rewritten"]


@pytest.mark.parametrize(
    ("name", "target"),
    [(name, target) for name in PREPARED for target in ("any", "cpu", *(("tensorrt", "cuda") if "mean" not in name else ()))],
)
def test_the_step_that_prepares_a_model_has_more_rewritten(name, target, tmp_path, capsys):
    body, option = PREPARED[name]
    path = tmp_path / "a model.onnx"
    onnx.save(graph(body, NONE, inputs="float[N,16,H,W] x"), path)
    (step,) = steps(inspect(path, capsys, "--target", target))
    words = shlex.split(step)
    words = words[words.index("convpool") + 1 :]
    assert f" {option} " in f"{step} " and step.startswith("next      1 more with ")
    assert rewritten(path, "inspect", str(path), "--target", target) == 0
    assert rewritten(path, *words, "--input-shape", "x:1x16x224x224") == 1
    result = onnx.load(path.with_suffix(".convpool.onnx"))
    assert ("--fix-shape" in option) == (not result.graph.input[0].type.tensor_type.shape.dim[2].dim_param)


def test_a_resize_to_the_size_of_a_skip_is_for_a_cpu(tmp_path, capsys):
    body = PREPARED["a Resize by means of sizes that nothing tells"][0].replace("(a, d)", "(a, b)")
    onnx.save(graph(body, NONE, inputs="float[N,16,H,W] x"), path := tmp_path / "m.onnx")
    assert steps(inspect(path, capsys)) == [f"next      1 more for onnxruntime on a CPU: convpool optimize {path} --target cpu"]
    assert rewritten(path, "inspect", str(path), "--target", "cpu") == 1


def test_rules_that_are_disabled_are_named(tmp_path, capsys):
    onnx.save(graph(PAIR), tmp_path / "m.onnx")
    assert rewritten(tmp_path / "m.onnx", "optimize", str(tmp_path / "m.onnx"), "--disable", "pool_first") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Nothing to rewrite with pool_first disabled." and not any("between" in line for line in lines)
    assert "pool_first" not in json.loads((tmp_path / "m.json").read_text())["options"]["rules"]


@pytest.mark.parametrize("name", WITHOUT_STEP)
def test_no_step_is_named_where_none_helps(name, tmp_path, capsys, monkeypatch):
    tries: list[object] = []
    monkeypatch.setattr(api, "_pairs", lambda *how, pairs=api._pairs: tries.append(how) or pairs(*how))
    onnx.save(graph(WITHOUT_STEP[name], inputs="float[N,16,H,W] x, int64[8] n"), tmp_path / "m.onnx")
    lines = inspect(tmp_path / "m.onnx", capsys)
    # Constants folded and sizes fixed together, and then neither alone.
    assert lines[0].startswith("Nothing rewritten") and steps(lines) == [] and len(tries) == ("Pad" in name)


def test_the_step_that_counts_a_model_counts_it(tmp_path, capsys):
    onnx.save(graph(PAIR, inputs="float[N,16,H,W] x"), path := tmp_path / "m.onnx")
    (step,) = steps(lines := inspect(path, capsys))
    assert "model     multiply-adds unknown" in lines
    assert step == f"next      to count multiply-adds, with your sizes: convpool inspect {path} --input-shape x:1x16x224x224"
    assert run(command, "convpool", shlex.split(step.partition(": convpool ")[2])) == 0
    assert "model     231 M -> 57.8 M multiply-adds (-75 %), with input x:1x16x224x224\n" in capsys.readouterr().out


def quantized(model: onnx.ModelProto, folder: Path, form: str) -> onnx.ModelProto:
    """The model quantized by onnxruntime's tool."""
    quantization, rng = pytest.importorskip("onnxruntime.quantization"), np.random.default_rng(0)
    feeds = iter([{"x": rng.standard_normal((1, 16, 12, 12)).astype(np.float32)} for _ in range(3)])
    reader = SimpleNamespace(get_next=lambda: next(feeds, None))
    onnx.save(model, folder / "float.onnx")
    if form == "dynamic":
        quantization.quantize_dynamic(folder / "float.onnx", folder / "int8.onnx", op_types_to_quantize=["Conv"])
    else:
        kind = getattr(quantization.QuantFormat, form)
        quantization.quantize_static(folder / "float.onnx", folder / "int8.onnx", reader, quant_format=kind)
    return onnx.load(folder / "int8.onnx")


@pytest.mark.parametrize("form", ["QDQ", "QOperator", "dynamic"])
def test_a_model_is_quantized_after_convpool(form, tmp_path, capsys):
    """In this order the pair is rewritten and quantized; in the other one there is no pair."""
    model = graph(PAIR, outputs="float[1,32,6,6] y")
    onnx.save(quantized(model, tmp_path, form), tmp_path / "first.onnx")
    lines = inspect(tmp_path / "first.onnx", capsys)
    assert steps(lines) == [QUANTIZE]
    assert lines[0].startswith("Nothing ")
    result = convpool.optimize(model, lowering="auto")
    assert result.report.summary.rewritten == 1
    later = quantized(result.model, tmp_path, form)
    kinds = {"QDQ": "QuantizeLinear", "QOperator": "QLinearConv", "dynamic": "ConvInteger"}
    assert kinds[form] in {node.op_type for node in later.graph.node}
    feed = {"x": np.random.default_rng(1).standard_normal((1, 16, 12, 12)).astype(np.float32)}
    sessions = [onnxruntime.InferenceSession(m.SerializeToString(), providers=["CPUExecutionProvider"]) for m in (model, later)]
    wanted, got = (session.run(None, feed)[0] for session in sessions)
    assert np.abs(got - wanted).max() < 0.05 * np.abs(wanted).max()


@pytest.mark.parametrize("form", ["QDQ", "QOperator"])
def test_an_activation_that_the_quantizer_took_in_makes_no_step(form, tmp_path, capsys):
    model = graph(f"h = Conv<pads=[1,1,1,1]>(x, w)\nr = Relu(h)\ny = {POOL}(r)", outputs="float[1,32,6,6] y")
    onnx.save(quantized(model, tmp_path, form), tmp_path / "m.onnx")
    assert steps(inspect(tmp_path / "m.onnx", capsys)) == []
    assert convpool.optimize(model, check=0, lowering="auto").report.summary.rewritten == 0

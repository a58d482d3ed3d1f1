# SPDX-License-Identifier: Apache-2.0
"""Shape inference: models on which onnx's ends or blocks the process are refused in one line; layers as outputs.
`tests/check/test_session.py` has what both other processes share: threads, forks, Ctrl-C, a parent that is killed."""

import resource
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import convpool
from convpool.check import session, session_process
from convpool.errors import ModelError
from convpool.ir import inference as elsewhere
from convpool.ir import inference_process, process
from convpool.ir.inference import EndedError, infer, mark_layers
from convpool.ir.model import load, passes_full_check
from convpool.ir.process import Shared
from tests.support import sessions
from tests.support.models import graph, random_feeds
from tests.support.rewriting import PAIR


class Module:
    """In place of onnx's C++ module, in the other process."""

    source = """
import os, signal
class shape_inference:
    def infer_shapes(model, *_):
        if model == b"fails":
            raise ValueError("wrong with it")
        if model == b"stops":
            os.kill(os.getpid(), signal.SIGSTOP)
        if model == b"for ever":
            os.kill(os.getpid(), signal.SIGXCPU)
        if model == b"memory":
            bytearray(2**62)
        if model == b"status":
            os._exit(7)
        if model in (b"SIGABRT", b"SIGSEGV", b"SIGFPE"):
            os.write(2, b"text")
            os.kill(os.getpid(), getattr(signal, model.decode()))
        return b"<" + model + b">"
"""


@pytest.fixture
def pretended(tmp_path, monkeypatch):
    """A process that does what the request says."""
    path = tmp_path / "module.py"
    path.write_text(Module.source)
    monkeypatch.setattr(elsewhere.onnx.onnx_cpp2py_export, "__file__", str(path))
    monkeypatch.setattr(elsewhere, "_shared", fresh())
    monkeypatch.setattr(elsewhere, "ANSWER_S", 1)
    yield
    elsewhere._shared.end()


def fresh() -> Shared:
    return Shared(inference_process, elsewhere._shared._words)


def outcome(model: bytes) -> bytes | str | None:
    try:
        return infer(model)
    except EndedError as error:
        return str(error)


ENDS = {
    b"SIGABRT": "ends the process with SIGABRT", b"SIGSEGV": "ends the process with SIGSEGV",
    b"SIGFPE": "ends the process with SIGFPE", b"status": "ends the process with status 7",
    b"for ever": "does not end", b"stops": "does not end", b"memory": "takes more than 2 GiB of memory",
}  # fmt: skip


@pytest.mark.parametrize("model", ENDS)
def test_what_a_model_does_to_its_process(pretended, capfd, model):
    assert [outcome(each) for each in (b"good", model, b"good", model)] == [b"<good>", ENDS[model], b"<good>", ENDS[model]]
    assert capfd.readouterr() == ("", "")


def test_a_model_has_so_much_time_and_memory_beside_what_the_process_has(monkeypatch):
    limits = {}
    monkeypatch.setattr(inference_process, "limit", limits.__setitem__)
    service = object.__new__(inference_process.Service)
    service._module = SimpleNamespace(shape_inference=SimpleNamespace(infer_shapes=lambda *given: given))
    assert service.infer(b"model", False) == (b"model", False, False, True)
    assert service.infer(b"model", True) == (b"model", True, True, False)
    with open("/proc/self/statm") as memory:
        own = int(memory.read().split()[0]) * resource.getpagesize()
    assert abs(limits[resource.RLIMIT_AS] - own - inference_process.GROWTH_BYTES - 5 * inference_process.COPIES) < 2**26
    assert inference_process.GROWTH_BYTES == 2**31  # as the message says
    used = resource.getrusage(resource.RUSAGE_SELF)
    assert abs(limits[resource.RLIMIT_CPU] - used.ru_utime - used.ru_stime - inference_process.CPU_S) < 2


def test_a_limit_is_no_higher_than_the_hard_one(monkeypatch):
    told = []
    for hard, wanted in ((resource.RLIM_INFINITY, 100), (50, 50), (200, 100)):
        monkeypatch.setattr(resource, "getrlimit", lambda what, hard=hard: (0, hard))
        monkeypatch.setattr(resource, "setrlimit", lambda what, values: told.append(values))
        inference_process.limit(resource.RLIMIT_CPU, 100)
        assert told.pop() == (wanted, hard)


@pytest.mark.parametrize("source", ["import time; time.sleep(60)", "raise SystemExit"])
def test_a_process_that_does_not_start(tmp_path, monkeypatch, source):
    (tmp_path / "module.py").write_text(source)
    monkeypatch.setattr(elsewhere.onnx.onnx_cpp2py_export, "__file__", str(tmp_path / "module.py"))
    monkeypatch.setattr(process, "START_S", 0.3)
    started, start = [], subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *given, **more: started.append(start(*given, **more)) or started[0])
    assert fresh().current() is None
    assert started[0].returncode is not None


def test_one_process_serves_all_models_and_ends(pretended):
    assert infer(b"x" * 10**7) == b"<" + b"x" * 10**7 + b">"
    process = elsewhere._shared.process._process
    with pytest.raises(onnx.shape_inference.InferenceError, match="^wrong with it$"):
        infer(b"fails")
    assert infer(b"") == b"<>" and elsewhere._shared.process._process is process
    elsewhere._shared.end()
    assert process.returncode == 0


@pytest.mark.parametrize("python", ["", "/nowhere/python", "/bin/true"])
def test_where_no_process_can_be_started_inference_is_done_here(pretended, monkeypatch, python):
    monkeypatch.setattr(sys, "executable", python)
    monkeypatch.setattr(session, "_shared", Shared(session_process, list))  # the check runs here too, in this test alone
    assert infer(b"SIGABRT") is None
    result = convpool.optimize(graph(PAIR), lowering="direct")
    assert result.changed and result.report.verification.passed


@pytest.mark.parametrize("python", ["", "/nowhere/python", "/bin/true"])
def test_where_one_was_started_and_no_other_can_be_nothing_is_inferred_here(pretended, monkeypatch, python):
    assert infer(b"good") == b"<good>"
    elsewhere._shared.end()
    monkeypatch.setattr(sys, "executable", python)
    with pytest.raises(EndedError, match="^has no process: "):
        infer(b"SIGABRT")
    with pytest.raises(ModelError, match="shape inference of onnx .* has no process"):
        convpool.optimize(graph(PAIR), check=0)


ENDED = {  # models of ended.zip, and the lowering
    "5010615": "fused",  # a Slice of a size below zero: an assertion of onnx 1.21 to 1.23
    "5017565": "direct",
    "8108758": "fused",  # likewise, once the Slice's step is known, which is an Identity's
    "10100602": "fused",  # strides of fewer axes: onnx 1.19 divides by what lies behind them
    "10101242": "fused",  # a Conv of another rank in a branch: an assertion of onnxruntime 1.21
    "73007749": "direct",  # strict inference alone, that of the full check
}


@pytest.mark.parametrize(("name", "lowering"), ENDED.items())
def test_models_that_ended_the_process(name, lowering, tmp_path):
    """A result or a refusal, by onnx's version."""
    path = tmp_path / "model.onnx"
    with zipfile.ZipFile(Path(__file__).with_name("ended.zip")) as models:
        path.write_bytes(models.read(f"{name}.onnx"))
    (tmp_path / "data").write_bytes(bytes(18432))  # of external tensors
    code = f"""
import convpool
try:
    print(convpool.optimize({str(path)!r}, lowering={lowering!r}).changed)
except convpool.ConvpoolError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr, len(done.stdout.splitlines())) == (0, "", 1)


def test_sizes_beyond_memory():
    """Each Concat doubles a tensor of sizes, whose values onnx follows."""
    doubled = "\n".join(f"s{i + 1} = Concat<axis=0>(s{i}, s{i})" for i in range(40))
    model = graph(f"s0 = Shape(x)\n{doubled}\nz = ReduceSum(s40)\n{PAIR}", outputs="float[a,b,c,d] y, int64[e] z")
    with pytest.raises(ModelError, match="^the model is not valid ONNX: shape inference of onnx .* takes "):
        convpool.optimize(model)


def test_no_inference_is_done_here_and_none_with_the_weights(monkeypatch):
    asked, ask = [], elsewhere.infer
    monkeypatch.setattr(elsewhere, "infer", lambda model, strict: asked.append((strict, len(model))) or ask(model, strict))
    monkeypatch.setattr(onnx.shape_inference, "infer_shapes", lambda *_, **given: pytest.fail("inferred here"))
    assert convpool.optimize(graph(PAIR), check=0, lowering="direct").changed
    assert {strict for strict, _ in asked} == {False, True} and 0 < max(size for _, size in asked) < 2000


def test_results_are_those_of_this_process():
    """Also through functions, convpool's own among them, whose schemas onnx knows here and not there."""
    functions = '\n<domain: "local", opset_import: ["" : 17]>\nf (a) => (b) { b = Relu(a) }\n'
    body = f"r = local.f(x)\n{PAIR.replace('(x,', '(r,')}\nz = Shape(y)"
    original = graph(body, functions=functions, outputs="float[a,b,c,d] y, int64[e] z")
    for model in (original, convpool.optimize(original, check=0).model):
        assert elsewhere.infer_elsewhere(model).graph == onnx.shape_inference.infer_shapes(model, data_prop=True).graph


POOL_PART = "pool_kernel_shape=[{p},{p}], pool_strides=[1,1], pool_pads=[0,0,0,0], pool_dilations=[{d},{d}]"
CONV_PART = "kernel_shape=[3,3], strides=[1,1], pads=[0,0,0,0], dilations=[1,1], group=1, weight_perm=[0,3,1,2]"
LIES = """
<domain: "ai.convpool", opset_import: ["" : 17]>
ConvAvgPool <pool_kernel_shape, pool_strides, pool_pads, pool_dilations, kernel_shape, strides, pads, dilations, group,
  weight_perm>
(X, W, B) => (Y) { s = Shape(X) n = NonZero(s) Y = Expand(B, n) }
"""
PARTS = "prologue_affine={a}, prologue_activation={q}, prologue_alpha=0.0, residual={r}, activation={e}, alpha=0.0"


def own(attributes: str = "", *, op_type: str = "ConvAvgPool", more: str = "", pool: int = 1, dilation: int = 1) -> str:
    """A node of convpool's own operators on x, of 10 by 10, as text."""
    return f"q = ai.convpool.{op_type}<{POOL_PART.format(p=pool, d=dilation)}, {CONV_PART}{attributes}>(x, v, b{more})"


UPSAMPLES = {
    "upsampled": "upsample=[2,3], scales=[1.0,1.0,2.0,3.0]",
    "no scales": "upsample=[2,3]",
    "no factors": "scales=[1.0,1.0,2.0,3.0]",
    "factors of three axes": "upsample=[2,3,1], scales=[1.0,1.0,2.0,3.0,1.0]",
    "factors of 0": "upsample=[0,0], scales=[1.0,1.0,0.0,0.0]",
    "scales below 0": "upsample=[-1,2], scales=[1.0,1.0,-1.0,2.0]",
    "scales of channels": "upsample=[2,2], scales=[1.0,2.0,2.0,2.0]",
}
PERMS = ", x_perm=[{x}], y_perm=[{y}]"
FIRST, LAST, KEEP = "0,3,1,2", "0,2,3,1", "0,1,2,3"
NODES = {
    "plain": own(),
    "pooled": own(pool=2),
    "dilated, before opset 19": own(pool=2, dilation=2),
    "wrong permutation in the node": own(PERMS.format(x="3,2,1,0", y="1,0,3,2")),
    "no kernel": own().replace(", kernel_shape=[3,3]", ""),
    "no window": own().replace("pool_kernel_shape=[1,1], ", ""),
    "no pads": own().replace(", pads=[0,0,0,0]", ""),
    "strides of one axis": own().replace(", strides=[1,1]", ", strides=[1]"),
    "strides of 0": own().replace("pool_strides=[1,1]", "pool_strides=[0,0]"),
    "a window of three axes": own().replace("pool_kernel_shape=[1,1]", "pool_kernel_shape=[1,1,1]"),
    "a layout that there is not": own(", channels_last=7"),
    "a layout below 0": own(", channels_last=-1"),
    "channels last": own(", channels_last=1"),
    "result with channels last": own(", channels_last=2"),
    "operand with channels last": own(", channels_last=3"),
    "channels last, with permutations": own(", channels_last=1" + PERMS.format(x=FIRST, y=LAST)),
    "channels last, with wrong ones": own(", channels_last=1" + PERMS.format(x=KEEP, y=KEEP)),
    "a graph as attribute": own(", body=b () => (float[1] o) { o = Constant<value_float=1.0>() }"),
    "an operator that there is not": own(op_type="ConvAvgPool3"),
    "an activation": own(", " + PARTS.format(a=0, q=0, r=0, e=1), op_type="ConvAvgPoolRelu"),
    **{name: own(op_type="UpsampleConv").replace(POOL_PART.format(p=1, d=1), part) for name, part in UPSAMPLES.items()},
    "a residual": own(", " + PARTS.format(a=0, q=0, r=1, e=0), op_type="ConvAvgPoolAdd", more=", x"),
}  # fmt: skip


def with_own(node: str, tail: str, output: str, functions: str = "") -> onnx.ModelProto:
    constants = {"v": (4, 3, 3, 3), "b": (4,), "u": (4, 4, 20, 3), "st": [0, 0], "en": [9999, 9999], "ax": [2, 3], "sp": [2, 2]}
    return graph(f"{node}\n{tail}", constants, inputs="float[1,3,10,10] x", outputs=output, imports=', "ai.convpool": 4',
                 functions=functions)  # fmt: skip


ABORT = "r = Conv(q, u)\nz = Slice(r, st, en, ax, sp)"
MEMORY = "s0 = Shape(q)\n" + "\n".join(f"s{i + 1} = Concat<axis=0>(s{i}, s{i})" for i in range(40)) + "\nz = Identity(s40)"


@pytest.mark.parametrize("functions", ["", LIES], ids=["no function", "a wrong function"])
@pytest.mark.parametrize("name", NODES)
def test_a_node_of_convpools_own_hides_nothing_from_the_other_process(name, functions, monkeypatch):
    """A node behind it would end the process."""
    monkeypatch.setattr(onnx.shape_inference, "infer_shapes", lambda *_, **given: pytest.fail("inferred here"))
    try:
        convpool.optimize(with_own(NODES[name], ABORT, "float[a,b,c,d] z", functions), check=0)
    except ModelError as error:
        assert "\n" not in str(error)
    # Without a function it takes seconds; `test_sizes_behind_convpools_own_operators` has the others.
    if name == "plain" or functions and name in ("dilated, before opset 19", "an activation"):
        reason = "got another body" if functions else "shape inference of onnx .* (ends the process|takes more than)"
        with pytest.raises(ModelError, match=reason):
            convpool.optimize(with_own(NODES[name], MEMORY, "int64[a] z", functions), check=0)


SIZES = {"plain": [1, 4, 8, 8], "pooled": [1, 4, 7, 7], "dilated, before opset 19": [1, 4, 6, 6], "an activation": [1, 4, 8, 8]}
SIZES |= {"wrong permutation in the node": [1, 4, 8, 8], "result with channels last": [1, 8, 8, 4]}
SIZES |= {"upsampled": [1, 4, 18, 28], "no scales": None, "factors of three axes": None}
SIZES |= {"no kernel": None, "no window": None, "a layout that there is not": None}


@pytest.mark.parametrize("functions", ["", LIES], ids=["no function", "a wrong function"])
@pytest.mark.parametrize("name", SIZES)
def test_sizes_behind_convpools_own_operators(name, functions):
    model = with_own(NODES[name], "z = Relu(q)", "float[a,b,c,d] z", functions)
    model.graph.output[0].type.tensor_type.ClearField("shape")
    kind = elsewhere.infer_elsewhere(model).graph.output[0].type.tensor_type
    assert ([dim.dim_value for dim in kind.shape.dim] if kind.HasField("shape") else None) == SIZES[name]


NORMS = {"GroupNormalization<num_groups=4>(x, g, g)": 21, "MeanVarianceNormalization(x)": 13, "LayerNormalization(x, g, g)": 16}
SAVED = {'com.microsoft.FusedConv<activation="Relu">(x, w, g, x)': 13, "com.microsoft.QuickGelu(x)": 13}


@pytest.mark.parametrize("node,opset", (NORMS | SAVED).items())
def test_sizes_behind_operators_that_onnx_does_not_infer(node, opset):
    pooled = "AveragePool<kernel_shape=[2,2], strides=[2,2]>"
    then = f"then_branch = t () => (float[a,b,c,d] i) {{ k = {node}\ni = {pooled}(k) }}"
    branches = f"{then}, else_branch = e () => (float[a,b,c,d] j) {{ j = Neg(c) }}"
    body = f"n = {node}\np = {pooled}(n)\nc = my.f(p, g, w)\ny = If(flag) <{branches}>"
    given = {"inputs": "float[1,16,12,10] x, bool flag", "opset": opset, "imports": ', "my": 1, "com.microsoft": 1'}
    model = graph(body, {"g": np.ones(16, np.float32), "w": (16, 16, 1, 1)}, **given)
    function = f'<domain: "my", opset_import: ["":{opset}, "com.microsoft": 1]> f(x, g, w) => (y) {{y={node}}}'
    model.functions.append(onnx.parser.parse_function(function))
    before, found = model.SerializeToString(deterministic=True), load(model).inferred
    assert model.SerializeToString(deterministic=True) == before and found.functions == model.functions
    assert [(op.domain, op.op_type) for op in found.graph.node] == [(op.domain, op.op_type) for op in model.graph.node]
    assert [item.g.node[0].op_type for item in found.graph.node[-1].attribute] == [model.graph.node[0].op_type, "Neg"]
    shapes = {value.name: value.type.tensor_type.shape.dim for value in (*found.graph.value_info, *found.graph.output)}
    assert [dim.dim_value for dim in shapes["c"]] == [dim.dim_value for dim in shapes["y"]] == [1, 16, 6, 5]


INTS = "Constant<value_ints="
MISREAD = ("c = Cast<to=9>(s) d = Cast<to=7>(c)", "c = Cast<to=1>(s) b = Cast<to=9>(c) d = Cast<to=7>(b)",
    "c = Cast<to=10>(s) d = Cast<to=7>(c)", "c = Unsqueeze(s, zero) r = Gather(c, zero) d = Squeeze(r, zero)",
    "c = Unsqueeze(s, zero) a = Concat<axis=0>(c, c) i = Constant<value_int=1>() d = Gather(a, i)",
    "c = Identity(s) m = Unsqueeze(s, open) r = Gather(m, zero) d = Squeeze(r, zero)",
    f"c = Identity(s) i = {INTS}[2]>() a = Slice(s, open, i, zero) d = Gather(a, zero)",
    f"c = Identity(s) i = {INTS}[2]>() m = {INTS}[1]>() k = ReduceSum<keepdims=0>(open, m) a = Slice(s, m, i, m, k) d = Shape(a)",
    *(f"c = Identity(s) i = {INTS}[{end}]>() m = {INTS}[{start}]>() k = {INTS}[-1]>()"
      " a = Slice(s, m, i, zero, k) d = Concat<axis=0>(a, s)" for start, end in ((-1, 2**63 - 1), (-3, -9))))  # fmt: skip


@pytest.mark.parametrize("opset", (11, 12))
def test_sizes_behind_operators_that_differ_from_those_of_opset_14(opset):
    body = """a, b = Split<axis=1, split=[3,13]>(x) c = Unsqueeze<axes=[0]>(b) d = Squeeze<axes=[0]>(c)
    i = ReduceSum<axes=[3], keepdims=0>(d) e, m, v, f, g = BatchNormalization(i, o, o, o, o)
    h = Shape(e) r = Reshape(e, flat) y = Reshape(r, h)"""
    model = graph(body, {"o": (13,), "flat": [-1]}, inputs="float[N,16,H,W] x", outputs="float[a,b,c] y", opset=opset)
    (result,) = load(model).inferred.graph.output
    assert [dim.dim_value for dim in result.type.tensor_type.shape.dim] == [0, 13, 0]


@pytest.mark.parametrize("body", MISREAD)
def test_sizes_that_onnx_takes_for_others_are_unknown(body):
    """A runtime gives 1 for each size that is true, rounded sizes in half precision, both of the sizes in a row, and both turned
    round; also by the numbers of a call.  What another function names alike is another tensor."""
    nodes, given = f"s = Shape(x)\n{body}\ne = ConstantOfShape(d)\n", {"inputs": "float[4,8] x, int64[1] open"}
    calls = "z = my.f(x, zero, open) v = my.g<t=9, k=[-1]>(x, zero, open) u = my.h(x, zero, open)"
    model = graph(f"{nodes}y = Relu(e)\n{calls}", {"zero": [0]}, imports=', "my": 1', **given)
    by_call = nodes.replace("to=9", "to: int = @t").replace("ints=[-1]", "ints: ints = @k")
    for name, text in {"f": nodes, "g<t, k>": by_call, "h": f"i = {INTS}[1]>() m = {INTS}[0]>() e = Add(i, m)"}.items():
        text = f'<domain: "my", opset_import: ["":17]> {name}(x, zero, open) => (e) {{{text}}}'
        model.functions.append(onnx.parser.parse_function(text))
    shapes = {value.name: value.type.tensor_type.shape.dim for value in load(model).inferred.graph.value_info}
    assert not any(dim.dim_value for name in "eyzv" for dim in shapes.get(name, ()))
    assert [[dim.dim_value for dim in shapes[name]] for name in "sc"] == [[2], [1, 2] if "c = Uns" in body else [2]]


MISCOUNTED = {  # by opset; b is of a sequence
    **dict.fromkeys((7, 11), ["Squeeze<axes=[2,0]>(r)"]),
    17: ['LpPool<auto_pad="VALID", kernel_shape=[2,2], pads=[1,1,1,1]>(x)', "PRelu(x, u)", "STFT(r, k, , n)", "Squeeze(x, none)",
         "ConvTranspose<output_shape=[8,8]>(x, v)", "Identity(b)", "Concat<axis=0>(e, o)", "NonZero(n)",
         'ConvTranspose<auto_pad="SAME_UPPER", strides=[6,5], output_padding=[1,3]>(x, v)',
         'Einsum<equation="ncij,ncij->cnij">(x, u)'],
    23: ["LpPool<ceil_mode=1, kernel_shape=[12,1], strides=[3,1]>(x)", "Attention<q_num_heads=2, kv_num_heads=2>(s, s, t)"],
}  # fmt: skip
GIVEN = {"v": (16, 16, 3, 3), "u": (16, 1, 9, 9), "n": np.int64(8), "k": np.int64(1), "none": [], "e": np.float32([[]] * 24).T}


@pytest.mark.parametrize("called", [False, True], ids=["", "called"])
@pytest.mark.parametrize(("node", "opset"), [(node, opset) for opset, nodes in MISCOUNTED.items() for node in nodes])
def test_no_size_is_another_than_onnxruntime_computes(node, opset, called):
    inputs, names = "float[1,16,9,9] x, float[1,20,1] r, float[3,N] o, float[1,4,8] s, float[1,4,M] t", ", ".join("vuenkxrost")
    body = f"q = SplitToSequence<keepdims=0>(v, k) b = SequenceAt(q, k) a = {node}" if opset == 17 else f"a = {node}"
    function = f'<domain: "local", opset_import: ["":{opset}]> f ({names}, none) => (a) {{ {body} }}' if called else ""
    call = f"a = local.f({names}, none)" if called else body
    model = graph(f"{call} y = Identity(a)", GIVEN, inputs=inputs, opset=opset, functions=function, ir=11)
    model.graph.output[0].type.CopyFrom(onnx.TypeProto(tensor_type={"elem_type": 7 if "NonZero" in node else 1}))
    (ran,), noted = sessions.run(model, random_feeds(model)), load(model).inferred.graph.output[0].type.tensor_type.shape.dim
    assert all(not d.HasField("dim_value") or d.dim_value == n for d, n in zip(noted, ran.shape if noted else (), strict=True))


def test_a_model_is_refused_in_words(monkeypatch):
    monkeypatch.setattr(elsewhere, "infer", Mock(side_effect=EndedError("ends the process with SIGFPE")))
    with pytest.raises(ModelError, match="^the model is not valid ONNX: shape .* ends the process with SIGFPE$"):
        convpool.optimize(graph(PAIR))
    with pytest.raises(ModelError):
        convpool.verify(graph(PAIR), graph(PAIR))


def test_layers_are_added_to_the_outputs_that_there_are():
    model = graph(f"{PAIR}\nz = Relu(y)", outputs="float[1,32,6,6] z, float[1,32,6,6] y")
    mark_layers(model)
    assert [value.name for value in model.graph.output] == ["z", "y", "h"]
    assert len(sessions.run(model, random_feeds(model))) == 3


def test_strict_shape_inference_refuses_shapes_that_contradict_the_nodes(monkeypatch):
    """A result must pass it where the original does.  The checker, which takes seconds for large models, runs once."""
    model = graph("h = Relu(x)\ny = Conv<pads=[1,1,1,1]>(h, w)")
    loaded, checked, check = load(model), [], onnx.checker.check_model
    monkeypatch.setattr(onnx.checker, "check_model", lambda probe: checked.append(check(probe)))
    assert passes_full_check(loaded) and len(checked) == 1
    model.graph.value_info.append(helper.make_tensor_value_info("h", TensorProto.FLOAT, [1, 16, 12, 13]))
    assert not passes_full_check(load(model))

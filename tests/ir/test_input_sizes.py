# SPDX-License-Identifier: Apache-2.0
"""Sizes of inputs that are fixed in the result: what else gets them, what is refused, and that the result is right."""

import numpy as np
import onnx
import pytest

import convpool
from convpool.cli.group import command, run
from convpool.ir.model import with_sizes
from convpool.summary import SUGGESTED_SIZE, suggested
from tests.support import sessions
from tests.support.models import graph, random_feeds
from tests.support.rewriting import PAIR, RTOL

SIZES = {"x": [2, 16, 12, 14]}


def dims(values) -> dict[str, list[int | str]]:
    """Sizes and names of tensors by name, "" for an open one without."""
    return {
        value.name: [dim.dim_value if dim.HasField("dim_value") else dim.dim_param for dim in value.type.tensor_type.shape.dim]
        for value in values
    }


@pytest.mark.parametrize("target", ["any", "cpu", "tensorrt", "cuda"])
@pytest.mark.parametrize("fold", [False, True])
@pytest.mark.parametrize(
    "tail", ["", "s = Shape(p)\nq = Reshape(p, s)\n", "s = Shape(p)\nq = Expand(p, s)\n", "q = Identity(p)\n", "q = Relu(p)\n"]
)
def test_the_result_has_the_sizes_and_gives_the_same(target, fold, tail):
    last = "q" if tail else "p"
    model = graph(
        f"{PAIR.replace('y =', 'p =')}\n{tail}y = Sigmoid({last})", inputs="float[N,16,H,W] x", outputs="float[N,a,b,c] y"
    )
    before = model.SerializeToString(deterministic=True)
    result = convpool.optimize(model, target=target, fold=fold, fix_shapes=SIZES)
    assert result.changed and result.report.changed and result.report.verification.input_shapes == SIZES
    assert result.report.summary.rewritten == 1 and result.report.summary.counted_shapes == {}
    assert dims(result.model.graph.input) == SIZES and dims(result.model.graph.output) == {"y": [2, 32, 6, 7]}
    onnx.checker.check_model(result.model, full_check=True)
    kinds = {node.op_type for node in result.model.graph.node}
    assert (not fold) or not kinds & {"Shape", "Identity"}
    assert model.SerializeToString(deterministic=True) == before
    feeds = random_feeds(result.model)
    (wanted,), (got,) = sessions.run(model, feeds), sessions.run(result.model, feeds)
    np.testing.assert_allclose(got, wanted, rtol=0, atol=RTOL)


def test_a_model_without_a_pair_is_written_with_its_sizes():
    result = convpool.optimize(graph("y = Relu(x)", inputs="float[N,16,H,W] x", outputs="float[N,16,H,W] y"), fix_shapes=SIZES)
    assert result.changed and result.report.verification.inputs == 1
    assert dims(result.model.graph.output) == {"y": SIZES["x"]}


@pytest.mark.parametrize(
    ("inputs", "given", "wanted"),
    [
        ("float[N,16,H,W] x, float[N,1,H,W] m", SIZES, {**SIZES, "m": [2, 1, 12, 14]}),
        ("float[N,16,H,W] x, float[M,1,H,V] m", SIZES, {**SIZES, "m": ["M", 1, 12, "V"]}),
        ("float[N,16,N,N] x, float[N,1,1,1] m", SIZES, {**SIZES, "m": ["N", 1, 1, 1]}),  # one name, three sizes
        ("float[N,16,H,W] x, float[N,1,H,W] m", {**SIZES, "m": [1, 1, 12, 14]}, {**SIZES, "m": [1, 1, 12, 14]}),
        ("float[2,16,12,14] x, float[N,1,1,1] m", SIZES, {**SIZES, "m": ["N", 1, 1, 1]}),
        ("float x, float[N,1,1,1] m", {"m": [1, 1, 1, 1]}, {"x": [], "m": [1, 1, 1, 1]}),
    ],
)
def test_names_stand_for_the_same_size_elsewhere(inputs, given, wanted):
    assert dims(with_sizes(graph("y = Mul(x, m)", inputs=inputs), given).graph.input) == wanted


def test_sizes_that_follow_are_those_of_inference_not_of_names():
    """An exporter names the output's first size as the input's, and notes a size that it no longer has."""
    model = graph("f = Reshape(x, s)\ny = Relu(f)", {"s": [-1, 4]}, inputs="float[N,16,H,W] x", outputs="float[N,W] y")
    model.graph.value_info.append(onnx.helper.make_tensor_value_info("f", onnx.TensorProto.FLOAT, ["N", "four"]))
    fixed = with_sizes(model, SIZES)
    assert dims(fixed.graph.output) == {"y": [1344, 4]} and dims(fixed.graph.value_info) == {"f": [1344, 4]}


def test_sizes_noted_at_an_export_do_not_stay():
    """Sizes that inputs do not give are open then: behind unknown operators, and in bodies."""
    body = f"{PAIR.replace('y =', 'p =')}\nu = com.microsoft.Gelu(p)\ny = If(flag) <\n"
    body += "then_branch = yes () => (float[1,32,g,32] a) { r = Relu(p) a = Identity(r) },\n"
    body += "else_branch = no () => (float[1,32,g,32] b) { b = Neg(u) }>"
    model = graph(
        body,
        inputs="float[N,16,H,W] x, bool flag",
        outputs="float[1,32,32,g] y, float[1,32,g,32] u",
        imports=', "com.microsoft": 1',
    )
    model.graph.value_info.append(onnx.helper.make_tensor_value_info("p", onnx.TensorProto.FLOAT, [1, 32, 32, 32]))
    fixed = with_sizes(model, SIZES)
    assert dims(fixed.graph.value_info) == {"p": [2, 32, 6, 7]}
    assert dims(fixed.graph.output) == {"y": ["", "", "", "g"], "u": ["", "", "g", ""]}
    yes, no = (attribute.g for attribute in fixed.graph.node[-1].attribute)
    assert dims(yes.output) == {"a": [2, 32, 6, 7]} and dims(no.output) == {"b": ["", "", "g", ""]}


def test_an_output_of_unknown_size_stays_open():
    fixed = with_sizes(graph("y = NonZero(x)", inputs="float[N,16,H,W] x", outputs="int64[N,n] y"), SIZES)
    assert dims(fixed.graph.output)["y"][1] == "n" and dims(fixed.graph.output)["y"][0] in (4, "")


OPEN = "float[N,16,H,W] x"


@pytest.mark.parametrize(
    ("inputs", "options", "message"),
    [
        (OPEN, {"fix_shapes": {"x": [1, 16, 12]}}, "fix shape: input 'x'; got shape .*, expected ."),
        (
            OPEN,
            {"fix_shapes": {"x": [1, 8, 12, 12]}},
            r"fix shape: input 'x'; got shape \[1, 8, 12, 12\], expected \['N', 16, 'H', 'W'\]",
        ),
        (OPEN, {"fix_shapes": {"z": [1]}}, "fix shape: no input 'z'; expected one of x"),
        (OPEN, {"fix_shapes": {"w": [1]}}, "fix shape: no input 'w'; expected one of x"),
        (OPEN, {"fix_shapes": {"x": [0, 16, 12, 12]}}, "fix shape of 'x'; got .*, expected positive sizes"),
        (OPEN, {"fix_shapes": {"x": [-1, 16, 12, 12]}}, "fix shape of 'x'; got .*, expected positive sizes"),
        ("float[1,16,12,12] x", {"fix_shapes": {"x": [1, 16, 24, 24]}}, "fix shape: input 'x'; got shape"),
        (OPEN, {"fix_shapes": SIZES, "input_shapes": {"x": [1, 16, 12, 14]}}, "input shape: input 'x'; got shape"),
        (OPEN, {"fix_shapes": SIZES, "data": {"x": np.zeros((1, 16, 12, 14), np.float32)}}, "data: input 'x'; got shape"),
        (f"{OPEN}, float[N,1,1,1] m", {"fix_shapes": SIZES, "input_shapes": {"m": [1, 1, 1, 1]}}, "input shape: input 'm'"),
        (
            f"{OPEN}, seq(float) q",
            {"fix_shapes": {"q": [1]}},
            "fix shape: input 'q'; got a shape, expected none: it is no tensor",
        ),
        (OPEN, {"fix_shapes": [1, 16, 12, 12]}, "fix_shapes: got .*, expected sizes by name"),
    ],
)
def test_what_does_not_fit_is_refused(inputs, options, message):
    with pytest.raises(convpool.OptionError, match=message):
        convpool.optimize(graph(PAIR, inputs=inputs), **options)


@pytest.mark.parametrize(
    ("inputs", "wanted"),
    [("float[0,16,12,12] x", {}), ("float[0,16,H,W] x", {}), ("float[N,16,H,12] x", {"x": [1, 16, SUGGESTED_SIZE, 12]})],
)
def test_an_empty_input_is_given_no_sizes(inputs, wanted):
    assert suggested(graph("y = Relu(x)", inputs=inputs), {}) == wanted


def test_sizes_that_the_model_has_change_nothing():
    assert not convpool.optimize(graph("y = Relu(x)"), fix_shapes={"x": [1, 16, 12, 12]}).changed


def test_sizes_that_do_not_run_are_an_error_of_the_original(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    onnx.save(graph("h = Conv(x, w)\nf = Reshape(h, s)\ny = Relu(f)", {"s": [1, 32, 10, 10]}, inputs=OPEN), "in.onnx")
    assert run(command, "convpool", ["optimize", "in.onnx", "--fix-shape", "x:1x16x14x14"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("convpool: ") and len(error.splitlines()) == 1 and not (tmp_path / "in.convpool.onnx").exists()


@pytest.mark.parametrize("words", [["--no-check"], ["--check", "2"], ["--input-shape", "x:1x16x12x12"], ["--fold"], ["--time"]])
def test_the_command_writes_the_sizes(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    onnx.save(graph("h = Conv<pads=[1,1,1,1]>(x, w)\ny = GlobalAveragePool(h)", inputs=OPEN), "in.onnx")
    assert run(command, "convpool", ["optimize", "in.onnx", "--fix-shape", "x:1,16,12,12", *words]) == 0
    assert dims(onnx.load("in.convpool.onnx").graph.input) == {"x": [1, 16, 12, 12]}
    assert "rewritten 1 of 1 convolution: 664 k -> 4.61 k multiply-adds" in capsys.readouterr().out


def test_a_model_with_data_files_keeps_its_weights(tmp_path):
    model = graph(PAIR, inputs=OPEN)
    onnx.save(graph(PAIR, inputs=OPEN), tmp_path / "in.onnx", save_as_external_data=True, location="in.data", size_threshold=0)
    result = convpool.optimize(tmp_path / "in.onnx", fix_shapes=SIZES, fold=True)
    result.save(tmp_path / "out.onnx", external_data="keep")
    written = onnx.load(tmp_path / "out.onnx")
    feeds = random_feeds(written)
    (wanted,), (got,) = sessions.run(model, feeds), sessions.run(written, feeds)
    np.testing.assert_allclose(got, wanted, rtol=0, atol=RTOL * np.abs(wanted).max())

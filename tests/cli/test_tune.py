# SPDX-License-Identifier: Apache-2.0
"""`convpool tune`: nodes of models become problems of the library, and the fastest tactics rows of a file."""

import os
import subprocess
import sys

import onnx
import pytest
from onnx import shape_inference

import convpool
from convpool.algebra.parts import OPERATORS
from convpool.cli import tune
from convpool.cli.group import run
from convpool.cuda.plan import shapes_and_types
from convpool.ir import schema
from models import generators
from models.digits import MODEL_PATH
from tests.support.gpu import skip_or_fail
from tests.support.operator_models import Node

NETWORKS = ("sngan64", "wgan_gp", "stargan_v2", "lenet5")
NARROWER = {"sngan64": {"width": 32}, "stargan_v2": {"width": 32, "max_width": 256}}
DIGITS = {"image": [8, 1, 32, 32]}
SHAPE = ("--input-shape", "image:8x1x32x32")


def optimized(name: str, path, **options):
    model = generators.generate(name, batch=2, **NARROWER.get(name, {}))
    result = convpool.optimize(model, check=0, lowering="convavgpool", **options)
    result.save(path)
    return result.model


@pytest.mark.parametrize("target", ["any", "cuda"])
@pytest.mark.parametrize("name", NETWORKS)
def test_nodes_become_problems_with_the_nodes_shapes(name, target, tmp_path):
    model = optimized(name, tmp_path / "model.onnx", target=target)
    values = shape_inference.infer_shapes(model).graph
    shapes = {v.name: tuple(d.dim_value for d in v.type.tensor_type.shape.dim) for v in (*values.value_info, *values.output)}
    nodes = {node.name: node for node in model.graph.node if schema.is_operator(node)}
    found = tune.problems_of(str(tmp_path / "model.onnx"), {}, "fp16")
    assert 0 < len(found) <= len(nodes)
    for title, problem in found.items():
        node = nodes[title.removesuffix(" (fp16)")]
        (number,) = [item.i for item in node.attribute if item.name == "channels_last"] or [0]
        channels, *spatial = shapes[node.output[0]][1:] if number in (0, 3) else (0, *shapes[node.output[0]][1:-1])
        assert problem.y_shape[1:-1] == tuple(spatial) and problem.dtype == "float16" and problem.y_layout == "channels_last"
        assert channels in (0, problem.m) and problem.residual == ("Add" in node.op_type.removeprefix("Affine"))
        assert (problem.prologue_activation is None) == node.op_type.removeprefix("Affine").startswith("ConvAvgPool")


@pytest.mark.parametrize(
    "op_type", "ModulatedSiluConvAvgPool ModulatedUpsampleConv AffineReluConvAvgPool SiluConvAvgPool".split()
)
def test_scale_and_shift_have_the_nodes_shape(op_type, tmp_path):
    """Scales by image and channel were once timed, and written down, as scales by channel."""
    node = Node(op_type)
    onnx.save(node.model(), tmp_path / "model.onnx")
    (problem,) = tune.problems_of(str(tmp_path / "model.onnx"), {}, "fp16").values()
    shape = {"Mod": (node.batch, node.channels), "Aff": (node.channels,)}.get(op_type[:3])
    assert shape is None or shapes_and_types(problem)["scale"][0] == shapes_and_types(problem)["shift"][0] == shape
    assert problem.struct.prologue_affine == OPERATORS[op_type].affine_number


@pytest.mark.parametrize("precision,dtype", [("fp16", "float16"), ("bf16", "bfloat16"), ("tf32", "float32"), ("fp32", "float32")])
@pytest.mark.parametrize(("layout", "order"), [(None, 1), ("nchw", 0), ("nhwc", 1)])
def test_precision_and_layout(precision, layout, dtype, order):
    for problem in tune.problems_of(str(MODEL_PATH), DIGITS, precision, layout).values():
        s = problem.struct
        assert (problem.dtype, s.x_layout, s.y_layout, s.allow_tf32) == (dtype, order, order, precision == "tf32")
        assert problem.activation == "tanh" and problem.bias


def test_the_fastest_tactic_of_each_node_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tune, "_measuring", lambda: lambda problem: (tactic(problem), 12.5))
    monkeypatch.setattr("convpool.cuda.current_device", lambda: {"cc": 90, "multiprocessors": 132})

    def tactic(problem):
        return problem.default_tactic(cc=90, multiprocessors=132, shared_bytes=227 * 1024)

    path = tmp_path / "tuned.def"
    for _ in range(2):  # the second run replaces rows
        words = [str(MODEL_PATH), "-o", str(path), *SHAPE, "--precision", "fp16", "--precision", "tf32"]
        assert run(tune.command, "convpool tune", words) == 0
        assert path.read_text().count("\nCONVPOOL_TUNED(90, 132, ") == 4
    out = capsys.readouterr().out
    assert "/c1/Conv" in out and "12.5 us" in out and "4 rows" in out


def test_open_sizes_are_asked_for(tmp_path, capsys):
    convpool.optimize(generators.generate("sngan64", batch="dynamic"), check=0).save(tmp_path / "open.onnx")
    assert run(tune.command, "convpool tune", [str(tmp_path / "open.onnx"), "-o", str(tmp_path / "tuned.def")]) == 2
    assert "give --input-shape" in capsys.readouterr().err and not (tmp_path / "tuned.def").exists()


def test_the_library_chooses_what_was_measured(tmp_path):
    """On a GPU: a file is written, and a process that has it chooses by it."""
    try:
        tune._measuring()
    except convpool.ConvpoolError as error:
        skip_or_fail(str(error))
    path = tmp_path / "tuned.def"
    assert run(tune.command, "convpool tune", [str(MODEL_PATH), "-o", str(path), *SHAPE]) == 0
    asked = (
        "import torch; torch.zeros(1, device='cuda'); from convpool.cli import tune; from convpool.cuda import Plan; "
        f"print(*(Plan(p).how_chosen for p in tune.problems_of({str(MODEL_PATH)!r}, {DIGITS}, 'fp16').values()))"
    )
    command, environment = [sys.executable, "-c", asked], {**os.environ, "CONVPOOL_TUNED": str(path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["measured", "measured"]

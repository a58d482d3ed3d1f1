# SPDX-License-Identifier: Apache-2.0
"""The attribute accumulation: who writes it, who keeps it, and that it changes nothing else."""

import json
import re
from pathlib import Path

import onnx
import pytest

import convpool
from convpool.algebra.parts import ACCUMULATIONS
from convpool.cli.group import run
from convpool.cli.optimize import command
from convpool.cuda import library
from convpool.errors import OptionError
from convpool.ir import schema
from convpool.ir.protos import model_nodes
from models import generators
from tests.support import sessions
from tests.support.models import graph
from tests.support.rewriting import IF_BODY, IF_INPUTS, PAIR

ROOT = Path(__file__).parents[1]


def packed(model: onnx.ModelProto) -> list[int]:
    """The attribute of the operator's nodes, at any depth."""
    return [schema.accumulation_of(node) for node in model_nodes(model) if schema.is_operator(node)]


def same_bytes(first: onnx.ModelProto, second: onnx.ModelProto) -> bool:
    return first.SerializeToString(deterministic=True) == second.SerializeToString(deterministic=True)


def optimized(model: onnx.ModelProto, accumulation: str | None = None, **options) -> onnx.ModelProto:
    """The result, which is valid and stays as it is in a second run, with or without the option."""
    result = convpool.optimize(model, accumulation=accumulation, check=0, **options)
    onnx.checker.check_model(result.model, full_check=True)
    for again in (accumulation, None):
        assert same_bytes(convpool.optimize(result.model, accumulation=again, check=0, **options).model, result.model)
    return result.model


def test_its_numbers_are_those_of_the_c_api():
    numbers = re.findall(r"CONVPOOL_ACCUMULATE_(\w+)\s*=\s*(\d+)", (ROOT / "plugin" / "include" / "convpool.h").read_text())
    assert {name.lower(): int(number) for name, number in numbers} == ACCUMULATIONS == library.ACCUMULATIONS


@pytest.mark.parametrize("target", ["any", "tensorrt", "cuda"])
@pytest.mark.parametrize("name", ["sngan64_small", "densenet_small"])
def test_every_node_gets_it_and_nothing_else_changes(name, target):
    model = generators.generate(name, batch=2)
    plain, result = optimized(model, target=target), optimized(model, "packed", target=target)
    assert set(packed(plain)) == {0} and set(packed(result)) == {1} and len(packed(plain)) == len(packed(result))
    assert same_bytes(optimized(model, "default", target=target), plain)
    feeds = generators.random_inputs(model)
    for one, other in zip(sessions.run(plain, feeds), sessions.run(result, feeds), strict=True):
        assert one.tobytes() == other.tobytes()  # the function does not read it
    for node in filter(schema.is_operator, model_nodes(result)):
        schema.give_accumulation(node, "default")
    assert same_bytes(result, plain)


def test_nodes_in_branches_get_it():
    assert packed(optimized(graph(IF_BODY, {"v": (32, 16, 3, 3)}, inputs=IF_INPUTS), "packed")) == [1, 1]


def test_a_file_with_nodes_gets_it_loses_it_and_keeps_it():
    model = graph(PAIR)
    plain = optimized(model)
    result = optimized(plain, "packed")
    assert packed(result) == [1] and same_bytes(result, optimized(model, "packed"))
    assert same_bytes(optimized(result, "default"), plain)
    assert not convpool.optimize(result, accumulation="packed", check=0).changed
    assert convpool.optimize(result, accumulation="default", check=0).changed
    (name,) = [node.name or node.output[0] for node in plain.graph.node if schema.is_operator(node)]
    assert same_bytes(optimized(plain, "packed", exclude=name), plain)
    assert same_bytes(optimized(result, "default", exclude=name), result)


def test_a_node_keeps_it_as_others_are_fused_into_it():
    first = optimized(graph(f"{PAIR.replace('y =', 'p =')}\ny = Relu(p)"), "packed", disable="fuse_epilogue")
    (node,) = [node for node in convpool.optimize(first, check=0).model.graph.node if schema.is_operator(node)]
    assert (node.op_type, schema.accumulation_of(node)) == ("ConvAvgPoolRelu", 1)


def test_standard_operators_lose_it():
    model = graph(PAIR)
    second = convpool.optimize(optimized(model, "packed"), lowering="direct", check=0).model
    assert packed(second) == [] and same_bytes(second, convpool.optimize(optimized(model), lowering="direct", check=0).model)


def test_the_report_has_it(tmp_path, capsys):
    model, out, report = tmp_path / "m.onnx", tmp_path / "o.onnx", tmp_path / "r.json"
    onnx.save(graph(PAIR), model)

    def told(*options: str) -> dict:
        assert run(command, "convpool-optimize", [str(model), "-o", str(out), "--report", str(report), *options]) == 0
        return json.loads(report.read_text())

    found = told("--accumulation", "packed")
    assert found["options"]["accumulation"] == "packed" and found["summary"]["packed"] == 1 and not found["warnings"]
    assert "sums      may be packed in 1 node, in fp16 and bf16" in capsys.readouterr().out
    assert packed(onnx.load(out)) == [1]
    found = told()
    assert found["options"]["accumulation"] is None and found["summary"]["packed"] == 0
    assert "sums" not in capsys.readouterr().out and packed(onnx.load(out)) == [0]
    found = told("--accumulation", "packed", "--exclude", "*")
    assert found["warnings"] == ["accumulation packed changes nothing: the result has no node of convpool's operators"]


@pytest.mark.parametrize("value", ["fp16", 1, True, ["packed"], ""])
def test_other_values_are_refused(value):
    with pytest.raises(OptionError, match="accumulation: got .*, expected one of default, packed"):
        convpool.optimize(graph(PAIR), accumulation=value)


@pytest.mark.parametrize(
    ("options", "lowering"), [({"lowering": "direct"}, "direct"), ({"lowering": "fused"}, "fused"), ({"target": "cpu"}, "auto")]
)
def test_packed_sums_of_standard_operators_are_refused(options, lowering, tmp_path, capsys):
    with pytest.raises(OptionError, match=f"accumulation: got 'packed' with lowering '{lowering}', expected lowering 'conv"):
        convpool.optimize(graph(PAIR), accumulation="packed", **options)
    assert convpool.optimize(graph(PAIR), accumulation="default", **options).report.options["accumulation"] == "default"
    path = tmp_path / "m.onnx"
    onnx.save(graph(PAIR), path)
    flags = [word for name, value in options.items() for word in (f"--{name}", value)]
    assert run(command, "convpool-optimize", [str(path), "--accumulation", "packed", *flags]) == 2
    assert f"--accumulation packed: got --lowering {lowering} too; expected convavgpool" in capsys.readouterr().err


def test_an_attribute_of_another_type_is_no_valid_model():
    result = optimized(graph(PAIR), "packed")
    (node,) = [node for node in result.graph.node if schema.is_operator(node)]
    (item,) = [item for item in node.attribute if item.name == "accumulation"]
    item.CopyFrom(onnx.helper.make_attribute("accumulation", "packed"))
    with pytest.raises(convpool.ModelError, match="accumulation; got STRING, expected INT"):
        convpool.optimize(result)

# SPDX-License-Identifier: Apache-2.0
"""Rewritten modules in ONNX, and pairs that torch.compile captures."""

from __future__ import annotations

import copy

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from tests.support.torch import require_torch

torch = require_torch()

from convpool.ir import schema  # noqa: E402
from convpool.torch import compile_options, export_onnx, optimize  # noqa: E402
from tests.support.exported.cases import CASES  # noqa: E402
from tests.support.exported.exporting import module_and_inputs  # noqa: E402

EXPORTED = {
    "sngan block": ["ConvAvgPool", "ConvAvgPoolAdd"],
    "stargan v2 block": ["ConvAvgPoolAdd", "LeakyReluConvAvgPoolLeakyRelu"],
    "densenet transition": ["ReluConvAvgPool"],
    "audio, old weight norm": ["ConvAvgPool"],
    "depthwise": [],
}


@pytest.mark.parametrize("name", EXPORTED)
def test_the_operator_is_exported_with_its_function(name, tmp_path):
    pytest.importorskip("onnxscript")
    module, inputs = module_and_inputs(name)
    changed, _ = optimize(module, inputs)
    path = tmp_path / "model.onnx"
    export_onnx(changed, inputs, path, verbose=False)
    model = onnx.load(path)
    nodes = [node for node in model.graph.node if schema.is_operator(node)]
    assert sorted(node.op_type for node in nodes) == EXPORTED[name]
    assert sorted(f.name for f in model.functions if f.domain == schema.DOMAIN) == sorted(set(EXPORTED[name]))
    stored = {tensor.name for tensor in model.graph.initializer}
    assert all(node.input[1] in stored for node in nodes)  # as convpool.optimize stores weights
    session = ort.InferenceSession(path.read_bytes(), providers=["CPUExecutionProvider"])
    feeds = {value.name: x.numpy() for value, x in zip(session.get_inputs(), inputs, strict=True)}
    expected = module(*inputs).detach().numpy()
    np.testing.assert_allclose(session.run(None, feeds)[0], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["sngan block", "wgan-gp block"])
def test_pairs_of_a_compiled_module(name):
    torch.manual_seed(7)
    module = CASES[name].make()
    inputs = [torch.randn(shape) for shape in CASES[name].shapes]
    options = compile_options()
    torch._dynamo.reset()
    compiled = torch.compile(copy.deepcopy(module), options=options)
    results = []
    # What an earlier process has compiled would be read from a file, and the pass not be asked.
    with torch.compiler.config.patch(force_disable_caches=True):
        for item in (module, compiled):
            y = item(*inputs)
            results.append([y, *torch.autograd.grad(y.square().sum(), list(item.parameters()))])
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-4)
    (report,) = options["pre_grad_custom_pass"].reports
    assert [site.status for site in report.sites] == ["rewritten"] * CASES[name].pairs


def test_inputs_of_a_captured_graph_stay():
    """PyTorch 2.11 wants its own attributes on them afterwards."""
    module, (shape,) = CASES["sngan block"].make(), CASES["sngan block"].shapes
    x, rewrite = torch.randn(shape), compile_options()["pre_grad_custom_pass"]
    before, after = [], []

    def backend(graph, example):
        before.append(graph.graph.find_nodes(op="placeholder"))
        rewrite(graph.graph)
        after.append(graph.graph.find_nodes(op="placeholder"))
        graph.recompile()
        return graph.forward

    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(module, backend=backend)(x), module(x), rtol=1e-5, atol=1e-5)
    assert rewrite.reports[0].summary.rewritten == CASES["sngan block"].pairs
    assert [[id(node) for node in nodes] for nodes in after] == [[id(node) for node in nodes] for nodes in before]


def test_numbers_that_torch_compile_leaves_open():
    """The epsilon of a BatchNorm."""
    torch.manual_seed(7)
    module = torch.nn.Sequential(torch.nn.BatchNorm2d(4), torch.nn.Conv2d(4, 8, 3, padding=1), torch.nn.AvgPool2d(2)).eval()
    rewrite = compile_options()["pre_grad_custom_pass"]

    def backend(graph, example):
        rewrite(graph.graph)
        graph.recompile()
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(module, backend=backend, dynamic=True)
    for size in (8, 12):
        x = torch.randn(2, 4, size, size)
        torch.testing.assert_close(compiled(x), module(x), rtol=1e-5, atol=1e-5)
    assert rewrite.reports[0].summary.rewritten == 1


def test_an_optimized_module_is_compiled_with_its_pairs():
    torch.manual_seed(7)
    module = CASES["sngan block"].make()
    (shape,) = CASES["sngan block"].shapes
    x, graphs = torch.randn(shape), []

    def backend(graph, example):
        graphs.append(graph)
        return graph.forward

    changed, _ = optimize(module, x)
    torch._dynamo.reset()
    compiled = torch.compile(changed, backend=backend)
    torch.testing.assert_close(compiled(x), module(x), rtol=1e-5, atol=1e-5)
    assert sum("pooled_conv" in str(node.target) for graph in graphs for node in graph.graph.nodes) == 2


@pytest.mark.parametrize("examples", [False, True])
def test_a_compiled_training_step_has_the_plan_for_training(examples):
    """Not the one of inference, which fuses the activation in front.  It needs no example inputs, and no call before."""
    torch.manual_seed(7)
    module = CASES["sngan block"].make().train()
    (shape,) = CASES["sngan block"].shapes
    x, graphs = torch.randn(shape), []

    def backend(graph, example):
        graphs.append(graph)
        return graph.forward

    changed, _ = optimize(module, *([x] if examples else []))
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(changed, backend=backend)(x), module(x), rtol=1e-5, atol=1e-5)
    calls = [node for graph in graphs for node in graph.graph.nodes if "pooled_conv" in str(node.target)]
    assert [node.args[14] for node in calls] == [0, 0]


@pytest.mark.parametrize("change", [lambda m: m.append(torch.nn.Tanh()), lambda m: m.__setitem__(1, torch.nn.MaxPool2d(2))])
@pytest.mark.parametrize("exports", [False, True])
def test_a_module_that_has_changed_before_it_is_compiled(change, exports):
    """No eager call has told that the plan is another module's."""
    torch.manual_seed(7)
    x, module = torch.randn(2, 4, 8, 8), torch.nn.Sequential(torch.nn.Conv2d(4, 8, 3, padding=1), torch.nn.AvgPool2d(2))
    changed, report = optimize(copy.deepcopy(module), x)
    assert report.summary.rewritten == 1
    changed[0] = module[0]
    for item in (module, changed):
        change(item)
    torch._dynamo.reset()
    with torch.no_grad():
        got = torch.export.export(changed, (x,)).module() if exports else torch.compile(changed, backend="eager", fullgraph=True)
        torch.testing.assert_close(got(x), module(x), rtol=1e-5, atol=1e-5)

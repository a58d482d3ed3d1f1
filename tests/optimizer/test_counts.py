# SPDX-License-Identifier: Apache-2.0
"""How often a run loads a model, infers shapes and indexes graphs."""

from __future__ import annotations

import sys
from collections import Counter

import onnx
import pytest

from convpool.cli.common import run
from convpool.cli.optimize import command
from convpool.ir.index import index_model
from convpool.ir.model import LoadedModel, infer_shapes, load
from tests.support.models import graph

PAIR = "h = Conv<pads=[1,1,1,1]>({x}, w)\n{y} = AveragePool<kernel_shape=[2,2], strides=[2,2]>(h)"
BODIES = {
    "a pair": PAIR.format(x="x", y="y"),
    "with a prologue": f"r = Relu(x)\n{PAIR.format(x='r', y='y')}",
    "with an epilogue": f"{PAIR.format(x='x', y='a')}\ny = Relu(a)",
}


@pytest.fixture
def calls(monkeypatch) -> Counter[str]:
    """How often the package calls each of the three; loading what is loaded does not count."""
    found: Counter[str] = Counter()

    def counted(function):
        def wrapper(first, *rest, **keywords):
            found[function.__name__] += not (function is load and isinstance(first, LoadedModel))
            return function(first, *rest, **keywords)

        return wrapper

    for module in [module for name, module in sys.modules.items() if name.startswith("convpool")]:
        for name, value in list(vars(module).items()):
            if any(value is function for function in (load, infer_shapes, index_model)):
                monkeypatch.setattr(module, name, counted(value))
    return found


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
@pytest.mark.parametrize("lowering", ["convavgpool", "direct", "fused", "auto"])
def test_one_pair_is_loaded_once_inferred_twice_and_indexed_three_times(calls, tmp_path, body, lowering):
    path = tmp_path / "model.onnx"
    onnx.save(graph(body, {"w": (32, 16, 3, 3)}, inputs="float[1,16,24,24] x", outputs="float[1,32,12,12] y"), path)
    assert run(command, "convpool-optimize", [str(path), "-q", "--lowering", lowering]) == 0
    assert calls["load"] == 1 and calls["infer_shapes"] <= 2 and calls["index_model"] <= 3
    assert (tmp_path / "model.convpool.onnx").exists()


def test_a_model_without_a_pair_is_indexed_once(calls, tmp_path):
    path = tmp_path / "model.onnx"
    onnx.save(graph("y = Relu(x)", inputs="float[1,16,24,24] x", outputs="float[1,16,24,24] y"), path)
    assert run(command, "convpool-optimize", [str(path), "-q"]) == 0
    assert dict(calls) == {"load": 1, "infer_shapes": 1, "index_model": 1}

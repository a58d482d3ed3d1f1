# SPDX-License-Identifier: Apache-2.0
"""The inputs of the check: random ones by type and shape, and arrays that a caller gives."""

import re

import ml_dtypes
import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from convpool.check import inputs as module
from convpool.check.inputs import HARDER, OPEN_SIZES, SCALES, InputMaker, noisy, random_array, typed_inputs
from convpool.errors import ModelError, OptionError
from convpool.ir.model import feeds
from tests.support.models import graph, sparse_of

X = ("x", TensorProto.FLOAT, ["N", 3, "H", None])
Z = ("z", TensorProto.FLOAT, ["N", "H", 4])
FLAG = ("flag", TensorProto.BOOL, [2])
NUMBER = ("b", TensorProto.BFLOAT16, [])


def maker(*values, data=None, shapes=None, seed=0) -> InputMaker:
    """For a model with these inputs."""
    proto = helper.make_model(helper.make_graph([], "g", [helper.make_tensor_value_info(*value) for value in values], []))
    return InputMaker(proto, data, shapes or {}, seed)


def shapes_of(found: InputMaker) -> dict[str, tuple[int, ...]]:
    return {name: array.shape for name, array in found.runnable(0, lambda arrays: [])[0].items()}


def test_arrays_of_every_type():
    rng = np.random.default_rng(0)
    for kind in ("int8", "uint8", "int32", "int64", "bool"):
        array = random_array(rng, np.dtype(kind), (64,))
        assert array.dtype == kind and set(np.unique(array).tolist()) == {0, 1}
    for kind in ("float16", "float32", "float64", ml_dtypes.bfloat16):
        array = random_array(rng, np.dtype(kind), (4000,))
        assert array.dtype == kind and abs(array.astype(float).mean()) < 0.1 and abs(array.astype(float).std() - 1) < 0.1
    array = random_array(rng, np.dtype("complex64"), (4000,))
    assert array.dtype == "complex64" and abs(array.real.std() - 1) < 0.1 and abs(array.imag.std() - 1) < 0.1
    assert abs(np.corrcoef(array.real, array.imag)[0, 1]) < 0.1
    for kind in (np.dtype(object), np.dtype("S"), np.dtype("U")):
        assert random_array(rng, kind, (2,)).tolist() == ["a", "a"]


def test_open_sizes_by_name_and_by_what_is_given():
    assert shapes_of(maker(X, Z)) == {"x": (1, 3, OPEN_SIZES[0], OPEN_SIZES[0]), "z": (1, OPEN_SIZES[0], 4)}
    assert shapes_of(maker(X, Z, shapes={"x": [2, 3, 5, 7]})) == {"x": (2, 3, 5, 7), "z": (2, 5, 4)}
    assert shapes_of(maker(X, Z, shapes={"z": [2, 5, 4]})) == {"x": (2, 3, 5, OPEN_SIZES[0]), "z": (2, 5, 4)}
    assert shapes_of(maker(("a", 1, ["K", "N"]), ("b", 1, ["N", "K"]))) == {"a": (1, 1), "b": (1, 1)}


def test_the_next_size_is_tried_after_an_error_or_an_empty_output():
    tried = []

    def run(arrays):
        size = arrays["x"].shape[2]
        tried.append(size)
        if size == OPEN_SIZES[0]:
            raise ModelError("too large")
        return [np.zeros(0 if size == OPEN_SIZES[1] else 1)]

    for found in (maker(X), maker(X, FLAG)):
        tried.clear()
        assert found.runnable(0, run)[0]["x"].shape == (1, 3, OPEN_SIZES[2], OPEN_SIZES[2])
        assert found.runnable(1, run)[0]["x"].shape == (1, 3, OPEN_SIZES[2], OPEN_SIZES[2])
        assert tried == [*OPEN_SIZES[:3], OPEN_SIZES[2]]


def test_the_first_error_is_told_where_no_size_runs():
    def run(arrays):
        raise ModelError(f"size {arrays['x'].shape[-1]}")

    with pytest.raises(ModelError, match=f"^size {OPEN_SIZES[0]}; give the input shapes$"):
        maker(X).runnable(0, run)
    with pytest.raises(ModelError, match="^size 7$"):
        maker(X, shapes={"x": [1, 3, 5, 7]}).runnable(0, run)
    with pytest.raises(ModelError, match="^size 3$"):  # only the batch is open
        maker(("x", 1, ["N", 3])).runnable(0, run)


def test_a_loop_runs_its_body_twice():
    body = "y = Loop(n, go, x) <body = b (int64 i, bool c, float s) => (bool d, float t) { d = Identity(c) t = Relu(s) }>"
    model = graph(body, inputs="float x, int64 n, bool go", outputs="float y")
    model.functions.add().node.add(op_type="Loop", input=["x"])  # a count there has the name of the image
    arrays, _ = InputMaker(model, None, {}, 0).runnable(0, lambda arrays: [])
    assert (arrays["n"], arrays["go"]) == (2, True) and arrays["x"] != 2


def test_inputs_have_a_type_and_take_so_many_bytes_at_most(monkeypatch):
    """A float counts as a double: the reference may be one."""
    with pytest.raises(ModelError, match="^input 'x': no element type$"):
        shapes_of(maker(("x", TensorProto.UNDEFINED, [2])))
    monkeypatch.setattr(module, "MAX_INPUT_BYTES", 32)
    found = maker(("x", TensorProto.FLOAT, [2, 2]))
    assert shapes_of(found) == {"x": (2, 2)}
    monkeypatch.setattr(module, "MAX_INPUT_BYTES", 31)
    with pytest.raises(ModelError, match=r"^input 'x': shape \[2, 2\]; got 32 bytes, expected at most 31 to check$"):
        shapes_of(found)


def test_the_largest_scale_at_which_most_is_finite_stays():
    def run(arrays):
        first = [np.inf, 1.0] if float(np.abs(arrays["x"]).max()) > 0.5 else [1.0, 1.0]
        return [np.array(first), [np.array([1.0]), np.array([np.nan, 2.0])], np.array(["a"], object), np.zeros(0), 3]

    found = maker(("x", TensorProto.FLOAT, [64]), FLAG, NUMBER)
    assert found.scale == 1.0
    arrays, outputs = found.runnable(0, run)
    assert np.abs(arrays["x"]).max() < 0.5 and found.scale == max(s for s in SCALES if s * 4 < 0.6 or s < 0.1)
    assert arrays["flag"].dtype == bool and len(outputs) == 5
    plain = maker(("x", TensorProto.FLOAT, [64]), FLAG).runnable(0, lambda arrays: [])[0]
    np.testing.assert_allclose(arrays["x"], plain["x"] * np.float32(found.scale), rtol=1e-6)
    np.testing.assert_array_equal(arrays["flag"], plain["flag"])
    sets = [given for given, *_ in maker(NUMBER).sets(1, lambda _: [np.zeros(0)], lambda: False)]
    assert len(sets) == 1 + len(HARDER)
    for given in (*sets, arrays, noisy(arrays, 0.1, np.random.default_rng(0))):
        assert isinstance(given["b"], np.ndarray)  # onnxruntime takes no numbers of numpy


def test_seeds_and_numbers_give_other_inputs():
    def drawn(seed, number):
        return maker(("x", 1, [8]), seed=seed).runnable(number, lambda arrays: [])[0]["x"].tolist()

    assert drawn(0, 0) == drawn(0, 0) and len({tuple(drawn(*key)) for key in ((0, 0), (0, 1), (1, 0), (1, 1))}) == 4


def test_inputs_without_a_model():
    types, shapes = {"x": np.dtype("float16"), "n": np.dtype("int64")}, {"x": [2, 3], "n": [4]}
    found = InputMaker(typed_inputs(types, shapes), None, shapes, 5)
    arrays, outputs = found.runnable(0, lambda arrays: [len(arrays)])
    kinds = {name: (array.dtype.name, array.shape) for name, array in arrays.items()}
    assert kinds == {"x": ("float16", (2, 3)), "n": ("int64", (4,))}
    assert outputs == [2] and found.scale == 1.0
    assert arrays["x"].tolist() != found.runnable(1, lambda _: [])[0]["x"].tolist()
    given = {"x": np.zeros((1, 1), np.float16), "n": np.zeros(1, np.int64)}
    assert InputMaker(typed_inputs(types, shapes), given, {}, 0).runnable(0, lambda arrays: []) == (given, [])


ZERO = np.zeros((2, 3, 4, 5), np.float32)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("data", {"x": ZERO, "y": ZERO}, "data: array 'y'; expected inputs x"),
        ("data", {}, "data: no array for input 'x'; got none"),
        ("data", {"x": ZERO.astype(np.int64)}, "data: input 'x'; got type int64, expected float32"),
        ("data", {"x": ZERO[0]}, "data: input 'x'; got shape [3, 4, 5], expected ['N', 3, 'H', '?']"),
        ("data", {"x": ZERO[:, :2]}, "data: input 'x'; got shape [2, 2, 4, 5], expected ['N', 3, 'H', '?']"),
        ("shapes", {"q": [1]}, "input shape: no input 'q'; expected one of x"),
        ("shapes", {"x": [0, 3, 4, 5]}, "input shape of 'x'; got [0, 3, 4, 5], expected positive sizes"),
        ("shapes", {"x": [2**63, 3, 4, 5]}, f"input shape of 'x'; got [{2**63}, 3, 4, 5], expected positive sizes"),
        ("shapes", {"x": [1.5, 3, 4, 5]}, "input shape of 'x'; got [1.5, 3, 4, 5], expected positive sizes"),
        ("shapes", {"x": [1, 4, 4, 5]}, "input shape: input 'x'; got shape [1, 4, 4, 5], expected ['N', 3, 'H', '?']"),
        ("shapes", {"x": [1, 3, 4]}, "input shape: input 'x'; got shape [1, 3, 4], expected ['N', 3, 'H', '?']"),
    ],
)
def test_data_and_shapes_that_do_not_fit(option, value, message):
    with pytest.raises(OptionError, match=f"^{re.escape(message)}$"):
        maker(X, **{option: value})
    assert shapes_of(maker(X, shapes={"x": [1, 3, 1, 1]})) == {"x": (1, 3, 1, 1)}


def test_data_that_fit_are_given_as_they_are():
    for kind in (np.float16, np.float32, np.float64):
        arrays, _ = maker(X, data={"x": ZERO.astype(kind)}).runnable(0, lambda arrays: [])
        assert arrays["x"].dtype == np.float32 and arrays["x"].shape == ZERO.shape
    whole = maker(("n", TensorProto.INT64, None), data={"n": np.arange(3)}).runnable(0, lambda arrays: [])[0]["n"]
    assert whole.tolist() == [0, 1, 2]
    half = maker(("b", TensorProto.BFLOAT16, [2]), data={"b": np.ones(2)}).runnable(0, lambda arrays: [])[0]["b"]
    assert half.dtype == ml_dtypes.bfloat16


def test_inputs_with_an_initializer_need_not_be_given():
    model = graph("y = Add(x, z)\nq = Add(y, s)", inputs="float[4] x, float[4] z, float[4] s", outputs="float[4] q")
    model.graph.initializer.append(numpy_helper.from_array(np.ones(4, np.float32), "z"))
    model.graph.sparse_initializer.append(sparse_of(np.ones(4, np.float32), "s"))
    assert [value.name for value in feeds(model)] == ["x"]

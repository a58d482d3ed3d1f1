# SPDX-License-Identifier: Apache-2.0
"""The generated and trained models: what the manifest says, what the checker accepts, what onnxruntime computes."""

import functools
import hashlib
import math

import numpy as np
import onnx
import onnxruntime
import pytest

from models import digits, generate, generators, light, manifest

MANIFEST = manifest.load()
# Hashing writes the whole model; above this size only the structure is compared.
HASH_LIMIT_BYTES = 50_000_000
LARGE = {name for name, entry in MANIFEST["generators"].items() if entry["bytes"] > HASH_LIMIT_BYTES}
# Every family at a size that runs in well under a second.
RUNNABLE = [name for name, entry in MANIFEST["generators"].items() if entry["bytes"] < 6_000_000]
SMALL = [name for name in RUNNABLE if name.endswith("_small") or name == "lenet5"]


def run(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(generators.serialize(model), options, providers=["CPUExecutionProvider"]).run(None, feeds)


def assert_alive(outputs: list[np.ndarray]) -> None:
    """Finite, of a sane size, and different for the two random inputs."""
    for y in outputs:
        assert np.all(np.isfinite(y))
        assert 1e-3 < np.abs(y).max() < 1e3
        assert np.abs(y[0] - y[1]).max() > 1e-3 * np.abs(y).max()


def test_manifest_lists_every_generator_and_file():
    assert list(MANIFEST["generators"]) == generators.names()
    assert set(MANIFEST["files"]) == {path.name for path in digits.MODEL_PATH.parent.glob("*.onnx")}


@pytest.mark.parametrize("name", [name for name in generators.names() if name not in LARGE])
def test_generator_gives_the_manifest_s_bytes(name):
    assert manifest.generator_entry(name) == MANIFEST["generators"][name]


@pytest.mark.parametrize("name", [name for name in sorted(LARGE) if not name.startswith(("biggan128", "biggan256"))])
def test_large_models_have_the_manifest_s_nodes_and_parameters(name):
    model, entry = generators.generate(name), MANIFEST["generators"][name]
    assert entry["sites"] == dict(generators.REGISTRY[name].sites) and len(model.graph.node) == entry["nodes"]
    assert sum(math.prod(w.dims) for w in model.graph.initializer) == entry["parameters"]


@pytest.mark.parametrize("name", RUNNABLE)
def test_checker_accepts_and_outputs_are_alive(name):
    model = generators.generate(name)
    onnx.checker.check_model(model, full_check=True)
    assert [d.dim_param for d in model.graph.input[0].type.tensor_type.shape.dim][0] == "N"
    assert_alive(run(model, generators.random_inputs(model)))


@functools.cache
def usual_outputs(name: str) -> list[np.ndarray]:
    """The outputs of a generator's model in its own opset."""
    model = generators.generate(name)
    return run(model, generators.random_inputs(model))


@pytest.mark.parametrize("opset", [7, 8, 9, 10, 11, 12, 13, 18, 21])
@pytest.mark.parametrize("name", SMALL)
def test_every_opset_computes_the_same(name, opset):
    if "wgan" in name and name != "wgan_gp_small" and opset < 10:
        with pytest.raises(ValueError, match="strided Slice; got opset"):
            generators.generate(name, opset=opset)
        return
    model = generators.generate(name, opset=opset)
    onnx.checker.check_model(model, full_check=True)
    assert len(model.graph.input) == 1 + (len(model.graph.initializer) if opset < 9 else 0)
    for got, want in zip(run(model, generators.random_inputs(model)), usual_outputs(name), strict=True):
        # The same operators in another opset; only onnxruntime's choice of kernels may differ, by float32 rounding.
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4 * np.abs(want).max())


def test_command_line_writes_the_same_bytes(tmp_path, capsys):
    path = tmp_path / "out.onnx"
    assert generate.main(["lenet5", "-o", str(path)]) == 0
    assert hashlib.sha256(path.read_bytes()).hexdigest() == MANIFEST["generators"]["lenet5"]["sha256"]
    assert generate.main(["sngan64", "-o", str(path), "--set", "width=4", "--batch", "3", "--size", "32", "--opset", "13"]) == 0
    model = onnx.load(path)
    assert [d.dim_value for d in model.graph.input[0].type.tensor_type.shape.dim] == [3, 3, 32, 32]
    assert model.opset_import[0].version == 13
    capsys.readouterr()
    assert generate.main(["nothing", "-o", str(path)]) == 2
    assert capsys.readouterr().err.startswith("nothing: unknown generator; expected one of densenet121")
    assert generate.main(["--list"]) == 0
    assert all(f"{name}: " in capsys.readouterr().out for name in generators.names()[:1])


def test_trained_lenet5_is_the_manifest_s_and_as_accurate():
    assert manifest.lenet5_entry() == MANIFEST["files"]["lenet5_digits.onnx"]
    assert MANIFEST["files"]["lenet5_digits.onnx"]["test_accuracy"] > 0.97
    assert digits.MODEL_PATH.stat().st_size < 300_000


def test_light_densenet121_gives_onnx_s_own_output():
    got = run(light.load_light_densenet121(), {"data_0": np.ones((1, 3, 224, 224), dtype=np.float32)})[0]
    # onnx's own tolerance for this model (backend tests, kind "real").
    np.testing.assert_allclose(got, light.light_densenet121_expected(), rtol=1e-3, atol=1e-7)

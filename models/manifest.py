# SPDX-License-Identifier: Apache-2.0
"""The manifest of all models: arguments, size, SHA-256 of the bytes, expected sites, LeNet-5's accuracy.

``python -m models.manifest`` writes models/manifest.json anew; ``--check`` compares instead and exits 1 on a
difference. The hashes hold for the default seed, opset, dtype and a dynamic batch.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
from pathlib import Path

import numpy as np

from models import digits, generators

PATH = Path(__file__).with_name("manifest.json")
# The sites of the models that are not generated, counted by hand; the kinds are those of generators.Generator.
LENET5_SITES = {"conv_pool": 2}
LIGHT_DENSENET121_SITES = {"conv_pool": 3}


def load() -> dict:
    """The manifest as it is in the repository."""
    return json.loads(PATH.read_text())


def generator_entry(name: str) -> dict:
    """Compute the manifest's entry of one generator."""
    generator = generators.REGISTRY[name]
    model = generators.generate(name)
    data = generators.serialize(model)
    return {
        "args": json.loads(json.dumps(generator.parameters)),
        "sites": dict(generator.sites),
        "nodes": len(model.graph.node),
        "parameters": sum(math.prod(w.dims) for w in model.graph.initializer),
        "bytes": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
    }


def lenet5_entry() -> dict:
    """The same for the trained LeNet-5, with its accuracy on the test set by onnxruntime (needs scikit-learn)."""
    data = digits.MODEL_PATH.read_bytes()
    correct, images = lenet5_correct(data)
    return {
        "sites": LENET5_SITES,
        "bytes": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
        "test_images": images,
        "test_correct": correct,
        "test_accuracy": round(correct / images, 4),
    }


def lenet5_correct(data: bytes) -> tuple[int, int]:
    """How many of the test set's images the model ``data`` labels right, and their number."""
    import onnxruntime

    inputs, labels = digits.load_test_set()
    session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    logits = session.run(None, {"image": inputs})[0]
    return int(np.sum(logits.argmax(1) == labels)), len(labels)


def compute() -> dict:
    """The manifest as it has to be, from the generators and the models themselves."""
    return {
        "defaults": {
            "seed": generators.DEFAULT_SEED,
            "opset": generators.DEFAULT_OPSET,
            "dtype": "float32",
            "batch": "dynamic",
        },
        "generators": {name: generator_entry(name) for name in generators.names()},
        "files": {digits.MODEL_PATH.name: lenet5_entry()},
        "onnx": {"light_densenet121": {"sites": LIGHT_DENSENET121_SITES}},
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m models.manifest", description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare with the committed manifest, write nothing")
    options = parser.parse_args()
    found = compute()
    if options.check:
        same = found == load()
        print(f"{PATH.name}: {'as generated' if same else 'differs from what the generators give'}")
        return 0 if same else 1
    PATH.write_text(json.dumps(found, indent=2) + "\n")
    print(f"{PATH.name}: {len(found['generators'])} generators")
    return 0


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""Builds engines with TensorRT-RTX, whose builder needs no GPU; run as a program, since a failed build may end it.

    python -m tests.support.rtx.build_model MODEL PRECISION...

Prints for each precision and lowering a line of JSON: both, the engine's size, and the model's number of weights.
"""

import json
import sys
from itertools import product

import numpy as np
import onnx
import tensorrt_rtx_bindings as trt

from convpool.tensorrt import build_engine
from models.digits import MODEL_PATH
from models.generators import generate
from tests.support.rtx import for_ampere_and_later


def main(name: str, *precisions: str) -> None:
    for precision, lowering in product(precisions, ("direct", "fused")):
        is_open = precision in ("fp32", "fp16")
        model = onnx.load(MODEL_PATH) if name == "lenet5_digits" else generate(name, batch="dynamic" if is_open else 2)
        profile = None
        if is_open or name == "lenet5_digits":
            sizes = {value.name: [dim.dim_value for dim in value.type.tensor_type.shape.dim] for value in model.graph.input}
            profile = {key: ([1, *s[1:]], [4, *s[1:]], [16, *s[1:]]) for key, s in sizes.items()}
        options = dict(plugin=False, profiles=profile, trt=trt, configure=for_ampere_and_later)
        engine = build_engine(model, precision=precision, lowering=lowering, **options)
        weights = int(sum(np.prod(tensor.dims, dtype=np.int64) for tensor in model.graph.initializer))
        print(json.dumps([precision, lowering, len(engine.plan), weights]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

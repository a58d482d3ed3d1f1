# SPDX-License-Identifier: Apache-2.0
"""Builds engines with TensorRT-RTX, whose builder needs no GPU; run as a program, since a failed build may end it.

    python -m tests.support.rtx.build_model MODEL LOWERING PRECISION BATCH

Prints the engine's size and the network's inputs and outputs as JSON.
"""

import json
import sys

import numpy as np
import onnx
import tensorrt_rtx_bindings as trt

from convpool.tensorrt import build_engine
from models.digits import MODEL_PATH
from models.generators import generate
from tests.support.rtx import for_ampere_and_later


def main(name: str, lowering: str, precision: str, batch: str) -> None:
    model = onnx.load(MODEL_PATH) if name == "lenet5_digits" else generate(name, batch="dynamic" if batch == "N" else int(batch))
    profile = None
    if batch == "N" or name == "lenet5_digits":
        sizes = {value.name: [dim.dim_value for dim in value.type.tensor_type.shape.dim] for value in model.graph.input}
        profile = {key: ([1, *s[1:]], [4, *s[1:]], [16, *s[1:]]) for key, s in sizes.items()}

    engine = build_engine(
        model, precision=precision, lowering=lowering, plugin=False, profiles=profile, trt=trt, configure=for_ampere_and_later
    )
    print(
        json.dumps(
            {
                "bytes": len(engine.plan),
                "weights": int(sum(np.prod(tensor.dims, dtype=np.int64) for tensor in model.graph.initializer)),
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])

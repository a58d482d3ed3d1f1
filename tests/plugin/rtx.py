"""Builds engines with TensorRT-RTX, whose builder needs no GPU; run as a program, since a failed build may end it.

    python rtx.py MODEL LOWERING PRECISION BATCH

Prints the engine's size and the network's inputs and outputs as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import onnx
import tensorrt_rtx_bindings as trt

sys.path.insert(0, str(Path(__file__).parents[2]))

from convpool.tensorrt import build_engine  # noqa: E402
from models.digits import MODEL_PATH  # noqa: E402
from models.generators import generate  # noqa: E402


def main(name: str, lowering: str, precision: str, batch: str) -> None:
    model = onnx.load(MODEL_PATH) if name == "lenet5_digits" else generate(name, batch="dynamic" if batch == "N" else int(batch))
    profile = None
    if batch == "N" or name == "lenet5_digits":
        sizes = {value.name: [dim.dim_value for dim in value.type.tensor_type.shape.dim] for value in model.graph.input}
        profile = {key: ([1, *s[1:]], [4, *s[1:]], [16, *s[1:]]) for key, s in sizes.items()}

    def for_ampere_and_later(config) -> None:
        config.num_compute_capabilities = 1
        config.set_compute_capability(trt.ComputeCapability.SM80, 0)

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

# SPDX-License-Identifier: Apache-2.0
"""onnx's own light DenseNet-121, which ships inside the installed onnx package (no network access).

The "light" models of onnx's backend tests are the ONNX model zoo's networks with weights made at run time: every weight
is a ConstantOfShape of 0.02. IR 3, opset 9; the shapes of the weights are initializers and graph inputs at once. The
expected output for an input of ones comes with the model.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.backend.test
from onnx import numpy_helper


def light_densenet121_path() -> Path:
    """The .onnx file in the installed package. Raises FileNotFoundError if that onnx was built without it."""
    path = Path(onnx.backend.test.__file__).parent / "data" / "light" / "light_densenet121.onnx"
    if not path.is_file():
        raise FileNotFoundError(f"light_densenet121: not in the installed onnx {onnx.__version__}; expected {path}")
    return path


def load_light_densenet121() -> onnx.ModelProto:
    """The model: input ``data_0`` [1, 3, 224, 224], output ``fc6_1`` [1, 1000, 1, 1]; three conv-pool pairs."""
    return onnx.load(light_densenet121_path())


def light_densenet121_expected() -> np.ndarray:
    """The output [1, 1000, 1, 1] that onnx records for an input of ones."""
    path = light_densenet121_path().with_name("light_densenet121_output_0.pb")
    return numpy_helper.to_array(onnx.load_tensor(path))

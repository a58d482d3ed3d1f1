# SPDX-License-Identifier: Apache-2.0
"""convpool: exact rewriting of convolutions beside average pooling and resizing in ONNX models.

    result = convpool.optimize("model.onnx")
    result.save("model.convpool.onnx")

GPU parts (`convpool.cuda`, `convpool.tensorrt`) are imported only when asked for.
"""

# ruff: noqa: E402, I001
from convpool import interrupt

interrupt.end_quietly()  # before what takes long to import

from importlib.metadata import PackageNotFoundError, version

from convpool.api import OptimizeResult, optimize
from convpool.check.judge import Verification
from convpool.check.verify import verify
from convpool.errors import ConvpoolError, ModelError, OptionError, OutputError, VerificationError
from convpool.report import Report, SiteReport, Speed, Summary
from convpool.types import Accumulation, Layout, Lowering, Model, Target, Upsampling

try:
    __version__ = version("convpool")
except PackageNotFoundError:  # used from the sources
    __version__ = "0+unknown"

__all__ = [
    "Accumulation", "ConvpoolError", "Layout", "Lowering", "Model", "ModelError", "OptimizeResult", "OptionError", "OutputError",
    "Report", "SiteReport", "Speed", "Summary", "Target", "Upsampling", "Verification", "VerificationError",
    "__version__", "optimize", "verify",
]  # fmt: skip

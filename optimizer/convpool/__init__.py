# SPDX-License-Identifier: Apache-2.0
"""convpool: exact rewriting of convolution followed by average pooling in ONNX models.

    result = convpool.optimize("model.onnx")
    result.save("model.convpool.onnx")

GPU parts (`convpool.cuda`, `convpool.tensorrt`) are imported only when asked for.
"""

from convpool.api import OptimizeResult, optimize
from convpool.check.verdict import Verification
from convpool.check.verify import verify
from convpool.errors import ConvpoolError, ModelError, OptionError, OutputError, VerificationError
from convpool.ir import schema
from convpool.report import Report, SiteReport, Summary

schema.register_schema()

__all__ = [
    "ConvpoolError",
    "ModelError",
    "OptimizeResult",
    "OptionError",
    "OutputError",
    "Report",
    "SiteReport",
    "Summary",
    "Verification",
    "VerificationError",
    "optimize",
    "verify",
]

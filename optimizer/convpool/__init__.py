"""convpool: exact rewriting of convolution followed by average pooling in ONNX models.

    result = convpool.optimize("model.onnx")
    result.save("model.convpool.onnx")

GPU parts (`convpool.cuda`, `convpool.tensorrt`) are imported only when asked for.
"""

from convpool import operator
from convpool.api import OptimizeResult, optimize
from convpool.errors import ConvpoolError, ModelError, OptionError, OutputError, VerificationError
from convpool.report import Report, SiteReport, Summary
from convpool.verify import Verification, verify

operator.register_schema()

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

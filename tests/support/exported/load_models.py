# SPDX-License-Identifier: Apache-2.0
"""Loads the models whose paths come on stdin, one a line, with the onnx of the Python that runs this; "ok" or why not.

Imports nothing of convpool: it is run by another Python, which has an older onnx.
"""

import sys

import onnx


def load(path: str) -> str:
    """Return what onnx says of a stored model."""
    try:
        onnx.load(path)
        onnx.checker.check_model(path, full_check=True)
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    return "ok"


if __name__ == "__main__":
    print(onnx.__version__, flush=True)
    for line in sys.stdin:
        print(load(line.rstrip("\n")), flush=True)

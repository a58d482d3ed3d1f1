# SPDX-License-Identifier: Apache-2.0
"""Models as PyTorch's two exporters write them.

A test module that imports this is skipped where PyTorch or onnxscript is missing, and fails there with REQUIRE_TORCH=1.
"""

import importlib.util
import os

import pytest

for package in ("torch", "onnxscript"):
    if importlib.util.find_spec(package) is None and os.environ.get("REQUIRE_TORCH") != "1":
        pytest.skip(f"no {package}; make test-torch has it", allow_module_level=True)

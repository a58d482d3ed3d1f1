# SPDX-License-Identifier: Apache-2.0
"""convpool without PyTorch: it is not imported, and convpool.torch says how to get it."""

import subprocess
import sys


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_convpool_does_not_import_torch():
    assert python("import sys, convpool, convpool.cuda; print('torch' in sys.modules)").strip() == "False"


def test_convpool_torch_names_the_extra():
    said = python(
        """
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "torch" else found(name, *rest)
import convpool
try:
    import convpool.torch
except convpool.ConvpoolError as error:
    print(isinstance(error, ImportError), error)
"""
    )
    assert said.startswith("True torch: not installed") and "pip install 'convpool[torch]'" in said

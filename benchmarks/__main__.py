# SPDX-License-Identifier: Apache-2.0
"""Every benchmark by one name: `python -m benchmarks NAME [OPTIONS]`.  README.md says what each one measures."""

from __future__ import annotations

import sys
from importlib import import_module

BENCHMARKS = (
    "layers",
    "model_times",
    "resizing",
    "public_models",
    "scale",
    "tensorrt_engines",
    "onnxruntime_times",
    "lenet5_pairs",
    "host_time",
    "torch_layers",
    "torch_training",
    "upsample_layers",
    "torch_host_time",
    "torch_captures",
    "torch_image_weights",
    "compare_builds",
    "tables",
    "papers",
    "plots",
    "demo",
)
"""Modules of this package, each with a `main`."""


def main() -> int:
    """Run the benchmark that the first argument names, with the others; its exit status."""
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in BENCHMARKS:
        stream = sys.stdout if name in ("-h", "--help", "") else sys.stderr
        print(f"usage: python -m benchmarks NAME [OPTIONS]\n\nNAME: {', '.join(BENCHMARKS)}", file=stream)
        return 0 if stream is sys.stdout else 2
    sys.argv = [f"python -m benchmarks {name}", *sys.argv[2:]]
    return import_module(f"benchmarks.{name}").main() or 0


if __name__ == "__main__":
    sys.exit(main())

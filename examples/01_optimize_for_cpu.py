# SPDX-License-Identifier: Apache-2.0
"""Optimize a model for a CPU, and time both models in onnxruntime.

    python examples/01_optimize_for_cpu.py [MODEL.onnx [OUT.onnx]]

Needs: convpool.  Without MODEL it takes the bundled LeNet-5.
On a shell: convpool optimize MODEL.onnx --target cpu --time -o OUT.onnx
"""

import sys
from pathlib import Path

import convpool

BUNDLED = Path(__file__).parents[1] / "models" / "lenet5_digits.onnx"


def main(model: Path = BUNDLED, out: Path = Path("optimized.onnx")) -> None:
    """Write the optimized model and print what it gains."""
    # target="cpu" writes standard operators only: AveragePool, then Conv, or one Conv, whichever is cheaper.
    # time=True times the original and the result in turn on this machine.
    result = convpool.optimize(model, target="cpu", time=True)

    summary = result.report.summary
    print(f"rewritten: {summary.rewritten_convolutions} of {summary.convolutions} convolutions")
    print(f"multiply-adds of the model: {summary.model_macs_before} -> {summary.model_macs_after}")

    # `speed` is None if nothing was rewritten: both models are the same then.
    speed = result.report.speed
    if speed is not None:
        print(f"time on {speed.threads} threads: {speed.original_us:.1f} us -> {speed.result_us:.1f} us ({speed.ratio:.2f}x)")

    # `save` returns every file that the model needs.
    print("written:", *result.save(out))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))

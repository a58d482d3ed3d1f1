# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks layers`: every way to compute a convolution followed by average pooling, side by side on one GPU.

| module | holds |
|---|---|
| `rows` | layers to measure: the suites, rows from a file |
| `record` | what a run measured, as JSON and CSV; merging runs |
| `figures`, `table`, `plot` | speed-ups, rooflines, the table in the papers' layout, pictures |
| `paper` | the papers' own figures |
| `run` | the loop over rows and methods |
| `device`, `case` | the GPU, its clock and its ceilings; one row's tensors, its reference and its check |
| `cudnn`, `cublas`, `textbook`, `tactics` | methods on the GPU; their kernels in `kernels.cu` |
| `tensorrt`, `tensorrt_worker` | TensorRT, in a process of its own |
| `cpu` | a plain loop and onnxruntime |

Importing this needs no GPU package: PyTorch, CuPy, TensorRT and matplotlib are imported where they are used.
"""


def main() -> None:
    """Entry point."""
    from benchmarks.layers.cli import main as measure

    measure()

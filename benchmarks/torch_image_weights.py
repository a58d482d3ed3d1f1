# SPDX-License-Identifier: Apache-2.0
"""The gradients at weights and bias of convolutions of images, by the library against cuDNN (cudnn.benchmark).

    python -m benchmarks torch_image_weights --json benchmarks/results/h200_torch_image_weights.json

Channels last, in CUDA graphs.  Times are medians of replays, in microseconds of one call; bytes are those of the gradient and
the image, which both read.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from benchmarks.torch_layers import DTYPES, graph_time
from convpool.torch import kernels

LAYERS = [
    # batch, channels, output channels, size, kernel
    (64, 3, 64, 64, 3),
    (64, 3, 64, 32, 1),
    (64, 3, 64, 128, 3),
    (64, 3, 64, 64, 1),
    (8, 3, 64, 256, 3),
    (8, 3, 64, 256, 1),
    (64, 3, 128, 32, 3),
    (64, 3, 128, 16, 1),
    (64, 1, 8, 28, 5),
    (1, 3, 64, 32, 3),
]


def cudnn(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, geometry: tuple) -> Any:
    """PyTorch's operator, of both gradients."""
    strides, padding, dilations, groups = geometry
    options = ([len(weight)], strides, padding, dilations, False, (0, 0), groups, [False, True, True])
    return torch.ops.aten.convolution_backward(grad, x, weight, *options)


def ours(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, geometry: tuple) -> Any:
    """The library's kernels."""
    return kernels.few_channels_gradients(grad, x, weight, geometry, True)


def main() -> None:
    """Prints a table and writes the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--commit", default="")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    rows = []
    for name, dtype in DTYPES.items():
        for n, c, m, size, kernel in LAYERS:
            made = {"device": "cuda", "dtype": dtype}
            x, grad = (torch.randn(n, k, size, size, **made).contiguous(memory_format=torch.channels_last) for k in (c, m))
            weight = torch.randn(m, c, kernel, kernel, **made).contiguous(memory_format=torch.channels_last)
            case = grad, x, weight, ((1, 1), (kernel // 2,) * 2, (1, 1), 1)
            us = [graph_time(lambda run=run, case=case: run(*case)) for run in (cudnn, ours)]
            size_mb = (x.numel() + grad.numel()) * 2 / 1e6
            rows.append({"type": name, "layer": [n, c, m, size, kernel], "cudnn_us": us[0], "convpool_us": us[1], "mb": size_mb})
            shown = f"{n}x{c}x{size}x{size} {kernel}x{kernel} to {m}"
            print(f"{name} {shown:>26} {us[0]:8.1f} {us[1]:8.1f} {us[0] / us[1]:6.2f} {size_mb / us[1]:6.2f} TB/s", flush=True)
    if options.json:
        machine = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "commit": options.commit}
        options.json.write_text(json.dumps({**machine, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()

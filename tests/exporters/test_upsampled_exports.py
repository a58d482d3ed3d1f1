# SPDX-License-Identifier: Apache-2.0
"""U-Nets with open batch and sizes, exported by PyTorch: rewritten, and right at other sizes."""

import io

import numpy as np
import onnx
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

import convpool  # noqa: E402
from tests.support import sessions  # noqa: E402
from tests.support.exported import exporting  # noqa: E402, F401

SIZES = ((1, 20, 12), (2, 36, 28), (3, 4, 44))
"""Batch, height and width: odd multiples of what two poolings take; with less of one where a map gets the size of the skip."""


class UNet(nn.Module):
    """Two levels; the upsampling by a "factor", to the "size" that a Shape doubles, or to that of the "skip"."""

    def __init__(self, by: str) -> None:
        super().__init__()
        self.by = by
        self.down = nn.ModuleList(nn.Conv2d(c, m, 3, padding=1) for c, m in ((3, 16), (16, 32), (32, 64)))
        self.up = nn.ModuleList(nn.Conv2d(c, m, 3, padding=1) for c, m in ((96, 32), (48, 16)))
        self.norms = nn.ModuleList(nn.BatchNorm2d(m) for m in (32, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The map of the input's size."""
        skips = []
        for number, conv in enumerate(self.down):
            x = F.relu(conv(F.max_pool2d(x, 2) if number else x))
            skips.append(x)
        for number, (conv, norm) in enumerate(zip(self.up, self.norms, strict=True)):
            skip = skips[1 - number]
            sizes = {"size": (x.shape[2] * 2, x.shape[3] * 2), "skip": skip.shape[2:]}
            x = F.interpolate(x, **({"size": sizes[self.by]} if self.by in sizes else {"scale_factor": 2}))
            x = F.relu(norm(conv(torch.cat((x, skip), 1))))
        return x


@pytest.mark.parametrize("by", ("factor", "size", "skip"))
@pytest.mark.parametrize("dynamo", (False, True), ids=("torchscript", "dynamo"))
@pytest.mark.filterwarnings("ignore")
def test_open_sizes(dynamo, by):
    torch.manual_seed(0)
    module, x = UNet(by).eval(), torch.randn(2, 3, 8, 16)
    buffer = io.BytesIO()
    if dynamo:
        unit = 1 if by == "skip" else 4
        axes = {0: torch.export.Dim("n"), **{2 + i: unit * torch.export.Dim(n, min=4 // unit) for i, n in enumerate("hw")}}
        torch.onnx.export(module, (x,), dynamo=True, dynamic_shapes=(axes,), verbose=False).save(buffer)
    else:
        names = {"input_names": ["x"], "output_names": ["y"], "dynamic_axes": {"x": {0: "n", 2: "h", 3: "w"}}}
        torch.onnx.export(module, (x,), buffer, dynamo=False, opset_version=17, **names)
    model = onnx.load_from_string(buffer.getvalue())
    result = convpool.optimize(model, target="cpu", upsampling="fused", check=0)
    assert [site.status for site in result.report.sites if site.rule == "upsample_last"] == ["rewritten"] * 2
    # The dynamo exporter writes the doubled sizes as those of the image over two: twice the small map's only if that divides.
    assert sum(node.op_type == "If" for node in result.model.graph.node) == 2 * (by == "skip" or dynamo and by == "size")
    name = model.graph.input[0].name
    for batch, height, width in SIZES + ((2, 21, 15), (1, 22, 28)) * (by == "skip"):
        image = np.random.default_rng(height).normal(size=(batch, 3, height, width)).astype(np.float32)
        (one,), (other,) = sessions.run(model, {name: image}), sessions.run(result.model, {name: image})
        np.testing.assert_allclose(other, one, rtol=0, atol=1e-5 * np.abs(one).max())

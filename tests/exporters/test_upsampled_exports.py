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
"""Batch, height and width: odd multiples of what two poolings take."""


class UNet(nn.Module):
    """Two levels; the upsampling by a factor or to the size that a Shape doubles."""

    def __init__(self, *, by_size: bool) -> None:
        super().__init__()
        self.by_size = by_size
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
            if self.by_size:
                x = F.interpolate(x, size=(x.shape[2] * 2, x.shape[3] * 2))
            else:
                x = F.interpolate(x, scale_factor=2)
            x = F.relu(norm(conv(torch.cat((x, skips[1 - number]), 1))))
        return x


@pytest.mark.parametrize("by_size", (False, True), ids=("factor", "size"))
@pytest.mark.parametrize("dynamo", (False, True), ids=("torchscript", "dynamo"))
@pytest.mark.filterwarnings("ignore")
def test_open_sizes(dynamo, by_size):
    torch.manual_seed(0)
    module, x = UNet(by_size=by_size).eval(), torch.randn(2, 3, 8, 16)
    buffer = io.BytesIO()
    if dynamo:
        axes = {0: torch.export.Dim("n"), 2: 4 * torch.export.Dim("h", min=1), 3: 4 * torch.export.Dim("w", min=1)}
        torch.onnx.export(module, (x,), dynamo=True, dynamic_shapes=(axes,), verbose=False).save(buffer)
    else:
        names = {"input_names": ["x"], "output_names": ["y"], "dynamic_axes": {"x": {0: "n", 2: "h", 3: "w"}}}
        torch.onnx.export(module, (x,), buffer, dynamo=False, opset_version=17, **names)
    model = onnx.load_from_string(buffer.getvalue())
    result = convpool.optimize(model, target="cpu", upsampling="fused", check=0)
    # The dynamo exporter writes the sizes as those of the image over two: twice the small map's only if that divides.
    expected = "rejected" if dynamo and by_size else "rewritten"
    assert [site.status for site in result.report.sites if site.rule == "upsample_last"] == [expected] * 2
    name = model.graph.input[0].name
    for batch, height, width in SIZES:
        image = np.random.default_rng(height).normal(size=(batch, 3, height, width)).astype(np.float32)
        (one,), (other,) = sessions.run(model, {name: image}), sessions.run(result.model, {name: image})
        np.testing.assert_allclose(other, one, rtol=0, atol=1e-5 * np.abs(one).max())

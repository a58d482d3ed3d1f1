# SPDX-License-Identifier: Apache-2.0
"""Pieces of models for the tests of reasons not to rewrite: text in ONNX's own notation, and values of initializers."""

import numpy as np

import convpool
from tests.support.models import graph_of
from tests.support.rewriting import CONV, LAST

POOL = "y = AveragePool<kernel_shape=[2,2], strides=[2,2]>(h)"
ALONE = CONV + POOL
PADDED = "c = Conv<pads=[1,1,1,1]>(x, w)\n"
OPEN = {"inputs": "float[1,16,H,W] x"}
CORNERS = {"f": [0, 0], "r": [1, 0], "c": [0, 1], "d": [1, 1], "e": [LAST, LAST], "a": [2, 3], "s": [2, 2]}
FOUR = """h = Conv<pads=[1,1,1,1]>(x, w)
s1 = Slice(h, f, e, a, s)
s2 = Slice(h, r, e, a, s)
s3 = Slice(h, c, e, a, s)
s4 = Slice(h, d, e, a, s)
"""
FOUR_SUM = FOUR + "t = Sum(s1, s2, s3, s4)\n"
QUARTER = {**CORNERS, "q": np.float32(0.25), "third": np.float32(1 / 3)}
BRANCH = """y = If(flag) <
  then_branch = t () => (float[1,32,6,6] z) { z = AveragePool<kernel_shape=[2,2], strides=[2,2]>(h) },
  else_branch = e () => (float[1,32,6,6] u) { u = MaxPool<kernel_shape=[2,2], strides=[2,2]>(h) }
>
"""
BOX = {"quarter": np.full((32, 1, 2, 2), 0.25, np.float32)}
AXES = {"zero": [0], "one": [1], "end": [LAST], "two": [2], "rows": [2], "columns": [3], "half": np.float32(2)}
HALF = {"r": np.zeros(0, np.float32), "scales": np.array([1, 1, 0.5, 0.5], np.float32)}
FUSE = {"fuse_pool_conv": True}
BOOL = {"inputs": "float[1,16,12,12] x, bool flag"}


def resize(attributes: str = "", source: str = "h", inputs: str = "r, scales") -> str:
    """A linear Resize to y."""
    return f'y = Resize<mode="linear"{attributes}>({source}, {inputs})'


def pool(attributes: str, source: str = "h") -> str:
    """An AveragePool with these attributes, written to y."""
    return f"y = AveragePool<{attributes}>({source})"


def pool_conv(attributes: str) -> str:
    """An AveragePool with these attributes, then a convolution."""
    return f"h = AveragePool<{attributes}>(x)\ny = Conv<pads=[1,1,1,1]>(h, w)"


def slot(middle: str, before: str = PADDED) -> str:
    """Convolution, `middle` from c to h, pooling."""
    return before + middle + "\n" + POOL


def check_rejected(body: str, expected: str, given: dict | None = None):
    """The first site of a model stays for the reason expected, and the model as it is; given: for `graph_of` and `optimize`."""
    options = {name: value for name, value in (given or {}).items() if name in ("lowering", *FUSE)}
    model = graph_of(body, {name: value for name, value in (given or {}).items() if name not in options})
    before = model.SerializeToString(deterministic=True)
    result = convpool.optimize(model, check=0, **options)
    site = result.report.sites[0]
    assert (site.status, site.lowering, site.reason) == ("rejected", None, expected)
    assert result.model.SerializeToString(deterministic=True) == before

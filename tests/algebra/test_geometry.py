# SPDX-License-Identifier: Apache-2.0
"""Geometry, parts and lowerings at their boundaries: maps per channel, zero padding, what each lowering refuses."""

import ml_dtypes
import numpy as np
import pytest

from convpool.algebra import geometry as lowerings
from convpool.algebra.geometry import (
    ConvSpec,
    Layer,
    Lowered,
    Obstacles,
    PoolSpec,
    Refusal,
    fills_window,
    fused_spec,
    lower,
    miscounts,
    nominal_size,
    pad_behind,
    pool_first,
    pool_last,
    refuse,
    same_pads,
    transposed,
    without_kernel,
)
from convpool.algebra.parts import IDENTITY, Affine, fold, holds, keeps, limits

HALF, BFLOAT = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)


def conv(kernel=(3, 3), strides=(1, 1), pads=(0, 0, 0, 0), dilations=(1, 1), group=1) -> ConvSpec:
    return ConvSpec(kernel, strides, pads, dilations, group)


def pool(kernel=(2, 2), strides=(2, 2), pads=(0, 0, 0, 0), dilations=(1, 1)) -> PoolSpec:
    return PoolSpec(kernel, strides, pads, dilations)


def test_limits_of_types():
    for dtype in (HALF, np.dtype(np.float32), np.dtype(np.float64)):
        assert limits(dtype) == (float(np.finfo(dtype).max), float(np.finfo(dtype).eps))
    info = ml_dtypes.finfo(ml_dtypes.bfloat16)
    assert limits(BFLOAT) == (float(info.max), float(info.eps))


def test_maps_one_after_the_other():
    found = Affine(np.array(2.0), np.array([1.0, 5.0])).after(Affine(np.array([3.0, 4.0]), np.array(10.0)))
    assert found.scale.tolist() == [6, 8] and found.shift.tolist() == [21, 25]
    for n, m, fits in ((1, 1, True), (4, 1, True), (1, 4, True), (4, 2, False), (2, 4, False)):
        assert Affine(np.ones(n), np.ones(m)).fits(4) == fits
    assert IDENTITY.is_finite and not Affine(np.array(1.0), np.array([0.0, np.inf])).is_finite
    assert not Affine(np.array([np.nan]), np.array(0.0)).is_finite
    assert (IDENTITY.scale, IDENTITY.shift) == (1, 0)


def test_maps_fold_into_weights_and_bias():
    weight = np.arange(4.0).reshape(2, 1, 2)
    found, bias = fold(weight, None, Affine(np.array([2.0, 3.0]), np.array(0.0)))
    assert found.tolist() == [[[0, 2]], [[6, 9]]] and bias is None
    assert fold(weight, None, Affine(np.array(1.0), np.array([0.0, 5.0])))[1].tolist() == [0, 5]
    assert fold(weight, np.array([1.0, 2.0]), Affine(np.array(2.0), np.array([0.0, 5.0])))[1].tolist() == [2, 9]
    assert fold(weight, np.zeros(2), IDENTITY)[1].tolist() == [0, 0]


@pytest.mark.parametrize(
    ("factors", "kept"),
    [
        ([[65504.0, 1.0]], True), ([[65520.0, 1.0]], False), ([[np.inf, 1.0]], False), ([[1.0, 1e-9]], True),
        ([[1e-9, 1e-9]], False), ([[1.0, 1.0], [1e-9, 0.0]], False), ([[1 + 2.0**-11, 1.0]], True),
        ([[0.0, 0.0]], True), ([[]], True),
    ],
)  # fmt: skip
def test_factors_that_half_precision_keeps(factors, kept):
    """Each row to its own precision."""
    assert keeps(np.array(factors), HALF) == kept
    assert holds(np.array(factors), HALF) == (np.abs(np.array(factors)).max(initial=0) <= 65504)


@pytest.mark.parametrize(
    ("auto_pad", "kernel", "stride", "dilation", "size", "wanted"),
    [
        ("SAME_UPPER", 3, 1, 1, None, (1, 1)), ("SAME_UPPER", 4, 1, 1, None, (1, 2)),
        ("SAME_LOWER", 4, 1, 1, None, (2, 1)), ("SAME_UPPER", 3, 1, 2, None, (2, 2)),
        ("SAME_UPPER", 3, 2, 1, 12, (0, 1)), ("SAME_LOWER", 3, 2, 1, 12, (1, 0)), ("SAME_UPPER", 3, 2, 1, 13, (1, 1)),
        ("SAME_UPPER", 1, 2, 1, 12, (0, 0)), ("SAME_UPPER", 1, 3, 1, 12, (0, 0)), ("SAME_UPPER", 2, 2, 3, 7, (1, 2)),
    ],
)  # fmt: skip
def test_pads_that_keep_the_size(auto_pad, kernel, stride, dilation, size, wanted):
    found = same_pads(auto_pad, (kernel,), (stride,), (dilation,), None if size is None else (size,))
    assert found == wanted
    if size is not None:
        assert (size + sum(found) - dilation * (kernel - 1) - 1) // stride + 1 == -(-size // stride)


@pytest.mark.parametrize(
    ("spec", "pads", "shift", "wanted"),
    [
        (conv(pads=(2, 2, 2, 2)), (1, 1, 1, 1), False, (3, 3, 3, 3)),
        (conv(pads=(2, 2, 2, 2)), (1, 0, 0, 0), True, "Pad behind a bias"),
        (conv(pads=(2, 2, 2, 2)), (0, 0, 0, 1), True, "Pad behind a bias"),
        (conv(pads=(2, 2, 2, 2)), (-1, 0, -2, 0), True, (1, 2, 0, 2)),
        (conv(pads=(2, 2, 2, 2)), (-3, 0, 0, 0), False, "crop beyond the convolution's padding"),
        (conv(pads=(1, 2, 2, 2)), (1, 0, 0, 0), False, "zeros where the convolution gives others, axis 0"),
        (conv(pads=(2, 2, 2, 1)), (0, 0, 0, 1), False, "zeros where the convolution gives others, axis 1"),
        (conv(strides=(2, 2), pads=(1, 1, 2, 2)), (1, 1, 1, 1), False, (3, 3, 4, 4)),
        (conv(strides=(2, 2), pads=(0, 1, 2, 2)), (1, 0, 0, 0), False, "zeros where the convolution gives others, axis 0"),
        (conv(strides=(2, 2), pads=(1, 1, 1, 2)), (0, 0, 1, 0), False, "zeros where the convolution gives others, axis 0"),
        (conv(dilations=(2, 1), pads=(3, 2, 4, 2)), (1, 0, 0, 0), False, "zeros where the convolution gives others, axis 0"),
        (conv(dilations=(2, 1), pads=(4, 2, 4, 2)), (1, 0, 2, 0), False, (5, 2, 6, 2)),
    ],
)
def test_a_pad_behind_a_convolution(spec, pads, shift, wanted):
    found = pad_behind(spec, pads, shift)
    if isinstance(wanted, str):
        assert isinstance(found, Refusal) and found.condition == wanted
    else:
        assert isinstance(found, ConvSpec) and found.pads == wanted


@pytest.mark.parametrize(
    ("pads", "orders", "wanted"),
    [
        ((0, 0, 1, 2, 0, 0, 3, 4), [], (1, 2, 3, 4)),
        ((0, 1, 2, 0, 0, 3, 4, 0), [(0, 3, 1, 2)], (1, 2, 3, 4)),
        ((0, 0, 1, 2, 0, 0, 3, 4), [(0, 3, 1, 2)], None),
        ((2, 1, 0, 0, 4, 3, 0, 0), [()], (1, 2, 3, 4)),
        ((0, 1, 2, 0, 0, 3, 4, 0), [(0, 1, 3, 2), (0, 3, 1, 2)], (2, 1, 4, 3)),
        ((1, 0, 0, 0, 0, 0, 0, 0), [], None),
        ((0, 0, 0, 0, 0, 1, 0, 0), [], None),
    ],
)
def test_pads_behind_transposes(pads, orders, wanted):
    """An empty order is the reverse one; the nearest stands first."""
    assert transposed(pads, orders, 2) == wanted


@pytest.mark.parametrize(
    ("pads", "own", "filled"),
    [
        ((1, 1, 1, 1), (0, 0, 0, 0), False),
        ((2, 0, 0, 0), (0, 0, 0, 0), True),
        ((0, 0, 0, 1), (0, 0, 0, 1), True),
        ((0,) * 4, (1, 1, 1, 1), False),
    ],
)
def test_zeros_that_fill_a_window(pads, own, filled):
    assert fills_window(pads, pool(pads=own)) == filled


@pytest.mark.parametrize(
    ("spec", "window", "name", "wanted"),
    [
        (conv((1, 1)), None, "direct", "global"),
        (conv((1, 1)), None, "fused", "mean over a feature map"),
        (conv((1, 1)), None, "convavgpool", "pool_kernel_shape"),
        (conv((1, 1), pads=(0, 0, 0, 1)), None, "direct", "mean over a feature map"),
        (conv((1, 1), strides=(1, 2)), None, "direct", "mean over a feature map"),
        (conv((1, 2)), None, "direct", "mean over a feature map"),
        (conv((1, 1)), pool((8, 8), (1, 1)), "direct", "global"),
        (conv((1, 1)), pool((8, 7), (1, 1)), "direct", "direct"),
        (conv((1, 1)), pool((8, 8), (1, 1)), "convavgpool", "convavgpool"),
        (conv(), pool((1, 1), (2, 2)), "direct", "direct"),
        (conv(), pool((1, 1), (2, 2)), "convavgpool", "pooling window"),
        (conv(strides=(2, 1)), pool(), "direct", "dilated box mean"),
        (conv(strides=(2, 1)), pool((1, 2)), "direct", "direct"),
        (conv(pads=(1, 1, 1, 1)), pool(), "direct", "direct"),
        (conv(pads=(3, 3, 3, 3)), pool((3, 3)), "direct", "direct"),
        (conv(), pool(), "convavgpool", "convavgpool"),
        (conv(), pool(), "fused", "fused"),
    ],
)
def test_lowerings(spec, window, name, wanted):
    obstacles = Obstacles(refuse("dilated box mean", "opset 17", "more"), None)
    found = lower(Layer(spec, (4, 4, *spec.kernel_shape), (8, 8), True), window, name, obstacles)
    if isinstance(found, Refusal):
        assert found.condition == wanted
    else:
        assert found.name == (name if wanted == "global" else wanted) and found.is_global == (wanted == "global")


def test_pads_that_onnxruntime_miscounts():
    """The tables are measured in onnxruntime 1.22.1 and 1.24.4, with opsets 19 to 22."""
    right = ((0, 1), (1, 0), (1, 1, 1, 1), (0, 1, 0, 1), (1, 1, 0, 0), (1, 1, 0, 1, 1, 0))
    wrong = ((0, 0, 1, 1), (1, 0, 1, 0), (0, 1, 1, 0, 1, 1), (0, 1, 0, 0, 1, 0))
    assert [*map(miscounts, (*right, *wrong))] == [False] * 6 + [True] * 4


def test_what_else_lowerings_refuse():
    layer = Layer(conv(), (4, 4, 3, 3), (8, 8), False)
    refused = lower(layer, pool(), "fused", Obstacles())
    assert isinstance(refused, Refusal) and refused.condition == "weights"
    no_operator = Obstacles(None, refuse("bodies", 2, 1))
    assert lower(layer, pool(), "convavgpool", no_operator) == no_operator.operator
    assert isinstance(lower(layer, pool(), "direct", no_operator), Lowered)


@pytest.mark.parametrize(
    ("spec", "window", "condition"),
    [
        (conv(), None, None),
        (conv(group=2), None, "group of a ConvAvgPool"),
        (ConvSpec((1,) * 3, (1,) * 3, (0,) * 6, (1,) * 3), None, "spatial axes of a ConvAvgPool"),
        (ConvSpec((1,), (1,), (0,) * 2, (1,)), None, None),
        (conv(), pool((8, 8)), None),
        (conv(), pool((5, 13)), "pooling window of a ConvAvgPool"),
    ],
)
def test_what_has_no_fast_kernel(spec, window, condition):
    found = without_kernel(spec, window)
    assert (None if found is None else found.condition) == condition


def test_sizes_and_pads_of_either_order():
    assert conv(dilations=(2, 1)).extents == (5, 3) and conv(strides=(2, 1), pads=(1, 0, 2, 0)).output_size((8, 8)) == (5, 6)
    assert pool((2, 3), (2, 1), (1, 0, 0, 2), (3, 1)).output_size((8, 8)) == (3, 8)
    box, rest = pool_first(conv(strides=(2, 1), pads=(3, 1, 1, 0)), pool((2, 1), (2, 3)))
    assert (box.pads, box.dilations, box.strides) == ((2, 0, 1, 0), (2, 1), (1, 1))
    assert (rest.pads, rest.strides) == ((1, 1, 0, 0), (4, 3))
    with pytest.raises(AssertionError, match="pooling pads are not exact"):
        pool_first(conv(), pool(pads=(0, 0, 0, 1)))
    box, rest = pool_first(conv((1, 1), strides=(2, 1)), pool())
    assert (box.strides, rest.strides) == ((4, 2), (1, 1))
    assert fused_spec(conv(strides=(2, 1)), pool()).kernel_shape == (5, 4)
    assert nominal_size(conv(), pool()) == (32, 32) and nominal_size(conv((3, 40)), pool()) == (32, 41)


@pytest.mark.parametrize(
    ("window", "spec", "exists"),
    [
        (pool(), conv(), True),
        (pool((3, 3), (2, 2)), conv(pads=(1, 0, 0, 0)), False),
        (pool((2, 2), (2, 2)), conv(pads=(1, 0, 0, 0)), True),
        (pool((3, 3), (2, 2), (1, 0, 0, 0)), conv(pads=(1, 0, 0, 0)), True),
        (pool((2, 2), (2, 2)), conv(pads=(0, 0, 1, 0)), False),
        (pool((2, 2), (2, 2), (0, 0, 1, 0)), conv(pads=(0, 0, 1, 0)), True),
    ],
)
def test_a_pooling_that_may_stand_last(window, spec, exists):
    found = pool_last(window, spec)
    assert (found is not None) == exists
    if found is not None:
        first, last = found
        assert first.pads == tuple(p + c * 2 for p, c in zip(window.pads, spec.pads, strict=True)) and last.strides == (2, 2)


def test_fused_weights_and_sums_may_grow_sixteenfold_and_any_up_to_a_limit(monkeypatch):
    conv, pool = ConvSpec((1, 1), (1, 1), (0,) * 4, (1, 1), 1), PoolSpec((4, 4), (4, 4), (0,) * 4, (1, 1))
    layer = Layer(conv, (8, 8, 1, 1), (16, 16), True)
    monkeypatch.setattr(lowerings, "MAX_FUSED_ELEMENTS", 100)
    assert lowerings._fused(layer, pool).name == "fused"
    wider = PoolSpec((5, 4), (5, 4), (0,) * 4, (1, 1))
    refused = lowerings._fused(layer, wider)
    assert isinstance(refused, Refusal)
    assert "got 1,280, expected at most 1,024" in f"got {refused.got}, expected {refused.expected}"
    monkeypatch.setattr(lowerings, "MAX_FUSED_ELEMENTS", 1280)
    assert lowerings._fused(layer, wider).name == "fused"
    monkeypatch.setattr(lowerings, "MAX_FUSED_PRODUCTS", 159)
    assert lowerings._fused(layer, wider).got == "160"
    monkeypatch.setattr(lowerings, "MAX_FUSED_PRODUCTS", 1)
    assert lowerings._fused(layer, pool).name == "fused"

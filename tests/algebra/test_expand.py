# SPDX-License-Identifier: Apache-2.0
"""Every form of a convolution behind a nearest upsampling equals it, to the bit on integers in float64."""

from itertools import product

import numpy as np
import pytest

from convpool.algebra import expand, reference
from convpool.algebra.expand import UpsampleSpec
from convpool.algebra.geometry import ConvSpec


def forms(x: np.ndarray, w: np.ndarray, conv: ConvSpec, up: UpsampleSpec) -> dict[str, np.ndarray]:
    """The result of each form that the convolution has."""
    found = {
        "fused": reference.conv_transpose(x, expand.fuse_kernel(w, conv, up), None, expand.fused_spec(conv, up)),
        "direct": direct(x, w, conv, up),
    }
    if expand.is_conv_first(conv, up):
        spec, crop = expand.conv_first(conv, up)
        found["conv_first"] = reference.crop(reference.upsample(reference.conv(x, w, None, spec), up), crop)
    if conv.group == 1:
        spec, crop = expand.subpixel(conv, up)
        mixed = reference.conv(x, expand.subpixel_kernel(w, conv, up), None, spec)
        found["subpixel"] = reference.crop(reference.depth_to_space(mixed, up), crop)
        if (specs := expand.phase_specs(conv, up)) is not None:
            kernels = expand.phase_kernels(w, conv, up, specs)
            parts = [reference.conv(x, kernel, None, spec) for kernel, spec in zip(kernels, specs, strict=True)]
            found["phases"] = reference.depth_to_space(np.concatenate(parts, axis=1), up)
    return found


def direct(x: np.ndarray, w: np.ndarray, conv: ConvSpec, up: UpsampleSpec) -> np.ndarray:
    """The ConvTranspose, and the sums over boxes behind it."""
    transpose, box = expand.direct_specs(conv, up)
    spread = reference.conv_transpose(x, expand.transpose_kernel(w, conv), None, transpose)
    return np.round(reference.average_pool(spread, box) * box.taps)


def check(conv: ConvSpec, up: UpsampleSpec, size: tuple[int, ...], seed: int) -> set[str]:
    """Compare all forms with the original; the names of those that there are."""
    rng = np.random.default_rng(seed)
    x = rng.integers(-8, 9, (2, 2 * conv.group, *size)).astype(np.float64)
    w = rng.integers(-8, 9, (3 * conv.group, 2, *conv.kernel_shape)).astype(np.float64)
    wanted = reference.conv(reference.upsample(x, up), w, None, conv)
    found = forms(x, w, conv, up)
    for name, result in found.items():
        np.testing.assert_array_equal(result, wanted, err_msg=f"{name} {conv} {up}")
    return set(found)


def cases(s: int):
    """Convolutions of one axis whose dilation is 1, a multiple of the factor, or 3, with pads of several kinds."""
    for k, d in product(range(1, 8), (1, 2, 3, 4, 6)):
        reach = d * (k - 1)
        if reach < 20 and (d == 1 or k > 1 and (d % s == 0 or d == 3)):
            for pads in {(0, 0), (reach, reach), (reach // 2, reach - reach // 2), (0, reach), (k // 3, k // 2)}:
                yield ConvSpec((k,), (1,), pads, (d,))


@pytest.mark.parametrize("s", (1, 2, 3, 4, 5))
def test_every_form_on_one_axis(s):
    seen: set[str] = set()
    for number, conv in enumerate(cases(s)):
        for n in (1, 4):
            if conv.output_size((n * s,))[0] > 0:
                seen |= check(conv, UpsampleSpec((s,)), (n,), number)
    assert seen == set(expand.FORMS)


def test_all_pads_of_kernels_up_to_7():
    for s, k in product((2, 3), range(1, 8)):
        for left, right in product(range(k), repeat=2):
            check(ConvSpec((k,), (1,), (left, right), (1,)), UpsampleSpec((s,)), (7,), s)


def test_negative_pads_crop_the_upsampled_map():
    x = np.arange(12.0).reshape(1, 1, 12)
    for s, k, left, right in product((2, 3), (1, 2, 3, 4), (-3, -2, -1, 0, 1), (-2, 0, 1)):
        if max(left, right) >= k:
            continue
        conv, up = ConvSpec((k,), (1,), (left, right), (1,)), UpsampleSpec((s,))
        w = np.arange(1.0, k + 1).reshape(1, 1, k)
        padded = np.pad(reference.upsample(x, up), ((0, 0), (0, 0), (max(left, 0), max(right, 0))))
        cut = padded[..., max(-left, 0) : padded.shape[2] - max(-right, 0)]
        wanted = reference.conv(cut, w, None, ConvSpec((k,), (1,), (0, 0), (1,)))
        for name, result in forms(x, w, conv, up).items():
            np.testing.assert_array_equal(result, wanted, err_msg=f"{name} {conv} {s}")


@pytest.mark.parametrize("group", (1, 2, 3))
@pytest.mark.parametrize("rank", (2, 3))
def test_more_axes_and_groups(rank, group):
    rng = np.random.default_rng(rank + 10 * group)
    for seed in range(25):
        k, s = rng.integers(1, 6 - rank + 1, rank), rng.integers(1, 4, rank)
        d = np.where(rng.random(rank) < 0.3, s, 1)
        reach = d * (k - 1)
        pads = [int(rng.integers(0, r + 1)) for r in (*reach, *reach)]
        conv = ConvSpec(tuple(map(int, k)), (1,) * rank, tuple(pads), tuple(map(int, d)), group)
        size = tuple(int(n) for n in rng.integers(2, 5, rank) + reach)
        check(conv, UpsampleSpec(tuple(map(int, s))), size, seed)

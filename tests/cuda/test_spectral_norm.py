# SPDX-License-Identifier: Apache-2.0
"""convpool_spectral_norm and its adjoint without a GPU: what is refused and why, and what the pretended runtime is to launch."""

import pytest

from convpool.cuda.training import PACK

W, DY, U, V, OUT, KEPT, SUMS = (n << 30 for n in range(1, 8))
LAYER = {"w": W, "dy": DY, "last_u": U, "last_v": V, "out": OUT, "kept": KEPT, "m": 128, "c": 64, "taps": 9, "reserved": 0}
INVALID, MISALIGNED = 1, 4


def called(lib, *weights, count=None, dtype=1, sums=None, u_first=1):
    """Return status, message and the grids of the launches; with sums of the adjoint."""
    before, packed = lib.pretended_launches(), b"".join(PACK(*{**LAYER, **changed}.values()) for changed in weights)
    count = len(weights) if count is None else count
    if sums is None:
        status = lib.convpool_spectral_norm(packed or None, count, dtype, u_first, 1e-12, None)
    else:
        status = lib.convpool_spectral_norm_adjoint(packed, count, dtype, sums, None)
    grids = [lib.pretended_launch(i)[0].grid for i in range(before, lib.pretended_launches())]
    return status, lib.convpool_last_error().decode(), grids


@pytest.mark.parametrize(
    "changed, adjoint, message",
    [
        ({"w": 0}, False, "w: the pointer is null"),
        ({"out": OUT + 8}, False, "out: not aligned to 16 bytes"),
        ({"last_u": 0}, False, "last_u: the pointer is null"),
        ({"last_v": V + 1}, False, "last_v: not aligned to 2 bytes"),
        ({"dy": DY + 2}, True, "dy: not aligned to 16 bytes"),
        ({"kept": KEPT + 2}, True, "kept: not aligned to 4 bytes"),
        ({"m": 0}, False, "m; got 0, expected 1 or more"),
        ({"taps": -1}, True, "taps; got -1, expected 1 or more"),
        ({"reserved": 1}, False, "reserved; got 1, expected 0"),
        ({"m": 5, "c": 3}, False, "elements of a weight; got 135, expected a multiple of 4"),
        (
            {"m": 1 << 30, "c": 1 << 30, "taps": 1 << 30},
            False,
            "elements of a weight; got 1073741824, expected below 2^31 with c and taps",
        ),
    ],
)
def test_what_is_refused(lib, changed, adjoint, message):
    status = MISALIGNED if "aligned" in message else INVALID
    assert called(lib, {}, changed, sums=SUMS if adjoint else None) == (status, message, [])


def test_arguments_beside_the_weights(lib):
    assert called(lib) == (INVALID, "weights: the pointer is null", [])
    assert called(lib, {}, count=0) == (INVALID, "count; got 0, expected 1 or more", [])
    assert called(lib, {}, dtype=3) == (INVALID, "dtype; got 3, expected 0 (F16), 1 (BF16) or 2 (F32)", [])
    assert called(lib, {}, sums=0) == (INVALID, "sums: the pointer is null", [])


def test_weights_share_launches_of_56(lib):
    """A block for 8 rows, for 128 columns, for a weight, and for 8192 elements."""
    small = {"m": 3, "c": 4, "taps": 1}
    assert called(lib, {}, small) == (0, "", [17, 6, 2, 10])
    assert called(lib, {}, small, u_first=0) == (0, "", [6, 17, 2, 10])
    assert called(lib, {}, small, sums=SUMS) == (0, "", [10, 10])
    assert called(lib, *[small] * 57)[2] == [56, 56, 56, 56, 1, 1, 1, 1]
    assert called(lib, *[{}] * 113, sums=SUMS)[2] == [504, 504, 504, 504, 9, 9]

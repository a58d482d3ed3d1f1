# SPDX-License-Identifier: Apache-2.0
"""convpool_box_mean and its adjoint without a GPU: what is refused and why, and what is launched on the pretended runtime."""

import pytest

from convpool.cuda.training import box_problem

X, GATE, OUT = 1 << 30, 2 << 30, 3 << 30
LAYER = dict(dtype="bfloat16", channels_last=True, shape=(4, 64, 16, 16), kernel=(2, 2), strides=(1, 1), pads=(1, 1, 1, 1))
INVALID, MISALIGNED = 1, 4


def problem(**changed) -> bytes:
    return box_problem(**{**LAYER, "dilations": (1, 1), **changed})


def launches(lib, given: bytes, adjoint=False, x=X, out=OUT) -> list[tuple[int, int]]:
    """Grid and threads of the launches of a call that succeeds."""
    before = lib.pretended_launches()
    function = lib.convpool_box_mean_adjoint if adjoint else lib.convpool_box_mean
    assert function(given, x, 0, out, None) == 0, lib.convpool_last_error()
    after = lib.pretended_launches()
    return [(lib.pretended_launch(i)[0].grid, lib.pretended_launch(i)[0].threads) for i in range(before, after)]


def refusal(lib, given: bytes, x=X, gate=0, out=OUT) -> tuple[int, str]:
    return lib.convpool_box_mean(given, x, gate, out, None), lib.convpool_last_error().decode()


@pytest.mark.parametrize(
    "changed, named",
    [
        ({"shape": (0, 64, 16, 16)}, "n; got 0"),
        ({"shape": (4, 2**31, 16, 16)}, "c; got"),
        ({"shape": (4, 64, 0, 16)}, "spatial"),
        ({"shape": (4, 2**14, 2**14, 2**14)}, "elements of a sample"),
        ({"kernel": (2, 0)}, "kernel; got 0"),
        ({"strides": (0, 1)}, "strides; got 0"),
        ({"dilations": (1, -1)}, "dilations; got -1"),
        ({"pads": (1, 1, -1, 1)}, "pads; got -1"),
        ({"kernel": (19, 2)}, "padded size; got 18, expected more than the window's reach, 18"),
        ({"dtype": "int8"}, "dtype; got 3"),
    ],
)
def test_what_is_no_box_mean_is_refused(lib, changed, named):
    status, message = refusal(lib, problem(**changed))
    assert status == INVALID and named in message


@pytest.mark.parametrize("layout", [0, 1])
@pytest.mark.parametrize(
    "bits", [(10, 10, 10, 10), (20, 0, 9, 11), (0, 10, 10, 10), (11, 20, 4, 5), (30, 10, 0, 0), (25, 5, 5, 5)]
)
def test_no_tensor_has_more_than_2_to_the_40_elements(lib, bits, layout):
    """Sizes are powers of two, windows 1x1; the last size is the input's, or the padding's."""
    n, c, h, w = (2**b for b in bits)
    given = {"kernel": (1, 1), "strides": (1, 1), "pads": (0, 0, 0, 0)}
    for least in (w, 1):
        changed = problem(**given | {"shape": (n, c, h, least), "pads": (0, 0, 0, w - least)})
        changed = changed[:12] + layout.to_bytes(4, "little") + changed[16:]
        status, message = refusal(lib, changed)
        if sum(bits) > 40:
            assert status == INVALID and message == f"n; got {n}, expected at most 2^40 elements in all samples"
        else:
            assert status == 0, message


def test_bytes_of_another_structure_are_refused(lib):
    for place, value, named in ((0, 8, "struct_size"), (4, 9, "rank"), (12, 2, "layout"), (116, 2, "sums"), (132, 1, "reserved")):
        given = bytearray(problem())
        given[place] = value
        assert named in refusal(lib, bytes(given))[1]


def test_pointers_are_checked(lib):
    assert refusal(lib, problem(), x=0) == (INVALID, "input: the pointer is null")
    assert refusal(lib, problem(), out=0) == (INVALID, "output: the pointer is null")
    assert refusal(lib, problem(), gate=GATE) == (INVALID, "gate; got a pointer, expected null")
    assert refusal(lib, problem(), x=X + 1)[0] == MISALIGNED


def test_each_call_is_one_launch_that_covers_the_output(lib):
    """An item makes 4 x 1 vectors of 8 channels of 17 x 17 means; or 8 x 1 single elements."""
    vectors = 4 * 5 * 17 * 8
    assert launches(lib, problem()) == [(-(-vectors // 256), 256)]
    single = 4 * 3 * 17 * 64
    assert launches(lib, problem(), x=X + 2) == [(-(-single // 256), 256)]
    assert launches(lib, problem(channels_last=False)) == [(-(-single // 256), 256)]


def test_the_adjoint_covers_the_input(lib):
    assert launches(lib, problem(), adjoint=True) == [(-(-4 * 4 * 16 * 8 // 256), 256)]
    assert launches(lib, problem(strides=(2, 2), pads=(0, 0, 0, 0)), adjoint=True) == [(-(-4 * 8 * 8 * 8 // 256), 256)]
    assert launches(lib, problem(strides=(2, 1), pads=(0, 0, 0, 0)), adjoint=True) == [(-(-4 * 16 * 16 * 8 // 256), 256)]


def test_more_items_than_31_bits_count_are_several_launches(lib):
    found = launches(lib, problem(shape=(3, 2**16, 16384, 1), kernel=(1, 1), pads=(0,) * 4, channels_last=True, dtype="float32"))
    assert len(found) == 1
    assert len(launches(lib, problem(shape=(9, 2**15 + 1, 2**15, 1), kernel=(1, 1), pads=(0,) * 4))) == 9

# SPDX-License-Identifier: Apache-2.0
"""How outputs are judged: what differences are, which one counts, and what is more than a difference allowed."""

import ml_dtypes
import numpy as np
import pytest

from convpool.check.judge import (
    FLOAT32_TOLERANCE,
    TOLERANCES,
    Judge,
    OutputErrors,
    Tolerance,
    Verification,
    _equal,
    _percent,
    array_errors,
    precision_of,
    worst_of,
)

EXACT, TENTH = Tolerance(0.0, 0.0), Tolerance(0.0, 0.1)
NAN, INF = np.nan, np.inf


def arrays(*values):
    return [np.array(each) for each in values]


def test_what_is_allowed():
    assert Tolerance(0.5, 0.1).of(np.array([-2.0, 4.0])).tolist() == pytest.approx([1.4, 2.4])
    assert Tolerance(0.5, 0.1, 3.0).of(np.array([-2.0, 4.0])).tolist() == [4.0, 5.0]
    assert str(Tolerance(0.5, 0.1)) == "0.5 of each value + 0.1 of the largest"
    assert str(Tolerance(0.5, 0.1, 3.0)) == "0.5 of each value + 3"
    assert FLOAT32_TOLERANCE == (1e-3, 1e-4) and sorted(TOLERANCES.values()) == [(2e-2, 1e-2), (1e-1, 5e-2)]


@pytest.mark.parametrize(
    ("reference", "result", "wanted"),
    [
        ([2.0, 4.0], [2.0, 4.0], (0, 0, True, 0, "")),
        ([2.0, -4.0], [2.0, -3.6], (0.4, 0.1, True, 0, "")),
        ([2.0, -4.0], [1.5, -4.0], (0.5, 0.125, False, 0, "")),
        ([0.0, 0.0], [0.0, 0.0], (0, 0, True, 0, "")),
        ([0.0, 0.0], [0.0, 0.25], (0.25, 1, False, 0, "")),
        ([2.0, NAN], [2.0, NAN], (0, 0, True, 0.5, "")),
        ([2.0, INF, NAN, 4.0], [2.0, INF, NAN, 4.2], (0.2, 0.05, True, 0.5, "")),
        ([2.0, INF], [2.0, -INF], (INF, INF, False, 0, "NaN or infinity in other places")),
        ([2.0, 4.0], [2.0, NAN], (INF, INF, False, 0, "NaN or infinity in other places")),
        ([2.0, NAN], [2.0, 4.0], (INF, INF, False, 0, "NaN or infinity in other places")),
        ([NAN, INF], [NAN, INF], (0, 0, True, 1, "")),
        ([], [], (0, 0, True, 0, "")),
        ([2.0], [2.0, 2.0], (INF, INF, False, 0, "shape (2,), expected (1,)")),
    ],
)
def test_differences_of_arrays(reference, result, wanted):
    found = array_errors("y", *arrays(reference, result), TENTH)
    assert (found.max_abs_error, found.max_rel_error) == pytest.approx(wanted[:2])
    assert (found.passed, found.not_finite, found.note) == wanted[2:]


def test_the_worse_of_two_runs_counts():
    good, better = OutputErrors("y", 2, 2, True), OutputErrors("y", 1, 1, True)
    bad, worse = OutputErrors("y", 1, 1, False), OutputErrors("y", 2, 2, False)
    assert worst_of(None, good) is good
    pairs = ((good, better, good), (better, good, good), (good, bad, bad), (bad, good, bad), (worse, bad, worse))
    for first, second, worst in pairs:
        assert worst_of(first, second) is worst


def test_the_precision_of_types():
    given = ([], ["float32", "int64"], ["float16", "float32"])
    assert [precision_of(map(np.dtype, kinds)) for kinds in given] == ["fp32", "fp32", "fp16"]
    assert precision_of([np.dtype("float16"), np.dtype(ml_dtypes.bfloat16)]) == "bf16"


def judged(reference, result, **more):
    """The one output's outcome and the verdict."""
    judge = Judge(["y"], more.pop("tolerance", EXACT), own_error_counts=more.pop("own", False))
    judge.add([reference], [result], **more)
    verdict = judge.verdict("the original", 1, {})
    return verdict.outputs[0], verdict


def test_an_output_that_differs_from_itself_is_random_and_alone_proves_nothing():
    one, other = arrays([1.0], [2.0])
    found, verdict = judged(one, other, again=lambda: [other])
    assert found.passed and found.note == "random: not comparable" and not verdict.passed
    found, verdict = judged(one, other, again=lambda: [one])
    assert not found.passed and not verdict.passed
    judge = Judge(["y", "z"], EXACT)
    judge.add([one, one], [other, one], again=lambda: [other, one])
    assert judge.verdict("", 1, {}).passed
    assert Judge([], EXACT).verdict("", 1, {}).passed


def test_twice_the_original_s_own_error_counts_only_where_that_is_said():
    reference, original, result = arrays([1.0, 2.0], [1.0, 2.5], [1.0, 3.0])
    assert judged(reference, result, original=[original], own=True)[1].passed
    assert not judged(reference, result, original=[original])[1].passed
    assert not judged(reference, result, own=True)[1].passed


@pytest.mark.parametrize(
    ("result", "nudged", "passed"),
    [
        ([0, 0, 0, 1.0], [[0, 0, 0, 0.5]], True),
        ([0, 0, 0, 1.1], [[0, 0, 0, 0.5]], False),
        ([1.0, 1.0, 1.0, 1.0], [[0, 0, 0, 0.5]], True),
        ([1.0, 1.0, 1.0, 1.0], [[0, 0, 0, 0.0]], False),
        ([0, 0, 0, 1.0], [[0, 0, 0, 0.0], [0, 0.5, 0, 0]], True),
        ([0, 0, 0, 1.0], [[0, 0, 0, NAN]], False),
        ([0, 0, 0, 1.0], [[0, 0, 0.5]], False),
    ],
)
def test_an_original_that_jumps_alike(result, nudged, passed):
    found, _ = judged(np.zeros(4), np.array(result), nudge=lambda: [[np.array(each)] for each in nudged])
    assert found.passed == passed
    assert (found.note == "differs only where the original is discontinuous") == passed


def test_at_most_four_times_as_many_elements_jump():
    reference, nudged = np.zeros(8), np.array([1.0] + [0.0] * 7)
    for count in (4, 5):
        result = np.array([1.0] * count + [0.0] * (8 - count))
        assert judged(reference, result, nudge=lambda: [[nudged]])[0].passed == (count == 4)


def test_indices_have_no_distance():
    reference, result, nudged = arrays([1, 1], [1, 900], [1, 2])
    assert judged(reference, result, nudge=lambda: [[nudged]])[0].passed
    floats = [each.astype(float) for each in (reference, result, nudged)]
    assert not judged(*floats[:2], nudge=lambda: [[floats[2]]])[0].passed


def test_slightly_changed_inputs_are_run_once_for_all_outputs():
    runs = []
    judge = Judge(["y", "z"], EXACT)
    zero, one = arrays([0.0], [1.0])
    judge.add([zero, zero], [one, one], nudge=lambda: runs.append(1) or [[one, one]])
    assert judge.verdict("", 1, {}).passed and runs == [1]
    judge.add([zero, zero], [zero, zero], nudge=lambda: runs.append(1))
    assert runs == [1]


def test_how_a_run_was_made_is_told_where_it_differs():
    zero, one = arrays([0.0], [0.123456])
    assert judged(zero, one, how="with that")[0].note == "0.123 absolute with that"
    assert judged(zero, np.zeros(2), how="with that")[0].note == "shape (2,), expected (1,) with that"
    assert judged(zero, zero, how="with that")[0].note == ""


def test_shares_of_nan_are_the_mean_over_the_runs_and_one_run_has_to_have_numbers():
    judge = Judge(["y"], EXACT)
    for values in ([NAN, 1.0], [1.0, 1.0]):
        judge.add(arrays(values), arrays(values))
    verdict = judge.verdict("", 2, {})
    assert verdict.passed and verdict.outputs[0].not_finite == 0.25
    found, verdict = judged(*arrays([NAN], [NAN]))
    assert not verdict.passed and found.note == "every value is NaN or infinite in the original"
    judge.add(arrays([NAN]), arrays([NAN]))
    assert judge.verdict("", 3, {}).passed


@pytest.mark.parametrize(
    ("reference", "result", "passed"),
    [
        (np.array(["a"], object), np.array(["a"], object), True),
        (np.array(["a"], object), np.array(["b"], object), False),
        (np.array([1 + 1j]), np.array([1 + 2j]), False),
        ([np.zeros(1), np.ones(2)], [np.zeros(1), np.ones(2)], True),
        ([np.zeros(1), np.ones(2)], [np.ones(1), np.ones(2)], False),
        ([np.zeros(1)], [np.zeros(1), np.zeros(1)], False),
        ({1: 2.0}, {1: 2.0}, True),
        ({1: 2.0}, {1: 3.0}, False),
        (None, None, True),
        (None, np.zeros(1), False),
    ],
)
def test_other_kinds_of_outputs(reference, result, passed):
    found, verdict = judged(reference, result)
    assert found.passed == passed and verdict.passed == (passed and reference is not None)  # nothing is no evidence
    assert (found.max_abs_error > 0) == (found.max_rel_error > 0) == (not passed)


def test_equal_values():
    assert _equal(*arrays([1.0, NAN], [1.0, NAN])) and not _equal(*arrays([1.0], [2.0]))
    assert _equal([np.zeros(1)], [np.zeros(1)]) and not _equal([np.zeros(1)], []) and not _equal([np.zeros(1)], [np.ones(1)])
    assert _equal({1: 2}, {1: 2}) and not _equal(None, 1)


def test_an_error_twice_the_original_s_own_passes():
    reference, exact = np.zeros(4), Tolerance(0.0, 0.0)
    original = np.array([0.0, 1.0, 0.0, 0.0])
    for error, passed in ((1.9, True), (2.0, True), (2.1, False)):
        assert array_errors("y", reference, np.array([0, 0, 0, error]), exact, original).passed is passed
    assert not array_errors("y", reference, np.array([0, 0, 0, 0.1]), exact).passed


def test_empty_sequences_agree():
    found = Judge.__new__(Judge)._sequence("y", [], [], [])
    assert (found.max_abs_error, found.max_rel_error, found.passed) == (0, 0, True)


def verdict(*outputs: OutputErrors) -> Verification:
    return Verification(False, "the original", 1, {}, list(outputs), "little")


def test_a_verdict_in_words():
    fine = OutputErrors("fine", 9.0, 9.0, True)
    small, large = OutputErrors("small", 2.0, 0.1, False), OutputErrors("large", 1.0, 0.25, False)
    odd = OutputErrors("odd", 0.0, 0.0, False, "every value is NaN")
    assert (
        verdict(fine, small, large).difference
        == "output 'large' differs; got 1 absolute, 0.25 relative error, expected at most little"
    )
    noted = OutputErrors("noted", 1.0, 0.5, False, "another shape")
    assert (
        verdict(small, noted).difference
        == "output 'noted' differs; got another shape, 0.5 relative error, expected at most little"
    )
    assert verdict(fine).difference.startswith("no output can be compared; ")
    assert verdict(fine, odd).difference.startswith("output 'odd' cannot be compared; every value is NaN; ")
    assert [verdict(*outputs).differs for outputs in ((fine,), (odd,), (odd, small))] == [False, False, True]


def test_shares_that_are_not_finite_in_words():
    assert verdict(OutputErrors("a", 0, 0, True)).not_finite == ""
    found = verdict(
        OutputErrors("a", 0, 0, True, "", 0.25), OutputErrors("b", 0, 0, True), OutputErrors("c", 0, 0, True, "", 1.0)
    )
    assert found.not_finite == "25 % of a, 100 % of c is NaN or infinite in both"
    assert [_percent(share) for share in (1e-9, 0.0005, 0.5, 0.99999, 1)] == ["0.1 %", "0.1 %", "50 %", "99.9 %", "100 %"]

"""This project's tactics.  What a tactic makes of the weights is made once, outside the timing, as in inference."""

from __future__ import annotations

from convpool import cuda
from convpool.bench.case import Candidate, Case, Skip

ANY_WORKSPACE_BYTES = 2**40


def usable(case: Case) -> list[cuda.Tactic]:
    """The tactics that run the row on this GPU."""
    problem = cuda.Problem(**case.row.problem(case.precision, case.layout))
    return [tactic for tactic in cuda.tactics() if problem.why_not(tactic) is None]


def choice(case: Case, *, workspace: bool) -> cuda.Tactic:
    """The tactic that the library picks, with all the workspace that it wants or without any."""
    problem = cuda.Problem(**case.row.problem(case.precision, case.layout))
    return problem.default_tactic(max_workspace_bytes=ANY_WORKSPACE_BYTES if workspace else 0)


def candidate(case: Case, tactic: cuda.Tactic) -> Candidate:
    """The tactic on the case's tensors.  The first call after a change of weights prepares them."""
    arguments = case.row.problem(case.precision, case.layout)
    problem = cuda.Problem(**arguments)
    reason = problem.why_not(tactic)
    if reason is not None:
        raise Skip(reason)
    workspace = case.empty(max(64, problem.workspace_bytes(tactic) // 4), dtype=case.device.torch.float32)
    shapes = ("n", "c", "m", "spatial", "kernel_shape", "dtype", "prologue_affine")  # conv_avg_pool has them from its arrays
    options = {key: value for key, value in arguments.items() if key not in shapes}
    prepared = -1

    def call(i: int) -> None:
        nonlocal prepared
        cuda.conv_avg_pool(case.raws[i], case.w, scale=case.scale, shift=case.shift, out=case.out, workspace=workspace,
                           tactic=tactic, stream=case.device.handle, weights_prepared=prepared == case.weights_version,
                           **options)  # fmt: skip
        prepared = case.weights_version

    return Candidate(tactic.name, call, tactic=tactic.id)

"""Who a try is to a run: the table of docs/ownership.md, with the facts as they were measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from airflow_gpu.gang.ownership import CLEARED, Claim, Try, claim
from airflow_gpu.gang.run import Attempt, Cause, Outcome, Owner, Run, Stop, Verdict

RUN_A, RUN_A_CLEARED, RUN_B = "0/2026-01-01T00:00:00", "1/2026-01-02T00:00:00", "0/2026-01-03T00:00:00"

OWNER = Owner(epoch=1, ti_id="A", try_number=1, at=0.0, max_tries=2, dag_run=RUN_A)
SECOND = replace(OWNER, epoch=2, ti_id="B", try_number=2)
LIVE = Attempt(number=1, name="g-1", target="t", at=0.0, epoch=1)
OVER = replace(LIVE, outcome=Outcome(cause=Cause.APPLICATION, at=1.0))
TOLD = replace(LIVE, stop=Stop(CLEARED, at=1.0, epoch=1))


def run(*owners: Owner, attempt: Attempt | None = LIVE, verdict: str = "") -> Run:
    told = Verdict(verdict, Cause.SUCCEEDED, 1.0, owners[-1].epoch) if verdict else None
    return Run(owners=owners, attempts=(attempt,) if attempt else (), verdict=told)


@pytest.mark.parametrize(
    ("before", "me", "expected"),
    [
        # No run yet.
        (None, Try("A", 1, 2, RUN_A), Claim("new", "start")),
        # The same try once more: resumed from a deferral, or a worker that was started twice.
        (run(OWNER), Try("A", 1, 2, RUN_A), Claim("same", "start")),
        # A retry after an error of the user's code: the verdict is there.
        (run(OWNER, attempt=OVER, verdict="failed"), Try("B", 2, 2, RUN_A), Claim("take", "retry")),
        # A worker that crashed, a hand-over: no verdict, what runs goes on.
        (run(OWNER), Try("B", 2, 2, RUN_A), Claim("take", "adopt")),
        # A resume that got lost in the scheduler: the same id with a higher try.
        (run(OWNER, attempt=OVER, verdict="failed"), Try("A", 2, 2, RUN_A), Claim("take", "retry")),
        # A success that Airflow did not hear of.
        (run(OWNER, attempt=OVER, verdict="success"), Try("B", 2, 2, RUN_A), Claim("same", "retry")),
        # Clear of a deferred task, of a failed one, of one that succeeded.
        (run(OWNER), Try("B", 2, 3, RUN_A), Claim("take", "clear", stop=True)),
        (run(OWNER, attempt=OVER, verdict="failed"), Try("B", 2, 3, RUN_A_CLEARED), Claim("take", "clear")),
        (run(OWNER, attempt=OVER, verdict="success"), Try("B", 2, 3, RUN_A_CLEARED), Claim("new", "clear")),
        # Clear of a task in a worker that Airflow does not show in max_tries; its worker has said so. Once.
        (run(OWNER, attempt=TOLD), Try("B", 2, 2, RUN_A_CLEARED), Claim("take", "clear", stop=True)),
        (run(OWNER, SECOND, attempt=TOLD), Try("C", 3, 2, RUN_A_CLEARED), Claim("take", "adopt")),
        # The DAG run was deleted and made again: another run. What still lives there is ended first.
        (run(OWNER), Try("B", 1, 2, RUN_B), Claim("new", "start", stop=True, doubtful=True)),
        (run(OWNER, attempt=OVER, verdict="success"), Try("B", 1, 2, RUN_B), Claim("new", "start", doubtful=True)),
        (run(OWNER), Try("B", 1, 2), Claim("new", "start", stop=True, doubtful=True)),  # an Airflow that does not say
        # A database restored to a backup: the same DAG run, and its tries come a second time.
        (run(OWNER, SECOND), Try("C", 2, 2, RUN_A), Claim("take", "restored", doubtful=True)),
        (run(OWNER, SECOND), Try("A", 1, 2, RUN_A), Claim("take", "restored", doubtful=True)),
        (run(OWNER, replace(SECOND, dag_run=RUN_A_CLEARED)), Try("C", 2, 2, RUN_A), Claim("take", "restored", doubtful=True)),
        (run(OWNER, SECOND, attempt=OVER, verdict="success"), Try("C", 2, 2, RUN_A), Claim("same", "restored")),
    ],
)  # fmt: skip
def test_the_table(before: Run | None, me: Try, expected: Claim) -> None:
    assert claim(before, me, "resume") == expected


def test_a_cleared_task_may_begin_again() -> None:
    assert claim(run(OWNER), Try("B", 2, 3, RUN_A), "fresh") == Claim(
        "take", "clear", resume=False, stop=True
    )

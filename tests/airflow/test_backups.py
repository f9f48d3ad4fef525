"""The metadata database is put back to an older backup: the journal knows more than Airflow does."""

from __future__ import annotations

import pytest

from tests.airflow.conftest import Gangs, eventually
from tests.airflow.scenes import STEP, begin, reasons

pytestmark = [pytest.mark.airflow, pytest.mark.timeout(1200)]

DONE = ("steady", "backup-done")  # has succeeded since
DONE_IN_WORKER = ("steady_in_worker", "backup-done")
RETRIED = ("steady", "backup-retried")  # has failed since, and try 2 runs
CLEARED = ("steady", "backup-cleared")
QUIET = ("steady", "backup-quiet")  # has only gone on


@pytest.fixture(scope="module")
def restored(gangs: Gangs) -> dict[tuple[str, str], int]:
    """A backup of a moment at which all were in their first try; the steps at which they were when it was put back."""
    runs = (DONE, DONE_IN_WORKER, RETRIED, CLEARED, QUIET)
    begin(gangs, *runs)
    backup = gangs.airflow.backup()
    for run in (DONE, DONE_IN_WORKER):
        gangs.succeed(*run)
    gangs.crash(*RETRIED, step=STEP)
    gangs.airflow.clear(*CLEARED, "count")
    for run in (RETRIED, CLEARED):
        gangs.until_step(*run, life=2)
        gangs.airflow.wait_task(*run, "count", "deferred", try_number=2)
    steps = {}
    for run in (RETRIED, CLEARED, QUIET):
        at = gangs.step(*run)
        assert at is not None
        steps[run] = at[2]
    gangs.airflow.restore(backup)
    return steps


@pytest.mark.parametrize("run", [DONE, DONE_IN_WORKER], ids="/".join)
def test_what_has_succeeded_is_not_computed_again(
    gangs: Gangs, restored: dict[tuple[str, str], int], run: tuple[str, str]
) -> None:
    gangs.airflow.wait_task(*run, "count", "success", limit=150)
    told = gangs.settled(*run)
    assert len(told.jobs) == 1
    assert len(told.told("done")) == 1
    assert gangs.airflow.xcom(*run, "count")["result"]["steps"] == told.told("done")[0]["step"]


def test_what_only_went_on_goes_on(gangs: Gangs, restored: dict[tuple[str, str], int]) -> None:
    gangs.until_goes_on(*QUIET)
    assert gangs.succeed(*QUIET).starts == [0]
    assert reasons(gangs, *QUIET) == ["start"]


@pytest.mark.parametrize("run", [RETRIED, CLEARED], ids="/".join)
def test_a_newer_try_is_not_forgotten(
    gangs: Gangs, restored: dict[tuple[str, str], int], run: tuple[str, str]
) -> None:
    """Airflow comes to try 2 for a second time: the gang of the first one is adopted, or goes on from its checkpoint."""
    gangs.airflow.wait_task(*run, "count", "deferred", try_number=2, limit=150)
    gangs.until_goes_on(*run)
    told = gangs.succeed(*run)
    assert len(told.incarnations) == 1, "it is the same DAG run"
    assert all(start > 0 for start in told.starts[1:]), "nothing begins again"
    eventually(lambda: gangs.airflow.run_state(*run) == "success", "end of the run")

"""Components of Airflow that are killed, halted or away, while gangs run."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.airflow.conftest import Gangs, eventually
from tests.airflow.scenes import STEP, again, begin, causes, facts, reasons
from tests.beds.airflow import USUAL

pytestmark = [pytest.mark.airflow, pytest.mark.timeout(1200)]

LEFT = "the task is deferred: the gang goes on, in other hands"
"""What a trigger says that was cancelled, and has left its gang running."""

AWAY = 60
"""Seconds for which the API server is away: longer than any poll, and than the heartbeats of a worker."""


@pytest.fixture(autouse=True)
def whole(gangs: Gangs) -> Iterator[None]:
    """Whatever a test did, the next one finds an Airflow with all its parts."""
    yield
    bed = gangs.airflow
    bed.stop("triggerer-2")
    missing = [name for name in USUAL if name not in bed.processes]
    for name in missing:
        bed.start(name)
    if missing:
        bed.wait_healthy()


def test_triggerer_killed(gangs: Gangs) -> None:
    """Gangs go on without it, also to their end; the next triggerer goes on with what it finds."""
    bed = gangs.airflow
    runs = [("steady", f"triggerer-{what}") for what in ("quiet", "preempted", "ended")]
    quiet, preempted, ended = runs
    begin(gangs, *runs)
    bed.kill("triggerer")
    gangs.preempt(*preempted)
    gangs.total(*ended)
    gangs.settled(*ended)
    assert gangs.airflow.task(*ended, "count")["state"] == "deferred"
    gangs.until_goes_on(*quiet)
    bed.start("triggerer")
    assert again(gangs, *preempted).starts[1] >= STEP
    assert gangs.succeed(*quiet).starts == [0]
    assert gangs.succeed(*ended).starts == [0]
    for run in runs:
        assert reasons(gangs, *run) == ["start"]
        assert facts(gangs, *run) == [(1, 2, 0)]
    assert causes(gangs, *preempted) == ["preempted", "succeeded"]


def test_clear_while_no_triggerer_lives(gangs: Gangs) -> None:
    """The worker of the next try ends the old attempt with a notice, and goes on from what it saved."""
    bed = gangs.airflow
    run = ("steady", "clear-alone")
    begin(gangs, run)
    bed.kill("triggerer")
    bed.clear(*run, "count")
    gangs.until_step(*run, life=2)
    bed.start("triggerer")
    told = again(gangs, *run)
    assert len(told.lives) == 2
    assert told.starts[1] >= STEP
    assert reasons(gangs, *run) == ["start", "clear"]
    assert causes(gangs, *run) == ["stopped", "succeeded"]


def test_mark_failed_while_no_triggerer_lives(gangs: Gangs) -> None:
    """Nothing calls the trigger's on_kill: the sweep does it that begins with the next triggerer."""
    bed = gangs.airflow
    run = ("steady_once", "mark-alone")
    begin(gangs, run)
    bed.kill("triggerer")
    bed.mark(*run, "count", "failed")
    gangs.until_goes_on(*run)
    bed.start("triggerer")
    told = gangs.settled(*run, limit=60)
    assert len(told.lives) == 1
    assert not told.told("done")
    bed.clear(*run, "count")
    assert again(gangs, *run).starts[1] >= STEP, "it was given notice and has saved"


def test_scheduler_killed(gangs: Gangs) -> None:
    """With its workers, as when its machine is lost: what is deferred does not notice, the rest is adopted."""
    bed = gangs.airflow
    deferred, working = ("steady", "scheduler"), ("steady_in_worker", "scheduler")
    begin(gangs, deferred, working)
    bed.kill("scheduler")
    for run in (deferred, working):
        gangs.until_goes_on(*run)
    bed.start("scheduler")
    bed.wait_task(*working, "count", "running", try_number=2, limit=150)
    assert gangs.succeed(*deferred).starts == [0]
    assert reasons(gangs, *deferred) == ["start"]
    assert gangs.succeed(*working).starts == [0]
    assert set(reasons(gangs, *working)[1:]) == {"adopt"}


def test_api_server_away(gangs: Gangs) -> None:
    """For a minute, with a preemption in the middle. A triggerer goes on; a worker is told to go, and its gang stays."""
    bed = gangs.airflow
    patient = "steady_in_worker_patient"
    deferred, working, quiet = ("steady", "api"), (patient, "api"), (patient, "api-quiet")
    begin(gangs, deferred, working, quiet)
    bed.stop("api-server")
    gone = time.monotonic()
    for run in (deferred, working):
        gangs.preempt(*run)
    gangs.until_step(*deferred, life=2)
    time.sleep(max(0.0, gone + AWAY - time.monotonic()))
    bed.start("api-server")
    bed.wait_healthy("metadatabase")
    for run in (deferred, working):
        told = again(gangs, *run)
        assert len(told.jobs) == 2
        assert told.starts[1] >= STEP
    assert reasons(gangs, *deferred) == ["start"]
    assert gangs.succeed(*quiet).starts == [0]
    assert set(reasons(gangs, *quiet)[1:]) == {"adopt"}


def test_forced_hand_over(gangs: Gangs) -> None:
    """A triggerer that misses its heartbeats, but whose triggers go on: two drivers of each run, through a preemption."""
    bed = gangs.airflow
    runs = [("steady", f"hand-over-{what}") for what in ("quiet", "preempted", "killed")]
    quiet, preempted, killed = runs
    begin(gangs, *runs)
    bed.start("triggerer-2")
    eventually(lambda: len(triggerers(gangs)) == 2, "second triggerer")
    before = holders(gangs)
    assert len(before) == 1
    bed.halt("triggerer")
    eventually(lambda: holders(gangs) and not holders(gangs) & before, "hand-over")
    for run in runs:
        gangs.until_goes_on(*run)
    gangs.preempt(*preempted)
    gangs.preempt(*killed, notice=False)
    gangs.until_step(*preempted, life=2)
    gangs.until_step(*killed, life=2)
    bed.resume("triggerer")
    # It finds that its triggers are another's, and cancels them as if a person had: the gangs go on.
    for run in runs:
        eventually(lambda run=run: LEFT in bed.log(*run, "count"), f"word of the old triggerer on {run}", 120)
        gangs.until_goes_on(*run)
        told = gangs.succeed(*run)
        assert len(told.jobs) == (1 if run == quiet else 2)
        assert reasons(gangs, *run) == ["start"]
        assert facts(gangs, *run) == [(1, 2, 0)]


def triggerers(gangs: Gangs) -> set[str]:
    """Triggerers with a fresh heartbeat."""
    rows = gangs.airflow.sql(
        "SELECT id FROM job WHERE job_type = 'TriggererJob' AND end_date IS NULL "
        "AND latest_heartbeat > now() - interval '5 seconds'"
    )
    return {row[0] for row in rows}


def holders(gangs: Gangs) -> set[str]:
    """Triggerers to which triggers are assigned now."""
    return {row[0] for row in gangs.airflow.sql("SELECT DISTINCT triggerer_id FROM trigger")}

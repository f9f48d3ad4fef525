"""Workers that die, wherever they are: the gang goes on, and the next try finds it."""

from __future__ import annotations

import os
import signal

import psutil
import pytest

from tests.airflow.conftest import Gangs
from tests.airflow.scenes import STEP, begin, facts, reasons
from tests.airflow.together import Together

pytestmark = [pytest.mark.airflow, pytest.mark.timeout(1200)]
together = Together()


def worker(gangs: Gangs, run_id: str) -> psutil.Process:
    """The process in which the task runs; its parent watches it and talks to Airflow."""
    return psutil.Process(gangs.airflow.task("steady_in_worker", run_id, "count")["pid"])


def adopted(gangs: Gangs, run_id: str) -> None:
    """The next try has the same life, and its end is the task's."""
    gangs.airflow.wait_task("steady_in_worker", run_id, "count", "running", try_number=2, limit=150)
    gangs.until_goes_on("steady_in_worker", run_id)
    told = gangs.succeed("steady_in_worker", run_id)
    assert told.starts == [0]
    assert reasons(gangs, "steady_in_worker", run_id) == ["start", "adopt"]
    assert facts(gangs, "steady_in_worker", run_id) == [(1, 2, 0), (2, 2, 0)]


@together
def test_killed(gangs: Gangs) -> None:
    """kill -9 of the task's process."""
    begin(gangs, ("steady_in_worker", "killed"))
    worker(gangs, "killed").kill()
    adopted(gangs, "killed")


@together
def test_killed_with_its_supervisor(gangs: Gangs) -> None:
    """kill -9 of both, as when a machine is lost: Airflow waits for heartbeats, the gang does not."""
    begin(gangs, ("steady_in_worker", "machine"))
    process = worker(gangs, "machine")
    for each in (process.parent(), process):
        assert each is not None
        each.kill()
    adopted(gangs, "machine")


@together
def test_sigterm_to_the_task(gangs: Gangs) -> None:
    """A drained worker is no user's kill: for Airflow the task is still running."""
    begin(gangs, ("steady_in_worker", "sigterm"))
    worker(gangs, "sigterm").terminate()
    adopted(gangs, "sigterm")


@together
def test_sigterm_to_the_supervisor(gangs: Gangs) -> None:
    """It hands the signal on."""
    begin(gangs, ("steady_in_worker", "sigterm-2"))
    parent = worker(gangs, "sigterm-2").parent()
    assert parent is not None
    os.kill(parent.pid, signal.SIGTERM)
    adopted(gangs, "sigterm-2")


def dies(gangs: Gangs, dag_id: str, point: str) -> None:
    task = (dag_id, point)
    gangs.die(*task, point=point)
    gangs.airflow.trigger(dag_id, run_id=point)
    gangs.until_step(*task, step=STEP)
    told = gangs.succeed(*task)
    assert told.starts == [0]
    assert len(told.jobs) == 1, "submitted once"
    assert reasons(gangs, *task) == ["start", "adopt"]
    assert len(gangs.run(*task).attempts) == 1
    assert gangs.airflow.task(*task, "count")["try_number"] == 2


@together
def test_killed_between_journal_and_submit(gangs: Gangs) -> None:
    """The next try submits the attempt that was journalled."""
    dies(gangs, "steady_dying", "before_submit")


@together
def test_killed_between_journal_and_submit_in_worker(gangs: Gangs) -> None:
    dies(gangs, "steady_dying_in_worker", "before_submit")


@together
def test_killed_between_submit_and_journal(gangs: Gangs) -> None:
    """The submit got there, and nobody wrote it down: it is found by its name."""
    dies(gangs, "steady_dying", "after_submit")


@together
def test_killed_between_submit_and_defer(gangs: Gangs) -> None:
    dies(gangs, "steady_dying", "before_defer")


@together
def test_state_store_and_xcoms_wiped(gangs: Gangs) -> None:
    """Airflow's stores are caches: nothing that decides is in them."""
    runs = [("steady", "wiped"), ("steady_in_worker", "wiped")]
    begin(gangs, *runs)
    for table in ("task_state_store", "xcom"):
        gangs.airflow.sql(f"DELETE FROM {table} WHERE run_id = 'wiped'")
    gangs.crash(*runs[0], step=STEP + 30)
    for run in runs:
        gangs.until_goes_on(*run)
    gangs.until_step(*runs[0], life=2)
    told = [gangs.succeed(*run) for run in runs]
    assert told[0].starts[1] > 0
    assert told[1].starts == [0]

"""Retry, Clear, mark, delete and time-outs, on a real scheduler: who may adopt, who may end (``docs/ownership.md``).

What ran is asserted from the target's journal and the ranks' ledger
(:mod:`tests.airflow.evidence`), what Airflow showed each try from the owners in
the run's journal.
"""

from __future__ import annotations

import pytest

from tests.airflow.conftest import Gangs, eventually
from tests.airflow.scenes import STEP, again, begin, causes, facts, reasons, run_starts
from tests.airflow.together import Together

pytestmark = [pytest.mark.airflow, pytest.mark.timeout(1200)]
together = Together()

# -- retry ---------------------------------------------------------------------------------------


def retry(gangs: Gangs, dag_id: str) -> None:
    begin(gangs, (dag_id, "retry"))
    gangs.crash(dag_id, "retry", step=STEP + 10)
    told = again(gangs, dag_id, "retry")
    [crash] = told.told("crash", rank=1)
    assert told.starts[0] == 0 < told.starts[1] <= crash["step"]
    assert reasons(gangs, dag_id, "retry") == ["start", "retry"]
    assert causes(gangs, dag_id, "retry") == ["application", "succeeded"]
    assert facts(gangs, dag_id, "retry") == [(1, 2, 0), (2, 2, 0)]


@together
def test_retry(gangs: Gangs) -> None:
    """After an error of the program: a new attempt from the newest checkpoint."""
    retry(gangs, "steady")


@together
def test_retry_in_worker(gangs: Gangs) -> None:
    retry(gangs, "steady_in_worker")


# -- Clear ---------------------------------------------------------------------------------------


def clear_live(gangs: Gangs, dag_id: str, fresh: bool) -> None:
    begin(gangs, (dag_id, "clear"))
    gangs.airflow.clear(dag_id, "clear", "count")
    told = again(gangs, dag_id, "clear")
    assert len(told.lives) == 2
    assert told.starts[0] == 0
    if fresh:
        assert told.starts[1] == 0
    else:
        assert told.starts[1] >= STEP, "it was given notice and has saved"
    assert reasons(gangs, dag_id, "clear") == ["start", "clear"]
    if "in_worker" not in dag_id:  # there Airflow changes max_tries when it has seen the worker end, mostly
        assert facts(gangs, dag_id, "clear") == [(1, 2, 0), (2, 3, 1)]
    assert len(set(run_starts(gangs, dag_id, "clear"))) == 1
    assert causes(gangs, dag_id, "clear") == ["stopped", "succeeded"]


@together
def test_clear_deferred(gangs: Gangs) -> None:
    """The old attempt is ended with a notice; the new one goes on from what it saved."""
    clear_live(gangs, "steady", fresh=False)


@together
def test_clear_deferred_fresh(gangs: Gangs) -> None:
    clear_live(gangs, "steady_fresh", fresh=True)


@together
def test_clear_running(gangs: Gangs) -> None:
    clear_live(gangs, "steady_in_worker", fresh=False)


@together
def test_clear_running_fresh(gangs: Gangs) -> None:
    clear_live(gangs, "steady_in_worker_fresh", fresh=True)


@together
def test_clear_without_a_new_start_of_the_run(gangs: Gangs) -> None:
    """``reset_dag_runs=false``: the run's clear_number stays, and it is a Clear all the same."""
    begin(gangs, ("steady_fresh", "no-reset"))
    gangs.airflow.clear("steady_fresh", "no-reset", "count", reset_dag_runs=False)
    told = again(gangs, "steady_fresh", "no-reset")
    assert told.starts == [0, 0]
    assert reasons(gangs, "steady_fresh", "no-reset") == ["start", "clear"]
    assert facts(gangs, "steady_fresh", "no-reset") == [(1, 2, 0), (2, 3, 0)]


def clear_failed(gangs: Gangs, dag_id: str, fresh: bool) -> None:
    begin(gangs, (dag_id, "clear-failed"))
    gangs.crash(dag_id, "clear-failed", step=STEP + 5)
    assert gangs.airflow.wait(dag_id, "clear-failed") == "failed"
    gangs.settled(dag_id, "clear-failed")
    gangs.airflow.clear(dag_id, "clear-failed", "count")
    told = again(gangs, dag_id, "clear-failed")
    assert (told.starts[1] == 0) is fresh
    assert len(told.lives) == 2
    assert reasons(gangs, dag_id, "clear-failed") == ["start", "clear"]
    assert facts(gangs, dag_id, "clear-failed") == [(1, 0, 0), (2, 1, 1)]
    before, after = run_starts(gangs, dag_id, "clear-failed")
    assert before < after, "Clear of a run that has ended starts it anew"


@together
def test_clear_failed(gangs: Gangs) -> None:
    clear_failed(gangs, "steady_once", fresh=False)


@together
def test_clear_failed_fresh(gangs: Gangs) -> None:
    clear_failed(gangs, "steady_once_fresh", fresh=True)


@together
def test_clear_succeeded(gangs: Gangs) -> None:
    """It runs again from the beginning: a resume would end at once with the old result."""
    begin(gangs, ("steady", "clear-success"))
    first = gangs.succeed("steady", "clear-success")
    # A scheduler that is just marking the run successful would overwrite what a Clear makes of it.
    assert gangs.airflow.wait("steady", "clear-success") == "success"
    gangs.untell("total", "steady", "clear-success")
    gangs.airflow.clear("steady", "clear-success", "count")
    eventually(lambda: len(gangs.history("steady", "clear-success").incarnations) == 2, "second run")
    told = again(gangs, "steady", "clear-success", life=1)
    assert told.starts == [*first.starts, 0]
    assert len(told.incarnations) == 2
    assert len(told.told("done")) == 2
    assert facts(gangs, "steady", "clear-success") == [(2, 3, 1)]


@together
def test_clear_of_one_mapped_index(gangs: Gangs) -> None:
    """The siblings go on undisturbed, and a later retry of one of them is no Clear, though the run's clear_number rose."""
    dag_id, run_id = "steady_mapped", "mapped"
    gangs.airflow.trigger(dag_id, run_id=run_id)
    for index in range(3):
        gangs.until_step(dag_id, run_id, step=STEP, map_index=index)
        gangs.airflow.wait_task(dag_id, run_id, "count", "deferred", map_index=index)
    gangs.airflow.clear(dag_id, run_id, ("count", 1))
    gangs.until_step(dag_id, run_id, life=2, map_index=1)
    gangs.crash(dag_id, run_id, "count", 2, step=STEP + 10)
    gangs.until_step(dag_id, run_id, life=2, map_index=2)
    told = [gangs.succeed(dag_id, run_id, map_index=index) for index in range(3)]
    assert told[0].starts == [0]
    assert told[1].starts == [0, 0], "on_clear is fresh"
    assert told[2].starts[1] > 0, "a retry resumes, whatever on_clear says"
    assert reasons(gangs, dag_id, run_id, 0) == ["start"]
    assert reasons(gangs, dag_id, run_id, 1) == ["start", "clear"]
    assert reasons(gangs, dag_id, run_id, 2) == ["start", "retry"]
    assert facts(gangs, dag_id, run_id, 1) == [(1, 2, 0), (2, 3, 1)]
    assert facts(gangs, dag_id, run_id, 2) == [(1, 2, 0), (2, 2, 1)]


# -- mark failed, mark success, run set to failed ------------------------------------------------


def mark(gangs: Gangs, dag_id: str, state: str) -> None:
    run_id = f"mark-{state}"
    begin(gangs, (dag_id, run_id))
    gangs.airflow.mark(dag_id, run_id, "count", state)
    told = gangs.settled(dag_id, run_id)
    assert len(told.lives) == 1
    assert not told.told("done")
    assert gangs.airflow.task(dag_id, run_id, "count")["state"] == state
    gangs.airflow.clear(dag_id, run_id, "count")
    told = again(gangs, dag_id, run_id)
    assert told.starts[1] >= STEP, "it was given notice and has saved"


@together
def test_mark_failed_deferred(gangs: Gangs) -> None:
    """The gang is ended with a notice, so a later Clear goes on from what it saved."""
    mark(gangs, "steady", "failed")


@together
def test_mark_success_deferred(gangs: Gangs) -> None:
    mark(gangs, "steady", "success")


@together
def test_mark_failed_in_worker(gangs: Gangs) -> None:
    mark(gangs, "steady_in_worker", "failed")


@together
def test_mark_success_in_worker(gangs: Gangs) -> None:
    mark(gangs, "steady_in_worker", "success")


def run_failed(gangs: Gangs, dag_id: str) -> None:
    begin(gangs, (dag_id, "run-failed"))
    gangs.airflow.mark_run(dag_id, "run-failed", "failed")
    told = gangs.settled(dag_id, "run-failed")
    assert len(told.lives) == 1
    assert not told.told("done")


@together
def test_run_set_to_failed_with_many_deferred(gangs: Gangs) -> None:
    """All its gangs are ended, though all triggers are cancelled in one moment."""
    gangs.airflow.trigger("steady_mapped", run_id="run-failed")
    for index in range(3):
        gangs.until_step("steady_mapped", "run-failed", step=STEP, map_index=index)
        gangs.airflow.wait_task("steady_mapped", "run-failed", "count", "deferred", map_index=index)
    gangs.airflow.mark_run("steady_mapped", "run-failed", "failed")
    for index in range(3):
        told = gangs.settled("steady_mapped", "run-failed", "count", index)
        assert len(told.lives) == 1
        assert not told.told("done")


@together
def test_run_set_to_failed_deferred(gangs: Gangs) -> None:
    run_failed(gangs, "steady")


@together
def test_run_set_to_failed_in_worker(gangs: Gangs) -> None:
    run_failed(gangs, "steady_in_worker")


# -- deleted and made again ----------------------------------------------------------------------


def made_again(gangs: Gangs, dag_id: str, run_id: str) -> None:
    eventually(lambda: len(gangs.history(dag_id, run_id).incarnations) == 2, "second run", 120)
    told = again(gangs, dag_id, run_id, life=1)
    assert told.starts[:2] == [0, 0], "a new DAG run inherits nothing"
    assert len(told.incarnations) == 2
    # Airflow may take the end of the old try 1 for the end of the new try 1, and try again.
    assert facts(gangs, dag_id, run_id)[0] in [(1, 2, 0), (2, 2, 0)]


def delete_run(gangs: Gangs, dag_id: str) -> None:
    begin(gangs, (dag_id, "deleted"))
    gangs.airflow.delete_run(dag_id, "deleted")
    gangs.airflow.trigger(dag_id, run_id="deleted")
    made_again(gangs, dag_id, "deleted")


@together
def test_dag_run_deleted_and_made_again(gangs: Gangs) -> None:
    """Under the same id: the old gang is ended first, the new one begins from the beginning."""
    delete_run(gangs, "steady")


@together
def test_dag_run_deleted_and_made_again_in_worker(gangs: Gangs) -> None:
    delete_run(gangs, "steady_in_worker")


@together
def test_dag_run_deleted(gangs: Gangs) -> None:
    """And not made again: the gang ends."""
    begin(gangs, ("steady", "deleted-only"))
    gangs.airflow.delete_run("steady", "deleted-only")
    told = gangs.settled("steady", "deleted-only")
    assert not told.told("done")


@together
def test_dag_deleted_and_parsed_again(gangs: Gangs) -> None:
    dag_id = "steady_deleted"
    begin(gangs, (dag_id, "run"))
    gangs.airflow.mark_run(dag_id, "run", "failed")
    gangs.airflow.delete_dag(dag_id)
    assert not gangs.airflow.has_dag(dag_id)
    gangs.airflow.trigger(dag_id, run_id="run")
    made_again(gangs, dag_id, "run")


# -- time-outs -----------------------------------------------------------------------------------


def time_out(gangs: Gangs, dag_id: str, run_id: str) -> None:
    """What Airflow does when a deferral has a time-out and it passes: it does not ask the trigger."""
    begin(gangs, (dag_id, run_id))
    # A scheduler that has not heard of the deferral yet takes the resume for a failure, and tries again.
    gangs.until_goes_on(dag_id, run_id, steps=80)
    gangs.airflow.sql(
        "UPDATE task_instance SET trigger_timeout = now() - interval '1 second' "
        f"WHERE dag_id = '{dag_id}' AND run_id = '{run_id}' AND task_id = 'count'"
    )


@together
def test_trigger_time_out(gangs: Gangs) -> None:
    """The gang is ended with a notice, the try fails, and the retry goes on from what was saved."""
    time_out(gangs, "steady", "time-out")
    told = again(gangs, "steady", "time-out")
    assert len(told.lives) == 2
    assert told.starts[1] >= STEP
    assert facts(gangs, "steady", "time-out") == [(1, 2, 0), (2, 2, 0)]


@together
def test_trigger_time_out_of_the_last_try(gangs: Gangs) -> None:
    time_out(gangs, "steady_once", "time-out")
    assert gangs.airflow.wait("steady_once", "time-out") == "failed"
    told = gangs.settled("steady_once", "time-out")
    assert len(told.lives) == 1
    assert not told.told("done")


def execution_timeout(gangs: Gangs, dag_id: str) -> None:
    begin(gangs, (dag_id, "run"))
    assert gangs.airflow.wait(dag_id, "run") == "failed"
    told = gangs.settled(dag_id, "run")
    assert len(told.lives) == 2, "two tries, each with its own limit"
    assert told.starts[1] >= STEP
    assert not told.told("done")
    assert gangs.airflow.task(dag_id, "run", "count")["try_number"] == 2


@together
def test_execution_timeout_deferred(gangs: Gangs) -> None:
    """Airflow does not enforce it while a task is deferred; the gang does."""
    execution_timeout(gangs, "steady_limited")


@together
def test_execution_timeout_in_worker(gangs: Gangs) -> None:
    execution_timeout(gangs, "steady_in_worker_limited")


@together
def test_execution_timeout_is_first_airflows(gangs: Gangs) -> None:
    """Whose alarm interrupts the operator wherever it is."""
    execution_timeout(gangs, "steady_in_worker_alarmed")

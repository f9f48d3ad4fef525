"""Gangs in a real Airflow: scheduler, API server, dag processor and triggerer are processes of their own."""

from __future__ import annotations

import time

import psutil
import pytest

from tests.airflow.conftest import Gangs

pytestmark = pytest.mark.airflow


@pytest.mark.parametrize("dag_id", ["count_deferred", "count_in_worker"])
def test_success(gangs: Gangs, dag_id: str) -> None:
    """The record is the XCom; rank 0's output is in the task's log; no retry is spent."""
    bed = gangs.airflow
    run = bed.trigger(dag_id)
    assert bed.wait(dag_id, run) == "success"
    record = bed.xcom(dag_id, run, "count")
    assert record["result"] == {"start": 0, "total": 8}
    assert [item["cause"] for item in record["attempts"]] == ["succeeded"]
    assert record["placement"]["chosen"]["target"] == "gpu_default"
    assert bed.task(dag_id, run, "count")["try_number"] == 1
    assert "[rank 0] rank 0 starts at 0" in bed.log(dag_id, run, "count")


@pytest.mark.parametrize("dag_id", ["count_deferred", "count_in_worker"])
def test_two_preemptions_spend_no_retry(gangs: Gangs, dag_id: str) -> None:
    """Once with notice, once without; each time it goes on from its checkpoint."""
    bed = gangs.airflow
    run = bed.trigger(dag_id, {"total": 150})
    gangs.admin.preempt(gangs.until_step(dag_id, run, "count", 15))
    gangs.admin.preempt(gangs.until_step(dag_id, run, "count", 60, life=2), False)
    assert bed.wait(dag_id, run) == "success"
    record = bed.xcom(dag_id, run, "count")
    assert [item["cause"] for item in record["attempts"]] == ["preempted", "preempted", "succeeded"]
    starts = [life.start.step if life.start else 0 for life in gangs.lives(dag_id, run, "count")]
    assert 0 == starts[0] < starts[1] < starts[2]
    assert record["result"]["start"] == starts[2]
    ti = bed.task(dag_id, run, "count")
    assert ti["try_number"] == 1


@pytest.mark.parametrize("dag_id", ["rank_fails", "rank_fails_in_worker"])
def test_application_error(gangs: Gangs, dag_id: str) -> None:
    """Airflow's retries apply, and the log ends with the first failing rank and its last words."""
    bed = gangs.airflow
    run = bed.trigger(dag_id)
    assert bed.wait(dag_id, run) == "failed"
    tries = bed.task(dag_id, run, "doomed")["try_number"]
    assert tries == (2 if dag_id == "rank_fails" else 1)
    found = gangs.look(dag_id, run, "doomed")
    assert found is not None
    assert [owner.reason for owner in found[0].run.owners] == ["start", "retry"][:tries]
    for number in range(1, tries + 1):
        log = bed.log(dag_id, run, "doomed", number)
        assert "rank 3 failed first: exit code 3" in log
        assert "the loss is not a number" in log
    assert gangs.alive() == []


def test_rank_killed(gangs: Gangs) -> None:
    bed = gangs.airflow
    run = bed.trigger("rank_killed")
    assert bed.wait("rank_killed", run) == "failed"
    assert "rank 3 failed first: signal SIGKILL" in bed.log("rank_killed", run, "doomed")


def test_time_outs(gangs: Gangs) -> None:
    """The gang's own limit, and execution_timeout, which Airflow itself does not enforce while deferred."""
    bed = gangs.airflow
    run = bed.trigger("too_slow")
    assert bed.wait("too_slow", run) == "failed"
    assert "timed_out" in bed.log("too_slow", run, "time_limit")
    assert "the deadline passed" in bed.log("too_slow", run, "execution_timeout")
    assert gangs.alive() == []


def test_bad_requests_are_import_errors(gangs: Gangs) -> None:
    """Said when the DAG is parsed, naming the argument and what would be right."""
    bed = gangs.airflow
    bed.wait_dag("count_deferred")
    end = time.monotonic() + 60
    while len(errors := bed.import_errors()) < 3 and time.monotonic() < end:
        time.sleep(0.5)
    text = "\n".join(errors.values())
    assert "nodes must be at least 1, got 0" in text
    assert "did you mean 'gpus_per_node'" in text
    assert "command belong to the gang: GangOperator(task_id=..., gang=Gang(nodes=..., command=...))" in text
    assert "RATE" in text


def test_functions(gangs: Gangs) -> None:
    """@task.gang: arguments from upstream and templates, results downstream, mapped tasks."""
    bed = gangs.airflow
    run = bed.trigger("functions")
    assert bed.wait("functions", run) == "success"
    assert bed.xcom("functions", run, "add") == {"sum": 16, "label": "functions", "ranks": 2, "run_id": run}
    assert bed.xcom("functions", run, "add", "gang")["attempts"][0]["cause"] == "succeeded"
    assert [bed.xcom("functions", run, "square", map_index=i) for i in range(3)] == [1, 4, 9]
    assert bed.xcom("functions", run, "total") == 16 + 14
    assert "[rank 0] 0.2" in bed.log("functions", run, "mapped", map_index=1)


def test_what_is_known_late_is_said_before_a_submit(gangs: Gangs) -> None:
    bed = gangs.airflow
    run = bed.trigger("late_errors")
    assert bed.wait("late_errors", run) == "failed"
    assert "datetime" in bed.log("late_errors", run, "takes").lower()
    assert "nodes must be at least 1" in bed.log("late_errors", run, "rendered")
    assert "there is no connection 'gpu_nowhere'" in bed.log("late_errors", run, "no_connection")
    assert "there is no Variable 'nobody_made_it'" in bed.log("late_errors", run, "no_variable")
    for task_id in ("too_large", "no_connection", "no_variable"):
        ti = bed.task("late_errors", run, task_id)
        assert ti["try_number"] == 1, "a retry cannot help what was rejected"
    for task_id in ("takes", "rendered"):
        assert gangs.look("late_errors", run, task_id) is None


@pytest.mark.parametrize(
    ("dag_id", "state"), [("count_deferred", "deferred"), ("count_in_worker", "running")]
)
def test_mark_failed_ends_the_gang(gangs: Gangs, dag_id: str, state: str) -> None:
    """Deferred or in a worker: with a notice, so that it saves; nothing is left running."""
    bed = gangs.airflow
    run = bed.trigger(dag_id, {"total": 5000})
    gangs.until_step(dag_id, run, "count", 5)
    bed.wait_task(dag_id, run, "count", state)
    bed.mark(dag_id, run, "count", "failed")
    end = time.monotonic() + 60
    while gangs.alive() and time.monotonic() < end:
        time.sleep(0.3)
    assert gangs.alive() == []


def test_clear_of_a_deferred_task_resumes(gangs: Gangs) -> None:
    """The old attempt is ended with a notice; the new one goes on from what it saved."""
    bed = gangs.airflow
    run = bed.trigger("count_deferred", {"total": 200})
    gangs.until_step("count_deferred", run, "count", 10)
    bed.wait_task("count_deferred", run, "count", "deferred")
    bed.clear("count_deferred", run, "count")
    assert bed.wait("count_deferred", run) == "success"
    lives = gangs.lives("count_deferred", run, "count")
    assert len(lives) == 2
    assert lives[1].start is not None
    assert lives[1].start.step >= 10
    assert gangs.alive() == []


def test_a_worker_that_dies_loses_nothing(gangs: Gangs) -> None:
    """kill -9 of the task's process: the gang goes on, and the next try adopts the same life."""
    bed = gangs.airflow
    run = bed.trigger("count_in_worker", {"total": 150})
    gangs.until_step("count_in_worker", run, "count", 10)
    ti = bed.task("count_in_worker", run, "count")
    worker = psutil.Process(ti["pid"])
    worker.kill()
    assert bed.wait("count_in_worker", run) == "success"
    assert len(gangs.lives("count_in_worker", run, "count")) == 1
    found = gangs.look("count_in_worker", run, "count")
    assert found is not None
    assert [owner.reason for owner in found[0].run.owners] == ["start", "adopt"]


def test_what_the_ui_shows_of_the_package(gangs: Gangs) -> None:
    """The provider, its connection type with its form, the plugin, the extra links."""
    bed = gangs.airflow
    assert "airflow-gpu" in {p["package_name"] for p in bed.get("/providers", limit=100)["providers"]}
    forms = bed.client.get("/ui/connections/hook_meta").json()
    form = next(item for item in forms if item["connection_type"] == "gpu_local")
    assert form["hook_name"] == "GPU gangs: this machine"
    assert {"path", "nodes", "gpus_per_node", "requeue"} <= set(form["extra_fields"])
    assert "airflow_gpu" in {p["name"] for p in bed.get("/plugins", limit=100)["plugins"]}
    run = bed.trigger("count_deferred")
    assert bed.wait("count_deferred", run) == "success"
    links = bed.get(f"/dags/count_deferred/dagRuns/{run}/taskInstances/count/links")["extra_links"]
    assert set(links) == {"Rank logs", "Gang", "Checkpoints"}
    page = bed.client.get(links["Gang"].split("#")[0])
    assert page.status_code == 200
    assert "succeeded" in page.text

"""The DAGs of the tests on a real Airflow."""

from __future__ import annotations

from datetime import UTC, timedelta

from airflow.sdk import dag, task

from airflow_gpu import Gang, GangOperator

SHAPE = {"nodes": 2, "gpus_per_node": 2, "time_limit": "10m", "stop_grace": 10, "recovery": {"backoff": 0.2}}


def counting(name: str, **operator):
    """A gang that counts to a number from the DAG run's conf."""

    @dag(dag_id=name, schedule=None, params={"total": 8, "pause": 0.05})
    def build():
        source = "from airflow_gpu.runtime import gang\n"
        source += "total, pause = int({{ params.total }}), float({{ params.pause }})\n"
        source += PROGRAM
        GangOperator(
            task_id="count",
            gang=Gang(command=["python3", "-c", source], checkpointing={"interval": 0.5}, **SHAPE),
            **operator,
        )

    build()


PROGRAM = """
import json, time
with gang() as g:
    def load(directory):
        global done
        done = json.loads((directory / f"rank-{g.rank}.json").read_text())
    start = g.checkpoint.restore(load)
    print("rank", g.rank, "starts at", start, flush=True)
    for step in range(start, total):
        time.sleep(pause)
        g.progress(step + 1, total)
        if g.checkpoint.due(step + 1):
            with g.checkpoint.save(step + 1) as directory:
                (directory / f"rank-{g.rank}.json").write_text(json.dumps(step + 1))
    g.result({"start": start, "total": total})
"""

counting("count_deferred", retries=2, retry_delay=timedelta(seconds=1))
counting("count_in_worker", deferrable=False, retries=2, retry_delay=timedelta(seconds=1))


def failing(name: str, code: int, **operator):
    """Rank 3 ends badly."""

    @dag(dag_id=name, schedule=None)
    def build():
        @task.gang(**SHAPE, **operator)
        def doomed(code, gang=None):
            import os
            import sys
            import time

            if gang.rank == 3:
                time.sleep(0.3)
                print("the loss is not a number", file=sys.stderr, flush=True)
                if code < 0:
                    os.kill(os.getpid(), -code)
                raise SystemExit(code)
            time.sleep(600)

        doomed(code)

    build()


failing("rank_fails", 3, retries=1, retry_delay=timedelta(seconds=1))
failing("rank_killed", -9)
failing("rank_fails_in_worker", 3, deferrable=False)


@dag(schedule=None)
def too_slow():
    """Two limits: the gang's own, and Airflow's while the task is deferred."""
    sleep = Gang(command=["sleep", "600"], **{**SHAPE, "gpus_per_node": 1, "stop_grace": 1})
    GangOperator(task_id="time_limit", gang={**sleep.fields(), "time_limit": 3})
    GangOperator(task_id="execution_timeout", gang=sleep, execution_timeout=timedelta(seconds=6))


@dag(schedule=None, default_args={"retries": 2, "retry_delay": timedelta(seconds=1)})
def functions():
    """Arguments in, results out, mapped and not."""

    @task
    def numbers() -> list[int]:
        return [1, 2, 3]

    @task.gang(nodes=1, gpus_per_node=2, time_limit="5m")
    def add(values: list, offset: int = 0, *, label: str, run_id=None, gang=None) -> dict:
        """The sum, from every rank's point of view."""
        return {"sum": sum(values) + offset, "label": label, "ranks": gang.world_size, "run_id": run_id}

    @task.gang(nodes=1, gpus_per_node=1, time_limit="5m")
    def square(x):
        return x * x

    @task
    def total(added: dict, squares: list) -> int:
        return added["sum"] + sum(squares)

    given = numbers()
    added = add(given, offset=10, label="{{ dag.dag_id }}")
    squares = square.expand(x=given)
    total(added, squares)
    GangOperator.partial(
        task_id="mapped",
        gang=Gang(command="python3 -c 'import os; print(os.environ[\"LR\"])'", gpus_per_node=1),
    ).expand(overrides=[{"env": {"LR": "0.1"}}, {"env": {"LR": "0.2"}}])


@dag(schedule=None)
def late_errors():
    """What can only be known when the task runs is said before anything is submitted."""

    @task
    def when():
        from datetime import datetime

        return {"at": datetime(2026, 1, 1, tzinfo=UTC)}

    @task.gang(gpus_per_node=1)
    def takes(value):
        return value

    takes(when())
    GangOperator(task_id="rendered", gang=Gang(nodes="{{ 1 - 1 }}", command="true"))
    GangOperator(task_id="no_connection", gang=Gang(command="true", targets="gpu_nowhere"), retries=3)
    GangOperator(
        task_id="no_variable", gang=Gang(command="true", secrets={"TOKEN": "var:nobody_made_it"}), retries=3
    )
    GangOperator(task_id="too_large", gang=Gang(nodes=64, gpus_per_node=8, command="true"), retries=3)


too_slow()
functions()
late_errors()

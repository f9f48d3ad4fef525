"""What many scenarios have in common: a gang that has come to a checkpoint, and one that goes on to its end."""

from __future__ import annotations

from tests.airflow.conftest import Gangs
from tests.airflow.evidence import History

STEP = 12
"""A step at which there is a checkpoint, and after which something happens."""


def begin(gangs: Gangs, *runs: tuple[str, str]) -> None:
    """DAG runs whose gangs have come to STEP, with their tasks settled in the triggerer or in a worker."""
    for dag_id, run_id in runs:
        gangs.airflow.trigger(dag_id, run_id=run_id)
    for dag_id, run_id in runs:
        gangs.until_step(dag_id, run_id, step=STEP)
        gangs.airflow.wait_task(dag_id, run_id, "count", "running" if "in_worker" in dag_id else "deferred")


def again(gangs: Gangs, dag_id: str, run_id: str, life: int = 2) -> History:
    """The next life begins, and it goes to the right result."""
    gangs.until_step(dag_id, run_id, life=life)
    return gangs.succeed(dag_id, run_id)


def reasons(gangs: Gangs, dag_id: str, run_id: str, map_index: int = -1) -> list[str]:
    """Why each owner took the run over."""
    return [owner.reason for owner in gangs.run(dag_id, run_id, map_index=map_index).owners]


def facts(gangs: Gangs, dag_id: str, run_id: str, map_index: int = -1) -> list[tuple[int, int, int]]:
    """What Airflow showed each owner: try_number, max_tries, clear_number. No two have the same task instance id."""
    owners = gangs.run(dag_id, run_id, map_index=map_index).owners
    assert len({owner.ti_id for owner in owners}) == len(owners)
    clears = [int(owner.dag_run.partition("/")[0]) for owner in owners]
    return [(owner.try_number, owner.max_tries, clear) for owner, clear in zip(owners, clears)]


def run_starts(gangs: Gangs, dag_id: str, run_id: str) -> list[str]:
    """The start_date of the DAG run that Airflow showed each owner."""
    return [owner.dag_run.partition("/")[2] for owner in gangs.run(dag_id, run_id).owners]


def causes(gangs: Gangs, dag_id: str, run_id: str) -> list[str]:
    """How each attempt of the newest run ended."""
    return [attempt.outcome.cause for attempt in gangs.run(dag_id, run_id).attempts if attempt.outcome]

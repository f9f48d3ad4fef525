"""A backfill of five dates beside a scheduled run: six runs, each with its own lives and checkpoints."""

from __future__ import annotations

import pytest

from tests.airflow.conftest import Gangs, eventually
from tests.airflow.scenes import STEP

pytestmark = [pytest.mark.airflow, pytest.mark.timeout(1200)]
DAG = "steady_daily"


def test_backfill_beside_a_scheduled_run(gangs: Gangs) -> None:
    bed = gangs.airflow
    bed.wait_dag(DAG)
    eventually(lambda: bed.runs(DAG), "scheduled run")
    bed.backfill(DAG, "2026-02-01T00:00:00Z", "2026-02-05T00:00:00Z", max_active_runs=5)
    runs = {run["dag_run_id"]: run["run_type"] for run in eventually(lambda: six(gangs), "six runs")}
    assert sorted(runs.values()) == ["backfill"] * 5 + ["scheduled"]
    for run_id in runs:
        gangs.until_step(DAG, run_id, step=STEP)
    # All are interrupted at once, so that each has to find its own checkpoint again.
    for run_id in runs:
        gangs.preempt(DAG, run_id)
    for run_id in runs:
        gangs.until_step(DAG, run_id, life=2)
    seen = set()
    for run_id in runs:
        told = gangs.succeed(DAG, run_id)
        assert len(told.lives) == 2
        assert told.starts[1] >= STEP
        assert bed.task(DAG, run_id, "count")["try_number"] == 1
        seen.update(job.name for job in told.jobs)
    assert len(seen) == 12


def six(gangs: Gangs) -> list[dict[str, str]]:
    runs = gangs.airflow.runs(DAG)
    return runs if len(runs) == 6 else []

"""What one date has from another: nothing, or what the author asks for. And where backfills stand."""

from __future__ import annotations

import json

import pytest

from tests.airflow.conftest import Gangs

pytestmark = [pytest.mark.airflow, pytest.mark.timeout(400)]


def test_a_backfill_that_goes_on_from_day_to_day(gangs: Gangs) -> None:
    """Each day begins from the checkpoint of the day before, in order, and asks behind scheduled runs."""
    bed = gangs.airflow
    bed.wait_dag("daily")
    bed.backfill(
        "daily",
        "2026-03-01T00:00:00Z",
        "2026-03-03T00:00:00Z",
        max_active_runs=3,
        reprocess_behavior="failed",
    )

    def three() -> list[str]:
        runs = [run for run in bed.runs("daily") if run["run_type"] == "backfill"]
        return sorted(run["dag_run_id"] for run in runs) if len(runs) == 3 else []

    runs = bed.until(three, "three days")
    days = ["2026-03-01", "2026-03-02", "2026-03-03"]
    for i, run in enumerate(runs):
        assert bed.wait("daily", run, limit=240) == "success", bed.log("daily", run, "fit")
        assert bed.xcom("daily", run, "fit") == {"before": 10 * i, "days": days[: i + 1]}
        told = gangs.settled("daily", run, "fit")
        [job] = told.jobs
        spec = json.loads((gangs.cluster / "jobs" / job.name / "job.json").read_text())
        assert spec["priority"] == -1000
        note = gangs.run("daily", run, "fit").owners[0].note
        assert note == (
            "There is no DAG run before this one to continue from: it begins from nothing."
            if i == 0
            else f"It continues from step {10 * i} of daily/{runs[i - 1]}/fit."
        )
        assert note in bed.log("daily", run, "fit")

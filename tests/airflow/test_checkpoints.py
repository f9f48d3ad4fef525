"""What waits for a gang's checkpoints in a real Airflow: sensors in both modes, and DAGs scheduled on them."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from tests.airflow.conftest import Gangs

pytestmark = [pytest.mark.airflow, pytest.mark.timeout(500)]


def told_of(gangs: Gangs, run: str) -> list[dict[str, Any]]:
    """What the DAG that is scheduled on the watched asset has heard of a run."""
    bed, heard = gangs.airflow, []
    for one in bed.runs("on_saved"):
        if one["state"] == "success":
            for extra in bed.xcom("on_saved", one["dag_run_id"], "tell"):
                payload = extra.get("payload", extra)
                heard += [payload] if payload["run_id"] == run else []
    return heard


def test_sensors_and_assets(gangs: Gangs) -> None:
    bed = gangs.airflow
    for name in ("saving", "enough", "on_done", "on_saved"):
        bed.wait_dag(name)
    date = datetime(2026, 4, 1, tzinfo=UTC).isoformat()
    waits = bed.trigger("enough", logical_date=date)
    bed.wait_task("enough", waits, "deferred", "deferred")
    assert "saving has no count for logical date" in bed.log("enough", waits, "deferred")
    run = bed.trigger("saving", logical_date=date)
    for name in ("deferred", "in_worker"):
        bed.wait_task("enough", waits, name, "success", limit=180)
        found = bed.xcom("enough", waits, name)
        assert found["step"] >= 20
        assert found["run"] == f"saving/{run}/count"
    # They had it while the gang ran; or the machine was slow, and then the order of the ends tells.
    begun = bed.task("enough", waits, "deferred")["end_date"]
    assert bed.wait("saving", run, limit=240) == "success", bed.log("saving", run, "count")
    assert begun < bed.task("saving", run, "count")["end_date"]

    failed = bed.wait_task("enough", waits, "too_far", "failed", limit=120)
    assert failed["try_number"] == 1  # no retry could help
    assert "step 1000000 is out of reach" in bed.log("enough", waits, "too_far")

    def event() -> list[Any]:
        done = [one for one in bed.runs("on_done") if one["state"] == "success"]
        return bed.xcom("on_done", done[0]["dag_run_id"], "tell") if done else []

    [extra] = bed.until(event, "the event of the gang's end", 120)
    assert (extra["step"], extra["run_id"], extra["map_index"]) == (150, run, -1)
    folder = Path(unquote(extra["uri"].removeprefix("file://")))
    assert sorted(path.name for path in folder.iterdir()) == [
        "manifest.json", "rank-0", "rank-1", "rank-2", "rank-3",
    ]  # fmt: skip

    bed.until(lambda: any(one["step"] == 150 for one in told_of(gangs, run)), "news of the last step", 120)
    steps = [one["step"] for one in sorted(told_of(gangs, run), key=lambda one: one["step"])]
    assert len(steps) > 1  # also before the end
    assert all(
        later - earlier >= 20 for earlier, later in zip(steps, steps[1:-1])
    )  # the last one is told whatever it is

"""A model that is trained a little further every day, on whichever of two targets is free.

Each day begins from the checkpoint of the day before, so days run in order
(``depends_on_past``) and one at a time. A backfill asks with a lower priority
by itself; how many of its days run at once is capped here with Airflow's own
means (see docs/backfill.md). It needs two connections, ``gpu_default`` and
``gpu_other``.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from airflow.sdk import dag, task


@dag(
    schedule="@daily",
    start_date=datetime(2026, 1, 1, tzinfo=UTC),
    catchup=False,
    max_active_runs=4,
    default_args={"retries": 1, "retry_delay": timedelta(minutes=1)},
    tags=["gangs"],
)
def gang_daily():
    """One gang a day."""

    @task.gang(
        nodes=2,
        gpus_per_node=2,
        targets=["gpu_default", "gpu_other"],
        placement={"move_after": "5m", "deadline": "12h"},
        checkpointing={"interval": 5, "continue_previous": True},
        time_limit="2h",
        depends_on_past=True,
        max_active_tis_per_dag=1,
    )
    def fit(day: str, gang=None):
        """Counts days and steps: what a program of yours would keep in its own checkpoint."""
        import json
        import time

        state = {"steps": 0, "days": []}

        def load(directory):
            state.update(json.loads((directory / f"rank-{gang.rank}.json").read_text()))

        before = gang.checkpoint.restore(load)
        until = (before // 20 + 1) * 20  # twenty steps a day
        if day not in state["days"]:
            state["days"].append(day)
        for step in range(before, until):
            time.sleep(0.05)
            state["steps"] = step + 1
            gang.progress(step + 1, until)
            if gang.checkpoint.due(step + 1) or step + 1 == until:
                with gang.checkpoint.save(step + 1) as directory:
                    (directory / f"rank-{gang.rank}.json").write_text(json.dumps(state))
        return state

    fit("{{ ds }}")


gang_daily()

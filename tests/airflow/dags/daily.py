"""Days that go on from one another."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from airflow.sdk import dag, task


@dag(schedule="@daily", start_date=datetime(2026, 3, 1, tzinfo=UTC), catchup=False, max_active_runs=8)
def daily():
    @task.gang(
        nodes=1,
        gpus_per_node=2,
        time_limit="10m",
        checkpointing={"continue_previous": True},
        depends_on_past=True,
        retries=2,  # a scheduler under load gives tries up by mistake
        retry_delay=timedelta(seconds=1),
    )
    def fit(day: str, gang=None):
        import json

        state = {"days": []}

        def load(directory):
            state.update(json.loads((directory / f"rank-{gang.rank}.json").read_text()))

        before = gang.checkpoint.restore(load)
        state["days"].append(day)
        gang.checkpoint.due(before + 10)
        with gang.checkpoint.save(before + 10) as directory:
            (directory / f"rank-{gang.rank}.json").write_text(json.dumps(state))
        return {"before": before, **state}

    fit("{{ ds }}")


daily()

"""A nightly training on a Slurm cluster: 2 nodes of 2 GPUs, preempted as often as the cluster likes.

Needs a connection ``slurm_h100`` of type ``slurm`` (see docs/slurm.md). Every date of a backfill has checkpoints of its
own, and asks with a lower priority (``--nice``).
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
    params={"steps": 200},
    tags=["gangs"],
)
def gang_slurm():
    """One gang a day."""

    @task.gang(
        nodes=2,
        gpus_per_node=2,
        accelerator="H100",
        targets="slurm_h100",
        time_limit="4h",
        stop_grace=60,
        checkpointing={"interval": "10m", "keep": 2},
    )
    def train(day: str, steps: str, gang=None):
        """Counts; a program of yours would train, and keep its model where this keeps a number."""
        import json
        import time

        state = {"day": day, "steps": 0}

        def load(directory):
            state.update(json.loads((directory / f"rank-{gang.rank}.json").read_text()))

        for step in range(gang.checkpoint.restore(load), int(steps)):
            time.sleep(0.1)
            state["steps"] = step + 1
            gang.progress(step + 1, int(steps))
            if gang.checkpoint.due(step + 1):  # every ten minutes, or when Slurm is about to take the nodes
                with gang.checkpoint.save(step + 1) as directory:
                    (directory / f"rank-{gang.rank}.json").write_text(json.dumps(state))
        print(f"rank {gang.rank} of {gang.world_size}: {state}", flush=True)
        return state

    train("{{ ds }}", "{{ params.steps }}")


gang_slurm()

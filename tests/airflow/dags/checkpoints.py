"""A gang that saves, and what waits for it: sensors, and DAGs that are scheduled on its checkpoints."""

from __future__ import annotations

from airflow.sdk import Asset, AssetWatcher, dag, task

from airflow_gpu import Gang, GangOperator
from airflow_gpu.sensors.checkpoint import GangCheckpointSensor
from airflow_gpu.triggers.checkpoint import GangCheckpointsTrigger

DONE = Asset("counted")
SAVED = Asset(
    "count_saved",
    watchers=[
        AssetWatcher(name="saved", trigger=GangCheckpointsTrigger("saving", "count", every=20, interval=1))
    ],
)

PROGRAM = """
from airflow_gpu.runtime import gang
import time
with gang() as g:
    start = g.checkpoint.restore(lambda directory: None)
    for step in range(start + 1, {{ params.total }} + 1):
        time.sleep({{ params.pause }})
        if step % 10 == 0:
            with g.checkpoint.save(step) as directory:
                (directory / f"rank-{g.rank}").write_text(str(step))
"""


@dag(schedule=None, params={"total": 150, "pause": 0.2})
def saving():
    GangOperator(
        task_id="count",
        gang=Gang(
            command=["python3", "-c", PROGRAM],
            nodes=2,
            gpus_per_node=2,
            time_limit="10m",
            recovery={"backoff": 0.2},
        ),
        checkpoint_asset=DONE,
    )


@dag(schedule=None)
def enough():
    of = {"external_dag_id": "saving", "external_task_id": "count", "poke_interval": 1, "timeout": 300}
    GangCheckpointSensor(task_id="deferred", step=20, **of)
    GangCheckpointSensor(task_id="in_worker", step="{{ 4 * 5 }}", deferrable=False, **of)
    GangCheckpointSensor(task_id="too_far", step=10**6, fail_on_end=True, retries=2, **of)


@dag(schedule=[DONE])
def on_done():
    @task
    def tell(triggering_asset_events=None):
        return [event.extra for event in triggering_asset_events[DONE]]

    tell()


@dag(schedule=[SAVED])
def on_saved():
    @task
    def tell(triggering_asset_events=None):
        return [event.extra for event in triggering_asset_events[SAVED]]

    tell()


saving()
enough()
on_done()
on_saved()

"""What another DAG does with a gang's checkpoints: wait for a step, evaluate each milestone, publish the last one.

``train`` keeps every 100th step. ``evaluate`` waits for step 200 of the run with
the same logical date while the gang goes on. ``evaluate_each`` is started by
the watcher of an asset for milestones, ``publish`` by the asset of the gang's
success. Switch all of them on: watchers of a paused DAG do not run.
"""

from __future__ import annotations

from airflow.sdk import DAG, Asset, AssetWatcher, task

from airflow_gpu.sensors.checkpoint import GangCheckpointSensor
from airflow_gpu.triggers.checkpoint import GangCheckpointsTrigger

trained = Asset("gang_on_checkpoint_trained")
saved = Asset(
    "gang_on_checkpoint_saved",
    watchers=[
        AssetWatcher(
            name="saved",
            trigger=GangCheckpointsTrigger("gang_on_checkpoint", "train", every=100, interval=10),
        )
    ],
)

with DAG("gang_on_checkpoint", schedule=None, doc_md=__doc__, tags=["gangs"]):

    @task.gang(
        gpus_per_node=1,
        time_limit="1h",
        checkpointing={"keep": 2, "every": 100},
        checkpoint_asset=trained,
    )
    def train(steps: int, gang=None):
        import time

        for step in range(gang.checkpoint.restore(lambda directory: None), steps):
            time.sleep(0.1)
            gang.progress(step + 1, steps)
            if (step + 1) % 100 == 0:
                with gang.checkpoint.save(step + 1) as directory:
                    (directory / f"rank-{gang.rank}").write_text(str(step + 1))

    train(500)

with DAG("gang_on_checkpoint_evaluate", schedule=None, tags=["gangs"]):
    enough = GangCheckpointSensor(
        task_id="enough",
        external_dag_id="gang_on_checkpoint",
        external_task_id="train",
        step=200,
        fail_on_end=True,
        poke_interval=10,
        timeout=3600,
    )

    @task
    def evaluate(checkpoint):
        print(checkpoint["step"], checkpoint["uri"])

    evaluate(enough.output)

with DAG("gang_on_checkpoint_each", schedule=[saved], tags=["gangs"]):

    @task
    def evaluate_each(triggering_asset_events=None):
        for event in triggering_asset_events[saved]:
            print(event.extra["payload"]["step"], event.extra["payload"]["uri"])

    evaluate_each()

with DAG("gang_on_checkpoint_publish", schedule=[trained], tags=["gangs"]):

    @task
    def publish(triggering_asset_events=None):
        for event in triggering_asset_events[trained]:
            print(event.extra["step"], event.extra["uri"])

    publish()

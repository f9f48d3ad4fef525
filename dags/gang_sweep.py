"""Ends gangs that were left behind: every hour, and when a triggerer has found one.

A person's Clear or "mark as failed" reaches a gang through the triggerer. The
asset's watcher runs in the triggerer: it sweeps at once when a triggerer
starts, and every ten minutes after, and makes an event when it ended something
or a person has to look. This DAG shows it, and sweeps itself as well. It needs
no parameters; targets that no run directory names yet are listed in
``[gpu] targets``. Switch it on: watchers of a paused DAG do not run.
"""

from __future__ import annotations

from airflow.sdk import DAG, Asset, AssetOrTimeSchedule, AssetWatcher, CronTriggerTimetable

from airflow_gpu.operators.sweep import GangSweepOperator
from airflow_gpu.triggers.sweep import GangSweepTrigger

left_behind = Asset(
    "gangs_left_behind",
    watchers=[AssetWatcher(name="gang_sweep", trigger=GangSweepTrigger(minutes=10))],
)

with DAG(
    "gang_sweep",
    schedule=AssetOrTimeSchedule(
        timetable=CronTriggerTimetable("0 * * * *", timezone="UTC"), assets=left_behind
    ),
    catchup=False,
    max_active_runs=1,
    doc_md=__doc__,
    tags=["gangs"],
):
    GangSweepOperator(task_id="sweep")

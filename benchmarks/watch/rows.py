"""Deferred task instances and their triggers, put into Airflow's database with Airflow's own models.

Run in a process of its own with the environment of that Airflow:

    python -m benchmarks.watch.rows case.json

The case says which trigger each task instance waits for. What an earlier case
left is removed first.
"""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from typing import Any

RUN_ID = "bench"


def trigger_of(case: dict[str, Any], gang: dict[str, Any]) -> Any:
    from airflow_gpu.triggers.gang import GangTrigger
    from benchmarks.watch.probe import PollingTrigger

    if case["kind"] == "polling":
        return PollingTrigger(gang["conn_id"], gang["job"], case["poll"])
    return GangTrigger(case["state_uri"], gang["path"], gang["epoch"], gang["digest"])


def put(case: dict[str, Any]) -> None:
    from airflow.models.dag_version import DagVersion
    from airflow.models.dagrun import DagRun
    from airflow.models.serialized_dag import SerializedDagModel
    from airflow.models.taskinstance import TaskInstance
    from airflow.models.trigger import Trigger
    from airflow.utils.session import create_session
    from airflow.utils.state import DagRunState, TaskInstanceState
    from airflow.utils.types import DagRunTriggeredByType, DagRunType
    from sqlalchemy import delete

    from benchmarks.watch.gangs import DAG_ID
    from benchmarks.watch.probe import ProbeTrigger

    now = datetime.now(UTC)
    with create_session() as session:
        for rows in (TaskInstance, Trigger, DagRun):
            session.execute(delete(rows))
        version = DagVersion.get_latest_version(DAG_ID, session=session)
        serialized = SerializedDagModel.get(DAG_ID, session=session)
        assert version is not None, "the DAG was not serialized"
        assert serialized is not None, "the DAG was not serialized"
        dag = serialized.dag
        dag.create_dagrun(
            run_id=RUN_ID,
            logical_date=now,
            data_interval=(now, now),
            run_after=now,
            run_type=DagRunType.MANUAL,
            triggered_by=DagRunTriggeredByType.TEST,
            state=DagRunState.RUNNING,
            session=session,
        )
        session.flush()
        session.execute(delete(TaskInstance))

        def defer(task_id: str, map_index: int, trigger: Any) -> None:
            row = Trigger.from_object(trigger)
            session.add(row)
            session.flush()
            instance = TaskInstance(
                dag.get_task(task_id),
                dag_version_id=version.id,
                run_id=RUN_ID,
                state=TaskInstanceState.DEFERRED,
                map_index=map_index,
            )
            instance.try_number = 1
            instance.start_date = now
            instance.trigger_id = row.id
            instance.next_method = "execute_complete"
            session.add(instance)

        defer("probe", -1, ProbeTrigger(case["report"]))
        for gang in case["gangs"]:
            defer("train", gang["map_index"], trigger_of(case, gang))


if __name__ == "__main__":
    with open(sys.argv[1]) as file:
        put(json.load(file))

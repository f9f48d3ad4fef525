"""Everything that differs between Airflow versions, in one place.

Limits: Airflow 3.3 and later. Names are imported inside functions where
importing them costs time in every DAG file that only names a gang.
"""

from __future__ import annotations

from typing import Any

from airflow.sdk import BaseHook, BaseOperator, BaseOperatorLink, BaseSensorOperator
from airflow.sdk.exceptions import AirflowException, AirflowFailException, AirflowTaskTimeout

__all__ = [
    "NEXT_TRY",
    "AirflowException",
    "AirflowFailException",
    "AirflowTaskTimeout",
    "BaseHook",
    "BaseOperator",
    "BaseOperatorLink",
    "BaseSensorOperator",
    "conf_get",
    "default_deferrable",
    "task_state",
    "task_states",
]


NEXT_TRY = frozenset(
    {"scheduled", "queued", "running", "restarting", "deferred", "up_for_retry", "up_for_reschedule"}
)
"""States in which a try has the task, or is on its way: it is the one to tell a Clear from a crash.

Whoever is told to go in such a state leaves the gang alone. Seen on Airflow
3.3: a worker got SIGTERM because the scheduler had given its try up by mistake.
"""


def conf_get(key: str, fallback: str | None = None) -> str | None:
    """An option of the ``[gpu]`` section; empty counts as not set."""
    from airflow.sdk.configuration import conf

    value: str | None = conf.get("gpu", key, fallback=None)
    return value or fallback


def default_deferrable() -> bool:
    """Airflow's ``[operators] default_deferrable`` where somebody set it, else True."""
    from airflow.sdk.configuration import conf

    # Airflow's own default is False, for operators that were synchronous first. A gang waits for hours.
    if conf.has_option("operators", "default_deferrable") and _is_set():
        return bool(conf.getboolean("operators", "default_deferrable"))
    return True


def _is_set() -> bool:
    import os

    from airflow.sdk.configuration import conf

    if "AIRFLOW__OPERATORS__DEFAULT_DEFERRABLE" in os.environ:
        return True
    # An entry in airflow.cfg that differs from the shipped default is somebody's wish.
    return str(conf.get("operators", "default_deferrable")).lower() not in ("false", "0", "f", "")


def task_state(dag_id: str, run_id: str, task_id: str, map_index: int) -> str | None:
    """The state of a task instance now, asked through the supervisor; call it in a thread.

    Synchronous calls of the SDK fail in child tasks of a trigger and in
    ``on_kill`` on Python 3.11, so callers in an event loop use ``to_thread``.
    """
    from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance

    states: dict[str, Any] = RuntimeTaskInstance.get_task_states(
        dag_id=dag_id, task_ids=[task_id], run_ids=[run_id], map_index=map_index
    )
    found = states.get(run_id) or {}
    for name in (task_id, f"{task_id}_{map_index}"):
        if name in found:
            return str(found[name]) if found[name] is not None else None
    return None


def task_states(
    dag_id: str, task_id: str, map_index: int, *, run_id: str = "", logical_date: str = ""
) -> dict[str, str | None]:
    """By run id, the states of a task's instances in one run, or in the runs of a logical date (ISO 8601).

    A run that is not there, or does not have the task yet, is left out. Call it in a thread, as :func:`task_state`.
    """
    from datetime import datetime

    from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance

    found: dict[str, Any] = RuntimeTaskInstance.get_task_states(
        dag_id=dag_id,
        task_ids=[task_id],
        map_index=map_index,
        run_ids=[run_id] if run_id else None,
        logical_dates=None if run_id else [datetime.fromisoformat(logical_date)],
    )
    states: dict[str, str | None] = {}
    for run, tasks in found.items():
        for name in (task_id, f"{task_id}_{map_index}"):
            if name in tasks:
                states[run] = None if tasks[name] is None else str(tasks[name])
    return states

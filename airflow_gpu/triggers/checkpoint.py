"""Triggers that wait for checkpoints: for one of one gang, and for news of all gangs of a task.

Purpose: :class:`GangCheckpointTrigger` is what
:class:`~airflow_gpu.sensors.checkpoint.GangCheckpointSensor` defers to;
:class:`GangCheckpointsTrigger` is for an ``AssetWatcher``, so that a DAG can be
scheduled on a gang that still runs.

What it does not do: hold anything, or end by trouble: a store or an Airflow
that does not answer is asked again.

Known limits: nothing is remembered over a restart of the triggerer. Then
``GangCheckpointsTrigger`` tells of the newest checkpoint of each gang that is
not over once more; consumers compare ``run`` and ``step``. Of checkpoints
between two looks only the newest is told.

Example::

    model = Asset(
        "model",
        watchers=[AssetWatcher(name="saved", trigger=GangCheckpointsTrigger("train_model", "fit", every=1000))],
    )
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from airflow.triggers.base import BaseEventTrigger, BaseTrigger, TriggerEvent

SHORTEST = 1.0
"""Seconds between two looks at least."""


class GangCheckpointTrigger(BaseTrigger):
    """Waits for a complete checkpoint of at least ``step``; yields one event, as the sensor takes it.

    :param state_uri: root of the journals; ``state_conn_id``: connection with its credentials.
    :param wanted: fields of :class:`airflow_gpu.hooks.checkpoint.Wanted`.
    :param interval: seconds between two looks.
    :param fail_on_end: also end when the task has ended without it.
    """

    def __init__(
        self,
        state_uri: str = "",
        wanted: dict[str, Any] | None = None,
        interval: float = 60.0,
        fail_on_end: bool = False,
        state_conn_id: str | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        # Stored as they come: an exception here would stop the whole triggerer.
        self.state_uri = state_uri
        self.wanted = wanted
        self.interval = interval
        self.fail_on_end = fail_on_end
        self.state_conn_id = state_conn_id

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Class path and arguments."""
        return "airflow_gpu.triggers.checkpoint.GangCheckpointTrigger", {
            "state_uri": self.state_uri,
            "wanted": self.wanted,
            "interval": self.interval,
            "fail_on_end": self.fail_on_end,
            "state_conn_id": self.state_conn_id,
        }

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Yield ``{"reached", "newest", "words"}``."""
        from airflow_gpu.hooks.checkpoint import Wanted, look
        from airflow_gpu.settings import settings
        from airflow_gpu.triggers.gang import SETTLE

        wanted = Wanted(**(self.wanted or {}))
        await asyncio.sleep(SETTLE)  # an end that is told at once is taken for a failure, see there
        said = ""
        while True:
            try:
                given = replace(settings(), state_uri=self.state_uri, state_conn_id=self.state_conn_id)
                seen = await look(given, wanted)
            except Exception as error:
                self.log.warning("could not look, trying again: %r", error)
            else:
                if seen.words != said:
                    said = seen.words
                    self.log.info("%s", said)
                if seen.reached or (self.fail_on_end and seen.over):
                    newest = None if seen.newest is None else dict(seen.newest)
                    yield TriggerEvent({"reached": seen.reached, "newest": newest, "words": seen.words})
                    return
            await asyncio.sleep(max(SHORTEST, float(self.interval)))


class GangCheckpointsTrigger(BaseEventTrigger):
    """Yields an event for each new checkpoint of a task's gangs, whatever their DAG runs and mapped indexes.

    :param external_dag_id: of the gangs; ``external_task_id``: their task, with its groups.
    :param every: so many steps at least between two events of one run.
    :param interval: seconds between two looks.

    The event, and so the ``extra`` of the asset's event under ``payload``, is what
    :mod:`airflow_gpu.hooks.checkpoint` tells.
    """

    def __init__(
        self,
        external_dag_id: str,
        external_task_id: str,
        every: int = 1,
        interval: float = 60.0,
    ) -> None:
        super().__init__()
        if not external_dag_id or not external_task_id:
            raise ValueError("GangCheckpointsTrigger needs external_dag_id and external_task_id")
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(f"every must be a whole number of steps, at least 1, got {every!r}")
        if isinstance(interval, bool) or not isinstance(interval, (int, float)) or interval <= 0:
            raise ValueError(f"interval must be a number of seconds above 0, got {interval!r}")
        self.external_dag_id = external_dag_id
        self.external_task_id = external_task_id
        self.every = every
        self.interval = interval

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Class path and arguments."""
        return "airflow_gpu.triggers.checkpoint.GangCheckpointsTrigger", {
            "external_dag_id": self.external_dag_id,
            "external_task_id": self.external_task_id,
            "every": self.every,
            "interval": self.interval,
        }

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Yield what there is, then what is new."""
        from airflow_gpu.hooks.checkpoint import Watch
        from airflow_gpu.hooks.world import state_store
        from airflow_gpu.settings import settings

        watch: Watch | None = None
        while True:
            try:
                given = settings()
                if watch is None:
                    store = await state_store(given)
                    watch = Watch(store, given.installation, self.external_dag_id, self.external_task_id)
                news = await watch.news(max(1, int(self.every)))
            except Exception as error:  # a store that is away now must not end the watch
                self.log.warning("could not look for checkpoints, trying again: %r", error)
                news, watch = [], watch
            for one in news:
                yield TriggerEvent(one)
            await asyncio.sleep(max(SHORTEST, float(self.interval)))

"""The trigger that drives a gang while its task is deferred.

Purpose: runs the driver until there is a verdict, through every preemption,
without a worker, a pool slot or an Airflow retry.

What it does not do: hold anything. Its arguments name a run directory and an
owner; whatever it needs is there. No secrets, no DAG code.

Known limits: handing a trigger over to another triggerer cancels it here with
the same message as a user's action, so before it ends a gang it asks Airflow
whether the task is still deferred, and the journal who owns the run. When that
cannot be found out, the gang is left running.
"""

from __future__ import annotations

import asyncio
import contextvars
import json
import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from airflow.triggers.base import BaseTrigger, TriggerEvent

if TYPE_CHECKING:
    from airflow_gpu.driver import Driver

KILL_ANSWER_LIMIT = 600.0
"""Seconds for which Airflow is asked what became of the task.

A triggerer builds its answering service at the first question, and answers one
at a time: on a busy machine the first answer took more than ten seconds.
"""

SETTLE = 5.0
"""Seconds from its start before which a trigger tells no end.

A resume that is queued before the scheduler has heard of the end of the process
that deferred is taken for a failure of it ("state mismatch"), and a try is lost.
"""

KILL_ASK_AGAIN = 5.0
"""Seconds between two such questions, when the answer is an error."""

_LOG = logging.getLogger(__name__)

_KILLS: set[asyncio.Task[None]] = set()
"""Kills under way; the event loop itself holds tasks weakly."""


async def _see_to_the_end(driver: Driver) -> None:
    """Until what was told to end is over, and written down as over. A sweep does it where this process ends before."""
    from airflow_gpu.driver import SupersededError

    driver.world = replace(driver.world, say=_LOG.info, rank_log=lambda _: None)
    try:
        await driver.run()
    except SupersededError:
        pass  # a newer try has taken over, and sees to it
    except Exception as error:
        _LOG.warning("the end of %s could not be seen to: %r", driver.journal.path, error)


class GangTrigger(BaseTrigger):
    """Drives the run at ``state_uri``/``path`` for its owner ``epoch``.

    :param state_uri: root of the journals.
    :param path: the run directory below it.
    :param epoch: the owner, see ``docs/run-directory.md``.
    :param digest: of the request, for people who look at the trigger.
    :param state_conn_id: connection with the credentials of ``state_uri``.
    """

    def __init__(
        self,
        state_uri: str = "",
        path: str = "",
        epoch: int = 0,
        digest: str = "",
        state_conn_id: str | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        # Stored as they come: an exception here would stop the whole triggerer, and a field that a newer
        # version added must not (both: jobs/triggerer_job_runner.py, create_triggers).
        self.state_uri = state_uri
        self.path = path
        self.epoch = epoch
        self.digest = digest
        self.state_conn_id = state_conn_id

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Class path and arguments; defaults are left out, so that an older version takes them too."""
        arguments = {
            "state_uri": self.state_uri,
            "path": self.path,
            "epoch": self.epoch,
            "digest": self.digest,
            "state_conn_id": self.state_conn_id,
        }
        return (
            "airflow_gpu.triggers.gang.GangTrigger",
            {name: value for name, value in arguments.items() if value not in ("", 0, None)},
        )

    async def _driver(self) -> Driver:
        from airflow_gpu.driver import Driver
        from airflow_gpu.gang.identity import RunKey
        from airflow_gpu.gang.spec import Gang
        from airflow_gpu.hooks.world import airflow_world, state_store
        from airflow_gpu.patience import patiently
        from airflow_gpu.rundir.journal import Journal
        from airflow_gpu.rundir.slot import read_run
        from airflow_gpu.rundir.store import StoreError
        from airflow_gpu.settings import settings

        given = replace(settings(named=False), state_uri=self.state_uri, state_conn_id=self.state_conn_id)

        async def read() -> tuple[RunKey, str, Journal]:
            store = await state_store(given)
            key, incarnation = await read_run(store, self.path)
            journal = Journal(store, self.path)
            if (await journal.refresh()).epoch < self.epoch:
                raise StoreError(f"owner {self.epoch} is not in the journal of {self.path} yet")
            return key, incarnation, journal

        key, incarnation, journal = await patiently(read, sleep=asyncio.sleep, say=self.log.warning)
        gang = Gang.from_json(json.dumps(journal.gang_of(self.epoch)))
        world = airflow_world(given, self.log.info, self.log.info)
        return Driver(journal, key, incarnation, gang, epoch=self.epoch, world=world)

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Yield one event: the verdict, as :func:`airflow_gpu.operators.gang.answer` takes it."""
        from airflow_gpu.driver import SupersededError
        from airflow_gpu.record import event_of

        loop = asyncio.get_running_loop()
        settled = loop.time() + SETTLE
        driver = await self._driver()
        try:
            verdict = await driver.run()
        except SupersededError as error:
            yield TriggerEvent({"outcome": "superseded", "message": str(error)})
            return
        assert verdict is not None
        await asyncio.sleep(max(0.0, settled - loop.time()))
        yield TriggerEvent(event_of(verdict))

    async def on_kill(self) -> None:
        """End the gang with a notice, if it was a person who ended the task and the run is still ours.

        Airflow cancels a trigger anew with every round of its loop, about once a
        second, until it has ended (``cancelling_triggers`` in
        jobs/triggerer_job_runner.py). So the work is a task of its own, and what
        hits this one is waited out.
        """
        task = asyncio.get_running_loop().create_task(self._kill())
        _KILLS.add(task)
        task.add_done_callback(_KILLS.discard)
        while not task.done():
            try:
                await asyncio.shield(task)
            except asyncio.CancelledError:
                continue
            except Exception:
                break
        if not task.cancelled() and (error := task.exception()) is not None:
            self.log.error("the gang could not be ended; the next try of the task does it: %r", error)

    async def _kill(self) -> None:
        ti = self.task_instance
        if ti is None:
            return
        from airflow_gpu.compat import NEXT_TRY, task_state

        async def ask() -> str | None:
            while True:
                try:
                    return await asyncio.to_thread(task_state, ti.dag_id, ti.run_id, ti.task_id, ti.map_index)
                except Exception as error:  # the database is away, perhaps: it says nothing of the gang
                    self.log.warning("cannot tell yet why this trigger was cancelled: %r", error)
                    await asyncio.sleep(KILL_ASK_AGAIN)

        try:
            state = await asyncio.wait_for(ask(), KILL_ANSWER_LIMIT)
        except TimeoutError:
            self.log.warning(
                "cannot tell why this trigger was cancelled: the gang goes on; a sweep looks after it"
            )
            return
        if state in NEXT_TRY:
            # Handed over to another triggerer, or another try is on its way and sees what is to be done.
            self.log.info("the task is %s: the gang goes on, in other hands", state)
            return
        driver = await self._driver()
        stopped = await driver.stop(
            "user", f"the task was ended by a user's action (it is {state or 'cleared'} now)"
        )
        if not stopped:
            self.log.info("a newer try of the task has the run, or nothing runs; nothing to end")
            return
        # Airflow is done with this trigger, and its log is closed: the end is seen to from a context of its own.
        closing = contextvars.Context().run(asyncio.get_running_loop().create_task, _see_to_the_end(driver))
        _KILLS.add(closing)
        closing.add_done_callback(_KILLS.discard)

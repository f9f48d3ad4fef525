"""One observer per target and process, whatever the number of gangs.

Purpose: watching costs O(targets), not O(gangs). Every driver of a process
that waits on the same target waits here; one task asks the target for all of
them in one ``observe`` and hands out the sightings.

What it does not do: decide, retry or interpret. An error of the target goes to
everyone who waits, and says nothing about their gangs.

Limits: one watcher belongs to one event loop. Its task runs in an empty
context, so that a shared watch does not log into the first gang's task log,
and it ends by itself when nobody waits any more.
"""

from __future__ import annotations

import asyncio
import contextvars
import random
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

from airflow_gpu.targets.base import JobRef, Sighting, Target, TargetError

JITTER = 0.2
"""Share of the interval by which one round may come later, so that triggerers do not ask in step."""

CALL_LIMIT = 120.0
"""Seconds that a target may take for one answer. One that hangs must not hold up the watch of all its gangs."""

T = TypeVar("T")


class Watcher:
    """Shares ``observe`` among all who call :meth:`sighting`."""

    def __init__(
        self, target: Target, interval: float, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    ) -> None:
        self.target = target
        self.interval = interval
        self.rounds = 0
        self._sleep = sleep
        self._waiting: dict[asyncio.Future[Sighting], JobRef] = {}
        self._task: asyncio.Task[None] | None = None

    async def sighting(self, job: JobRef) -> Sighting:
        """The next sighting of this job.

        :raises TargetError: the target could not be asked.
        """
        future: asyncio.Future[Sighting] = asyncio.get_running_loop().create_future()
        self._waiting[future] = job
        if self._task is None or self._task.done():
            # An empty context: this task outlives the gang that happened to start it.
            self._task = contextvars.Context().run(asyncio.get_running_loop().create_task, self._watch())
        try:
            return await future
        finally:
            self._waiting.pop(future, None)

    async def _watch(self) -> None:
        # The first round comes at once: who has just submitted or been woken wants to know.
        while self._waiting:
            asked = dict(self._waiting)
            self._waiting.clear()
            self.rounds += 1
            try:
                seen = await self._observe(list({job.name: job for job in asked.values()}.values()))
            except Exception as error:  # goes to every waiter; the watch itself goes on
                for future in asked:
                    if not future.done():
                        future.set_exception(
                            error
                            if isinstance(error, TargetError)
                            else TargetError(f"{self.target.name}: {error!r}")
                        )
            else:
                for future, job in asked.items():
                    if future.done():
                        continue
                    if job.name in seen:
                        future.set_result(seen[job.name])
                    else:
                        future.set_exception(TargetError(f"{self.target.name} said nothing of {job.name}"))
            await self._sleep(self.interval * (1 + random.random() * JITTER))

    async def _observe(self, jobs: list[JobRef]) -> Mapping[str, Sighting]:
        return await bounded(self.target.observe(jobs), self.target.name)


async def bounded(call: Awaitable[T], who: str) -> T:
    """The answer of a target, within ``CALL_LIMIT``.

    :raises TargetError: it did not answer in time.
    """
    try:
        async with asyncio.timeout(CALL_LIMIT):
            return await call
    except TimeoutError:
        raise TargetError(f"{who} did not answer within {CALL_LIMIT:.0f} s") from None

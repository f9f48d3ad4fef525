"""One observer per target and process, whatever the number of gangs.

Purpose: watching costs O(targets), not O(gangs). Every driver of a process
that waits on the same target waits here; one task asks the target for all of
them in one ``observe`` a round, and wakes only those for whom something has
changed. Nothing else happens for a gang that goes on as it did: no task wakes
up, nothing is read.

What it does not do: decide, retry or interpret. An error of the target says
nothing about the gangs. It wakes nobody by itself: who waits learns of it when
its time is over, together with how long it has lasted, so a target that is away
for an hour costs no more than one that is there.

Limits: one watcher belongs to one event loop. Its task runs in an empty
context, so that a shared watch does not log into the first gang's task log,
and it ends by itself when nobody waits any more. A target whose ``since``,
``native`` or ``hosts`` differ from one answer to the next without a change of
the job wakes its gangs each round.

Example::

    first = await watcher.sighting(ref)
    newer = await watcher.sighting(ref, known=first, within=60.0)
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from airflow_gpu.targets.base import JobRef, Sighting, Target, TargetError

JITTER = 0.2
"""Share of the interval by which one round may come later, so that triggerers do not ask in step."""

CALL_LIMIT = 120.0
"""Seconds that a target may take for one answer. One that hangs must not hold up the watch of all its gangs."""

BATCH = 100
"""Gangs that are compared or woken before the event loop gets its turn: thousands may change at once."""

log = logging.getLogger(__name__)

T = TypeVar("T")


class NoAnswer(TargetError):
    """The target could not be asked, or said nothing of the job, for ``lasted`` seconds up to now."""

    def __init__(self, message: str, lasted: float = 0.0) -> None:
        super().__init__(message)
        self.lasted = lasted


def differs(before: Sighting | None, now: Sighting) -> bool:
    """Whether a job has changed. Its ``reason`` alone is no change: places in a queue move all the time."""
    if before is None:
        return True
    return before is not now and (
        before.state is not now.state
        or before.restart != now.restart
        or before.native != now.native
        or before.ending is not now.ending
        or before.since != now.since
        or before.platform_id != now.platform_id
        or before.hosts != now.hosts
        or before.blamed_hosts != now.blamed_hosts
    )


@dataclass(eq=False, slots=True)
class _Waiter:
    """One call of ``sighting``. ``word`` is what the newest round said that began after the call did."""

    job: JobRef
    known: Sighting | None
    due: float  # from then on any word will do
    future: asyncio.Future[Sighting] = field(repr=False)
    word: Sighting | Exception | None = None
    failing: float | None = None  # since when there are only errors

    def settle(self, now: float) -> None:
        if self.future.done():
            return
        if isinstance(self.word, Sighting):
            self.future.set_result(self.word)
        elif self.word is not None:
            # An error of its own for each: one that many tasks raise collects the tracebacks of all.
            lasted = now - self.failing if self.failing is not None else 0.0
            error = NoAnswer(str(self.word), lasted)
            error.__cause__ = self.word
            self.future.set_exception(error)


class Watcher:
    """Shares ``observe`` among all who call :meth:`sighting`.

    :param clock: seconds, for measuring only; the event loop's by default.
    """

    def __init__(
        self,
        target: Target,
        interval: float,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.target = target
        self.interval = interval
        self.rounds = 0
        self._sleep = sleep
        self._given_clock = clock
        self._waiting: dict[str, list[_Waiter]] = {}
        self._task: asyncio.Task[None] | None = None
        self._failing = False

    @property
    def idle(self) -> bool:
        """Nobody waits here."""
        return not self._waiting

    async def sighting(self, job: JobRef, *, known: Sighting | None = None, within: float = 0.0) -> Sighting:
        """A sighting of this job from a round that began after this call.

        :param known: what the caller knows already; it wants to hear of anything else at once.
        :param within: seconds after which the newest word will do, whatever it is.
        :raises TargetError: that word is that the target could not be asked (see :class:`NoAnswer`).
        """
        loop = asyncio.get_running_loop()
        waiter = _Waiter(job, known, self._clock() + within, loop.create_future())
        self._waiting.setdefault(job.name, []).append(waiter)
        timer = loop.call_later(within, self._due, waiter) if within > 0 else None
        if self._task is None or self._task.done():
            # An empty context: this task outlives the gang that happened to start it.
            self._task = contextvars.Context().run(loop.create_task, self._watch())
        try:
            return await waiter.future
        finally:
            if timer is not None:
                timer.cancel()
            left = self._waiting.get(job.name, [])
            if waiter in left:
                left.remove(waiter)
            if not left:
                self._waiting.pop(job.name, None)
            if waiter.future.done() and not waiter.future.cancelled():
                waiter.future.exception()  # a waiter that was cancelled just then need not be told

    def nudge(self, name: str) -> None:
        """Whoever waits for this job is to look now: something was journalled by this process."""
        for waiter in list(self._waiting.get(name, ())):
            self._due(waiter)

    def _due(self, waiter: _Waiter) -> None:
        waiter.due = float("-inf")
        waiter.settle(self._clock())

    def _clock(self) -> float:
        return self._given_clock() if self._given_clock else asyncio.get_running_loop().time()

    async def _watch(self) -> None:
        # The first round comes at once: who has just submitted or been woken wants to know.
        try:
            while self._waiting:
                await self._round()
                await self._sleep(self.interval * (1 + random.random() * JITTER))
        finally:
            # Only when this task was cancelled or failed: nobody may wait for what never comes.
            for waiter in [waiter for waiters in self._waiting.values() for waiter in waiters]:
                waiter.word = waiter.word or TargetError(f"the watch of {self.target.name} ended")
                self._due(waiter)

    async def _round(self) -> None:
        asked = [waiter for waiters in self._waiting.values() for waiter in waiters]
        began = self._clock()
        self.rounds += 1
        answer: Mapping[str, Sighting] | Exception
        try:
            answer = dict(
                await self._observe(list({waiter.job.name: waiter.job for waiter in asked}.values()))
            )
        except Exception as error:  # whatever it is: the watch itself goes on
            answer = (
                error if isinstance(error, TargetError) else TargetError(f"{self.target.name}: {error!r}")
            )
        self._report(answer)
        for number, waiter in enumerate(asked, start=1):
            if not waiter.future.done():
                self._tell(waiter, answer, began)
            if number % BATCH == 0:
                await asyncio.sleep(0)

    def _tell(self, waiter: _Waiter, answer: Mapping[str, Sighting] | Exception, began: float) -> None:
        if isinstance(answer, Exception):
            waiter.word = answer
        else:
            name = waiter.job.name
            waiter.word = answer.get(name) or TargetError(f"{self.target.name} said nothing of {name}")
        if not isinstance(waiter.word, Sighting):
            waiter.failing = began if waiter.failing is None else waiter.failing
        else:
            waiter.failing = None
            if differs(waiter.known, waiter.word):
                waiter.due = float("-inf")
        now = self._clock()
        if now >= waiter.due:
            waiter.settle(now)

    def _report(self, answer: Mapping[str, Sighting] | Exception) -> None:
        """In the log of the process, once: each gang's own log hears of it when it is that gang's turn."""
        failing = isinstance(answer, Exception)
        if failing and not self._failing:
            log.warning("%s does not answer, %d gangs wait: %s", self.target.name, len(self._waiting), answer)
        elif self._failing and not failing:
            log.info("%s answers again", self.target.name)
        self._failing = failing

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

"""The seam: every call that a process of ours makes to the outside, counted, and one or two of them spoilt.

Purpose: a process (a worker, a triggerer) is an :class:`Actor`. Whatever it asks
of a store, a target, Airflow or its clock goes through :meth:`Seam.call`, which
numbers the calls of a run 1, 2, 3, ... over all processes. A run without faults
gives the list; the same run with ``Fault(k, kind)`` is the same up to call k.

The kinds of faults, with what they stand for:

=============  ====================================================================
``before``     an error, and nothing has happened (connection refused)
``after``      an error, but it has happened (the reply was lost)
``late``       an error; it happens later all the same (a request stuck in a proxy)
``duplicate``  it happens, and again later (a retried request that arrives twice)
``delay``      it happens now, the reply comes 45 s later
``drop``       no reply ever; ended by the caller's own time-out
``stall``      it happens, then the whole process is frozen (a paused VM, a laptop
               lid) for so long that Airflow has started another one meanwhile
``kill-before``, ``kill-after``
               the process is dead from there on: not even ``finally`` is heard of
``moved``      Airflow hands the trigger over to another triggerer at that moment
``cleared``, ``marked``, ``deleted``
               a person clears the task, marks it failed, deletes the DAG run and
               makes it again, at that moment
=============  ====================================================================

For a call that only reads, ``after``, ``late`` and ``duplicate`` are the same as
``before`` or as nothing, so they are not run.

Limits: a simulated process that is killed stops at its next call to the outside.
What it computes until then is heard of by nobody.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")

DELAY = 45.0
LATE = 70.0
DUPLICATE = 25.0
DROP = 90.0
"""Seconds after which a caller without a time-out of its own gets an error all the same (obstore's, Airflow's)."""
OVERSLEEP = 300.0

READ = ("before", "delay", "drop", "kill-before", "stall")
WRITE = ("before", "after", "late", "duplicate", "delay", "drop", "kill-before", "kill-after", "stall")
SLEEP = ("delay", "kill-before", "stall")
STEP = ("delay", "kill-before", "kill-after")
"""Of what Airflow itself does at the end of a process: it does it or does not."""

PEOPLE = ("moved", "cleared", "marked", "deleted")

ACTOR: ContextVar[Actor] = ContextVar("actor")
"""The process in which a coroutine runs."""


@dataclass(frozen=True)
class Fault:
    """What happens at call number ``k``."""

    k: int
    kind: str

    def __str__(self) -> str:
        return f"{self.kind} at call {self.k}"


@dataclass(frozen=True)
class Call:
    """One call of a run: who asked for what, and which faults make sense there."""

    k: int
    actor: str
    op: str
    detail: str
    kinds: tuple[str, ...]
    at: float

    def __str__(self) -> str:
        return f"call {self.k} ({self.actor}: {self.op} {self.detail})"


class Actor:
    """One process of Airflow's side."""

    def __init__(self, seam: Seam, name: str, role: str) -> None:
        self.seam, self.name, self.role = seam, name, role
        self.alive = True
        self.died = asyncio.Event()
        self.frozen_until = 0.0
        self.tasks: set[asyncio.Task[Any]] = set()

    def die(self) -> None:
        """SIGKILL. Its tasks are cancelled, so that none goes on by itself; what they ask from now on is not heard."""
        self.alive = False
        self.died.set()
        for task in list(self.tasks):
            task.cancel()

    async def gate(self) -> None:
        """Pass while alive; wait while frozen; never return when dead."""
        if self.alive and not self.frozen_until and not self.seam.closed:
            return  # nearly always
        loop = asyncio.get_running_loop()
        while self.alive and self.frozen_until > loop.time():
            await asyncio.sleep(self.frozen_until - loop.time())
        if not self.alive or self.seam.closed:
            await loop.create_future()

    async def sleep(self, seconds: float) -> None:
        """The process's own sleep: a call like any other, since it may be killed or frozen in it."""
        await self.seam.sleep(self, seconds)


class Seam:
    """Counts calls and spoils some."""

    def __init__(self, faults: tuple[Fault, ...], limit: int) -> None:
        self.faults = {fault.k: fault.kind for fault in faults}
        self.limit = limit
        self.calls: list[Call] = []
        self.hit: dict[int, Call] = {}
        self.closed = False
        self.over = ""  # that there were more calls than any sane run makes
        self.on_stall: Callable[[Actor], float] = lambda actor: 0.0
        self.on_people: Callable[[str], None] = lambda kind: None

    def close(self) -> None:
        """The run is over: nobody may ask anything any more."""
        self.closed = True

    async def call(
        self,
        actor: Actor,
        op: str,
        detail: str,
        effect: Callable[[], T],
        *,
        kinds: tuple[str, ...],
        error: Callable[[str], BaseException],
        latency: float,
        bounded: bool = False,
    ) -> T:
        """Do ``effect`` (which takes no time) as a call to the outside, with the fault that is due at it.

        :param bounded: the caller has a time-out of its own, so an answer that is dropped never comes.
        """
        await actor.gate()
        kind, call = self._count(actor, op, detail, kinds)
        loop = asyncio.get_running_loop()
        if kind == "kill-before":
            actor.die()
            await actor.gate()
        await asyncio.sleep(latency)
        await actor.gate()
        if kind == "before":
            raise error(f"refused: {call}")
        if kind == "drop":
            if bounded:
                await loop.create_future()
            await asyncio.sleep(DROP)
            await actor.gate()
            raise error(f"no answer: {call}")
        if kind == "late":
            loop.call_later(LATE, _quietly, effect)
            raise error(f"connection reset: {call}")
        answer: Any = None
        problem: Exception | None = None
        try:
            answer = effect()
        except Exception as found:  # an answer of the system, such as "exists"
            problem = found
        if kind == "duplicate":
            loop.call_later(DUPLICATE, _quietly, effect)
        elif kind == "delay":
            await asyncio.sleep(DELAY)
        elif kind == "stall":
            actor.frozen_until = loop.time() + self.on_stall(actor)
        elif kind == "kill-after":
            actor.die()
        if kind is not None:
            await actor.gate()
            if kind == "after":
                raise error(f"reply lost: {call}")
        if problem is not None:
            raise problem
        return answer  # type: ignore[no-any-return]

    async def sleep(self, actor: Actor, seconds: float) -> None:
        await actor.gate()
        kind, _ = self._count(actor, "sleep", "", SLEEP)
        if kind == "kill-before":
            actor.die()
        elif kind == "stall":
            actor.frozen_until = asyncio.get_running_loop().time() + self.on_stall(actor)
        await asyncio.sleep(seconds + (OVERSLEEP if kind == "delay" else 0.0))
        await actor.gate()

    def _count(self, actor: Actor, op: str, detail: str, kinds: tuple[str, ...]) -> tuple[str | None, Call]:
        k = len(self.calls) + 1
        call = Call(k, actor.name, op, detail, kinds, asyncio.get_running_loop().time())
        self.calls.append(call)
        if k > self.limit:
            self.closed, self.over = True, f"more than {self.limit} calls; the last is {call}"
        kind = self.faults.get(k)
        if kind is None:
            return None, call
        self.hit[k] = call
        if kind in PEOPLE:
            self.on_people(kind)
            return None, call
        return (kind if kind in kinds else None), call


def _quietly(effect: Callable[[], Any]) -> None:
    """A request that arrives when nobody waits for its answer."""
    try:
        effect()
    except Exception:
        pass

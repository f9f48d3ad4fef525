"""The scenarios: short stories of one task instance, each the same every time.

Each says what people and Airflow do (``script``), what becomes of each start of
the gang (``fates``), and what may come of it with whatever fault: the states in
which Airflow may end up, the most attempts of a run, and the causes with which
a verdict other than success may be told.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from tests.faults.airflow import Airflow
from tests.faults.platform import Fate
from tests.faults.world import Scenario

Script = Callable[[Airflow], Coroutine[Any, Any, None]]


async def nothing(airflow: Airflow) -> None:
    """The task runs; nobody does anything."""
    airflow.start()


def after(seconds: float, what: Callable[[Airflow], None]) -> Script:
    """The task runs; ``seconds`` later somebody does something."""

    async def script(airflow: Airflow) -> None:
        airflow.start()
        await asyncio.sleep(seconds)
        what(airflow)

    return script


def when_told(what: Callable[[Airflow], None]) -> Script:
    """Something is done when the task has ended."""

    async def script(airflow: Airflow) -> None:
        airflow.start()
        await airflow.settled.wait()
        await asyncio.sleep(30)
        what(airflow)

    return script


def fates(first: Mapping[tuple[int, int], Fate], rest: Fate | None = None) -> Callable[[int, int, int], Fate]:
    """By attempt and restart of the first run; everything else is ``rest``."""

    def of(run: int, attempt: int, restart: int) -> Fate:
        default = rest if rest is not None else Fate()
        return first.get((attempt, restart), default) if run == 1 else default

    return of


def twice(airflow: Airflow) -> None:
    """The scheduler starts a second worker for the same try."""
    assert airflow.ti is not None
    airflow.execute(airflow.ti)


async def mark_and_clear(airflow: Airflow) -> None:
    """Somebody marks the task failed at once, and thinks better of it."""
    airflow.start()
    await asyncio.sleep(1.5)
    airflow.mark()
    await asyncio.sleep(10)
    airflow.clear()


STOPPED = frozenset({"stopped"})

SCENARIOS = [
    Scenario("plain success", nothing, people=True),
    Scenario(
        "preempted with notice",
        nothing,
        fates({(1, 0): Fate("notice")}),
        attempts=2,
        people=True,
    ),
    Scenario("preempted without", nothing, fates({(1, 0): Fate("preempt")}), attempts=2),
    Scenario("requeued by the platform", nothing, fates({(1, 0): Fate("notice", requeue=True)})),
    Scenario(
        "shown as ended, then queued again",
        nothing,
        fates({(1, 0): Fate("notice", requeue=True, wavers=4)}),
        attempts=2,
    ),
    Scenario("done within the grace", nothing, fates({(1, 0): Fate("done")})),
    Scenario("done, but queued again", nothing, fates({(1, 0): Fate("done", requeue=True)})),
    Scenario("node lost", nothing, fates({(1, 0): Fate("node")}), attempts=2),
    Scenario("ends without a word", nothing, fates({(1, 0): Fate("quiet")}), poll=20, attempts=2),
    Scenario("vanishes", nothing, fates({(1, 0): Fate("vanish")}), attempts=2),
    Scenario(
        "error, then retry",
        nothing,
        fates({(1, 0): Fate("error")}),
        attempts=2,
        verdicts=frozenset({"application"}),
    ),
    Scenario(
        "success of half the ranks",
        nothing,
        fates({(1, 0): Fate("lie")}),
        poll=20,
        attempts=2,
        verdicts=frozenset({"no_evidence"}),
    ),
    Scenario("clear while deferred", after(12, Airflow.clear), attempts=1),
    Scenario(
        "clear, begin again", after(12, Airflow.clear), gang={"recovery": {"on_clear": "fresh"}}, attempts=1
    ),
    Scenario("clear in the queue", after(12, Airflow.clear), fates({(1, 0): Fate(queue=60)}), attempts=1),
    Scenario(
        "clear a stubborn program",
        after(12, Airflow.clear),
        fates({(1, 0): Fate(stubborn=True, lag=20, slow=4)}),
    ),
    Scenario("clear of a success", when_told(Airflow.clear)),
    Scenario(
        "marked failed, then cleared",
        mark_and_clear,
        fates({(2, 0): Fate(queue=120, slow=20)}, Fate(slow=20)),
        poll=30,
    ),
    Scenario("a long program", nothing, fates({}, Fate(slow=300)), poll=900, people=True),
    Scenario(
        "mark failed", after(12, Airflow.mark), fates({}, Fate(slow=300)), told=("failed",), verdicts=STOPPED
    ),
    Scenario(
        "mark failed in the queue",
        after(4, Airflow.mark),
        fates({(1, 0): Fate(queue=60)}, Fate(slow=300)),
        told=("failed",),
        verdicts=STOPPED,
    ),
    Scenario("hand-over, both alive", after(12, Airflow.hand_over)),
    Scenario("two workers of one try", after(0.0, twice)),
    Scenario("run deleted and made again", after(12, Airflow.recreate)),
    Scenario(
        "deadline",
        nothing,
        fates({}, Fate(slow=60)),
        gang={"placement": {"deadline": 30}},
        retries=1,
        told=("failed",),
        verdicts=STOPPED,
    ),
    Scenario(
        "queued too long",
        nothing,
        fates({(1, 0): Fate(queue=7200)}),
        gang={"placement": {"max_wait": 30}},
        attempts=2,
        verdicts=frozenset({"queued_too_long"}),
    ),
    Scenario(
        "time limit",
        nothing,
        fates({(1, 0): Fate("timeout", at=8, slow=60)}),
        gang={"time_limit": 8},
        attempts=2,
        verdicts=frozenset({"timed_out"}),
    ),
    Scenario(
        "limits are near",
        nothing,
        fates({}, Fate(queue=25, start=25, slow=5)),
        gang={"placement": {"max_wait": 60, "start_timeout": 60}, "time_limit": 90},
        poll=10,
    ),
    Scenario("target away", nothing, fates({(1, 0): Fate("notice")}), target_away=(8, 128), attempts=2),
    Scenario(
        "waits, and moves to another target",
        nothing,
        fates({(1, 0): Fate(queue=7200)}),
        targets=("here", "there"),
        free=lambda name, now: 2 if name == "there" and now() > 15 else 0,
        gang={"placement": {"move_after": 30}},
        poll=10,
        attempts=2,
    ),
    Scenario(
        "what is free changes",
        nothing,
        fates({}, Fate(slow=4)),
        targets=("here", "there"),
        free=lambda name, now: 2 if (name == "here") == (now() < 5) else 0,
        poll=10,
    ),
    Scenario(
        "out of reach, and moves to another target",
        nothing,
        fates({(1, 0): Fate(slow=60)}),
        targets=("here", "there"),
        gang={"recovery": {"unreachable": "move", "unknown_limit": 60}},
        target_away=(8, 3000),
        poll=20,
        attempts=2,
    ),
    Scenario("store away", nothing, fates({(1, 0): Fate("notice")}), store_away=(8, 108), attempts=2),
    Scenario("names are not unique", nothing, fates({(1, 0): Fate("preempt")}), atomic=False, attempts=2),
    Scenario(
        "names are not unique, a long program", nothing, fates({}, Fate(slow=20)), atomic=False, poll=60
    ),
    Scenario(
        "in the worker",
        nothing,
        fates({(1, 0): Fate("notice")}),
        deferrable=False,
        attempts=2,
    ),
]

"""One watch for all gangs of a target: who is woken, when, and by what; and that nobody else is.

The platform and the clock are in the test's hand. Rounds are counted, never timed.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

import pytest

from airflow_gpu.gang.run import State
from airflow_gpu.targets import watch
from airflow_gpu.targets.base import JobRef, Sighting, TargetError
from airflow_gpu.targets.watch import NoAnswer, Watcher

INTERVAL = 5.0
RUNNING = Sighting(State.RUNNING, "RUN", platform_id="7", since=1.0, hosts=("a", "b"))
WHO: contextvars.ContextVar[str] = contextvars.ContextVar("WHO", default="nobody")


def ref(number: int = 0) -> JobRef:
    return JobRef(f"job-{number}", {}, 1, "digest")


class Platform:
    """Shows ``default`` for every job that has no sighting of its own in ``shown``."""

    name = "platform"

    def __init__(self) -> None:
        self.default: Sighting | None = RUNNING
        self.shown: dict[str, Sighting] = {}
        self.error: Exception | None = None
        self.asked: list[list[str]] = []
        self.seen_by: list[str] = []
        self.during: Callable[[], Awaitable[None]] | None = None

    async def observe(self, jobs: Collection[JobRef]) -> Mapping[str, Sighting]:
        self.asked.append([job.name for job in jobs])
        self.seen_by.append(WHO.get())
        if self.during is not None:
            await self.during()
        if self.error is not None:
            raise self.error
        seen = {job.name: self.shown.get(job.name, self.default) for job in jobs}
        return {name: sighting for name, sighting in seen.items() if sighting is not None}


class Bench:
    """A watcher whose rounds come when the test says so; each takes ``INTERVAL`` on the watcher's clock."""

    def __init__(self) -> None:
        self.platform = Platform()
        self.now = 1000.0
        self.go = asyncio.Event()
        self.watcher = Watcher(self.platform, INTERVAL, self._sleep, lambda: self.now)  # type: ignore[arg-type]
        self.tasks: list[asyncio.Task[Sighting]] = []

    async def _sleep(self, seconds: float) -> None:
        assert INTERVAL <= seconds <= INTERVAL * (1 + watch.JITTER)
        await self.go.wait()
        self.go.clear()
        self.now += INTERVAL

    def wait(self, number: int = 0, **more: Any) -> asyncio.Task[Sighting]:
        task = asyncio.create_task(self.watcher.sighting(ref(number), **more))
        self.tasks.append(task)
        return task

    async def settle(self) -> None:
        """Until everything that can happen now has happened."""
        for _ in range(200):
            await asyncio.sleep(0)

    async def rounds(self, count: int = 1) -> None:
        for _ in range(count):
            self.go.set()
            await self.settle()
            self.go.clear()  # nobody may have been asleep


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    yield bench
    for task in bench.tasks:
        task.cancel()
    await asyncio.gather(*bench.tasks, return_exceptions=True)
    bench.go.set()
    await bench.settle()
    assert bench.watcher.idle


async def test_one_question_a_round_and_nobody_wakes_while_nothing_changes(bench: Bench) -> None:
    tasks = [bench.wait(n, known=RUNNING, within=1e6) for n in range(1000)]
    await bench.settle()
    await bench.rounds(20)
    assert len(bench.platform.asked) == 21
    assert {len(names) for names in bench.platform.asked} == {1000}
    assert not any(task.done() for task in tasks)


async def test_who_has_changed_is_woken_and_nobody_else(bench: Bench) -> None:
    tasks = [bench.wait(n, known=RUNNING, within=1e6) for n in range(1000)]
    await bench.settle()
    lost = bench.platform.shown["job-417"] = Sighting(State.NODE_LOST, "LOST")
    await bench.rounds()
    assert [n for n, task in enumerate(tasks) if task.done()] == [417]
    assert tasks[417].result() == lost
    # It is not asked for any more, until its driver comes back.
    await bench.rounds()
    assert "job-417" not in bench.platform.asked[-1]
    assert len(bench.platform.asked[-1]) == 999


@pytest.mark.parametrize(
    "change",
    [
        {"state": State.QUEUED},
        {"native": "RUNNING_AGAIN"},
        {"restart": 1},
        {"since": 2.0},
        {"ending": State.PREEMPTED},
        {"hosts": ("a", "c")},
        {"blamed_hosts": ("a",)},
        {"platform_id": "8"},
    ],
)
async def test_what_counts_as_a_change(bench: Bench, change: dict[str, Any]) -> None:
    task = bench.wait(known=RUNNING, within=1e6)
    await bench.settle()
    assert not task.done()
    bench.platform.default = replace(RUNNING, **change)
    await bench.rounds()
    assert task.result() == bench.platform.default


async def test_a_reason_alone_wakes_nobody_but_is_told_in_time(bench: Bench) -> None:
    """Thousands of gangs in a queue have another place in it after each start."""
    waiting = Sighting(State.QUEUED, "PENDING", reason="place 900", since=1.0)
    bench.platform.default = replace(waiting, reason="place 899")
    task = bench.wait(known=waiting, within=3 * INTERVAL)
    await bench.settle()
    await bench.rounds(2)
    assert not task.done()
    await bench.rounds()
    assert task.result().reason == "place 899"


async def test_the_first_call_is_answered_by_the_next_round(bench: Bench) -> None:
    assert await bench.wait() == RUNNING
    later = bench.wait(1, known=RUNNING)  # nothing new, but it does not want to wait
    await bench.settle()
    assert not later.done()
    await bench.rounds()
    assert later.result() == RUNNING
    assert bench.watcher.rounds == 2


async def test_a_moment_that_was_asked_for_comes_between_two_rounds() -> None:
    """With the event loop's own clock: the newest word is enough, no round is made for it."""
    platform = Platform()
    watcher = Watcher(platform, 3600.0)  # type: ignore[arg-type]
    assert await asyncio.wait_for(watcher.sighting(ref(), known=RUNNING, within=0.05), 20) == RUNNING
    assert watcher.rounds == 1


async def test_a_moment_that_was_asked_for_comes_while_the_target_hangs() -> None:
    platform = Platform()
    watcher = Watcher(platform, 0.01)  # type: ignore[arg-type]

    async def hang_from_the_second_on() -> None:
        if watcher.rounds > 1:
            await asyncio.Event().wait()

    platform.during = hang_from_the_second_on
    assert await asyncio.wait_for(watcher.sighting(ref(), known=RUNNING, within=0.3), 20) == RUNNING
    assert watcher.rounds == 2
    assert watcher._task is not None
    watcher._task.cancel()


async def test_a_target_that_is_away_wakes_nobody_before_time(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """Down for an hour: one line in the log of the process, and each gang learns when, and since when."""
    caplog.set_level(logging.INFO, watch.__name__)
    tasks = [bench.wait(n, known=RUNNING, within=700 * INTERVAL) for n in range(50)]
    await bench.settle()
    await bench.rounds(3)
    bench.platform.error = TargetError("503")
    await bench.rounds(600)
    assert not any(task.done() for task in tasks)
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    await bench.rounds(100)
    for task in tasks:
        error = task.exception()
        assert isinstance(error, NoAnswer)
        assert "503" in str(error)
        # The fourth round was the first that failed.
        assert error.lasted == pytest.approx((700 - 4) * INTERVAL)
    bench.platform.error = None
    back = bench.wait()
    await bench.rounds()
    assert back.result() == RUNNING
    assert [r.levelname for r in caplog.records] == ["WARNING", "INFO"]


async def test_an_outage_that_is_over_is_no_news(bench: Bench) -> None:
    task = bench.wait(known=RUNNING, within=10 * INTERVAL)
    await bench.settle()
    bench.platform.error = TargetError("503")
    await bench.rounds(5)
    bench.platform.error = None
    await bench.rounds(5)
    assert task.result() == RUNNING


async def test_who_knows_nothing_yet_hears_of_an_error_in_time_and_of_a_sighting_at_once(
    bench: Bench,
) -> None:
    bench.platform.error = TargetError("503")
    with pytest.raises(NoAnswer):
        await bench.wait()
    task = bench.wait(within=1e6)
    await bench.rounds(10)
    assert not task.done()
    bench.platform.error = None
    await bench.rounds()
    assert task.result() == RUNNING


async def test_any_exception_is_an_error_of_the_target(bench: Bench) -> None:
    bench.platform.error = KeyError("jobs")
    with pytest.raises(TargetError, match="platform: KeyError"):
        await bench.wait()


async def test_an_answer_of_another_kind_is_an_error_of_the_target(bench: Bench) -> None:
    bench.platform.observe = lambda jobs: asyncio.sleep(0, None)  # type: ignore[assignment,return-value]
    with pytest.raises(TargetError, match="platform: TypeError"):
        await bench.wait()


async def test_a_job_that_is_not_spoken_of(bench: Bench) -> None:
    """It is no end: the target was to answer for each of them."""
    bench.platform.shown["job-1"], bench.platform.default = RUNNING, None
    silent, other = bench.wait(0), bench.wait(1)
    with pytest.raises(NoAnswer, match="said nothing of job-0"):
        await silent
    assert await other == RUNNING


async def test_a_waiter_that_is_cancelled_leaves_the_others_alone(bench: Bench) -> None:
    tasks = [bench.wait(n, known=RUNNING, within=1e6) for n in range(3)]
    twin = bench.wait(0, known=RUNNING, within=1e6)
    await bench.settle()
    tasks[0].cancel(), tasks[1].cancel()
    await bench.rounds()
    assert bench.platform.asked[-1] == ["job-0", "job-2"]
    bench.platform.default = replace(RUNNING, restart=1)
    await bench.rounds()
    assert tasks[2].result() == twin.result() == bench.platform.default
    assert tasks[0].cancelled()
    assert tasks[1].cancelled()


async def test_cancelled_while_the_target_is_asked(bench: Bench) -> None:
    inside, go_on = asyncio.Event(), asyncio.Event()

    async def during() -> None:
        inside.set()
        await go_on.wait()

    bench.platform.during = during
    first, second = bench.wait(0), bench.wait(1)
    await inside.wait()
    first.cancel()
    await bench.settle()
    go_on.set()
    assert await second == RUNNING
    assert first.cancelled()


async def test_the_watch_ends_with_the_last_gang_and_begins_again(bench: Bench) -> None:
    task = bench.wait(known=RUNNING, within=1e6)
    await bench.settle()
    task.cancel()
    await bench.rounds(3)
    assert bench.watcher.rounds == 1
    assert bench.watcher._task is not None
    assert bench.watcher._task.done()
    assert await bench.wait() == RUNNING
    assert bench.watcher.rounds == 2


async def test_who_comes_during_a_round_is_answered_by_the_next(bench: Bench) -> None:
    """What the target was asked before the submit says nothing of what was submitted."""
    inside, go_on = asyncio.Event(), asyncio.Event()
    gone = Sighting(State.GONE, "")
    bench.platform.default = gone

    async def during() -> None:
        inside.set()
        await go_on.wait()

    bench.platform.during = during
    early = bench.wait(0)
    await inside.wait()
    late, late_too = bench.wait(0), bench.wait(1)
    await bench.settle()
    go_on.set()
    assert await early == gone
    await bench.settle()
    assert not late.done()
    assert not late_too.done()
    bench.platform.default = RUNNING
    await bench.rounds()
    assert late.result() == late_too.result() == RUNNING
    assert bench.watcher.rounds == 2


async def test_the_watch_outlives_its_first_gang_and_is_not_of_it(bench: Bench) -> None:
    """A shared watch that logged into the first gang's task log would do so for hours after its end."""

    async def gang(name: str, number: int) -> Sighting:
        WHO.set(name)
        return await bench.watcher.sighting(ref(number), known=RUNNING, within=1e6)

    first, second = (asyncio.create_task(gang(f"gang-{n}", n)) for n in range(2))
    bench.tasks += [first, second]
    await bench.settle()
    bench.platform.shown["job-0"] = Sighting(State.SUCCEEDED, "DONE")
    await bench.rounds()
    assert first.done()
    await bench.rounds(3)
    assert not second.done()
    assert bench.platform.asked[-1] == ["job-1"]
    assert set(bench.platform.seen_by) == {"nobody"}


async def test_a_nudge_wakes_who_waits_for_that_job(bench: Bench) -> None:
    tasks = [bench.wait(n, known=RUNNING, within=1e6) for n in range(3)]
    await asyncio.sleep(0)
    bench.watcher.nudge("job-1")  # before any round: the first one answers
    await bench.settle()
    assert [task.done() for task in tasks] == [False, True, False]
    bench.watcher.nudge("job-2")  # with what the newest round said
    await bench.settle()
    assert [task.done() for task in tasks] == [False, True, True]
    assert bench.watcher.rounds == 1
    bench.watcher.nudge("job-of-nobody")


async def test_nobody_waits_for_a_watch_that_was_ended(bench: Bench) -> None:
    task = bench.wait(known=RUNNING, within=1e6)
    await bench.settle()
    bench.platform.error = TargetError("503")
    await bench.rounds()
    assert bench.watcher._task is not None
    bench.watcher._task.cancel()
    with pytest.raises(TargetError):
        await asyncio.wait_for(task, 20)
    bench.platform.error = None
    assert await bench.wait() == RUNNING


async def test_thousands_that_change_at_once_do_not_hold_the_loop(bench: Bench) -> None:
    """Between two batches others get their turn."""
    tasks = [bench.wait(n, known=RUNNING, within=1e6) for n in range(1000)]
    await bench.settle()
    bench.platform.default = replace(RUNNING, restart=1)
    bench.go.set()
    woken: list[int] = []
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0)
        woken.append(sum(task.done() for task in tasks))
    steps = [b - a for a, b in zip(woken, woken[1:])]
    assert max(steps) <= watch.BATCH

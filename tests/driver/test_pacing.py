"""What a driver reads while nothing happens, that limits and wishes come through all the same, and who asks how often."""

from __future__ import annotations

import asyncio
import heapq
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest

from airflow_gpu import stopping as ending
from airflow_gpu.driver import Driver
from airflow_gpu.gang.entries import iso, stop_entry
from airflow_gpu.gang.identity import RunKey
from airflow_gpu.gang.run import Cause, State, Verdict
from airflow_gpu.gang.spec import Gang
from airflow_gpu.observing import GLANCES
from airflow_gpu.pacing import GLANCE, JITTER, LOOK, Pace, Turns
from airflow_gpu.rundir.journal import Journal
from airflow_gpu.rundir.store import Store
from airflow_gpu.targets.base import JobRef, TargetError
from tests.driver.scripted import LIMIT, POLL, Bench, until


class Never(Pace):
    """No gang ever gets a turn: what happens all the same is not left to chance."""

    def turn(self, every: float, cost: float) -> float:
        return float("inf")


class Counted(Store):
    """Counts what is asked of it, by run directory half."""

    asked: ClassVar[Counter[str]] = Counter()

    async def get(self, path: str, start: int = 0, limit: int | None = None) -> bytes:
        self.asked["journal" if "/journal/" in path else "channel"] += 1
        return await super().get(path, start, limit)

    async def names(self, prefix: str = "") -> list[str]:
        self.asked["channel"] += 1
        return await super().names(prefix)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    counts: Counter[str] = Counter()
    monkeypatch.setattr(Counted, "asked", counts)
    return counts


def paced(driver: Driver, pace: Pace) -> Driver:
    """The same run, driven by a new driver with this budget and with counted stores."""
    journal = Journal(Counted(driver.journal.store.uri), driver.journal.path)
    world = replace(driver.world, pace=pace, channel_store=Counted)
    return Driver(journal, driver.key, driver.incarnation, driver.gang, epoch=driver.epoch, world=world)


async def begun(bench: Bench, gang: Gang, pace: Pace, state: State = State.RUNNING) -> Driver:
    """A driver of a run that was submitted, and that the platform shows in this state."""
    driver = await bench.driver(gang)
    await driver.run(until_submitted=True)
    if state is State.RUNNING:
        bench.life(driver, 1, 1)
    bench.target.set(state)
    return paced(driver, pace)


class Going:
    """A driver that runs, and how often its watch has asked the target."""

    def __init__(self, bench: Bench, driver: Driver) -> None:
        self.driver = driver
        self.watcher = driver.world.watcher(bench.target)
        self.task = asyncio.create_task(driver.run())

    async def rounds(self, count: int) -> None:
        goal = self.watcher.rounds + count
        await until(lambda: self.task.done() or self.watcher.rounds >= goal)
        assert not self.task.done(), self.task.result()

    async def verdict(self) -> Verdict:
        found = await asyncio.wait_for(self.task, LIMIT)
        assert found is not None
        return found

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


# -- the budget itself ---------------------------------------------------------------------------


def played(gangs: int, cost: float, seconds: float, every: float = 5.0) -> tuple[float, list[list[float]]]:
    """Requests in that time on a clock of its own, and the moments at which each gang was read."""
    now = [50_000.0]
    pace = Pace(200.0, lambda: now[0])
    turns = [Turns(pace, every) for _ in range(gangs)]
    due = [(now[0] + turn.left(cost), number) for number, turn in enumerate(turns)]
    read: list[list[float]] = [[] for _ in turns]
    heapq.heapify(due)
    end, requests = now[0] + seconds, 0.0
    while due[0][0] < end:
        now[0], number = heapq.heappop(due)
        read[number].append(now[0])
        requests += cost
        heapq.heappush(due, (now[0] + turns[number].left(cost), number))
    return requests, read


@pytest.mark.parametrize("gangs", [1, 10, 100, 1000, 5000])
@pytest.mark.parametrize("cost", [LOOK, GLANCE])
def test_requests_are_bounded_and_shared_evenly(gangs: int, cost: float) -> None:
    seconds = 1000.0
    requests, read = played(gangs, cost, seconds)
    # What all may ask, with the first turns, which may come together.
    assert requests <= 200.0 * seconds + min(gangs * cost, 200.0 * 5.0 * (1 + JITTER))
    interval = max(5.0, gangs * cost / 200.0)
    for moments in read:
        assert len(moments) >= seconds / (interval * (1 + JITTER)) - 2
        gaps = [b - a for a, b in zip(moments, moments[1:])]
        assert min(gaps, default=5.0) >= 5.0
        assert max(gaps, default=5.0) <= interval * (1 + JITTER) + 5.0


def test_a_gang_that_changes_often_takes_nothing_from_the_others() -> None:
    now = [0.0]
    pace = Pace(200.0, lambda: now[0])
    busy, other = Turns(pace, 5.0), Turns(pace, 5.0)
    moment = busy.left(LOOK)
    for _ in range(10_000):  # looked at ten thousand times between two turns
        assert busy.left(LOOK) == moment
    assert other.left(LOOK) <= 5.0 * (1 + JITTER) + LOOK / 200.0


def test_the_interval_shrinks_again_when_gangs_leave() -> None:
    now = [0.0]
    pace = Pace(200.0, lambda: now[0])
    for _ in range(5000):
        Turns(pace, 5.0).left(LOOK)
    last = Turns(pace, 5.0)
    assert last.left(LOOK) >= 5000 * LOOK / 200.0 - 1
    now[0] += last.left(LOOK) + 1
    assert last.left(LOOK) <= 5.0 * (1 + JITTER)


# -- what is read --------------------------------------------------------------------------------


async def test_many_gangs_ask_no_more_of_the_store_than_the_budget(bench: Bench, asked: Counter[str]) -> None:
    """Forty gangs that would each read twenty times a second."""
    gangs, rate = 40, 300.0
    pace, going = Pace(rate), []
    for number in range(gangs):
        bench.key = RunKey("tests", "dag", "run", "task", number)
        going.append(Going(bench, await begun(bench, bench.gang(), pace)))
    for one in going:
        await until(lambda one=one: one.driver._observer.seen is not None)
    asked.clear()
    start = time.monotonic()
    await going[-1].rounds(100)
    took, requests = time.monotonic() - start, asked.total()
    for one in going:
        await one.stop()
    # A look that had begun when the counting began, or has not ended, on top for each gang.
    assert requests <= rate * took + gangs * 2 * LOOK
    assert requests > 0


async def test_nothing_is_read_while_nothing_changes_and_it_is_not_ones_turn(
    bench: Bench, asked: Counter[str]
) -> None:
    going = Going(bench, await begun(bench, bench.gang(), Never()))
    await until(lambda: going.driver._observer.seen is not None)
    await going.rounds(5)
    asked.clear()
    await going.rounds(50)
    assert asked.total() == 0
    await going.stop()


async def test_a_queued_gang_costs_a_look_at_its_journal(bench: Bench, asked: Counter[str]) -> None:
    """There is nothing of it on the channel yet; a platform's word may lag, so that is looked at too, rarely."""
    going = Going(bench, await begun(bench, bench.gang(), Pace(1e6), State.QUEUED))
    await until(lambda: going.driver._observer.seen is not None)
    await until(lambda: asked["journal"] > 2)
    asked.clear()
    await until(lambda: asked["journal"] >= 5 * GLANCES)
    await going.stop()
    assert 0 < asked["channel"] <= 6


async def test_a_life_that_the_platform_has_not_noticed_is_seen_all_the_same(bench: Bench) -> None:
    going = Going(bench, await begun(bench, bench.gang(), Pace(1e6), State.QUEUED))
    await going.rounds(5)
    bench.life(going.driver, 1, 1)
    await until(lambda: any("life 1" in line for line in bench.said))
    await going.stop()


async def test_a_change_is_looked_at_at_once(bench: Bench) -> None:
    """Also when it is nobody's turn: and what the ranks wrote in the meantime is read before anything is decided."""
    going = Going(bench, await begun(bench, bench.gang(), Never(), State.QUEUED))
    await going.rounds(5)
    bench.life(going.driver, 1, 1), bench.ends(going.driver, 1)
    bench.target.set(State.SUCCEEDED)
    assert (await going.verdict()).success


# -- limits --------------------------------------------------------------------------------------


def waited(bench: Bench, seconds: float) -> None:
    """The platform shows its state for so long already."""
    bench.target.jobs[bench.target.submitted[-1]]["since"] = time.time() - seconds


async def test_waiting_too_long_in_the_queue(bench: Bench) -> None:
    driver = await begun(bench, bench.gang(placement={"max_wait": 60}), Never(), State.QUEUED)
    waited(bench, 59.5)
    assert (await Going(bench, driver).verdict()).cause is Cause.QUEUED_TOO_LONG


async def test_not_starting_in_time(bench: Bench) -> None:
    """Counted from when it was first seen so: the platform's clock may be an hour off."""
    gang = bench.gang(placement={"start_timeout": 0.5}, recovery={"mode": "never"})
    driver = await begun(bench, gang, Never(), State.STARTING)
    assert (await Going(bench, driver).verdict()).cause is Cause.NOT_STARTED


async def test_running_too_long(bench: Bench) -> None:
    driver = await begun(bench, bench.gang(time_limit=60), Never(), State.STARTING)
    ago = time.time() - 60 - 120 + 0.5
    life = {"v": 1, "kind": "life", "life": 1, "attempt": 1, "job": "j", "restart": 0}
    bench.write(driver, "lives/0001.json", {**life, "nodes": 1, "processes": 1, "at": iso(ago), "from": None})
    bench.target.set(State.RUNNING)
    waited(bench, 180)
    assert (await Going(bench, driver).verdict()).cause is Cause.TIMED_OUT


async def test_the_deadline(bench: Bench) -> None:
    bench.skew = -59.0
    driver = await bench.driver(bench.gang(placement={"deadline": 60}))
    await driver.run(until_submitted=True)
    bench.life(driver, 1, 1)
    bench.skew = 0.0
    found = await Going(bench, paced(driver, Never())).verdict()
    assert (found.outcome, found.cause) == ("failed", Cause.STOPPED)
    assert "deadline" in found.message


@pytest.mark.parametrize("how", ["no answer", "no connection", "a word that is in no table"])
async def test_out_of_sight_for_too_long(bench: Bench, how: str) -> None:
    driver = await begun(bench, bench.gang(recovery={"unknown_limit": 1.0}), Never())
    going = Going(bench, driver)
    await going.rounds(5)
    begin = time.time()

    async def fails() -> None:
        raise TargetError("503")

    def cannot() -> None:
        raise TargetError("API server away")

    if how == "no answer":
        bench.target.before["observe"] = fails
    elif how == "no connection":
        bench.asked_for_target = cannot
        going.watcher.nudge(bench.target.submitted[-1])
    else:
        bench.target.set(State.UNKNOWN)
    found = await going.verdict()
    assert found.cause is Cause.LOST_SIGHT
    # Never earlier than was asked for; how much later is the machine's business.
    assert found.at - begin >= 0.9
    assert len([line for line in bench.said if "does not answer" in line]) <= 1
    assert bench.target.cancelled == []


async def test_an_outage_is_said_once_in_each_log(bench: Bench) -> None:
    """Whatever the target says each time: request ids, times, other words."""
    going = Going(bench, await begun(bench, bench.gang(), Pace(1e6)))
    await going.rounds(5)
    count = [0]

    async def fails() -> None:
        count[0] += 1
        raise TargetError(f"503, request {count[0]}")

    bench.target.before["observe"] = fails
    await until(lambda: count[0] > 20)
    bench.target.before.clear()
    await until(lambda: bench.said[-1].startswith("attempt 1 on scripted: running"))
    assert len([line for line in bench.said if "does not answer" in line]) == 1
    await going.stop()


async def test_an_outage_counts_from_its_beginning(bench: Bench) -> None:
    """The gang hears of it late, when half of the limit is over: the limit is not counted anew."""
    gang = bench.gang(recovery={"unknown_limit": 600})
    going = Going(bench, await begun(bench, gang, Never()))
    await going.rounds(5)
    begin = time.time()

    async def fails() -> None:
        raise TargetError("503")

    bench.target.before["observe"] = fails
    await going.rounds(25)
    told = time.time()
    assert going.driver._observer.seen is not None
    assert going.driver._observer.seen.state is State.RUNNING
    going.watcher.nudge(bench.target.submitted[-1])
    await until(lambda: going.driver._observer.seen.state is State.UNKNOWN)
    assert going.driver._observer.seen.since < begin + (told - begin) / 2
    await going.stop()


# -- wishes --------------------------------------------------------------------------------------


async def test_a_stop_of_the_same_process_is_seen_at_once(bench: Bench) -> None:
    going = Going(bench, await begun(bench, bench.gang(), Never()))
    await going.rounds(5)

    async def deaf(job: JobRef, *, grace: float, since: float) -> None:
        bench.target.cancelled.append(job.name)

    bench.target.cancel = deaf  # type: ignore[method-assign]
    other = Driver(
        Journal(going.driver.journal.store, going.driver.journal.path),
        going.driver.key,
        going.driver.incarnation,
        going.driver.gang,
        epoch=1,
        world=going.driver.world,
    )
    assert await other.stop("user", "marked failed")
    # The platform shows nothing new, so it is the journal that was read again.
    await until(lambda: going.driver.journal.run.attempts[0].stop is not None)
    await going.stop()


async def test_a_stop_of_another_process_is_seen_at_the_next_turn(bench: Bench) -> None:
    going = Going(bench, await begun(bench, bench.gang(), Pace(1e6)))
    await going.rounds(5)
    journal = Journal(Store(going.driver.journal.store.uri), going.driver.journal.path)
    await journal.refresh()
    await journal.append(stop_entry(1, "user", "swept"), epoch=1, now=time.time())
    found = await going.verdict()
    assert (found.outcome, found.cause) == ("cancelled", Cause.STOPPED)
    assert bench.target.cancelled


async def test_the_end_is_judged_by_the_journal_as_it_is_then(bench: Bench) -> None:
    """Another process journals a stop and ends the job: that is no accident of the platform's."""
    going = Going(bench, await begun(bench, bench.gang(), Never()))
    await going.rounds(5)
    journal = Journal(Store(going.driver.journal.store.uri), going.driver.journal.path)
    await journal.refresh()
    await journal.append(stop_entry(1, "user", "swept"), epoch=1, now=time.time())
    bench.target.set(State.PREEMPTED)
    found = await going.verdict()
    assert (found.outcome, found.cause) == ("cancelled", Cause.STOPPED)
    assert len(bench.target.submitted) == 1


async def stopping(bench: Bench, pace: Pace) -> Going:
    """A gang that is to end, on a platform that hears it and does nothing."""
    driver = await begun(bench, bench.gang(), pace)

    async def deaf(job: JobRef, *, grace: float, since: float) -> None:
        bench.target.cancelled.append(job.name)

    bench.target.cancel = deaf  # type: ignore[method-assign]
    await driver.journal.refresh()
    await driver.journal.append(stop_entry(1, "user", "enough"), epoch=1, now=time.time())
    going = Going(bench, driver)
    await until(lambda: bench.target.cancelled)
    return going


async def test_a_cancel_that_was_heard_is_not_sent_each_round(bench: Bench) -> None:
    going = await stopping(bench, Pace(1e6))
    await going.rounds(50)
    # Once before the first look, once with what that showed.
    assert len(bench.target.cancelled) <= 2
    await going.stop()


async def test_a_cancel_is_sent_again_from_time_to_time(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ending, "CANCEL_EVERY", 5 * POLL)
    going = await stopping(bench, Pace(1e6))
    await until(lambda: len(bench.target.cancelled) > 5)
    bench.target.set(State.CANCELLED)
    assert (await going.verdict()).cause is Cause.STOPPED


async def test_a_cancel_is_sent_again_when_the_gang_goes_on(bench: Bench) -> None:
    """The platform has started it again after the first one."""
    going = await stopping(bench, Never())
    await going.rounds(10)
    before = len(bench.target.cancelled)
    bench.target.set(State.QUEUED)
    await until(lambda: len(bench.target.cancelled) > before)
    await going.stop()


async def test_a_cancel_that_was_not_heard_is_sent_again(bench: Bench) -> None:
    driver = await begun(bench, bench.gang(), Pace(1e6))
    failures = [3]

    async def fails() -> None:
        if failures[0]:
            failures[0] -= 1
            raise TargetError("503")

    bench.target.before["cancel"] = fails
    await driver.journal.refresh()
    await driver.journal.append(stop_entry(1, "user", "enough"), epoch=1, now=time.time())
    assert (await Going(bench, driver).verdict()).cause is Cause.STOPPED
    assert failures == [0]

"""The driver among accidents: lost replies, hiccups, moved channels, wishes that come at the wrong moment."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from airflow_gpu.driver import Driver
from airflow_gpu.gang.entries import stop_entry
from airflow_gpu.gang.run import Cause, State, Verdict
from airflow_gpu.rundir.store import StoreError
from airflow_gpu.targets.base import NotConfigured, TargetError
from tests.driver.scripted import LIMIT, Bench, kinds, until


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


async def verdict(driver: Driver) -> Verdict:
    found = await asyncio.wait_for(driver.run(), LIMIT)
    assert found is not None
    return found


class Died(Exception):
    """The worker, at this point."""


def once(error: Exception):
    """A hook that fails the first time."""
    left = [error]

    async def hook() -> None:
        if left:
            raise left.pop()

    return hook


async def test_a_success_that_airflow_did_not_hear_of_is_told_again(bench: Bench) -> None:
    """The worker died with the event in its hands: the retry computes nothing."""
    gang = bench.gang()
    driver = await bench.driver(gang, max_tries=1)
    task = asyncio.create_task(verdict(driver))
    await until(lambda: bench.target.submitted)
    bench.life(driver, 1, 1), bench.ends(driver, 1)
    bench.target.set(State.SUCCEEDED)
    assert (await task).success
    again = await bench.driver(gang, "ti-2", 2, max_tries=1)
    assert (await verdict(again)).success
    assert len(bench.target.submitted) == 1
    cleared = await bench.driver(gang, "ti-3", 3, max_tries=3)
    assert cleared.incarnation != driver.incarnation


async def test_a_look_from_before_the_submit_says_nothing_of_it(bench: Bench) -> None:
    """The first submit fails, the look says gone, the second one works: its job is not taken for gone."""
    bench.target.before["submit"] = once(TargetError("503"))
    driver = await bench.driver(bench.gang())
    task = asyncio.create_task(verdict(driver))
    await until(lambda: bench.target.submitted)
    await asyncio.sleep(0.2)
    assert kinds(driver) == ["owner", "attempt", "submitted"]
    bench.life(driver, 1, 1), bench.ends(driver, 1)
    bench.target.set(State.SUCCEEDED)
    assert (await task).success


async def test_a_lost_reply_is_found(bench: Bench) -> None:
    """The submit got there, its reply did not: that is journalled as submitted, so the task can defer."""

    async def lost() -> None:
        raise TargetError("connection reset")

    bench.target.before["submitted"] = lost
    driver = await bench.driver(bench.gang())
    assert await asyncio.wait_for(driver.run(until_submitted=True), LIMIT) is None
    assert kinds(driver) == ["owner", "attempt", "submitted"]
    assert len(bench.target.submitted) == 1


async def test_a_connection_that_cannot_be_read_is_no_end(bench: Bench) -> None:
    """A metadata database that is away for a moment says nothing about the gang."""
    driver = await bench.driver(bench.gang())
    assert await driver.run(until_submitted=True) is None
    task = asyncio.create_task(verdict(driver))
    bench.asked_for_target = lambda: (_ for _ in ()).throw(TargetError("API server restarts"))
    await until(lambda: any("restarts" in line for line in bench.said))
    bench.asked_for_target = lambda: None
    bench.life(driver, 1, 1), bench.ends(driver, 1)
    bench.target.set(State.SUCCEEDED)
    assert (await task).success
    assert bench.target.cancelled == []


async def test_a_wish_to_end_is_tried_until_it_is_heard(bench: Bench) -> None:
    """The only cancel fails once, and so does the store."""
    driver = await bench.driver(bench.gang())
    await driver.run(until_submitted=True)
    bench.target.before["cancel"] = once(TargetError("503"))
    real, left = driver.journal.store.get, [StoreError("503")]

    async def flaky(*args, **kwargs):
        if left:
            raise left.pop()
        return await real(*args, **kwargs)

    driver.journal.store.get = flaky  # type: ignore[method-assign]
    assert await driver.stop("user", "marked failed")
    assert bench.target.cancelled


@pytest.mark.parametrize("first", ["the stop", "the end"])
async def test_a_wish_to_end_outlives_the_attempt(bench: Bench, first: str) -> None:
    """It comes just as the platform preempts the gang: nothing is started in its place."""
    driver = await bench.driver(bench.gang(recovery={"backoff": 0.5, "backoff_max": 0.5}))
    await driver.run(until_submitted=True)
    bench.life(driver, 1, 1)
    task = asyncio.create_task(verdict(driver))
    if first == "the stop":
        bench.target.before["cancel"] = lambda: asyncio.sleep(0, bench.target.set(State.PREEMPTED))
        assert await driver.stop("user", "marked failed")
    else:
        bench.target.set(State.PREEMPTED)
        await until(lambda: "over preempted" in kinds(driver))
        assert await driver.stop("user", "marked failed")
    found = await task
    assert (found.outcome, found.cause) == ("cancelled", Cause.STOPPED)
    assert len(bench.target.submitted) == 1


async def test_the_channel_is_where_it_was_journalled(bench: Bench, tmp_path: Path) -> None:
    """The connection's folder was changed in the middle: the fence still stands where the job looks."""
    gang = bench.gang()
    driver = await bench.driver(gang)
    await driver.run(until_submitted=True)
    bench.life(driver, 1, 1)
    bench.ends(driver, 1, 75)
    before = bench.folder(driver)
    bench.target.root = tmp_path / "moved"
    bench.target.jobs.clear()
    later = await bench.driver(gang)
    task = asyncio.create_task(verdict(later))
    await until(lambda: len(bench.target.submitted) == 2)
    assert (before / "lives" / "0002.json").exists(), "the fence of attempt 1"
    assert later.journal.run.attempts[1].first_life == 3
    task.cancel()


async def test_an_earlier_life_that_succeeded_closes_the_attempt(bench: Bench) -> None:
    """Its record comes late, when the platform has started the gang again already."""
    driver = await bench.driver(bench.gang())
    await driver.run(until_submitted=True)
    bench.life(driver, 1, 1), bench.life(driver, 2, 1, restart=1)
    task = asyncio.create_task(verdict(driver))
    await asyncio.sleep(0.1)
    bench.ends(driver, 1)
    bench.target.set(State.FAILED)
    assert (await task).success


@pytest.mark.parametrize("junk", ["{", "{}", '{"attempt": "x"}'])
async def test_an_entry_that_cannot_be_read_is_no_end(bench: Bench, junk: str) -> None:
    """Somebody's half-written file among the lives: fenced around, not spun on."""
    driver = await bench.driver(bench.gang())
    await driver.run(until_submitted=True)
    bench.life(driver, 1, 1), bench.ends(driver, 1)
    bench.write(driver, "lives/0002.json", junk)
    bench.target.set(State.SUCCEEDED)
    assert (await verdict(driver)).success
    assert (bench.folder(driver) / "lives" / "0003.json").exists()


async def test_fresh_stays_fresh(bench: Bench) -> None:
    """Cleared to start afresh; the fresh attempt is lost before it had a life: the next one is fresh as well."""
    gang = bench.gang(recovery={"on_clear": "fresh"})
    first = await bench.driver(gang)
    await first.run(until_submitted=True)
    bench.life(first, 1, 1)
    cleared = await bench.driver(gang, "ti-2", 2, max_tries=2)
    task = asyncio.create_task(verdict(cleared))
    await until(lambda: len(bench.target.submitted) == 2)
    bench.target.set(State.PREEMPTED)
    await until(lambda: len(bench.target.submitted) == 3)
    assert [a.resume for a in cleared.journal.run.attempts] == [True, False, False]
    task.cancel()


async def test_a_new_try_is_not_judged_by_an_old_limit(bench: Bench) -> None:
    """Cleared while the attempt was ending because of its time limit."""
    gang = bench.gang()
    first = await bench.driver(gang)
    await first.run(until_submitted=True)
    await first.stop("time_limit", "ran too long")
    second = await bench.driver(gang, "ti-2", 2, max_tries=2)
    task = asyncio.create_task(verdict(second))
    await until(lambda: len(bench.target.submitted) == 2)
    task.cancel()


async def test_what_was_rendered_when_the_attempt_began_is_submitted(bench: Bench) -> None:
    """The first try died between journal and submit; the adopter renders another request."""
    driver = await bench.driver(bench.gang(nodes=2, env={"TRY": "1"}), max_tries=1)

    async def dies() -> None:
        raise Died

    bench.target.before["submit"] = dies
    with pytest.raises(Died):
        await driver.run()
    bench.target.before.clear()
    adopter = await bench.driver(bench.gang(nodes=4, env={"TRY": "2"}), "ti-2", 2, max_tries=1)
    await adopter.run(until_submitted=True)
    job = bench.target.jobs[bench.target.submitted[0]]["job"]
    assert (job.nodes, job.env) == (2, {"TRY": "1"})


async def test_unknown_in_two_words_is_still_unknown(bench: Bench) -> None:
    driver = await bench.driver(bench.gang(recovery={"unknown_limit": 0.5}))
    await driver.run(until_submitted=True)
    bench.target.set(State.UNKNOWN)
    flip = [0]

    async def every_other() -> None:
        flip[0] += 1
        if flip[0] % 2:
            raise TargetError("no answer")

    bench.target.before["observe"] = every_other
    assert (await verdict(driver)).cause is Cause.LOST_SIGHT


async def test_output_without_newlines_is_shown_and_bounded(bench: Bench) -> None:
    """Progress bars write carriage returns; some programs write no line end at all."""
    driver = await bench.driver(bench.gang())
    await driver.run(until_submitted=True)
    bench.life(driver, 1, 1)
    bench.write(
        driver,
        "lives/0001/logs/rank-00000.log",
        "\r".join(f"{i}%" for i in range(100)) + "x" * 3_000_000 + "END",
    )
    task = asyncio.create_task(verdict(driver))
    await until(lambda: any(line.endswith("END") for line in bench.log))
    bench.ends(driver, 1)
    bench.target.set(State.SUCCEEDED)
    assert (await task).success
    assert max(map(len, bench.log)) < 20_000
    assert bench.target.forgotten == bench.target.submitted


async def test_what_is_not_there_is_said_at_once(bench: Bench) -> None:
    """A mistyped connection, or a Variable that nobody made: waiting would not help."""
    driver = await bench.driver(bench.gang())

    def missing() -> None:
        raise NotConfigured("there is no connection 'gpu_prod'")

    bench.asked_for_target = missing
    found = await verdict(driver)
    assert (found.outcome, found.cause) == ("failed", Cause.REJECTED)
    assert "there is no connection 'gpu_prod'" in found.message


async def test_another_program_begins_again_and_says_so(bench: Bench) -> None:
    """Cleared after the command was changed: the old checkpoint is not its own. Unless it is told otherwise."""
    first = await bench.driver(bench.gang(env={"RATE": "1"}))
    await first.run(until_submitted=True)
    bench.life(first, 1, 1)
    changed = await bench.driver(bench.gang(env={"RATE": "2"}), "ti-2", 2, max_tries=2)
    assert "env.RATE changed" in bench.note
    assert "IT BEGINS AGAIN" in bench.note
    task = asyncio.create_task(verdict(changed))
    await until(lambda: len(bench.target.submitted) == 2)
    assert [a.resume for a in changed.journal.run.attempts] == [True, False]
    bench.life(changed, 3, 2)
    stays = bench.gang(env={"RATE": "3"}, checkpointing={"on_change": "resume"})
    third = await bench.driver(stays, "ti-3", 3, max_tries=3)
    assert "goes on from the newest all the same" in bench.note
    again = asyncio.create_task(verdict(third))
    await until(lambda: len(bench.target.submitted) == 3)
    assert third.journal.run.attempts[-1].resume
    task.cancel(), again.cancel()


async def test_what_an_adopted_attempt_computes_goes_on(bench: Bench) -> None:
    """The DAG changed while a worker died: what runs is let run, and only a next attempt begins again."""
    first = await bench.driver(bench.gang(env={"RATE": "1"}))
    await first.run(until_submitted=True)
    bench.life(first, 1, 1)
    adopter = await bench.driver(bench.gang(env={"RATE": "2"}), "ti-2", 2)
    assert "what runs goes on" in bench.note
    task = asyncio.create_task(verdict(adopter))
    await asyncio.sleep(0.3)
    assert len(bench.target.submitted) == 1
    bench.target.set(State.PREEMPTED)
    await until(lambda: len(bench.target.submitted) == 2)
    assert [a.resume for a in adopter.journal.run.attempts] == [True, False]
    task.cancel()


async def test_what_a_lost_run_directory_left_is_ended_first(bench: Bench, tmp_path: Path) -> None:
    """By its labels on the target; another installation's job of the same task is not touched."""
    import shutil
    from dataclasses import replace

    lost = await bench.driver(bench.gang())
    await lost.run(until_submitted=True)
    [name] = bench.target.submitted
    job = bench.target.jobs[name]["job"]
    theirs = replace(job, name="theirs", labels={**job.labels, "airflow-gpu/installation": "other"})
    bench.target.jobs["theirs"] = {**bench.target.jobs[name], "job": theirs}
    shutil.rmtree(tmp_path / "state")
    again = await bench.driver(bench.gang())
    await again.run(until_submitted=True)
    assert bench.target.cancelled == [name]
    assert len(bench.target.submitted) == 2
    assert bench.target.jobs["theirs"]["state"] is State.RUNNING


async def test_a_try_that_slept_does_not_take_the_run_from_its_successor(
    bench: Bench, tmp_path: Path
) -> None:
    """A worker that was frozen inside of its first write wakes up: by then Airflow has given it up and ends it."""
    import json

    from airflow_gpu.gang.ownership import Try
    from airflow_gpu.rundir.slot import take
    from airflow_gpu.rundir.store import Store

    gang = bench.gang()
    living = await bench.driver(gang, "ti-2", 2)

    class Killed(Exception):
        pass

    async def killed() -> None:
        raise Killed

    with pytest.raises(Killed):
        await take(
            Store(f"file://{bench.state}"), bench.key, Try("ti-1", 1, 0), on_clear="resume", doubt=killed,
            gang=json.loads(gang.to_json()), digest=gang.digest(), deadline=None, now=0.0,
        )  # fmt: skip
    assert (await living.journal.refresh()).epoch == 1


async def test_a_cleared_task_is_not_deferred_before_its_old_gang_has_ended(bench: Bench) -> None:
    """With no triggerer alive nobody else would end it, or go on from what it saved."""
    gang = bench.gang()
    first = await bench.driver(gang)
    await first.run(until_submitted=True)
    bench.life(first, 1, 1)
    cleared = await bench.driver(gang, "ti-2", 2, max_tries=2)
    assert await asyncio.wait_for(cleared.run(until_submitted=True), LIMIT) is None
    assert bench.target.cancelled == [bench.target.submitted[0]]
    assert len(bench.target.submitted) == 2


async def test_a_worker_does_not_wait_for_ever_for_an_old_gang(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that takes its time to save: it was told, and the rest is the triggerer's."""
    monkeypatch.setattr("airflow_gpu.driver.HOLD_LIMIT", 0.3)
    gang = bench.gang()
    first = await bench.driver(gang)
    await first.run(until_submitted=True)
    bench.life(first, 1, 1)
    [name] = bench.target.submitted
    heard: list[str] = []

    async def stubborn(job, *, grace, since):
        heard.append(job.name)

    monkeypatch.setattr(bench.target, "cancel", stubborn)
    cleared = await bench.driver(gang, "ti-2", 2, max_tries=2)
    assert await asyncio.wait_for(cleared.run(until_submitted=True), LIMIT) is None
    assert set(heard) == {name}
    assert len(bench.target.submitted) == 1


async def test_a_newer_owners_wish_to_end_counts_although_an_older_one_had_it_too(bench: Bench) -> None:
    """Marked failed, then cleared, then marked failed again before the first end was seen: nothing starts."""
    gang = bench.gang()
    first = await bench.driver(gang)
    await first.run(until_submitted=True)
    bench.life(first, 1, 1)
    bench.target.before["cancel"] = lambda: asyncio.sleep(0)
    await first.journal.append(stop_entry(1, "user", "marked failed"), epoch=1, now=time.time())
    second = await bench.driver(gang, "ti-2", 2, max_tries=2)
    assert await second.stop("user", "marked failed again")
    found = await verdict(second)
    assert (found.outcome, found.cause) == ("cancelled", Cause.STOPPED)
    assert len(bench.target.submitted) == 1


async def test_starts_from_further_copies_go_on(bench: Bench) -> None:
    """More attempts than ``fruitless`` allows, none with a checkpoint on the channel: each began further than the last.

    The task log names the step of the copies, and says of no such life that it began at the beginning.
    """
    gang = bench.gang(checkpointing={"local": "/local/ckpt"}, recovery={"fruitless": 2})
    driver = await bench.driver(gang)
    task = asyncio.create_task(verdict(driver))
    for number in range(1, 6):
        await until(lambda number=number: len(bench.target.submitted) >= number)
        life = driver.journal.run.attempts[-1].first_life
        bench.life(driver, life, number)
        bench.target.set(State.RUNNING)
        line = f"attempt {number} on scripted: running, life {life}"
        await until(lambda line=line: line in bench.said)  # what it starts from is not known yet
        start = {"life": life - 1, "step": 100 * number} if number > 1 else None
        bench.write(driver, f"lives/{life:04d}/local.json", {"v": 1, "life": life, "from": start})
        words = f" from the nodes' copies of step {100 * number}" if start else " from the beginning"
        await until(lambda line=line + words: line in bench.said)
        if number < 5:
            bench.target.set(State.PREEMPTED)
    bench.ends(driver, life)
    bench.target.set(State.SUCCEEDED)
    assert (await task).success
    copies = [entry.get("copy") for entry in driver.journal.entries if entry["kind"] == "over"]
    assert copies == [None, 200, 300, 400, 500]


async def test_saves_are_told_with_what_they_cost(bench: Bench) -> None:
    """The first few of a life one by one, then one a minute; what is no save is not told."""
    driver = await bench.driver(bench.gang())
    task = asyncio.create_task(verdict(driver))
    await until(lambda: bench.target.submitted)
    bench.life(driver, 1, 1)
    bench.target.set(State.RUNNING)

    async def saves(step: object, **more: Any) -> None:
        bench.write(driver, "lives/0001/progress.json", {"step": 1, "saved": {"step": step, **more}})
        await asyncio.sleep(0.3)

    await saves("x")
    await saves(10, seconds=1.25, bytes=3 * 2**20)
    await saves(20, seconds=None, bytes=512)
    await saves(30)
    await saves(40)
    told = [line for line in bench.said if line.startswith("checkpoint of step")]
    assert told == [
        "checkpoint of step 10 is saved: 1.2 s, 3.0 MiB",
        "checkpoint of step 20 is saved: 512 B",
        "checkpoint of step 30 is saved",
    ]
    bench.skew = 61.0
    await until(lambda: "checkpoint of step 40 is saved" in bench.said)
    bench.ends(driver, 1)
    bench.target.set(State.SUCCEEDED)
    assert (await task).success

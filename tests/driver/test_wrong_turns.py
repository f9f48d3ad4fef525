"""Wrong turns that the driver once took: each story ends as it should."""

from __future__ import annotations

import asyncio
import json
import time

import pytest

from airflow_gpu.driver import SupersededError
from airflow_gpu.gang.ownership import Try, claim
from airflow_gpu.gang.run import Attempt, Cause, Outcome, Owner, Run, Seed, State, Verdict
from airflow_gpu.record import clean, event_of
from airflow_gpu.rundir.slot import take
from airflow_gpu.rundir.store import Store
from tests.driver.scripted import LIMIT, Bench, kinds, until
from tests.driver.test_driver import verdict


@pytest.fixture
def bench(tmp_path) -> Bench:
    return Bench(tmp_path)


RUN_A, RUN_B = "0/2026-01-01", "0/2026-01-02"


@pytest.mark.parametrize("outcome", ["success", "failed"])
def test_a_dag_run_made_again_inherits_nothing_whatever_its_try(outcome: str) -> None:
    """Its first try never got as far as the run directory."""
    owner = Owner(epoch=1, ti_id="A", try_number=1, at=0.0, max_tries=2, dag_run=RUN_A)
    over = Attempt(1, "g-1", "t", 0.0, 1, outcome=Outcome(Cause.SUCCEEDED, 1.0))
    run = Run(owners=(owner,), attempts=(over,), verdict=Verdict(outcome, Cause.SUCCEEDED, 1.0, 1))
    assert claim(run, Try("B", 2, 2, RUN_B), "resume").action == "new"


def test_clear_is_told_although_the_retries_were_lowered() -> None:
    owner = Owner(epoch=1, ti_id="A", try_number=1, at=0.0, max_tries=2, dag_run=RUN_A)
    over = Attempt(1, "g-1", "t", 0.0, 1, outcome=Outcome(Cause.SUCCEEDED, 1.0))
    run = Run(owners=(owner,), attempts=(over,), verdict=Verdict("success", Cause.SUCCEEDED, 1.0, 1))
    assert claim(run, Try("B", 2, 2, "1/2026-01-05"), "resume").action == "new"


def test_an_old_run_between_attempts_is_ended_before_a_new_one_begins() -> None:
    owner = Owner(epoch=1, ti_id="A", try_number=1, at=0.0, dag_run=RUN_A)
    over = Attempt(1, "g-1", "t", 0.0, 1, outcome=Outcome(Cause.PREEMPTED, 1.0))
    run = Run(owners=(owner,), attempts=(over,))
    assert claim(run, Try("B", 1, 0, RUN_B), "resume").stop


@pytest.mark.parametrize(
    "more", [{"recovery": {"on_clear": "fresh"}}, {"env": {"CODE": "2"}}], ids=["fresh", "changed"]
)
async def test_a_clear_that_begins_again_is_not_answered_with_the_old_success(bench: Bench, more) -> None:
    """It succeeded while no triggerer lived, and Airflow had not heard of it when it was cleared."""
    first = await bench.driver(bench.gang(env={"CODE": "1"}))
    await first.run(until_submitted=True)
    bench.life(first, 1, 1), bench.ends(first, 1)
    bench.target.set(State.SUCCEEDED)
    cleared = await bench.driver(bench.gang(**{"env": {"CODE": "1"}, **more}), "ti-2", 2, max_tries=1)
    task = asyncio.create_task(verdict(cleared))
    await until(lambda: len(bench.target.submitted) == 2)
    bench.life(cleared, 3, 2), bench.ends(cleared, 3)
    bench.target.set(State.SUCCEEDED)
    assert (await task).success
    assert [a.resume for a in cleared.journal.run.attempts] == [True, False]


@pytest.mark.parametrize("text", ["caf\udce9", "a\0b"], ids=["surrogate", "NUL"])
async def test_no_text_of_a_program_stops_the_verdict_or_the_triggerer(bench: Bench, text: str) -> None:
    driver = await bench.driver(bench.gang())
    task = asyncio.create_task(verdict(driver))
    await until(lambda: bench.target.submitted)
    bench.life(driver, 1, 1)
    bench.write(driver, "lives/0001/result.json", json.dumps({text: [text]}))
    bench.ends(driver, 1)
    bench.target.set(State.SUCCEEDED)
    found = await task
    assert found.success
    shown = json.dumps(event_of(found))
    assert "\\u0000" not in shown
    assert "\\udce9" not in shown
    assert clean({"a": ("x\0", 1, None)}) == {"a": ["x\ufffd", 1, None]}


async def seeded(bench: Bench, gang, ti_id: str, number: int, max_tries: int, seed: Seed | None):
    """A try whose yesterday has this checkpoint."""
    real = bench.driver

    async def ask():
        return seed, f"continues from {seed.step}" if seed else "nothing before"

    import tests.driver.scripted as scripted

    async def taking(*args, **more):
        return await take(*args, **more, seed=ask)

    before, scripted.take = scripted.take, taking
    try:
        return await real(gang, ti_id, number, max_tries)
    finally:
        scripted.take = before


async def test_a_checkpoint_of_yesterday_that_is_found_late_is_used_and_one_that_is_gone_is_not(
    bench: Bench,
) -> None:
    yesterday = Seed(bench.target.channel + "/yesterday", 1, 40, "dag/yesterday/task")
    first = await seeded(bench, bench.gang(), "ti-1", 1, 2, None)
    assert first.journal.run.owners[-1].seed is None
    second = await seeded(bench, bench.gang(), "ti-2", 2, 2, yesterday)
    await second.run(until_submitted=True)
    assert second.journal.run.attempts[0].seed == yesterday
    bench.life(second, 1, 1)
    changed = await seeded(bench, bench.gang(env={"CODE": "2"}), "ti-3", 3, 3, None)
    await asyncio.wait_for(changed.run(until_submitted=True), LIMIT)
    assert changed.journal.run.attempts[-1].seed is None, (
        "asked anew: nothing of yesterday fits the new program"
    )


async def test_what_is_from_before_a_start_from_nothing_never_counts_again(bench: Bench) -> None:
    """Cleared to begin again, preempted before it saved: the next attempt does not take the old checkpoint."""
    gang = bench.gang(recovery={"on_clear": "fresh"})
    first = await bench.driver(gang)
    await first.run(until_submitted=True)
    bench.life(first, 1, 1)
    manifest = {"v": 1, "life": 1, "step": 107, "world_size": 1, "files": []}
    bench.write(first, "checkpoints/0001/step-000000107/manifest.json", manifest)
    cleared = await bench.driver(gang, "ti-2", 2, max_tries=2)
    task = asyncio.create_task(verdict(cleared))
    await until(lambda: len(bench.target.submitted) == 2)
    since = cleared.journal.run.attempts[1].since
    assert since > 1
    bench.life(cleared, since, 2), bench.ends(cleared, since, 75)
    bench.target.set(State.PREEMPTED)
    await until(lambda: len(bench.target.submitted) == 3)
    third = cleared.journal.run.attempts[2]
    assert (third.resume, third.since, third.seed) == (True, since, None)
    assert cleared.journal.run.attempts[1].outcome.checkpoint is None
    job = json.loads((bench.folder(cleared) / "payload/0003/job.json").read_text())
    assert job["since"] == since
    task.cancel()


async def test_a_driver_of_an_older_run_does_not_end_the_wanted_one(bench: Bench) -> None:
    """It had not started anything when a newer run of the task began."""
    old = await bench.driver(bench.gang())
    begun = await take(
        Store(f"file://{bench.state}"), bench.key, Try("ti-9", 1, 0, RUN_B), on_clear="resume",
        gang=json.loads(bench.gang().to_json()), digest=bench.gang().digest(), deadline=None, now=time.time(),
    )  # fmt: skip
    assert begun.claim.stop, "the older one is to be ended first"
    from airflow_gpu.rundir.slot import _begin

    await _begin(Store(f"file://{bench.state}"), bench.key, 2, time.time())
    with pytest.raises(SupersededError):
        await old.run()
    assert bench.target.submitted == []


async def test_clocks_that_are_far_apart_fail_nothing(bench: Bench) -> None:
    """The triggerer is an hour ahead of its platform, and the ranks' records come half a second late."""
    bench.skew = 3600.0
    driver = await bench.driver(bench.gang(recovery={"mode": "never"}))
    task = asyncio.create_task(verdict(driver))
    await until(lambda: bench.target.submitted)
    await asyncio.sleep(0.3)
    bench.life(driver, 1, 1)
    bench.target.set(State.SUCCEEDED)
    await asyncio.sleep(0.5)
    bench.ends(driver, 1)
    assert (await task).success, kinds(driver)


async def test_a_target_that_hangs_or_errs_does_not_keep_the_others_from_being_asked(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("airflow_gpu.targets.watch.CALL_LIMIT", 0.3)

    class Other:
        name, channel = "other", "file:///nowhere"

        async def offers(self, gang):
            raise KeyError("whatever a client library raises")

    driver = await bench.driver(bench.gang().replace(targets=["other", "scripted", "missing"]))
    resolve = driver.world.target

    async def target(name: str):
        if name == "missing":
            await asyncio.sleep(1)
        return Other() if name == "other" else await resolve(name)

    object.__setattr__(driver.world, "target", target)
    assert await asyncio.wait_for(driver.run(until_submitted=True), LIMIT) is None
    reasons = {o["target"]: o["reason"] for o in driver.journal.run.attempts[0].offer["others"]}
    assert "KeyError" in reasons["other"]


def test_moves_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A target that shows free nodes and queues the gang all the same is not gone back to, and max_wait counts through."""
    from dataclasses import replace

    from airflow_gpu.gang import lifecycle
    from tests.gang.test_lifecycle import SEVERAL, _run, _seen

    moved = _run(outcome=Outcome(cause=Cause.MOVED, at=600.0, epoch=1)).attempts[0]
    current = replace(moved, number=2, name="g-2", target="u", at=600.0, outcome=None)
    run = replace(_run(), attempts=(moved, current))
    waits = replace(_seen(State.QUEUED), attempt=2, since=600.0, elsewhere="t")
    assert isinstance(lifecycle.step(run, SEVERAL, waits, 7000, 1), lifecycle.Watch), "not back to t"
    action = lifecycle.step(run, SEVERAL, waits, 7200, 1)
    assert isinstance(action, lifecycle.RequestStop)
    assert action.reason == "queued_too_long"

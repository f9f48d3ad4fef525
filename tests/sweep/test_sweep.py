"""Every case of the table on a real local cluster: what is ended, what is left alone, and what races do."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from airflow_gpu.gang.identity import RunKey, attempt_name
from airflow_gpu.gang.run import Cause, State
from airflow_gpu.rundir.store import Store
from airflow_gpu.sweeping.decide import COMING, ENDED
from airflow_gpu.sweeping.looking import Known, look
from airflow_gpu.targets.base import TargetError
from tests.beds.stores.servers import Server
from tests.beds.stores.started import started
from tests.sweep.conftest import Plant, cases, only


async def test_unwanted_is_ended(plant: Plant) -> None:
    """Marked failed while nobody could tell it: ended with a notice, closed, fenced, with a verdict."""
    held = await plant.begin(plant.key(), "failed")
    report = await plant.sweep()
    item = only(report, "unwanted")
    assert (item.run, item.task, item.problem, report.problems) == ("dag/r1/fit", "failed", False, [])
    assert "ended" in item.done
    run = (await plant.read(held)).run
    assert run.verdict is not None
    assert (run.verdict.outcome, run.verdict.cause) == ("cancelled", Cause.STOPPED)
    [attempt] = run.attempts
    assert attempt.stop is not None
    assert "task is failed" in attempt.stop.detail
    assert await plant.state(held) is State.CANCELLED
    lives = await plant.driver(held).channel(attempt).lives()
    assert [life.fence for life in lives] == [False, True]
    # Once more: nothing is left to do.
    again = await plant.sweep()
    assert (cases(again), again.ended, again.problems) == ([], [], [])


@pytest.fixture(scope="module")
def s3() -> Iterator[Server]:
    with started() as servers:
        yield servers["s3"]


async def test_a_bucket_that_does_not_exist_holds_up_nobody(
    plant: Plant, s3: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such runs take all turns there are, and the one behind them is ended all the same; each is told by its name."""
    monkeypatch.setattr("airflow_gpu.sweeping.sweep.ENDINGS", 2)
    plant.open = lambda uri: Store(uri, s3.options if uri.startswith("s3:") else None)
    for task in ("a", "b", "c"):
        await plant.never_submitted(await plant.own(plant.key(task)), "s3://nobody-made-this")
    held = await plant.begin(plant.key("fit"), "failed")
    report = await plant.sweep(options={"limit": 20.0})
    assert await plant.state(held) is State.CANCELLED
    assert [item.run for item in report.items if item.case.value == "unwanted" and not item.problem] == [
        "dag/r1/fit"
    ]
    told = [line for line in report.problems if "the bucket or container does not exist" in line]
    assert [line[:6] for line in told] == ["dag-a-", "dag-b-", "dag-c-"]
    assert not report.json()["ok"]


async def test_a_channel_that_does_not_answer_is_given_up(plant: Plant) -> None:
    """By this clock a second takes a minute; the wait is for the channel alone, not for the whole of the limit."""
    (plant.root / "file").write_text("not a folder")
    begun = time.time()
    plant.now = lambda: begun + 60 * (time.time() - begun)
    await plant.never_submitted(await plant.own(plant.key("lost")), f"file://{plant.root}/file/channel")
    [line] = (await plant.sweep(options={"limit": 2.0})).problems
    assert "could not be ended" in line.lower()
    assert "Not a directory" in line


async def test_absent_is_unwanted(plant: Plant) -> None:
    """The DAG run was deleted."""
    held = await plant.begin(plant.key(), "deferred")
    del plant.airflow.told[held.key]
    assert only(await plant.sweep(), "unwanted").task == "not there"
    assert await plant.state(held) is State.CANCELLED


async def test_wanted_is_left_alone(plant: Plant) -> None:
    """In each state in which a try has it or will come; also a cleared task whose new try has not begun yet."""
    held = await plant.begin(plant.key())
    before = await plant.kinds(held)
    for state in (None, *sorted(COMING - {"none"})):
        plant.airflow.told[held.key] = state
        report = await plant.sweep()
        assert (cases(report), report.problems) == (["wanted"], []), state
        assert only(report, "wanted").since is not None
    assert await plant.kinds(held) == before
    assert not (await plant.state(held)).ended


async def test_another_airflows_absence_ends_nothing(plant: Plant) -> None:
    """An Airflow that was merely configured and knows none of the runs may be the wrong one."""
    done = await plant.own(plant.key("quick"), gang := plant.gang(command=["true"]))
    await plant.finish(done, gang)
    held = await plant.begin(plant.key(), "deferred")
    plant.airflow.told.clear()
    plant.airflow.own = False
    report = await plant.sweep()
    assert cases(report) == ["undecided"]
    assert "another one" in report.airflow_trouble
    assert not (await plant.state(held)).ended
    # It knows a run that is over: then it is the right one.
    plant.airflow.told[done.key] = "success"
    assert only(await plant.sweep(), "unwanted").done.startswith("ended")
    assert await plant.state(held) is State.CANCELLED


async def test_airflow_does_not_answer(plant: Plant) -> None:
    """Nothing that depends on the answer is ended, and the report says so; an orphan is, since it does not."""
    held = await plant.begin(plant.key(), "failed")
    orphan = await _orphan(plant, plant.key("other"))
    plant.airflow.down = True
    report = await plant.sweep()
    assert cases(report) == ["orphan", "undecided"]
    assert "the database is away" in only(report, "undecided").detail
    assert len(report.problems) == 1
    assert not (await plant.state(held)).ended
    assert await plant.state(orphan) is State.CANCELLED


async def test_dry_run(plant: Plant) -> None:
    held = await plant.begin(plant.key(), "success")
    orphan = await _orphan(plant, plant.key("other"))
    before = await plant.kinds(held)
    report = await plant.sweep(options={"dry_run": True})
    assert cases(report) == ["orphan", "unwanted"]
    assert await plant.kinds(held) == before
    assert not (await plant.state(held)).ended
    assert not (await plant.state(orphan)).ended


async def _orphan(plant: Plant, key: RunKey) -> Any:
    """A gang whose attempt the journal calls over, and which runs: a platform that told a lie, or came back."""
    from airflow_gpu.gang.entries import over_entry, verdict_entry
    from airflow_gpu.gang.run import Outcome

    held = await plant.begin(key, "failed")
    journal = held.journal
    await journal.append(over_entry(1, Outcome(Cause.NODE_LOST, 1.0)), epoch=1, now=1.0)
    await journal.append(verdict_entry("failed", Cause.NODE_LOST, "", {}), epoch=1, now=1.0)
    return held


async def test_orphan_is_cancelled(plant: Plant) -> None:
    """Its attempt is over, its run has a verdict, and it still holds nodes. Whatever Airflow says."""
    held = await _orphan(plant, plant.key())
    plant.airflow.told[held.key] = "deferred"
    before = await plant.kinds(held)
    item = only(await plant.sweep(), "orphan")
    assert (item.job, item.done, item.problem) == (plant.ref(held).name, "ended", False)
    assert await plant.state(held) is State.CANCELLED
    assert await plant.kinds(held) == before
    assert plant.airflow.asked == []
    assert cases(await plant.sweep()) == []


async def test_orphan_of_an_old_run(plant: Plant) -> None:
    """A run directory outside of the window is found by what lives of it."""
    held = await _orphan(plant, plant.key())
    report = await plant.sweep(options={"window": 0.001})
    assert only(report, "orphan").done == "ended"
    assert await plant.state(held) is State.CANCELLED


async def test_the_grace_is_the_requests(plant: Plant) -> None:
    """An orphan that ends at once on a notice has the time to."""
    mark = plant.root / "noticed"
    script = f"trap 'sleep 1; echo saved > {mark}; exit 75' TERM\ntouch {mark}\nwhile :; do sleep 0.1; done"
    gang = plant.gang(command=None, script=script, stop_grace=20)
    held = await plant.begin(plant.key(), "failed", gang)
    while not mark.exists():
        await asyncio.sleep(0.05)
    assert only(await plant.sweep(), "unwanted").problem is False
    assert mark.read_text() == "saved\n"
    assert (await plant.read(held)).run.verdict is not None


async def test_lost_is_ended_only_when_told(plant: Plant) -> None:
    """No run directory: a wrong state_uri would make every gang look so."""
    held = await plant.begin(plant.key(), "deferred")
    plant.store = Store(f"file://{plant.root}/elsewhere")
    report = await plant.sweep()
    item = only(report, "lost")
    assert (item.job, item.done, item.problem) == (plant.ref(held).name, "", True)
    assert "state_uri" in report.problems[0]
    assert not (await plant.state(held)).ended
    report = await plant.sweep(options={"lost": True, "dry_run": True})
    assert not (await plant.state(held)).ended
    report = await plant.sweep(options={"lost": True})
    assert (only(report, "lost").done, report.problems) == ("ended", [])
    assert await plant.state(held) is State.CANCELLED


async def test_another_installation_is_not_touched(plant: Plant) -> None:
    """Two Airflows on one cluster and one state store: each sweeps its own."""
    theirs = await plant.begin(plant.key(installation="staging"), "failed")
    lost = await plant.begin(plant.key("gone", installation="staging"), "failed")
    await plant.store.delete_tree(lost.journal.path)
    mine = await plant.begin(plant.key(), "failed")
    before = await plant.kinds(theirs)
    report = await plant.sweep(options={"lost": True})
    assert cases(report) == ["unwanted"]
    assert await plant.state(mine) is State.CANCELLED
    assert not (await plant.state(theirs)).ended
    assert not (await plant.state(lost)).ended
    assert await plant.kinds(theirs) == before


async def test_target_that_cannot_be_asked(plant: Plant) -> None:
    """It is told; nothing is assumed; the others are swept."""

    class Away:
        name = "away"

        async def inventory(self, labels: Any) -> Any:
            raise TargetError("connection refused")

    held = await plant.begin(plant.key(), "failed")
    plant.targets["away"] = Away()  # type: ignore[assignment]
    report = await plant.sweep(names=["here", "away", "nowhere"])
    assert only(report, "unwanted").done.startswith("ended")
    assert await plant.state(held) is State.CANCELLED
    assert report.targets["away"] == "connection refused"
    assert [line.split(":")[0] for line in report.problems] == [
        "target away could not be asked",
        "target nowhere could not be asked",
    ]


async def test_its_target_is_away(plant: Plant) -> None:
    """The gang is told to end in the journal, and the sweep says that it is not known to be over."""
    held = await plant.begin(plant.key(), "failed")
    home = plant.targets.pop("here")
    report = await plant.sweep(names=[], options={"limit": 0.5})
    item = only(report, "unwanted")
    assert item.problem
    assert "told to end" in item.done
    run = (await plant.read(held)).run
    assert run.current is not None
    assert run.current.stop is not None
    # When it is back, the next sweep goes on where this one stopped.
    plant.targets["here"] = home
    report = await plant.sweep()
    assert only(report, "ending").problem is False
    assert report.ended == []
    assert (await plant.read(held)).run.verdict is not None
    assert await plant.state(held) is State.CANCELLED


async def test_broken_journal(plant: Plant) -> None:
    """Reported, never acted on; neither are its jobs."""
    held = await plant.begin(plant.key(), "failed")
    path = Path(plant.root / "state" / held.journal.path / "journal" / f"{held.journal.run.seq + 1:06d}.json")
    path.write_text(
        json.dumps({"v": 1, "kind": "wish", "seq": held.journal.run.seq + 1, "at": "x", "epoch": 1})
    )
    report = await plant.sweep(options={"lost": True})
    assert cases(report) == ["broken", "held"]
    assert len(report.problems) == 2
    assert not (await plant.state(held)).ended


async def test_strange_job(plant: Plant) -> None:
    """A job that its own journal knows nothing of: a state store restored from an older copy, perhaps."""
    held = await plant.begin(plant.key(), "deferred")
    for number in (2, 3):
        (plant.root / "state" / held.journal.path / "journal" / f"{number:06d}.json").unlink()
    report = await plant.sweep(options={"lost": True})
    assert cases(report) == ["strange", "wanted"]
    assert not (await plant.state(held)).ended


async def test_earlier_incarnation(plant: Plant) -> None:
    """A gang of a run that a newer one has replaced, whose try has not come that far: ended, whatever the task does."""
    from airflow_gpu.rundir.slot import _begin

    first = await plant.own(plant.key(), number=3)
    await plant.driver(first).run(until_submitted=True)
    await _begin(plant.store, plant.key(), 2, time.time())
    second = await plant.own(plant.key(), ti_id="ti-2", number=1)
    assert first.incarnation != second.incarnation
    plant.airflow.told[plant.key()] = "deferred"
    report = await plant.sweep()
    assert cases(report) == ["earlier", "wanted"]
    assert await plant.state(first) is State.CANCELLED


async def test_verdict_that_lost_sight(plant: Plant) -> None:
    """Its owner gave up on a platform that did not answer, and the gang runs: its try is taken up again and ended."""
    from airflow_gpu.gang.entries import verdict_entry

    held = await plant.begin(plant.key(), "up_for_retry")
    await held.journal.append(verdict_entry("failed", Cause.LOST_SIGHT, "no answer", {}), epoch=1, now=1.0)
    assert cases(await plant.sweep()) == ["wanted"]  # the retry adopts it
    plant.airflow.told[held.key] = "failed"
    assert only(await plant.sweep(), "unwanted").done.startswith("ended")
    journal = await plant.read(held)
    assert [o.ti_id for o in journal.run.owners] == ["ti-1", "ti-1"]
    assert journal.run.verdict is not None
    assert journal.run.verdict.outcome == "cancelled"
    assert await plant.state(held) is State.CANCELLED
    # A Clear afterwards is told apart as ever.
    again = await plant.own(plant.key(), ti_id="ti-2", number=2, max_tries=1)
    assert (again.claim.action, again.claim.reason, again.claim.stop) == ("take", "clear", False)


async def test_open_books_are_closed(plant: Plant) -> None:
    """An owner that began nothing, whose task has ended: a verdict, and no more."""
    held = await plant.own(plant.key())
    plant.airflow.told[held.key] = "failed"
    report = await plant.sweep()
    assert (cases(report), report.ended) == (["open"], [])
    assert await plant.kinds(held) == ["owner", "stop", "verdict"]


async def test_nothing_is_started(plant: Plant) -> None:
    """A stop of an older owner leads a driver to start again. A sweep ends it instead."""
    held = await plant.begin(plant.key(), "deferred")
    assert await plant.driver(held).stop("user", "marked failed")
    cleared = await plant.own(plant.key(), ti_id="ti-2", number=2, max_tries=1)
    plant.airflow.told[held.key] = "failed"
    report = await plant.sweep()
    assert report.problems == []
    run = (await plant.read(cleared)).run
    assert len(run.attempts) == 1
    assert run.verdict is not None
    assert run.verdict.epoch == 2


# -- races -----------------------------------------------------------------------------------------


async def test_clear_between_read_and_stop(plant: Plant) -> None:
    """The journal was read, Airflow said "failed", and then the new try took over: it has the run."""
    held = await plant.begin(plant.key(), "failed")
    newer: list[Any] = []

    async def clear() -> None:
        plant.airflow.before = None
        newer.append(await plant.own(plant.key(), ti_id="ti-2", number=2, max_tries=1))

    plant.airflow.before = clear
    report = await plant.sweep()
    item = only(report, "unwanted")
    assert "left to them" in item.done
    assert not item.problem
    assert await plant.kinds(held) == ["owner", "attempt", "submitted", "owner"]
    assert not (await plant.state(held)).ended
    assert newer[0].claim.reason == "clear"


async def test_clear_while_it_is_ended(plant: Plant) -> None:
    """The new try takes over after the stop: the sweep leaves, and the try goes on from there."""
    gang = plant.gang(
        command=None, script="trap 'sleep 2; exit 75' TERM\nwhile :; do sleep 0.1; done", stop_grace=20
    )
    held = await plant.begin(plant.key(), "failed", gang)
    sweeping = asyncio.create_task(plant.sweep())
    while (await plant.read(held)).run.attempts[0].stop is None:
        await asyncio.sleep(0.02)
    newer = await plant.own(plant.key(), gang, ti_id="ti-2", number=2, max_tries=1)
    report = await sweeping
    assert "new try" in only(report, "unwanted").done
    plant.airflow.told[held.key] = "deferred"
    driving = asyncio.create_task(plant.driver(newer, gang).run())
    while [a.over for a in (await plant.read(newer)).run.attempts] != [True, False]:
        assert not driving.done()
        await asyncio.sleep(0.05)
    assert cases(await plant.sweep()) == ["wanted"]
    assert not driving.done()
    driving.cancel()


async def test_two_sweeps_at_once(plant: Plant) -> None:
    """One stop, one verdict, for each of several gangs."""
    held = [await plant.begin(plant.key(f"t{n}"), "failed") for n in range(3)]
    orphan = await _orphan(plant, plant.key("orphan"))
    reports = await asyncio.gather(*(plant.sweep() for _ in range(3)))
    assert [report.problems for report in reports] == [[], [], []]
    for one in held:
        kinds = await plant.kinds(one)
        assert (kinds.count("stop"), kinds.count("over"), kinds.count("verdict")) == (1, 1, 1), kinds
        assert await plant.state(one) is State.CANCELLED
    assert await plant.state(orphan) is State.CANCELLED


async def test_beside_a_driver(plant: Plant) -> None:
    """The trigger lives after all and drives the same owner: both come to the same end."""
    held = await plant.begin(plant.key(), "failed")
    driving = asyncio.create_task(plant.driver(held).run())
    await asyncio.sleep(0.3)
    report = await plant.sweep()
    assert report.problems == []
    verdict = await asyncio.wait_for(driving, 60)
    assert verdict is not None
    assert verdict.outcome == "cancelled"
    assert (await plant.kinds(held)).count("verdict") == 1


async def test_a_job_that_ends_meanwhile_is_no_orphan(plant: Plant) -> None:
    """Listed while it ran, over in the journal a moment later: not told to end, and not told as a find."""
    held = await plant.begin(plant.key(), "failed")
    listed = (await plant.targets["here"].inventory({}))[0]
    await plant.sweep()

    class Stale:
        def __init__(self, real: Any) -> None:
            self.real, self.cancelled = real, []

        async def inventory(self, labels: Any) -> Any:
            return [replace(listed, sighting=replace(listed.sighting, state=State.RUNNING))]

        async def observe(self, jobs: Any) -> Any:
            return await self.real.observe(jobs)

        async def cancel(self, job: Any, **_: Any) -> None:
            self.cancelled.append(job)

    stale = Stale(plant.targets["here"])
    plant.targets["here"] = stale  # type: ignore[assignment]
    report = await plant.sweep()
    assert (cases(report), report.ended, stale.cancelled) == ([], [], [])
    assert listed.ref.name == attempt_name(held.key, held.incarnation, 1)


# -- the work it makes ------------------------------------------------------------------------------


async def test_what_is_over_is_read_once(plant: Plant) -> None:
    """A second look in the same process reads nothing of runs that are over; the targets stay known."""
    gang = plant.gang(command=["true"])
    for number in range(3):
        await plant.finish(await plant.own(plant.key(run=f"r{number}"), gang), gang)
    reads: list[str] = []
    real = plant.store.get

    async def get(path: str, *args: Any) -> bytes:
        reads.append(path)
        return await real(path, *args)

    plant.store.get = get  # type: ignore[method-assign]
    known = Known()
    for expected in (3, 0):
        reads.clear()
        seen = await look(plant.store, "prod", plant.world().target, plant.airflow, known=known)
        assert len(reads) == expected, reads
        assert (len(seen.over), seen.targets) == (3, {"here": ""})


def test_terminal_states_are_named() -> None:
    assert {"success", "failed", "skipped", "upstream_failed", "removed"} == ENDED

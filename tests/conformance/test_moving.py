"""Two targets in one list, each a cluster of its own with a channel of its own: the gang goes where it can run.

Real local targets; what is unreachable is made so by taking the daemon and its
folder away, never by a mock of the answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from airflow_gpu.gang.run import Cause, Seed
from airflow_gpu.targets.local.target import LocalTarget
from tests.conformance import programs
from tests.conformance.bed import Played, play
from tests.conformance.suite import Scenarios
from tests.conformance.test_local import LocalBed


class Pair:
    """Targets ``a`` and ``b``: 2 nodes x 2 pretended GPUs each."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.beds = {name: LocalBed(root / name) for name in ("a", "b")}
        for name, bed in self.beds.items():
            bed.target = self.target(name)
        self.hidden = False

    @property
    def targets(self) -> dict[str, LocalTarget]:
        return {name: bed.target for name, bed in self.beds.items()}

    def gang(self, *args: Any, **more: Any) -> Any:
        more = {"targets": ["a", "b"], **more}
        return Scenarios().gang(self.beds["a"], programs.count, *args, **more)

    async def play(self, gang: Any, **more: Any) -> Played:
        return await play(self.beds["a"], self.root / "state", gang, targets=self.targets, **more)

    def target(self, name: str, **more: Any) -> LocalTarget:
        bed = self.beds[name]
        return LocalTarget(name, bed.config(channel=str(self.root / f"channel-{name}"), **more))

    def hide(self) -> None:
        """Nobody reaches target ``a`` any more: a file is where its folder was. Gangs that run there go on, with their channel."""
        path = self.beds["a"].path
        path.rename(path.with_suffix(".hidden"))
        path.write_text("not for you")
        self.hidden = True

    def show(self) -> None:
        if self.hidden:
            path = self.beds["a"].path
            path.unlink()
            path.with_suffix(".hidden").rename(path)
            self.hidden = False


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    pair = Pair(tmp_path)
    try:
        yield pair
    finally:
        pair.show()
        for bed in pair.beds.values():
            bed.admin.stop(gangs=True, grace=0)


def went(played: Played) -> list[tuple[str, str | None]]:
    return [(a.target, a.outcome.cause.value if a.outcome else None) for a in played.run.attempts]


async def lives_of(played: Played) -> list[Any]:
    """Lives of all channels, by number."""
    found = {}
    for attempt in played.run.attempts:
        for life in await played.driver.channel(attempt).lives():
            if not life.fence:
                found[life.number] = life
    return [found[number] for number in sorted(found)]


async def filled(pair: Pair, name: str) -> Played:
    """Something else holds all of that target."""
    gang = Scenarios().gang(pair.beds[name], programs.sleep, 600, targets=[name], priority=5)
    other = (await pair.play(gang)).start()

    async def runs() -> bool:
        return bool(other.run.attempts) and bool(await other.lives())

    await other.until("it runs", runs)
    return other


async def ended(other: Played) -> None:
    await other.driver.stop("user", "enough")
    await other.verdict()


async def test_what_is_free_comes_first(pair: Pair) -> None:
    other = await filled(pair, "a")
    played = (await pair.play(pair.gang(3))).start()
    assert (await played.verdict()).success
    assert went(played) == [("b", "succeeded")]
    assert played.run.attempts[0].offer["others"][0]["reason"] == "would have to wait"
    await ended(other)


async def test_a_gang_that_waits_moves_when_another_can_start_it(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are full; it waits on a. Then b is free, and a is not."""
    monkeypatch.setattr("airflow_gpu.placing.LOOK_ELSEWHERE", 0.5)
    first, second = await filled(pair, "a"), await filled(pair, "b")
    played = (await pair.play(pair.gang(3, placement={"move_after": 1}))).start()

    async def waits() -> bool:
        return any("queued" in line for line in played.said)

    await played.until("it waits", waits)
    await ended(second)
    assert (await played.verdict()).success
    assert went(played) == [("a", "moved"), ("b", "succeeded")]
    assert [life.attempt for life in await lives_of(played)] == [2]
    await ended(first)


async def test_a_drained_target_is_left_with_the_checkpoint(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Preempted on a, whose nodes are then drained: it goes on from its step on b, without waiting move_after."""
    monkeypatch.setattr("airflow_gpu.placing.LOOK_ELSEWHERE", 0.5)
    pair.beds["a"].target = pair.target("a", requeue=True)
    played = (await pair.play(pair.gang(200))).start()
    await played.until_step(20)
    for node in (0, 1):
        await asyncio.to_thread(pair.beds["a"].admin.drain, node)
    await pair.beds["a"].preempt(played.job, notice=True)
    verdict = await played.verdict()
    assert verdict.success
    assert went(played) == [("a", "moved"), ("b", "succeeded")]
    lives = await lives_of(played)
    assert len(lives) == 2
    assert lives[1].start is not None
    assert lives[1].start.step >= 20
    assert verdict.record["result"]["start"] == lives[1].start.step
    assert [item["lives"][0]["life"] for item in verdict.record["attempts"]] == [
        lives[0].number,
        lives[1].number,
    ]


async def test_one_that_is_sold_out_for_too_long_is_not_asked_again(pair: Pair) -> None:
    """max_wait on each target of the list, then an end that says where it has been."""
    first, second = await filled(pair, "a"), await filled(pair, "b")
    played = (await pair.play(pair.gang(3, placement={"max_wait": 1, "move_after": None}))).start()
    verdict = await played.verdict()
    assert (verdict.outcome, verdict.cause) == ("failed", Cause.QUEUED_TOO_LONG)
    assert went(played) == [("a", "queued_too_long"), ("b", "queued_too_long")]
    await ended(first), await ended(second)


async def test_unreachable_and_to_be_moved(pair: Pair) -> None:
    """The job hears through its run directory that it is over, saves, says so, and goes on elsewhere."""
    gang = pair.gang(300, recovery={"unreachable": "move", "unknown_limit": 2})
    played = (await pair.play(gang)).start()
    await played.until_step(20)
    pair.hide()
    verdict = await played.verdict()
    assert verdict.success
    assert went(played) == [("a", "unreachable"), ("b", "succeeded")]
    first, second = await lives_of(played)
    ended_at = await played.driver.channel(played.run.attempts[0]).ended_at(first)
    assert ended_at is not None
    assert ended_at <= second.at, "the ranks on a had said that they ended before any started on b"
    assert second.start.step >= 20
    pair.show()
    ref = await played.ref(played.run.attempts[0])

    async def over() -> bool:
        return (await pair.targets["a"].observe([ref]))[ref.name].state.ended

    played.task = None
    await played.until("the job on a is over for its target too", over)


async def test_unreachable_and_to_be_waited_for(pair: Pair) -> None:
    """The default: nothing is started in its place; when the target is back the gang is still there."""
    played = (await pair.play(pair.gang(150))).start()
    await played.until_step(10)
    pair.hide()
    await asyncio.sleep(2)
    pair.show()
    assert (await played.verdict()).success
    assert went(played) == [("a", "succeeded")]


async def test_recovery_asks_only_where_it_was(pair: Pair) -> None:
    """A new driver of a run on a comes to a verdict while b cannot be resolved at all."""
    played = await pair.play(pair.gang(60))
    assert await played.driver.run(until_submitted=True) is None
    again = await pair.play(pair.gang(60), key=played.key)
    resolve = again.driver.world.target

    async def only_a(name: str) -> Any:
        assert name == "a", "a target that the journal does not name was asked"
        return await resolve(name)

    object.__setattr__(again.driver.world, "target", only_a)
    assert (await again.start().verdict()).success
    assert went(again) == [("a", "succeeded")]


async def test_a_moved_run_comes_back_with_its_newest(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """a, b, a: what it saved on b counts, not the older one that still lies on a."""
    monkeypatch.setattr("airflow_gpu.placing.LOOK_ELSEWHERE", 0.5)
    for name, bed in pair.beds.items():
        bed.target = pair.target(name, requeue=True)
    played = (await pair.play(pair.gang(400))).start()
    for here, there, step, life in (("a", "b", 20, 1), ("b", "a", 60, 2)):
        await played.until_step(step, life)
        for node in (0, 1):
            await asyncio.to_thread(pair.beds[here].admin.drain, node)
            if here == "b":
                await asyncio.to_thread(pair.beds[there].admin.undrain, node)
        await pair.beds[here].preempt(played.job, notice=True)
    verdict = await played.verdict()
    assert verdict.success
    assert [target for target, _ in went(played)] == ["a", "b", "a"]
    starts = [life.start.step if life.start else 0 for life in await lives_of(played)]
    assert 0 == starts[0] < 20 <= starts[1] < starts[2], starts
    assert starts[2] >= 60, starts
    assert verdict.record["result"]["start"] == starts[2]


async def test_a_run_may_begin_from_another_ones_checkpoint(pair: Pair) -> None:
    """As with checkpointing.continue_previous: yesterday's, on whatever target it lies."""
    first = (await pair.play(pair.gang(30))).start()
    assert (await first.verdict()).success
    attempt = first.run.attempts[-1]
    where = await first.driver.channel(attempt).locate(attempt)
    assert where is not None

    async def yesterday() -> tuple[Seed, str]:
        return Seed(where.channel, where.life, where.step, "yesterday"), "It continues."

    second = await pair.play(pair.gang(60), seed=yesterday)
    verdict = await second.start().verdict()
    assert verdict.success
    assert verdict.record["result"]["start"] == where.step > 0


async def test_a_lost_run_directory_does_not_run_twice(pair: Pair) -> None:
    """The journals were wiped: the gang that still runs is found on the target by its labels and ended first."""
    import shutil

    lost = await pair.play(pair.gang(5000))
    task = asyncio.create_task(lost.driver.run())
    await lost.until_step(5)
    task.cancel()
    shutil.rmtree(pair.root / "state")
    again = (await pair.play(pair.gang(3), key=lost.key)).start()
    assert again.driver.incarnation != lost.driver.incarnation
    assert (await again.verdict()).success
    rows = pair.beds["a"].admin.status()["jobs"]
    assert rows[lost.job]["native"] == "CANCELLED"
    assert any("its run directory is lost" in line for line in again.said)
    [life] = await lives_of(again)
    [old] = await lost.lives()
    ended_at = await lost.driver.channel(lost.run.attempts[0]).ended_at(old)
    assert ended_at is not None
    assert ended_at <= life.at

"""What stays: the newest, the milestones, what is in use, what may be being written; beside whatever else happens."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from airflow_gpu.gang.run import Cause, Seed
from airflow_gpu.rundir.checkpoints import Checkpoint, Checkpoints
from airflow_gpu.rundir.pruning import NotPruned, Plan, plan, prune
from airflow_gpu.runtime.checkpoint import Ancestor, Start, choose
from airflow_gpu.runtime.files import Folder
from airflow_gpu.runtime.pruning import prune as runtime_prune
from tests.checkpoints.conftest import Run, one_life, steps


def whys(rows: tuple[tuple[Checkpoint, str], ...]) -> dict[tuple[int, int | None], str]:
    return {(one.life, one.step): why for one, why in rows}


async def planned(run: Run, keep: int, every: int | None = None) -> Plan:
    return plan(await run.survey(), keep, every)


async def test_the_newest_the_milestones_and_the_start(run: Run) -> None:
    for step in (10, 50, 60, 70, 100):
        await run.write(step)
    await run.life(2, origin=(1, 70), ranks=2)
    for step in (100, 110, 120):
        await run.write(step)
    await run.write(115, manifest=b"")  # half of one, and no life of the handle's marks it
    await run.write(130, manifest=b"")
    await run.write(20, life=1, manifest=b"{}")
    made = await planned(run, 2, 50)
    assert whys(made.keep) == {
        (1, 50): "every 50 steps",
        (1, 70): "in use",
        (2, 100): "every 50 steps",
        (2, 110): "one of the newest 2",
        (2, 115): "its program looks after its own",
        (2, 120): "the next start",
        (2, 130): "may be being saved",
    }
    assert whys(made.remove) == {
        (1, 10): "older",
        (1, 20): "torn",
        (1, 60): "older",
        (1, 100): "off the chain",
    }
    assert made.size == 6997 * 4
    done = await prune(run.checkpoints(), 2, 50)
    assert (steps(done.removed), done.left, done.size) == (
        [(1, 10), (1, 20), (1, 60), (1, 100)],
        [],
        made.size,
    )
    survey = await run.survey()
    assert {(one.life, one.step) for one in survey.found} == set(whys(made.keep))
    left = await run.checkpoints().contents(run.channel.uri).walk("0001")
    assert {file.path.split("/")[1] for file in left.files} == {"step-000000050", "step-000000070"}


async def test_what_was_agreed_to_and_no_more(run: Run) -> None:
    for step in (10, 20):
        await run.write(step)
    made = await planned(run, 1)
    for step in (30, 40):
        await run.write(step)
    done = await prune(run.checkpoints(), 1, agreed=made)
    assert steps(done.removed) == [(1, 10)]
    assert steps((await run.survey()).found) == [(1, 20), (1, 30), (1, 40)]


async def test_the_only_one_and_a_run_that_began_again(run: Run) -> None:
    await run.write(10)
    assert not (await planned(run, 1)).remove
    await run.over(5, Cause.PREEMPTED)
    await run.goes_on(resume=False, since=run.lives + 1)
    assert whys((await planned(run, 1)).keep) == {(1, 10): "nothing whole is on the chain"}
    await run.life(6, ranks=2)
    await run.write(5)
    assert whys((await planned(run, 1)).remove) == {(1, 10): "off the chain"}


async def test_nothing_goes_while_the_newest_is_damaged(run: Run) -> None:
    for step in (10, 20, 30):
        where = await run.write(step)
    contents = run.checkpoints().contents(run.channel.uri)
    await contents.remove(f"{where}/rank-0.bin")
    await contents.create(f"{where}/rank-0.bin", b"Zero" * 1000)
    with pytest.raises(NotPruned, match="has other content"):
        await prune(run.checkpoints(), 1)
    assert len((await run.survey()).found) == 3
    await contents.create(f"{where}/bad.json", b"{}")
    await prune(run.checkpoints(), 1)
    assert steps((await run.survey()).found) == [(1, 20)]


async def test_what_a_program_wrote_is_its_own_until_the_run_is_over(run: Run) -> None:
    for step in (10, 20, 30):
        await run.write(step, name=f"checkpoint-{step}", writer="program")
    assert not (await planned(run, 1)).remove
    await run.over(5, Cause.SUCCEEDED)
    await run.verdict(6, "success", Cause.SUCCEEDED)
    assert list(whys((await planned(run, 1)).remove)) == [(1, 10), (1, 20)]


async def test_what_another_channel_started_from_stays(tmp_path: Path, run: Run) -> None:
    for step in (10, 20, 30):
        await run.write(step)
    first = run.channel.uri
    await run.over(5, Cause.MOVED)
    from airflow_gpu.rundir.store import Store

    run.on(Store(str(tmp_path / "other")))
    await run.goes_on(Seed(first, 1, 20))
    life = await run.seeded_life((1, 20))
    await run.write(40)
    await run.write(50)
    done = await prune(run.checkpoints(), 1)
    assert steps(done.removed) == [(1, 10), (1, 30), (life, 40)]
    assert steps((await run.survey()).found) == [(1, 20), (life, 50)]


# -- beside others ------------------------------------------------------------------------------


class Meanwhile(Checkpoints):
    """Does something right before the n-th look at what has changed."""

    def __init__(self, run: Run, at: int, what: object) -> None:
        super().__init__(run.journal, run.path, lambda uri: run.stores[uri])
        self.left, self.what = at, what

    async def stamp(self) -> tuple[object, ...]:
        self.left -= 1
        if self.left == 0:
            await self.what()  # type: ignore[operator]
        return await super().stamp()


@pytest.mark.parametrize("at", range(2, 6))
async def test_a_life_begins_meanwhile(tmp_path: Path, at: int) -> None:
    """Wherever in the pruning it begins: what it starts from stays, and so does what was agreed to stay."""
    run = await one_life(Run(tmp_path))
    for step in (10, 20, 30, 40):
        await run.write(step)
    chosen: list[Start] = []

    async def begins() -> None:
        start = choose(Folder(str(run.folder)), [Ancestor(1)], lambda _: None, 10.0)
        assert start is not None
        chosen.append(start)
        await run.life(3, origin=(start.life, start.step), ranks=2)
        await run.write(45)

    await prune(Meanwhile(run, at, begins), 1)
    assert chosen[0].step == 40
    assert (run.folder / chosen[0].folder / "manifest.json").exists()
    survey = await run.survey()
    assert survey.next is not None
    assert survey.next.step == 45


@pytest.mark.parametrize("at", range(2, 5))
async def test_the_runtime_prunes_meanwhile(tmp_path: Path, at: int) -> None:
    run = await one_life(Run(tmp_path))
    for step in (10, 20, 30, 40):
        await run.write(step)

    async def commits() -> None:
        await run.write(50)
        runtime_prune(Folder(str(run.folder)), 1, 1, None, (), print)

    await prune(Meanwhile(run, at, commits), 2)
    assert (await run.survey()).found[-1].step == 50
    assert steps((await run.survey()).found) in ([(1, 50)], [(1, 40), (1, 50)])


SAVES = st.lists(
    st.tuples(st.integers(1, 12), st.sampled_from(["ok", "ok", "bad", "torn", "none"])), max_size=5
)


@given(st.lists(SAVES, min_size=1, max_size=4), st.integers(1, 3), st.none() | st.integers(2, 5))
@settings(max_examples=60, deadline=None)
def test_a_next_life_starts_from_the_same(
    lives: list[list[tuple[int, str]]], keep: int, every: int | None
) -> None:
    folder = Path(tempfile.mkdtemp())
    try:
        asyncio.run(_prune_any(folder, lives, keep, every))
    finally:
        shutil.rmtree(folder)


async def _prune_any(root: Path, lives: list[list[tuple[int, str]]], keep: int, every: int | None) -> None:
    run = Run(root)
    await run.begin()
    await run.owner(0)
    await run.goes_on()
    folder, ancestors = Folder(str(run.folder)), []
    start: Start | None = None
    for saves in lives:
        start = choose(folder, ancestors, lambda _: None, 10.0)
        origin = (start.life, start.step) if start else None
        ancestors.append(Ancestor(await run.life(1, origin=origin, ranks=1), *(origin or (None, None))))
        for step, kind in dict(saves).items():
            where = await run.write(
                step, files={"a": b"x" * step}, manifest={"torn": b"{}", "none": b""}.get(kind)
            )
            if kind == "bad":
                (run.folder / "checkpoints" / where / "bad.json").write_text("{}")
    before = await run.survey()
    expected = choose(folder, ancestors, lambda _: None, 10.0)
    done = await prune(run.checkpoints(), keep, every)
    assert choose(folder, ancestors, lambda _: None, 10.0) == expected
    if start is not None:
        assert (run.folder / start.folder / "manifest.json").exists()  # of the life that runs
    after = await run.survey()
    assert after.chain[:keep] == before.chain[:keep]
    if every:
        wanted = {one.place for one in before.chain if (one.step or 0) % every == 0}
        assert wanted <= {one.place for one in after.chain}
    assert len(after.found) == len(before.found) - len(done.removed)
    assert not (await prune(run.checkpoints(), keep, every)).removed

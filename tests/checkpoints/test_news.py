"""The newest checkpoint of a gang as others hear of it: once, in order, and only its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from airflow_gpu.gang.run import Cause, Seed
from airflow_gpu.hooks.checkpoint import Watch, found_or_recorded, newest_of
from airflow_gpu.rundir.store import Store
from airflow_gpu.settings import Settings
from tests.checkpoints.conftest import Run, one_life


@pytest.fixture
async def run(tmp_path: Path) -> Run:
    return await one_life(Run(tmp_path))


async def test_what_is_told(run: Run) -> None:
    assert await newest_of(run.state, run.key) is None
    await run.write(10)
    await run.write(20, name="checkpoint-20", writer="program")
    assert await newest_of(run.state, run.key) == {
        "uri": f"{run.channel.uri}/checkpoints/0001/checkpoint-20",
        "life": 1,
        "step": 20,
        "run": "dag/r1/fit",
        "dag_id": "dag",
        "run_id": "r1",
        "task_id": "fit",
        "map_index": -1,
    }


async def test_what_another_run_has_saved_is_not_its_own(tmp_path: Path) -> None:
    run = Run(tmp_path)
    await run.begin()
    await run.owner(0)
    await run.goes_on(Seed(f"file://{tmp_path}/channel/elsewhere", 3, 500, run="dag/r0/fit"))
    assert await newest_of(run.state, run.key) is None
    await run.life(1, ranks=2)
    await run.write(510)
    found = await newest_of(run.state, run.key)
    assert found is not None
    assert found["step"] == 510


async def test_news_come_once(run: Run) -> None:
    watch = Watch(run.state, "prod", "dag", "fit")
    assert await watch.news(20) == []

    async def steps() -> list[int]:
        return [one["step"] for one in await watch.news(20)]

    await run.write(10)
    assert await steps() == [10]
    await run.write(20)
    assert await steps() == []  # too soon
    await run.write(30)
    assert await steps() == [30]
    await run.life(2, ranks=2)  # from nothing
    await run.write(5)
    assert await steps() == [5]
    await run.write(7)
    await run.over(5, Cause.SUCCEEDED)
    await run.verdict(6, "success", Cause.SUCCEEDED)
    assert await steps() == [7]  # the last one in any case
    assert await steps() == []
    assert await Watch(run.state, "prod", "dag", "fit").news() == []  # over before it looked
    assert await Watch(run.state, "prod", "dag", "other").news() == []


async def test_a_watch_that_begins_anew_tells_of_what_is_not_over(run: Run) -> None:
    await run.write(10)
    for _ in range(2):
        [one] = await Watch(run.state, "prod", "dag", "fit").news()
        assert one["step"] == 10


async def test_a_store_that_is_away_is_no_trouble_for_what_has_succeeded(run: Run, tmp_path: Path) -> None:
    record = {"checkpoint": {"life": 1, "step": 9, "uri": "file:///c/checkpoints/0001"}}
    given = Settings("prod", "nonsense://", None, 1.0)
    told = await found_or_recorded(given, run.key, record)
    assert (told["uri"], told["step"], told["run"]) == ("file:///c/checkpoints/0001", 9, "dag/r1/fit")
    assert (await found_or_recorded(given, run.key, {}))["uri"] is None
    await run.write(10)
    given = Settings("prod", Store(str(tmp_path / "state")).uri, None, 1.0)
    assert (await found_or_recorded(given, run.key, record))["step"] == 10

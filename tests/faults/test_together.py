"""Two drivers of one run, started together a thousand times (200 times without ``FAULTS=all``): one life each time."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from tests.faults.real.ledger import judge
from tests.faults.real.stories import STORIES, Plan, Stage
from tests.faults.together import start_together

ALL = os.environ.get("FAULTS") == "all"
PAIRS = 1000 if ALL else 200
REAL = 20 if ALL else 6
AT_ONCE = 5


@pytest.mark.timeout(1800)
def test_pairs(tmp_path: Path) -> None:
    found = start_together(tmp_path, PAIRS)
    print(f"\n{dict(found)}")
    assert found["twins that left"] > PAIRS / 20, "both must have submitted, again and again"
    assert found["one life"] == PAIRS
    assert found["one incarnation"] == PAIRS
    assert found["one owner, one attempt, success"] == PAIRS
    assert found["told success"] == 2 * PAIRS


@pytest.mark.timeout(900)
async def test_on_the_local_target(tmp_path: Path) -> None:
    story = next(story for story in STORIES if story.twice)
    async with Stage(tmp_path) as stage:
        turn = asyncio.Semaphore(AT_ONCE)

        async def one(number: int) -> object:
            async with turn:
                return await stage.play(Plan(number, story))

        played = await asyncio.gather(*(one(number) for number in range(REAL)))
        counts = judge(stage, played)  # type: ignore[arg-type]
    print(f"\n{counts.text()}")
    assert counts.lives == REAL
    assert counts.processes == 2 * REAL
    assert (counts.duplicates, counts.orphans, counts.false_ends) == ([], [], [])

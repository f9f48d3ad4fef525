"""A sample of runs on the real local target, several at a time, and what they came to.

Example::

    python -m tests.faults.real.sample --runs 500 --seed 1
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import tempfile
import time
from pathlib import Path

from tests.faults.real.ledger import Counts, judge
from tests.faults.real.stories import STORIES, Calls, Plan, Played, Stage, plans, record

AT_ONCE = 8
SETTLE = 30.0
"""Seconds in which jobs that are still ending behind the last verdict must have ended."""

RECORDINGS = 90_000
"""Numbers of the runs without faults."""


async def sample(root: Path, count: int, seed: int, at_once: int = AT_ONCE) -> Counts:
    """Play ``count`` runs, of which each has one fault, and judge them and the runs without faults."""
    async with Stage(root) as stage:
        turn = asyncio.Semaphore(at_once)
        done: list[Played] = []

        async def one(plan: Plan) -> None:
            async with turn:
                done.append(await stage.play(plan))

        async def recorded(number: int) -> Calls:
            async with turn:
                return await record(stage, STORIES[number], RECORDINGS + number)

        calls: Calls = {}
        for found in await asyncio.gather(*(recorded(number) for number in range(len(STORIES)))):
            calls |= found
        await asyncio.gather(*(one(plan) for plan in plans(count, seed, calls)))
        counts = judge(stage, done)
        end = time.monotonic() + SETTLE
        while counts.orphans and time.monotonic() < end:
            await asyncio.sleep(0.5)
            counts = judge(stage, done)
        return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--at-once", type=int, default=AT_ONCE)
    parser.add_argument("--keep", action="store_true", help="keep the folder, to look into it")
    given = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="faults-"))
    started = time.monotonic()
    try:
        counts = asyncio.run(sample(root, given.runs, given.seed, given.at_once))
    finally:
        if given.keep:
            print(root)
        else:
            shutil.rmtree(root, ignore_errors=True)
    print(f"{counts.text()}\n{time.monotonic() - started:.0f} s")
    for line in (*counts.duplicates, *counts.orphans, *counts.false_ends):
        print(line)


if __name__ == "__main__":
    main()

"""A number of runs with one fault each on a real Slurm, several at a time, and what they came to.

Example::

    python -m tests.faults.slurm.sample --runs 300 --seed 1
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.beds.slurm.cluster import cluster
from tests.faults.slurm.runs import Result, Stage, plans, run

AT_ONCE = 5
SETTLE = 60.0
MIN_JOB_AGE = 10


async def sample(
    made: Any, state: Path, count: int, seed: int, way: str, at_once: int = AT_ONCE
) -> tuple[list[Result], list[str]]:
    """Play so many; answers the results, and the jobs that were left behind."""
    stage = Stage(made, state)
    turn = asyncio.Semaphore(at_once)
    results: list[Result] = []

    async def one(plan: Any) -> None:
        async with turn:
            result = await run(stage, plan, way)
            results.append(result)
            if result.duplicates or result.false_ends:
                print(f"{plan}: {result}", flush=True)

    await asyncio.gather(*(one(plan) for plan in plans(count, seed)))
    end = time.monotonic() + SETTLE
    while True:
        left = (await asyncio.to_thread(made.run, "squeue", "-h", "-a", "-o", "%A %j %T %r")).splitlines()
        if not left or time.monotonic() > end:
            break
        await asyncio.sleep(1.0)
    return results, left


def text(results: list[Result], orphans: list[str]) -> str:
    """The figures in three lines."""
    happened = Counter(result.plan.fault for result in results if result.happened)
    kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(happened.items()))
    return (
        f"{len(results)} runs on Slurm, {sum(happened.values())} faults, {sum(r.lives for r in results)} lives, "
        f"{sum(r.attempts for r in results)} attempts; {kinds}\n"
        f"duplicates {sum(len(r.duplicates) for r in results)}, orphans {len(orphans)}, "
        f"false ends {sum(len(r.false_ends) for r in results)}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--at-once", type=int, default=AT_ONCE)
    parser.add_argument("--way", choices=("rest", "ssh", "command"), default="rest")
    parser.add_argument("--version", default="24.11")
    given = parser.parse_args()
    state = Path(tempfile.mkdtemp(prefix="faults-slurm-"))
    begun = time.monotonic()
    try:
        with cluster(given.version, grace=10, nodes=4, min_job_age=MIN_JOB_AGE) as made:
            results, orphans = asyncio.run(
                sample(made, state, given.runs, given.seed, given.way, given.at_once)
            )
            print(f"{text(results, orphans)}\n{time.monotonic() - begun:.0f} s")
            for line in orphans:
                print(line)
    finally:
        shutil.rmtree(state, ignore_errors=True)


if __name__ == "__main__":
    main()

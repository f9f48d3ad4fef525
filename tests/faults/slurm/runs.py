"""One gang on a real Slurm with one fault, and what became of it.

Purpose: :func:`play` drives a gang that counts and saves, waits for a phase, and does what the
plan says to the cluster, to the driver or to what lies between them. The ranks write what they
really did into a folder of the cluster that the test sees; a lock tells whether two lives of a rank
compute at once.

Limits: daemons are the cluster's, so a fault of one run is one for all that run beside it.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from airflow_gpu.gang.identity import RunKey
from airflow_gpu.gang.run import Verdict
from airflow_gpu.gang.spec import Gang
from airflow_gpu.targets.base import TargetError
from airflow_gpu.targets.slurm.rest import Rest
from airflow_gpu.targets.slurm.target import SlurmTarget
from tests.conformance.bed import Played, play
from tests.conformance.slurm_bed import SlurmBed
from tests.faults.real.stories import PROGRAM

PHASES = ("before submit", "submitting", "queued", "running", "saved", "ending")

DAEMONS = ("slurmctld", "slurmdbd", "slurmrestd", "sshd")
FAULTS = (
    *(f"{daemon} {how}" for daemon in DAEMONS for how in ("stopped", "killed", "stands still")),
    "reply lost",
    "reply lost, twice",
    "token over",
    "second driver",
    "driver dies",
    "driver dies, comes back late",
    "preempted",
    "cancelled",
)

AWAY = (1.0, 6.0)
"""Seconds for which a daemon is away."""

PATIENCE = 240.0


@dataclass(frozen=True)
class Plan:
    number: int
    fault: str
    phase: str
    away: float


@dataclass
class Result:
    """What became of a plan. The three lists must be empty."""

    plan: Plan
    happened: bool = False
    attempts: int = 0
    lives: int = 0
    seconds: float = 0.0
    duplicates: list[str] = field(default_factory=list)
    false_ends: list[str] = field(default_factory=list)


def plans(count: int, seed: int) -> Iterator[Plan]:
    """Every fault at every phase in turn, in an order of the seed, again and again."""
    rng = random.Random(seed)
    pairs = list(itertools.product(FAULTS, PHASES))
    number = 0
    while number < count:
        rng.shuffle(pairs)
        for fault, phase in pairs:
            number += 1
            if number > count:
                return
            yield Plan(number, fault, phase, rng.uniform(*AWAY))


class Stage:
    """The cluster, and the turn of its daemons: one at a time is away."""

    def __init__(self, cluster: Any, state: Path) -> None:
        self.cluster = cluster
        self.state = state
        self.marks = Path(cluster.shared) / "marks"
        cluster.run("install", "-d", "-o", "alice", "-m", "755", "/shared/marks")
        self.turn = asyncio.Lock()

    async def daemon(self, name: str, how: str, away: float) -> None:
        async with self.turn:
            act = asyncio.to_thread
            if how == "stands still":
                await act(self.cluster.pause, name)
            else:
                await act(lambda: self.cluster.stop(name, kill=how == "killed"))
            try:
                await asyncio.sleep(away)
            finally:
                await act(self.cluster.resume if how == "stands still" else self.cluster.start, name)


class Lossy:
    """Loses the reply to a submit that was done: ``times`` times."""

    def __init__(self, target: SlurmTarget, times: int) -> None:
        self.times = times
        self.lost = 0
        self._submit = target._access.submit
        target._access.submit = self  # type: ignore[method-assign]

    async def __call__(self, batch: Any) -> int:
        number = await self._submit(batch)
        if self.lost < self.times:
            self.lost += 1
            raise TargetError("the reply got lost")
        return number


async def run(stage: Stage, plan: Plan, way: str) -> Result:
    """Play it, and judge it."""
    result, begun = Result(plan), time.monotonic()
    bed = SlurmBed(stage.cluster, way, exclusive=False, work_folder="/shared/marks")
    name = f"run-{plan.number:05d}"
    folder = stage.marks / name
    await asyncio.to_thread(stage.cluster.run, "install", "-d", "-o", "alice", f"/shared/marks/{name}")
    gang = Gang(
        nodes=2 if plan.number % 3 == 0 else 1,
        gpus_per_node=1,
        script=PROGRAM,
        targets="slurm",
        stop_grace=5,
        env={"MARKS": f"/shared/marks/{name}", "STEPS": "12", "PACE": "0.4", "FAILS": ""},
        recovery={"backoff": 0.2, "backoff_max": 0.2, "node_failures": 10},
    )
    key = RunKey("faults", "dag", name, "fit", -1)

    async def driver(ti: str = "ti-1", number: int = 1) -> Played:
        # Each with a target of its own, as another process would have.
        return await play(
            bed, stage.state, gang, target=bed.make(), key=key, ti_id=ti, try_number=number, max_tries=3
        )

    drivers = [await driver()]
    verdict: Verdict | None = None
    try:
        async with asyncio.timeout(PATIENCE):
            if plan.fault.startswith("reply lost"):
                lossy = Lossy(drivers[0].target, 2 if "twice" in plan.fault else 1)
                verdict = await drivers[0].start().task
                result.happened = lossy.lost > 0
            else:
                verdict = await _with_fault(stage, plan, bed, drivers, driver, folder, result)
    except TimeoutError:
        result.false_ends.append(f"no end within {PATIENCE:.0f} s: {drivers[-1].said[-4:]}")
    finally:
        for played in drivers:
            if played.task is not None and not played.task.done():
                played.task.cancel()
        await asyncio.gather(*(p.task for p in drivers if p.task is not None), return_exceptions=True)
    result.seconds = time.monotonic() - begun
    result.attempts = len(drivers[-1].run.attempts)
    _judge(plan, gang, folder, verdict, result)
    return result


async def _with_fault(
    stage: Stage, plan: Plan, bed: SlurmBed, drivers: list[Played], driver: Any, folder: Path, result: Result
) -> Verdict | None:
    first = drivers[0]
    if plan.phase == "before submit":
        await _do(stage, plan, bed, drivers, driver, wait=False)
        result.happened = True
        if first.task is None:
            first.start()
    else:
        first.start()
        if await _phase(first, plan.phase, folder):
            await _do(stage, plan, bed, drivers, driver)
            result.happened = True
    last = drivers[-1]
    if last.task is None:
        last.start()
    assert last.task is not None
    return await last.task


async def _phase(played: Played, phase: str, folder: Path) -> bool:
    """Wait until the gang is in this phase; False when it is over before."""
    assert played.task is not None
    while not played.task.done():
        run = played.run
        attempt = run.current
        if phase == "submitting" and attempt is not None:
            return True
        if phase == "queued" and attempt is not None and attempt.submitted_at is not None:
            return True
        steps = max((int(p.read_text() or 0) for p in folder.glob("step.*")), default=-1)
        if phase == "running" and (folder / "truth").exists():
            return True
        if phase == "saved" and steps >= 4:
            return True
        if phase == "ending" and steps >= 11:
            return True
        await asyncio.sleep(0.05)
    return False


async def _do(
    stage: Stage, plan: Plan, bed: SlurmBed, drivers: list[Played], driver: Any, *, wait: bool = True
) -> None:
    fault = plan.fault
    daemon, _, how = fault.partition(" ")
    if daemon in DAEMONS:
        task = asyncio.create_task(stage.daemon(daemon, how, plan.away))
        if not wait:
            await asyncio.sleep(0.3)
            drivers[0].start()
        await task
    elif fault == "token over":
        access = drivers[0].target._access
        if isinstance(access, Rest):
            over = await asyncio.to_thread(stage.cluster.token, "alice", 1)
            await asyncio.sleep(1.5)
            access._tokens._token = over
    elif fault == "second driver":
        drivers.insert(0, (await driver()).start())
    elif fault in ("driver dies", "driver dies, comes back late"):
        if drivers[0].task is None:
            drivers[0].start()
            await asyncio.sleep(random.Random(plan.number).uniform(0, 0.5))
        task = drivers[0].task
        assert task is not None
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        if fault.endswith("late"):
            await asyncio.sleep(18.0)  # the job is over by then, and forgotten by the controller
        drivers.append((await driver()).start())
    elif fault == "preempted":
        try:
            await bed.preempt(drivers[0].job, notice=True)
        except (IndexError, ValueError, RuntimeError):
            pass  # it has no nodes yet, or no more
    elif fault == "cancelled" and drivers[0].run.attempts:
        await drivers[0].driver.stop("user", "marked failed")


def _judge(plan: Plan, gang: Gang, folder: Path, verdict: Verdict | None, result: Result) -> None:
    lines = [line.split() for line in _lines(folder / "truth")]
    result.lives = len({line[1] for line in lines if line[0] == "begin"})
    result.duplicates += [
        f"rank {line[2]} of life {line[1]} computed beside another" for line in lines if line[0] == "twice"
    ]
    done: dict[str, int] = {}
    for line in lines:
        if line[0] == "done":
            done[line[1]] = done.get(line[1], 0) + 1
        elif line[0] == "begin" and any(count == gang.nodes for count in done.values()):
            result.duplicates.append(f"life {line[1]} began after all work was done")
    whole = any(count == gang.nodes for count in done.values())
    if verdict is None:
        if not result.false_ends:
            result.false_ends.append("no verdict")
    elif verdict.success and not whole:
        result.false_ends.append("success was told, and not every rank had done its work")
    elif not verdict.success and not (plan.fault == "cancelled" and verdict.outcome == "cancelled"):
        result.false_ends.append(f"{verdict.outcome}: {verdict.cause}: {verdict.message[:300]}")


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []

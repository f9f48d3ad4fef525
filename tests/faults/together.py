"""Two processes that drive the same run and start at the same moment, again and again, on a real store.

Purpose: the race itself, and not a model of it. Two processes meet at a
barrier; each takes the run with the real ``slot.take`` and drives it with the
real driver on a real folder. The platform is the worst there is: it has no
create-if-absent, so both drivers may well submit, and both jobs then claim by
the real rules (:mod:`airflow_gpu.runtime.claim`) at the same time.

What it does not do: run ranks. A job that has claimed writes the record of a
rank that ended well.

Example::

    python -m tests.faults.together 1000
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from airflow_gpu.driver import Driver, World
from airflow_gpu.gang.entries import fold, iso
from airflow_gpu.gang.identity import RunKey
from airflow_gpu.gang.ownership import Try
from airflow_gpu.gang.run import Run, State
from airflow_gpu.gang.spec import Gang
from airflow_gpu.rundir.slot import take
from airflow_gpu.rundir.store import Store
from airflow_gpu.runtime.claim import AlreadyDone, NotClaimed, claim
from airflow_gpu.runtime.files import Folder
from airflow_gpu.runtime.job import Job as Payload
from airflow_gpu.runtime.job import Node
from airflow_gpu.targets.base import Capabilities, Job, JobRef, Listed, LogChunk, Offer, Sighting
from airflow_gpu.targets.watch import Watcher

POLL = 0.02
APART = 0.03
"""Seconds by which the second process may start later: each pair meets in another place."""

LIMIT = 60.0
GANG = Gang(nodes=1, gpus_per_node=0, command="true", targets="here")


class Twins:
    """A platform in a folder that never refuses a name: a file for each job, and a thread that runs it."""

    name = "here"
    python = "python3"
    capabilities = Capabilities()

    def __init__(self, root: Path, *, looks: bool) -> None:
        self.root, self.looks = root, looks
        self.job_store: dict[str, Any] = {}
        self._running: set[asyncio.Task[None]] = set()

    @property
    def channel(self) -> str:
        return f"file://{self.root}/channel"

    @property
    def job_channel(self) -> str:
        return f"{self.root}/channel"

    def _say(self, name: str, state: State) -> None:
        folder = self.root / "jobs"
        folder.mkdir(exist_ok=True)
        path = folder / f"{name}.{os.getpid()}"
        new = path.with_name(f"{path.name}.new")
        new.write_text(json.dumps([state.value, time.time()]))
        new.rename(path)

    async def submit(self, job: Job) -> str:
        # Looked up first, as a target without create-if-absent does; the worst ones do not even that.
        found = self._jobs(job.name)
        if found and (self.looks or any(known.endswith(f".{os.getpid()}") for known, _, _ in found)):
            return found[0][0]
        self._say(job.name, State.QUEUED)
        task = asyncio.create_task(asyncio.to_thread(self._run, job))
        self._running.add(task)
        return f"{job.name}.{os.getpid()}"

    def _run(self, job: Job) -> None:
        payload = Payload.load(f"{job.payload}/job.json")
        channel = Folder(payload.channel)
        job_id = f"{job.name}.{os.getpid()}"
        node = Node(rank=0, job_id=job_id, restart=0, address="127.0.0.1", host="node-0")
        try:
            life = claim(channel, payload, node, "127.0.0.1:1", lambda line: None)
        except (NotClaimed, AlreadyDone):
            (self.root / f"left.{os.getpid()}").touch()
            self._say(job.name, State.FAILED)
            return
        (self.root / f"claimed.{os.getpid()}").touch()
        self._say(job.name, State.RUNNING)
        time.sleep(0.02)
        rank = {"rank": 0, "local_rank": 0, "exit_code": 0, "signal": None}
        body = {
            "v": 1,
            "life": life.life,
            "node": 0,
            "host": "node-0",
            "ranks": [rank],
            "at": iso(time.time()),
        }
        channel.create(f"lives/{life.life:04d}/nodes/0000.json", json.dumps(body).encode())
        self._say(job.name, State.SUCCEEDED)

    def _jobs(self, name: str) -> list[tuple[str, State, float]]:
        found = []
        for path in sorted((self.root / "jobs").glob(f"{name}.*")):
            if path.suffix != ".new":
                state, since = json.loads(path.read_text())
                found.append((path.name, State(state), since))
        return sorted(found, key=lambda job: (job[1].ended, job[1] is State.FAILED))

    async def observe(self, jobs: Collection[JobRef]) -> Mapping[str, Sighting]:
        seen = {}
        for ref in jobs:
            found = self._jobs(ref.name)
            seen[ref.name] = (
                Sighting(found[0][1], found[0][1].value, platform_id=found[0][0], since=found[0][2])
                if found
                else Sighting(State.GONE, "")
            )
        return seen

    async def cancel(self, job: JobRef, *, grace: float, since: float) -> None:
        pass

    async def logs(self, job: JobRef, node: int, since: str = "") -> LogChunk:
        return LogChunk("", since)

    async def inventory(self, labels: Mapping[str, str]) -> list[Listed]:
        return []

    async def forget(self, job: JobRef) -> None:
        pass

    async def offers(self, gang: Gang) -> list[Offer]:
        return [Offer("here", None, "owned", 0.0, "declared", time.time())]

    async def close(self) -> None:
        await asyncio.gather(*self._running)


def key_of(number: int) -> RunKey:
    return RunKey("together", "dag", f"run-{number}", "fit", -1)


async def drive(root: Path, number: int) -> str:
    """Take the run and drive it; answers the outcome."""
    target = Twins(root / f"platform-{number}", looks=number % 2 == 0)
    target.root.mkdir(exist_ok=True)
    watcher = Watcher(target, POLL)

    async def named(_: str) -> Any:
        return target

    async def secrets(_: Mapping[str, str]) -> Mapping[str, str]:
        return {}

    held = await take(
        Store(f"file://{root}/state"),
        key_of(number),
        Try("ti-1", 1, 0),
        on_clear="resume",
        gang=json.loads(GANG.to_json()),
        digest=GANG.digest(),
        deadline=None,
        now=time.time(),
    )
    world = World(
        clock=time.time,
        sleep=asyncio.sleep,
        target=named,
        channel_store=Store,
        watcher=lambda _: watcher,
        secrets=secrets,
        say=lambda line: None,
        rank_log=lambda line: None,
        poll=POLL,
    )
    driver = Driver(held.journal, held.key, held.incarnation, GANG, epoch=held.epoch, world=world)
    verdict = await asyncio.wait_for(driver.run(), LIMIT)
    assert verdict is not None
    await target.close()
    return verdict.outcome


def _process(root: str, count: int, seed: int, barrier: Any, answers: Any) -> None:
    rng = random.Random(seed)
    for number in range(count):
        barrier.wait(LIMIT)
        time.sleep(rng.choice((0.0, rng.random() * APART)))
        try:
            outcome = asyncio.run(drive(Path(root), number))
        except BaseException as error:
            outcome = repr(error)
        answers.put((number, outcome))


def start_together(root: Path, count: int) -> Counter[str]:
    """Start two drivers of one run together, ``count`` times; answers what was found, each as often as it was."""
    context = multiprocessing.get_context("spawn")
    barrier, answers = context.Barrier(2), context.Queue()
    processes = [
        context.Process(target=_process, args=(str(root), count, seed, barrier, answers)) for seed in (1, 2)
    ]
    for process in processes:
        process.start()
    outcomes: dict[int, list[str]] = {}
    for _ in range(2 * count):
        number, outcome = answers.get(timeout=2 * LIMIT)
        outcomes.setdefault(number, []).append(outcome)
    for process in processes:
        process.join(LIMIT)
    return judge(root, count, outcomes)


def judge(root: Path, count: int, outcomes: Mapping[int, list[str]]) -> Counter[str]:
    """Of each pair: lives that were claimed, twins that left, and whatever is not as it must be."""
    found: Counter[str] = Counter()
    for number in range(count):
        platform = root / f"platform-{number}"
        lives, left = len(list(platform.glob("claimed.*"))), len(list(platform.glob("left.*")))
        found["pairs"] += 1
        found["twins that left"] += left
        found["one life"] += lives == 1
        for outcome in outcomes.get(number, ["no answer"]):
            found[f"told {outcome}"] += 1
        slot = next((root / "state").glob(f"v1/together/dag/run-{number}/fit/_"))
        names = [json.loads(path.read_text())["incarnation"] for path in slot.glob("incarnations/*.json")]
        found["one incarnation"] += len(names) == 1
        run = Run()
        for path in sorted((slot / names[0] / "journal").glob("*.json")):
            run = fold(run, json.loads(path.read_text()))
        found["one owner, one attempt, success"] += (len(run.owners), len(run.attempts)) == (1, 1) and bool(
            run.verdict and run.verdict.success
        )
    return found


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="together-") as folder:
        begun = time.monotonic()
        print(dict(start_together(Path(folder), int((sys.argv[1:] or ["100"])[0]))))
        print(f"{time.monotonic() - begun:.0f} s")

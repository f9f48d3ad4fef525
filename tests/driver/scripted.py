"""A platform that does as it is told, for the driver: what it says and when it fails is the test's to write.

The driver, journal, channel and stores are the real ones; what a real platform
does is the conformance suite's business.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from airflow_gpu.driver import Driver, World
from airflow_gpu.gang.entries import iso
from airflow_gpu.gang.identity import RunKey, run_path
from airflow_gpu.gang.ownership import Claim, Try
from airflow_gpu.gang.run import State
from airflow_gpu.gang.spec import Gang
from airflow_gpu.rundir.slot import take
from airflow_gpu.rundir.store import Store
from airflow_gpu.targets.base import Capabilities, Job, JobRef, Listed, LogChunk, Offer, Sighting
from airflow_gpu.targets.watch import Watcher

POLL = 0.02
LIMIT = 20.0


class Scripted:
    """A target in memory. ``before`` has a coroutine function for each method that is to fail or wait."""

    name = "scripted"
    capabilities = Capabilities(notices=True)
    python = "python3"

    def __init__(self, root: Path) -> None:
        self.root = root
        self.jobs: dict[str, dict[str, Any]] = {}
        self.job_store: dict[str, Any] = {}
        self.submitted: list[str] = []
        self.cancelled: list[str] = []
        self.forgotten: list[str] = []
        self.before: dict[str, Callable[[], Awaitable[None]]] = {}

    @property
    def channel(self) -> str:
        return f"file://{self.root}"

    @property
    def job_channel(self) -> str:
        return str(self.root)

    async def _hook(self, name: str) -> None:
        if name in self.before:
            await self.before[name]()

    async def submit(self, job: Job) -> str:
        await self._hook("submit")
        if job.name not in self.jobs:
            self.submitted.append(job.name)
            self.jobs[job.name] = {"job": job, "state": State.RUNNING, "since": time.time()}
        await self._hook("submitted")
        return f"id-{job.name}"

    async def observe(self, jobs: Collection[JobRef]) -> Mapping[str, Sighting]:
        await self._hook("observe")
        seen = {}
        for ref in jobs:
            row = self.jobs.get(ref.name)
            seen[ref.name] = (
                Sighting(State.GONE, "")
                if row is None
                else Sighting(
                    row["state"], row["state"].value, platform_id=f"id-{ref.name}", since=row["since"]
                )
            )
        return seen

    def set(self, state: State, name: str | None = None) -> None:
        """What the platform says of a job from now on (of the newest one)."""
        self.jobs[name or self.submitted[-1]].update(state=state, since=time.time())

    async def cancel(self, job: JobRef, *, grace: float, since: float) -> None:
        await self._hook("cancel")
        self.cancelled.append(job.name)
        if job.name in self.jobs and not self.jobs[job.name]["state"].ended:
            self.set(State.CANCELLED, job.name)

    async def logs(self, job: JobRef, node: int, since: str = "") -> LogChunk:
        return LogChunk("", since)

    async def inventory(self, labels: Mapping[str, str]) -> list[Listed]:
        await self._hook("inventory")
        found = []
        for name, row in self.jobs.items():
            job = row["job"]
            if all(job.labels.get(label) == value for label, value in labels.items()):
                ref = JobRef(name, job.labels, job.attempt, job.digest, f"id-{name}", job.channel)
                found.append(Listed(ref, (await self.observe([ref]))[name], row["since"]))
        return found

    async def forget(self, job: JobRef) -> None:
        self.forgotten.append(job.name)

    async def offers(self, gang: Gang) -> list[Offer]:
        await self._hook("offers")
        return [Offer("scripted", None, "owned", 0.0, "declared", time.time())]

    async def close(self) -> None:
        pass


class Bench:
    """One slot on a scripted platform; drivers, lives and ends as the test wants them."""

    def __init__(self, root: Path) -> None:
        self.state, self.target = root / "state", Scripted(root / "channel")
        self.key = RunKey("tests", "dag", "run", "task", -1)
        self.said: list[str] = []
        self.log: list[str] = []
        self.asked_for_target: Callable[[], None] = lambda: None
        self.claim: Claim | None = None
        self.note = ""
        self.skew = 0.0

    async def driver(self, gang: Gang, ti_id: str = "ti-1", number: int = 1, max_tries: int = 0) -> Driver:
        held = await take(
            Store(f"file://{self.state}"),
            self.key,
            Try(ti_id, number, max_tries),
            on_clear=gang.recovery.on_clear,
            gang=json.loads(gang.to_json()),
            digest=gang.digest(),
            deadline=None,
            now=time.time() + self.skew,
        )
        self.claim, self.note = held.claim, held.note
        watcher = Watcher(self.target, POLL)

        async def target(_: str) -> Scripted:
            self.asked_for_target()
            return self.target

        async def secrets(_: Mapping[str, str]) -> Mapping[str, str]:
            return {}

        world = World(
            clock=lambda: time.time() + self.skew,
            sleep=asyncio.sleep,
            target=target,
            channel_store=Store,
            watcher=lambda _: watcher,
            secrets=secrets,
            say=self.said.append,
            rank_log=self.log.append,
            poll=POLL,
        )
        return Driver(held.journal, self.key, held.incarnation, gang, epoch=held.epoch, world=world)

    def folder(self, driver: Driver) -> Path:
        return self.target.root / run_path(self.key, driver.incarnation)

    def write(self, driver: Driver, path: str, body: Any) -> None:
        file = self.folder(driver) / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(body if isinstance(body, str) else json.dumps(body))

    def life(self, driver: Driver, number: int, attempt: int, start: Any = None, restart: int = 0) -> None:
        body = {"v": 1, "kind": "life", "life": number, "attempt": attempt, "job": "j", "restart": restart}
        self.write(
            driver,
            f"lives/{number:04d}.json",
            {**body, "nodes": 1, "processes": 1, "at": iso(time.time()), "from": start},
        )

    def ends(self, driver: Driver, life: int, code: int = 0) -> None:
        ranks = [{"rank": 0, "local_rank": 0, "exit_code": code, "signal": None}]
        body = {"v": 1, "life": life, "node": 0, "host": "h", "ranks": ranks}
        self.write(driver, f"lives/{life:04d}/nodes/0000.json", body)

    def gang(self, **more: Any) -> Gang:
        recovery = {"backoff": 0.02, "backoff_max": 0.02, **more.pop("recovery", {})}
        return Gang(command="true", targets="scripted", recovery=recovery, **more)


async def until(done: Callable[[], Any]) -> None:
    end = time.monotonic() + LIMIT
    while not done():
        assert time.monotonic() < end, "not in time"
        await asyncio.sleep(0.01)


def kinds(driver: Driver) -> list[str]:
    """The journal in words."""
    return [
        entry["kind"] + (f" {entry['cause']}" if entry["kind"] in ("over", "verdict") else "")
        for entry in driver.journal.entries
    ]

"""One process of Airflow's side, bare: it takes the run and drives it to a verdict, or ends it for a person.

Purpose: the real driver on the real local target and a real store in a folder.
Every call to store, target, secrets, connections and sleep is counted, and the
k-th one is spoilt as the errand says; for ``kill`` the process kills itself
there with SIGKILL, for ``stall`` it stops itself with SIGSTOP.

What it does not do: import Airflow. It has to be cheap to start.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from airflow_gpu.driver import Driver, SupersededError, World
from airflow_gpu.gang.identity import RunKey, run_path
from airflow_gpu.gang.ownership import Try
from airflow_gpu.gang.run import Verdict
from airflow_gpu.gang.spec import Gang
from airflow_gpu.rundir.journal import Journal
from airflow_gpu.rundir.slot import newest, take
from airflow_gpu.rundir.store import Entry, Store, StoreError
from airflow_gpu.targets.base import Job, JobRef, LogChunk, Offer, Sighting, TargetError
from airflow_gpu.targets.local import LocalConfig, LocalTarget
from airflow_gpu.targets.watch import Watcher

POLL = 0.3
DELAY, LATE, DUPLICATE, DROP = 1.0, 0.7, 0.4, 1.0
READ = ("before", "delay", "drop", "kill-before", "stall")
WRITE = ("before", "after", "late", "duplicate", "delay", "drop", "kill-before", "kill-after", "stall")
SLEEP = ("delay", "kill-before", "stall")
PATIENCE = 60.0

T = TypeVar("T")


@dataclass(frozen=True)
class Errand:
    """What one process is to do. ``role``: ``drive``, or ``stop`` for a person who has ended the task."""

    root: str
    run: str
    gang: str  # JSON
    ti_id: str = "ti-1"
    try_number: int = 1
    max_tries: int = 3
    role: str = "drive"
    op: str = ""  # which call is spoilt: the k-th of this name
    k: int = 0
    kind: str = ""
    calls: str = ""  # file in which the calls are written down

    @property
    def marks(self) -> Path:
        """The folder of this run's records."""
        return Path(self.root) / "marks" / self.run

    @property
    def key(self) -> RunKey:
        return RunKey("faults", "dag", self.run, "fit", -1)


class Spoiler:
    """Counts the calls of this process and spoils one."""

    def __init__(self, errand: Errand) -> None:
        self.errand = errand
        self.seen: Counter[str] = Counter()
        self._later: set[asyncio.Task[Any]] = set()

    async def call(
        self,
        op: str,
        effect: Callable[[], Awaitable[T]],
        kinds: tuple[str, ...],
        error: Callable[[str], Exception],
    ) -> T:
        errand = self.errand
        self.seen[op] += 1
        if errand.calls:
            with open(errand.calls, "a") as file:
                file.write(json.dumps([op, self.seen[op], kinds]) + "\n")
        kind = errand.kind if (op, self.seen[op]) == (errand.op, errand.k) and errand.kind in kinds else ""
        if kind:
            (errand.marks / "hit").write_text(kind)
        match kind:
            case "kill-before":
                os.kill(os.getpid(), signal.SIGKILL)
            case "before":
                raise error("refused")
            case "drop":
                await asyncio.sleep(DROP)
                raise error("no answer")
            case "late":
                self._soon(LATE, effect)
                raise error("connection reset")
        answer = await effect()
        match kind:
            case "after":
                raise error("reply lost")
            case "delay":
                await asyncio.sleep(DELAY)
            case "duplicate":
                self._soon(DUPLICATE, effect)
            case "kill-after":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stall":
                os.kill(os.getpid(), signal.SIGSTOP)
        return answer

    def _soon(self, seconds: float, effect: Callable[[], Awaitable[Any]]) -> None:
        async def arrive() -> None:
            await asyncio.sleep(seconds)
            try:
                await effect()
            except Exception:
                pass

        task = asyncio.create_task(arrive())
        self._later.add(task)
        task.add_done_callback(self._later.discard)

    async def sleep(self, seconds: float) -> None:
        await self.call(
            "sleep",
            lambda: asyncio.sleep(min(seconds, 1.0)),
            SLEEP,
            RuntimeError,
        )

    async def arrived(self) -> None:
        """What was sent on its way arrives, also when this process would be done before."""
        while self._later:
            await asyncio.wait(self._later)


class SpoiltStore(Store):
    """The real store; each call may be spoilt."""

    def __init__(self, uri: str, spoiler: Spoiler, name: str) -> None:
        super().__init__(uri)
        self._spoiler, self._name = spoiler, name

    async def _ask(self, op: str, effect: Callable[[], Awaitable[T]], kinds: tuple[str, ...]) -> T:
        return await self._spoiler.call(f"{self._name}.{op}", effect, kinds, StoreError)

    async def create(self, path: str, data: bytes) -> None:
        real = super().create
        await self._ask("create", lambda: real(path, data), WRITE)

    async def get(self, path: str, start: int = 0, limit: int | None = None) -> bytes:
        real = super().get
        return await self._ask("get", lambda: real(path, start, limit), READ)

    async def exists(self, path: str) -> bool:
        real = super().exists
        return await self._ask("exists", lambda: real(path), READ)

    async def names(self, prefix: str = "") -> list[str]:
        real = super().names
        return await self._ask("names", lambda: real(prefix), READ)

    async def list(self, prefix: str = "") -> list[Entry]:
        real = super().list
        return await self._ask("list", lambda: real(prefix), READ)


class SpoiltTarget(LocalTarget):
    """The real local target; each call may be spoilt."""

    def __init__(self, name: str, config: LocalConfig, spoiler: Spoiler) -> None:
        super().__init__(name, config)
        self._spoiler = spoiler

    async def _ask(self, op: str, effect: Callable[[], Awaitable[T]], kinds: tuple[str, ...]) -> T:
        return await self._spoiler.call(f"target.{op}", effect, kinds, TargetError)

    async def submit(self, job: Job) -> str:
        real = super().submit
        return await self._ask("submit", lambda: real(job), WRITE)

    async def observe(self, jobs: Collection[JobRef]) -> Mapping[str, Sighting]:
        real = super().observe
        return await self._ask("observe", lambda: real(jobs), READ)

    async def cancel(self, job: JobRef, *, grace: float, since: float) -> None:
        real = super().cancel
        await self._ask("cancel", lambda: real(job, grace=grace, since=since), WRITE)

    async def logs(self, job: JobRef, node: int, since: str = "") -> LogChunk:
        real = super().logs
        return await self._ask("logs", lambda: real(job, node, since), READ)

    async def offers(self, gang: Gang) -> list[Offer]:
        real = super().offers
        return await self._ask("offers", lambda: real(gang), READ)

    async def forget(self, job: JobRef) -> None:
        real = super().forget
        await self._ask("forget", lambda: real(job), WRITE)


def config(root: str) -> LocalConfig:
    """The one cluster on which all runs are played: this machine as many pretended nodes."""
    return LocalConfig(
        path=Path(root) / "cluster",
        nodes=40,
        gpus_per_node=1,
        cpus=4,
        memory=1 << 33,
        pretend=True,
        grace=5.0,
        straggler=2.0,
        idle_exit=600.0,
    )


class Bare:
    """The errand, carried out."""

    def __init__(self, errand: Errand) -> None:
        self.errand = errand
        self.spoiler = Spoiler(errand)
        self.target = SpoiltTarget("here", config(errand.root), self.spoiler)
        self.watcher = Watcher(self.target, POLL, self.spoiler.sleep)
        self.state = SpoiltStore(f"file://{errand.root}/state", self.spoiler, "state")

    def world(self) -> World:
        async def target(_: str) -> Any:
            async def found() -> Any:
                return self.target

            return await self.spoiler.call("connection", found, READ, TargetError)

        async def secrets(references: Mapping[str, str]) -> Mapping[str, str]:
            async def found() -> dict[str, str]:
                return dict.fromkeys(references, "s3cret")

            return await self.spoiler.call("secrets", found, READ, TargetError)

        return World(
            clock=time.time,
            sleep=self.spoiler.sleep,
            target=target,
            channel_store=lambda uri: SpoiltStore(uri, self.spoiler, "channel"),
            watcher=lambda _: self.watcher,
            secrets=secrets,
            say=lambda line: None,
            rank_log=lambda line: None,
            poll=POLL,
        )

    async def drive(self) -> Verdict | None:
        errand = self.errand
        gang = Gang.from_json(errand.gang)
        while True:
            try:
                held = await take(
                    self.state,
                    errand.key,
                    Try(errand.ti_id, errand.try_number, errand.max_tries),
                    on_clear=gang.recovery.on_clear,
                    gang=json.loads(errand.gang),
                    digest=gang.digest(),
                    deadline=None,
                    now=time.time(),
                )
                break
            except StoreError:  # as GangOperator does
                await self.spoiler.sleep(POLL)
        driver = Driver(
            held.journal, errand.key, held.incarnation, gang, epoch=held.epoch, world=self.world()
        )
        return await driver.run()

    async def stop(self) -> bool:
        """What on_kill does."""
        errand = self.errand
        while True:
            try:
                found = await newest(self.state, errand.key)
                if found is None:
                    return False
                journal = Journal(self.state, run_path(errand.key, found[1]))
                run = await journal.refresh()
                if run.owner is None:
                    return False
                break
            except StoreError:
                await self.spoiler.sleep(POLL)
        gang = Gang.from_json(json.dumps(journal.gang_of(run.epoch)))
        driver = Driver(journal, errand.key, found[1], gang, epoch=run.epoch, world=self.world())
        stopped = await driver.stop("user", "marked failed")
        if stopped:
            await driver.run()
        return stopped

    async def carry_out(self) -> dict[str, Any]:
        told: dict[str, Any] = {"role": self.errand.role, "ti": self.errand.ti_id}
        try:
            async with asyncio.timeout(PATIENCE):
                if self.errand.role == "stop":
                    told["stopped"] = await self.stop()
                else:
                    verdict = await self.drive()
                    assert verdict is not None
                    told |= {
                        "outcome": verdict.outcome,
                        "cause": verdict.cause.value,
                        "message": verdict.message[:200],
                    }
        except SupersededError:
            told["outcome"] = "superseded"
        except Exception as error:
            told["error"] = repr(error)
        await self.spoiler.arrived()
        told["calls"] = self.spoiler.seen.total()
        return told


def main(errand: Errand) -> None:
    """Carry the errand out, and leave a line about it beside the run's other records."""
    told = asyncio.run(Bare(errand).carry_out())
    with open(errand.marks / "told", "a") as file:
        file.write(json.dumps(told) + "\n")

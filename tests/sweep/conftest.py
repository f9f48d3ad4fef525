"""Gangs on a real local cluster whose drivers are gone, and an Airflow that says what the test wants."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from airflow_gpu.driver import Driver, World
from airflow_gpu.gang.entries import attempt_entry
from airflow_gpu.gang.identity import RunKey, attempt_name
from airflow_gpu.gang.ownership import Try
from airflow_gpu.gang.run import State
from airflow_gpu.gang.spec import Gang
from airflow_gpu.rundir.journal import Journal
from airflow_gpu.rundir.slot import Held, take
from airflow_gpu.rundir.store import Store
from airflow_gpu.staging import ref_for
from airflow_gpu.sweeping.airflow import CannotAsk
from airflow_gpu.sweeping.report import Item, Report
from airflow_gpu.sweeping.sweep import Options, sweep
from airflow_gpu.targets.base import JobRef, NotConfigured, Target
from airflow_gpu.targets.local.admin import Admin
from airflow_gpu.targets.local.config import LocalConfig
from airflow_gpu.targets.local.target import LocalTarget
from airflow_gpu.targets.watch import Watcher

POLL = 0.1
LIMIT = 60.0
STAY = ["sleep", "600"]


class Says:
    """An Airflow: states of task instances as the test sets them. ``before`` runs when it is asked."""

    who = "as the test says"

    def __init__(self) -> None:
        self.told: dict[RunKey, str | None] = {}
        self.own = True
        self.down = False
        self.asked: list[RunKey] = []
        self.before: Any = None

    async def states(self, keys: Collection[RunKey]) -> Mapping[RunKey, str | None]:
        self.asked += keys
        if self.down:
            raise CannotAsk("the database is away")
        answer = {key: self.told[key] for key in keys if key in self.told}
        if self.before is not None:
            await self.before()
        return answer


class Plant:
    """One local cluster of 2 nodes, one state store; what a test does with them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.airflow = Says()
        self.store = Store(f"file://{root}/state")
        self.admin = Admin(root / "cluster")
        self.targets: dict[str, Target] = {"here": self.cluster("here")}
        self.said: list[str] = []
        self.open: Callable[[str], Store] = Store
        self.now: Callable[[], float] = time.time

    def cluster(self, name: str) -> LocalTarget:
        shape = {"nodes": 4, "gpus_per_node": 1, "accelerator": "pretend"}
        return LocalTarget(name, LocalConfig.from_mapping({"path": str(self.root / "cluster"), **shape}))

    def world(self) -> World:
        watchers: dict[int, Watcher] = {}

        async def target(name: str) -> Target:
            if name not in self.targets:
                raise NotConfigured(f"there is no connection {name!r}")
            return self.targets[name]

        async def secrets(_: Mapping[str, str]) -> Mapping[str, str]:
            return {}

        return World(
            clock=self.now,
            sleep=asyncio.sleep,
            target=target,
            channel_store=self.open,
            watcher=lambda of: watchers.setdefault(id(of), Watcher(of, POLL)),
            secrets=secrets,
            say=self.said.append,
            rank_log=lambda _: None,
            poll=POLL,
        )

    def key(self, task: str = "fit", run: str = "r1", installation: str = "prod") -> RunKey:
        return RunKey(installation, "dag", run, task)

    def gang(self, **more: Any) -> Gang:
        shape = {"command": STAY, "gpus_per_node": 1, "targets": "here", "stop_grace": 5, **more}
        return Gang(**shape)

    async def own(
        self,
        key: RunKey,
        gang: Gang | None = None,
        *,
        ti_id: str = "ti-1",
        number: int = 1,
        max_tries: int = 0,
    ) -> Held:
        """Become the owner of the run, as a try of the task does first."""
        gang = gang or self.gang()
        return await take(
            self.store,
            key,
            Try(ti_id, number, max_tries),
            on_clear="resume",
            gang=json.loads(gang.to_json()),
            digest=gang.digest(),
            deadline=None,
            now=time.time(),
        )

    def driver(self, held: Held, gang: Gang | None = None) -> Driver:
        return Driver(
            held.journal,
            held.key,
            held.incarnation,
            gang or self.gang(),
            epoch=held.epoch,
            world=self.world(),
        )

    async def begin(
        self, key: RunKey, state: str | None = "deferred", gang: Gang | None = None, **me: Any
    ) -> Held:
        """A gang that runs, and whose driver is gone: no worker, no triggerer."""
        held = await self.own(key, gang, **me)
        driver = self.driver(held, gang)
        await driver.run(until_submitted=True)
        await self.until_lives(held)
        self.airflow.told[key] = state
        return held

    async def until_lives(self, held: Held) -> None:
        attempt = held.journal.run.attempts[-1]
        channel = self.driver(held).channel(attempt)
        end = time.monotonic() + LIMIT
        while not any(life.attempt == attempt.number and not life.fence for life in await channel.lives()):
            assert time.monotonic() < end, await self.state(held)
            await asyncio.sleep(0.05)

    async def finish(self, held: Held, gang: Gang | None = None) -> None:
        """Drive it to its verdict."""
        assert await asyncio.wait_for(self.driver(held, gang).run(), LIMIT) is not None

    async def never_submitted(self, held: Held, channel: str) -> None:
        """Its attempt is journalled with its channel there, and its driver went before it could submit."""
        entry = attempt_entry(
            attempt=1,
            name=attempt_name(held.key, held.incarnation, 1),
            target="here",
            channel=f"{channel}/{held.journal.path}",
            offer={},
            resume=True,
            first_life=1,
            digest="d" * 64,
        )
        await held.journal.append(entry, epoch=held.epoch, now=time.time(), after=held.journal.run.seq)
        self.airflow.told[held.key] = "failed"

    def ref(self, held: Held, attempt: int = -1) -> JobRef:
        found = held.journal.run.attempts[attempt if attempt < 0 else attempt - 1]
        return ref_for(held.key, held.incarnation, found)

    async def state(self, held: Held, attempt: int = -1) -> State:
        """What the platform says of its job."""
        ref = self.ref(held, attempt)
        return (await self.targets["here"].observe([ref]))[ref.name].state

    async def read(self, held: Held) -> Journal:
        """The journal as it is in the store now."""
        journal = Journal(self.store, held.journal.path)
        await journal.refresh()
        return journal

    async def kinds(self, held: Held) -> list[str]:
        return [entry["kind"] for entry in (await self.read(held)).entries]

    async def sweep(
        self, installation: str = "prod", names: Collection[str] = ("here",), **more: Any
    ) -> Report:
        options = Options(**more.pop("options", {}))
        return await sweep(
            self.store,
            installation,
            self.world(),
            more.pop("asks", self.airflow),
            names=names,
            options=options,
            **more,
        )

    def end(self) -> None:
        if (self.root / "cluster").exists():
            self.admin.stop(gangs=True, grace=0)


def cases(report: Report) -> list[str]:
    return sorted(item.case.value for item in report.items if item.case.value not in ("over", "part"))


def only(report: Report, case: str) -> Item:
    [item] = [item for item in report.items if item.case.value == case]
    return item


@pytest.fixture
def plant(tmp_path: Path) -> Iterator[Plant]:
    made = Plant(tmp_path)
    try:
        yield made
    finally:
        with contextlib.suppress(FileNotFoundError):
            made.end()

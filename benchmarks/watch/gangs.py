"""Thousands of gangs on real local targets: owned, journalled, staged and submitted by the package's own code.

Purpose: what ``GangOperator.execute`` does before it defers, for N gangs in one
process. Workers for 5,000 tasks would take hours and measure something else.

Each gang is one node with one (pretended) GPU, and its program sleeps. A first
gang takes the whole cluster until :meth:`Gangs.let_run` ends it, so that all
others wait in the queue.

Limits: a running gang is two Python processes and about 50 MB, so only
``slots`` of them run at a time; the daemon and the gangs run at the lowest
priority, since in real life they are other machines.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from airflow_gpu.driver import Driver, World
from airflow_gpu.gang.identity import RunKey
from airflow_gpu.gang.ownership import Try
from airflow_gpu.gang.spec import Gang
from airflow_gpu.rundir.slot import take
from airflow_gpu.rundir.store import Store
from airflow_gpu.staging import ref_for
from airflow_gpu.targets.local.admin import Admin, AdminError
from airflow_gpu.targets.local.config import LocalConfig
from airflow_gpu.targets.local.target import LocalTarget
from airflow_gpu.targets.watch import Watcher

INSTALLATION, DAG_ID = "bench", "gangs"
AT_ONCE = 16
START_LIMIT = 600.0
TRIES = 10


@dataclass(frozen=True)
class Deferred:
    """What a task instance's triggers need to know of its gang."""

    map_index: int
    path: str
    epoch: int
    digest: str
    conn_id: str
    job: dict[str, Any]  # for the peer


class Gangs:
    """The gangs of one case, on ``targets`` local clusters below ``home``."""

    def __init__(self, home: Path, count: int, targets: int, slots: int) -> None:
        self.home, self.count = home, count
        self.slots = max(1, slots // targets)
        self.state_uri = f"file://{home}/state"
        self.clusters = {f"gpu_{letter}": home / f"cluster-{letter}" for letter in "ab"[:targets]}
        self.deferred: list[Deferred] = []
        self.took = 0.0
        self._blockers: list[tuple[str, Any]] = []

    def shape(self, path: Path) -> dict[str, Any]:
        return {
            "path": str(path),
            "nodes": 1,
            "gpus_per_node": self.slots,
            "accelerator": "pretend",
            "pretend": True,
            "cpus": self.slots,
            "memory": self.slots * 2**30,
        }

    @property
    def connections(self) -> dict[str, str]:
        """For Airflow's environment."""
        return {
            f"AIRFLOW_CONN_{name.upper()}": json.dumps({"conn_type": "gpu_local", "extra": self.shape(path)})
            for name, path in self.clusters.items()
        }

    def submit(self) -> None:
        """Own and submit all of them; they wait behind one that takes the whole cluster."""
        begin = time.monotonic()
        asyncio.run(self._submit())
        self.took = time.monotonic() - begin

    async def _submit(self) -> None:
        targets = {
            name: LocalTarget(name, LocalConfig.from_mapping(self.shape(path)))
            for name, path in self.clusters.items()
        }
        watchers = {name: Watcher(target, 5.0) for name, target in targets.items()}
        stores: dict[str, Store] = {}

        def store(uri: str) -> Store:
            return stores.get(uri) or stores.setdefault(uri, Store(uri))

        async def target(name: str) -> LocalTarget:
            return targets[name]

        async def secrets(_: Mapping[str, str]) -> dict[str, str]:
            return {}

        world = World(
            clock=time.time,
            sleep=asyncio.sleep,
            target=target,  # type: ignore[arg-type]
            channel_store=store,
            watcher=lambda target: watchers[target.name],
            secrets=secrets,
            say=lambda line: None,
            rank_log=lambda line: None,
        )
        turn = asyncio.Semaphore(AT_ONCE)

        async def one(number: int, conn_id: str, gpus: int) -> Driver:
            async with turn:
                gang = Gang(
                    nodes=1,
                    gpus_per_node=gpus,
                    ranks_per_node=1,
                    command=["sleep", "86400"],
                    targets=conn_id,
                    time_limit="2d",
                )
                key = RunKey(INSTALLATION, DAG_ID, "bench", "train", number)
                held = await take(
                    store(self.state_uri),
                    key,
                    Try(f"ti-{number}", 1, 0),
                    on_clear="resume",
                    gang=json.loads(gang.to_json()),
                    digest=gang.digest(),
                    deadline=None,
                    now=time.time(),
                )
                driver = Driver(held.journal, key, held.incarnation, gang, epoch=held.epoch, world=world)
                await driver.run(until_submitted=True)
                return driver

        for place, name in enumerate(self.clusters):
            blocker = await one(1_000_000 + place, name, self.slots)
            self._blockers.append((name, _ref(blocker)))
            self._nice(name, 19)
        names = list(self.clusters)
        drivers = await asyncio.gather(*(one(n, names[n % len(names)], 1) for n in range(self.count)))
        for number, driver in enumerate(drivers):
            self.deferred.append(
                Deferred(
                    map_index=number,
                    path=driver.journal.path,
                    epoch=driver.epoch,
                    digest=driver.gang.digest(),
                    conn_id=driver.journal.run.attempts[0].target,
                    job=asdict(_ref(driver)),
                )
            )

    def _nice(self, name: str, value: int) -> None:
        """The priority of the daemon, and with it of every gang that it starts from now on."""
        pid = int(Admin(self.clusters[name]).status()["daemon"]["pid"])
        with contextlib.suppress(PermissionError, ProcessLookupError):  # only root may take it back
            os.setpriority(os.PRIO_PROCESS, pid, value)

    def let_run(self) -> None:
        """End the gang in front, and wait until as many others run as there is room for."""

        async def end() -> None:
            for name, ref in self._blockers:
                target = LocalTarget(name, LocalConfig.from_mapping(self.shape(self.clusters[name])))
                await target.cancel(ref, grace=0.0, since=time.time())

        asyncio.run(end())
        limit = time.monotonic() + START_LIMIT
        wanted = min(self.count, self.slots * len(self.clusters))
        while self.lives() < wanted:
            if time.monotonic() > limit:
                raise TimeoutError(f"{self.lives()} of {wanted} gangs run after {START_LIMIT:.0f} s")
            time.sleep(1)

    def lives(self) -> int:
        """Gangs that have claimed a life: their program runs."""
        return sum(
            any((path / "runs" / deferred.path / "lives").glob("*.json"))
            for deferred in self.deferred
            for path in (self.clusters[deferred.conn_id],)
        )

    def end(self) -> None:
        """Cancel all of them, and end the daemons."""
        for name, path in self.clusters.items():
            if not path.exists():
                continue
            self._nice(name, 0)
            for left in reversed(range(TRIES)):
                try:
                    Admin(path).stop(gangs=True)
                    break
                except AdminError:  # thousands take their time
                    if not left:
                        raise


def _ref(driver: Driver) -> Any:
    return ref_for(driver.key, driver.incarnation, driver.journal.run.attempts[0])

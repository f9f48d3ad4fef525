"""What a target's test bed gives the conformance suite: a target, and ways to make its platform misbehave."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from airflow_gpu.driver import Driver, World
from airflow_gpu.gang.identity import RunKey
from airflow_gpu.gang.ownership import Try
from airflow_gpu.gang.run import Verdict
from airflow_gpu.gang.spec import Gang
from airflow_gpu.rundir.channel import Channel
from airflow_gpu.rundir.slot import take
from airflow_gpu.rundir.store import Store
from airflow_gpu.staging import job_for, ref_for
from airflow_gpu.targets.base import Job, JobRef, Target
from airflow_gpu.targets.watch import Watcher

POLL = 0.1


class Bed(Protocol):
    """One target on a real system. ``shape`` is what fills the system: nodes, GPUs per node."""

    target: Target
    nodes: int
    gpus_per_node: int
    limit: float  # seconds that anything on this bed may take, generously
    pace: float  # how much slower than a daemon on this machine the platform acts
    # Where the channel is no folder, also ``channel_store``: opens it for Airflow's side.

    async def preempt(self, job: str, *, notice: bool) -> None:
        """The platform takes the gang's nodes."""

    async def kill_node(self, job: str) -> str:
        """A node of the gang dies at once; answers its host."""

    async def end_outside(self, job: JobRef) -> None:
        """A person ends the job with the platform's own means."""

    async def requeueing(self) -> Target:
        """A target of the same system that starts preempted gangs again by itself."""

    async def obscure(self, job: str) -> None:
        """From now on the platform says something of this job that is in no table."""

    async def clear(self) -> None:
        """Take that back."""

    async def submissions(self, job: str) -> int:
        """How many objects of that name the platform has seen."""


@dataclass
class Played:
    """One run under test: its driver, and what the driver said."""

    bed: Any
    store: Store
    gang: Gang
    key: RunKey
    driver: Driver
    target: Target
    said: list[str] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    task: asyncio.Task[Verdict | None] | None = None

    def start(self) -> Played:
        self.task = asyncio.create_task(self.driver.run())
        return self

    async def verdict(self) -> Verdict:
        assert self.task is not None
        try:
            found = await asyncio.wait_for(asyncio.shield(self.task), self.bed.limit)
        except TimeoutError:
            raise AssertionError(f"no verdict within {self.bed.limit} s: {self.said[-12:]}") from None
        assert found is not None
        return found

    @property
    def run(self) -> Any:
        return self.driver.journal.run

    @property
    def job(self) -> str:
        return str(self.run.attempts[-1].name)

    async def channel(self) -> Channel:
        return self.driver.channel(self.run.attempts[-1])

    async def ref(self, attempt: Any) -> JobRef:
        """What finds the job of an attempt."""
        return ref_for(self.key, self.driver.incarnation, attempt)

    async def as_submitted(self, attempt: Any) -> Job:
        """The job as the driver gave it to the target."""
        channel = await self.channel()
        return job_for(channel, self.target, self.key, self.driver.incarnation, self.gang, attempt, {})

    async def until(self, what: str, done: Any) -> Any:
        """Until ``done()`` (a coroutine function) answers something true."""
        end = time.monotonic() + self.bed.limit
        while True:
            found = await done()
            if found:
                return found
            if self.task is not None and self.task.done():
                raise AssertionError(f"the run ended before: {what}; {self.task.result()}; {self.said[-5:]}")
            if time.monotonic() > end:
                raise AssertionError(f"not within {self.bed.limit} s: {what}; {self.said[-5:]}")
            await asyncio.sleep(POLL)

    async def until_step(self, step: int, life: int | None = None) -> None:
        """Until the gang has reported that many steps (in that life)."""

        async def there() -> bool:
            if self.run.current is None:
                return False
            channel = Channel((await self.channel()).store, (await self.channel()).path)
            found = await channel.evidence(self.run.current.number, ended=False)
            newer = life is None or (found.life is not None and found.life.number >= life)
            return newer and found.step is not None and found.step >= step

        await self.until(f"step {step}", there)

    async def lives(self) -> list[Any]:
        return [life for life in await (await self.channel()).lives() if not life.fence]


async def play(
    bed: Bed,
    state: Path,
    gang: Gang,
    *,
    target: Target | None = None,
    key: RunKey | None = None,
    ti_id: str = "ti-1",
    try_number: int = 1,
    max_tries: int = 0,
    secret_values: Mapping[str, str] | None = None,
    targets: Mapping[str, Target] | None = None,
    seed: Any = None,
) -> Played:
    """Own a run and make its driver; ``Played.start`` sets it going. ``targets``: several, by their names."""
    store = Store(f"file://{state}")
    chosen = target or bed.target
    # A name of its own for each test: the platform remembers earlier ones.
    key = key or RunKey("conformance", "dag", f"run-{secrets.token_hex(4)}", "train", -1)
    held = await take(
        store,
        key,
        Try(ti_id, try_number, max_tries),
        on_clear=gang.recovery.on_clear,
        gang=json.loads(gang.to_json()),
        digest=gang.digest(),
        deadline=None,
        now=time.time(),
        seed=seed,
    )
    played: Played
    said: list[str] = []
    log: list[str] = []
    watchers = {id(one): Watcher(one, POLL) for one in [chosen, *(targets or {}).values()]}

    async def named(name: str) -> Target:
        return targets[name] if targets is not None else chosen

    async def values(references: Mapping[str, str]) -> Mapping[str, str]:
        return {name: (secret_values or {})[name] for name in references}

    world = World(
        clock=time.time,
        sleep=asyncio.sleep,
        target=named,
        channel_store=getattr(bed, "channel_store", Store),
        watcher=lambda of: watchers[id(of)],
        secrets=values,
        say=said.append,
        rank_log=log.append,
        poll=POLL,
    )
    driver = Driver(held.journal, key, held.incarnation, gang, epoch=held.epoch, world=world)
    played = Played(bed, store, gang, key, driver, chosen, said, log)
    return played

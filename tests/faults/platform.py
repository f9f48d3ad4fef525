"""A platform that keeps the truth: which jobs there are, which lives compute, and when each really ended.

Purpose: a queue, starts, preemption with and without notice, requeueing, lost
nodes, errors, slow ends. What happens to which attempt is the scenario's to
say, by a :class:`Fate` for each start. What the platform *reports* comes late;
what is *true* stands in :class:`Truth`, and the invariants look only there.

What it does not do: decide who may compute. A job claims its life by the real
rules (:mod:`tests.faults.ranks`).

Limits: a node that is lost is really dead before the platform says so. (The
weaker promise of real systems, a lost node that computes on for a few seconds,
is the conformance suites' to test.)
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Collection, Mapping
from contextvars import Context
from dataclasses import dataclass, field
from typing import Any

from airflow_gpu.gang.run import State
from airflow_gpu.gang.spec import Gang
from airflow_gpu.targets.base import (
    Capabilities,
    Job,
    JobRef,
    Listed,
    LogChunk,
    NameTaken,
    Offer,
    Sighting,
    TargetError,
)
from tests.faults.clock import BEGINNING
from tests.faults.disk import Disk
from tests.faults.ranks import AlreadyDone, NotClaimed, Records, claim
from tests.faults.seam import READ, WRITE, Actor

TOTAL = 12
"""Steps of work of every simulated program, a second each."""

SAVE_EVERY = 5
SUPERSEDED_LOOK = 3.0
"""Seconds within which a life sees that there is a newer entry."""

PREEMPTION_GRACE = 10.0
SAVING = 1.5
"""Seconds from a notice to the end of a program that saves."""

INCARNATION = "airflow-gpu/incarnation"


@dataclass(frozen=True)
class Fate:
    """What becomes of one start of a job. ``at``: seconds after the life began."""

    what: str = "success"  # notice, done (in its grace), preempt, node, error, quiet, lie, timeout, vanish
    at: float = 7.0
    queue: float = 3.0
    start: float = 2.0
    lag: float = 1.0  # until the platform has seen that the ranks ended
    requeue: bool = False
    wavers: float = 0.0  # seconds for which it is shown as ended before it is queued again
    stubborn: bool = False  # the program ignores a notice
    slow: float = 1.0  # seconds a step takes


@dataclass
class LifeTruth:
    """What really became of a life."""

    incarnation: str
    number: int
    attempt: int
    job: str
    begin: float
    from_step: int
    end: float | None = None
    ok: bool = False
    saved: int | None = None


@dataclass
class Truth:
    """Everything that happened, whoever was told."""

    lives: list[LifeTruth] = field(default_factory=list)
    happened: dict[tuple[str, int], set[str]] = field(default_factory=dict)
    runs: list[str] = field(default_factory=list)  # incarnations, in the order of their first submit

    def note(self, incarnation: str, attempt: int, what: str) -> None:
        self.happened.setdefault((incarnation, attempt), set()).add(what)


@dataclass
class JobTruth:
    """One object of the platform."""

    id: str
    job: Job
    path: str
    at: float
    state: State = State.QUEUED
    native: str = "QUEUED"
    since: float = 0.0
    restart: int = 0
    ending: State | None = None
    blamed: tuple[str, ...] = ()
    forgotten: bool = False
    cancelled: bool = False
    kill_at: float | None = None
    wake: asyncio.Future[None] | None = None
    life: LifeTruth | None = None

    @property
    def incarnation(self) -> str:
        return self.job.labels[INCARNATION]

    def rouse(self) -> None:
        if self.wake is not None and not self.wake.done():
            self.wake.set_result(None)


class Platform:
    """All jobs of one target. ``fates(run, attempt, restart)`` is the scenario's; ``run`` counts incarnations from 1."""

    def __init__(
        self,
        loop: Any,
        channel: Disk,
        truth: Truth,
        fates: Callable[[int, int, int], Fate],
        *,
        atomic: bool = True,
    ) -> None:
        self.loop, self.channel, self.truth, self.fates, self.atomic = loop, channel, truth, fates, atomic
        self.root = channel.uri.removeprefix("file://")  # as its jobs see the channel
        self.jobs: list[JobTruth] = []
        self.away: Callable[[], bool] = lambda: False
        self.free: Callable[[], int | None] = lambda: None
        self.others: Callable[[str], Disk] = lambda path: channel  # the files of any channel, by its path
        self._tasks: set[asyncio.Task[None]] = set()
        channel.on_create = self._created

    # -- what targets ask of it: each takes no time ------------------------------------------------

    def find(self, name: str) -> JobTruth | None:
        """The object of that name that lives, else the oldest one."""
        named = [job for job in self.jobs if job.job.name == name and not job.forgotten]
        return next((job for job in named if not job.state.ended), named[0] if named else None)

    def create(self, job: Job) -> str:
        """A new object, whether or not there is one of that name."""
        path = job.channel.removeprefix(f"{self.root}/")
        made = JobTruth(f"job-{len(self.jobs) + 1}", job, path, self.loop.clock(), since=self.loop.clock())
        self.jobs.append(made)
        if made.incarnation not in self.truth.runs:
            self.truth.runs.append(made.incarnation)
        # In no process's context: a job outlives whoever submitted it.
        task = self.loop.create_task(self._play(made), context=Context())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return made.id

    def adopt(self, job: Job) -> str | None:
        found = self.find(job.name)
        if found is None:
            return None
        if found.incarnation != job.labels[INCARNATION] or found.job.digest != job.digest:
            raise NameTaken(f"{job.name} is somebody else's")
        return found.id

    def submit(self, job: Job) -> str:
        """Create-if-absent, in one."""
        return self.adopt(job) or self.create(job)

    def cancel(self, name: str, grace: float) -> None:
        for job in self.jobs:
            if job.job.name == name and not job.state.ended and not job.cancelled:
                job.cancelled = True
                job.kill_at = self.loop.now + grace if job.kill_at is None else job.kill_at
                job.rouse()

    def sighting(self, name: str) -> Sighting:
        job = self.find(name)
        if job is None:
            return Sighting(State.GONE, "", "there is no job of that name")
        return Sighting(
            state=job.state,
            native=job.native,
            platform_id=job.id,
            restart=job.restart,
            since=job.since,
            ending=job.ending,
            blamed_hosts=job.blamed,
        )

    def listed(self, labels: Mapping[str, str]) -> list[Listed]:
        found = []
        for job in self.jobs:
            if not job.forgotten and all(job.job.labels.get(name) == value for name, value in labels.items()):
                ref = JobRef(
                    job.job.name, job.job.labels, job.job.attempt, job.job.digest, job.id, job.job.channel
                )
                found.append(Listed(ref, self.sighting(job.job.name), job.at))
        return found

    def forget(self, name: str) -> None:
        """As a Kubernetes object that is deleted after its end: its name is free again."""
        for job in self.jobs:
            if job.job.name == name and job.state.ended:
                job.forgotten = True

    # -- what becomes of a job -----------------------------------------------------------------------

    def _show(self, job: JobTruth, state: State, ending: State | None = None) -> None:
        if job.state is not state:
            job.since = self.loop.clock()
        job.state, job.native, job.ending = state, state.value.upper(), ending

    async def _nap(self, job: JobTruth, until: float) -> None:
        """Sleep until that moment of the loop's clock, or until something happens to the job."""
        job.wake = self.loop.create_future()
        handle = self.loop.call_at(until, job.rouse)
        try:
            await job.wake
        finally:
            handle.cancel()

    async def _rest(self, job: JobTruth, seconds: float) -> bool:
        """Whether it was cancelled meanwhile."""
        until = self.loop.now + seconds
        while self.loop.now < until and not job.cancelled:
            await self._nap(job, until)
        return job.cancelled

    def _created(self, path: str) -> None:
        """A new entry in a run's lives: the ones that compute see it soon."""
        if re.search(r"/lives/\d+\.json$", path):
            for job in self.jobs:
                if job.life is not None and path.startswith(job.path):
                    self.loop.call_later(SUPERSEDED_LOOK, job.rouse)

    async def _play(self, job: JobTruth) -> None:
        while True:
            run = self.truth.runs.index(job.incarnation) + 1
            fate = self.fates(run, job.job.attempt, job.restart)
            self._show(job, State.QUEUED)
            if await self._rest(job, fate.queue):
                self._show(job, State.CANCELLED)
                return
            self._show(job, State.STARTING)
            if await self._rest(job, fate.start):
                self._show(job, State.CANCELLED)
                return
            ended = await self._live(job, fate)
            if ended is State.GONE:
                job.forgotten = True
            await asyncio.sleep(fate.lag)
            again = fate.requeue and ended in (State.PREEMPTED, State.NODE_LOST) and not job.cancelled
            if not again:
                self._show(job, State.FAILED if ended is State.GONE else ended)
                return
            if fate.wavers:
                self._show(job, ended)
                if await self._rest(job, fate.wavers):
                    return
            job.restart += 1
            job.kill_at = None

    async def _live(self, job: JobTruth, fate: Fate) -> State:
        """One start of the ranks; answers what the platform will call its end."""
        self._show(job, State.RUNNING)
        try:
            claimed = claim(self.channel, job.path, job.job.attempt, job.id, job.restart, self.others)
        except NotClaimed:
            self.truth.note(job.incarnation, job.job.attempt, "left")
            return State.FAILED
        except AlreadyDone:
            return State.SUCCEEDED
        step = claimed.start.step if claimed.start else 0
        life = LifeTruth(job.incarnation, claimed.life, job.job.attempt, job.id, self.loop.now, step)
        self.truth.lives.append(life)
        job.life = life
        try:
            return await self._compute(job, life, fate)
        finally:
            life.end = self.loop.now
            job.life = None

    async def _compute(self, job: JobTruth, life: LifeTruth, fate: Fate) -> State:
        loop = self.loop
        records = Records(self.channel, job.path, life.number, loop.clock)
        done_at = life.begin + (TOTAL - life.from_step) * fate.slow
        bad_at = life.begin + fate.at if fate.what != "success" else float("inf")
        noticed: State | None = None  # what it is ending as
        over_at = float("inf")
        while True:
            step = min(TOTAL, life.from_step + int((loop.now - life.begin + 1e-6) / fate.slow))
            if noticed is None and step % SAVE_EVERY == 0 and step > life.from_step and step < TOTAL:
                self._save(records, life, step)
            over = records.superseded(life.attempt)
            if over and over.kind == "fence" and over.grace > 0 and noticed is None:
                # Fenced from outside, with time to save: the platform knows nothing of it.
                noticed, over_at = State.FAILED, loop.now + SAVING
                job.kill_at = loop.now + PREEMPTION_GRACE
            elif over is not False and noticed is not State.FAILED:
                self.truth.note(life.incarnation, life.attempt, "superseded")
                return State.CANCELLED if job.cancelled else State.FAILED
            if job.kill_at is not None and loop.now >= job.kill_at - 1e-6:
                return noticed or State.CANCELLED
            if job.cancelled and noticed is None:
                noticed, over_at = State.CANCELLED, loop.now + SAVING
            elif loop.now >= bad_at - 1e-6 and noticed is None:
                if fate.what not in ("notice", "done"):
                    return await self._accident(job, life, fate, records)
                self.truth.note(life.incarnation, life.attempt, "preempted")
                noticed = State.PREEMPTED
                over_at = loop.now + SAVING if fate.what == "notice" else float("inf")
                job.kill_at = loop.now + PREEMPTION_GRACE
            if noticed is not None:
                self._show(job, State.RUNNING, noticed)
                records.notice("platform")
                if fate.stubborn:
                    over_at = float("inf")
            if loop.now >= over_at - 1e-6:
                self._save(records, life, step)
                self._ends(records, 75, 75)
                return noticed or State.CANCELLED
            if loop.now >= done_at - 1e-6:
                life.ok = True
                records.result()
                self._ends(records, 0, 0)
                return noticed or State.SUCCEEDED
            to_save = life.begin + ((step // SAVE_EVERY + 1) * SAVE_EVERY - life.from_step) * fate.slow
            moments = [to_save, over_at, done_at, job.kill_at or float("inf")]
            await self._nap(job, min([*moments, bad_at] if noticed is None else moments))

    def _save(self, records: Records, life: LifeTruth, step: int) -> None:
        records.progress(step, TOTAL)
        if step > life.from_step:
            records.checkpoint(step)
            life.saved = step

    def _ends(self, records: Records, first: int | None, second: int | None) -> None:
        """Node 0's record comes at once, node 1's a little later."""
        self.loop.call_later(0.1, records.end, 0, first)
        self.loop.call_later(0.7, records.end, 1, second)

    async def _accident(self, job: JobTruth, life: LifeTruth, fate: Fate, records: Records) -> State:
        note = {"preempt": "preempted", "node": "node_lost", "quiet": "node_lost", "error": "application"}
        note |= {"lie": "no_evidence", "timeout": "timed_out", "vanish": "gone"}
        self.truth.note(life.incarnation, life.attempt, note[fate.what])
        match fate.what:
            case "preempt":
                return State.PREEMPTED
            case "node":
                job.blamed = ("node-1",)
                self._show(job, State.RUNNING, State.NODE_LOST)
                await asyncio.sleep(2.0)  # the other node notices
                records.failure("node", "node 1 was lost")
                return State.NODE_LOST
            case "error":
                records.failure("rank", "rank 1 exited with 3", 3)
                records.end(1, 3)
                await asyncio.sleep(0.5)
                records.end(0, None, "SIGTERM")
                return State.FAILED
            case "quiet":
                records.end(0, 1)
                return State.FAILED
            case "lie":
                records.end(0, 0)
                return State.SUCCEEDED
            case "timeout":
                return State.TIMED_OUT
            case "vanish":
                return State.GONE
        raise AssertionError(fate.what)


class SeamTarget:
    """The platform as one process sees it: a :class:`airflow_gpu.targets.base.Target`, through the seam."""

    capabilities = Capabilities(notices=True)
    python = "python3"

    def __init__(self, actor: Actor, platform: Platform, name: str) -> None:
        self.name, self._actor, self._platform = name, actor, platform
        self.channel, self.job_channel = platform.channel.uri, platform.root
        self.job_store: dict[str, Any] = {}

    async def _ask(
        self, op: str, detail: str, effect: Callable[[], Any], kinds: tuple[str, ...], latency: float = 0.1
    ) -> Any:
        def unless_away() -> Any:
            if self._platform.away():
                raise TargetError(f"{self.name}: no route to host")
            return effect()

        return await self._actor.seam.call(
            self._actor,
            f"target.{op}",
            detail,
            unless_away,
            kinds=kinds,
            error=lambda why: TargetError(f"{self.name}: {why}"),
            latency=latency,
            bounded=op != "inventory",
        )

    async def submit(self, job: Job) -> str:
        if self._platform.atomic:
            return str(await self._ask("submit", job.name[-2:], lambda: self._platform.submit(job), WRITE))
        found = await self._ask("look", job.name[-2:], lambda: self._platform.adopt(job), READ)
        return str(
            found or await self._ask("create", job.name[-2:], lambda: self._platform.create(job), WRITE)
        )

    async def observe(self, jobs: Collection[JobRef]) -> Mapping[str, Sighting]:
        def look() -> dict[str, Sighting]:
            return {job.name: self._platform.sighting(job.name) for job in jobs}

        found: dict[str, Sighting] = await self._ask("observe", "", look, READ)
        return found

    async def cancel(self, job: JobRef, *, grace: float, since: float) -> None:
        await self._ask("cancel", job.name[-2:], lambda: self._platform.cancel(job.name, grace), WRITE)

    async def logs(self, job: JobRef, node: int, since: str = "") -> LogChunk:
        chunk: LogChunk = await self._ask("logs", job.name[-2:], lambda: LogChunk("", since), READ)
        return chunk

    async def inventory(self, labels: Mapping[str, str]) -> list[Listed]:
        return list(await self._ask("inventory", "", lambda: self._platform.listed(labels), READ))

    async def forget(self, job: JobRef) -> None:
        await self._ask("forget", job.name[-2:], lambda: self._platform.forget(job.name), WRITE)

    async def offers(self, gang: Gang) -> list[Offer]:
        def offer() -> list[Offer]:
            at = BEGINNING + self._platform.loop.time()
            return [Offer(self.name, None, "owned", 0.0, "declared", at, free_nodes=self._platform.free())]

        return list(await self._ask("offers", "", offer, READ))

    async def close(self) -> None:
        pass

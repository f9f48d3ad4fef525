"""One simulated run: the real driver, trigger, operator, journal and channel, between a simulated Airflow and platform.

Purpose: :func:`play` runs a scenario with the given faults and answers what
came of it. Everything random is seeded, so that a run can be played again: the
first k-1 calls are the same whatever the fault at call k is.

What it does not do: judge. That is :mod:`tests.faults.invariants`.

Limits: what the trigger and the operator look up in Airflow (settings, stores,
connections, states of tasks) is put in their place by name, for the time of a
run; a run is alone in its process.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import itertools
import logging
import random
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import airflow_gpu.compat
import airflow_gpu.hooks.world
import airflow_gpu.operators.gang
import airflow_gpu.placing
import airflow_gpu.rundir.slot
import airflow_gpu.settings
from airflow_gpu.driver import World
from airflow_gpu.gang.identity import RunKey
from airflow_gpu.gang.spec import Gang
from airflow_gpu.operators.gang import GangOperator
from airflow_gpu.pacing import Pace
from airflow_gpu.rundir import slot
from airflow_gpu.rundir.store import Store
from airflow_gpu.settings import Settings
from airflow_gpu.sweeping import looking
from airflow_gpu.sweeping.listing import RunDir
from airflow_gpu.sweeping.sweep import sweep
from airflow_gpu.targets.base import TargetError
from airflow_gpu.targets.watch import Watcher
from tests.faults import ranks
from tests.faults.airflow import Airflow, QuietOperator, namespace
from tests.faults.clock import SimLoop, Stuck
from tests.faults.disk import Disk, SeamStore
from tests.faults.platform import Fate, JobTruth, Platform, SeamTarget, Truth
from tests.faults.seam import ACTOR, READ, Call, Fault, Seam

POLL = 5.0
MOST_CALLS = 4000
LONGEST = 6 * 3600.0
"""Seconds of simulated time within which every run must have told Airflow its end."""

AFTERWARDS = 3 * 3600.0
"""Seconds for which the world goes on behind that: whatever was on its way arrives."""

SWEEPS = 3
"""One that is killed, or meets an error, is followed by the next."""

SWEEP_AFTER = 600.0

INSTALLATION = "tests"
KEY = RunKey(INSTALLATION, "dag", "run", "fit", -1)


@dataclass(frozen=True)
class Scenario:
    """A short story. ``script`` is what people and Airflow do; it begins with ``airflow.start()``."""

    name: str
    script: Callable[[Airflow], Coroutine[Any, Any, None]]
    fates: Callable[[int, int, int], Fate] = lambda run, attempt, restart: Fate()
    gang: Mapping[str, Any] = field(default_factory=dict)
    retries: int = 4
    deferrable: bool = True
    atomic: bool = True
    poll: float = POLL
    targets: tuple[str, ...] = ("here",)
    free: Callable[[str, Callable[[], float]], int | None] = lambda name, now: (
        None
    )  # nodes that could start it now
    target_away: tuple[float, float] = (0.0, 0.0)  # of the first target
    store_away: tuple[float, float] = (0.0, 0.0)
    people: bool = False  # people act at every call as well
    # What must come of it, with whatever fault:
    told: tuple[str, ...] = ("success",)  # states in which Airflow may end up
    attempts: int = 1  # most attempts of one incarnation
    verdicts: frozenset[str] = frozenset()  # causes with which a verdict other than success may come


@dataclass
class Result:
    """What came of a run; ``problem`` is why it did not come to an end."""

    scenario: Scenario
    faults: tuple[Fault, ...]
    calls: list[Call]
    hit: dict[int, Call]
    airflow: Airflow
    truth: Truth
    jobs: list[JobTruth]
    state: Disk
    ended_at: float
    problem: str = ""
    said: list[str] = field(default_factory=list)
    complaints: list[dict[str, Any]] = field(default_factory=list)


class _Bench:
    """The world of one run: disks, platform, Airflow, and what each process finds of them."""

    def __init__(self, scenario: Scenario, faults: tuple[Fault, ...]) -> None:
        self.scenario = scenario
        self.loop = loop = SimLoop()
        self.seam = Seam(faults, MOST_CALLS)
        self.state, self.truth = Disk("memory://state"), Truth()
        self.state.away = self._during(scenario.store_away)
        self.platforms: dict[str, Platform] = {}
        for name in scenario.targets:
            channel = Disk(f"file:///{name}")
            channel.away = self._during(scenario.store_away)
            platform = Platform(loop, channel, self.truth, scenario.fates, atomic=scenario.atomic)
            platform.free = functools.partial(scenario.free, name, loop.time)
            platform.others = self.disk
            self.platforms[name] = platform
        self.platforms[scenario.targets[0]].away = self._during(scenario.target_away)
        self.gang = _gang(scenario)
        self.settings = Settings(INSTALLATION, "memory://state", None, scenario.poll)
        self.said: list[str] = []
        self.airflow = Airflow(loop, self.seam, self._operator, self.settings, scenario.retries, self._sweep)
        self.ended_at = 0.0
        self._prototype = QuietOperator(task_id="fit", gang=self.gang, deferrable=scenario.deferrable)
        self._prototype.given = self.gang

    def _during(self, window: tuple[float, float]) -> Callable[[], bool]:
        return lambda: window[0] <= self.loop.now < window[1]

    def _operator(self) -> GangOperator:
        """One of its own for each process, as each parses the DAG file."""
        return copy.copy(self._prototype)

    def disk(self, path: str) -> Disk:
        """The files of a channel, by its path as jobs see it."""
        return self.platforms[path.strip("/")].channel

    @property
    def jobs(self) -> list[JobTruth]:
        return [job for platform in self.platforms.values() for job in platform.jobs]

    # -- what a process finds --------------------------------------------------------------------------

    def settled(self, *, named: bool = True) -> Settings:
        return self.settings

    async def store(self, given: Settings) -> Store:
        return SeamStore(ACTOR.get(), self.state, "state")

    def world(self, given: Settings, say: Callable[[str], None], rank_log: Callable[[str], None]) -> World:
        actor = ACTOR.get()
        targets: dict[str, SeamTarget] = {}
        watchers: dict[int, Watcher] = {}

        async def lookup(op: str, answer: Callable[[], Any]) -> Any:
            return await self.seam.call(
                actor, op, "", answer, kinds=READ, error=lambda why: TargetError(why), latency=0.05
            )

        async def target(name: str) -> Any:
            if name not in targets:
                targets[name] = SeamTarget(actor, self.platforms[name], name)
            return await lookup("connection", lambda: targets[name])

        async def secrets(references: Mapping[str, str]) -> Mapping[str, str]:
            found: Mapping[str, str] = await lookup("secrets", lambda: dict.fromkeys(references, "s3cret"))
            return found

        def watcher(of: Any) -> Watcher:
            if id(of) not in watchers:
                watchers[id(of)] = Watcher(of, given.poll, actor.sleep)
            return watchers[id(of)]

        def heard(line: str) -> None:
            if actor.alive:
                self.said.append(f"{self.loop.now:8.1f} {actor.name}: {line}")

        return World(
            clock=self.loop.clock,
            sleep=actor.sleep,
            target=target,
            channel_store=lambda uri: SeamStore(actor, self.disk(uri.removeprefix("file://")), "channel"),
            watcher=watcher,
            secrets=secrets,
            say=heard,
            rank_log=lambda line: None,
            poll=given.poll,
            pace=Pace(clock=self.loop.time),
        )

    def task_state(self, dag_id: str, run_id: str, task_id: str, map_index: int) -> Any:
        """In a thread on the real loop; here a coroutine, which the loop's executor awaits."""
        return self.seam.call(
            ACTOR.get(),
            "airflow.task_state",
            "",
            self.airflow.state,
            kinds=READ,
            error=RuntimeError,
            latency=0.05,
        )

    async def _sweep(self) -> None:
        store = SeamStore(ACTOR.get(), self.state, "state")
        world = self.world(self.settings, lambda line: None, lambda line: None)
        await sweep(store, INSTALLATION, world, _Asks(self.airflow), names=list(self.platforms))

    async def run_dirs(self, store: Store, installation: str) -> dict[str, RunDir]:
        """``sweeping.listing.run_dirs``, whose way goes by the times of a real store."""
        found: dict[str, int] = {}
        for entry in await store.list(f"v1/{installation}"):
            path, _, name = entry.path.rpartition("/")
            if path.endswith("/journal"):
                run = path.removesuffix("/journal")
                found[run] = max(found.get(run, 0), int(name.removesuffix(".json")))
            elif name == "run.json":
                found.setdefault(path, 0)
        return {path: RunDir(path, entries, self.loop.clock()) for path, entries in found.items()}

    # -- the run ---------------------------------------------------------------------------------------

    @contextmanager
    def patched(self) -> Iterator[None]:
        rng = random.Random(7)
        clock = namespace(time=self.loop.clock, monotonic=self.loop.time)
        numbers = itertools.count(1)
        with ExitStack() as stack:
            for patch in (
                *ranks.patches(self.loop.clock),
                mock.patch.object(airflow_gpu.placing, "time", clock),
                mock.patch.object(looking, "run_dirs", self.run_dirs),
                mock.patch.object(airflow_gpu.hooks.world, "airflow_world", self.world),
                mock.patch.object(airflow_gpu.hooks.world, "state_store", self.store),
                mock.patch.object(airflow_gpu.settings, "settings", self.settled),
                mock.patch.object(airflow_gpu.compat, "task_state", self.task_state),
                mock.patch.object(airflow_gpu.operators.gang, "task_state", self.task_state),
                mock.patch.object(airflow_gpu.operators.gang, "time", clock),
                mock.patch.object(Gang, "from_json", _parsed),
                mock.patch.object(
                    slot,
                    "secrets",
                    namespace(choice=rng.choice, token_hex=lambda n=8: f"{next(numbers):0{2 * n}x}"),
                ),
            ):
                stack.enter_context(patch)
            random.seed(11)  # the watchers' jitter
            logging.disable(logging.CRITICAL)
            stack.callback(logging.disable, logging.NOTSET)
            yield

    async def main(self) -> None:
        airflow = self.airflow
        await self.scenario.script(airflow)
        while True:
            await asyncio.wait_for(airflow.settled.wait(), LONGEST)
            await asyncio.sleep(1.0)
            if airflow.settled.is_set():
                break
        self.ended_at = self.loop.now
        for _ in range(SWEEPS):
            await asyncio.sleep(SWEEP_AFTER)
            if airflow.settled.is_set() and any(not job.state.ended for job in self.jobs):
                airflow.sweep()
        await asyncio.sleep(AFTERWARDS)


class _Asks:
    """What a sweep hears of Airflow."""

    who, own = "in this world", True

    def __init__(self, airflow: Airflow) -> None:
        self._airflow = airflow

    async def states(self, keys: Collection[RunKey]) -> Mapping[RunKey, str | None]:
        return dict.fromkeys(keys, self._airflow.state())


_GANG: dict[str, Any] = {
    "nodes": 2,
    "gpus_per_node": 1,
    "command": "true",
    "stop_grace": 10,
    "secrets": {"TOKEN": "conn:hub#password"},
}


def _gang(scenario: Scenario) -> Gang:
    if scenario.name not in _GANGS:
        _GANGS[scenario.name] = _parsed(
            Gang.from_fields({**_GANG, "targets": list(scenario.targets), **scenario.gang}).to_json()
        )
    return _GANGS[scenario.name]


_GANGS: dict[str, Gang] = {}


@functools.lru_cache(maxsize=256)
def _parsed(text: str) -> Gang:
    """``Gang.from_json``, once for the same text: a gang never changes, and this is a tenth of a run's time."""
    return _FROM_JSON(text)


_FROM_JSON = Gang.from_json


def play(scenario: Scenario, faults: tuple[Fault, ...] = ()) -> Result:
    """Play a scenario with these faults."""
    bench = _Bench(scenario, faults)
    problem = ""
    with bench.patched():
        try:
            bench.loop.run(bench.main(), bench.airflow.terminate, bench.seam.close)
        except TimeoutError:
            problem = f"no end within {LONGEST / 3600:.0f} h"
        except Stuck as error:
            problem = str(error)
        problem = bench.seam.over or problem
    seam = bench.seam
    return Result(
        scenario,
        faults,
        seam.calls,
        seam.hit,
        bench.airflow,
        bench.truth,
        bench.jobs,
        bench.state,
        bench.ended_at,
        problem,
        bench.said,
        bench.loop.complaints,
    )

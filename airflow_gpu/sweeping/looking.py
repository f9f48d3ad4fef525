"""One look at everything an installation has: run directories, the jobs its targets list, Airflow's word.

Purpose: puts together what :mod:`.decide` decides on, in the order that makes
it sound: what runs is listed first, then the journals are read (so each job
that was seen is in its journal by then), then Airflow is asked.

What it does not do: act, or decide.

Limits: bounded work. Of a run that is over only the last journal entry is
read, and that once per process, since entries never change. A target gets one
query, whatever the number of its jobs.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from airflow_gpu.gang.entries import JournalError
from airflow_gpu.gang.identity import LABEL_PREFIX, RunKey, run_path
from airflow_gpu.gang.run import Cause, Run
from airflow_gpu.rundir.journal import Journal
from airflow_gpu.rundir.slot import newest, read_run
from airflow_gpu.rundir.store import Store, StoreError
from airflow_gpu.sweeping.airflow import AsksAirflow, CannotAsk
from airflow_gpu.sweeping.decide import (
    DOCTOR,
    DOCTOR_LIMIT,
    Answer,
    Wanted,
    answer_of,
    installation_label,
    unasked,
)
from airflow_gpu.sweeping.listing import RunDir, run_dirs
from airflow_gpu.targets.base import Listed, NotConfigured, Target, TargetError
from airflow_gpu.targets.watch import bounded

AT_ONCE = 32
"""Reads of run directories that are under way at once; the store itself has as many threads."""

QUESTIONS = 4
"""Questions to Airflow that are under way at once."""

SAMPLE = 20
"""Runs that are over of which Airflow is asked whether it knows them, to see that it is the right one."""

REMEMBERED = 200_000
"""Runs known to be over that one process remembers, about 100 bytes each."""

Reach = Callable[[str], Awaitable[Target]]
T = TypeVar("T")


@dataclass(slots=True)
class SeenRun:
    """A run directory that matters: something of it may run, or could start."""

    dir: RunDir
    key: RunKey | None = None
    journal: Journal | None = None
    trouble: str = ""  # why the journal cannot be read or understood
    newest: bool = True
    answer: Answer = field(default_factory=lambda: unasked("Airflow was not asked"))
    jobs: list[SeenJob] = field(default_factory=list)

    @property
    def run(self) -> Run | None:
        return self.journal.run if self.journal is not None and not self.trouble else None

    @property
    def open(self) -> bool:
        """Something of it runs or might start, as far as its journal says."""
        run = self.run
        return run is not None and bool(run.owners) and (run.current is not None or run.verdict is None)

    @property
    def name(self) -> str:
        return str(self.key) if self.key is not None else self.dir.path


@dataclass(slots=True)
class SeenJob:
    """A living job as its target lists it."""

    target: str
    listed: Listed
    run: SeenRun | None = None


@dataclass(slots=True)
class Look:
    """What one look found."""

    runs: list[SeenRun]
    jobs: list[SeenJob]
    over: list[RunDir]  # runs that are over, touched within the time asked for
    targets: dict[str, str]  # each target that was asked: "" or why it could not be
    unimportant: frozenset[str]  # those of them that only runs name which are over
    listed: int  # run directories in the store
    airflow: str  # "" or why Airflow did not answer


class Known:
    """Runs that are over, with the targets they ran on. Safe to keep: an entry of a journal never changes."""

    def __init__(self) -> None:
        self._over: dict[str, tuple[int, tuple[str, ...]]] = {}

    def get(self, found: RunDir) -> tuple[str, ...] | None:
        known = self._over.get(found.path)
        return known[1] if known is not None and known[0] == found.entries else None

    def add(self, found: RunDir, targets: tuple[str, ...]) -> None:
        if len(self._over) >= REMEMBERED:
            self._over.clear()
        self._over[found.path] = (found.entries, targets)


async def look(
    store: Store,
    installation: str,
    reach: Reach,
    asks: AsksAirflow,
    *,
    names: Iterable[str] = (),
    since: float = 0.0,
    known: Known | None = None,
    whole: bool = False,
) -> Look:
    """Look at everything.

    :param reach: answers the target of a connection id.
    :param names: targets that are asked even if no journal names them.
    :param since: leave run directories out that were not touched since then, unless a job of theirs lives.
    :param whole: read the journals of runs that are over as well.
    :raises StoreError: the state store cannot be listed.
    """
    known = known or Known()
    every = await run_dirs(store, installation)
    fresh = [found for found in every.values() if found.touched >= since]
    runs: dict[str, SeenRun] = {}
    over: list[RunDir] = []
    ran_on: set[str] = set()

    async def read(found: RunDir) -> None:
        targets = known.get(found)
        if targets is None:
            targets = await _over_on(store, found)
        if targets is not None:
            known.add(found, targets)
            over.append(found)
            ran_on.update(targets)
        if targets is None or whole:
            runs[found.path] = await load(store, found)

    await _each(fresh, read, AT_ONCE)
    wanted = set(names)
    for seen in runs.values():
        if seen.open and seen.run is not None:
            wanted.update(attempt.target for attempt in seen.run.attempts)
    jobs, targets, unknown = await _inventories(installation, reach, wanted | ran_on)
    missing = await _attach(store, installation, every, runs, jobs)
    if missing:  # begun since the listing?
        await _attach(store, installation, await run_dirs(store, installation), runs, missing)
    moving = [seen for seen in runs.values() if seen.open or seen.jobs]
    await _each(moving, lambda seen: _read_on(store, seen), AT_ONCE)
    jobs = await _still_living(reach, jobs)
    trouble = await _ask(store, asks, [seen for seen in moving if seen.open], over)
    return Look(
        runs=sorted(runs.values(), key=lambda seen: seen.dir.path),
        jobs=jobs,
        over=over,
        targets=targets,
        unimportant=frozenset(unknown - wanted),
        listed=len(every),
        airflow=trouble,
    )


async def _each(items: Iterable[T], work: Callable[[T], Awaitable[None]], at_once: int) -> None:
    """Do it for all, so many at once, without a task for each of 100,000."""
    queue = iter(list(items))

    async def worker() -> None:
        for item in queue:
            await work(item)

    async with asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(worker())


# -- run directories -----------------------------------------------------------------------------


async def _over_on(store: Store, found: RunDir) -> tuple[str, ...] | None:
    """The targets of a run that is over by its last entry; None when it is not, or that cannot be told."""
    if not found.entries:
        return None
    try:
        entry = json.loads(await store.get(f"{found.path}/journal/{found.entries:06d}.json"))
        if entry["kind"] != "verdict" or entry["cause"] == Cause.LOST_SIGHT.value:
            return None
        attempts: list[dict[str, Any]] = (entry.get("record") or {}).get("attempts") or []
        return tuple({str(attempt["target"]) for attempt in attempts})
    except (StoreError, ValueError, KeyError, TypeError, AttributeError):
        return None  # the whole journal says what is wrong


async def load(store: Store, found: RunDir) -> SeenRun:
    """The run at this path, read; with its trouble when that was not possible."""
    seen = SeenRun(found)
    try:
        seen.key, incarnation = await read_run(store, found.path)
        if run_path(seen.key, incarnation) != found.path:
            seen.trouble = f"its run.json is that of {run_path(seen.key, incarnation)}"
            return seen
        seen.journal = Journal(store, found.path)
        await seen.journal.refresh()
    except (JournalError, StoreError, ValueError, KeyError, TypeError) as error:
        seen.trouble = str(error) or repr(error)
    return seen


async def _read_on(store: Store, seen: SeenRun) -> None:
    """What was journalled since, and whether the slot has a newer incarnation."""
    if seen.journal is None or seen.key is None or seen.trouble:
        return
    try:
        await seen.journal.refresh()
        if seen.open:
            last = await newest(store, seen.key)
            seen.newest = last is None or last[1] == seen.dir.incarnation
    except (JournalError, StoreError, ValueError, KeyError) as error:
        seen.trouble = str(error)


# -- targets -------------------------------------------------------------------------------------


async def _inventories(
    installation: str, reach: Reach, names: set[str]
) -> tuple[list[SeenJob], dict[str, str], set[str]]:
    """Living jobs of the installation on these targets; which could not be asked; which do not exist."""
    asked: dict[str, str] = {}
    unknown: set[str] = set()
    found: dict[str, list[Listed]] = {}
    wanted = {LABEL_PREFIX + "installation": installation_label(installation)}

    async def ask(name: str) -> None:
        try:
            target = await reach(name)
            found[name] = await bounded(target.inventory(wanted), name)
            asked[name] = ""
        except (
            Exception
        ) as error:  # whatever a client library raises: it must not keep the others from being asked
            asked[name] = str(error) if isinstance(error, TargetError) else repr(error)
            if isinstance(error, NotConfigured):
                unknown.add(name)

    await _each(sorted(names), ask, AT_ONCE)
    return (
        [
            SeenJob(name, listed)
            for name in sorted(found)
            for listed in found[name]
            if not listed.sighting.state.ended
        ],
        asked,
        unknown,
    )


async def _attach(
    store: Store,
    installation: str,
    every: dict[str, RunDir],
    runs: dict[str, SeenRun],
    jobs: list[SeenJob],
) -> list[SeenJob]:
    """Give each job its run, also one that is over or old; answers the jobs for which there is none."""
    by_incarnation: dict[str, RunDir] = {found.incarnation: found for found in every.values()}
    mine = installation_label(installation)
    missing = []
    for job in jobs:
        if job.listed.ref.labels.get(LABEL_PREFIX + "installation") != mine:
            continue
        found = by_incarnation.get(job.listed.ref.labels.get(LABEL_PREFIX + "incarnation", ""))
        if found is None:
            missing.append(job)
            continue
        if found.path not in runs:
            runs[found.path] = await load(store, found)
        job.run = runs[found.path]
        job.run.jobs.append(job)
    return missing


async def _still_living(reach: Reach, jobs: list[SeenJob]) -> list[SeenJob]:
    """Without the jobs that were listed while they ran and whose journal, read later, says that they are over.

    They are looked at once more, in one query a target: an end like any other is no find.
    """
    doubtful: dict[str, list[SeenJob]] = defaultdict(list)
    for job in jobs:
        run, number = job.run.run if job.run is not None else None, job.listed.ref.attempt
        if run is not None and 1 <= number <= len(run.attempts) and run.attempts[number - 1].over:
            doubtful[job.target].append(job)
    ended: set[int] = set()

    async def observe(name: str) -> None:
        try:
            target = await reach(name)
            seen = await bounded(target.observe([job.listed.ref for job in doubtful[name]]), name)
        except Exception:
            return  # whoever ends it looks again
        for job in doubtful[name]:
            sighting = seen.get(job.listed.ref.name)
            if sighting is not None and sighting.state.ended:
                ended.add(id(job))

    await _each(doubtful, observe, AT_ONCE)
    return [job for job in jobs if id(job) not in ended]


# -- Airflow -------------------------------------------------------------------------------------


async def _ask(store: Store, asks: AsksAirflow, seen: list[SeenRun], over: list[RunDir]) -> str:
    """Fill in Airflow's answers; "" or why there was none for some."""
    by_dag: dict[str, list[SeenRun]] = defaultdict(list)
    for item in seen:
        if item.key is None or not item.newest:
            continue
        if item.key.dag_id != DOCTOR:
            by_dag[item.key.dag_id].append(item)
        elif time.time() - item.dir.touched < DOCTOR_LIMIT:
            item.answer = Answer(Wanted.YES, "of airflow-gpu doctor")
        else:
            item.answer = answer_of(None, exists=False)
    told: dict[RunKey, str | None] = {}
    troubles: dict[str, str] = {}

    async def ask(dag: str) -> None:
        try:
            told.update(await asks.states([item.key for item in by_dag[dag] if item.key is not None]))
        except Exception as error:
            troubles[dag] = str(error) if isinstance(error, CannotAsk) else repr(error)

    await _each(sorted(by_dag), ask, QUESTIONS)
    answered = [item for dag, items in by_dag.items() if dag not in troubles for item in items]
    absent = [item for item in answered if item.key not in told]
    trusted = asks.own or bool(told) or (bool(absent) and await _is_ours(store, asks, over))
    for dag, why in troubles.items():
        for item in by_dag[dag]:
            item.answer = unasked(why)
    for item in answered:
        assert item.key is not None
        item.answer = answer_of(told.get(item.key), exists=item.key in told, trusted=trusted)
    if absent and not trusted:
        troubles[""] = (
            f"the Airflow that was asked ({asks.who}) knows none of these task instances; "
            "it may be another one than theirs"
        )
    return "; ".join(dict.fromkeys(troubles.values()))


async def _is_ours(store: Store, asks: AsksAirflow, over: list[RunDir]) -> bool:
    """Whether Airflow knows any of the newest runs that are over."""
    by_dag: dict[str, list[RunKey]] = defaultdict(list)
    for found in sorted(over, key=lambda found: -found.touched)[:SAMPLE]:
        try:
            key, _ = await read_run(store, found.path)
        except (StoreError, ValueError, KeyError, TypeError):
            continue
        by_dag[key.dag_id].append(key)
    for keys in by_dag.values():
        try:
            if await asks.states(keys):
                return True
        except Exception:
            continue  # then it is not known, which is the safe answer
    return False

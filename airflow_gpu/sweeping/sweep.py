"""One sweep: look, decide, act, report.

Purpose: the whole of it, for the operator, the trigger and the command, which
differ in who asks Airflow and where connections come from.

What it does not do: hold anything. Two sweeps at once, or a sweep beside
drivers and a person's Clear, are safe by the journal's create-only writes: who
is second finds that and leaves it.

Example::

    report = await sweep(store, "prod", world, asks, names=["slurm"])
    for line in report.lines():
        print(line)
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace

from airflow_gpu.driver import World
from airflow_gpu.gang.entries import JournalError
from airflow_gpu.rundir.store import Store
from airflow_gpu.sweeping.airflow import AsksAirflow
from airflow_gpu.sweeping.decide import TABLE, Case, Do, case_of_job, case_of_run
from airflow_gpu.sweeping.ending import LOST_GRACE, Ended, cancel_job, end_run
from airflow_gpu.sweeping.looking import Known, Look, SeenJob, SeenRun, look
from airflow_gpu.sweeping.report import Item, Report

WINDOW = 14 * 86400.0
"""Seconds for which a run directory is looked at after it was last touched. What lives longer is found by its target."""

END_LIMIT = 600.0
"""Seconds for which a sweep waits for the end of one gang beyond its grace. The platform ends it all the same."""

ENDINGS = 8
"""Gangs that are being ended at once."""


@dataclass(frozen=True, slots=True)
class Options:
    """``lost``: also end living jobs that have no run directory. ``window``: seconds, see WINDOW; 0: no limit."""

    dry_run: bool = False
    lost: bool = False
    window: float = WINDOW
    limit: float = END_LIMIT


async def sweep(
    store: Store,
    installation: str,
    world: World,
    asks: AsksAirflow,
    *,
    names: Iterable[str] = (),
    options: Options | None = None,
    known: Known | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Report:
    """Find what nobody wants and end it.

    :param names: targets that are asked even if no journal names them.
    :param say: hears of each end when it begins.
    :raises StoreError: the state store cannot be listed.
    """
    options = options or Options()
    begun = time.monotonic()
    now = world.clock()
    seen = await look(
        store,
        installation,
        world.target,
        asks,
        names=names,
        since=now - options.window if options.window else 0.0,
        known=known,
    )
    report = Report(
        installation=installation,
        state_uri=store.uri,
        at=now,
        dry_run=options.dry_run,
        targets=seen.targets,
        unimportant=seen.unimportant,
        airflow=asks.who,
        airflow_trouble=seen.airflow,
        listed=seen.listed,
    )
    turn = asyncio.Semaphore(ENDINGS)

    async def run(found: SeenRun, item: Item) -> None:
        async with turn:
            say(f"{item.run}: {TABLE[item.case].words}; ending it")
            assert found.journal is not None
            assert found.key is not None
            ending = end_run(
                found.journal,
                found.key,
                found.dir.incarnation,
                replace(world, say=lambda line: world.say(f"{item.run}: {line}")),
                _why(item),
                limit=options.limit + grace_of(found, found.run.epoch if found.run is not None else 0),
            )
            await _came(item, ending)

    async def job(found: SeenJob, item: Item) -> None:
        async with turn:
            say(f"{item.job} on {item.target}: {TABLE[item.case].words}; ending it")
            grace = _grace(found)
            ending = cancel_job(world, found.target, found.listed.ref, grace, limit=options.limit + grace)
            await _came(item, ending)

    work = []
    for found, item in items_of_runs(seen):
        report.items.append(item)
        if item.do in (Do.END, Do.CLOSE) and not options.dry_run:
            work.append(run(found, item))
    for found_job, item in items_of_jobs(seen, installation):
        report.items.append(item)
        lost = item.case is Case.LOST and options.lost
        if (item.do is Do.CANCEL or lost) and not options.dry_run:
            work.append(job(found_job, item))
    await asyncio.gather(*work)
    report.seconds = time.monotonic() - begun
    return report


def items_of_runs(seen: Look) -> list[tuple[SeenRun, Item]]:
    """Each run directory that was read, and what it is."""
    found = []
    for run in seen.runs:
        case = case_of_run(run.run, newest=run.newest, answer=run.answer)
        current = run.run.current if run.run is not None else None
        item = Item(
            case=case,
            run=run.name,
            path=run.dir.path,
            task=run.answer.state if run.open else "",
            problem=TABLE[case].problem,
            detail=run.trouble,
        )
        if case is Case.UNDECIDED:
            item.detail = run.answer.state
        if current is not None:
            item.target, item.job, item.attempt = current.target, current.name, current.number
            item.since = current.at
            listed = next((job for job in run.jobs if job.listed.ref.name == current.name), None)
            item.state = listed.listed.sighting.state.value if listed is not None else ""
        found.append((run, item))
    return found


def items_of_jobs(seen: Look, installation: str) -> list[tuple[SeenJob, Item]]:
    """Each living job, and what it is. One that is listed by two connections to the same place comes once."""
    found: dict[tuple[str, str], tuple[SeenJob, Item]] = {}
    for job in seen.jobs:
        run = job.run
        known = (run.key, run.dir.incarnation, run.run) if run is not None and run.key is not None else None
        case = case_of_job(job.listed, installation, known)
        if run is not None and known is None:
            case = Case.HELD if case is Case.LOST else case  # there is a run directory that says nothing
        ref, sighting = job.listed.ref, job.listed.sighting
        item = Item(
            case=case,
            run=run.name if run is not None else "",
            path=run.dir.path if run is not None else ref.channel,
            target=job.target,
            job=ref.name,
            attempt=ref.attempt,
            state=sighting.state.value,
            since=sighting.since or job.listed.submitted_at,
            problem=TABLE[case].problem,
        )
        key = (ref.name, ref.platform_id or job.target)
        before = found.get(key)
        if before is None or (before[1].case is case and _at_home(job)):
            found[key] = (job, item)
    return list(found.values())


def _at_home(job: SeenJob) -> bool:
    """It is listed by the connection under which its attempt was journalled."""
    run = job.run.run if job.run is not None else None
    number = job.listed.ref.attempt
    return (
        run is not None and 1 <= number <= len(run.attempts) and run.attempts[number - 1].target == job.target
    )


def _grace(job: SeenJob) -> float:
    run = job.run.run if job.run is not None else None
    if job.run is None or run is None or not 1 <= job.listed.ref.attempt <= len(run.attempts):
        return LOST_GRACE
    return grace_of(job.run, run.attempts[job.listed.ref.attempt - 1].epoch)


def grace_of(seen: SeenRun, epoch: int) -> float:
    """The ``stop_grace`` of an owner's request."""
    try:
        assert seen.journal is not None
        return float(seen.journal.gang_of(epoch)["stop_grace"])
    except (JournalError, KeyError, ValueError, TypeError):
        return LOST_GRACE


def _why(item: Item) -> str:
    if item.case is Case.EARLIER:
        return "a sweep found it running though there is a newer run of its task"
    return f"a sweep found it although its task is {item.task}"


async def _came(item: Item, ending: Awaitable[Ended]) -> None:
    """Note what comes of it. One that fails in a way nobody thought of must not keep the others from their end."""
    try:
        ended = await ending
    except Exception as error:
        ended = Ended(False, f"could not be ended: {error!r}")
    item.done = ended.words
    item.problem = not ended.ok
    if ended.checkpoint is not None:
        item.checkpoint = ended.checkpoint.step
        item.done += f", checkpoint at step {ended.checkpoint.step}"

"""Ending what nobody wants: a run by its journal, a job whose attempt is over by its target.

Purpose: :func:`end_run` journals the stop against exactly the history that was
decided on, gives notice, and drives the run to its verdict, so that its attempt
is fenced, closed and forgotten. :func:`cancel_job` ends a job that no journal
entry has to be written for.

What it does not do: start anything. :class:`Ender` is the driver with its
submits taken out: at a point where a driver would start again, it gives up.

Limits: a channel that does not answer is tried for ``AWAY_LIMIT`` seconds, one
whose bucket does not exist only once: a sweep comes again, and others wait for
it. Whoever journals anything in between wins. A new owner (a Clear, a
retry) is found by the first write that fails, and the run is left to it.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass

from airflow_gpu.driver import Driver, SupersededError, World
from airflow_gpu.gang.entries import Entry, JournalError, stop_entry
from airflow_gpu.gang.identity import RunKey
from airflow_gpu.gang.run import Attempt, Cause, CheckpointRef, State
from airflow_gpu.gang.spec import Gang, GangError
from airflow_gpu.rundir.journal import Journal, LostRace
from airflow_gpu.rundir.store import NoBucket, StoreError
from airflow_gpu.targets.base import JobRef, TargetError
from airflow_gpu.targets.watch import bounded

LOST_GRACE = 30.0
"""Seconds from the notice to the kill of a job whose request is not known."""

LOOK_EVERY = 2.0
"""Seconds between two looks at a job that was told to end."""

AWAY_LIMIT = 60.0
"""Seconds for which a store that does not answer is tried for one run."""

OWN_FIELDS = ("v", "seq", "at", "epoch", "writer")


@dataclass(frozen=True, slots=True)
class Ended:
    """What came of it. ``ok``: it is over, or (``raced``) somebody else has it now, which who asked may not know of."""

    ok: bool
    words: str
    checkpoint: CheckpointRef | None = None
    raced: bool = False


class Ender(Driver):
    """A driver that only ends."""

    why = "nobody wants it"

    def _stop_limit(self, error: Exception) -> float:
        return _limit(error, super()._stop_limit(error))

    def _away_limit(self, error: Exception) -> float:
        return _limit(error, super()._away_limit(error))

    async def _start(self, number: int, resume: bool) -> None:
        """Nothing runs and this owner would start again (a stop of an older owner, a move): it is to end instead."""
        await self._append(stop_entry(0, "user", self.why))

    async def _submit(self, attempt: Attempt) -> None:
        """An attempt that was journalled and never submitted: told to end, it is looked for and closed."""
        await self._append(stop_entry(attempt.number, "user", self.why))


def _limit(error: Exception, usual: float) -> float:
    if isinstance(error, NoBucket):
        return 0.0
    return AWAY_LIMIT if isinstance(error, StoreError) else usual


async def end_run(
    journal: Journal,
    key: RunKey,
    incarnation: str,
    world: World,
    why: str,
    *,
    limit: float,
    grace: float | None = None,
) -> Ended:
    """End what runs of a run, with a notice, and write its verdict.

    :param journal: as it was read when this was decided. If it has moved since, nothing is done.
    :param grace: seconds from the notice to the kill, at most the request's ``stop_grace``.
    :param limit: seconds after which the caller goes on; the platform ends it all the same.
    """
    decided = journal.run.seq
    try:
        async with asyncio.timeout(limit):
            return await _end_run(journal, key, incarnation, world, why, grace)
    except TimeoutError:
        told = journal.run.seq > decided
        return Ended(
            False, f"told to end, and not over after {limit:.0f} s" if told else f"no answer in {limit:.0f} s"
        )
    except LostRace:
        return Ended(True, "somebody else acted on it at the same moment, so it was left to them", raced=True)
    except SupersededError:
        return Ended(True, "a new try of its task has it now", raced=True)
    except (StoreError, TargetError, JournalError, GangError, ValueError, KeyError) as error:
        return Ended(False, f"could not be ended: {error}")


async def _end_run(
    journal: Journal, key: RunKey, incarnation: str, world: World, why: str, grace: float | None
) -> Ended:
    now = world.clock()
    run = journal.run
    if run.verdict is not None:
        # The owner had lost sight of it. Nothing may follow its verdict but an owner: its try, taken up again.
        run = await journal.append(_same_owner(journal), epoch=run.epoch + 1, now=now, after=run.seq)
    current = run.current
    stop = run.stop if current is None else current.stop
    if stop is None or stop.reason != "user":
        number = 0 if current is None else current.number
        run = await journal.append(stop_entry(number, "user", why), epoch=run.epoch, now=now, after=run.seq)
    gang = Gang.from_json(json.dumps(journal.gang_of(run.epoch)))
    if grace is not None:
        gang = gang.model_copy(update={"stop_grace": min(grace, gang.stop_grace)})
    ender = Ender(journal, key, incarnation, gang, epoch=run.epoch, world=world)
    ender.why = why
    await ender.stop("user", why)  # fences what has not started, and gives notice
    verdict = await ender.run()
    if verdict is None or verdict.cause is Cause.LOST_SIGHT:
        return Ended(False, verdict.message if verdict is not None else "no verdict")
    last = journal.run.attempts[-1].outcome if journal.run.attempts else None
    cause = f", as {last.cause.value}" if last is not None else ""
    return Ended(True, f"ended{cause}", last.checkpoint if last is not None else None)


def _same_owner(journal: Journal) -> Entry:
    """The newest owner once more: the same try of the same task instance, so the next one is told apart as ever."""
    entry = next(entry for entry in reversed(journal.entries) if entry["kind"] == "owner")
    return {**{name: value for name, value in entry.items() if name not in OWN_FIELDS}, "reason": "adopt"}


async def cancel_job(world: World, target_name: str, ref: JobRef, grace: float, *, limit: float) -> Ended:
    """Give notice to a job and wait until it has ended.

    It is looked at again first: it may have ended since it was listed.
    """
    try:
        async with asyncio.timeout(limit):
            target = await world.target(target_name)
            seen = (await bounded(target.observe([ref]), target_name)).get(ref.name)
            if seen is not None and seen.state.ended:
                return Ended(True, "had just ended")
            since = world.clock()
            while True:
                await bounded(target.cancel(ref, grace=grace, since=since), target_name)
                seen = (await bounded(target.observe([ref]), target_name)).get(ref.name)
                if seen is not None and seen.state.ended:
                    break
                await world.sleep(min(LOOK_EVERY, max(world.poll, 0.05)))
            await bounded(target.forget(ref), target_name)
            return Ended(True, "gone" if seen.state is State.GONE else "ended")
    except TimeoutError:
        return Ended(False, f"told to end, and not over after {limit:.0f} s")
    except TargetError as error:
        return Ended(False, f"could not be ended: {error}")

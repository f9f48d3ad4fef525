"""How a gang is told to end: by its platform, and where that does not answer, by its run directory.

Purpose: a stop is journalled first and then asked for until it is confirmed,
whoever wanted it: a person, a limit, a newer owner, a move.

What it does not do: decide that an attempt is over; that is seen and closed by
the driver.

Limits: the platform enforces the grace; where it cannot be reached, the job's
own runtime does.
"""

from __future__ import annotations

from airflow_gpu.acting import Actor
from airflow_gpu.gang.entries import JournalError, stop_entry
from airflow_gpu.gang.run import Attempt, State
from airflow_gpu.rundir.journal import LostRace
from airflow_gpu.rundir.store import StoreError
from airflow_gpu.staging import ref_for
from airflow_gpu.targets.base import Sighting, TargetError
from airflow_gpu.targets.watch import bounded, differs

KILL_ROUNDS = 5
"""How often a stop looks for a job whose submit may still be on its way, one second apart."""

STOP_LIMIT = 600.0
"""Seconds for which a person's wish to end a gang is tried, when store or target do not answer."""

CANCEL_EVERY = 30.0
"""Seconds after which a target that still shows an attempt which is to end is asked again to end it."""


class Stopping(Actor):
    """The part of a driver that ends attempts."""

    _told: tuple[int, float, Sighting | None] | None = None  # the newest cancel that was heard

    async def _cancel(self, attempt: Attempt) -> None:
        """Ask for the end; again when the target shows something new without an end, and from time to time."""
        now, shown = self.world.clock(), self._observer.sighting
        self._observer.asked = self._observer.asked or now
        # One that is out of sight, and one that is said not to be there, are told by their run directory as well.
        heard = self._observer.seen is None or self._observer.seen.state not in (State.UNKNOWN, State.GONE)
        if self._told is not None and self._told[0] == attempt.number and now < self._told[1] + CANCEL_EVERY:
            before = self._told[2]
            if before is shown or (before is not None and shown is not None and not differs(before, shown)):
                return
        try:
            await self._ask_to_end(attempt)
            self._told = attempt.number, now, shown
        except TargetError as error:
            self._tell(f"{attempt.target} could not be asked to end attempt {attempt.number} yet: {error}")
            heard = False
        if not heard:
            await self._tell_the_job(attempt)

    async def _tell_the_job(self, attempt: Attempt) -> None:
        """The target does not answer: a fence in the run directory lets no life begin, and the one that runs save and leave."""
        reason = attempt.stop.reason if attempt.stop is not None else ""
        await self.channel(attempt).fence(
            attempt.number,
            attempt.first_life,
            reason,
            self.world.clock(),
            grace=self._gang_of(attempt).stop_grace,
        )

    async def _ask_to_end(self, attempt: Attempt) -> None:
        target = await self.world.target(attempt.target)
        since = attempt.stop.at if attempt.stop is not None else self.world.clock()
        ref = ref_for(self.key, self.incarnation, attempt)
        # The run's own driver may be waiting in this process: it is to see the stop that was just journalled.
        self.world.watcher(target).nudge(ref.name)
        await bounded(
            target.cancel(ref, grace=self._gang_of(attempt).stop_grace, since=since), attempt.target
        )

    # -- a person's wish -------------------------------------------------------------------------

    async def stop(self, reason: str, detail: str) -> bool:
        """End what this owner has running and let it start nothing more, because a person asked for it.

        Journals the stop, gives notice and returns: the platform enforces the
        grace. Trouble with the store or the target is tried again for STOP_LIMIT
        seconds, since nobody else may come to do it. Answers False when a newer
        owner has the run, or there is a verdict.
        """
        begun = self.world.clock()
        while True:
            try:
                return await self._stop_once(reason, detail)
            except (LostRace, JournalError, StoreError, TargetError) as error:
                if self.world.clock() - begun >= self._stop_limit(error):
                    raise
                if not isinstance(error, LostRace):
                    self._tell(f"the gang could not be told to end yet, trying again: {error}")
                await self.world.sleep(min(self.world.poll, 1.0))

    def _stop_limit(self, error: Exception) -> float:
        """Seconds for which this trouble is waited out before a stop is given up."""
        return STOP_LIMIT

    async def _stop_once(self, reason: str, detail: str) -> bool:
        run = await self.journal.refresh()
        attempt = run.current
        if run.epoch != self.epoch or run.verdict is not None:
            return False
        now = self.world.clock()
        if attempt is None:
            if run.stop is None:
                await self.journal.append(
                    stop_entry(0, reason, detail), epoch=self.epoch, now=now, after=run.seq
                )
            return True
        stop = attempt.stop
        if stop is None or (reason == "user" and (stop.reason != "user" or stop.epoch < self.epoch)):
            entry = stop_entry(attempt.number, reason, detail)
            run = await self.journal.append(entry, epoch=self.epoch, now=now, after=run.seq)
            attempt = run.current
            assert attempt is not None
        channel = self.channel(attempt)
        if not any(life.attempt == attempt.number for life in await channel.lives()):
            # Nothing has started, and a submit may still be on its way: now nothing can start any more.
            await channel.fence(attempt.number, attempt.first_life, reason, now)
        ref = ref_for(self.key, self.incarnation, attempt)
        try:
            target = await self.world.target(attempt.target)
            for _ in range(KILL_ROUNDS):
                await self._ask_to_end(attempt)
                seen = (await bounded(target.observe([ref]), attempt.target)).get(ref.name)
                if seen is not None and (seen.state is not State.GONE or attempt.submitted_at is not None):
                    break
                await self.world.sleep(1.0)
        except TargetError:
            await self._tell_the_job(attempt)
            raise
        self.world.say(f"attempt {attempt.number} on {attempt.target} was told to end: {detail}")
        return True

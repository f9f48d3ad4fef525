"""The one loop that joins lifecycle, placement, run directory and target.

Purpose: look, let :func:`~airflow_gpu.gang.lifecycle.step` decide, act. The
trigger and the synchronous operator both run :meth:`Driver.run`; there is no
second code path.

What it does not do: decide, or know of Airflow. Clock, sleep, secrets, targets
and the place for log lines come in as arguments, so tests and simulation run
the same code.

Limits: two drivers of one run are normal for a while. Each decision is written
to the journal before it is acted on; who loses a race there reads on and
decides again. Every action may be repeated.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import replace
from typing import assert_never

from airflow_gpu.acting import World
from airflow_gpu.gang import lifecycle
from airflow_gpu.gang.entries import (
    attempt_entry,
    over_entry,
    stop_entry,
    submitted_entry,
    verdict_entry,
)
from airflow_gpu.gang.identity import RunKey, attempt_name, run_path
from airflow_gpu.gang.run import Attempt, Cause, Outcome, Seed, State, Verdict
from airflow_gpu.gang.spec import Gang
from airflow_gpu.pacing import GLANCE, LOOK, Turns
from airflow_gpu.placing import Asked, Elsewhere, ask, leftovers
from airflow_gpu.record import build_record, clean, describe
from airflow_gpu.rundir.channel import Channel
from airflow_gpu.rundir.journal import Journal, LostRace
from airflow_gpu.rundir.slot import newest
from airflow_gpu.rundir.store import StoreError
from airflow_gpu.staging import job_for, ref_for, stage
from airflow_gpu.stopping import KILL_ROUNDS, Stopping
from airflow_gpu.targets.base import NameTaken, NotConfigured, Rejected, TargetError
from airflow_gpu.targets.watch import NoAnswer, bounded, differs
from airflow_gpu.tasklog import RankLog, SaveLog

NODE_TAIL = 4000
"""Characters of a node's own output that are shown when the runtime never started."""

STALE = 30.0
"""Seconds after which a look is too old to decide on."""

HOLD_LIMIT = 120.0
"""Seconds for which a worker stays with an attempt that is to end, before it leaves the rest to a triggerer."""

STORE_LIMIT = 600.0
"""Seconds for which the run directory may be unreachable before the driver gives up. The gang goes on."""


__all__ = ["Driver", "SupersededError", "World"]


class SupersededError(Exception):
    """A newer try of the task instance has this run; nothing was touched."""


class Driver(Stopping):
    """Drives one run for one owner until there is a verdict.

    Example::

        verdict = await Driver(journal, key, incarnation, gang, epoch=1, world=world).run()
    """

    def __init__(
        self, journal: Journal, key: RunKey, incarnation: str, gang: Gang, *, epoch: int, world: World
    ) -> None:
        super().__init__(journal, key, incarnation, gang, epoch=epoch, world=world)
        self._elsewhere = Elsewhere(gang, world.target)
        self._looked_at = 0.0  # when the newest look was done
        self._failing: float | None = None  # since when the current attempt could not be submitted
        self._log = RankLog(world.rank_log)
        self._saves = SaveLog(world.say)
        self._turns = Turns(world.pace, world.poll)

    async def run(self, *, until_submitted: bool = False) -> Verdict | None:
        """Go on until there is a verdict, or only until an attempt is submitted: then the answer is None.

        :raises SupersededError: a newer owner has taken over.
        :raises StoreError: the run directory could not be reached for STORE_LIMIT seconds.
        """
        try:
            return await self._until(until_submitted)
        finally:
            self._elsewhere.forget()

    async def _until(self, until_submitted: bool) -> Verdict | None:
        broken: float | None = None
        while True:
            try:
                await self.journal.refresh()
                verdict = await self._round()
                broken = None
            except LostRace:
                self._observer.seen = None
                continue
            except (StoreError, TargetError) as error:
                # Neither says anything about the gang, which goes on meanwhile.
                now = self.world.clock()
                broken = broken or now
                limit = self._away_limit(error)
                if now - broken >= limit:
                    raise
                self._tell(f"trying again: {error}")
                await self.world.sleep(min(self._turns.left(LOOK), max(0.05, broken + limit - now)))
                continue
            if verdict is not None:
                return verdict
            if until_submitted and self._may_be_left(self.journal.run.current):
                return None

    def _away_limit(self, error: Exception) -> float:
        """Seconds for which this trouble is waited out before the driver gives up."""
        return STORE_LIMIT if isinstance(error, StoreError) else self.gang.recovery.unknown_limit

    def _may_be_left(self, current: Attempt | None) -> bool:
        """It is submitted. One that is to end (the task was cleared) is first seen to its end here, within HOLD_LIMIT:
        there may be no triggerer to do it."""
        if current is None or current.submitted_at is None:
            return False
        asked = self._observer.asked
        return current.stop is None or (asked is not None and self.world.clock() - asked >= HOLD_LIMIT)

    async def _round(self) -> Verdict | None:
        now = self.world.clock()
        run = self.journal.run
        self._basis = run.seq
        self._observer.drop_if_stale(run.current)
        seen = self._observer.seen
        if run.current is not None and seen is not None and now - max(seen.at, self._looked_at) > STALE:
            # This process stood still, or an answer took that long: no limit is held against what is long past.
            await self._look(run.current, 0.0)
            return None
        action = lifecycle.step(run, self.gang, seen, now, self.epoch)
        match action:
            case lifecycle.Done(verdict):
                return verdict
            case lifecycle.Superseded():
                raise SupersededError(f"owner {self.epoch} was followed by owner {self.journal.run.epoch}")
            case lifecycle.Start(number, resume):
                await self._start(number, resume)
            case lifecycle.Submit(attempt):
                await self._submit(attempt)
            case lifecycle.Watch(attempt, until):
                await self._look(attempt, until)
            case lifecycle.Wait(until, why):
                self._tell(why, f"; going on in {max(0.0, until - now):.0f} s")
                await self.world.sleep(max(0.05, min(until - now, self._turns.left(GLANCE))))
            case lifecycle.RequestStop(attempt, reason, detail):
                await self._append(stop_entry(attempt.number, reason, detail))
                self._tell(f"attempt {attempt.number} is to end ({reason}): {detail}")
            case lifecycle.Cancel(attempt):
                await self._cancel(attempt)
                await self._look(attempt, None)
            case lifecycle.Close(attempt, outcome):
                await self._close(attempt, outcome)
            case lifecycle.Finish(outcome, cause, message):
                await self._finish(outcome, cause, message)
            case _:
                assert_never(action)
        return None

    # -- actions ---------------------------------------------------------------------------------

    async def _start(self, number: int, resume: bool) -> None:
        """Place, journal, stage, submit: in this order, so that what is submitted can be found again."""
        now = self.world.clock()
        run = self.journal.run
        asked = await ask(self.gang, self.world.target)
        decision = asked.decide(self.gang, run, self.epoch, now)
        if decision.chosen is None and not asked.passing:
            last = run.of_epoch(self.epoch)[-1:]
            cause = next((a.outcome.cause for a in last if a.outcome is not None), Cause.REJECTED)
            await self._finish("failed", cause, f"no target can run this gang: {decision.explain()}")
            return
        if decision.chosen is None:
            await self._not_yet(f"no target answers: {decision.explain()}")
            return
        if number == 1 and not await self._alone(asked):
            return
        self._failing = None
        store = self.world.channel_store(asked.targets[decision.chosen.target].channel)
        channel = Channel(store, run_path(self.key, self.incarnation))
        first_life, since, where = 1, 0, None
        for earlier in run.attempts[-1:]:
            there = self.channel(earlier)
            first_life = max([life.number for life in await there.lives()] or [0]) + 1
            where = await there.locate(earlier) if resume else None
            since = earlier.since if resume else first_life
        await self._append(
            attempt_entry(
                attempt=number,
                name=attempt_name(self.key, self.incarnation, number),
                target=decision.chosen.target,
                channel=channel.uri,
                offer=decision.record(),
                resume=resume,
                first_life=first_life,
                digest=self.gang.digest(),
                seed=self._seed(where, channel),
                since=since,
            )
        )
        self._observer.forget()
        attempt = self.journal.run.attempts[-1]
        why = f" (not {decision.explain()})" if decision.others else ""
        self._tell(
            f"attempt {number} on {attempt.target}: {self.gang.nodes} nodes x {self.gang.ranks} ranks{why}"
        )
        await self._submit(attempt)

    def _seed(self, where: Seed | None, channel: Channel) -> Seed | None:
        """What the next attempt on ``channel`` begins from while it has nothing of its own there."""
        run = self.journal.run
        if where is None:
            return run.owners[-1].seed
        if where.run or where.channel != channel.uri:
            return where
        last = run.attempts[-1]
        return last.seed if last.channel == channel.uri else None

    async def _not_yet(self, why: str) -> None:
        """Nothing can be started for now: wait, and give up at recovery.unknown_limit."""
        now = self.world.clock()
        self._failing = self._failing or now
        self._tell(why)
        if now - self._failing >= self.gang.recovery.unknown_limit:
            await self._finish("failed", Cause.LOST_SIGHT, why)
            return
        await self.world.sleep(self.world.poll)

    async def _alone(self, asked: Asked) -> bool:
        """End what another run directory of this task instance has left behind; True when nothing of it lives."""
        last = await newest(self.journal.store, self.key)
        if last is not None and last[1] != self.incarnation:
            raise SupersededError("a newer run of this task has begun")
        found = await leftovers(asked, self.key, self.incarnation)
        for target, listed in found:
            cancel = target.cancel(listed.ref, grace=self.gang.stop_grace, since=self.world.clock())
            await bounded(cancel, target.name)
        if found:
            names = ", ".join(listed.ref.name for _, listed in found)
            await self._not_yet(
                f"an earlier gang of this task still runs, and its run directory is lost; ending it first: {names}"
            )
        return not found

    async def _submit(self, attempt: Attempt) -> None:
        now = self.world.clock()
        gang, channel = self._gang_of(attempt), self.channel(attempt)
        try:
            target = await self.world.target(attempt.target)
            told = await self.world.public(attempt.seed.channel) if attempt.seed is not None else {}
            files = await stage(channel, target, self.key, self.incarnation, gang, attempt, told)
            secrets = await self.world.secrets(gang.secrets)
            job = job_for(
                channel, target, self.key, self.incarnation, gang, attempt, secrets, self._blamed(), files
            )
            platform_id = await bounded(_uncancelled(target.submit(job)), attempt.target)
        except (Rejected, NameTaken, NotConfigured) as error:
            self._observer.word(attempt, State.REJECTED, str(error), now, now)
            return
        except TargetError as error:
            self._failing = self._failing or now
            self._tell(f"attempt {attempt.number} could not be submitted to {attempt.target} yet: {error}")
            await self.world.sleep(self.world.poll)
            if now - self._failing >= gang.recovery.unknown_limit:
                why = f"could not be submitted: {error}"
                self._observer.word(attempt, State.UNKNOWN, why, now, self._failing)
                return
            # It may have got there all the same: look before the next try.
            await self._look(attempt)
            return
        self._failing = None
        await self._submitted(attempt, platform_id)

    async def _submitted(self, attempt: Attempt, platform_id: str) -> None:
        await self._append(submitted_entry(attempt.number, platform_id))
        self._tell(f"attempt {attempt.number} submitted to {attempt.target} as {platform_id}")

    def _blamed(self) -> tuple[str, ...]:
        if not self.gang.recovery.exclude_blamed_nodes:
            return ()
        blamed = [host for a in self.journal.run.attempts if a.outcome for host in a.outcome.blamed]
        return tuple(dict.fromkeys(blamed))

    async def _look(self, attempt: Attempt, until: float | None = 0.0) -> None:
        """One observation of the attempt, once there is reason for it; rank 0's output goes into the task log.

        Reasons: the target shows something new, ``until`` has come (None: there
        is no such moment), it is this gang's turn to be read, or it was never
        looked at.
        """
        channel, target = self.channel(attempt), None
        sighting, trouble, lasted = None, "", 0.0
        queued = self._observer.queued
        try:
            target = await self.world.target(attempt.target)
            sighting = await self.world.watcher(target).sighting(
                ref_for(self.key, self.incarnation, attempt),
                known=self._observer.sighting,
                within=self._patience(until),
            )
        except TargetError as error:
            trouble, lasted = str(error), error.lasted if isinstance(error, NoAnswer) else 0.0
        now, before = self.world.clock(), self._observer.seen
        same = sighting is not None and not differs(self._observer.sighting, sighting)
        glance = queued and same and (until is None or now < until)
        seen = await self._observer.look(
            attempt,
            channel,
            sighting,
            trouble,
            now,
            lasted=lasted,
            glance=glance,
            copies=self._gang_of(attempt).checkpointing.local is not None,
        )
        if seen.state is State.QUEUED and attempt.stop is None:
            better, blocked = self._elsewhere.look(self.journal.run, attempt, self.epoch, now)
            seen = self._observer.note(elsewhere=better, blocked=blocked)
        self._looked_at = self.world.clock()
        if seen.life is not None:
            await self._log.follow(channel, seen.life, ended=seen.state.ended)
            self._saves.note(seen.life.number, self._observer.evidence.progress, now)
        if sighting is None:
            # Once: there may be thousands of gangs, and the words of an outage may change with each answer.
            if before is None or before.native != seen.native:
                self._tell(f"{attempt.target} does not answer, looking again: {trouble}")
            if target is None:  # then nobody has waited yet
                await self.world.sleep(max(0.05, self._patience(until)))
            return
        self._tell(*describe(attempt, seen, self._observer.evidence))
        known = sighting.platform_id and sighting.state not in (State.GONE, State.UNKNOWN)
        if attempt.submitted_at is None and attempt.stop is None and known:
            # The submit got there, its reply did not.
            await self._submitted(attempt, sighting.platform_id)

    def _patience(self, until: float | None) -> float:
        """Seconds for which the attempt may stay unread while nothing changes."""
        if self._observer.seen is None:
            return 0.0
        # Not beyond unknown_limit: an error of the target comes to light at the end of the wait only.
        wait = min(
            self._turns.left(GLANCE if self._observer.queued else LOOK), self.gang.recovery.unknown_limit
        )
        return wait if until is None else max(0.0, min(wait, until - self.world.clock()))

    async def _close(self, attempt: Attempt, outcome: Outcome) -> None:
        """Fence, look once more, then journal the end: no life may begin behind our back."""
        channel = self.channel(attempt)
        lives = await channel.fence(
            attempt.number, attempt.first_life, outcome.cause.value, self.world.clock()
        )
        mine = [life.number for life in lives if life.attempt == attempt.number and not life.fence]
        if mine and mine[-1] != self._observer.evidence.newest:
            self._observer.seen = None  # a life was claimed before the fence stood
            await self._look(attempt)
            return
        noticed = self._observer.seen is not None and self._observer.seen.notice
        # The program's fault without a life: the runtime has said why in the platform's output, and nowhere else.
        if outcome.cause in (Cause.NOT_STARTED, Cause.APPLICATION) and not mine:
            outcome = replace(outcome, detail=f"{outcome.detail}{await self._platform_words(attempt)}")
        await self._append(over_entry(attempt.number, outcome))
        self._observer.forget()
        at = f", checkpoint at step {outcome.checkpoint.step}" if outcome.checkpoint else ""
        self._tell(f"attempt {attempt.number} is over: {outcome.cause}{at}. {outcome.detail}".strip())
        if outcome.cause is Cause.SUCCEEDED and noticed:
            self.world.say(
                "every rank ended with exit code 0 after a notice, and that is success: "
                "a program that stops early to be resumed must exit with 75"
            )
        try:
            target = await self.world.target(attempt.target)
            await bounded(target.forget(ref_for(self.key, self.incarnation, attempt)), attempt.target)
        except TargetError as error:
            self._tell(f"{attempt.target} could not tidy up after attempt {attempt.number}: {error}")

    async def _platform_words(self, attempt: Attempt) -> str:
        """The end of what node 0 said before there was a life: why the runtime did not start."""
        try:
            target = await self.world.target(attempt.target)
            ref = ref_for(self.key, self.incarnation, attempt)
            text = (await bounded(target.logs(ref, 0), attempt.target)).text.strip()
        except TargetError:
            return ""
        return f"\n--- output of node 0 ---\n{text[-NODE_TAIL:]}" if text else ""

    async def _finish(self, outcome: str, cause: Cause, message: str) -> None:
        run = self.journal.run
        record = await build_record(run, self.gang, self.channel, self.journal)
        record = clean({"outcome": outcome, "cause": cause.value, "message": message, **record})
        await self._append(verdict_entry(outcome, cause, record["message"], record))


async def _uncancelled(submit: Awaitable[str]) -> str:
    """A submit whose caller is cancelled still goes to its end: its effect must be there to be found."""
    task = asyncio.ensure_future(submit)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task], timeout=KILL_ROUNDS)
        raise

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
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import assert_never

from airflow_gpu.gang import lifecycle
from airflow_gpu.gang.entries import attempt_entry, over_entry, stop_entry, submitted_entry, verdict_entry
from airflow_gpu.gang.identity import RunKey, attempt_name, run_path
from airflow_gpu.gang.run import Attempt, Cause, Observation, Outcome, State, Verdict
from airflow_gpu.gang.spec import Gang
from airflow_gpu.placement.choose import choose
from airflow_gpu.record import build_record, describe
from airflow_gpu.rundir.channel import Channel, Evidence
from airflow_gpu.rundir.journal import Journal, LostRace
from airflow_gpu.rundir.store import Store, StoreError
from airflow_gpu.staging import job_for, ref_for, stage
from airflow_gpu.targets.base import JobRef, NameTaken, Offer, Rejected, Target, TargetError
from airflow_gpu.targets.watch import Watcher
from airflow_gpu.tasklog import RankLog

KILL_ROUNDS = 5
"""How often a stop looks for a job whose submit may still be on its way, one second apart."""

PROGRESS_EVERY = 30.0
"""Seconds between two lines of the task log that say how far the gang is."""

NODE_TAIL = 4000
"""Characters of a node's own output that are shown when the runtime never started."""

STORE_LIMIT = 600.0
"""Seconds for which the run directory may be unreachable before the driver gives up. The gang goes on."""


class SupersededError(Exception):
    """A newer try of the task instance has this run; nothing was touched."""


@dataclass(frozen=True)
class World:
    """What the driver needs of the world outside; tests give their own.

    ``target`` answers the target for a connection id, ``channel_store`` the
    store of its channel, ``secrets`` resolves references to values at the
    moment of a submit. ``say`` takes lines for people.
    """

    clock: Callable[[], float]
    sleep: Callable[[float], Awaitable[None]]
    target: Callable[[str], Awaitable[Target]]
    channel_store: Callable[[Target], Store]
    watcher: Callable[[Target], Watcher]
    secrets: Callable[[Mapping[str, str]], Awaitable[Mapping[str, str]]]
    say: Callable[[str], None]
    rank_log: Callable[[str], None]
    poll: float = 5.0


class Driver:
    """Drives one run for one owner until there is a verdict.

    Example::

        verdict = await Driver(journal, key, incarnation, gang, epoch=1, world=world).run()
    """

    def __init__(
        self, journal: Journal, key: RunKey, incarnation: str, gang: Gang, *, epoch: int, world: World
    ) -> None:
        self.journal = journal
        self.key = key
        self.incarnation = incarnation
        self.gang = gang
        self.epoch = epoch
        self.world = world
        self._seen: Observation | None = None
        self._evidence: Evidence | None = None
        self._since: tuple[str, float] = ("", 0.0)
        self._asked: float | None = (
            None  # since when this driver has asked for the end of the current attempt
        )
        self._failing: float | None = None  # since when the current attempt could not be submitted
        self._channels: dict[str, Channel] = {}
        self._log = RankLog(world.rank_log)
        self._said = ""
        self._said_at = 0.0

    async def run(self, *, until_submitted: bool = False) -> Verdict | None:
        """Go on until there is a verdict, or only until an attempt is submitted: then the answer is None.

        :raises SupersededError: a newer owner has taken over.
        :raises StoreError: the run directory could not be reached for STORE_LIMIT seconds.
        """
        broken: float | None = None
        while True:
            try:
                await self.journal.refresh()
                verdict = await self._round()
                broken = None
            except LostRace:
                self._seen = None
                continue
            except StoreError as error:
                now = self.world.clock()
                broken = broken or now
                if now - broken >= STORE_LIMIT:
                    raise
                self._tell(f"the run directory cannot be reached, trying again: {error}")
                await self.world.sleep(self.world.poll)
                continue
            if verdict is not None:
                return verdict
            current = self.journal.run.current
            if until_submitted and current is not None and current.submitted_at is not None:
                return None

    async def _round(self) -> Verdict | None:
        now = self.world.clock()
        action = lifecycle.step(self.journal.run, self.gang, self._seen, now, self.epoch)
        match action:
            case lifecycle.Done(verdict):
                return verdict
            case lifecycle.Superseded():
                raise SupersededError(f"owner {self.epoch} was followed by owner {self.journal.run.epoch}")
            case lifecycle.Start(number, resume):
                await self._start(number, resume)
            case lifecycle.Submit(attempt):
                await self._submit(attempt)
            case lifecycle.Watch(attempt):
                await self._look(attempt)
            case lifecycle.Wait(until, why):
                self._tell(why, f"; going on in {max(0.0, until - now):.0f} s")
                await self.world.sleep(max(0.05, min(until - now, self.world.poll)))
            case lifecycle.RequestStop(attempt, reason, detail):
                await self._append(stop_entry(attempt.number, reason, detail))
                self._tell(f"attempt {attempt.number} is to end ({reason}): {detail}")
            case lifecycle.Cancel(attempt):
                await self._cancel(attempt)
                await self._look(attempt)
            case lifecycle.Close(attempt, outcome):
                await self._close(attempt, outcome)
            case lifecycle.Finish(outcome, cause, message):
                await self._finish(outcome, cause, message)
            case _:
                assert_never(action)
        return None

    async def _append(self, entry: dict[str, object]) -> None:
        await self.journal.append(entry, epoch=self.epoch, now=self.world.clock())

    def _tell(self, line: str, progress: str = "") -> None:
        """A line for people, once; with its progress again from time to time."""
        now = self.world.clock()
        if line != self._said or (progress and now - self._said_at >= PROGRESS_EVERY):
            self._said, self._said_at = line, now
            self.world.say(line + progress)

    # -- where an attempt's files are ------------------------------------------------------------

    async def channel(self, attempt: Attempt) -> Channel:
        """The channel half of the run directory of this attempt."""
        if attempt.channel not in self._channels:
            target = await self.world.target(attempt.target)
            store = self.world.channel_store(target)
            self._channels[attempt.channel] = Channel(store, run_path(self.key, self.incarnation))
        return self._channels[attempt.channel]

    # -- actions ---------------------------------------------------------------------------------

    async def _start(self, number: int, resume: bool) -> None:
        """Place, journal, stage, submit: in this order, so that what is submitted can be found again."""
        offers: list[Offer] = []
        errors: dict[str, str] = {}
        targets: dict[str, Target] = {}
        for name in self.gang.targets:
            try:
                targets[name] = await self.world.target(name)
                # By the name under which it was listed, whatever the target calls itself.
                offers += [replace(offer, target=name) for offer in await targets[name].offers(self.gang)]
            except TargetError as error:
                errors[name] = str(error)
        decision = choose(self.gang, offers, errors)
        if decision.chosen is None and not errors:
            await self._finish("failed", Cause.REJECTED, f"no target can run this gang: {decision.explain()}")
            return
        if decision.chosen is None:
            now = self.world.clock()
            self._failing = self._failing or now
            self._tell(f"no target answers: {decision.explain()}")
            if now - self._failing >= self.gang.recovery.unknown_limit:
                await self._finish("failed", Cause.LOST_SIGHT, f"no target answers: {decision.explain()}")
                return
            await self.world.sleep(self.world.poll)
            return
        self._failing = None
        target = targets[decision.chosen.target]
        store = self.world.channel_store(target)
        channel = Channel(store, run_path(self.key, self.incarnation))
        before = self.journal.run.attempts
        first_life = 1
        for earlier in before[-1:]:
            first_life = max([life.number for life in await (await self.channel(earlier)).lives()] or [0]) + 1
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
            )
        )
        self._seen = self._evidence = self._asked = None
        attempt = self.journal.run.attempts[-1]
        self._tell(f"attempt {number} on {attempt.target}: {self.gang.nodes} nodes x {self.gang.ranks} ranks")
        await self._submit(attempt)

    async def _submit(self, attempt: Attempt) -> None:
        now = self.world.clock()
        try:
            target = await self.world.target(attempt.target)
            channel = await self.channel(attempt)
            await stage(channel, target, self.key, self.incarnation, self.gang, attempt)
            secrets = await self.world.secrets(self.gang.secrets)
            job = job_for(
                channel, target, self.key, self.incarnation, self.gang, attempt, secrets, self._blamed()
            )
            platform_id = await _uncancelled(target.submit(job))
        except (Rejected, NameTaken) as error:
            self._seen = self._word(attempt, State.REJECTED, str(error), now)
            return
        except TargetError as error:
            self._failing = self._failing or now
            self._tell(f"attempt {attempt.number} could not be submitted to {attempt.target} yet: {error}")
            await self.world.sleep(self.world.poll)
            if now - self._failing >= self.gang.recovery.unknown_limit:
                why = f"could not be submitted: {error}"
                self._seen = replace(self._word(attempt, State.UNKNOWN, why, now), since=self._failing)
                return
            # It may have got there all the same: look before the next try.
            await self._look(attempt)
            return
        self._failing = None
        await self._append(submitted_entry(attempt.number, platform_id))
        self._tell(f"attempt {attempt.number} submitted to {attempt.target} as {platform_id}")

    def _word(self, attempt: Attempt, state: State, reason: str, now: float) -> Observation:
        return Observation(attempt=attempt.number, state=state, at=now, since=now, reason=reason)

    def _blamed(self) -> tuple[str, ...]:
        if not self.gang.recovery.exclude_blamed_nodes:
            return ()
        blamed = [host for a in self.journal.run.attempts if a.outcome for host in a.outcome.blamed]
        return tuple(dict.fromkeys(blamed))

    async def _look(self, attempt: Attempt) -> None:
        """One observation: the target's word and the ranks' records, put together."""
        target = await self.world.target(attempt.target)
        channel = await self.channel(attempt)
        ref = ref_for(self.key, self.incarnation, attempt, target, channel)
        try:
            sighting = await self.world.watcher(target).sighting(ref)
        except TargetError as error:
            now = self.world.clock()
            self._tell(f"{attempt.target} does not answer, looking again: {error}")
            self._seen = self._merge(attempt, State.UNKNOWN, "no answer", str(error), now, None)
            await self.world.sleep(self.world.poll)
            return
        now = self.world.clock()
        same_life = self._evidence if not sighting.state.ended else None
        evidence = await channel.evidence(attempt.number, ended=sighting.state.ended, known=same_life)
        self._evidence = evidence
        seen = self._merge(attempt, sighting.state, sighting.native, sighting.reason, now, sighting.since)
        self._seen = replace(
            seen,
            ending=sighting.ending or self._ending(sighting.restart),
            platform_id=sighting.platform_id,
            restart=max(sighting.restart, evidence.life.restart if evidence.life else 0),
            blamed=sighting.blamed_hosts,
        )
        self._tell(*describe(attempt, self._seen, evidence))
        if evidence.life is not None:
            await self._log.follow(channel, evidence.life, ended=sighting.state.ended)

    def _merge(
        self, attempt: Attempt, state: State, native: str, reason: str, now: float, since: float | None
    ) -> Observation:
        tag = f"{attempt.number}/{state}/{native if state is State.UNKNOWN else ''}"
        if since is not None:  # the platform's own word; it may have been something else between two looks
            self._since = (tag, since)
        elif self._since[0] != tag:
            self._since = (tag, now)
        found = self._evidence or Evidence()
        return Observation(
            attempt=attempt.number,
            state=state,
            at=now,
            since=self._since[1],
            native=native,
            reason=reason,
            restart=self._seen.restart if self._seen else 0,
            life=found.life,
            world_size=found.processes,
            ranks_ok=found.ok,
            ranks_ended=found.ended,
            notice=found.notice,
            notice_cause=found.notice_cause,
            failure=found.failure,
            checkpoint=found.checkpoint,
            step=found.step,
            fruitless=found.fruitless,
            asked=self._asked,
        )

    def _ending(self, restart: int) -> State | None:
        """What this start of the attempt was last said to be ending as; objects may vanish before they say it again."""
        return self._seen.ending if self._seen is not None and self._seen.restart >= restart else None

    async def _cancel(self, attempt: Attempt) -> None:
        self._asked = self._asked or self.world.clock()
        target = await self.world.target(attempt.target)
        try:
            await target.cancel(
                ref_for(self.key, self.incarnation, attempt, target, await self.channel(attempt)),
                grace=self.gang.stop_grace,
                since=attempt.stop.at if attempt.stop is not None else self._asked,
            )
        except TargetError as error:
            self._tell(f"{attempt.target} could not be asked to end attempt {attempt.number} yet: {error}")

    async def _close(self, attempt: Attempt, outcome: Outcome) -> None:
        """Fence, look once more, then journal the end: no life may begin behind our back."""
        channel = await self.channel(attempt)
        lives = await channel.fence(
            attempt.number, attempt.first_life, outcome.cause.value, self.world.clock()
        )
        mine = [life.number for life in lives if life.attempt == attempt.number and not life.fence]
        if mine and mine[-1] != outcome.life:
            self._seen = self._evidence = None  # a life was claimed before the fence stood
            await self._look(attempt)
            return
        noticed = self._seen is not None and self._seen.notice
        target = await self.world.target(attempt.target)
        ref = ref_for(self.key, self.incarnation, attempt, target, channel)
        if outcome.cause is Cause.NOT_STARTED and not mine:
            outcome = replace(outcome, detail=f"{outcome.detail}{await self._platform_words(target, ref)}")
        await self._append(over_entry(attempt.number, outcome))
        try:
            await target.forget(ref)
        except TargetError as error:
            self._tell(f"{attempt.target} could not tidy up after attempt {attempt.number}: {error}")
        self._seen = self._evidence = None
        at = f", checkpoint at step {outcome.checkpoint.step}" if outcome.checkpoint else ""
        self._tell(f"attempt {attempt.number} is over: {outcome.cause}{at}. {outcome.detail}".strip())
        if outcome.cause is Cause.SUCCEEDED and noticed:
            self.world.say(
                "every rank ended with exit code 0 after a notice, and that is success: "
                "a program that stops early to be resumed must exit with 75"
            )

    async def _platform_words(self, target: Target, ref: JobRef) -> str:
        """The end of what node 0 said before there was a life: why the runtime did not start."""
        try:
            text = (await target.logs(ref, 0)).text.strip()
        except TargetError:
            return ""
        return f"\n--- output of node 0 ---\n{text[-NODE_TAIL:]}" if text else ""

    async def _finish(self, outcome: str, cause: Cause, message: str) -> None:
        run = self.journal.run
        channel = await self.channel(run.attempts[-1]) if run.attempts else None
        record = await build_record(run, self.gang, channel, self.journal)
        record = {"outcome": outcome, "cause": cause.value, "message": message, **record}
        await self._append(verdict_entry(outcome, cause, message, record))

    async def stop(self, reason: str, detail: str) -> bool:
        """End what this owner has running, because a person asked for it.

        Journals the stop, gives notice and returns: the platform enforces the
        grace. Answers False when a newer owner has the run or nothing runs.
        """
        for _ in range(KILL_ROUNDS):
            run = await self.journal.refresh()
            attempt = run.current
            if run.epoch != self.epoch or run.verdict is not None or attempt is None:
                return False
            if attempt.stop is not None:
                break
            try:
                await self._append(stop_entry(attempt.number, reason, detail))
                break
            except LostRace:
                continue
        attempt = self.journal.run.current
        assert attempt is not None
        channel = await self.channel(attempt)
        if not any(life.attempt == attempt.number for life in await channel.lives()):
            # Nothing has started, and a submit may still be on its way: now nothing can start any more.
            await channel.fence(attempt.number, attempt.first_life, reason, self.world.clock())
        target = await self.world.target(attempt.target)
        ref = ref_for(self.key, self.incarnation, attempt, target, channel)
        for _ in range(KILL_ROUNDS):
            since = attempt.stop.at if attempt.stop is not None else self.world.clock()
            await target.cancel(ref, grace=self.gang.stop_grace, since=since)
            seen = (await target.observe([ref])).get(ref.name)
            if seen is not None and (seen.state is not State.GONE or attempt.submitted_at is not None):
                break
            await self.world.sleep(1.0)
        self.world.say(f"attempt {attempt.number} on {attempt.target} was told to end: {detail}")
        return True


async def _uncancelled(submit: Awaitable[str]) -> str:
    """A submit whose caller is cancelled still goes to its end: its effect must be there to be found."""
    task = asyncio.ensure_future(submit)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task], timeout=KILL_ROUNDS)
        raise

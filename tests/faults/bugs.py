"""The product with one thing broken on purpose: what the matrix must not miss.

Purpose: each :class:`Bug` replaces a few lines of the product while a run is
played. ``caught_by`` names the invariants that are about it; being caught by
another one alone would be luck.

Limits: ``scenarios`` are those in which a bug is looked for, so that a test of
it takes seconds and not minutes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

from airflow_gpu import acting, driver
from airflow_gpu.driver import Driver
from airflow_gpu.gang import lifecycle
from airflow_gpu.gang.entries import fold, iso, over_entry
from airflow_gpu.gang.run import Attempt, Cause, Observation, Outcome, State, Verdict
from airflow_gpu.gang.spec import Gang
from airflow_gpu.observing import Observer
from airflow_gpu.rundir.channel import Channel
from airflow_gpu.runtime import claim as rules
from airflow_gpu.staging import job_for, stage
from airflow_gpu.stopping import Stopping
from airflow_gpu.targets.base import TargetError
from tests.faults.airflow import QuietTrigger
from tests.faults.disk import Disk
from tests.faults.platform import Platform


@dataclass(frozen=True)
class Bug:
    """One bug: how it is planted, where it is looked for, and which invariants are about it."""

    name: str
    patches: Callable[[], list[Any]]
    scenarios: tuple[str, ...]
    caught_by: frozenset[str]

    @contextlib.contextmanager
    def planted(self) -> Any:
        with contextlib.ExitStack() as stack:
            for patch in self.patches():
                stack.enter_context(patch)
            yield


BUGS: list[Bug] = []


def bug(
    name: str, scenarios: str, caught_by: str
) -> Callable[[Callable[[], list[Any]]], Callable[[], list[Any]]]:
    def add(patches: Callable[[], list[Any]]) -> Callable[[], list[Any]]:
        BUGS.append(Bug(name, patches, tuple(scenarios.split("; ")), frozenset(caught_by.split())))
        return patches

    return add


@bug("an attempt is journalled after its submit", "what is free changes", "twice again")
def _submit_first() -> list[Any]:
    real = acting.Actor._append

    async def append(self: Driver, entry: dict[str, Any]) -> None:
        if entry["kind"] == "attempt":
            run = self.journal.run
            at = iso(self.world.clock())
            body = {"seq": run.seq + 1, "at": at, "epoch": self.epoch, **entry}
            attempt = fold(run, body).attempts[-1]
            target, channel = await self.world.target(attempt.target), self.channel(attempt)
            await stage(channel, target, self.key, self.incarnation, self.gang, attempt)
            await target.submit(
                job_for(channel, target, self.key, self.incarnation, self.gang, attempt, {}, ())
            )
            await self.world.sleep(1.0)
        await real(self, entry)

    return [mock.patch.object(acting.Actor, "_append", append)]


@bug("an attempt is closed without a fence", "marked failed, then cleared", "twice again")
def _no_fence() -> list[Any]:
    async def fence(self: Channel, *args: Any, **kwargs: Any) -> Any:
        return await self.lives()

    return [mock.patch.object(Channel, "fence", fence)]


@bug("a claim does not mind fences", "marked failed, then cleared", "twice again")
def _fence_ignored() -> list[Any]:
    real = rules.refuse

    def refuse(found: list[Any], job: Any, node: Any) -> None:
        real([entry for entry in found if entry.kind != "fence"], job, node)

    return [mock.patch.object(rules, "refuse", refuse)]


@bug("a claim does not mind twins", "names are not unique, a long program", "twice again")
def _twins() -> list[Any]:
    real = rules.refuse

    def refuse(found: list[Any], job: Any, node: Any) -> None:
        real([entry for entry in found if entry.attempt != job.attempt or entry.kind == "fence"], job, node)

    return [mock.patch.object(rules, "refuse", refuse)]


@bug("not there right after a lost submit is taken for over", "plain success", "cause attempts")
def _gone_is_over() -> list[Any]:
    real = lifecycle._ended

    def ended(gang: Gang, attempt: Attempt, seen: Observation, now: float) -> Any:
        if seen.state is State.GONE and attempt.submitted_at is None and attempt.stop is None:
            return lifecycle.Close(attempt, lifecycle._outcome(Cause.GONE, seen, now, "not there"))
        return real(gang, attempt, seen, now)

    return [mock.patch.object(lifecycle, "_ended", ended)]


@bug("a job of another incarnation is adopted", "clear of a success", "cause success end")
def _any_incarnation() -> list[Any]:
    real = driver.attempt_name

    def name(key: Any, incarnation: str, number: int) -> str:
        return real(key, "always", number)

    def adopt(self: Platform, job: Any) -> str | None:
        found = self.find(job.name)
        return None if found is None else found.id

    def forget(self: Platform, name: str) -> None:
        """Objects stay, as in a queueing system that keeps its history."""

    return [
        mock.patch.object(driver, "attempt_name", name),
        mock.patch.object(Platform, "adopt", adopt),
        mock.patch.object(Platform, "forget", forget),
    ]


@bug("the platform's word is enough for a success", "success of half the ranks", "success")
def _word_is_enough() -> list[Any]:
    def whole(self: Observation) -> bool:
        return self.life is not None and (
            self.state is State.SUCCEEDED or self.ranks_ok == self.world_size > 0
        )

    return [mock.patch.object(Observation, "whole_success", property(whole))]


@bug(
    "the store overwrites what is there",
    "shown as ended, then queued again; two workers of one try; marked failed, then cleared; clear while deferred",
    "twice again journal",
)
def _overwrites() -> list[Any]:
    def create(self: Disk, path: str, data: bytes) -> None:
        self.put(path, data)
        self.on_create(path)

    return [mock.patch.object(Disk, "create", create)]


@bug("the platform's word takes a success away", "done within the grace", "success again")
def _not_absorbing() -> list[Any]:
    real = lifecycle._judge

    def judge(run: Any, gang: Any, attempt: Attempt, seen: Observation, now: float) -> Any:
        if seen.state.ended and seen.state is not State.SUCCEEDED:
            return lifecycle._ended(gang, attempt, seen, now)
        return real(run, gang, attempt, seen, now)

    return [mock.patch.object(lifecycle, "_judge", judge)]


@bug("a stop that met an error is not asked for again", "mark failed", "stop orphan")
def _stop_once() -> list[Any]:
    real = Stopping._ask_to_end
    asked: set[tuple[int, int]] = set()

    async def ask(self: Stopping, attempt: Attempt) -> None:
        if (id(self), attempt.number) in asked:
            return
        asked.add((id(self), attempt.number))
        with contextlib.suppress(TargetError):
            await real(self, attempt)

    return [mock.patch.object(Stopping, "_ask_to_end", ask)]


@bug("on_kill asks nobody, and acts for whoever owns the run now", "clear while deferred", "stop cause end")
def _any_owner() -> list[Any]:
    async def kill(self: QuietTrigger) -> None:
        driver = await self._driver()
        driver.epoch = driver.journal.run.epoch
        await driver.stop("user", "cancelled")

    return [mock.patch.object(QuietTrigger, "_kill", kill)]


@bug("a hand-over is taken for a person's kill", "hand-over, both alive", "cause end stop")
def _hand_over_kills() -> list[Any]:
    async def kill(self: QuietTrigger) -> None:
        await (await self._driver()).stop("user", "cancelled")

    return [mock.patch.object(QuietTrigger, "_kill", kill)]


@bug("a platform that does not answer is taken for a lost gang", "target away", "cause attempts twice")
def _unknown_is_gone() -> list[Any]:
    real = Observer.look

    async def look(self: Observer, attempt: Attempt, *args: Any, **kwargs: Any) -> Observation:
        seen = await real(self, attempt, *args, **kwargs)
        if seen.state is State.UNKNOWN:
            self.seen = seen = replace(seen, state=State.NODE_LOST)
        return seen

    return [mock.patch.object(Observer, "look", look)]


@bug("a name is used for two attempts", "preempted without", "journal cause end")
def _one_name() -> list[Any]:
    real = driver.attempt_name

    def name(key: Any, incarnation: str, number: int) -> str:
        return real(key, incarnation, 1)

    return [mock.patch.object(driver, "attempt_name", name)]


@bug(
    "an attempt is closed on what was seen before its fence",
    "shown as ended, then queued again",
    "success again cause resume",
)
def _stale_evidence() -> list[Any]:
    async def close(self: Driver, attempt: Attempt, outcome: Outcome) -> None:
        channel, now = self.channel(attempt), self.world.clock()
        await channel.fence(attempt.number, attempt.first_life, outcome.cause.value, now)
        await self._append(over_entry(attempt.number, outcome))
        self._observer.forget()

    return [mock.patch.object(Driver, "_close", close)]


@bug("a verdict of an older owner is told again", "error, then retry", "end cause tries")
def _old_verdict() -> list[Any]:
    real = lifecycle.step

    def step(run: Any, gang: Any, seen: Any, now: float, epoch: int) -> Any:
        failed = next((a for a in run.attempts if a.outcome and a.outcome.cause is Cause.APPLICATION), None)
        if failed is not None and failed.outcome is not None:
            return lifecycle.Done(Verdict("failed", Cause.APPLICATION, failed.outcome.at, failed.epoch))
        return real(run, gang, seen, now, epoch)

    return [mock.patch.object(lifecycle, "step", step)]

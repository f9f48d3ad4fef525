"""Where an attempt goes: asks the targets, remembers what they did to this run, and looks for a better place.

Purpose: the part of the driver that talks to *all* targets of a list. Choosing
itself is :mod:`airflow_gpu.placement`; this asks, keeps what was answered for a
while, and finds what an earlier run directory has left on a target.

What it does not do: decide whether there is another attempt, or journal.

Limits: only targets that answer are looked through for leftovers.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

from airflow_gpu.gang.identity import RunKey, labels
from airflow_gpu.gang.run import Attempt, Run
from airflow_gpu.gang.spec import Gang
from airflow_gpu.placement.choose import Decision, choose, startable
from airflow_gpu.placement.memory import remember
from airflow_gpu.targets.base import Listed, NotConfigured, Offer, Target, TargetError
from airflow_gpu.targets.watch import bounded

LOOK_ELSEWHERE = 60.0
"""Seconds between two looks for a target that could start a gang which waits in the queue of another."""

_ANSWERS: WeakKeyDictionary[Target, dict[tuple[Any, ...], tuple[float, list[Offer] | Exception]]] = (
    WeakKeyDictionary()
)
"""What targets answered last, by the shape of a gang: thousands that wait ask the same."""

Resolve = Callable[[str], Awaitable[Target]]


@dataclass(frozen=True, slots=True)
class Asked:
    """What the targets of a list answered. ``errors`` names those that did not; ``passing``: some of them may later."""

    targets: Mapping[str, Target]
    offers: tuple[Offer, ...]
    errors: Mapping[str, str]
    passing: bool

    def decide(self, gang: Gang, run: Run, epoch: int, now: float) -> Decision:
        """The target for the next attempt of this owner."""
        return choose(gang, self.offers, self.errors, remember(run, epoch, now))


async def ask(gang: Gang, resolve: Resolve, age: float = 0.0) -> Asked:
    """Ask every target of the list what it could give the gang.

    :param age: seconds for which an answer to the same question, also by another gang of this process, will do.
    """
    answers = await asyncio.gather(*(_ask(name, gang, resolve, age) for name in gang.targets))
    targets: dict[str, Target] = {}
    offers: list[Offer] = []
    errors: dict[str, str] = {}
    passing = False  # a target that does not answer may do so later; one that is not there will not
    for name, (target, answer) in zip(gang.targets, answers, strict=True):
        if target is None or isinstance(answer, Exception):
            errors[name] = str(answer) if isinstance(answer, TargetError) else repr(answer)
            passing = passing or not isinstance(answer, NotConfigured)
            continue
        targets[name] = target
        # By the name under which it was listed, whatever the target calls itself.
        offers += [replace(offer, target=name) for offer in answer]
    return Asked(targets, tuple(offers), errors, passing)


async def _ask(
    name: str, gang: Gang, resolve: Resolve, age: float
) -> tuple[Target | None, list[Offer] | Exception]:
    """One target's answer. Whatever a client library raises: it must not keep the others from being asked."""
    target = None
    try:
        target = await resolve(name)
        return target, await _offers(target, name, gang, age)
    except Exception as error:
        return target, error


async def _offers(target: Target, name: str, gang: Gang, age: float) -> list[Offer]:
    known = _ANSWERS.setdefault(target, {})
    shape = (
        gang.nodes,
        gang.gpus_per_node,
        gang.cpus,
        gang.memory,
        gang.accelerator,
        gang.image,
        gang.priority,
    )
    at, answer = known.get(shape, (0.0, []))
    if not age or time.monotonic() - at >= age:
        try:
            answer = await bounded(target.offers(gang), name)
        except Exception as error:
            answer = error
        known[shape] = time.monotonic(), answer
    if isinstance(answer, Exception):
        raise answer
    return answer


class Elsewhere:
    """Looks, from time to time, whether another target could start a gang that waits.

    In a task of its own: a target that hangs must not hold up the look at the one where the gang waits.
    """

    def __init__(self, gang: Gang, resolve: Resolve) -> None:
        self._gang = gang
        self._resolve = resolve
        self._attempt = 0
        self._at = 0.0
        self._task: asyncio.Task[Asked] | None = None
        self._asked: Asked | None = None

    def look(self, run: Run, attempt: Attempt, epoch: int, now: float) -> tuple[str, str]:
        """A target that could start it at once (else empty), and why the attempt's own does not (else empty), as last heard."""
        if len(self._gang.targets) < 2 or self._gang.placement.move_after is None:
            return "", ""
        if self._attempt != attempt.number:
            self._attempt, self._at, self._asked = attempt.number, 0.0, None
            self.forget()
        if self._task is not None and self._task.done():
            self._asked, self._task, self._at = self._task.result(), None, now
        if self._task is None and now - self._at >= LOOK_ELSEWHERE:
            self._task = asyncio.get_running_loop().create_task(
                ask(self._gang, self._resolve, age=LOOK_ELSEWHERE)
            )
        if self._asked is None:
            return "", ""
        own = [offer for offer in self._asked.offers if offer.target == attempt.target]
        blocked = next((offer.blocked or offer.reason for offer in own if offer.blocked or offer.reason), "")
        chosen = self._asked.decide(self._gang, run, epoch, now).chosen
        better = chosen is not None and chosen.target != attempt.target and startable(chosen, self._gang)
        return chosen.target if chosen is not None and better else "", blocked

    def forget(self) -> None:
        """The answer is of no use any more."""
        if self._task is not None:
            self._task.cancel()
            self._task = None


async def leftovers(asked: Asked, key: RunKey, incarnation: str) -> list[tuple[Target, Listed]]:
    """Living jobs of this task instance from another run directory: its journal is lost, so nobody else ends them.

    :raises TargetError: a target that has just made an offer does not list its jobs.
    """
    mine = labels(key, incarnation, 1, "")
    wanted = {
        name: value
        for name, value in mine.items()
        if name.rpartition("/")[2] not in ("incarnation", "attempt", "digest")
    }
    found = []
    for name, target in asked.targets.items():
        for listed in await bounded(target.inventory(wanted), name):
            ours = listed.ref.labels.get("airflow-gpu/incarnation") == mine["airflow-gpu/incarnation"]
            if not ours and not listed.sighting.state.ended:
                found.append((target, listed))
    return found

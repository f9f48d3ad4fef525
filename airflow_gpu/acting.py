"""What every part of the driver shares: one run, one owner, and the world outside.

Purpose: :class:`World` is all that a driver may touch, and :class:`Actor` what
it acts with: the journal in which it writes as one owner, the channels of the
run's attempts, and a voice.

What it does not do: decide, look or end anything.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from airflow_gpu.gang.identity import RunKey, run_path
from airflow_gpu.gang.run import Attempt
from airflow_gpu.gang.spec import Gang
from airflow_gpu.observing import Observer
from airflow_gpu.pacing import Pace
from airflow_gpu.rundir.channel import Channel
from airflow_gpu.rundir.journal import Journal
from airflow_gpu.rundir.store import Store
from airflow_gpu.targets.base import Target
from airflow_gpu.targets.watch import Watcher

PROGRESS_EVERY = 30.0
"""Seconds between two lines of the task log that say how far the gang is."""


async def nothing_public(uri: str) -> Mapping[str, Any]:
    """No options: jobs find the store at this URI by themselves."""
    return {}


@dataclass(frozen=True)
class World:
    """What the driver needs of the world outside; tests give their own.

    ``target`` answers the target for a connection id, ``channel_store`` the
    store at a channel's root URI, ``secrets`` resolves references to values at the
    moment of a submit. ``public`` answers what a job may be told of the store at a
    URI: obstore's options without a secret. ``say`` takes lines for people. ``pace`` is shared by all
    drivers of a process.
    """

    clock: Callable[[], float]
    sleep: Callable[[float], Awaitable[None]]
    target: Callable[[str], Awaitable[Target]]
    channel_store: Callable[[str], Store]
    watcher: Callable[[Target], Watcher]
    secrets: Callable[[Mapping[str, str]], Awaitable[Mapping[str, str]]]
    say: Callable[[str], None]
    rank_log: Callable[[str], None]
    public: Callable[[str], Awaitable[Mapping[str, Any]]] = nothing_public
    poll: float = 5.0
    pace: Pace = field(default_factory=Pace)


class Actor:
    """One run, for one owner."""

    def __init__(
        self, journal: Journal, key: RunKey, incarnation: str, gang: Gang, *, epoch: int, world: World
    ) -> None:
        self.journal = journal
        self.key = key
        self.incarnation = incarnation
        self.gang = gang
        self.epoch = epoch
        self.world = world
        self._observer = Observer()
        self._basis = 0  # the journal's newest entry when step() decided
        self._channels: dict[str, Channel] = {}
        self._said = ""
        self._said_at = 0.0
        self._progressed = False

    async def _append(self, entry: dict[str, object]) -> None:
        """Journal a decision; LostRace if anything was journalled since it was made, also by our own stop()."""
        await self.journal.append(entry, epoch=self.epoch, now=self.world.clock(), after=self._basis)
        self._basis += 1

    def _tell(self, line: str, progress: str = "") -> None:
        """A line for people, once; with its progress as soon as there is some, then from time to time."""
        now = self.world.clock()
        first = bool(progress) and not self._progressed
        if line != self._said or first or (progress and now - self._said_at >= PROGRESS_EVERY):
            self._said, self._said_at, self._progressed = line, now, bool(progress)
            self.world.say(line + progress)

    def channel(self, attempt: Attempt) -> Channel:
        """The channel half of the run directory of this attempt: where it was journalled, whatever the connection says now."""
        path = run_path(self.key, self.incarnation)
        if attempt.channel not in self._channels:
            root = attempt.channel.removesuffix(f"/{path}")
            self._channels[attempt.channel] = Channel(self.world.channel_store(root), path)
        return self._channels[attempt.channel]

    def _gang_of(self, attempt: Attempt) -> Gang:
        """The request of the owner who began the attempt: an adopter may have rendered another one."""
        if attempt.epoch == self.epoch:
            return self.gang
        return Gang.from_json(json.dumps(self.journal.gang_of(attempt.epoch)))

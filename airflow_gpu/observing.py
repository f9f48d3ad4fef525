"""One look at one attempt: the target's word and the ranks' records, put together.

Purpose: makes the :class:`Observation` that ``step()`` decides on, and keeps
what a single look cannot know: since when a state is seen, what an attempt was
last said to be ending as, since when its end is asked for.

Limits: it belongs to one driver. What it keeps is for limits on waiting and for
words; nothing is safe or unsafe because of it. While a gang waits in its
platform's queue and has never lived there is nothing of it on the channel, so
a glance (the target's word alone) stands for a look most of the time; a
platform's word may lag, so every ``GLANCES``-th time the channel is read too.
"""

from __future__ import annotations

from dataclasses import replace

from airflow_gpu.gang.run import Attempt, Observation, State
from airflow_gpu.rundir.channel import Channel, Evidence
from airflow_gpu.targets.base import Sighting

GLANCES = 12
"""Of so many looks at a gang that only waits in a queue, one reads the channel."""


class Observer:
    """What one driver has seen of the current attempt."""

    def __init__(self) -> None:
        self.seen: Observation | None = None
        self.evidence = Evidence()
        self.sighting: Sighting | None = None  # the target's newest word on the current attempt
        self.asked: float | None = None  # since when this driver has asked for the end
        self._since: tuple[str, float] = ("", 0.0)
        self._first: tuple[str, float] = ("", 0.0)  # the same by our clock alone
        self._basis: tuple[int, float | None] | None = None
        self._glances = 0

    @property
    def queued(self) -> bool:
        """It waits in the platform's queue and has never lived: there is nothing of it on the channel."""
        return self.seen is not None and self.seen.state is State.QUEUED and self.seen.life is None

    def forget(self) -> None:
        """The attempt is over, or another one begins."""
        self.seen, self.evidence, self.asked, self._basis = None, Evidence(), None, None
        self.sighting = None

    def drop_if_stale(self, current: Attempt | None) -> None:
        """A look from before the submit was journalled says nothing of what was submitted."""
        if current is None or self._basis != (current.number, current.submitted_at):
            self.seen = None

    def note(self, *, elsewhere: str, blocked: str) -> Observation:
        """What was found out about other targets since the last look."""
        assert self.seen is not None
        self.seen = replace(self.seen, elsewhere=elsewhere, blocked=blocked)
        return self.seen

    def word(self, attempt: Attempt, state: State, reason: str, now: float, since: float) -> None:
        """An observation that comes from an error, not from a look."""
        self._basis = (attempt.number, attempt.submitted_at)
        self.seen = Observation(attempt=attempt.number, state=state, at=now, since=since, reason=reason)

    async def look(
        self,
        attempt: Attempt,
        channel: Channel,
        sighting: Sighting | None,
        trouble: str,
        now: float,
        *,
        lasted: float = 0.0,
        glance: bool = False,
        copies: bool = False,
    ) -> Observation:
        """Put a sighting and the records together.

        :param sighting: None when the target could not be asked, because of ``trouble``, for ``lasted`` seconds.
        :param copies: the gang keeps copies on its nodes.
        :param glance: nothing has changed and no limit has come, so the records of a gang that never lived may wait.
        """
        ended = sighting is not None and sighting.state.ended
        self._glances = self._glances + 1 if glance and self.queued and not ended else 0
        if not self._glances or self._glances >= GLANCES:
            self._glances = 0
            known = None if ended else self.evidence
            self.evidence = await channel.evidence(
                attempt.number,
                ended=ended,
                known=known,
                seed=attempt.seed,
                since=attempt.since,
                copies=copies,
            )
        found = self.evidence
        self.sighting = sighting or self.sighting
        state = sighting.state if sighting is not None else State.UNKNOWN
        before = self.seen if self.seen is not None and self.seen.attempt == attempt.number else None
        seen = Observation(
            attempt=attempt.number,
            state=state,
            at=now,
            since=self._first_seen(
                attempt, state, sighting.since if sighting is not None else None, now - lasted
            ),
            first_at=self._first_at(attempt, state, sighting, now - lasted),
            native=sighting.native if sighting is not None else "no answer",
            reason=sighting.reason if sighting is not None else trouble,
            restart=before.restart if before is not None else 0,
            life=found.life,
            world_size=found.processes,
            ranks_ok=found.ok,
            ranks_ended=found.ended,
            notice=found.notice,
            notice_cause=found.notice_cause,
            failure=found.failure,
            checkpoint=found.checkpoint,
            copy=found.copy,
            step=found.step,
            fruitless=found.fruitless,
            fenced=found.fenced,
            asked=self.asked,
        )
        if sighting is not None:
            # Objects may vanish before they say again what they were ending as.
            kept = before.ending if before is not None and before.restart >= sighting.restart else None
            seen = replace(
                seen,
                ending=sighting.ending or kept,
                platform_id=sighting.platform_id,
                restart=max(sighting.restart, found.life.restart if found.life is not None else 0),
                blamed=sighting.blamed_hosts,
                exit_code=sighting.exit_code,
            )
        self.seen = seen
        self._basis = (attempt.number, attempt.submitted_at)
        return seen

    def _first_at(self, attempt: Attempt, state: State, sighting: Sighting | None, now: float) -> float:
        tag = f"{attempt.number}/{state}/{sighting.since if sighting is not None else None}"
        if self._first[0] != tag:
            self._first = (tag, now)
        return self._first[1]

    def _first_seen(self, attempt: Attempt, state: State, since: float | None, now: float) -> float:
        # Not the native word: an unknown state in two words in turn is still unknown.
        tag = f"{attempt.number}/{state}"
        if since is not None:  # the platform's own word; it may have been something else between two looks
            self._since = (tag, min(since, now))
        elif self._since[0] != tag:
            self._since = (tag, now)
        return self._since[1]

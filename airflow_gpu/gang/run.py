"""What is known of a run: its owners, attempts and lives, and what was just observed.

Purpose: the nouns that :func:`airflow_gpu.gang.lifecycle.step` decides on. A
:class:`Run` is the fold of a journal (``docs/run-directory.md``), an
:class:`Observation` is one look at the target and the run directory.

What it does not do: no I/O, no clock. All times are seconds since the epoch,
given by whoever looked.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any


class State(StrEnum):
    """Every native state of every system maps to exactly one of these.

    A state that a target's table does not have is ``UNKNOWN``: kept, looked at
    again, shown, bounded. It is never success and never a silent loop.
    """

    QUEUED = "queued"
    STARTING = "starting"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    PREEMPTED = "preempted"
    NODE_LOST = "node_lost"
    TIMED_OUT = "timed_out"
    OUT_OF_MEMORY = "out_of_memory"
    CANCELLED = "cancelled"
    REJECTED = "rejected"
    GONE = "gone"
    UNKNOWN = "unknown"

    @property
    def ended(self) -> bool:
        """The target says that no rank of the attempt runs or will run."""
        return self in _ENDED


_ENDED = frozenset(
    {
        State.SUCCEEDED,
        State.FAILED,
        State.PREEMPTED,
        State.NODE_LOST,
        State.TIMED_OUT,
        State.OUT_OF_MEMORY,
        State.CANCELLED,
        State.REJECTED,
        State.GONE,
    }
)


class Cause(StrEnum):
    """Why an attempt is over. Each has its own budget, see ``Recovery``."""

    SUCCEEDED = "succeeded"
    APPLICATION = "application"  # the user's code: an exit code or a signal nobody else sent
    OUT_OF_MEMORY = "out_of_memory"
    PREEMPTED = "preempted"
    NODE_LOST = "node_lost"
    NOT_WHOLE = "not_whole"  # not every node came to the barrier in time
    NOT_STARTED = "not_started"  # the platform took longer than the start limit
    GONE = "gone"  # its object vanished without a trace of how it ended
    NO_EVIDENCE = "no_evidence"  # the platform says success, not every rank does
    TIMED_OUT = "timed_out"
    REJECTED = "rejected"
    QUEUED_TOO_LONG = "queued_too_long"
    FRUITLESS = "fruitless"  # too many attempts in a row that got no further
    MOVED = "moved"  # it waited here while another target could start it
    UNREACHABLE = "unreachable"  # the target could not be read, and the gang was fenced to go on elsewhere
    LOST_SIGHT = "lost_sight"  # the target could not be read for too long
    CANCELLED = "cancelled"  # someone ended it outside of Airflow
    STOPPED = "stopped"  # we ended it: a user's action or a deadline


ELSEWHERE = frozenset(
    {Cause.QUEUED_TOO_LONG, Cause.NOT_STARTED, Cause.REJECTED, Cause.MOVED, Cause.UNREACHABLE}
)
"""Ends that speak against the target: for a while the others are better."""

INFRASTRUCTURE = frozenset(
    {
        Cause.PREEMPTED,
        Cause.NODE_LOST,
        Cause.NOT_WHOLE,
        Cause.NOT_STARTED,
        Cause.GONE,
    }
)


@dataclass(frozen=True, slots=True)
class CheckpointRef:
    """A complete checkpoint: completed ``step`` of ``life``."""

    life: int
    step: int


@dataclass(frozen=True, slots=True)
class Seed:
    """A checkpoint on another channel: of this run where it ran before, or of the run before this one.

    ``channel`` is the URI of the channel half that has it; ``run`` names the
    other run, empty for this one.
    """

    channel: str
    life: int
    step: int
    run: str = ""

    @property
    def checkpoint(self) -> CheckpointRef:
        return CheckpointRef(self.life, self.step)


@dataclass(frozen=True, slots=True)
class Life:
    """One entry of ``lives/``: an actual start of the ranks, or a fence."""

    number: int
    attempt: int
    fence: bool = False
    job: str = ""
    restart: int = 0
    nodes: int = 0
    world_size: int = 0
    start: CheckpointRef | None = None
    at: float = 0.0
    reason: str = ""  # of a fence
    seeded: bool = False  # the checkpoint it started from lies on another channel


@dataclass(frozen=True, slots=True)
class Failure:
    """The first bad end in a life, as node 0 of the gang saw it."""

    cause: str  # "rank", "node" or "not_whole"
    rank: int | None = None
    node: int | None = None
    host: str = ""
    exit_code: int | None = None
    signal: str | None = None
    tail: str = ""
    message: str = ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an attempt ended."""

    cause: Cause
    at: float
    detail: str = ""
    failure: Failure | None = None
    life: int | None = None
    checkpoint: CheckpointRef | None = None  # newest complete one that a next life would start from
    restarts: int = 0  # how often the platform itself had started the attempt again
    blamed: tuple[str, ...] = ()  # hosts that the platform holds responsible, by its own names
    epoch: int = 0  # the owner that closed it
    copy: int | None = None  # step of the nodes' own copies that its newest life started from


@dataclass(frozen=True, slots=True)
class Stop:
    """A request that an attempt ends, with a notice first so that it can save."""

    reason: str  # see lifecycle.STOP_CAUSES
    at: float
    epoch: int
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One submission of the gang to one target."""

    number: int
    name: str
    target: str
    at: float
    epoch: int
    channel: str = ""
    resume: bool = True
    first_life: int = 1
    digest: str = ""
    offer: dict[str, Any] = field(default_factory=dict)
    seed: Seed | None = None  # where it begins while its channel has no checkpoint for it
    since: int = (
        0  # lives with a lower number are from before a start from nothing: none of their checkpoints counts
    )
    platform_id: str | None = None
    submitted_at: float | None = None
    stop: Stop | None = None
    outcome: Outcome | None = None

    @property
    def over(self) -> bool:
        return self.outcome is not None


@dataclass(frozen=True, slots=True)
class Owner:
    """One try of the task instance that took the run over."""

    epoch: int
    ti_id: str
    try_number: int
    at: float
    max_tries: int = 0
    reason: str = "start"  # start, retry, clear, adopt
    deadline: float | None = None
    resume: bool = True  # may this owner's first attempt start from a checkpoint
    note: str = ""  # for people: why it begins again, or from where
    dag_run: str = ""  # what tells this DAG run from another of the same name
    seed: Seed | None = None  # where a start from nothing begins all the same


@dataclass(frozen=True, slots=True)
class Verdict:
    """An owner's answer to Airflow. ``success`` is absorbing."""

    outcome: str  # success, failed, cancelled
    cause: Cause
    at: float
    epoch: int
    message: str = ""
    record: dict[str, Any] = field(default_factory=dict)

    @property
    def success(self) -> bool:
        return self.outcome == "success"


@dataclass(frozen=True, slots=True)
class Run:
    """The journal, folded. Immutable; the journal's code makes the next one."""

    owners: tuple[Owner, ...] = ()
    attempts: tuple[Attempt, ...] = ()
    verdict: Verdict | None = None
    stop: Stop | None = None  # the newest owner is to end, asked for while nothing ran
    seq: int = 0

    @property
    def owner(self) -> Owner | None:
        return self.owners[-1] if self.owners else None

    @property
    def epoch(self) -> int:
        return self.owners[-1].epoch if self.owners else 0

    @property
    def current(self) -> Attempt | None:
        """The attempt that is not over, if there is one."""
        if self.attempts and not self.attempts[-1].over:
            return self.attempts[-1]
        return None

    def of_epoch(self, epoch: int) -> tuple[Attempt, ...]:
        """Attempts that ended under this owner; an adopted one counts for the adopter."""
        return tuple(
            a
            for a in self.attempts
            if a.epoch == epoch or (a.outcome is not None and a.outcome.epoch == epoch)
        )

    def with_attempt(self, attempt: Attempt) -> Run:
        """This run with the attempt of that number put in place (or appended)."""
        if attempt.number == len(self.attempts) + 1:
            return replace(self, attempts=(*self.attempts, attempt))
        done = list(self.attempts)
        done[attempt.number - 1] = attempt
        return replace(self, attempts=tuple(done))


@dataclass(frozen=True, slots=True)
class Observation:
    """One look at one attempt: what the target says and what the run directory holds.

    ``state`` is the target's word, mapped by its closed table. The rest is
    evidence from the ranks themselves. ``state`` says "ended" only when no rank
    of the attempt runs any more; while a platform is still stopping one, it is
    ``RUNNING`` with ``ending`` set to what it is ending as.
    """

    attempt: int
    state: State
    at: float
    since: float  # when this state was first seen, by the platform's clock or the observer's
    native: str = ""  # the platform's own word, for people
    reason: str = ""  # one human sentence, where the platform gives one
    ending: State | None = (
        None  # the last thing that the platform said it was ending as, also once it has ended
    )
    platform_id: str = ""
    restart: int = 0
    life: Life | None = None  # the newest life of this attempt (never a fence)
    world_size: int = 0
    ranks_ok: int = 0  # ranks of that life with a record of exit code 0
    ranks_ended: int = 0  # ranks of that life with any record of their end
    notice: bool = False  # that life was given notice
    notice_cause: str = ""  # time_limit, where the runtime could tell
    failure: Failure | None = None  # of that life
    checkpoint: CheckpointRef | None = None  # newest complete one that a next life would start from
    step: int | None = None  # last progress reported by that life
    fenced: str = (
        ""  # why the attempt was fenced before, if it was: a life that was claimed just then had to leave
    )
    fruitless: int = 0  # lives before that one, in a row, that started from the same checkpoint
    blamed: tuple[str, ...] = ()  # hosts that the platform holds responsible
    first_at: float | None = (
        None  # when this observer first saw this state: its own clock, for the short limits
    )
    asked: float | None = None  # since when this observer has asked the target to end the attempt
    elsewhere: str = ""  # another target of the list that could start the gang at once
    blocked: str = ""  # why this target starts nothing of the kind for now: drained, sold out
    copy: int | None = None  # step of the nodes' own copies that that life started from, not ``start``
    exit_code: int | None = None  # of the first node that ended badly, where the platform says

    @property
    def requeued(self) -> bool:
        """The platform has taken the attempt back into its queue after its newest life."""
        return (
            self.life is not None
            and self.restart > self.life.restart
            and self.state in (State.QUEUED, State.STARTING)
        )

    @property
    def begun(self) -> bool:
        """Its life began after the platform's word, which came late: no limit on beginning is held against it."""
        return self.life is not None and self.life.restart >= self.restart and self.life.at >= self.since

    @property
    def seen_since(self) -> float:
        """Since when this observer sees the state. The platform's ``since`` is by another clock, which may be hours off."""
        return self.since if self.first_at is None else self.first_at

    @property
    def all_ended(self) -> bool:
        """The ranks of the newest life have all said that they ended, whatever the platform says."""
        return self.life is not None and self.world_size > 0 and self.ranks_ended == self.world_size

    @property
    def whole_success(self) -> bool:
        """Positive evidence of success from every rank."""
        return self.life is not None and self.world_size > 0 and self.ranks_ok == self.world_size

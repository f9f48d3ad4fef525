"""What is written down of a job: what was asked, and what became of it.

Purpose: the nouns of the daemon, with their JSON. ``job.json`` is written once
by the submitter, ``state.json`` again and again by the daemon.

What it does not do: decide, look at processes, touch files.

Limits: unknown fields are dropped when a newer daemon's file is read and
written again.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypeVar

from airflow_gpu.targets.local.files import Damaged
from airflow_gpu.targets.local.schedule import Request
from airflow_gpu.targets.local.words import HOLDING, WAITING, Word

if TYPE_CHECKING:
    from collections.abc import Mapping

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Spec:
    """``job.json``: one job as it was submitted, with what its connection says of all its jobs."""

    id: str  # unique for each submission; GANG_JOB_ID
    name: str
    labels: dict[str, str]
    digest: str
    nodes: int
    gpus_per_node: int
    time_limit: float
    payload: str
    channel: str
    argv: tuple[str, ...]
    submitted_at: float
    attempt: int = 1
    cpus: float | None = None
    memory: int | None = None
    accelerator: str | None = None
    priority: int = 0
    exclude_hosts: tuple[str, ...] = ()
    environ: dict[str, str] = field(default_factory=dict)  # of the submitter, by a list of names; no secrets
    secrets: bool = False
    grace: float = 30.0
    straggler: float = 60.0
    requeue: bool = False
    keep: float = 7 * 86400.0

    def request(self) -> Request:
        """What the scheduler has to find."""
        return Request(
            nodes=self.nodes,
            gpus=self.gpus_per_node,
            cpus=self.cpus,
            memory=self.memory,
            accelerator=self.accelerator,
            exclude=frozenset(self.exclude_hosts),
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "v": FORMAT,
            **asdict(self),
            "exclude_hosts": list(self.exclude_hosts),
            "argv": list(self.argv),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Spec:
        spec = _fill(cls, data)
        if not isinstance(spec.nodes, int) or spec.nodes < 1 or not isinstance(spec.id, str) or not spec.id:
            raise Damaged(f"job.json of {spec.name!r} has no usable shape or id")
        return spec


class Cause(StrEnum):
    """Why a gang that holds nodes is to end. The first cause stays."""

    PREEMPT = "preempt"
    CANCEL = "cancel"
    TIME_LIMIT = "time_limit"
    NODE_ENDED = "node_ended"  # one node ended badly or was lost; the others get time, then a notice


@dataclass(slots=True)
class Stop:
    """An end under way. Moments are by the machine's monotonic clock, see :class:`JobState`."""

    cause: Cause
    notice_at: float
    kill_at: float
    detail: str = ""
    cancelled: bool = False  # also when the first cause is another: never start it again
    killed: bool = False  # SIGKILL was or is being sent: who has no exit code now has none because of us


@dataclass(slots=True)
class Place:
    """One node of a gang: rank ``rank`` of it on node ``node`` of the cluster."""

    rank: int
    node: int
    gpus: tuple[int, ...] = ()
    shim: tuple[int, int] | None = None  # pid and start time
    agent: tuple[int, int] | None = None
    exit: int | None = None
    lost: str = ""  # why there never will be an exit code
    killed: bool = False  # ended by our SIGKILL, without an exit code
    noticed: bool = False
    over_at: float | None = None  # when its end was seen, monotonic
    ended_at: float | None = None  # when it ended, seconds since the epoch

    @property
    def over(self) -> bool:
        """The agent has ended or never will run. Processes it left may still be there."""
        return self.exit is not None or bool(self.lost) or self.killed

    @property
    def bad(self) -> bool:
        return self.over and self.exit != 0


@dataclass(slots=True)
class JobState:
    """``state.json``: what became of a job.

    Moments in ``stop``, ``started`` and ``over_at`` are by CLOCK_MONOTONIC, so
    that a corrected clock ends nobody's grace; ``boot`` says for which boot of
    the machine they hold.
    """

    id: str
    order: int
    word: Word = Word.PENDING
    since: float = 0.0  # of the word, seconds since the epoch
    reason: str = ""
    restart: int = 0
    boot: str = ""
    started: float | None = None  # start of this life
    places: list[Place] = field(default_factory=list)
    stop: Stop | None = None
    blamed: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    ended_at: float | None = None  # seconds since the epoch
    commands: tuple[str, ...] = ()  # the newest ones that were applied: none is applied twice

    @property
    def waiting(self) -> bool:
        return self.word in WAITING

    @property
    def holding(self) -> bool:
        return self.word in HOLDING

    @property
    def ended(self) -> bool:
        return not self.waiting and not self.holding

    def to_json(self) -> dict[str, Any]:
        return {"v": FORMAT, **asdict(self)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> JobState:
        try:
            places = [_fill(Place, place) for place in data.get("places", ())]
            stop = _fill(Stop, data["stop"]) if data.get("stop") else None
            if stop is not None:
                stop.cause = Cause(stop.cause)
            state = _fill(cls, {**data, "places": places, "stop": stop})
            state.word = Word(state.word)
        except (TypeError, ValueError, AttributeError) as error:
            raise Damaged(f"state.json cannot be understood: {error}") from None
        return state


R = TypeVar("R", Spec, Place, Stop, JobState)


def _fill(record: type[R], data: Mapping[str, Any]) -> R:
    """A record from JSON: unknown fields are ignored, lists become tuples where the record has those."""
    values: dict[str, Any] = {}
    for item in fields(record):
        if item.name in data:
            value = data[item.name]
            values[item.name] = (
                tuple(value) if isinstance(value, list) and "tuple" in str(item.type) else value
            )
    try:
        return record(**values)
    except TypeError as error:
        raise Damaged(f"{record.__name__}: {error}") from None

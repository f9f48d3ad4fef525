"""The local cluster's own words for a job, and the one closed table that maps them to states.

Purpose: the daemon writes only these words; a reader that meets another one
(a newer daemon's, a damaged file's) gets ``UNKNOWN``, never a guess.

What it does not do: decide when a word applies; that is :mod:`.outcome`.

Example::

    state_of("STOPPING")   # State.RUNNING; the sighting says ending=True
    state_of("HIBERNATED")  # State.UNKNOWN
"""

from __future__ import annotations

from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from airflow_gpu.gang.run import State

if TYPE_CHECKING:
    from collections.abc import Mapping


class Word(StrEnum):
    """What ``state.json`` and the table say of a job."""

    PENDING = "PENDING"  # waits in the queue, never started
    REQUEUED = "REQUEUED"  # waits in the queue again after a preemption
    LAUNCHING = "LAUNCHING"  # written before the first process is started
    RUNNING = "RUNNING"  # every node's agent was started
    STOPPING = "STOPPING"  # has an end coming, processes are still there
    DONE = "DONE"  # every node ended with 0
    FAILED = "FAILED"
    PREEMPTED = "PREEMPTED"
    NODE_LOST = "NODE_LOST"
    TIMEOUT = "TIMEOUT"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    CANCELLED = "CANCELLED"
    REJECTED = "REJECTED"  # the cluster changed its shape before the job was seen
    DAMAGED = "DAMAGED"  # its files cannot be read; what runs of it is not known


STATES: Final[Mapping[str, State]] = MappingProxyType(
    {
        Word.PENDING: State.QUEUED,
        Word.REQUEUED: State.QUEUED,
        Word.LAUNCHING: State.STARTING,
        Word.RUNNING: State.RUNNING,
        Word.STOPPING: State.RUNNING,
        Word.DONE: State.SUCCEEDED,
        Word.FAILED: State.FAILED,
        Word.PREEMPTED: State.PREEMPTED,
        Word.NODE_LOST: State.NODE_LOST,
        Word.TIMEOUT: State.TIMED_OUT,
        Word.OUT_OF_MEMORY: State.OUT_OF_MEMORY,
        Word.CANCELLED: State.CANCELLED,
        Word.REJECTED: State.REJECTED,
        Word.DAMAGED: State.UNKNOWN,
    }
)

WAITING: Final = frozenset({Word.PENDING, Word.REQUEUED})
HOLDING: Final = frozenset({Word.LAUNCHING, Word.RUNNING, Word.STOPPING})
"""The gang has nodes, and may have processes."""


def state_of(native: str) -> State:
    """The state for a native word; ``UNKNOWN`` for any that is not in the table."""
    return STATES.get(native, State.UNKNOWN)

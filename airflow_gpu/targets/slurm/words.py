"""Slurm's words for jobs, each mapped to exactly one state. A closed table: what is not in it is unknown.

Purpose: the meaning of base states, of the flags beside them and of the reasons
why a job waits, for ``squeue``, ``sacct``, ``scontrol`` and every REST version.

Words that lie, and what is made of them:

- ``COMPLETING`` beside or instead of an end: processes may still be there, so the
  job runs, ending as what the other word says (unknown where 22.05 shows only this one).
- ``PENDING, COMPLETING``: started again before its last processes have ended.
- ``FAILED`` after the memory ran out on clusters without memory cgroups; ``COMPLETED``
  of a job that left within its grace (22.05): what the ranks recorded has precedence
  in :func:`airflow_gpu.gang.lifecycle.step`, here the word stays as it is.
- ``PENDING`` with a reason that never passes: it would wait for ever.

Limits: reasons are many hundred and change with the version. One that is not known is
shown as it is, and the job waits.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from airflow_gpu.gang.run import State

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

BASES: Final[Mapping[str, State]] = MappingProxyType(
    {
        "PENDING": State.QUEUED,
        "RUNNING": State.RUNNING,
        "SUSPENDED": State.RUNNING,  # its processes are stopped, and still there
        "COMPLETED": State.SUCCEEDED,
        "CANCELLED": State.CANCELLED,
        "FAILED": State.FAILED,
        "TIMEOUT": State.TIMED_OUT,
        "NODE_FAIL": State.NODE_LOST,
        "PREEMPTED": State.PREEMPTED,
        "BOOT_FAIL": State.NODE_LOST,
        "DEADLINE": State.TIMED_OUT,
        "OUT_OF_MEMORY": State.OUT_OF_MEMORY,
        "LAUNCH_FAILED": State.NODE_LOST,
        "RECONFIG_FAIL": State.NODE_LOST,
    }
)
"""Base states; one of them is in every answer but those that show a flag alone."""

ENDING: Final = frozenset({"COMPLETING", "STAGE_OUT", "SIGNALING"})
"""Flags with which processes may still be there, whatever the base state says."""

STARTING: Final = frozenset({"CONFIGURING", "POWER_UP_NODE"})
"""Flags with which the nodes are the job's, and no process of it is there yet."""

WAITING: Final = frozenset(
    {"REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD", "EXPEDITING"}
)
"""Flags of a job that is in the queue again. Accounting gives ``REQUEUED`` to a life that ended so, too."""

NEUTRAL: Final = frozenset({"STOPPED", "RESIZING", "UPDATE_DB"})
"""Flags that say nothing of whether it runs."""

REVOKED: Final = "REVOKED"
"""A sibling of the job started on another cluster of a federation; here nothing runs or will run."""

NEVER: Final[Mapping[str, str]] = MappingProxyType(
    {
        "DependencyNeverSatisfied": "it depends on a job that ended otherwise",
        "BadConstraints": "no node has what 'constraint' asks for",
        "InvalidAccount": "the account does not exist, or the user is not in it",
        "InvalidQOS": "the QOS does not exist, or the user may not use it",
        "AccountNotAllowed": "the partition does not take jobs of this account",
        "QOSNotAllowed": "the partition does not take jobs of this QOS",
        "PartitionNodeLimit": "it asks for more nodes than the partition lets one job have",
        "PartitionTimeLimit": "its time_limit is longer than the partition's",
        "ReservationDeleted": "its reservation was deleted",
        "AssociationTimeLimit": "its time_limit is longer than the association's",
        "QOSTimeLimit": "its time_limit is longer than the QOS's",
        "AssocMaxWallDurationPerJobLimit": "its time_limit is longer than the association's MaxWall",
        "QOSMaxWallDurationPerJobLimit": "its time_limit is longer than the QOS's MaxWall",
        "AssocMaxNodePerJobLimit": "it asks for more nodes than the association lets one job have",
        "QOSMaxNodePerJobLimit": "it asks for more nodes than the QOS lets one job have",
        "AssocMaxGRESPerJob": "it asks for more GPUs than the association lets one job have",
        "QOSMaxGRESPerJob": "it asks for more GPUs than the QOS lets one job have",
        "QOSMinGRES": "it asks for fewer GPUs than the QOS wants",
    }
)
"""Reasons of waiting that do not pass by themselves, as a person would say them."""

WAITS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "None": "not looked at by the scheduler yet",
        "Resources": "waits for nodes to become free",
        "Priority": "jobs of higher priority are before it",
        "BeginTime": "started again soon: Slurm waits a while after a requeue",
        "Dependency": "waits for another job",
        "Licenses": "waits for a licence",
        "ReqNodeNotAvail": "nodes that it needs are down, drained or reserved",
        "Reservation": "its reservation has not begun",
        "JobHeldUser": "held by its user: scontrol release",
        "JobHeldAdmin": "held by an administrator",
        "PartitionDown": "the partition takes no jobs to start now",
        "PartitionInactive": "the partition is inactive",
        "NodeDown": "a node that it needs is down",
        "QOSMaxGRESPerUser": "the user has as many GPUs as the QOS allows",
        "QOSMaxJobsPerUserLimit": "the user runs as many jobs as the QOS allows",
        "QOSGrpGRES": "the QOS has as many GPUs as it may",
        "AssocGrpGRES": "the account has as many GPUs as it may",
        "AssocMaxJobsLimit": "the user runs as many jobs as the account allows",
        "MaxGRESPerAccount": "the account has as many GPUs as it may",
        "Cleaning": "its last processes are being ended",
        "JobArrayTaskLimit": "waits for other tasks of its array",
    }
)
"""Reasons of waiting that pass, as a person would say them."""

LAUNCH_FAILED: Final = ("launch failed requeued held", "launch_failed_requeued_held", "JobLaunchFailure")
"""A node could not start the job's script; Slurm holds it, and it would wait for ever."""


def state_of(words: Sequence[str], reason: str, description: str = "") -> tuple[State, State | None]:
    """The state for the words of one answer, and what it is ending as where processes may still be there.

    ``words``: base state and flags in any order, as Slurm writes them (``CANCELLED by 1001`` too).
    ``reason``, ``description``: of a job that waits.
    """
    named = {word.split(" ")[0].split("+")[0].upper() for word in words if word}
    bases = named & BASES.keys()
    flags = named - bases
    if not named or flags - ENDING - STARTING - WAITING - NEUTRAL - {REVOKED}:
        return State.UNKNOWN, None
    base = BASES[_most_telling(bases)] if bases else None
    if flags & ENDING:
        return State.RUNNING, base if base is not None and base.ended else State.UNKNOWN
    if REVOKED in flags:
        return State.CANCELLED, None
    if flags & WAITING and (base is None or base.ended):
        return State.QUEUED, None
    if base is None:
        return (State.STARTING, None) if flags & STARTING else (State.UNKNOWN, None)
    if base is State.QUEUED:
        return _pending(reason, description), None
    if base is State.RUNNING and flags & STARTING:
        return State.STARTING, None
    return base, None


def words_for(reason: str, description: str = "") -> str:
    """Why a job waits, as a person would say it, with Slurm's own word."""
    plain = reason.strip("()").split(",")[0].strip()
    if _launch_failed(reason, description):
        return "a node could not start the job's script (launch failed), and Slurm holds it"
    known = NEVER.get(plain) or WAITS.get(plain)
    if known is None:
        return description or plain
    return f"{known} ({plain})" if plain != "None" else known


def _pending(reason: str, description: str) -> State:
    if _launch_failed(reason, description):
        return State.NODE_LOST
    return State.REJECTED if reason.strip("()").split(",")[0].strip() in NEVER else State.QUEUED


def _launch_failed(reason: str, description: str) -> bool:
    return any(word in text for word in LAUNCH_FAILED for text in (reason, description))


def _most_telling(bases: set[str]) -> str:
    """Of two base states (accounting of a job that was queued again) the one that is over says more."""
    return sorted(bases, key=lambda word: (not BASES[word].ended, word))[0]

"""What a way to Slurm offers to the target: REST, commands over SSH and commands here are used alike.

Purpose: a handful of questions and orders about jobs by their numbers. Answers are
:class:`~.records.Record`, whatever they came as.

What it does not do: know of gangs, decide, or remember.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from airflow_gpu.targets.base import Rejected, TargetError
from airflow_gpu.targets.slurm.batch import Batch
from airflow_gpu.targets.slurm.records import Record


class AccessError(TargetError):
    """The log-in or the token is refused, or what is configured is not there: trying again would not help."""


class NoAccounting(TargetError):
    """The cluster keeps no accounting."""


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """A node. ``gres``, ``gres_used``: such as ``gpu:h100:8(S:0-1)``; memory in MiB."""

    name: str
    states: tuple[str, ...]
    gres: str
    gres_used: str
    cpus: int
    cpus_used: int
    memory: int
    memory_used: int
    partitions: tuple[str, ...]
    features: tuple[str, ...] = ()
    reason: str = ""


class Access(Protocol):
    """One way to one cluster. Every method raises TargetError; ids that are not known are left out of answers."""

    async def submit(self, batch: Batch) -> int:
        """Submit it, once; answers its id. Raises Rejected when Slurm will never take it as it is."""
        ...

    async def jobs(self, ids: Collection[int]) -> list[Record]:
        """Those of them that the controller knows, living or lately over."""
        ...

    async def mine(self) -> list[Record]:
        """All jobs of the user that the controller knows."""
        ...

    async def named(self, name: str, *, sure: bool) -> list[Record]:
        """Those of a name, also ones that the controller has forgotten where accounting knows them. Without ``sure`` a job
        of the last seconds may be missing, where that is much cheaper."""
        ...

    async def history(self, ids: Collection[int]) -> list[Record]:
        """The newest life of each, from accounting. Raises NoAccounting where there is none."""
        ...

    async def signal(self, job: int, name: str) -> None:
        """To the agents (the tasks of the job's steps). No error when the job is over."""
        ...

    async def cancel(self, job: int) -> None:
        """End it: SIGTERM to all of it, SIGKILL after the cluster's KillWait. No error when it is over or gone."""
        ...

    async def nodes(self) -> list[NodeInfo]:
        """All nodes that the user may see."""
        ...

    async def kill_wait(self) -> float | None:
        """The cluster's KillWait, seconds; None where it cannot be had this way."""
        ...

    async def close(self) -> None:
        """Let go of connections."""
        ...


_REJECTIONS: Final = (
    (
        "invalid partition",
        "there is no such partition: set 'partition' of the connection to one of `sinfo -s`",
    ),
    (
        "invalid account",
        "the user is not in that account (or partition and account do not fit): `sacctmgr show assoc user=...`",
    ),
    (
        "invalid qos",
        "there is no such QOS, or the user may not use it: `sacctmgr show assoc user=... format=qos`",
    ),
    (
        "node count specification invalid",
        "the partition has fewer nodes than were asked for, or lets one job have fewer",
    ),
    ("more nodes than", "the partition has fewer nodes than were asked for"),
    (
        "requested node configuration is not available",
        "no node has what was asked for: GPUs a node, their type, CPUs, memory or features",
    ),
    (
        "invalid generic resource",
        "the cluster has no GPUs of that type: see `sinfo -o %G`, and 'gpu_types' of the connection",
    ),
    (
        "invalid gres",
        "the cluster has no GPUs of that type: see `sinfo -o %G`, and 'gpu_types' of the connection",
    ),
    ("requested time limit is invalid", "the time_limit is longer than the partition or QOS allows"),
    ("time limit", "the time_limit is longer than the partition or QOS allows"),
    ("accounting/qos policy", "a limit of the user, account or QOS is reached or smaller than the gang"),
    ("reservation", "the reservation does not exist, is over, or is not for this user"),
    ("invalid feature", "no node has what 'constraint' asks for"),
    ("memory", "no node has so much memory"),
    ("cpu count", "no node has so many CPUs"),
    ("access/permission denied", "the user may not do that"),
    ("user's group not permitted", "the partition does not take jobs of this user's groups"),
    ("task count specification invalid", "the shape is one that the cluster cannot place"),
)
"""What Slurm says at a submit, in small letters, and what it means."""

_PASSING: Final = (
    "socket timed out",
    "unable to contact",
    "zero bytes",
    "communication",
    "connection",
    "temporarily",
    "resource temporarily unavailable",
    "protocol authentication",
    "slurmdbd",
    "backup controller",
    "slurm backup",
    "standby",
    "insert error",
    "shutting down",
    "rate limit",
    "busy",
)
"""Errors that say nothing of the job."""


def refusal(cluster: str, said: str) -> TargetError:
    """The error for what Slurm said when it took no job: Rejected, unless it may pass."""
    text = said.lower()
    if any(word in text for word in _PASSING):
        return TargetError(f"{cluster}: Slurm did not take the job for now: {said}")
    advice = next((words for sign, words in _REJECTIONS if sign in text), "")
    return Rejected(
        f"{cluster}: Slurm refuses the job: {said}" + (f". {advice[0].upper()}{advice[1:]}" if advice else "")
    )


def lines(words: Sequence[str]) -> str:
    """Several messages as one sentence."""
    return "; ".join(dict.fromkeys(word.strip().rstrip(".") for word in words if word.strip()))

"""What of a cluster fits a gang: whole nodes that have the GPUs, and how many of them are free now.

Purpose: pure arithmetic on :class:`~.access.NodeInfo`, for offers and for refusals before a submit.

Limits: a node is free when the GPUs, CPUs and memory that are asked for are unused and its state lets jobs
start. Reservations, limits of accounts and jobs of higher priority may still keep a gang
waiting; Slurm says so once it is in the queue.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from airflow_gpu.targets.slurm.access import NodeInfo

AWAY: Final = frozenset(
    {
        "DOWN",
        "DRAIN",
        "DRAINED",
        "DRAINING",
        "FAIL",
        "FAILING",
        "ERROR",
        "NOT_RESPONDING",
        "MAINT",
        "MAINTENANCE",
        "FUTURE",
        "UNKNOWN",
        "INVAL",
        "INVALID_REG",
        "REBOOT_ISSUED",
    }
)
"""States with which no job starts on a node, until somebody or something mends it."""

ASLEEP: Final = frozenset({"POWERED_DOWN", "POWERING_UP", "POWER_UP", "POWERING_DOWN", "POWER_DOWN", "CLOUD"})
"""States of nodes that Slurm itself brings up when a job wants them."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What one node must have. Memory in MiB."""

    nodes: int
    gpus: int
    gpu_type: str | None
    gres: str = "gpu"
    cpus: int | None = None
    memory: int | None = None
    exclusive: bool = False
    partitions: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Fit:
    """How a gang fits. ``reason``: why it never can; ``blocked``: why nothing of the kind starts now."""

    able: int
    free: int
    asleep: int
    types: tuple[str, ...]
    reason: str = ""
    blocked: str = ""


def gpus(gres: str, name: str, kind: str | None = None) -> int:
    """GPUs in a gres such as ``gpu:h100:8(S:0-1),gpu:a100:2``, of one type or of any."""
    total = 0
    for found_name, found_kind, count in _each(gres):
        if found_name == name and (kind is None or found_kind.lower() == kind.lower()):
            total += count
    return total


def types(gres: str, name: str) -> tuple[str, ...]:
    """Their types; empty text for those without."""
    return tuple(kind for found, kind, _ in _each(gres) if found == name)


def fit(nodes: Sequence[NodeInfo], wanted: Wanted) -> Fit:
    """How the gang fits on these nodes."""
    partitions = {partition for node in nodes for partition in node.partitions}
    missing = [name for name in wanted.partitions if name not in partitions]
    if missing:
        return Fit(
            0, 0, 0, (), f"there is no partition {missing[0]!r}; there are {', '.join(sorted(partitions))}"
        )
    mine = [node for node in nodes if not wanted.partitions or set(wanted.partitions) & set(node.partitions)]
    able = [node for node in mine if _has(node, wanted)]
    kinds = tuple(sorted({kind for node in mine for kind in types(node.gres, wanted.gres) if kind}))
    up = [node for node in able if not AWAY & set(node.states)]
    free = [node for node in up if _free(node, wanted) and node.name not in wanted.excluded]
    asleep = [node for node in free if ASLEEP & set(node.states)]
    reason = blocked = ""
    if len(able) < wanted.nodes:
        where = f" in {','.join(wanted.partitions)}" if wanted.partitions else ""
        reason = f"{wanted.nodes} nodes{where} with {_words(wanted)} were asked for; {len(able)} have that ({_shown(mine, wanted)})"
    elif len(up) < wanted.nodes:
        away = [f"{node.name} is {'+'.join(node.states).lower()}" for node in able if AWAY & set(node.states)]
        blocked = f"{', '.join(away[:4])}{' ...' if len(away) > 4 else ''}: {len(up)} of {wanted.nodes} nodes are up"
    return Fit(len(able), len(free), len(asleep), kinds, reason, blocked)


_ITEM: Final = re.compile(r"([^,:()]+)(?::([^,:()]+))?(?::(\d+)[KM]?)?(?:\([^)]*\))?")


def _each(gres: str) -> list[tuple[str, str, int]]:
    """Name, type and number of each item."""
    found = []
    for match in _ITEM.finditer(gres):
        name, kind, count = match.groups()
        if count is None and kind is not None and kind.isdecimal():
            kind, count = "", kind
        found.append((name, kind or "", int(count or 1)))
    return found


def _has(node: NodeInfo, wanted: Wanted) -> bool:
    return (
        gpus(node.gres, wanted.gres, wanted.gpu_type) >= wanted.gpus
        and node.cpus >= (wanted.cpus or 0)
        and node.memory >= (wanted.memory or 0)
    )


def _free(node: NodeInfo, wanted: Wanted) -> bool:
    if wanted.exclusive and node.cpus_used:
        return False
    total = gpus(node.gres, wanted.gres, wanted.gpu_type)
    used = gpus(node.gres_used, wanted.gres, wanted.gpu_type)
    return (
        total - used >= wanted.gpus
        and node.cpus - node.cpus_used >= (wanted.cpus or 1)
        and node.memory - node.memory_used >= (wanted.memory or 0)
    )


def _words(wanted: Wanted) -> str:
    parts = [f"{wanted.gpus} {wanted.gpu_type or 'GPUs'}"] if wanted.gpus else []
    parts += [f"{wanted.cpus} CPUs"] if wanted.cpus else []
    parts += [f"{wanted.memory} MiB"] if wanted.memory else []
    return ", ".join(parts) or "room for a job"


def _shown(nodes: Sequence[NodeInfo], wanted: Wanted) -> str:
    kinds: dict[str, int] = {}
    for node in nodes:
        words = f"{node.gres or 'no GPUs'}, {node.cpus} CPUs, {node.memory} MiB"
        kinds[words] = kinds.get(words, 0) + 1
    return (
        "; ".join(f"{count} x {words}" for words, count in sorted(kinds.items())[:4]) or "there are no nodes"
    )

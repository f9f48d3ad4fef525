"""Which gang starts where, and who must go for it: one pure function.

Purpose: ``schedule(nodes, jobs) -> actions``, the only place where the local
cluster decides. It is given what there is and who holds it, and answers what
to start, whom to give notice, and in one sentence why each other gang waits.

The rules:

* Higher priority first, then order of submission. A gang that was requeued
  keeps its place.
* All or nothing: a gang starts on as many distinct nodes as it asked for, or
  not at all. Gangs share a node where its GPUs, cores and memory allow.
* The first gang that does not fit *holds the line*: nothing behind it starts,
  so it cannot starve. One that could not start even on an empty cluster,
  because nodes are down or drained, does not hold it.
* It may evict gangs of lower priority, lowest and youngest first, but only if
  it starts whole with what they and those already ending give back. No more
  are evicted than that takes. Gangs of its own priority never are.
* Excluded hosts are kept away from as long as enough other nodes exist. The
  nodes here are slices of one machine: a gang that could run nowhere else is
  better run.

What it does not do: no I/O, no clock, no fair share, no backfill: what is
behind the line waits even where it would not delay the head.

Limits: what a gang did not ask for is not reserved: one with GPUs and no
``cpus`` is charged no cores. One with neither is charged one core (or the
whole node's if that is less), so that there is an end to how many start.

Example::

    for action in schedule(nodes, jobs):
        match action:
            case Start(name, shares): ...
            case Evict(name, winner): ...
            case Wait(name, reason): ...
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

EPSILON = 1e-9
"""Cores are fractions; sums of them are not exact."""

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Node:
    """One node of the cluster. ``gpus`` are device numbers as CUDA_VISIBLE_DEVICES wants them."""

    index: int
    host: str
    gpus: tuple[int, ...]
    cpus: float
    memory: int
    accelerator: str | None = None
    usable: bool = True  # neither down nor drained


@dataclass(frozen=True, slots=True)
class Request:
    """What a gang needs: ``nodes`` distinct nodes, and on each of them the rest."""

    nodes: int
    gpus: int = 0
    cpus: float | None = None
    memory: int | None = None
    accelerator: str | None = None
    exclude: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Share:
    """What a gang holds of one node."""

    node: int
    gpus: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Job:
    """One gang: waiting when ``held`` is empty, else on nodes, ``stopping`` when its end is under way."""

    name: str
    order: int
    request: Request
    priority: int = 0
    held: tuple[Share, ...] = ()
    stopping: bool = False
    started: float = 0.0


@dataclass(frozen=True, slots=True)
class Start:
    name: str
    shares: tuple[Share, ...]


@dataclass(frozen=True, slots=True)
class Evict:
    name: str
    winner: str


@dataclass(frozen=True, slots=True)
class Wait:
    name: str
    reason: str


Action = Start | Evict | Wait


def schedule(nodes: Sequence[Node], jobs: Iterable[Job]) -> list[Action]:
    """What to do now. The order of the answer is the order of the line."""
    everyone = list(jobs)
    holding = [job for job in everyone if job.held]
    line = sorted((job for job in everyone if not job.held), key=lambda job: (-job.priority, job.order))
    free = Free(nodes, holding)
    actions: list[Action] = []
    head: Job | None = None
    for job in line:
        if head is not None:
            actions.append(Wait(job.name, f"behind {head.name}, which is first in line"))
            continue
        if Free(nodes, ()).place(job.request) is None:
            actions.append(Wait(job.name, "the nodes it needs are down or drained"))
            continue
        shares = free.place(job.request)
        if shares is not None:
            free.take(job.request, shares)
            holding.append(replace(job, held=shares))
            actions.append(Start(job.name, shares))
            continue
        head = job
        victims, why = _make_room(nodes, job, holding, free)
        actions += [Evict(victim.name, job.name) for victim in victims]
        actions.append(Wait(job.name, why))
    return actions


def impossible(nodes: Sequence[Node], request: Request) -> str:
    """Why this request can never be met here, even with every node up and free; empty when it can."""
    asked = f"{request.nodes} nodes were asked for" if request.nodes != 1 else "1 node was asked for"
    if request.nodes > len(nodes):
        return f"{asked}, the cluster has {len(nodes)}"
    checks = (
        (
            lambda node: (
                request.accelerator is None or accelerator_matches(request.accelerator, node.accelerator)
            ),
            lambda: (
                f"accelerator {request.accelerator!r} was asked for, the cluster has "
                + _some(
                    {
                        str(node.accelerator) if node.accelerator else "none declared or detected"
                        for node in nodes
                    }
                )
            ),
        ),
        (
            lambda node: request.gpus <= len(node.gpus),
            lambda: (
                f"{request.gpus} GPUs on each node were asked for, the nodes have "
                + _some({str(len(node.gpus)) for node in nodes})
            ),
        ),
        (
            lambda node: (request.cpus or 0) <= node.cpus + EPSILON,
            lambda: (
                f"{request.cpus:g} cores on each node were asked for, the nodes have "
                + _some({f"{node.cpus:g}" for node in nodes})
            ),
        ),
        (
            lambda node: (request.memory or 0) <= node.memory,
            lambda: (
                f"{_gib(request.memory or 0)} on each node were asked for, the nodes have "
                + _some({_gib(node.memory) for node in nodes})
            ),
        ),
    )
    fitting = list(nodes)
    for good, reason in checks:
        fitting = [node for node in fitting if good(node)]
        if len(fitting) < request.nodes:
            short = "" if not fitting else f" (enough on {len(fitting)} of them; {asked})"
            return reason() + short
    return ""


def accelerator_matches(asked: str, have: str | None) -> bool:
    """Whether a node's accelerator is what was asked for.

    Detected names are long, asked ones short: every word of the asked name
    must be one of the node's.

    >>> accelerator_matches("h100", "NVIDIA H100 80GB HBM3")
    True
    >>> accelerator_matches("a10", "NVIDIA A100-SXM4-80GB")
    False
    """
    wanted = _words(asked)
    return bool(wanted) and have is not None and wanted <= _words(have)


class Free:
    """What is left of each node when some gangs hold their shares."""

    def __init__(self, nodes: Sequence[Node], holding: Iterable[Job]) -> None:
        self._nodes = {node.index: node for node in nodes}
        self._gpus = {node.index: set(node.gpus) for node in nodes}
        self._cpus = {node.index: node.cpus for node in nodes}
        self._memory = {node.index: node.memory for node in nodes}
        for job in holding:
            self.take(job.request, job.held)

    def take(self, request: Request, shares: Iterable[Share]) -> None:
        for share in shares:
            if share.node not in self._nodes:
                continue  # the cluster was made smaller while the gang ran
            self._gpus[share.node] -= set(share.gpus)
            self._cpus[share.node] -= _cpus(request, self._nodes[share.node])
            self._memory[share.node] -= request.memory or 0

    def fitting(self, request: Request) -> list[Node]:
        """The usable nodes that could take one node of this gang now, fullest first."""
        able = [node for node in self._nodes.values() if self._has(node, request)]
        excluded = _excluded(list(self._nodes.values()), request)
        # The fullest first keeps other nodes whole for larger gangs.
        return sorted(
            (node for node in able if node.host not in excluded),
            key=lambda node: (len(self._gpus[node.index]), self._cpus[node.index], node.index),
        )

    def place(self, request: Request) -> tuple[Share, ...] | None:
        """The whole gang on distinct nodes, in the order of the nodes; None when it does not fit."""
        fitting = self.fitting(request)
        if len(fitting) < request.nodes:
            return None
        chosen = sorted(fitting[: request.nodes], key=lambda node: node.index)
        return tuple(Share(n.index, tuple(sorted(self._gpus[n.index])[: request.gpus])) for n in chosen)

    def _has(self, node: Node, request: Request) -> bool:
        return (
            node.usable
            and _fits_kind(node, request)
            and len(self._gpus[node.index]) >= request.gpus
            and self._cpus[node.index] + EPSILON >= _cpus(request, node)
            and self._memory[node.index] >= (request.memory or 0)
        )


def _make_room(nodes: Sequence[Node], head: Job, holding: list[Job], free: Free) -> tuple[list[Job], str]:
    """Whom to evict for the head of the line, and why it waits. Nobody, when that would not make it fit."""

    def fits_without(gone: list[Job]) -> bool:
        return Free(nodes, [job for job in holding if job not in gone]).place(head.request) is not None

    ending = [job for job in holding if job.stopping]
    if ending and fits_without(ending):
        return [], f"waits for {_some({job.name for job in ending})} to end"
    lower = [job for job in holding if not job.stopping and job.priority < head.priority]
    lower.sort(key=lambda job: (job.priority, -job.started, -job.order))
    victims: list[Job] = []
    for job in lower:
        victims.append(job)
        if fits_without(ending + victims):
            break
    else:
        able = len(free.fitting(head.request))
        gpus = f" with {head.request.gpus} free GPUs" if head.request.gpus else ""
        return [], f"waits for {head.request.nodes} nodes{gpus}; {able} now"
    for job in list(reversed(victims)):  # whoever would have been spared longest is spared first
        rest = [other for other in victims if other is not job]
        if fits_without(ending + rest):
            victims = rest
    return victims, f"waits for {_some({job.name for job in victims})} to make room"


def _cpus(request: Request, node: Node) -> float:
    if request.cpus is not None:
        return request.cpus
    return 0.0 if request.gpus else min(1.0, node.cpus)


def _fits_kind(node: Node, request: Request) -> bool:
    return request.accelerator is None or accelerator_matches(request.accelerator, node.accelerator)


def _excluded(nodes: list[Node], request: Request) -> frozenset[str]:
    others = [node for node in nodes if node.host not in request.exclude]
    return request.exclude if not impossible(others, request) else frozenset()


def _words(name: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", name.lower()))


def _gib(size: int) -> str:
    return f"{size / GIB:.3g} GiB of memory"


def _some(items: set[str]) -> str:
    listed = sorted(items)
    return ", ".join(listed[:3]) + (f" and {len(listed) - 3} more" if len(listed) > 3 else "")

"""Budgets: whether there is another attempt after an end, and when.

Purpose: each cause of an end draws on a budget of its own (:class:`Recovery`),
for each owner anew. Pure, as all of :mod:`airflow_gpu.gang`.
"""

from __future__ import annotations

import hashlib

from airflow_gpu.gang.run import INFRASTRUCTURE, Attempt, Cause, Outcome, Run
from airflow_gpu.gang.spec import Gang, Recovery

CLOSED = frozenset({Cause.QUEUED_TOO_LONG, Cause.REJECTED})
"""Ends after which an owner does not ask that target again."""

NO_START = frozenset({Cause.MOVED, *CLOSED})
"""Ends of attempts that waited and never began: they are no starts that got no further."""


def group_of(recovery: Recovery, cause: Cause) -> str | None:
    """The budget that an end with this cause draws from; None if there is none."""
    if cause is Cause.PREEMPTED:
        return "preemptions"
    if cause in INFRASTRUCTURE:
        return "node_failures"
    name = {Cause.APPLICATION: "application", Cause.OUT_OF_MEMORY: "out_of_memory"}.get(cause)
    if name is not None and recovery.mode == "any" and getattr(recovery, name) == 0:
        return "node_failures"
    return name


def spent(run: Run, recovery: Recovery, epoch: int, group: str) -> int:
    """Ends of this kind under this owner, restarts by the platform included."""
    total = 0
    for attempt in run.of_epoch(epoch):
        outcome = attempt.outcome
        if outcome is None:
            continue
        total += group_of(recovery, outcome.cause) == group
        if group == "preemptions":
            total += outcome.restarts
    return total


def refusal(run: Run, recovery: Recovery, outcome: Outcome, epoch: int) -> str | None:
    """Why there is no further attempt after this end; None when there is one."""
    group = group_of(recovery, outcome.cause)
    if group is None:
        return outcome.detail or f"ended as {outcome.cause}"
    allowed = 0 if recovery.mode == "never" else getattr(recovery, group)
    if allowed is None:
        return None
    ends = spent(run, recovery, epoch, group)
    if ends <= allowed:
        return None
    why = outcome.detail or f"ended as {outcome.cause}"
    if recovery.mode == "never" or allowed == 0:
        return why
    return f"{why} (recovery.{group}={allowed} is spent: {ends} ends of this kind)"


def streak(mine: tuple[Attempt, ...]) -> int:
    """Ends in a row that left the run at the checkpoint where the one before had left it.

    Copies on the nodes are progress too, which shows at the next start: one from a copy that is further than any
    before it says that the starts before got further.
    """
    ends = [a.outcome for a in mine if a.outcome and (a.outcome.life or a.outcome.cause not in NO_START)]
    if not ends:
        return 0
    at = ends[-1].checkpoint
    count, furthest = 0, at.step if at is not None else 0
    for outcome in _there(ends):
        if outcome.copy is not None and outcome.copy > furthest:
            count, furthest = 0, outcome.copy
        else:
            count += 1 + outcome.restarts
    return count


def _there(ends: list[Outcome]) -> list[Outcome]:
    """Of the newest ends those that left the run at its checkpoint of now, without the one that brought it there."""
    at, found = ends[-1].checkpoint, 0
    for outcome, before in zip(reversed(ends), [*reversed(ends[:-1]), None], strict=True):
        if outcome.checkpoint != at:
            break
        if before is not None and before.checkpoint != at:
            break  # this one still got further
        if before is None and at is not None:
            break  # the first one of this owner, and it has a checkpoint: not known to be fruitless
        found += 1
    return ends[len(ends) - found :]


def moves(mine: tuple[Attempt, ...]) -> int:
    """How often in a row it went to another target without a start."""
    count = 0
    for attempt in reversed(mine):
        if attempt.outcome is None or attempt.outcome.life or attempt.outcome.cause not in NO_START:
            break
        count += 1
    return count


def open_targets(run: Run, gang: Gang, epoch: int) -> list[str]:
    """Targets of the list that this owner may still ask: where it has not waited too long or been refused."""
    closed = {a.target for a in run.of_epoch(epoch) if a.outcome and a.outcome.cause in CLOSED}
    return [target for target in gang.targets if target not in closed]


def delay(recovery: Recovery, cause: Cause, streak: int, name: str) -> float:
    """Seconds before the next attempt: none after a preemption or a move that cost no progress, else doubling."""
    if streak <= 0 and cause in (Cause.PREEMPTED, Cause.UNREACHABLE, *NO_START):
        return 0.0
    base = float(min(recovery.backoff * 2.0 ** min(max(streak - 1, 0), 30), recovery.backoff_max))
    # Up to a quarter more, fixed by the attempt's name: gangs that fail together do not return together,
    # and two drivers of one run compute the same moment.
    digest = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
    return base * (1 + digest / 2**34)


def fruitless(count: int, recovery: Recovery) -> str:
    return (
        f"{count} starts in a row got no further than the same checkpoint (recovery.fruitless={recovery.fruitless}); "
        "save more often than the gang is interrupted, or raise the limit"
    )

"""Which end was the first, and what it means. Pure: no I/O, no clock.

Purpose: a rank that dies makes the others fail in their collectives
milliseconds later. What people need is the one that failed first; and after a
notice, ranks that go are no failure at all.

Limits: times are those of node 0's clock, from the age that each node reports,
so clocks of nodes need not agree. A program that takes longer to die than its
peers take to notice is told apart only when it uses the handle, which reports
an exception before the process ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Collection, Optional, Sequence

from airflow_gpu.runtime.words import EXIT_PREEMPTED, how_ended

TIE_SECONDS = 0.1
"""Ends that are so close are taken as simultaneous: threads that wait for processes wake up in any order."""

ROOT_SIGNALS = frozenset({"SIGKILL", "SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE", "SIGSYS"})
"""Ends that another rank's end does not cause; among simultaneous ones they are the first."""


@dataclass(frozen=True)
class End:
    """How one process of the gang ended. ``at``: seconds of node 0's monotonic clock."""

    rank: int
    node: int
    exit_code: Optional[int]
    signal: Optional[str]
    at: float
    tail: str = ""
    error: str = ""  # what the handle reported: "ValueError: ..."

    @property
    def good(self) -> bool:
        return self.exit_code == 0

    @property
    def terminated(self) -> bool:
        """By SIGTERM, or as shells and runtimes say so."""
        return self.signal == "SIGTERM" or self.exit_code == 143

    @property
    def words(self) -> str:
        return how_ended(self.exit_code, self.signal)


EARLY_SECONDS = 60.0
"""How long before its moment a platform may send the notice of its time limit (Slurm: up to a minute)."""


def notice_cause(elapsed: float, time_limit: Optional[float], stop_grace: float) -> str:
    """``time_limit`` when a notice comes where that of the time limit is due, else ``platform``.

    ``elapsed``: seconds since the life was claimed. Platforms do not say why they
    give notice; a gang that reaches its limit must not start again for ever.
    """
    if time_limit is None:
        return "platform"
    due = max(time_limit / 2, time_limit - stop_grace - EARLY_SECONDS)
    return "time_limit" if elapsed >= due else "platform"


def first_of(ends: Sequence[End]) -> End:
    """The end that came first, of at least one bad end."""
    earliest = min(end.at for end in ends)
    close = [end for end in ends if end.at - earliest <= TIE_SECONDS]
    return min(close, key=lambda end: (end.signal not in ROOT_SIGNALS, not end.error, end.at, end.rank))


def preempted(
    end: End, noticed_at: Optional[float], told_to_end: Collection[int], launcher_left: bool
) -> bool:
    """After a notice this end is to be resumed, and no failure.

    ``noticed_at``: None without a notice. ``told_to_end``: processes to which
    SIGTERM was sent on. ``launcher_left``: this is a launcher (torchrun,
    mpirun) of whose ranks some have left after saving; launchers turn the 75
    of their ranks into codes of their own.
    """
    if noticed_at is None:
        return False
    if end.exit_code == EXIT_PREEMPTED or end.terminated:
        # A platform may signal ranks and agents at once, so the order says nothing.
        return True
    return end.at >= noticed_at and (end.rank in told_to_end or launcher_left)

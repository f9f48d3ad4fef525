"""Processes by /proc: who is ours, who still lives, and signals that cannot hit a stranger.

Purpose: a gang is over when none of its processes is left, so they must be
found wherever they went. One belongs to a gang when its environment says so
(``GANG_JOB_ID``), when its parent or its session does, or when it was once
seen to. That finds ranks that started sessions of their own, that were
orphaned, and that overwrote their environment.

What it does not do: cgroups. A process that leaves its session, loses its
parent and replaces its environment, all between two looks, is not found.

Limits: Linux. A process whose environment the daemon may not read (another
user's, or not dumpable) is found by parent and session only.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection

PROC = Path("/proc")
JOB_VARIABLE = b"GANG_JOB_ID="
RANK_VARIABLE = b"GANG_NODE_RANK="
RESTART_VARIABLE = b"GANG_RESTART="

SETTLED = 5.0
"""Seconds of age after which a process without the marker is not read again: it has long called exec."""

_TICKS = os.sysconf("SC_CLK_TCK")


class Ident(NamedTuple):
    """A process for good: pids come again, a pid with its start time does not (within one boot)."""

    pid: int
    start: int


@dataclass(frozen=True, slots=True)
class Process:
    """What ``/proc/<pid>/stat`` says."""

    ident: Ident
    parent: int
    session: int
    state: str

    @property
    def dead(self) -> bool:
        """Over, though perhaps not yet waited for by its parent."""
        return self.state in "ZXx"


@dataclass(frozen=True, slots=True)
class Marker:
    """Whose a process is, by its environment."""

    job: str
    rank: int
    restart: int


def boot_id() -> str:
    """Differs after each boot of the machine. Start times and monotonic moments hold within one."""
    return (PROC / "sys/kernel/random/boot_id").read_text().strip()


def read_process(pid: int) -> Process | None:
    """The process with this pid now; None when there is none."""
    try:
        text = (PROC / str(pid) / "stat").read_bytes()
    except OSError:
        return None
    # The command's name, in parentheses, may hold anything, also spaces and parentheses.
    rest = text[text.rfind(b")") + 2 :].split()
    return Process(Ident(pid, int(rest[19])), int(rest[1]), int(rest[3]), rest[0].decode())


def read_marker(pid: int) -> Marker | None:
    """What the environment of a process says; None when nothing or not readable."""
    try:
        items = (PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return None
    found = {}
    for item in items:
        for variable in (JOB_VARIABLE, RANK_VARIABLE, RESTART_VARIABLE):
            if item.startswith(variable):
                found[variable] = item[len(variable) :].decode(errors="replace")
    if JOB_VARIABLE not in found:
        return None
    return Marker(
        found[JOB_VARIABLE], _number(found.get(RANK_VARIABLE)), _number(found.get(RESTART_VARIABLE))
    )


def alive(ident: Ident) -> bool:
    """Whether exactly this process still runs. A zombie does not."""
    process = read_process(ident.pid)
    return process is not None and process.ident == ident and not process.dead


def send(ident: Ident, number: signal.Signals) -> bool:
    """Signal exactly this process; False when it is not there any more."""
    try:
        descriptor = os.pidfd_open(ident.pid)
    except ProcessLookupError:
        return False
    except OSError:  # a kernel without pidfd: a short race is left
        return _send_by_pid(ident, number)
    try:
        # Looked at after it was opened: what the descriptor holds cannot become another process.
        if not alive(ident):
            return False
        signal.pidfd_send_signal(descriptor, number)
        return True
    except (ProcessLookupError, PermissionError):
        return False
    finally:
        os.close(descriptor)


def _send_by_pid(ident: Ident, number: signal.Signals) -> bool:
    if not alive(ident):
        return False
    try:
        os.kill(ident.pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


class Census:
    """Looks at all processes and says which belong to which job.

    It remembers: whoever was seen as a member stays one until it ends.
    """

    def __init__(self) -> None:
        self._members: dict[Ident, Marker] = {}
        self._strangers: set[Ident] = set()

    def take(self, jobs: Collection[str]) -> dict[str, dict[Ident, Marker]]:
        """The living processes of each of these jobs (by id), now."""
        living = {p.ident.pid: p for p in self._list() if not p.dead}
        present = {p.ident for p in living.values()}
        self._members = {i: m for i, m in self._members.items() if i in present and m.job in jobs}
        self._strangers &= present
        own = {os.getpid(), 1}
        uptime = time.clock_gettime(time.CLOCK_BOOTTIME)
        foreign: set[int] = set()
        for pid, process in living.items():
            if process.ident in self._members or process.ident in self._strangers or pid in own:
                continue
            marker = read_marker(pid)
            if marker is not None and marker.job in jobs:
                self._members[process.ident] = marker
            elif marker is not None:
                # Another cluster's gang, or a daemon that was started from within a gang: never ours.
                foreign.add(pid)
            elif uptime - process.ident.start / _TICKS > SETTLED and process.parent not in own:
                self._strangers.add(process.ident)
        self._adopt(living, own | foreign)
        found: dict[str, dict[Ident, Marker]] = {job: {} for job in jobs}
        for ident, marker in self._members.items():
            found[marker.job][ident] = marker
        return found

    def _adopt(self, living: dict[int, Process], never: set[int]) -> None:
        """Make members of the children and session mates of members, until there are no more."""
        mine = os.getsid(0)
        grew = True
        while grew:
            grew = False
            by_pid = {ident.pid: marker for ident, marker in self._members.items()}
            sessions = {
                living[ident.pid].session: marker
                for ident, marker in self._members.items()
                if living[ident.pid].session not in (0, mine)
            }
            for pid, process in living.items():
                if pid in by_pid or pid in never:
                    continue
                marker = by_pid.get(process.parent) or sessions.get(process.session)
                if marker is not None:
                    self._members[process.ident] = marker
                    self._strangers.discard(process.ident)
                    grew = True

    @staticmethod
    def _list() -> list[Process]:
        found = (read_process(int(name)) for name in os.listdir(PROC) if name.isdigit())
        return [process for process in found if process is not None]


def _number(text: str | None) -> int:
    return int(text) if text is not None and text.isdigit() else 0

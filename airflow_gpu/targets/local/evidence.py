"""Positive evidence that the kernel ran out of memory and killed a process of a gang.

Purpose: an exit code of 137 says "killed", not by whom. The kernel's log names
the process it killed for want of memory.

What it does not do: guess. No readable log, another pid namespace, or no line
about one of our processes: no evidence.

Limits: reading the log needs root, or ``kernel.dmesg_restrict=0``. A process
that was never seen by the daemon (it lived for less than a second) is not
recognised as ours.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

KERNEL_LOG = Path("/dev/kmsg")
FIRST_PID_NAMESPACE = 0xEFFFFFFC
"""Inode of the machine's own pid namespace; in another, the kernel's pids are not ours."""

LONGEST_RECORD = 8192
SLACK = 2.0
"""Seconds by which the kernel log's clock and CLOCK_MONOTONIC may differ."""

_KILLED = re.compile(r"Killed process (\d+)\b")


def killed_for_memory(since: float, log: Path = KERNEL_LOG) -> frozenset[int]:
    """Pids that the kernel killed for want of memory since this monotonic moment."""
    try:
        if os.stat("/proc/self/ns/pid").st_ino != FIRST_PID_NAMESPACE:
            return frozenset()
        return find_victims(_records(log), since)
    except OSError:
        return frozenset()


def find_victims(records: Iterable[str], since: float) -> frozenset[int]:
    """The pids in records of the kernel log (``<prio>,<seq>,<microseconds>,<flags>;<text>``).

    >>> sorted(find_victims(["3,8,9000000,-;Out of memory: Killed process 42 (python) total-vm:1kB"], 5.0))
    [42]
    """
    found = set()
    for record in records:
        head, _, text = record.partition(";")
        fields = head.split(",")
        match = _KILLED.search(text)
        if match is None or "out of memory" not in text.lower() or len(fields) < 3 or not fields[2].isdigit():
            continue
        if int(fields[2]) / 1e6 >= since - SLACK:
            found.add(int(match.group(1)))
    return frozenset(found)


def _records(log: Path) -> list[str]:
    """The kernel log, one record a read."""
    records = []
    descriptor = os.open(log, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        while True:
            try:
                data = os.read(descriptor, LONGEST_RECORD)
            except BlockingIOError:
                break
            except BrokenPipeError:
                continue  # overwritten while we read; the next read goes on behind the gap
            if not data:
                break
            records.append(data.decode(errors="replace"))
    finally:
        os.close(descriptor)
    return records

"""Words and numbers that every part of the runtime shares: exit codes, times, one way to log.

Purpose: the agent's exit codes are a contract with the driver
(``docs/run-directory.md``); they are named here and nowhere else.
"""

from __future__ import annotations

import signal
import sys
import time
from datetime import datetime, timezone
from typing import Optional

VERSION = 1
"""Of the formats and of the control channel's messages."""

EXIT_USAGE = 64
"""The agent was started wrongly: no payload, no node rank. Nothing was claimed."""

EXIT_PREEMPTED = 75
"""Ended after a notice, to be resumed."""

EXIT_NOT_CLAIMED = 76
"""A twin, fenced, or superseded by a newer entry."""

EXIT_NOT_WHOLE = 77
"""Not every node came to the barrier in time; no rank was started."""

EXIT_NO_CREDENTIALS = 78
"""The object store of the channel is closed to this job: nobody's credentials were found. Nothing was claimed."""

EXIT_FAILED = 1
"""A failure without a rank's code of its own, e.g. a lost node."""

RESERVED_CODES = frozenset({0, EXIT_PREEMPTED, EXIT_NOT_CLAIMED, EXIT_NOT_WHOLE, EXIT_NO_CREDENTIALS})
"""Codes with a meaning for the driver: the agent never passes them on from a rank that failed."""

NOTICE_SIGNALS = ("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGINT", "SIGHUP")
"""What a platform may send as its warning; sites differ, and none of them means "die at once" to an agent."""


def utc(at: Optional[float] = None) -> str:
    """ISO 8601 in UTC with a ``Z``, to the millisecond. ``at``: seconds since the epoch, now if None."""
    moment = datetime.fromtimestamp(time.time() if at is None else at, timezone.utc)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def parse_utc(text: str) -> float:
    """Seconds since the epoch of what :func:`utc` wrote. Raises ValueError."""
    if not text.endswith("Z"):
        raise ValueError(f"{text!r} is no time in UTC")
    return datetime.fromisoformat(text[:-1] + "+00:00").timestamp()


def signal_name(number: int) -> str:
    """``SIGKILL`` for 9; ``SIG64`` for one that Python has no name for."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIG{number}"


def code_of(exit_code: Optional[int], signal_word: Optional[str]) -> int:
    """The agent's exit code for a rank that failed: its own, 128 + n for a signal, never a reserved one."""
    if signal_word is not None:
        number = getattr(signal, signal_word, None)
        return 128 + int(number if number is not None else signal_word[3:])
    if exit_code is None or exit_code in RESERVED_CODES:
        return EXIT_FAILED
    return exit_code


def how_ended(exit_code: Optional[int], signal_word: Optional[str]) -> str:
    """For people: ``exit code 3`` or ``SIGKILL``."""
    return signal_word if signal_word is not None else f"exit code {exit_code}"


class Log:
    """Lines on standard error, which is the platform's log of the node. Holds no secrets: nothing logs environments."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix

    def __call__(self, message: str) -> None:
        # One write a line, so that agents that share a terminal do not mix theirs.
        try:
            sys.stderr.write(f"{utc()} [gang {self.prefix}] {message}\n")
            sys.stderr.flush()
        except (OSError, ValueError):  # nobody reads it any more; that is no reason to fail
            pass


SCRATCH = "gang-save-"
"""How the name of a temporary folder begins that stands in for a checkpoint's, when its step is saved already."""

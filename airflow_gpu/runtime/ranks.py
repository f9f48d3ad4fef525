"""The processes of one node: started, waited for, ended.

Purpose: each rank leads a process group, writes to a log file of its own on the
channel, and is waited for by a thread of its own, so that the moment of its end
is known to the millisecond: that tells which rank failed first.

Limits: :meth:`Processes.start` must be called in the main thread. The kernel
kills a rank when the *thread* that started it ends.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, List, Optional, Sequence

from airflow_gpu.runtime.prctl import SHIM, kill_descendants
from airflow_gpu.runtime.words import signal_name, utc

TAIL_BYTES = 8192
"""How much of a failed rank's log goes into failure.json."""


@dataclass
class Rank:
    """One process. ``number`` is its rank; with a launcher, the number of its node."""

    number: int
    local: int
    log: str
    process: subprocess.Popen[bytes]
    started: float = field(default_factory=time.time)
    ended: Optional[float] = None
    ended_clock: float = 0.0  # time.monotonic
    exit_code: Optional[int] = None
    signal: Optional[str] = None

    def to_dict(self) -> Dict[str, Any]:
        """Its entry in ``nodes/<node>.json``."""
        return {
            "rank": self.number,
            "local_rank": self.local,
            "exit_code": self.exit_code,
            "signal": self.signal,
            "started": utc(self.started),
            "ended": None if self.ended is None else utc(self.ended),
        }

    def tail(self) -> str:
        """The last of its output."""
        try:
            with open(self.log, "rb") as file:
                file.seek(0, os.SEEK_END)
                file.seek(max(0, file.tell() - TAIL_BYTES))
                return file.read().decode("utf-8", "replace")
        except OSError:
            return ""


def start_process(
    command: Sequence[str], env: Dict[str, str], stdout: Any, stderr: Any
) -> subprocess.Popen[bytes]:
    """A process in a group of its own that does not outlive this one. Only in the main thread."""
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", SHIM, str(os.getpid()), *command],
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
    )


def signal_group(process: subprocess.Popen[bytes], number: int) -> None:
    """To the process and what it started in its group. No error when it is gone."""
    if process.returncode is not None:
        return  # waited for: the number may be somebody else's by now
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        try:
            os.kill(process.pid, number)  # it does not lead its group yet
        except OSError:
            pass
    except OSError:
        pass


class Processes:
    """All that this node's agent has started. ``on_end`` is called in a waiting thread, once a rank."""

    def __init__(self, on_end: Callable[[Rank], None]) -> None:
        self._on_end = on_end
        self.ranks: Dict[int, Rank] = {}
        self.others: Dict[int, subprocess.Popen[bytes]] = {}  # by number: what mpirun had started here
        self.stopped = False  # somebody has asked for their end
        self._deadline: Optional[float] = None

    def start(self, number: int, local: int, command: Sequence[str], env: Dict[str, str], log: str) -> Rank:
        """Start a rank. Raises OSError when its log cannot be opened."""
        with open(log, "ab", buffering=0) as output:
            rank = Rank(number, local, log, start_process(command, env, output, subprocess.STDOUT))
        self.ranks[number] = rank
        threading.Thread(target=self._await, args=(rank,), name=f"gang-rank-{number}", daemon=True).start()
        return rank

    def running(self) -> List[Rank]:
        return [rank for rank in self.ranks.values() if rank.ended is None]

    def terminate(self, numbers: Sequence[int]) -> None:
        """SIGTERM to these ranks."""
        for number in numbers:
            if number in self.ranks:
                signal_group(self.ranks[number].process, signal.SIGTERM)

    def stop(self, grace: float) -> None:
        """SIGTERM to all, SIGKILL after ``grace`` seconds (see :meth:`due_in`). The first call's grace counts."""
        if self._deadline is not None:
            return
        self.stopped = True
        self._deadline = time.monotonic() + grace
        if grace > 0:
            for process in [*(rank.process for rank in self.running()), *self.others.values()]:
                signal_group(process, signal.SIGTERM)

    def due_in(self) -> Optional[float]:
        """Seconds until :meth:`kill` is to be called; None when no stop is under way."""
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def kill(self) -> List[int]:
        """SIGKILL to everything below this process, sessions and daemons included; answers what did not die."""
        self._deadline = None
        return kill_descendants(os.getpid())

    def reap(self) -> None:
        """Wait for orphans that this process has adopted, so that none stays a zombie."""
        while True:
            known = {rank.process.pid for rank in self.ranks.values()}
            known.update(process.pid for process in list(self.others.values()))
            try:
                seen = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if seen is None or seen.si_pid in known:
                    return  # of our own: its thread waits for it
                os.waitpid(seen.si_pid, os.WNOHANG)
            except OSError:
                return

    def _await(self, rank: Rank) -> None:
        code = rank.process.wait()
        rank.ended_clock = time.monotonic()
        if code < 0:
            rank.signal = signal_name(-code)
        else:
            rank.exit_code = code
        rank.ended = time.time()
        self._on_end(rank)

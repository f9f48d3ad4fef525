"""Namespaces of our own, and processes within them.

space = Space.make(["bash", "cluster.sh", ...], log=Path("cluster.log"))
daemon = space.spawn(["sleep", "60"], log=Path("sleep.log"))
space.kill()

A space lives as long as its first process, which waits for its input to end: it goes when this process does, however it
ends. Paths are those of the host until the first process changes its root.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

_FLAGS = ("--mount", "--uts", "--ipc", "--net", "--pid")
_START_FOR = 60.0


@dataclass
class Daemon:
    """A process in a space. `pid` is its number on the host."""

    pid: int
    _outside: subprocess.Popen[bytes] = field(repr=False)

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)
            if number != signal.SIGSTOP:
                os.kill(
                    self._outside.pid, signal.SIGCONT
                )  # nsenter stops with its child, and does not go on with it

    def alive(self) -> bool:
        return self._outside.poll() is None

    def stop(self, *, kill: bool = False, timeout: float = 30.0) -> None:
        """End it, by TERM unless `kill`; KILL after `timeout` seconds."""
        self.signal(signal.SIGKILL if kill else signal.SIGTERM)
        try:
            self._outside.wait(timeout)
        except subprocess.TimeoutExpired:
            self.signal(signal.SIGKILL)
            self._outside.wait()


@dataclass
class Space:
    """`pid` is the number of the first process on the host."""

    pid: int
    _outside: subprocess.Popen[bytes] = field(repr=False)

    @classmethod
    def make(cls, command: Sequence[str], log: Path, within: Space | None = None) -> Space:
        """Run `command` as the first process of a new space, and wait until it has printed a line."""
        whole = [*(within.prefix() if within else ()), "unshare", *_FLAGS, "--fork", "--kill-child", *command]
        with log.open("ab") as errors:
            outside = subprocess.Popen(
                whole,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=_environment(),
                start_new_session=True,
            )
        try:
            _wait_for_line(outside, log)
            # Through `nsenter` and `unshare`, which have one child each.
            pid = psutil.Process(outside.pid).children(recursive=True)[-1].pid
        except BaseException:
            outside.kill()
            raise
        return cls(pid, outside)

    def prefix(self, user: str = "root") -> list[str]:
        """What, put before a command, runs it in here as `user`, with a fresh environment and in the home of the user."""
        home = {"root": "/root", "munge": "/", "slurmrestd": "/"}.get(user, f"/home/{user}")
        enter = ["nsenter", f"--target={self.pid}", *_FLAGS, "--"]
        become = ["/usr/bin/setpriv", f"--reuid={user}", f"--regid={user}", "--init-groups", "--reset-env"]
        return [*enter, *become, "/usr/bin/env", f"--chdir={home}", "LANG=C.UTF-8"]

    def spawn(self, command: Sequence[str], log: Path, user: str = "root") -> Daemon:
        """Start `command` in here; what it prints goes to `log`."""
        with log.open("ab") as output:
            outside = subprocess.Popen(
                [*self.prefix(user), *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=_environment(),
                start_new_session=True,
            )
        deadline = time.monotonic() + _START_FOR
        while outside.poll() is None and time.monotonic() < deadline:
            if children := psutil.Process(outside.pid).children():
                return Daemon(children[0].pid, outside)
            time.sleep(0.002)
        outside.kill()
        outside.wait()
        raise RuntimeError(f"{command[0]} did not start: {tail(log)}")

    def network(self, lines: str) -> None:
        """Run `ip` commands, one a line, in the network in here."""
        done = subprocess.run(
            ["nsenter", f"--target={self.pid}", "--net", "ip", "-batch", "-"],
            input=lines.encode(),
            capture_output=True,
            env=_environment(),
        )
        if done.returncode:
            raise RuntimeError(f"ip: {done.stderr.decode()} in {lines}")

    def alive(self) -> bool:
        return self._outside.poll() is None

    def kill(self) -> None:
        """KILL to everything in here at once; nothing of it is left when this returns."""
        if self.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        self._outside.wait()
        for stream in (self._outside.stdin, self._outside.stdout):
            if stream:
                stream.close()


def tail(log: Path, lines: int = 30) -> str:
    """The last lines of a log."""
    if not log.exists():
        return ""
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def _wait_for_line(process: subprocess.Popen[bytes], log: Path) -> None:
    assert process.stdout
    ready, _, _ = select.select([process.stdout], [], [], _START_FOR)
    if not ready or not process.stdout.readline():
        raise RuntimeError(f"the first process of a namespace did not start: {tail(log)}")


def _environment() -> dict[str, str]:
    return {
        "PATH": f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin:/usr/bin:/bin",
        "LANG": "C.UTF-8",
    }

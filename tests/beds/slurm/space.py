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
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

_FLAGS = ("--mount", "--uts", "--ipc", "--net", "--pid")
_START_FOR = 60.0


@dataclass
class Daemon:
    """A process in a space, and a child of its first one. `pid` is its number on the host."""

    pid: int
    _handle: int = field(
        repr=False
    )  # a file descriptor that stands for this process, and for none with its number

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, number)

    def alive(self) -> bool:
        return not self._ended(0)

    def stop(self, *, kill: bool = False, timeout: float = 30.0) -> None:
        """End it, by TERM unless `kill`; KILL after `timeout` seconds."""
        if not kill:
            self.signal(signal.SIGTERM)
            self.signal(signal.SIGCONT)
        if kill or not self._ended(timeout):
            self.signal(signal.SIGKILL)
            self._ended(timeout)
        os.close(self._handle)

    def _ended(self, seconds: float) -> bool:
        poll = select.poll()
        poll.register(self._handle, select.POLLIN)
        return bool(poll.poll(seconds * 1000))


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
        """Start `command` in here; what it prints goes to `log`.

        It is no child of anything outside: a first process that ends waits for all others to be collected, and one
        outside that is stopped, as `nsenter` is when its child stops, does not collect.
        """
        told, telling = os.pipe()
        script = f'echo $$ >&{telling}; exec {telling}>&-; exec "$@"'
        with log.open("ab") as output:
            started = subprocess.run(
                [*self.prefix(user), "setsid", "--fork", "bash", "-c", script, "daemon", *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=_environment(),
                pass_fds=(telling,),
            )
        os.close(telling)
        with open(told) as said:
            number = said.readline().strip()
        pid = _on_the_host(self.pid, number) if number and not started.returncode else None
        if pid is None:
            raise RuntimeError(f"{command[0]} did not start: {tail(log)}")
        return Daemon(pid, os.pidfd_open(pid))

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


def _on_the_host(first: int, number: str) -> int | None:
    """The number on the host of the process that is `number` in the space of `first`."""
    space = os.readlink(f"/proc/{first}/ns/pid")
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
            if status["NSpid"].split()[-1] == number and os.readlink(folder / "ns/pid") == space:
                return int(folder.name)
    return None


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

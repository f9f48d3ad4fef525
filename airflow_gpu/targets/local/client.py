"""How Airflow's side and operators reach the daemon: start it, ask it, read its table.

Purpose: everything that is outside the daemon and not about one job.

What it does not do: keep a connection. The daemon is reached by files, so
there is nothing to break when it, or we, are killed.

Limits: all calls block; the target calls them in threads.

Example::

    client = Client(Path("/scratch/gpu"))
    client.ensure()
    client.call("drain", node=1)
    client.table()["nodes"][1]["state"]  # "drained"
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import airflow_gpu
from airflow_gpu.targets.local.commands import FORMAT, ack_path
from airflow_gpu.targets.local.files import Damaged, Folder, create_file, encode, read_json, replace_file
from airflow_gpu.targets.local.launch import passed_environment
from airflow_gpu.targets.local.table import Table

if TYPE_CHECKING:
    from collections.abc import Iterator

START_LIMIT = 90.0
"""Seconds for a daemon to start: an interpreter on a busy machine, and nvidia-smi."""

START_AGAIN = 3.0
"""Seconds after which a daemon that was started and is not there is started again."""

HEARTBEAT_LIMIT = 60.0
"""Seconds after which a daemon that lives but does nothing is no source of truth."""

HEARTBEAT_PATIENCE = 2.0
ANSWER_LIMIT = 30.0
PAUSE = 0.02

DAEMON_JOB = "airflow-gpu-local-daemon"
"""GANG_JOB_ID of a daemon: one that was started from within a gang is no part of it."""

_RECORD_LOCK = "hhqqi"
"""struct flock: kind, whence, start, length, owner."""

_starting = threading.Lock()

_START = "import sys; sys.path.append(sys.argv[1]); from airflow_gpu.targets.local.daemon import main; main(sys.argv[2:])"


class ClientError(Exception):
    """The daemon could not be started or does not answer. Says nothing about any gang."""


class Client:
    """One cluster folder, seen from outside its daemon."""

    def __init__(self, root: Path) -> None:
        self.folder = Folder(root)
        self.rows = Table(self.folder.table)

    def make(self, shape: dict[str, Any]) -> None:
        """Make the folder, declared as ``shape`` if it was not declared before.

        :raises ClientError: it cannot be made.
        """
        with _told():
            self.folder.make()
            if not self.folder.cluster.exists():
                create_file(self.folder.cluster, encode(shape))

    def alive(self) -> bool:
        """Whether a daemon has this folder. The lock says so, for processes in other containers too.

        It is asked for, not taken: a lock that is held for a moment would be held for hours by a task
        process that Airflow forks in that moment.
        """
        try:
            descriptor = os.open(self.folder.lock, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            question = struct.pack(_RECORD_LOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            answer = struct.unpack(_RECORD_LOCK, fcntl.fcntl(descriptor, fcntl.F_GETLK, question))
        finally:
            os.close(descriptor)
        return bool(answer[0] != fcntl.F_UNLCK)

    def ensure(self) -> None:
        """See to it that a daemon serves, and has its table ready.

        :raises ClientError: none can be started, or the one there hangs.
        """
        with _told():
            if not self.folder.cluster.exists():
                raise ClientError(
                    f"{self.folder.root} is no cluster folder: it has no {self.folder.cluster.name}"
                )
            if not (self.alive() and self.folder.daemon.exists()):
                self._start()
            self._check_heartbeat()

    def _start(self) -> None:
        """Start a daemon, and wait until one is ready. Also when somebody else just does the same."""
        with self._turn() as first:
            now = time.monotonic()
            end = now + START_LIMIT
            launched = None if first else now
            while not (self.alive() and self.folder.daemon.exists()):
                now = time.monotonic()
                if self.alive():
                    pass  # it is still reading what there is, or just ending
                elif launched is None or now - launched >= START_AGAIN:
                    launched = now
                    self.folder.problem.unlink(missing_ok=True)
                    self._launch()
                elif self.folder.problem.exists():
                    raise ClientError(f"the daemon of {self.folder.root} cannot start: {self._problem()}")
                if now >= end:
                    raise ClientError(
                        f"no daemon serves {self.folder.root} after {START_LIMIT:g} s: {self._problem()}"
                    )
                time.sleep(PAUSE)

    @contextlib.contextmanager
    def _turn(self) -> Iterator[bool]:
        """Whether it is our turn to start a daemon: fifty submits at once need one, not fifty interpreters.

        A help only. Who does not get the turn waits a little and then tries all the same: a process that
        was forked while a thread had the turn must not wait for that thread for ever.
        """
        ours = _starting.acquire(timeout=START_AGAIN)
        try:
            with self.folder.start_lock.open("a") as file:
                first = ours
                try:
                    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except (BlockingIOError, PermissionError):
                    first = False
                yield first
        finally:
            if ours:
                _starting.release()

    def _launch(self) -> None:
        environ = passed_environment(os.environ)
        environ["GANG_JOB_ID"] = DAEMON_JOB
        home = str(Path(airflow_gpu.__file__).parent.parent)
        with self.folder.log.open("ab") as log:
            # -I: neither the working directory nor PYTHONPATH decides which code this is.
            child = subprocess.Popen(
                [sys.executable, "-I", "-c", _START, home, str(self.folder.root)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environ,
                cwd="/",
                start_new_session=True,
            )
        # What we started forks and leaves at once; the daemon is its child and never ours.
        code = child.wait(START_LIMIT)
        if code != 0:
            raise ClientError(
                f"{sys.executable} ended with {code} instead of starting the daemon: {self._problem()}"
            )

    def _problem(self) -> str:
        for path in (self.folder.problem, self.folder.log):
            with contextlib.suppress(OSError):
                lines = path.read_text(errors="replace").strip().splitlines()
                if lines:
                    return f"{path.name} ends with {lines[-1]!r}"
        return "it left no word"

    def _check_heartbeat(self) -> None:
        end = time.monotonic() + HEARTBEAT_PATIENCE
        with contextlib.suppress(FileNotFoundError):  # it is just ending: the next call starts another
            # A machine that wakes from a sleep finds an old heartbeat, and a daemon that is about to beat.
            while (age := time.time() - self.folder.daemon.stat().st_mtime) > HEARTBEAT_LIMIT:
                if time.monotonic() >= end:
                    raise ClientError(
                        f"the daemon of {self.folder.root} has not done anything for {age:.0f} s"
                    )
                self.poke()
                time.sleep(PAUSE)

    def poke(self) -> None:
        """End the daemon's sleep, so that it looks at once. Not needed for anything but speed."""
        with contextlib.suppress(OSError):
            descriptor = os.open(self.folder.wake, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                os.write(descriptor, b"!")
            finally:
                os.close(descriptor)

    def send(self, kind: str, *, once: str | None = None, **fields: Any) -> str:
        """Leave a command for the daemon; answers its id. With ``once`` as its id it is left at most once.

        :raises ClientError: it cannot be written.
        """
        with _told():
            identifier = once or f"{time.time_ns():020d}-{secrets.token_hex(4)}"
            path = self.folder.commands / f"{identifier}.json"
            data = encode({"v": FORMAT, "kind": kind, **fields})
            if once is None:
                replace_file(path, data, flush=True)
            else:
                create_file(path, data)
        self.poke()
        return identifier

    def call(self, kind: str, **fields: Any) -> str:
        """Send a command and wait for the daemon's answer.

        :raises ClientError: it refused, or did not answer in time (the command may still be applied).
        """
        self.ensure()
        identifier = self.send(kind, ack=True, **fields)
        path = ack_path(self.folder.acks, identifier)
        end = time.monotonic() + ANSWER_LIMIT
        while True:
            lives = self.alive()  # before we look: one that ends answers first
            with _told():
                answer = read_json(path)
            if answer is not None:
                path.unlink(missing_ok=True)
                if not answer.get("ok"):
                    raise ClientError(str(answer.get("message")))
                return str(answer.get("message"))
            if time.monotonic() >= end:
                raise ClientError(f"the daemon did not answer {kind!r} within {ANSWER_LIMIT:g} s")
            if not lives:
                self.ensure()
            time.sleep(PAUSE)

    def table(self) -> dict[str, Any]:
        """The daemon's table. Its rows are shared: they are not the caller's to change.

        :raises Damaged: it is not there or cannot be understood.
        """
        table = self.rows.whole()
        if not isinstance(table.get("nodes"), list):
            raise Damaged(f"{self.folder.table} has no nodes")
        return table


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """Trouble with the folder's files as a ClientError."""
    try:
        yield
    except (OSError, Damaged) as error:
        raise ClientError(str(error)) from error

"""Where a cluster folder keeps what, and how files are written in it.

Purpose: the layout in one place, and two ways to write: replaced as a whole,
or created only where nothing is. A reader never meets half a file.

What it does not do: locks. Each file has one writer (below), so none are needed.

::

    cluster.json            the declared shape; written by the daemon after the first time
    nodes.json              which nodes are down or drained; written by the daemon
    daemon.lock             locked for as long as the daemon lives
    start.lock              locked by who starts a daemon
    daemon.json             the daemon's pid and start; its mtime is the heartbeat
    daemon.problem          why the last daemon could not start
    daemon.log
    wake                    a FIFO: a byte ends the daemon's sleep
    table.json              every job, for observe; written by the daemon
    commands/<id>.json      what operators and cancels ask; consumed by the daemon
    acks/<id>.json          its answers
    jobs/<name>/job.json    what was asked; written by the submitter, before the rename that makes the folder
    jobs/<name>/state.json  what became of it; written by the daemon
    jobs/<name>/secrets/    0700; the file in it 0600; removed when the job has ended
    jobs/<name>/payload/    0700; the runtime and what it is to run, where the channel is no folder; stays with the job
    jobs/<name>/node-0.log  output of the agent of the gang's node 0
    jobs/<name>/work/       where the agents start
    jobs/<name>/start-0000/ claims, pids and exit codes of the nodes, one folder for each start
    trash/                  what is being forgotten

Limits: a local file system; locks and renames on NFS are not to be trusted.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from pathlib import Path

PRIVATE: Final = 0o700
PRIVATE_FILE: Final = 0o600


class Damaged(ValueError):
    """A file is there, but it is not what it should be."""


class Folder:
    """The paths of a cluster folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.cluster = root / "cluster.json"
        self.nodes = root / "nodes.json"
        self.lock = root / "daemon.lock"
        self.start_lock = root / "start.lock"
        self.daemon = root / "daemon.json"
        self.problem = root / "daemon.problem"
        self.log = root / "daemon.log"
        self.wake = root / "wake"
        self.table = root / "table.json"
        self.commands = root / "commands"
        self.acks = root / "acks"
        self.jobs = root / "jobs"
        self.trash = root / "trash"

    def job(self, name: str) -> JobFolder:
        return JobFolder(self.jobs / name)

    def make(self) -> None:
        """Make the folder, for its owner only."""
        self.root.mkdir(parents=True, exist_ok=True, mode=PRIVATE)
        for folder in (self.jobs, self.commands, self.acks, self.trash):
            folder.mkdir(exist_ok=True, mode=PRIVATE)


@dataclass(frozen=True, slots=True)
class JobFolder:
    """The paths of one job."""

    root: Path

    @property
    def spec(self) -> Path:
        return self.root / "job.json"

    @property
    def state(self) -> Path:
        return self.root / "state.json"

    @property
    def secrets(self) -> Path:
        return self.root / "secrets"

    @property
    def secrets_file(self) -> Path:
        return self.secrets / "secrets.json"

    @property
    def payload(self) -> Path:
        return self.root / "payload"

    @property
    def work(self) -> Path:
        return self.root / "work"

    def log(self, rank: int) -> Path:
        return self.root / f"node-{rank}.log"

    def start(self, restart: int) -> Path:
        return self.root / f"start-{restart:04d}"

    def claim(self, restart: int, rank: int) -> Path:
        """Created once by the shim that may run (its pid), or by the daemon so that none may (0)."""
        return self.start(restart) / f"node-{rank}.claim"

    def agent(self, restart: int, rank: int) -> Path:
        return self.start(restart) / f"node-{rank}.agent"

    def exit(self, restart: int, rank: int) -> Path:
        return self.start(restart) / f"node-{rank}.exit"


def encode(value: Any) -> bytes:
    return (json.dumps(value, indent=1, sort_keys=True) + "\n").encode()


def replace_file(path: Path, data: bytes, *, flush: bool = False, mode: int = PRIVATE_FILE) -> None:
    """Put ``data`` at ``path``, whole. With ``flush`` it is on the disk when this returns."""
    staged = _stage(path, data, flush, mode)
    try:
        os.replace(staged, path)
    except BaseException:
        _unlink(staged)
        raise
    if flush:
        _flush_folder(path.parent)


def create_file(path: Path, data: bytes, *, mode: int = PRIVATE_FILE) -> bool:
    """Put ``data`` at ``path`` if nothing is there; False when something is. The file appears whole."""
    staged = _stage(path, data, False, mode)
    try:
        os.link(staged, path)
    except FileExistsError:
        return False
    finally:
        _unlink(staged)
    return True


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in the file; None when there is no file.

    :raises Damaged: it is not a JSON object.
    """
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        value = json.loads(data)
    except ValueError as error:
        raise Damaged(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise Damaged(f"{path} holds a {type(value).__name__}, not an object")
    return value


def _stage(path: Path, data: bytes, flush: bool, mode: int) -> Path:
    # Hidden, so that no listing takes it for a finished file.
    staged = path.parent / f".{path.name}.{secrets.token_hex(6)}"
    descriptor = os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            if flush:
                file.flush()
                os.fsync(file.fileno())
    except BaseException:
        _unlink(staged)
        raise
    return staged


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _unlink(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        path.unlink()

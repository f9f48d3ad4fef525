"""The job's side of a simulated run: it claims its life by the real rules, and leaves the records that ranks leave.

Purpose: :func:`claim` is :func:`airflow_gpu.runtime.claim.claim` itself, on the
files in memory; a fence, a twin or a restart that comes too late is told by
that code and no other. What ranks write about themselves (ends, notice, first
failure, checkpoints) is written here, in the formats of
``docs/run-directory.md``.

What it does not do: hash. A simulated checkpoint is a manifest without files.
"""

from __future__ import annotations

import json
import posixpath
from collections.abc import Callable
from typing import Any, Literal
from unittest import mock

from airflow_gpu.gang.entries import iso
from airflow_gpu.rundir import store
from airflow_gpu.runtime import checkpoint
from airflow_gpu.runtime import claim as rules
from airflow_gpu.runtime.claim import AlreadyDone, Claim, Entry, NotClaimed
from airflow_gpu.runtime.files import Exists, Missing
from airflow_gpu.runtime.job import Job, Node
from tests.faults.disk import Disk

__all__ = ["AlreadyDone", "NotClaimed", "Records", "claim"]

NODES = 2
"""Nodes of every simulated gang, with one rank each: enough for half of it to be missing."""


class RunFiles:
    """The channel half of one run, as :class:`airflow_gpu.runtime.files.Channel` wants it."""

    def __init__(self, disk: Disk, root: str) -> None:
        self.disk, self.root = disk, root

    shared = False  # what lies there is read through this class, not through a file system

    def path(self, name: str) -> str:
        return f"{self.root}/{name}"

    def folder(self, name: str) -> str:
        return self.path(name)

    def exists(self, name: str) -> bool:
        return self.path(name) in self.disk.files

    def remove(self, name: str) -> None:
        self.disk.delete(self.path(name))

    def create(self, name: str, data: bytes, *, private: bool = False) -> None:
        try:
            self.disk.create(self.path(name), data)
        except store.Exists:
            raise Exists(name) from None

    def replace(self, name: str, data: bytes) -> None:
        self.disk.put(self.path(name), data)

    def read(self, name: str) -> bytes:
        try:
            return self.disk.files[self.path(name)]
        except KeyError:
            raise Missing(name) from None

    def names(self, folder: str) -> list[str]:
        return self.disk.names(self.path(folder))


def _utc(clock: Callable[[], float]) -> Callable[[], str]:
    return lambda: iso(clock())


def patches(clock: Callable[[], float]) -> list[Any]:
    """What of the runtime looks at the time of day."""
    return [mock.patch.object(rules, "utc", new=_utc(clock))]


def claim(
    disk: Disk, root: str, attempt: int, job_id: str, restart: int, others: Callable[[str], Disk]
) -> Claim:
    """Node 0 of a start claims its life. ``others``: the files of another channel, by its path as jobs see it.

    :raises NotClaimed: a fence, a twin, a newer attempt: it must leave.
    :raises AlreadyDone: the work is done.
    """
    folder = f"{root}/payload/{attempt:04d}"
    job = Job.of(json.loads(disk.files[f"{folder}/job.json"]), folder)
    node = Node(rank=0, job_id=job_id, restart=restart, address="127.0.0.1", host="node-0")
    seed: Any = None
    if job.seed is not None:
        _, name, below = job.seed.channel.split("/", 2)
        seed = RunFiles(others(f"/{name}"), below)
    channel: Any = RunFiles(disk, root)
    return rules.claim(channel, job, node, "127.0.0.1:1", lambda line: None, seed)


class Records:
    """What the ranks of one life write."""

    def __init__(self, disk: Disk, root: str, life: int, clock: Callable[[], float]) -> None:
        self._files, self.life, self._clock = RunFiles(disk, root), life, clock

    def _create(self, name: str, body: dict[str, Any]) -> None:
        try:
            self._files.create(name, json.dumps({"v": 1, "life": self.life, **body}).encode())
        except Exists:
            pass

    def end(self, node: int, code: int | None, signal: str | None = None) -> None:
        """How the rank of a node ended."""
        rank = {"rank": node, "local_rank": 0, "exit_code": code, "signal": signal}
        body = {"node": node, "host": f"node-{node}", "ranks": [rank], "at": iso(self._clock())}
        self._create(f"lives/{self.life:04d}/nodes/{node:04d}.json", body)

    def notice(self, cause: str) -> None:
        self._create(f"lives/{self.life:04d}/notice.json", {"node": 0, "source": "SIGTERM", "cause": cause})

    def failure(self, cause: str, message: str, code: int | None = None) -> None:
        body = {"cause": cause, "rank": 1, "node": 1, "host": "node-1", "exit_code": code, "message": message}
        self._create(f"lives/{self.life:04d}/failure.json", body)

    def result(self) -> None:
        self._files.replace(f"lives/{self.life:04d}/result.json", b'{"loss": 0.5}')

    def progress(self, step: int, total: int) -> None:
        body = json.dumps({"step": step, "total": total}).encode()
        self._files.replace(f"lives/{self.life:04d}/progress.json", body)

    def checkpoint(self, step: int) -> None:
        name = posixpath.join(checkpoint.life_folder(self.life), checkpoint.save_name(step))
        self._create(f"{name}/manifest.json", {"step": step, "world_size": NODES, "files": []})

    def superseded(self, attempt: int) -> Entry | Literal[False] | None:
        """What ends this life, as the runtime looks for it; None when it cannot be read, False when nothing does."""
        over = rules.superseded(self._files, self.life, attempt)  # type: ignore[arg-type]
        return False if over is None else over[1]

"""The local target passes the whole suite: this machine as 2 nodes x 2 pretended GPUs."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from airflow_gpu.targets.base import JobRef
from airflow_gpu.targets.local.admin import Admin
from airflow_gpu.targets.local.config import LocalConfig
from airflow_gpu.targets.local.target import LocalTarget
from tests.conformance.suite import Scenarios


class LocalBed:
    """A cluster folder of its own for each test."""

    nodes = 2
    gpus_per_node = 2
    limit = 90.0
    pace = 1.0

    def __init__(self, path: Path) -> None:
        self.path = path
        self.target = LocalTarget("local", self.config())
        self.admin = Admin(path)
        self.stopped: int | None = None

    def config(self, **more: object) -> LocalConfig:
        return LocalConfig.from_mapping(
            {
                "path": str(self.path),
                "nodes": 2,
                "gpus_per_node": 2,
                "accelerator": "pretend",
                "grace": 15,
                **more,
            }
        )

    async def preempt(self, job: str, *, notice: bool) -> None:
        await asyncio.to_thread(self.admin.preempt, job, notice)

    async def kill_node(self, job: str) -> str:
        node = int(self.admin.status()["jobs"][job]["held"][-1][0])
        await asyncio.to_thread(self.admin.kill_node, node)
        await asyncio.to_thread(self.admin.restore_node, node)
        return str(node)

    async def end_outside(self, job: JobRef) -> None:
        await self.target.cancel(job, grace=20, since=time.time())

    async def requeueing(self) -> LocalTarget:
        return LocalTarget("local", self.config(requeue=True))

    async def obscure(self, job: str) -> None:
        """The daemon is stopped in its tracks, and its table says a word that nobody knows."""
        pid = int(self.admin.status()["daemon"]["pid"])
        os.kill(pid, signal.SIGSTOP)
        self.stopped = pid
        path = self.target._client.folder.table
        table = json.loads(path.read_text())
        table["jobs"][job]["native"] = "WIBBLE"
        path.write_text(json.dumps(table))

    async def clear(self) -> None:
        if self.stopped is not None:
            os.kill(self.stopped, signal.SIGCONT)
            while "WIBBLE" in self.target._client.folder.table.read_text():
                await asyncio.sleep(0.02)
        self.stopped = None

    async def submissions(self, job: str) -> int:
        return sum(name == job for name in self.admin.status()["jobs"])


@pytest.fixture
def bed(tmp_path: Path) -> Iterator[LocalBed]:
    yield from closed(LocalBed(tmp_path / "cluster"))


def closed(bed: LocalBed) -> Iterator[LocalBed]:
    """The bed, and the end of its cluster."""
    try:
        yield bed
    finally:
        if bed.stopped is not None:
            os.kill(bed.stopped, signal.SIGCONT)
        bed.admin.stop(gangs=True, grace=0)


class TestLocal(Scenarios):
    """See the suite."""

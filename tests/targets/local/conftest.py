"""A real local cluster for each test: a real daemon and real processes in a folder of its own.

The agent is a shell script that the test writes: the target runs
``<python> <payload>/runtime.pyz agent <payload>/job.json``, and ``python`` is
``/bin/sh`` here. Everything is ended afterwards, by pid.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from airflow_gpu.gang.run import State
from airflow_gpu.targets.base import Job, JobRef, Sighting
from airflow_gpu.targets.local import Admin, LocalConfig, LocalTarget
from airflow_gpu.targets.local.files import Folder, read_json
from airflow_gpu.targets.local.processes import Ident, Marker, read_marker, read_process, send

PATIENCE = 60.0
"""Seconds for anything that must happen: bounds a hang, measures nothing."""

STAY = "while :; do sleep 0.1; done\n"
SAVE = "trap 'echo $GANG_RESTART.$GANG_NODE_RANK >> $MARKS/notices; exit 75' TERM\necho x > $MARKS/up-$GANG_RESTART-$GANG_NODE_RANK\n"
STUBBORN = "trap '' TERM\n"


class Bed:
    """One cluster folder, and what a test does with it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.path = root / "cluster"
        self.marks = root / "marks"
        self.marks.mkdir()
        self.folder = Folder(self.path)
        self.admin = Admin(self.path)
        self.used = False

    def config(self, **fields: Any) -> LocalConfig:
        given: dict[str, Any] = {
            "path": self.path,
            "python": "/bin/sh",
            "nodes": 2,
            "gpus_per_node": 2,
            "cpus": 4,
            "accelerator": "H100",
            "grace": 5.0,
            "straggler": 2.0,
            **fields,
        }
        return LocalConfig(**given)

    def target(self, **fields: Any) -> LocalTarget:
        self.used = True
        return LocalTarget("here", self.config(**fields))

    def job(self, script: str, name: str = "fit-1", **fields: Any) -> Job:
        """A job whose agents run this shell script, with $MARKS to leave traces in."""
        payload = self.root / "payload" / name
        payload.mkdir(parents=True, exist_ok=True)
        (payload / "runtime.pyz").write_text(f"export MARKS={self.marks}\n{script}")
        (payload / "job.json").write_text("{}")
        given: dict[str, Any] = {
            "name": name,
            "labels": {"airflow-gpu/incarnation": "abcdefgh23", "airflow-gpu/installation": "test"},
            "attempt": 1,
            "digest": "d1",
            "nodes": 1,
            "gpus_per_node": 1,
            "ranks_per_node": 1,
            "payload": str(payload),
            "channel": str(self.root / "channel" / name),
            "time_limit": 3600.0,
            "argv": ("/bin/sh", f"{payload}/runtime.pyz", "agent", f"{payload}/job.json"),
            **fields,
        }
        return Job(**given)

    @staticmethod
    def ref(job: Job) -> JobRef:
        return JobRef(job.name, job.labels, job.attempt, job.digest)

    async def look(self, target: LocalTarget, job: Job) -> Sighting:
        return (await target.observe([self.ref(job)]))[job.name]

    async def until(
        self, target: LocalTarget, job: Job, wanted: State | Callable[[Sighting], bool]
    ) -> Sighting:
        """Observe until this state, or until the condition holds; an end that was not wanted fails at once."""
        end = time.monotonic() + PATIENCE
        while True:
            seen = await self.look(target, job)
            if seen.state is wanted or (not isinstance(wanted, State) and wanted(seen)):
                if seen.state.ended:
                    assert not self.processes(job), f"{seen} was reported while processes are left"
                return seen
            assert not seen.state.ended, f"wanted {wanted}, ended as {seen}"
            assert time.monotonic() < end, f"wanted {wanted}, still {seen}"
            await asyncio.sleep(0.03)

    async def appears(self, *names: str) -> None:
        """Wait for traces that agents leave."""
        await self.holds(lambda: all((self.marks / name).exists() for name in names), f"{names} in marks")

    async def holds(self, condition: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < end, f"never: {what}"
            await asyncio.sleep(0.03)

    def notices(self) -> list[str]:
        path = self.marks / "notices"
        return sorted(path.read_text().split()) if path.exists() else []

    def id_of(self, job: Job) -> str:
        spec = read_json(self.folder.job(job.name).spec)
        return "" if spec is None else str(spec["id"])

    def processes(self, job: Job) -> dict[Ident, Marker]:
        """The living processes that carry the job's mark."""
        return {ident: mark for ident, mark in marked().items() if mark.job == self.id_of(job)}

    def kill_processes(self, job: Job) -> None:
        """SIGKILL everything of a job behind the daemon's back."""
        for ident in self.processes(job):
            send(ident, signal.SIGKILL)

    def daemon_pid(self) -> int:
        about = read_json(self.folder.daemon)
        assert about is not None
        return int(about["pid"])

    async def kill_daemon(self) -> int:
        """SIGKILL, as nothing can prepare for it; answers the pid it had."""
        pid = self.daemon_pid()
        os.kill(pid, signal.SIGKILL)
        await self.holds(lambda: (p := read_process(pid)) is None or p.dead, "the daemon is dead")
        return pid

    def end(self) -> None:
        """End everything that this cluster started, by pid, and see that it is gone."""
        if not self.folder.cluster.exists():
            return
        ids = {self.id_of(_named(name)) for name in os.listdir(self.folder.jobs)}
        try:
            self.admin.stop(gangs=True)
        finally:
            for ident, mark in marked().items():
                if mark.job in ids:
                    send(ident, signal.SIGKILL)


def _named(name: str) -> Job:
    return Job(name, {}, 1, "", 1, 0, 1, "", "", 1.0, ())


def marked() -> dict[Ident, Marker]:
    """Every living process on this machine that is part of some gang."""
    found = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (process := read_process(int(entry))) and not process.dead:
            mark = read_marker(process.ident.pid)
            if mark is not None:
                found[process.ident] = mark
    return found


@pytest.fixture
def bed(tmp_path: Path) -> Iterator[Bed]:
    made = Bed(tmp_path)
    yield made
    made.end()
